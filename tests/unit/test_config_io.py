"""What a config file and its overrides mean, and that a written config reads back equal."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jetrl_jax.config.learning import BatchSection
from jetrl_jax.config.load import config_from_dict, dump_config, load_config, override_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import ROOT, Place, all_fields
from jetrl_jax.config.task import RewardSection
from jetrl_jax.errors import UserError
from jetrl_jax.record.run_directory import flatten


def load(directory: Path, text: str, *overrides: str) -> RunConfig:
    """The config of a file with this text."""
    path = directory / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def reload(config: RunConfig, directory: Path) -> RunConfig:
    """The config after writing and reading."""
    return load(directory, dump_config(config))


# ------------------------------------------------------------------------------------------------- values


def test_config_without_a_file_has_the_defaults() -> None:
    assert load_config(None, []) == RunConfig()
    assert load_config(None) == RunConfig()


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", ".000001", "0.000001", "1.e-6", "+1e-6"])
def test_number_of_yaml_1_2_is_a_number(text: str, tmp_path: Path) -> None:
    assert load(tmp_path, f"optimizer: {{learning_rate: {text}}}").optimizer.learning_rate == 1e-6


def test_whole_number_is_taken_where_a_number_is_expected(tmp_path: Path) -> None:
    temperature = load(tmp_path, "rollout: {temperature: 2}").rollout.temperature
    assert temperature == 2.0 and type(temperature) is float


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("TRUE", True), ("False", False), ("yes", "yes"), ("off", "off"), ("Y", "Y"), ("null", None), ("~", None),
        ("", None), ("7", 7), ("-7", -7), ("007", 7), ("0o17", 15), ("0x1F", 31), ("1_000", "1_000"), ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"), ("1e3", 1000.0), ("-.5", -0.5), (".", "."), ("1e", "1e"),
        ("'1e3'", "1e3"), ('"true"', "true"), ("[1, [a], {b: 2}]", [1, ["a"], {"b": 2}]),
    ],
)  # fmt: skip
def test_free_options_take_the_values_of_yaml_1_2(text: str, value: Any, tmp_path: Path) -> None:
    got = load(tmp_path, f"task:\n  options:\n    a: {text}").task.options["a"]
    assert got == value and type(got) is type(value)


def test_lists_become_tuples_of_sections(tmp_path: Path) -> None:
    config = load(tmp_path, "rewards:\n- name: task\n- {name: my.module:length, weight: 2}\n")
    assert config.rewards == (RewardSection(), RewardSection(name="my.module:length", weight=2.0))


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml")),
    ids=lambda path: path.name,
)
def test_config_of_the_repository_loads_and_is_short(path: Path, tmp_path: Path) -> None:
    config = load_config(path, [])
    assert reload(config, tmp_path) == config
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 70


@pytest.mark.parametrize("preset", ["bf16", "fp8_unified", "fp8_forward", "fp8_rollout_only"])
def test_every_preset_can_be_set_over_a_file_that_sets_fp8_options(preset: str, tmp_path: Path) -> None:
    text = "precision: {wgrad_operand: dual, scale_format: power_of_two, promotion_order: triton}"
    assert load(tmp_path, text, f"precision.preset={preset}").precision.preset == preset


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfseed: 1\r\nrun:\r\n  steps: 3\r\n")
    config = load_config(tmp_path / "run.yaml", [])
    assert (config.seed, config.run.steps) == (1, 3)


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        RunConfig().rollout.group_size = 3  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=7", "seed", 7),
        ("optimizer.learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
        (" rollout.group_size = 8 ", "rollout.group_size", 8),
        ("rollout={group_size: 8}", "rollout.group_size", 8),
        ("run.directory=runs/a=b c", "run.directory", "runs/a=b c"),
        ("run.directory=2024", "run.directory", "2024"),
        ("run.directory='2024'", "run.directory", "2024"),
        ("run.wandb_project=null", "run.wandb_project", None),
        ('run.wandb_project="null"', "run.wandb_project", "null"),
        ("algorithm=dapo", "algorithm.clip_high", 0.28),
        ("rollout.engine=vllm_server", "rollout.engine.restarts", 0),
        ("correction.weight=token_mask", "correction.weight.low", 0.5),
        ("warm_start.steps=3", "warm_start.batch_size", 256),
        ("model.path=a", "model.path", "a"),
        ("tokenizer.characters=0123456789 ", "tokenizer.characters", "0123456789 "),
        ("task.prompt_template={prompt}: ", "task.prompt_template", "{prompt}: "),
        ("batch.row_tokens=null", "batch.row_tokens", None),
        ("task.options.max_value=99", "task.options", {"max_value": 99}),
        ("task.options.a.b=[1, 2]", "task.options", {"a": {"b": [1, 2]}}),
        ("task.options.3=x", "task.options", {"3": "x"}),
    ],
)
def test_override_sets_one_field(override: str, path: str, value: Any) -> None:
    config: Any = load_config(None, [override])
    for name in path.split("."):
        config = getattr(config, name)
    assert config == value and type(config) is type(value)


def test_override_of_a_list_entry_keeps_the_rest(tmp_path: Path) -> None:
    assert load_config(None, ["rewards.0.weight=2"]).rewards == (RewardSection(weight=2.0),)
    text = "rewards:\n- {name: task, weight: 3}\n- {name: a:b, timeout_s: 1}\n"
    config = load(tmp_path, text, "rewards.1.weight=0.5", "rewards.0={name: math_verify}")
    assert config.rewards == (
        RewardSection(name="math_verify"),
        RewardSection(name="a:b", timeout_s=1.0, weight=0.5),
    )


def test_overrides_come_after_the_file_and_the_last_one_counts(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "rollout:\n  top_k: 0\n  group_size: 4\n",
        "rollout.prompts_per_step=5",
        "rollout.prompts_per_step=6",
    )
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (6, 4)
    assert (
        load(tmp_path, "rollout: {group_size: 4}", "rollout={prompts_per_step: 5}").rollout.group_size
        == RunConfig().rollout.group_size
    )


def test_override_may_repair_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, "rollout:\n  group_size: 1\n", "rollout.group_size=4").rollout.group_size == 4


@pytest.mark.parametrize(
    ("text", "override", "gone", "kept"),
    [
        (
            "model: {hidden_size: 64, num_heads: 2, num_kv_heads: 2}",
            "model.path=some/dir",
            "model.hidden_size",
            "",
        ),
        ("warm_start: {steps: 10, batch_size: 4, noise: 0.5}", "warm_start=null", "warm_start.steps", ""),
        (
            "algorithm: {name: gspo, dual_clip: 3.0, kl_coef: 0.1}",
            "algorithm=cispo",
            "algorithm.dual_clip",
            "algorithm.kl_coef",
        ),
        ("algorithm: gspo", "algorithm.name=dapo", "algorithm.no", "algorithm.dynamic_sampling"),
        (
            "precision: {wgrad_operand: dual, scale_format: power_of_two}",
            "precision.preset=fp8_forward",
            "precision.wgrad_operand",
            "precision.scale_format",
        ),
        (
            "precision: {overrides: [{pattern: layers.0.*, format: bf16}]}",
            "precision.preset=bf16",
            "precision.overrides",
            "",
        ),
        (
            "task: {kind: jsonl, path: a.jsonl, eval_fraction: 0.5}",
            "task.kind=arithmetic",
            "task.path",
            "task.eval_fraction",
        ),
        ("rollout: {engine: {kind: jax, slots: 4}}", "rollout.engine=vllm", "rollout.engine.slots", ""),
        (
            "rollout: {engine: {kind: vllm, max_num_seqs: 4}}",
            "rollout.engine.kind=vllm_server",
            "rollout.engine.no",
            "rollout.engine.max_num_seqs",
        ),
        (
            "correction: {weight: {kind: token_mask, low: 0.1}, veto: 0.1}",
            "correction.mode=bypass",
            "correction.weight",
            "",
        ),
    ],
)
def test_override_of_a_kind_drops_what_the_file_says_of_the_old_one(
    text: str, override: str, gone: str, kept: str, tmp_path: Path
) -> None:
    config = load(tmp_path, text, override)
    written = flatten(yaml.safe_load(dump_config(config)))
    assert not any(f"{name}.".startswith(f"{gone}.") for name in written)
    said = flatten(yaml.safe_load(text))
    assert not kept or written[kept] == said.get(kept, True)
    assert reload(config, tmp_path) == config


def test_override_of_a_kind_and_of_a_field_of_another_is_an_error(tmp_path: Path) -> None:
    for overrides in (
        ["algorithm=cispo", "algorithm.dual_clip=3"],
        ["algorithm.dual_clip=3", "algorithm=cispo"],
    ):
        with pytest.raises(UserError, match=r"dual_clip belongs to name grpo, .*; this is name cispo\n"):
            load(tmp_path, "seed: 1", *overrides)


def test_a_kind_may_stand_alone(tmp_path: Path) -> None:
    short = load(
        tmp_path,
        "algorithm: dapo\nrollout: {engine: vllm}\ncorrection: {weight: token_truncate, reject: "
        "k3}\ntask: gsm8k\n",
    )
    assert short == config_from_dict(
        {
            "algorithm": {"name": "dapo"},
            "rollout": {"engine": {"kind": "vllm"}},
            "correction": {
                "mode": "decoupled",
                "weight": {"kind": "token_truncate"},
                "reject": {"kind": "k3"},
            },
            "task": {"kind": "gsm8k"},
        }
    )


def test_override_config_changes_a_config_that_is_there() -> None:
    config = override_config(
        config_from_dict({"seed": 3, "rollout": {"group_size": 4}}), ["rollout.group_size=5"]
    )
    assert (config.seed, config.rollout.group_size) == (3, 5)
    with pytest.raises(UserError, match=r"rollout\.slotz"):
        override_config(config, ["rollout.slotz=5"])


# ----------------------------------------------------------------------------------------------- writing


def test_dump_config_tells_every_field_and_what_nulls_stand_for() -> None:
    text = dump_config(
        config_from_dict(
            {"algorithm": "dapo", "rollout": {"max_completion_tokens": 40}, "model": {"path": "a/b"}}
        )
    )
    data = yaml.safe_load(text)
    assert list(data) == list(RunConfig.model_fields)
    assert data["model"] == {"path": "a/b"}  # the sizes come from the checkpoint
    assert data["batch"] == {name: getattr(BatchSection(), name) for name in BatchSection.model_fields}
    for name, resolved in {"overlong_buffer_tokens": 8, "row_tokens": 72, "verifier": "task"}.items():
        assert f"\n  {name}: null  # {resolved}\n" in text, name
    assert "\n  learning_rate: 1.0e-6\n" in text and data["algorithm"]["clip_high"] == 0.28


HOSTILE = [
    "yes", "No", "on", "null", "~", "true", "1e-6", "1e3", "007", "0o7", "0x1f", "1_000", "1:30", ".5", "-1", ".nan", "2024-01-01", "=",
    "<<", "", " ", " a ", "a: b", "a #b", "#a", "- a", "-", "? a", "*a", "&a", "!a", "%a", "@a", "`a", "{a}", "[a]", "'", '"',
    "a\nb", "\n", "a\n  clip_high: null\n", "\t", "a\tb", "\\n", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\ufeff",
    "é", "日本", "😀", "x" * 300, "word " * 60, "---", "...",
]  # fmt: skip


def test_text_of_every_kind_reads_back(tmp_path: Path) -> None:
    options = (
        {f"k{i}": text for i, text in enumerate(HOSTILE)}
        | {text: i for i, text in enumerate(HOSTILE)}
        | {"list": HOSTILE}
    )
    config = config_from_dict({"task": {"options": options}})
    assert reload(config, tmp_path).task.options == options
    # readers of YAML 1.1 see the same
    assert yaml.safe_load(dump_config(config))["task"]["options"] == options


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(HOSTILE),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(HOSTILE), inner, max_size=3)
    ),
    max_leaves=6,
)
VALUES = {
    "task.name": st.sampled_from(["module:function", "reverse"]),
    "task.prompt_template": st.text(max_size=5).map(lambda text: text + "{prompt}"),
    "rollout.engine.url": st.just("http://a:1"),
    "distributed.timeout_s": st.integers(5, 99),
    "algorithm.dual_clip": st.floats(1.01, 10.0),
    "precision.loss_scale.initial": st.floats(1.01, 10.0),
    "rollout.engine.gpu_memory_utilization": st.floats(0.01, 0.89),
    "integer": st.integers(2, 200),
    "number": st.floats(1e-300, 0.99) | st.sampled_from([1e-6, 3e-5, 0.1, 0.5]),
    "boolean": st.booleans(),
    "string": st.text(min_size=1, max_size=12) | st.sampled_from([text for text in HOSTILE if text]),
    "integers": st.lists(st.integers(1, 16), min_size=1, max_size=3, unique=True).map(
        lambda more: [0, *more]
    ),
    "texts": st.lists(st.sampled_from(["q_proj", "down_proj", "nothing"]), min_size=1, max_size=3),
    "object": st.dictionaries(st.text(max_size=5), plain, max_size=3),
}


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Valid configs: sections of drawn kinds with drawn fields, of which those that a rule blames are taken
    out again.
    """

    def section(place: Place, path: str) -> dict[str, Any]:
        kind = draw(st.sampled_from([*place.kinds]))
        fields = {name: place.field(name, kind) for name in place.kinds[kind]["properties"]}
        return {
            name: kind if name == place.tag else value(field, f"{path}{name}")
            for name, field in fields.items()
            if name == place.tag or field.default == "required" or draw(st.integers(0, 3)) == 0
        }

    def value(place: Place, path: str) -> Any:
        if place.kinds:
            return section(place, f"{path}.")
        if place.type == "array":
            return [
                section(Place(place.takes["items"]), f"{path}.0.") for _ in range(draw(st.integers(1, 2)))
            ]
        choices = st.sampled_from(place.choices) if place.choices else VALUES[place.type]
        values = VALUES.get(path, choices)
        return draw(st.none() | values if place.optional else values)

    data = section(Place(ROOT), "")
    while True:
        try:
            return config_from_dict(data)
        except UserError as error:
            before = copy.deepcopy(data)
            for path in re.findall(r"^the config: ([\w.]+): ", str(error), re.MULTILINE):
                take_out(data, path.split("."))
            if data == before:  # a field that is missing is blamed
                del data[next(iter(data))]


def take_out(data: Any, path: list[str]) -> None:
    """The field at `path`, or the outermost section around it that is there by name only, or the entry of a
    list.
    """
    if path[0] not in data or isinstance(data[path[0]], list) or len(path) == 1:
        data.pop(path[0], None)
    elif path[1] not in data[path[0]] or not isinstance(data[path[0]], dict):
        del data[path[0]]
    else:
        take_out(data[path[0]], path[1:])


@given(config=configs())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_dump_config_reads_back_equal(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    again = load_config(path, [])
    assert again == config
    assert dump_config(again) == dump_config(config)


# -------------------------------------------------------------------------------------------------- fuzz

VALID = dump_config(RunConfig())
PIECES = st.sampled_from(
    [
        *HOSTILE,
        *VALID.splitlines(keepends=True),
        "rollout:\n",
        "  slots: 3\n",
        "rewards:\n- ",
        "seed: ",
        "  ",
        ": ",
        ", ",
        "|\n",
        ">-\n",
        '"',
        "{",
        "]",
    ]
)
documents = st.text(max_size=60) | st.lists(PIECES, max_size=12).map("".join) | st.binary(max_size=40)


@given(
    document=documents,
    overrides=st.lists(
        st.text(max_size=12)
        | st.tuples(
            st.sampled_from([path.replace("N", "0") for path, _, _ in all_fields()]),
            st.text(max_size=8) | st.sampled_from(HOSTILE),
        ).map("=".join),
        max_size=2,
    ),
)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_arbitrary_text_ends_in_a_config_or_in_one_message(
    document: str | bytes, overrides: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(document if isinstance(document, bytes) else document.encode())
    try:
        config = load_config(path, overrides)
    except UserError as error:
        assert str(error).strip()
        str(error).encode()
    else:
        assert isinstance(config, RunConfig)


@given(
    data=st.dictionaries(
        st.sampled_from([*RunConfig.model_fields, "x"]),
        st.dictionaries(
            st.sampled_from([*sorted({path.split(".")[-1] for path, _, _ in all_fields()}), "0"]),
            plain,
            max_size=3,
        )
        | plain
        | st.lists(plain, max_size=2),
        max_size=4,
    )
)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_arbitrary_values_end_in_a_config_or_in_one_message(data: dict[str, Any]) -> None:
    try:
        config = config_from_dict(data)
    except UserError as error:
        assert str(error).strip()
    else:
        assert math.isfinite(config.rollout.temperature)
