"""Tokenizers against transformers on the same files: ids, templates, special tokens, what is saved."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jetrl_jax.collect.prompts import Prompt
from jetrl_jax.errors import UserError
from jetrl_jax.tasks.base import Example
from jetrl_jax.text.tokenizer import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, build_tokenizer
from tests.sections import tokenizer_section

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers (extra hf) is not installed"
)
ALPHABET = tokenizer_section().characters
TEXTS = [
    "12+34=",
    "hello world",
    "  two  blanks ",
    "héllo\n\tü 😀 漢字 <b>x</b> <eos>",
    "a" * 50,
    "\x00\x7f\r\n",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif " "%}{% endif %}"
)  # fmt: skip
SPECIALS = ["<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]


def write_files(
    folder: Path,
    *,
    bos=False,
    eos=False,
    template: str | None = TEMPLATE,
    config=None,
    generation=None,
    **settings,
) -> Path:
    """A byte-level BPE tokenizer with the files and habits of a checkpoint's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["hello world, the answer is 42", "what is the answer", "user assistant system think"] * 20, trainer
    )
    if bos or eos:
        parts = ["<|bos|>"] * bos + ["$A"] + ["<|endoftext|>"] * eos
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(parts), special_tokens=[("<|bos|>", 0), ("<|endoftext|>", 1)]
        )
    folder.mkdir(exist_ok=True, parents=True)
    backend.save(str(folder / "tokenizer.json"))
    written = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    written |= (
        ({"bos_token": "<|bos|>"} if bos else {})
        | ({"chat_template": template} if template else {})
        | settings
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in written.items() if v is not None})
    )
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def auto(folder: Path):
    transformers = pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def test_character_ids_are_the_alphabets_order():
    tokenizer = CharacterTokenizer("ab=\n")
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (6, 0, (1,))
    assert tokenizer.encode("a=b\n") == tokenizer.encode_prompt("a=b\n") == [2, 4, 3, 5]
    assert tokenizer.decode([0, 2, 1, 4, 3, 0]) == "a=b"
    assert tokenizer.decode([2, 6, 3, 99]) == "a\ufffdb\ufffd"
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_character_raises_naming_the_character():
    with pytest.raises(UserError, match=r"character 'X' \(U\+0058\) is not in the alphabet: got 'abX1Y'"):
        CharacterTokenizer("ab1").encode("abX1Y")
    with pytest.raises(UserError, match=r"U\+1F600"):
        CharacterTokenizer("ab1").encode("a😀")
    for bad in ("", "aba"):
        with pytest.raises(UserError, match="bad alphabet"):
            CharacterTokenizer(bad)


def test_byte_ids_are_the_bytes():
    tokenizer = ByteTokenizer()
    rng = random.Random(0)
    for text in [
        *TEXTS,
        "".join(
            chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(500)
        ),
    ]:
        assert tokenizer.encode(text) == tokenizer.encode_prompt(text) == [2 + b for b in text.encode()]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0, 1, 257, 258, 99]) == "\ufffd\ufffda"
    assert max(tokenizer.encode("\U0010ffff")) < tokenizer.vocab_size == 258
    with pytest.raises(UserError, match=r"got U\+D800 at position 1"):
        tokenizer.encode("a\ud800")


@needs_transformers
@pytest.mark.parametrize(
    "tokenizer",
    [CharacterTokenizer(ALPHABET), CharacterTokenizer("aé\n <>eos"), ByteTokenizer()],
    ids=["default", "odd", "byte"],
)
def test_built_in_tokenizers_reload_in_transformers_with_the_same_ids(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    reloaded, ours = auto(tmp_path), HuggingFaceTokenizer(tmp_path)
    assert len(reloaded) == ours.vocab_size == tokenizer.vocab_size
    assert (reloaded.eos_token_id, reloaded.pad_token_id, ours.eos_ids, ours.pad_id) == (1, 0, (1,), 0)
    for text in ["12+34=", "spell abc backward", "  a  b", "e\né <a", *TEXTS]:
        try:
            ids = tokenizer.encode(text)
        except UserError:
            continue
        if "<eos>" not in text:
            assert reloaded(text).input_ids == ours.encode_prompt(text) == ids
        assert (
            reloaded.decode([*ids, 1, 0], skip_special_tokens=True)
            == ours.decode([*ids, 1, 0])
            == tokenizer.decode([*ids, 1, 0])
            == text
        )


def test_fingerprints_tell_tokenizers_apart_and_are_the_same_elsewhere(tmp_path):
    folder = write_files(tmp_path / "a", bos=True)
    other = write_files(tmp_path / "b", bos=True, generation={"eos_token_id": [3, 1]})
    tokens = [
        CharacterTokenizer("ab"),
        CharacterTokenizer("ba"),
        CharacterTokenizer("abc"),
        ByteTokenizer(),
        HuggingFaceTokenizer(folder / "tokenizer.json", model_path=other),
    ]
    if importlib.util.find_spec("transformers"):
        tokens += [HuggingFaceTokenizer(folder), HuggingFaceTokenizer(other)]
        tokens += [
            HuggingFaceTokenizer(folder, chat_template=True, chat_template_kwargs=k, system_prompt=s)
            for k in ({}, {"enable_thinking": False})
            for s in (None, "s")
        ]
    prints = [t.fingerprint() for t in tokens]
    assert len(set(prints)) == len(prints)
    program = (
        "from jetrl_jax.text.tokenizer import *; import sys; "
        "print(CharacterTokenizer('ab').fingerprint(), ByteTokenizer().fingerprint());"
        "assert not {'jax', 'transformers'} & set(sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "3"},
    )
    assert ran.stdout.split() == [prints[0], prints[3]]


@needs_transformers
@pytest.mark.parametrize("habits", [{}, {"bos": True}, {"eos": True}, {"bos": True, "eos": True}])
def test_huggingface_ids_match_transformers(tmp_path, habits):
    reference, ours = auto(write_files(tmp_path, **habits)), HuggingFaceTokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == reference(text, add_special_tokens=False).input_ids
        with_specials = reference(text).input_ids
        assert ours.encode_prompt(text) == (with_specials[:-1] if habits.get("eos") else with_specials)
        assert (
            ours.decode([*with_specials, 4, 3])
            == reference.decode(with_specials, skip_special_tokens=True)
            == text
        )
    assert ours.vocab_size == len(reference)
    assert (ours.eos_ids, ours.pad_id) == ((1,), 4)


@needs_transformers
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("system", [None, "be brief"])
@pytest.mark.parametrize("habits", [{}, {"bos": True}, {"bos": True, "eos": True}])
def test_chat_template_matches_transformers_without_a_second_bos(tmp_path, kwargs, system, habits):
    template = TEMPLATE if habits else TEMPLATE.removeprefix("{{ bos_token }}")
    reference = auto(write_files(tmp_path, template=template, **habits))
    ours = HuggingFaceTokenizer(
        tmp_path, chat_template=True, chat_template_kwargs=kwargs, system_prompt=system
    )
    messages = ([{"role": "system", "content": system}] if system else []) + [
        {"role": "user", "content": "what is 6*7"}
    ]
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
    )
    ids = ours.encode_prompt("what is 6*7")
    assert ids == expected
    assert ids.count(0) == (1 if habits else 0) and ids[-1] not in ours.eos_ids
    assert ("</think>" in ours.render("q")) is (kwargs == {"enable_thinking": False})
    assert ours.encode("what") == reference("what", add_special_tokens=False).input_ids


@needs_transformers
def test_prompt_that_begins_with_bos_gets_no_second(tmp_path):
    ours = HuggingFaceTokenizer(write_files(tmp_path, bos=True))
    assert ours.encode_prompt("<|bos|>hello") == ours.encode_prompt("hello") == [0, *ours.encode("hello")]


@needs_transformers
def test_chat_template_raises_on_arguments_it_never_reads(tmp_path):
    write_files(tmp_path, bos=True, template=TEMPLATE + "{% generation %}{% endgeneration %}")
    with pytest.raises(
        UserError,
        match=r"got tokenizer.chat_template_kwargs.enable_thinkin, expected one of: enable_thinking. "
        r"Did you mean 'enable_thinking'",
    ):
        HuggingFaceTokenizer(tmp_path, chat_template=True, chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(
        UserError, match=r"never reads an argument: got tokenizer.chat_template_kwargs.add_generation_prompt"
    ):
        HuggingFaceTokenizer(
            tmp_path, chat_template=True, chat_template_kwargs={"add_generation_prompt": False}
        )


@needs_transformers
def test_chat_template_raises_where_there_is_none_or_it_fails(tmp_path):
    with pytest.raises(UserError, match="no usable chat template"):
        HuggingFaceTokenizer(write_files(tmp_path / "a", template=None), chat_template=True)
    with pytest.raises(UserError, match=r"no usable chat template .*TemplateSyntaxError"):
        HuggingFaceTokenizer(write_files(tmp_path / "b", template="{% for %}"), chat_template=True)
    with pytest.raises(UserError, match=r"failed: .*no system here"):
        refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
        HuggingFaceTokenizer(
            write_files(tmp_path / "c", template=refuses), chat_template=True, system_prompt="s"
        ).encode_prompt("q")


SYSTEM = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
USER = "<|im_start|>user\n{{ messages[-1].content }}<|im_end|>\n"
TURN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DROPS_USER = "does not write the user's text as it is: got .* expected the text in it. Take another template"
DROPS_SYSTEM = r"does not write the system's text \(tokenizer.system_prompt\) as it is"
STOPS = (
    r"the chat template's prompt ends in a stop token: got '<\|im_end\|>' \(id 3\) after .*, "
    r"expected none of the stop tokens \[3, 1\]"
)


@needs_transformers
@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        ("<|im_start|>user\nhello<|im_end|>\n" + TURN, None, DROPS_USER),
        (SYSTEM + TURN, "be brief", DROPS_USER),
        (SYSTEM + TURN, "What is 6*7?", DROPS_USER),  # the user's text, but in the system's place
        ("{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}" + TURN, None, DROPS_USER),
        ("{{ messages[0]['contents'] }}" + TURN, None, DROPS_USER),
        *(
            (USER.replace("content", f"content{change}") + TURN, None, DROPS_USER)
            for change in (
                "[:50]", "[-50:]", " | lower", " | upper", " | e", " | tojson", " | truncate(300)", " | replace('{', " "'')",
                ".split('\\n')[0]", " | title", ".encode('ascii', 'ignore').decode()", " | striptags", " | " "wordwrap(60)", " | " "trim('?')",
            )
        ),
        (USER + TURN, "be brief", DROPS_SYSTEM),
        (SYSTEM.replace("content", "content | upper") + USER + TURN, "be brief", DROPS_SYSTEM),
        (SYSTEM + USER, "be brief", STOPS),  # the assistant's turn is never opened
        (USER.strip(), None, STOPS),
        (USER + TURN.replace("assistant\n", "assistant\n<|im_end|>"), None, STOPS),
        (USER + "<|im_end|> \n\n ", None, STOPS),
    ],
)  # fmt: skip
def test_chat_template_that_loses_a_text_or_ends_in_a_stop_token_is_refused_when_it_is_opened(
    tmp_path, template, system, message
):
    write_files(tmp_path, template=template, generation={"eos_token_id": [3, 1]})
    with pytest.raises(UserError, match=rf"(?s)^HuggingFaceTokenizer: .*{message}"):
        HuggingFaceTokenizer(tmp_path, chat_template=True, system_prompt=system)


@needs_transformers
@pytest.mark.parametrize(
    "template",
    [
        SYSTEM + USER + TURN,
        SYSTEM + USER.replace("content", "content | trim") + TURN,
        "{% for m in messages %}{{ m.content }} {% endfor %}",
        # a system text that is merged with the user's
        "{{ messages | map(attribute='content') | join('\n\n') }}",
        "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}",
        SYSTEM + USER + TURN + "<think>\n\n</think>\n\n",
    ],
)
def test_chat_templates_that_keep_every_text_are_taken(tmp_path, template):
    ours = HuggingFaceTokenizer(
        write_files(tmp_path, template=template, generation={"eos_token_id": [3, 1]}),
        chat_template=True,
        system_prompt=" be\nbrief ",
    )
    rng = random.Random(0)
    for _ in range(20):
        text = "".join(
            chr(rng.choice([10, 32, 39, 60, 92, 123, 125, rng.randrange(33, 0xD800)]))
            for _ in range(rng.randrange(60))
        )
        assert (
            text.strip() in ours.render(text)
            and "be\nbrief" in ours.render(text)
            and ours.encode_prompt(text)[-1] not in ours.eos_ids
        )


@needs_transformers
def test_a_template_that_loses_only_some_text_is_refused_with_that_text(tmp_path):
    """What no probe shows is found when it is drawn: never trained on in silence."""
    template = (
        "{% if 'secret' in messages[-1].content %}no{% else %}{{ messages[-1].content }}{% endif %}" + TURN
    )
    ours = HuggingFaceTokenizer(write_files(tmp_path, template=template), chat_template=True)
    with pytest.raises(
        UserError,
        match=r"does not write the user's text as it is: got 'no.*' for 'a secret', expected the text in it",
    ):
        ours.encode_prompt("a secret")


@pytest.mark.parametrize("habits", [{}, {"bos": True}, {"bos": True, "eos": True}])
def test_a_prompt_that_ends_in_a_stop_token_is_refused_and_an_empty_one_is_empty(tmp_path, habits):
    ours = HuggingFaceTokenizer(write_files(tmp_path, **habits))
    with pytest.raises(
        UserError,
        match=r"the prompt ends in a stop token: got '<\|endoftext\|>' \(id 1\) after 'hello<\|endoftext\|>'",
    ):
        ours.encode_prompt("hello<|endoftext|>")
    assert ours.encode_prompt("<|endoftext|>hello")[-1] not in ours.eos_ids
    assert ours.encode_prompt("") == ([0] if habits else [])


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, (1,)),
        ({"config": {"eos_token_id": 3}}, (3, 1)),
        ({"generation": {"eos_token_id": [3, 1]}, "config": {"eos_token_id": 2}}, (3, 1)),
        ({"generation": {"eos_token_id": 3}, "eos_token": None}, (3,)),
        ({"generation": {}, "config": {"eos_token_id": [2]}}, (2, 1)),
        (
            {
                "config": {"eos_token_id": None},
                "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
                "pad_token": None,
            },
            (3,),
        ),
    ],
)
def test_eos_ids_come_from_the_checkpoints_files(tmp_path, monkeypatch, files, eos_ids):
    write_files(tmp_path / "t", **files)
    if importlib.util.find_spec("transformers"):
        assert HuggingFaceTokenizer(tmp_path / "t").eos_ids == eos_ids
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ours = HuggingFaceTokenizer(tmp_path / "t")
    assert ours.eos_ids == eos_ids
    assert ours.pad_id == (4 if files.get("pad_token", 1) else eos_ids[0])


def test_eos_ids_of_the_model_directory_serve_a_tokenizer_elsewhere(tmp_path):
    write_files(tmp_path / "model", generation={"eos_token_id": [3, 1]})
    (tmp_path / "t").mkdir()
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "t" / "tokenizer.json")
    ours = HuggingFaceTokenizer(tmp_path / "t" / "tokenizer.json", model_path=tmp_path / "model")
    assert ours.eos_ids == (3, 1)
    with pytest.raises(UserError, match="no end token"):
        HuggingFaceTokenizer(tmp_path / "t" / "tokenizer.json")


@pytest.mark.parametrize("habits", [{}, {"bos": True}, {"bos": True, "eos": True}])
def test_huggingface_without_transformers_gives_the_same(tmp_path, monkeypatch, habits):
    write_files(tmp_path, **habits)
    expected = HuggingFaceTokenizer(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ours = HuggingFaceTokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == expected.encode(text)
        assert (
            ours.encode_prompt(text)
            == expected.encode_prompt(text)
            == [0] * ("bos" in habits) + ours.encode(text)
        )
        assert ours.decode([0, *ours.encode(text), 3, 1]) == text
    assert ours.fingerprint() == expected.fingerprint()
    assert (ours.vocab_size, ours.pad_id, ours.eos_ids) == (
        expected.vocab_size,
        expected.pad_id,
        expected.eos_ids,
    )
    with pytest.raises(UserError, match=r"needs the package transformers.*jetrl-jax\[hf\]"):
        HuggingFaceTokenizer(tmp_path, chat_template=True)


@pytest.mark.parametrize("special", [True, False])
def test_decode_keeps_the_marks_of_a_thought_and_no_other_special_token(tmp_path, monkeypatch, special):
    write_files(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(
        [tokenizers.AddedToken(mark, special=special, normalized=False) for mark in ("<think>", "</think>")]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    opened = [HuggingFaceTokenizer(tmp_path)] if importlib.util.find_spec("transformers") else []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for ours in [*opened, HuggingFaceTokenizer(tmp_path)]:
        for text in ("<think>\n5 or 6?</think>\n\n 42", "5 or 6?</think>", "no thought  42 é"):
            ids = ours.encode(text)
            assert ("think" not in text.split()[0]) or len(ours.encode("</think>")) == 1
            assert ours.decode([0, 2, *ids, 3, 1]) == text
        assert (
            ours.decode(ours.encode("<|im_start|>assistant<think>a</think>b<|im_end|>"))
            == "assistant<think>a</think>b"
        )


@needs_transformers
@pytest.mark.parametrize(
    ("end", "opened"),
    [
        ("", False),
        ("<think>\n", True),
        ("<think>\nOkay, ", True),
        ("<think>\n\n</think>\n\n", False),
        ("</think>", False),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_prompts_know_whether_their_template_opens_a_thought(tmp_path, end, opened, special):
    template = TEMPLATE.split("{% if enable_thinking")[0] + end.replace("\n", "\n") + "{% endif %}"
    write_files(tmp_path, template=template)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(
        [tokenizers.AddedToken(mark, special=special, normalized=False) for mark in ("<think>", "</think>")]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = HuggingFaceTokenizer(tmp_path, chat_template=True, system_prompt="Think inside <think> ... .")
    for text in ("what is 6*7?", "what does <think> mean?", "a\n<think>\nb</think>"):
        assert Prompt(Example(text, "42"), ours.encode_prompt(text)).opens_thought(ours) is opened


@needs_transformers
def test_huggingface_save_keeps_every_id(tmp_path):
    folder = write_files(tmp_path / "a", bos=True, generation={"eos_token_id": [3, 1]})
    first = HuggingFaceTokenizer(folder, chat_template=True, chat_template_kwargs={"enable_thinking": False})
    first.save(tmp_path / "b")
    first.save(folder)
    second = HuggingFaceTokenizer(
        tmp_path / "b", model_path=folder, chat_template=True, chat_template_kwargs={"enable_thinking": False}
    )
    assert second.fingerprint() == first.fingerprint()
    for text in TEXTS:
        assert second.encode_prompt(text) == first.encode_prompt(text)
        assert auto(tmp_path / "b")(text).input_ids == auto(folder)(text).input_ids
    HuggingFaceTokenizer(folder / "tokenizer.json").save(tmp_path / "c")
    assert auto(tmp_path / "c")("hello").input_ids == auto(folder)("hello").input_ids
    assert auto(tmp_path / "c").eos_token_id == 3


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda p: None, "no such path"),
        (lambda p: p.mkdir(), "transformers cannot load|no tokenizer.json in"),
        (lambda p: p.write_text("{}"), "cannot read"),
        (lambda p: (write_files(p), (p / "config.json").write_text("{")), "cannot (read|load)"),
    ],
    ids=["missing", "empty", "broken", "config"],
)
def test_huggingface_raises_on_bad_paths(tmp_path, prepare, message):
    prepare(tmp_path / "t")
    with pytest.raises(UserError, match=message):
        HuggingFaceTokenizer(tmp_path / "t")


def test_build_tokenizer_reads_every_field(tmp_path):
    assert build_tokenizer(tokenizer_section(characters="xyz")).encode("zx") == [4, 2]
    assert build_tokenizer(tokenizer_section(kind="byte")).vocab_size == 258
    with pytest.raises(UserError, match=r"tokenizer.path=None and model.path=None"):
        build_tokenizer(tokenizer_section(kind="huggingface"))
    folder = write_files(tmp_path / "a", bos=True)
    other = write_files(tmp_path / "b", generation={"eos_token_id": 3})
    assert build_tokenizer(tokenizer_section(kind="huggingface"), str(folder)).encode_prompt("q")[0] == 0
    assert build_tokenizer(tokenizer_section(kind="huggingface", path=str(folder)), str(other)).eos_ids == (
        3,
        1,
    )
    if importlib.util.find_spec("transformers"):
        section = tokenizer_section(
            kind="huggingface",
            chat_template=True,
            chat_template_kwargs={"enable_thinking": False},
            system_prompt="short",
        )
        text = build_tokenizer(section, str(folder)).render("q")
        assert text.startswith("<|bos|><|im_start|>system\nshort<|im_end|>") and text.endswith("</think>\n\n")


# Episodes: observations are appended, the history is never rendered

QWEN25 = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Qwen3: thoughts stay after the last user's message only
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|pad|>\n\n"
    "{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|pad|>\n\n{% endif %}"
)
STOPS = {"eos_token_id": [1, 3]}  # <|endoftext|>, <|im_end|>
END = 3


def opened_with(folder: Path, template: str, **options) -> HuggingFaceTokenizer:
    write_files(folder, bos="bos_token" in template, template=template, generation=STOPS)
    return HuggingFaceTokenizer(folder, chat_template=True, **options)


@needs_transformers
@pytest.mark.parametrize("template", [QWEN25, QWEN3, LLAMA3])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_appended_observations_are_the_ids_of_the_whole_conversation(tmp_path, template, role):
    """Where the template keeps every text, the ids of an episode are those that transformers gives the whole."""
    ours, messages = opened_with(tmp_path, template), [{"role": "user", "content": "what is 6*7?"}]
    expects_note = template == QWEN3
    assert len(ours.check_observations()) == expects_note and ours.end_of_turn == END
    ids = ours.encode_prompt("what is 6*7?")
    for answer, observed in (("41", "no,\nhigher"), ("the answer is 42", "yes 漢")):
        ids += [*ours.encode(answer), END]
        observation = [{"role": role, "content": observed}]
        messages += [{"role": "assistant", "content": answer}, *observation]
        ids += ours.encode_observation(observation, END)
    whole = auto(tmp_path).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == ours.encode(whole)


@needs_transformers
def test_end_of_turn_is_written_where_the_policy_did_not_sample_it(tmp_path):
    ours = opened_with(tmp_path, QWEN25)
    observation = [{"role": "user", "content": "higher"}]
    sampled = ours.encode_observation(observation, END)
    for other in (1, ours.encode("x")[0]):  # <|endoftext|>, or a stop text
        assert ours.encode_observation(observation, other) == [END, *sampled]
    # the newline that the template puts after the end of a turn is an observation's first token
    assert ours.encode("\n") == sampled[:1]


@needs_transformers
def test_thoughts_stay_in_an_episode_and_are_not_added(tmp_path):
    ours = opened_with(tmp_path, QWEN3, chat_template_kwargs={"enable_thinking": False})
    (note,) = ours.check_observations()
    assert "leaves thoughts out of earlier turns; in an episode they stay" in note
    turn = [*ours.encode("<think>so 5</think>5"), END]
    ids = [
        *ours.encode_prompt("guess"),
        *turn,
        *ours.encode_observation([{"role": "user", "content": "low"}], END),
    ]
    text = ours.decode(ids)
    assert "<think>so 5</think>5" in text and text.count("so 5") == 1
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")


VICTIMS = [
    (QWEN25.replace("{{ m.content }}<|im_end|>", "{{ m.content }}{{ m.content }}<|im_end|>"), {}, "got it 2 times"),
    (QWEN25.replace("{{ m.role }}\n{{ m.content }}", "{{ m.role }}\n{{ m.content if m.role == 'user' }}"), {}, "got it 0 times"),
    (QWEN25.replace("<|im_end|>\n{% endif %}{% endfor", "\n<|im_end|>\n{% endif %}{% endfor"), {}, "ends the assistant's turn with 'Ċ'"),
    (QWEN25, {"eos_token_id": [1]}, r"turn with '<\|im_end\|>', expected one of the special stop tokens \['<\|endoftext\|>'\]"),
]  # fmt: skip


@needs_transformers
@pytest.mark.parametrize(("template", "generation", "message"), VICTIMS)
def test_templates_that_cannot_append_are_refused(tmp_path, template, generation, message):
    write_files(tmp_path, template=template, generation=generation or STOPS)
    ours = HuggingFaceTokenizer(tmp_path, chat_template=True)
    with pytest.raises(UserError, match=message):
        ours.check_observations()


@needs_transformers
def test_an_end_of_turn_that_takes_the_blanks_beside_it_is_refused(tmp_path):
    write_files(tmp_path, template=QWEN25.replace("<|im_end|>", "<|eot|>"))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken("<|eot|>", special=True, lstrip=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": backend.token_to_id("<|eot|>")})
    )
    with pytest.raises(UserError, match="an observation's ids depend on the text before it"):
        HuggingFaceTokenizer(tmp_path, chat_template=True).check_observations()


@needs_transformers
def test_an_observation_that_the_template_loses_is_refused(tmp_path):
    ours = opened_with(tmp_path, QWEN25.replace("{{ m.content }}\n</tool", "\n</tool"))
    ours.check_observations()
    with pytest.raises(UserError, match="does not write an observation of the role tool as it is"):
        ours.encode_observation([{"role": "tool", "content": "12"}], END)


@needs_transformers
def test_no_history_is_rendered(tmp_path, monkeypatch):
    """Each rendering has the first question mark, the mark in place of a turn, and the new observation only."""
    ours, rendered = opened_with(tmp_path, QWEN25), []
    real = ours._render
    monkeypatch.setattr(ours, "_render", lambda messages: rendered.append(list(messages)) or real(messages))
    for turn in range(3):
        ours.encode_observation([{"role": "user", "content": f"answer {turn}"}], END)
    assert [[m["role"] for m in messages] for messages in rendered] == [["user", "assistant", "user"]] * 3
    assert len({messages[1]["content"] for messages in rendered}) == 1
