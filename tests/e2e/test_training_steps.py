"""Steps of every flow, algorithm and correction, and what a bad step does."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import signal
from typing import Any

import chex
import numpy as np
import pytest
from scripted import ScriptedEngine, ScriptedPrograms, ScriptedTrainer
from tiny import TINY, rows, shorter, tiny_config

from jetrl_jax.config.load import config_from_dict
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.precision.numerics import Choices
from jetrl_jax.record.checkpoint import CheckpointStore
from jetrl_jax.rollout.embedded.programs import EnginePrograms
from jetrl_jax.runs.grpo import GRPOTrainer
from jetrl_jax.training.programs import PolicyPrograms
from jetrl_jax.training.step import Counters
from tests.unit.test_tokenizer import write_files

pytestmark = pytest.mark.as_the_product
LONG = pytest.mark.long


def scripted_trainer(
    directory, monkeypatch, engine=ScriptedEngine, rewards=(shorter,), resume=False, **fields
):
    """A trainer of sums whose engine and programs follow the script."""
    monkeypatch.setattr(
        "jetrl_jax.runs.parts.build_engine", lambda policy, *_, **__: engine(policy.tokenizer)
    )
    task = {"name": "sum", "options": {"digits": 1, "train_size": 64, "eval_size": 4}}
    return ScriptedTrainer(
        tiny_config(directory, task=task, warm_start=None, **fields),
        reward_functions=list(rewards),
        resume=resume,
    )


def trace_once(monkeypatch, **others):
    """From now on a program's second trace is an error; `others`: programs that may be traced more often, and
    how often.
    """
    programs = {
        PolicyPrograms: ("logprobs", "policy_gradient", "supervised_gradient", "check", "update"),
        EnginePrograms: ("prefill", "insert", "decode"),
    }
    chex.clear_trace_counter()
    for owner, names in programs.items():
        for name in names:
            limited = chex.assert_max_traces(getattr(owner, f"_{name}_program"), n=others.get(name, 1))
            monkeypatch.setattr(owner, f"_{name}_program", limited)


@LONG
@pytest.mark.parametrize("preset", ["fp32", "fp8_rollout_only"])
def test_other_flows_take_a_step_without_the_same_bits(preset, tmp_path):
    config = tiny_config(tmp_path / "run", precision={"preset": preset}, warm_start=None)
    row = GRPOTrainer(config, reward_functions=[shorter]).dry_run()["metrics"]
    assert not (tmp_path / "run").exists()
    largest = row["mismatch/logprob_abs_max"]
    if preset == "fp8_rollout_only":
        assert largest > 1e-4
    else:  # without roundings between operations FP32 keeps the last bits of each program
        assert largest <= 1e-5


# FP8 in test_training_run.py::test_exact_run_has_no_mismatch, FP16 with the loss scale below, and both with keys
# and values in FP8 in test_kv_cache_run.py.
@LONG
@pytest.mark.parametrize("preset", ["bf16", "fp8_forward"])
def test_every_exact_flow_stays_exact_over_five_updates(preset, tmp_path):
    config = tiny_config(
        tmp_path / "run", precision={"preset": preset}, run={"steps": 5, "tensorboard": False}
    )
    GRPOTrainer(config, reward_functions=[shorter]).train()
    written = rows(tmp_path / "run")[1:]
    assert [row["mismatch/logprob_abs_max"] for row in written] == [0.0] * 5
    assert [row["policy_version"] for row in written] == list(range(5))


ALGORITHMS: list[dict[str, Any]] = [
    {"name": "dapo", "max_generation_rounds": 2},
    {"name": "dr_grpo", "minibatches": 2, "epochs": 2},
    {"name": "rloo", "kl_coef": 0.1, "minibatches": 2},
    {"name": "grpo", "kl_coef": 0.1, "mask_truncated": True},
    {"name": "gspo", "minibatches": 2},
    {"name": "cispo", "minibatches": 2},
    {"name": "reinforce_pp"},
]


# compiled: several rounds, several epochs (a reference below); each loss: tests/unit/test_rl_losses.py
@pytest.mark.parametrize(
    ("algorithm", "compiled"),
    [(one, False) for one in ALGORITHMS] + [pytest.param(one, True, marks=LONG) for one in ALGORITHMS[:2]],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_every_algorithm_takes_a_step(algorithm, compiled, tmp_path, monkeypatch):
    if compiled:
        row = GRPOTrainer(
            tiny_config(tmp_path / "run", algorithm=algorithm, warm_start=None), reward_functions=[shorter]
        ).dry_run()["metrics"]
    else:
        trainer = scripted_trainer(tmp_path / "run", monkeypatch, algorithm=algorithm)
        row = trainer.dry_run()["metrics"]
        assert trainer.parts.programs.updates == algorithm.get("minibatches", 1) * algorithm.get("epochs", 1)
    assert np.isfinite(row["loss/total"])
    assert ("policy/reference_kl" in row) == ("kl_coef" in algorithm)


CORRECTIONS: list[dict[str, Any]] = [
    {
        "weight": {"kind": "token_truncate", "normalize": True},
        "reject": {"kind": "k3", "level": "token", "high": 1e-7},
        "veto": 1e-4,
    },
    {"mode": "bypass"},
    {"weight": {"kind": "sequence_mask", "low": 0.99, "high": 1.01}},
]


# compiled: the two that differ most; each weight against float64: tests/unit/test_rl_correction.py
@pytest.mark.parametrize(
    ("correction", "compiled"),
    [(one, False) for one in CORRECTIONS] + [pytest.param(one, True, marks=LONG) for one in CORRECTIONS[:2]],
    ids=lambda value: value.get("weight", {"kind": "bypass"})["kind"] if isinstance(value, dict) else None,
)
def test_correction_of_the_flow_that_needs_one(correction, compiled, tmp_path, monkeypatch):
    fields = {"algorithm": {"minibatches": 2}, "correction": correction}
    if compiled:
        # compiles faster
        fields |= {
            "precision": {"preset": "fp8_rollout_only"},
            "numerics": {"exact": False},
            "warm_start": None,
        }
        trainer = GRPOTrainer(tiny_config(tmp_path / "run", **fields), reward_functions=[shorter])
    else:
        wider = {"reject": {"kind": "k3", "level": "token", "high": 0.15}} if "reject" in correction else {}
        wider |= (
            {"weight": {"kind": "sequence_mask", "low": 0.7, "high": 1.4}}
            if "weight" in correction and not wider
            else {}
        )
        # the script's mismatch is larger than that of an FP8 rollout
        fields["correction"] = correction | wider
        trainer = scripted_trainer(tmp_path / "run", monkeypatch, **fields)
    row = trainer.dry_run()["metrics"]
    assert np.isfinite(row["loss/total"]) and row["mismatch/logprob_abs_max"] > 1e-4
    if correction.get("mode") == "bypass":  # the first minibatch's ratio is the mismatch itself
        assert "correction/weight_mean" not in row and row["policy/old_kl"] > 0
    else:
        assert 0 < row["correction/weight_ess"] < 1
        assert (
            0
            < row[
                "correction/rejected_token_fraction"
                if "reject" in correction
                else "correction/bounded_fraction"
            ]
            < 1
        )


@LONG
def test_correction_of_an_exact_flow_changes_nothing(tmp_path):
    """Compiled, with what asks most of the programs: two minibatches, ratios of sequences,
    and a reference.
    """
    fields = {
        "warm_start": None,
        "precision": {"preset": "bf16"},
        "algorithm": {"name": "gspo", "kl_coef": 0.1, "minibatches": 2},
    }
    correction = {"weight": {"kind": "token_truncate", "normalize": True}, "reject": "k1", "veto": 1e-4}
    config = tiny_config(tmp_path / "corrected", **fields, correction=correction)
    corrected = GRPOTrainer(config, reward_functions=[shorter]).dry_run()["metrics"]
    assert np.isfinite(corrected["loss/total"]) and corrected["policy/reference_kl"] > 0, (
        "the second minibatch's policy has moved"
    )
    assert corrected["correction/weight_mean"] == corrected["correction/weight_ess"] == 1
    assert corrected["correction/rejected_token_fraction"] == 0
    plain = GRPOTrainer(tiny_config(tmp_path / "plain", **fields), reward_functions=[shorter]).dry_run()[
        "metrics"
    ]
    assert (
        corrected["loss/total"] == plain["loss/total"]
        and corrected["optimizer/grad_norm"] == plain["optimizer/grad_norm"]
    )


@LONG
def test_programs_of_warm_start_and_updates_are_traced_once(tmp_path, monkeypatch):
    """The two have an optimiser each, and so a check and an update each. Evaluations, a reference and two
    minibatches add no program.
    """
    trace_once(monkeypatch, check=2, update=2)
    fields = {
        "algorithm": {"kl_coef": 0.1, "minibatches": 2},
        "precision": {"preset": "fp8_rollout_only"},
        "numerics": {"exact": False},
    }
    config = tiny_config(
        tmp_path / "run", **fields, run={"steps": 3, "tensorboard": False}, eval={"every_steps": 1}
    )
    assert GRPOTrainer(config, reward_functions=[shorter]).train()["steps"] == 3


@pytest.mark.long
def test_loss_scale_falls_at_overflows_and_survives_a_resume(tmp_path, monkeypatch):
    """No program is traced twice meanwhile, neither for a state that was restored nor for the engine that
    samples from it.
    """
    trace_once(monkeypatch)
    directory = tmp_path / "run"
    fields = {
        "precision": {"preset": "fp16", "loss_scale": {"initial": 2.0**20, "growth_interval": 2}},
        "warm_start": None,
    }
    length = {"tensorboard": False, "samples_per_step": 0}
    whole = GRPOTrainer(
        tiny_config(tmp_path / "whole", **fields, run={"steps": 4, **length}), reward_functions=[shorter]
    )
    whole.train()
    expected = rows(tmp_path / "whole")[1:]
    assert {row["count/skipped_updates"] for row in expected} == {0, 1}, "overflows and updates"
    scales = [2.0**20, *(row["optimizer/loss_scale"] for row in expected)]
    assert set(np.diff(np.log2(scales))) == {-1, 0, 1}, "halved, kept and doubled"
    shutil.copytree(tmp_path / "whole", directory)
    shutil.rmtree(directory / "checkpoints" / "4")  # as if it had been stopped after its third step
    chex.clear_trace_counter()
    GRPOTrainer(
        tiny_config(directory, **fields, run={"steps": 4, **length}), reward_functions=[shorter], resume=True
    ).train()
    resumed = rows(directory)[1:]
    keys = ("step", "optimizer/loss_scale", "count/loss_scale_overflows", "loss/total")
    assert [[row[key] for key in keys] for row in resumed] == [[row[key] for key in keys] for row in expected]
    assert {row["mismatch/logprob_abs_max"] for row in expected} == {0.0}


def test_python_interface_takes_records_and_a_function(tmp_path, monkeypatch):
    """Trained for real in test_readme.py."""
    records = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
    config = tiny_config(tmp_path / "run", task=None, warm_start=None, run={"steps": 1, "tensorboard": False})
    monkeypatch.setattr(
        "jetrl_jax.runs.parts.build_engine", lambda policy, *_, **__: ScriptedEngine(policy.tokenizer)
    )
    outcome = ScriptedTrainer(config, dataset=records, reward_functions=[shorter]).train()
    assert outcome["steps"] == 1 and outcome["stopped_by"] is None
    assert "reward/shorter_mean" in rows(tmp_path / "run")[1]


def test_non_finite_steps_are_named_saved_and_stop_the_run(tmp_path, monkeypatch):
    class Broken(ScriptedEngine):
        def generate(self, requests, sampling):
            return [
                dataclasses.replace(t, logprobs=np.where(t.sampled, np.nan, t.logprobs))
                for t in super().generate(requests, sampling)
            ]

    run = {"steps": 6, "tensorboard": False, "max_skipped_steps": 3}
    with pytest.raises(
        RunStopped, match=r"3 updates in a row were not finite .*; the last: rollout_logprobs"
    ):
        scripted_trainer(tmp_path / "run", monkeypatch, Broken, run=run).train()
    saved = sorted(path.name for path in (tmp_path / "run" / "bad_batches").iterdir())
    assert len(saved) == 3 and "rollout_logprobs" in saved[0]


def test_one_nan_costs_its_sample_and_not_the_step(tmp_path, monkeypatch, capsys):
    """One completion of sixteen has no reward: the others are trained, and the metrics say how many were left
    out and why.
    """

    def shorter_but_one(completions, **kwargs):
        return [float("nan"), None, *shorter([], completions, [])[2:]]

    def raises_on_long(completions, **kwargs):
        if max(map(len, completions)) > 2:
            raise KeyError("too long")
        return [0.0] * len(completions)

    trainer = scripted_trainer(tmp_path / "run", monkeypatch, rewards=[shorter_but_one, raises_on_long])
    row = trainer.dry_run()["metrics"]
    assert row["count/reward_shorter_but_one_nan"] == row["count/reward_shorter_but_one_none"] == 1
    assert row["count/skipped_updates"] == 0 and row["policy/trained_tokens"] > 0
    assert row["count/masked_samples"] == 2 + row["count/reward_raises_on_long_exception"] < 16
    assert "step 1: reward raises_on_long: KeyError: 'too long'" in "".join(capsys.readouterr())


@pytest.mark.parametrize("limit", [0, 3])
def test_a_run_without_a_signal_says_so_and_may_end(limit, tmp_path, monkeypatch, capsys):
    """Equal rewards: a warning after ten steps in a row and at the end, or the end that the config asks for;
    a resume counts on.
    """
    seen = []

    def equal_but_once(completions, **kwargs):
        seen.append(None)
        return [float(i) if len(seen) == 2 else 1.0 for i in range(len(completions))]

    def trainer(steps, **options):
        run = {"steps": steps, "tensorboard": False, "max_steps_without_signal": limit}
        return scripted_trainer(tmp_path / "run", monkeypatch, rewards=[equal_but_once], run=run, **options)

    if limit:
        with pytest.raises(
            RunStopped,
            match=r"step 5: in 3 steps in a row all rewards of each group were "
            r"equal.*max_steps_without_signal",
        ):
            trainer(20).train()
        assert [row["count/steps_without_signal"] for row in rows(tmp_path / "run")[1:]] == [1, 0, 1, 2]
        return
    trainer(8).train()
    assert "in the last 6 of the run's 8 steps" not in " ".join("".join(capsys.readouterr()).split())
    trainer(13, resume=True).train()
    said = " ".join("".join(capsys.readouterr()).split())
    assert [row["count/steps_without_signal"] for row in rows(tmp_path / "run")[1:]] == [1, 0, *range(1, 12)]
    assert said.count("step 12: in 10 steps in a row all rewards of each group were equal") == 1
    assert "in the last 11 of the run's 13 steps all rewards of each group were equal" in said


def test_an_infinite_reward_ends_the_run_with_its_sample(tmp_path, monkeypatch):
    def judge(completions, **kwargs):
        return [float("inf"), *[0.0] * (len(completions) - 1)]

    with pytest.raises(
        UserError, match=r"^reward judge: returned inf for completion 0 \('\d+' after the prompt"
    ):
        scripted_trainer(tmp_path / "run", monkeypatch, rewards=[judge]).train()


def no_reward(prompts, completions, answers):
    """A function that masks all."""
    return [None] * len(completions)


def test_steps_without_anything_to_train_on_stop_the_run(tmp_path, monkeypatch, capsys):
    run = {"steps": 6, "tensorboard": False, "max_skipped_steps": 3}
    with pytest.raises(RunStopped, match="3 updates in a row were not finite or had nothing to train on"):
        scripted_trainer(tmp_path / "run", monkeypatch, rewards=[no_reward], run=run).train()
    assert [row["count/skipped_updates"] for row in rows(tmp_path / "run")[1:]] == [1, 1]
    assert "no completion is trained (none has a reward" in "".join(capsys.readouterr())


def test_non_finite_gradient_leaves_the_policy_as_it_was(tmp_path):
    import jax
    from flax import nnx

    trainer = GRPOTrainer(tiny_config(tmp_path / "run", warm_start=None))
    programs = trainer.parts.programs
    state = programs.init(trainer.policy.params)
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    bad = "layers.0.mlp.up_proj.weight"
    grads = nnx.from_flat_state(
        [
            (
                path,
                variable.replace(variable.get_value() * (np.nan if ".".join(map(str, path)) == bad else 0.0)),
            )
            for path, variable in nnx.to_flat_state(state.params)
        ]
    )
    state, report = programs.update(state, grads)
    assert f"gradient {bad}" in report.nonfinite and all(
        bad in name or "parameter" in name or "scale" in name for name in report.nonfinite
    )
    chex.assert_trees_all_equal(before, (state.params, state.opt_state))
    chex.assert_tree_all_finite(state.params)


def test_a_tiny_config_has_the_lists_that_it_is_given(tmp_path):
    config = tiny_config(
        tmp_path / "run", rewards=[{"name": "tiny:noted", "weight": 2.0}, {"name": "tiny:shorter"}]
    )
    assert [(reward.name, reward.weight) for reward in config.rewards] == [
        ("tiny:noted", 2.0),
        ("tiny:shorter", 1.0),
    ]


def test_prompts_that_never_fit_end_with_a_message(tmp_path):
    with pytest.raises(UserError, match="max_prompt_tokens"):
        GRPOTrainer(tiny_config(tmp_path / "run", rollout=TINY["rollout"] | {"max_prompt_tokens": 2})).train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": {"kind": "jsonl", "path": "bad.jsonl", "name": None, "options": {}}}, "broken record"),
        (
            {"tokenizer": {"kind": "huggingface", "path": "files", "chat_template": True}},
            "does not write the user's text|needs the package",
        ),
        ({"model": {"path": "nowhere", **dict.fromkeys(TINY["model"])}}, "no config.json"),
        (
            {"model": {"path": "files", **dict.fromkeys(TINY["model"])}},
            "config.json: from_hf: unsupported model",
        ),
    ],
    ids=["task", "template", "model", "sizes"],
)
def test_what_the_inputs_say_wrong_is_told_before_a_device_is_touched(fields, message, tmp_path, monkeypatch):
    import jax

    def touched(*arguments, **options):
        raise AssertionError("a device was asked for")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    write_files(
        tmp_path / "files",
        template="solve it" + "{% if add_generation_prompt %}:{% endif %}",
        config={"model_type": "gpt2"},
    )
    config = tiny_config(tmp_path / "run")
    data = config.model_dump(exclude_unset=True)
    for section, values in fields.items():
        data[section] = {
            name: value for name, value in (data.get(section, {}) | values).items() if value is not None
        }
    for name in (
        "devices",
        "local_devices",
        "default_backend",
        "process_count",
        "process_index",
        "device_put",
    ):
        monkeypatch.setattr(jax, name, touched)
    with pytest.raises(UserError, match=message):
        GRPOTrainer(config_from_dict(data))
    assert not (tmp_path / "run").exists()


def test_a_vllm_that_cannot_sleep_here_is_refused_before_anything_is_written(tmp_path):
    fields = {
        "model": TINY["model"],
        "rollout": {"engine": {"kind": "vllm", "sleep": True}},
        "run": {"directory": str(tmp_path / "run")},
    }
    with pytest.raises(UserError, match=r"rollout\.engine\.sleep: got true on a CPU"):
        GRPOTrainer(config_from_dict(fields), reward_functions=[shorter])
    assert not (tmp_path / "run").exists()


def test_answers_that_a_reward_cannot_compare_are_refused_before_anything_is_written(tmp_path):
    lines = [{"prompt": f"q{i}", "answer": "1/2" if i == 7 else str(i)} for i in range(41)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}
    for rewards, verifier in (
        ([{"name": "boxed"}], {}),
        ([{"name": "task"}], {"options": {"verifier": "boxed"}}),
    ):
        fields = {
            "model": TINY["model"],
            "task": task | verifier,
            "rewards": rewards,
            "run": {"directory": str(tmp_path / "run")},
        }
        with pytest.raises(
            UserError,
            match=r"1 broken record:\n .*t\.jsonl:8: .*boxed.*: got '1/2', expected a number as a whole",
        ):
            GRPOTrainer(config_from_dict(fields))
        assert not (tmp_path / "run").exists()


SUMS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b), "solution": str(a + b), "level": 1}
    for a in range(10)
    for b in range(10)
]


def test_a_resume_on_other_data_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    """And one by other implementations, such as on a GPU after a CPU.

    One record of a hundred is another one; before, 64 examples' prompts and answers were looked at."""
    monkeypatch.setattr(
        "jetrl_jax.runs.parts.build_engine", lambda policy, *_, **__: ScriptedEngine(policy.tokenizer)
    )

    def trainer(data, steps, **options):
        config = tiny_config(
            tmp_path / "run", task=None, warm_start=None, run={"steps": steps, "tensorboard": False}
        )
        return ScriptedTrainer(config, dataset=data, reward_functions=[shorter], **options)

    trainer(SUMS, 1).train()
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    held_out = {example.prompt for example in trainer(SUMS, 2).task.eval}
    changed = next(index for index in range(50, 100) if SUMS[index]["prompt"] not in held_out)
    for change in ({"answer": "0"}, {"solution": "0"}, {"level": 2}, {"prompt": "9+9+9="}):
        with pytest.raises(
            UserError, match=r"not that of the run:\n  data\.(train|eval)\.\w+: saved '\w+', now '\w+'"
        ):
            trainer([*SUMS[:changed], SUMS[changed] | change, *SUMS[changed + 1 :]], 2, resume=True).train()
    with monkeypatch.context() as elsewhere, pytest.raises(UserError) as error:
        own = Choices.names
        elsewhere.setattr(Choices, "names", lambda self: own(self) | {"attention": "mosaic_gpu"})
        trainer(SUMS, 2, resume=True).train()
    assert "other implementations" in str(error.value)
    assert "  attention: saved 'xla', now 'mosaic_gpu'" in str(error.value).splitlines()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files
    assert trainer(SUMS, 2, resume=True).train()["steps"] == 2


@pytest.mark.parametrize("reject_level", ["token", "sequence_mean"])
def test_train_tokens_are_those_that_the_programs_are_given(reject_level, tmp_path, monkeypatch):
    """Rejected whole, a completion is not packed; of one that is packed, the programs read every token, in
    the loss or not.
    """
    seen, trained, real = [], [], ScriptedPrograms.policy_gradient

    def policy_gradient(self, state, batch, *arguments):
        seen.append(batch.segment_ids > 0)
        trained.append(batch.loss_mask)
        return real(self, state, batch, *arguments)

    monkeypatch.setattr(ScriptedPrograms, "policy_gradient", policy_gradient)
    # about the script's own mismatch
    correction = {"reject": {"kind": "k3", "level": reject_level, "high": 0.15}}
    trainer = scripted_trainer(
        tmp_path / "run", monkeypatch, algorithm={"epochs": 2, "minibatches": 2}, correction=correction
    )
    row = trainer.dry_run()["metrics"]
    sequences = row["count/completions"] * (
        row["length/completion_tokens_mean"] + row["length/prompt_tokens_mean"]
    )
    assert 0 < row["correction/rejected_sequence_fraction"] < 1
    assert row["count/train_tokens"] == np.sum(seen) < 2 * sequences
    assert row["policy/trained_tokens"] == np.sum(trained) < row["count/train_tokens"]
    assert row["count/padding_fraction"] == pytest.approx(1 - np.mean(seen))


def test_the_engine_sleeps_while_the_trainer_learns_and_at_no_other_time(tmp_path, monkeypatch):
    """Scored, differentiated and updated while it sleeps; sampled while it does not."""
    asleep, calls = [False], []

    class Engine(ScriptedEngine):
        def sleep(self):
            calls.append("sleep")
            asleep[0] = True

        def load(self, published, version):
            calls.append("load")
            asleep[0] = False
            super().load(published, version)

        def generate(self, requests, sampling):
            calls.append("generate")
            assert not asleep[0]
            return super().generate(requests, sampling)

    def while_asleep(name):
        real = getattr(ScriptedPrograms, name)

        def program(self, *arguments):
            calls.append(name)
            assert asleep[0], name
            return real(self, *arguments)

        monkeypatch.setattr(ScriptedPrograms, name, program)

    for name in ("logprobs", "policy_gradient", "update"):
        while_asleep(name)
    scripted_trainer(tmp_path / "run", monkeypatch, Engine, algorithm={"minibatches": 2}).dry_run()
    order = [name for name, _ in itertools.groupby(calls)]
    assert order == [
        "load",
        "generate",
        "sleep",
        "logprobs",
        "policy_gradient",
        "update",
        "policy_gradient",
        "update",
        "load",
    ]


def test_a_resumed_run_goes_on_from_its_counters_and_loads_its_weights_once(tmp_path, monkeypatch):
    loaded = []

    class Engine(ScriptedEngine):
        def _load(self, published, version):
            loaded.append(version)

    def train(steps, resume=False):
        trainer = scripted_trainer(
            tmp_path / "run", monkeypatch, Engine, resume=resume, run={"steps": steps, "tensorboard": False}
        )
        trainer.train()
        with CheckpointStore(tmp_path / "run" / "checkpoints", read_only=True) as store:
            return store.read_metadata(steps)["metadata"]

    first = train(2)
    assert loaded == [0, 1, 2] and first["policy_version"] == first["updates"] == 2
    second = train(3, resume=True)
    assert loaded == [0, 1, 2, 2, 3] and second["policy_version"] == second["updates"] == 3
    assert second["prompt_cursor"] * 2 == first["prompt_cursor"] * 3 and list(second) == list(first)
    counters = Counters.of(second)
    assert {name: second[name] for name in dataclasses.asdict(counters)} == dataclasses.asdict(counters)


def test_a_run_does_not_go_on_where_a_dry_run_or_a_stopped_run_of_the_same_trainer_ended(
    tmp_path, monkeypatch
):
    trainer = scripted_trainer(tmp_path / "run", monkeypatch, run={"steps": 2})
    prompts = trainer.parts.prompts
    trainer.dry_run()
    drawn = prompts.cursor
    trainer.dry_run()
    assert 0 < drawn == prompts.cursor
    trainer.parts.stop_signals.received = signal.SIGTERM  # of a run before
    assert trainer.train()["stopped_by"] is None
    assert prompts.cursor == 2 * drawn
