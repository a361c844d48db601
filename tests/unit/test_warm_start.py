"""Warm start: what is drawn, how much noise it carries, and the loop around the supervised steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jetrl_jax.collect.prompts import PromptStream
from jetrl_jax.config.learning import WarmStartSection
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.rl.batching import TrainBatch
from jetrl_jax.tasks.base import Example
from jetrl_jax.tasks.records import ListTask
from jetrl_jax.tasks.registry import build_task
from jetrl_jax.text.tokenizer import CharacterTokenizer
from jetrl_jax.training.programs import UpdateReport
from jetrl_jax.training.warm_start import SolutionSampler, build_warm_start_optimizer, warm_start
from tests.sections import task_section

TOKENIZER = CharacterTokenizer("=abcdefghijklmnopqrstuvwxyz")
EOS = TOKENIZER.eos_ids[0]
ROW = 16
TASK = build_task(
    task_section(
        name="reverse", options={"min_letters": 3, "max_letters": 7, "train_size": 2000, "eval_size": 50}
    ),
    0,
)


def sampler(task: Any = TASK, seed: int = 0, **options: Any) -> SolutionSampler:
    sizes = {
        "row_tokens": options.pop("row_tokens", ROW),
        "max_prompt_tokens": options.pop("max_prompt_tokens", 8),
    }
    section = WarmStartSection(**({"steps": 1, "batch_size": 64} | options))
    return SolutionSampler(task, TOKENIZER, section, seed=seed, **sizes)


def rows(batch: TrainBatch) -> list[tuple[str, str, int]]:
    """(prompt, what is trained without the last token, last token) of every row, from the arrays alone."""
    found = []
    for ids, segments, mask in zip(batch.token_ids, batch.segment_ids, batch.loss_mask, strict=True):
        length = int(segments.sum())
        assert (
            np.array_equal(segments, np.arange(ROW) < length)
            and mask[:length].nonzero()[0][-1] == length - 1
            and not mask[length:].any()
        )
        start = int(mask.argmax())
        assert mask[start:length].all() and not mask[:start].any()
        found.append(
            (
                TOKENIZER.decode(ids[:start].tolist()),
                TOKENIZER.decode(ids[start : length - 1].tolist()),
                int(ids[length - 1]),
            )
        )
    return found


def test_without_noise_rows_hold_prompts_and_their_solutions() -> None:
    batch = sampler().batch(0)
    assert (
        batch.token_ids.shape == (64, ROW)
        and batch.token_ids.dtype == np.int32
        and batch.loss_mask.dtype == bool
    )
    assert np.array_equal(batch.positions, np.tile(np.arange(ROW), (64, 1)))
    assert batch.sequence_index.max() == 63 and np.array_equal(
        batch.sequence_index >= 0, batch.segment_ids > 0
    )
    for prompt, solution, last in rows(batch):
        assert prompt.endswith("=") and solution == prompt[-2::-1] and last == EOS
    assert len({prompt for prompt, _, _ in rows(batch)}) > 32


def test_noise_replaces_its_share_of_tokens_and_keeps_lengths_and_stops() -> None:
    noise, wrong, total = 0.15, 0, 0
    noisy = sampler(noise=noise)
    for step in range(20):
        for prompt, solution, last in rows(noisy.batch(step)):
            right = prompt[-2::-1]
            assert (
                len(solution) == len(right)
                and last == EOS
                and set(solution) <= set("abcdefghijklmnopqrstuvwxyz")
            )
            wrong += sum(a != b for a, b in zip(solution, right, strict=True))
            total += len(right)
    deviation = (noise * (1 - noise) / total) ** 0.5
    assert abs(wrong / total - noise) < 5 * deviation, (wrong / total, deviation)


def test_full_noise_leaves_no_token_right_but_the_stop() -> None:
    for prompt, solution, last in rows(sampler(noise=1.0).batch(0)):
        assert all(a != b for a, b in zip(solution, prompt[-2::-1], strict=True)) and last == EOS


def test_batch_is_a_function_of_seed_and_step() -> None:
    def batch(seed: int, step: int) -> bytes:
        return sampler(seed=seed, noise=0.3).batch(step).token_ids.tobytes()

    used = sampler(noise=0.3)
    used.batch(4)
    assert used.batch(3).token_ids.tobytes() == batch(0, 3), "batches before must not matter"
    assert len({batch(0, 3), batch(0, 4), batch(1, 3)}) == 3


class Forbidden:
    """A held-out split that nobody may touch."""

    def __len__(self) -> int:
        raise AssertionError("the warm start looked at the held-out split")

    __getitem__ = __iter__ = __len__


def test_held_out_prompts_are_never_drawn() -> None:
    held_out = {example.prompt for example in TASK.eval}
    small = build_task(
        task_section(
            name="reverse", options={"min_letters": 1, "max_letters": 2, "train_size": 500, "eval_size": 40}
        ),
        0,
    )
    held_out |= {example.prompt for example in small.eval}
    for task in (TASK, small):
        spied = ListTask("spied", task.train, Forbidden())  # type: ignore[arg-type]
        drawn = {prompt for step in range(10) for prompt, _, _ in rows(sampler(spied).batch(step))}
        assert drawn and not drawn & held_out


def test_solutions_that_do_not_fit_are_passed_over() -> None:
    long, short, bare = Example("abc=", "x", "x" * 20), Example("ab=", "ba", "ba"), Example("abcd=", "dcba")
    wordy = Example("abcdefghi=", "a", "a")
    batch = sampler(ListTask("mixed", [long, bare, wordy, short], [])).batch(0)
    assert {prompt for prompt, _, _ in rows(batch)} == {"ab="}
    edge = Example("abcdefg=", "gfedcba", "gfedcba")  # 8 + 7 + the stop token: exactly a row
    assert {solution for _, solution, _ in rows(sampler(ListTask("edge", [edge], [])).batch(0))} == {
        "gfedcba"
    }
    for options in ({"row_tokens": 15}, {"max_prompt_tokens": 7}):
        with pytest.raises(UserError, match="no usable worked solution"):
            sampler(ListTask("edge", [edge], []), **options)
    with pytest.raises(UserError, match=r"warm_start: null"):
        sampler(ListTask("bare", [bare], []))


def test_alphabet_of_one_letter_has_nothing_to_put_in_its_place() -> None:
    batch = sampler(ListTask("one", [Example("a=", "aa", "aa")], []), noise=1.0).batch(0)
    assert {solution for _, solution, _ in rows(batch)} == {"aa"}


@dataclasses.dataclass
class StubPrograms:
    """Losses 10, 9, 8 ... ; not finite at step `bad_step`."""

    bad_step: int = -1
    tokens: list[float] = dataclasses.field(default_factory=list)

    def supervised_gradient(self, state: int, batch: TrainBatch, tokens: float) -> tuple[int, float, None]:
        assert tokens == batch.loss_mask.sum()
        self.tokens.append(tokens)
        return state, 11.0 - len(self.tokens), None

    def recalibrated(self, state: int) -> int:
        return state

    def update(self, state: int, grads: int, largest: None = None) -> tuple[int, UpdateReport]:
        bad = len(self.tokens) == self.bad_step
        return state + 1, UpdateReport(1.0, ("gradient norm.weight",) if bad else ())


def test_loop_reports_every_step_and_the_loss_of_its_end() -> None:
    section, seen = WarmStartSection(steps=20, batch_size=4), []
    state, loss = warm_start(
        StubPrograms(), 0, sampler(batch_size=4), section, lambda *args: seen.append(args)
    )  # type: ignore[arg-type]
    assert state == 20 and [step for step, _ in seen] == list(range(1, 21)) and seen[0][1] == 10.0
    assert loss == np.mean([-8.0, -9.0])  # the last two of twenty


def test_loop_stops_at_a_step_that_is_not_finite() -> None:
    section = WarmStartSection(steps=20, batch_size=4)
    with pytest.raises(RunStopped, match=r"step 3 is not finite: gradient norm\.weight"):
        warm_start(StubPrograms(bad_step=3), 0, sampler(batch_size=4), section, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 2, 7, 500])
def test_optimizer_takes_any_number_of_steps(steps: int) -> None:
    build_warm_start_optimizer(WarmStartSection(steps=steps))


def test_prompt_stream_is_every_prompt_once_an_epoch_and_resumes() -> None:
    task = ListTask("ten", [Example(f"{'abcdefghij'[i]}=", "", "") for i in range(10)], [])

    def stream(seed: int = 0) -> PromptStream:
        return PromptStream(task, TOKENIZER, max_prompt_tokens=4, seed=seed)

    def names(prompts: list[Any]) -> str:
        return "".join(prompt.example.prompt[0] for prompt in prompts)

    one = stream()
    drawn = names(one.take(7)) + names(one.take(16)) + names(one.take(7))
    epochs = [drawn[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list("abcdefghij") for epoch in epochs) and len(set(epochs)) == 3
    resumed = stream()
    resumed.cursor = 23
    assert names(resumed.take(7)) == drawn[23:] and resumed.cursor == 30
    assert names(stream(1).take(10)) != epochs[0]


def test_prompt_stream_skips_what_is_too_long_and_says_when_all_is() -> None:
    examples = [Example("abcdef=", ""), Example("ab=", ""), Example("abcdefg=", "")]
    stream = PromptStream(ListTask("some", examples, []), TOKENIZER, max_prompt_tokens=3, seed=0)
    assert {prompt.example.prompt for prompt in stream.take(4)} == {"ab="}
    assert stream.cursor == 4 + stream.skipped
    short = PromptStream(ListTask("none", examples, []), TOKENIZER, max_prompt_tokens=2, seed=0)
    with pytest.raises(UserError, match=r"no training prompt fits.*max_prompt_tokens=2"):
        short.take(1)
