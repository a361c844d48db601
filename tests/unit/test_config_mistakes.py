"""Every mistake a user can make in a config ends in one message that says what, where, got, expected and what
to do.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jetrl_jax.config.load import config_from_dict, load_config
from jetrl_jax.errors import UserError


def refuse(directory: Path, text: str | bytes, *overrides: str) -> str:
    """The message with which a file (and overrides) is refused; checks what holds for every message."""
    path = directory / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value).replace(f"{directory}/", "")
    assert not re.search(r"pydantic|https?:|Section\b|RunConfig|Traceback|Input should be|ctx", message), (
        message
    )
    assert all(len(line) <= 160 for line in message.splitlines()), message
    return message


def problems(message: str) -> list[str]:
    """The paragraphs of a message, one per problem."""
    return message.split("\n\n")[1:-1]


ONE_PROBLEM = {
    "unknown key": (
        "rollout:\n  grup_size: 8",
        "run.yaml:2: rollout.grup_size: unknown key\n  hint      did you mean rollout.group_size?",
    ),
    "unknown section": (
        "rolout:\n  group_size: 8",
        "run.yaml:1: rolout: unknown key\n  hint      did you mean rollout?",
    ),
    "key of another section": ("run:\n  group_size: 8", "did you mean rollout.group_size?"),
    "key without its section": ("temperature: 1.0", "did you mean rollout.temperature?"),
    "dotted key": ("rollout.group_size: 8", "write group_size under rollout:, indented"),
    "dashes for underscores": ("run:\n  samples-per-step: 8", "did you mean run.samples_per_step?"),
    "key of another trainer": ("rollout:\n  num_generations: 8", "did you mean rollout.group_size?"),
    "learning rate's short name": ("optimizer:\n  lr: 1e-6", "did you mean optimizer.learning_rate?"),
    "ambiguous key": ("every_steps: 8", "did you mean eval.every_steps or checkpoint.every_steps?"),
    "key like no other": ("eval:\n  qqqq: 8", "hint      eval has: every_steps, prompts, samples"),
    "unknown key in a list": (
        "rewards:\n- name: task\n- wieght: 2",
        "run.yaml:3: rewards.1.wieght: unknown key\n  hint      did you mean rewards.1.weight?",
    ),
    "text for a number": (
        "rollout:\n  group_size: sixteen",
        "run.yaml:2: rollout.group_size: wrong type\n  got       sixteen (text)\n  expected  a whole "
        "number, at least 2\n"
        "  meaning   Completions of one prompt (G); a group of one has no advantage. Default: 16.",
    ),
    "quoted 1e-6": (
        'optimizer:\n  learning_rate: "1e-6"',
        'got       "1e-6" (text, because it stands in quotes)\n  expected  a number, greater than 0\n  '
        "hint      remove the quotes: 1e-6",
    ),
    "underscores in a number": (
        "rollout:\n  prompts_per_step: 1_000",
        "got       1_000 (text)\n  expected  a whole number, at least 1\n  hint      write 1000",
    ),
    "comma in a number": (
        "optimizer:\n  learning_rate: 0,5",
        "got       0,5 (text)\n  expected  a number, greater than 0\n  hint      write 0.5",
    ),
    "fraction for a whole number": (
        "rollout:\n  prompts_per_step: 1.5",
        "got       1.5 (a number)\n  expected  a whole number, at least 1",
    ),
    "1e3 for a whole number": (
        "rollout:\n  prompts_per_step: 1e3",
        "got       1e3 (a number)\n  expected  a whole number, at least 1\n  hint      write 1000",
    ),
    "boolean for a whole number": (
        "rollout:\n  prompts_per_step: true",
        "got       true (a boolean)\n  expected  a whole number, at least 1",
    ),
    "boolean for a number": (
        "rollout:\n  temperature: true",
        "got       true (a boolean)\n  expected  a number, at least 0.001",
    ),
    "number for a boolean": (
        "run:\n  tensorboard: 1",
        "got       1 (a whole number)\n  expected  true or false",
    ),
    "yes for true": (
        "run:\n  tensorboard: yes",
        "got       yes (text)\n  expected  true or false\n  hint      write true: yes, no, on and off "
        "are text",
    ),
    "off for false": ("numerics:\n  exact: off", "hint      write false: yes, no, on and off are text"),
    "quoted true": ('run:\n  tensorboard: "true"', "hint      remove the quotes"),
    "number for text": (
        "run:\n  directory: 2024",
        'got       2024 (a whole number)\n  expected  text, not empty\n  hint      put it in quotes: "2024"',
    ),
    "braces for text": (
        "task:\n  prompt_template: {prompt}",
        "hint      text that begins with { or [ needs quotes",
    ),
    "list for a section": ("rollout: [1, 2]", "got       [1, 2] (a list)\n  expected  a section of fields"),
    "section for a number": (
        "seed: {a: 1}",
        'got       {"a": 1} (a section)\n  expected  a whole number, at least 0',
    ),
    "section for a list": (
        "rewards:\n  name: task",
        'expected  a list of sections, not empty\n  hint      each entry of a list begins with "- "',
    ),
    "no space after a colon": (
        "rollout:\n  group_size:8",
        "got       group_size:8 (text)\n  expected  a section of fields\n  hint      a space is "
        "missing after the colon",
    ),
    "nothing under a section": (
        "rollout:",
        "got       nothing (null)\n  expected  a section of fields\n  hint      remove the line, or "
        "put fields under it",
    ),
    "nothing for a value": (
        "seed:",
        "got       nothing (null)\n  expected  a whole number, at least 0\n  hint      remove the line "
        "for the default",
    ),
    "empty list of rewards": (
        "rewards: []",
        "rewards: out of range\n  got       []\n  expected  a list of sections, not empty",
    ),
    "empty text": (
        'run:\n  directory: ""',
        'run.directory: out of range\n  got       ""\n  expected  text, not empty',
    ),
    "bad choice": (
        "precision:\n  preset: fp8-unified",
        "run.yaml:2: precision.preset: not one of the choices\n  got       fp8-unified\n"
        "  expected  one of fp32, bf16, fp16, fp8_unified, fp8_forward, fp8_rollout_only\n  hint      "
        "did you mean fp8_unified?",
    ),
    "bad choice that may be null": (
        "eval:\n  verifier: mean",
        "exact_match, gsm8k, boxed, last_number, math_verify, or null",
    ),
    "unknown variant": (
        "algorithm: gprpo",
        "run.yaml:1: algorithm.name: not one of the choices\n  got       gprpo\n"
        "  expected  one of grpo, rloo, reinforce_pp, dapo, dr_grpo, gspo, cispo\n  hint      did you "
        "mean grpo?",
    ),
    "unknown variant of a section": (
        "rollout:\n  engine:\n    kind: vlm\n    max_num_seqs: 3",
        "run.yaml:3: rollout.engine.kind: not one of the choices\n  got       vlm\n  expected  one of "
        "jax, vllm,",
    ),
    "variant that is no text": (
        "task:\n  kind: 3",
        "run.yaml:2: task.kind: not one of the choices\n  got       3",
    ),
    "field of another variant": (
        "rollout:\n  engine:\n    kind: jax\n    max_num_seqs: 4",
        "run.yaml:4: rollout.engine.max_num_seqs: max_num_seqs belongs to kind vllm, vllm_server; this "
        "is kind jax\n"
        "  got       4\n  expected  the field left out, or kind vllm, vllm_server\n  meaning   Number "
        "of sequences that",
    ),
    "field of another model": (
        "model:\n  path: a\n  num_heads: 4",
        "num_heads belongs to a new model; this is a checkpoint",
    ),
    "field that a variant needs": (
        "task:\n  kind: jsonl",
        "run.yaml:1: task.path: missing\n  got       nothing\n  expected  text, not empty",
    ),
    "section that moved": (
        "vllm:\n  max_num_seqs: 3",
        "run.yaml:1: vllm: unknown key\n  hint      did you mean rollout.engine?",
    ),
    "field that moved": (
        "rollout:\n  slots: 3",
        "run.yaml:2: rollout.slots: unknown key\n  hint      did you mean rollout.engine.slots?",
    ),
    "choice in a list": (
        "precision:\n  overrides: [{pattern: layers.0.*, format: fp16}]",
        "precision.overrides.0.format: not one of the choices\n  got       fp16",
    ),
    "missing field": (
        "precision:\n  overrides:\n  - {format: bf16}",
        "run.yaml:3: precision.overrides.0.pattern: missing\n  got       nothing\n  expected  text, "
        "not empty",
    ),
    "duplicate key": (
        "rollout:\n  group_size: 4\n  group_size: 8",
        "run.yaml:3: rollout.group_size: stands twice\n  got       a second group_size; the first: "
        "run.yaml:2\n"
        "  expected  each key once\n  hint      keep one of them",
    ),
    "duplicate section": (
        "rollout:\n  prompts_per_step: 4\nrun:\n  steps: 3\nrollout:\n  prompts_per_step: 8",
        "run.yaml:5: rollout: stands twice\n  got       a second rollout; the first: run.yaml:1",
    ),
    "key that is a number": ("seed: 1\n1: 2", "run.yaml:2: a key that is not text\n  got       1"),
    "key that is a boolean": (
        "task:\n  options: {true: 2}",
        "run.yaml:2: task.options: a key that is not text",
    ),
    "merge key": ("run:\n  <<: {steps: 3}", "run.<<: unknown key"),
    "not a number": ("optimizer:\n  learning_rate: .nan", "not a finite number\n  got       .nan"),
    "overflowing number": ("optimizer:\n  learning_rate: 1e999", "not a finite number\n  got       1e999"),
    "infinity in free options": (
        "task:\n  options: {a: [.inf]}",
        "task.options: cannot be written to a config file",
    ),
    "number of 400 digits": (f"seed: {'9' * 400}", "seed: out of range\n  got       999"),
    "seed beyond int32": (
        "seed: 3000000000",
        "seed: out of range\n  got       3000000000\n  expected  a whole number, at least 0, at most "
        "2147483647",
    ),
    "lone surrogate": (r'run: {directory: "a\ud800"}', "half a character"),
    "group of one": (
        "rollout:\n  group_size: 1",
        "rollout.group_size: out of range\n  got       1\n  expected  a whole number, at least 2",
    ),
    "temperature 0": (
        "rollout:\n  temperature: 0",
        "rollout.temperature: out of range\n  got       0\n  expected  a number, at least 0.001",
    ),
    "negative temperature": (
        "rollout:\n  temperature: -1.0",
        "got       -1.0\n  expected  a number, at least 0.001",
    ),
    "share above 1": (
        "warm_start: {steps: 2, noise: 1.5}",
        "got       1.5\n  expected  a number, at least 0 and at most 1",
    ),
    "top_p": (
        "rollout:\n  top_p: 0.9",
        "rollout.top_p: training rollouts cannot be truncated\n  got       0.9\n  expected  1",
    ),
    "top_k": (
        "rollout:\n  top_k: 50",
        "rollout.top_k: training rollouts cannot be truncated\n  got       50\n  expected  0 (off)",
    ),
}


@pytest.mark.parametrize("case", ONE_PROBLEM)
def test_config_mistake_is_told_once_with_its_place(case: str, tmp_path: Path) -> None:
    text, expected = ONE_PROBLEM[case]
    message = refuse(tmp_path, text)
    assert message.startswith("a problem in the config\n\nrun.yaml:")
    assert re.sub(r"\s+", " ", expected) in re.sub(r"\s+", " ", message), message
    assert len(problems(message)) == 1, message


SYNTAX = {
    "tab": ("run:\n\tsteps: 3", "run.yaml:2:1: YAML syntax", "found character '\\t'"),
    "open bracket": ("run: [1, 2\nseed: 3", "run.yaml:2:", "while parsing a flow sequence"),
    "open quote": (
        'run:\n  directory: "abc\nseed: 1\n',
        "run.yaml:2:14: YAML syntax",
        "while scanning a quoted scalar",
    ),
    "indentation": (
        "run:\n  steps: 3\n seed: 1",
        "run.yaml:3:2: YAML syntax",
        "indented by the same number of spaces",
    ),
    "two keys on a line": (
        "run: steps: 3",
        "run.yaml:1:11: YAML syntax",
        "mapping values are not allowed here",
    ),
    "no colon": ("run:\n  steps: 3\n  seed\n", "run.yaml:3:3: YAML syntax", "could not find expected ':'"),
    "glob without quotes": (
        "precision:\n  overrides:\n  - {pattern: *.down_proj, format: bf16}",
        "run.yaml:3:",
        "begins with one of * & !",
    ),
    "alias": (
        "seed: &one 1\nrun: {steps: *one}",
        "run.yaml:1:7: YAML syntax: anchors and aliases",
        "have no place in a config",
    ),
    "tag": (
        "seed: !!python/object:os.system 1",
        "run.yaml:1:7: YAML syntax: tags (!) have no place",
        "needs quotes",
    ),
    "two documents": ("seed: 1\n---\nseed: 2", "run.yaml:2:1: YAML syntax: ", "but found another document"),
    "at sign": (
        "run:\n  directory: @x",
        "run.yaml:2:14: YAML syntax",
        "found character '@' that cannot start any token",
    ),
    "unknown escape": (
        r'run: {directory: "a\q"}',
        "run.yaml:1:21: YAML syntax",
        "found unknown escape character 'q'",
    ),
    "escape beyond Unicode": (
        r'run: {directory: "a\U00110000"}',
        "run.yaml:1: not YAML: ",
        "not in range",
    ),
    "depth": ("seed: " + "[" * 5000, "run.yaml:1: not YAML: ", "recursion"),
    "control character": (
        "seed: 1\nrun: \0",
        "run.yaml:2: not YAML: unacceptable character #x0000",
        "not allowed",
    ),
    "Latin-1": (
        "seed: 1\n# caf\xe9\n".encode("latin-1"),
        "run.yaml:2: not text: got the byte 0xe9",
        "expected YAML in UTF-8",
    ),
    "UTF-16": (
        "seed: 1\n".encode("utf-16"),
        "run.yaml:1: not text: got the byte 0xff",
        "expected YAML in UTF-8",
    ),
    "too large": (
        b"#" * (1 << 20) + b"\nseed: 1",
        "run.yaml: got more than 1048576 bytes",
        "expected a YAML config",
    ),
    "empty": ("", "run.yaml: not a mapping: got no field", "sections such as"),
    "only comments": ("# seed: 1\n\n", "run.yaml: not a mapping: got no field", "sections such as"),
    "list": ("- seed: 1", "run.yaml:1: not a mapping: got a list, expected", "sections such as"),
    "one word": (
        "\nseed",
        "run.yaml:2: not a mapping: got the value seed, expected",
        "sections such as",
    ),
}


@pytest.mark.parametrize("case", SYNTAX)
def test_config_file_that_is_no_yaml_mapping_is_refused(case: str, tmp_path: Path) -> None:
    text, place, hint = SYNTAX[case]
    message = re.sub(r"\n {12}", " ", refuse(tmp_path, text))
    assert message.startswith(place), message
    assert hint in message, message


def test_config_syntax_error_shows_the_line_and_a_caret_under_it(tmp_path: Path) -> None:
    assert "\n\n      directory: @x\n                 ^\n" in refuse(tmp_path, "run:\n  directory: @x")


def test_config_file_that_is_missing_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "tiny_cpu.yaml").write_text("seed: 1")
    missing = "cannot be read: No such file or directory."
    for path, expected in {
        f"{tmp_path}/tiny_cup.yaml": f"{missing} Did you mean {tmp_path}/tiny_cpu.yaml?",
        f"{tmp_path}/qqqqqqqq.yaml": missing,
        f"{tmp_path}": "cannot be read: Is a directory.",
        "": "cannot be read: Is a directory.",
        "a\0b": "cannot be read: embedded null byte.",
    }.items():
        with pytest.raises(UserError) as caught:
            load_config(path, [])
        name = path if path.isprintable() and path else ascii(path)
        assert str(caught.value) == f"{name}: {expected}"


def test_config_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(UserError, match=r"a.yaml: cannot be read: Permission denied"):
        load_config(tmp_path / "a.yaml", [])


OVERRIDES = {
    "no equals sign": (
        "rollout.prompts_per_step",
        '--set rollout.prompts_per_step: not an override\n  got       "rollout.prompts_per_step"\n  '
        "expected  KEY=VALUE",
    ),
    "no key": ("=3", "--set =3: not an override"),
    "undecodable key": ("run.\udce9=3", "--set run.\\udce9=3: not an override"),
    "empty part": ("rollout..slots=3", "--set rollout..slots=3: not an override"),
    "unknown key": (
        "rollout.grup_size=3",
        "--set rollout.grup_size=3: rollout.grup_size: unknown key\n  hint      did you mean "
        "rollout.group_size?",
    ),
    "unknown section": ("rolout.group_size=3", "rolout: unknown key\n  hint      did you mean rollout?"),
    "below a value": ("seed.a=3", '--set seed.a=3: seed: wrong type\n  got       {"a": 3} (a section)'),
    "wrong type": (
        "rollout.prompts_per_step=many",
        "--set rollout.prompts_per_step=many: rollout.prompts_per_step: wrong type\n  got       many (text)",
    ),
    "boolean": ("numerics.exact=on", "hint      write true: yes, no, on and off are text"),
    "nothing": ("rollout.prompts_per_step=", "--set rollout.prompts_per_step=: not an override"),
    "YAML": ("task.options.a=[1", "--set task.options.a=[1:1:3: YAML syntax: while parsing a flow"),
    "no such entry": (
        "rewards.1.weight=2",
        "rewards.1: no such entry\n  expected  one of the 1 entries of rewards, from 0 on; rewards=[...] is the whole list",
    ),
    "entry by name": (
        "rewards.task.weight=2",
        "rewards.task: no such entry\n  expected  one of the 1 entries of rewards",
    ),
    "list with a bad entry": (
        "rewards=[{name: task}, {nmae: a}]",
        "rewards.1.nmae: unknown key\n  hint      did you mean rewards.1.name?",
    ),
    "duplicate key": ("task.options={a: 1, a: 2}", "task.options.a: stands twice"),
    "undecodable text": ("run.directory=a\udce9", "run.directory: half a character"),
    "unknown variant": (
        "correction.weight=mask",
        "--set correction.weight=mask: correction.weight.kind: not one of the choices",
    ),
    "field of another variant": (
        "rollout.engine.max_num_seqs=4",
        "--set rollout.engine.max_num_seqs=4: rollout.engine.max_num_seqs: max_num_seqs belongs to "
        "kind vllm, vllm_server; this is",
    ),
    "field that another variant needs": (
        "task.kind=jsonl",
        "--set task.kind=jsonl: task.path: missing\n  got       nothing",
    ),
    "field that moved": (
        "vllm.max_num_seqs=4",
        "vllm: unknown key\n  hint      did you mean rollout.engine?",
    ),
    "fit": (
        "rollout.top_p=0.9",
        "--set rollout.top_p=0.9: rollout.top_p: training rollouts cannot be truncated",
    ),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_override_mistake_is_told_with_the_override(case: str, tmp_path: Path) -> None:
    override, expected = OVERRIDES[case]
    message = refuse(tmp_path, "seed: 1", override)
    assert expected in message, message
    assert len(problems(message)) == 1, message


def test_all_problems_of_a_config_are_told_at_once_in_reading_order(tmp_path: Path) -> None:
    text = "sed: 1\nrollout:\n  group_size: 1\n  temperature: hot\n  group_size: 4\n"
    text += "model:\n  num_heads: 6\n  num_kv_heads: 4\nrun:\n  stps: 3\n"
    message = refuse(tmp_path, text, "numerics.exact=yes", "a", "precision.preset=fp9", "eval.sampels=3")
    heads = [paragraph.splitlines()[0] for paragraph in problems(message)]
    assert heads == [
        "run.yaml:1: sed: unknown key",
        "run.yaml:4: rollout.temperature: wrong type",
        "run.yaml:5: rollout.group_size: stands twice",
        "run.yaml:8: model.num_kv_heads: query heads cannot be shared evenly among key/value heads",
        "run.yaml:10: run.stps: unknown key",
        "--set numerics.exact=yes: numerics.exact: wrong type",
        "--set a: not an override",
        "--set precision.preset=fp9: precision.preset: not one of the choices",
        "--set eval.sampels=3: eval.sampels: unknown key",
    ]
    assert message.startswith("9 problems in the config\n\n")
    assert message.endswith("\n\nNothing was started. All fields: python -m jetrl_jax config")


@pytest.mark.parametrize(
    "text",
    [
        "task: {knd: jsonl, path: a.jsonl}",
        "task: {kind: jsnl, path: a.jsonl}",
        "model: {pth: a, num_heads: 3}",
        "rollout: {grup_size: 8, max_completion_tokens: 4096}",  # no rule looks at a section with a mistake
        "{run: {prompts_per_step: 128}, algorithm: {minibatches: 64}}",
        "rewards: [{name: tasks}]",
    ],
)
def test_one_mistake_does_not_cause_a_second_complaint(text: str, tmp_path: Path) -> None:
    assert len(problems(refuse(tmp_path, text))) == 1


def test_a_value_is_shown_as_it_was_written_and_long_ones_are_cut(tmp_path: Path) -> None:
    assert "got       0x1G (text)" in refuse(tmp_path, "seed: 0x1G")
    # no escape sequence reaches the terminal
    assert 'got       "a\\u001b[31m' in refuse(tmp_path, r'seed: "a\e[31m"')
    line = next(line for line in refuse(tmp_path, f"seed: {'a' * 500}").splitlines() if "got" in line)
    assert line.endswith("aaa... (text)") and len(line) < 90


def test_config_from_dict_refuses_with_the_same_words() -> None:
    with pytest.raises(UserError, match=r"the config: rollout.group_size: out of range\n  got       1\n"):
        config_from_dict({"rollout": {"group_size": 1}})
    with pytest.raises(UserError, match=r"task\.options: a key that is not text"):
        config_from_dict({"task": {"options": {1: 2}}})
    with pytest.raises(UserError, match=r"task.options: cannot be written to a config file"):
        config_from_dict({"task": {"options": {"a": [object()]}}})
    with pytest.raises(UserError, match="a key that is not text"):
        config_from_dict({1: 2})
