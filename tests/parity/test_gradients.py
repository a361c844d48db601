"""Gradients of the policy: against float64 differences, and of a batch against the sum over its microbatches.

WGrad's FP8 blocks run along tokens, so another split of a batch quantises dY and X in other groups.  With q =
Q(a) the codes of an operand, |q - a| <= u A, where u = 2**-4 (E4M3) and A = max(|a|, 2**-6 scale) covers
subnormal codes, any split is off the unquantised product by

    |dW_fp8 - dY^T X| <= (2 u + u^2) A_dY^T A_X            elementwise

and two splits differ by at most twice that.  A is taken from the codes of the whole batch: |a| <= |q| / (1 -
u), and the largest scale of a column bounds that of every split.  Measured here: 1 to 3 % of a tensor's norm;
BF16 and FP32 flows differ by 2e-7.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax.models import linear
from jetrl_jax.models.ops import rms_norm
from jetrl_jax.precision.parameters import map_params, named_params
from jetrl_jax.rl.algorithm import resolve_algorithm
from jetrl_jax.rl.batching import TrainBatch, count_denominators, pack
from jetrl_jax.rl.losses import Denominators
from jetrl_jax.training.programs import PolicyPrograms, TrainState
from pallas_kernels import ScaledArray
from tests.oracles import decoder_oracle, rl_oracle
from tests.oracles.tolerances import U_BF16, U_E4M3, gamma
from tests.parity.small_policy import CONFIG, SmallPolicy, trajectories
from tests.sections import algorithm_section

pytestmark = pytest.mark.compiled_quickly

LENGTHS = [(5, 43), (3, 40), (9, 21), (2, 14), (4, 44), (6, 38)]
ROW_TOKENS = 48
ADVANTAGES = [1.2, -0.7, 0.4, -1.1, 0.9, -0.3]
ALGORITHM = resolve_algorithm(algorithm_section(), 44)
Gradient = dict[str, np.ndarray]
# The longest chain of FP32 sums behind a gradient.  Between operations a BF16 rounding is tipped over by an
# FP32 error e with probability e / u, and moves the value by 2 u; at most 20 of them lie in a row, and they
# add up as squares in the norm.
FP32_BOUND = gamma(5 * ROW_TOKENS + 3 * CONFIG.intermediate_size + 4 * CONFIG.hidden_size)
BF16_BOUND = FP32_BOUND + 2 * U_BF16 * (20 * FP32_BOUND / U_BF16) ** 0.5


class Flow:
    """One preset's programs; gradients of a batch in any split."""

    def __init__(self, preset: str) -> None:
        small = SmallPolicy(preset, exact=preset != "fp32")
        self.small = small
        self.programs = PolicyPrograms(
            small.model, small.plan, optax.sgd(1.0), temperature=0.8, chunk_tokens=1000
        )
        self.state = TrainState(small.params, (), small.published)

    def gradient(
        self, batches: list[TrainBatch], denominators: Denominators
    ) -> tuple[Gradient, list[Gradient], float]:
        """(accumulated by the trainer's own `add`, the shares, the loss)."""
        total: Any = None
        shares, loss = [], 0.0
        for batch in batches:
            grads, stats, _ = self.programs.policy_gradient(self.state, batch, denominators, ALGORITHM)
            shares.append({path: np.array(value) for path, value in named_params(grads)})
            total = self.programs.add(total, grads)
            loss += float(stats["loss"])
        return {path: np.asarray(value) for path, value in named_params(total)}, shares, loss


flow = functools.cache(Flow)


def split(rows: int) -> list[TrainBatch]:
    """The whole batch, five rows of 48 tokens, in microbatches of `rows`."""
    count = len(LENGTHS)
    return pack(trajectories(LENGTHS), ADVANTAGES, np.ones(count, bool), ROW_TOKENS, rows * ROW_TOKENS)


def dealt() -> list[TrainBatch]:
    """Two microbatches of every other trajectory, rows left empty: the program of the whole batch, other
    blocks of tokens.
    """
    ones = np.ones(len(LENGTHS), bool)

    def part(indices: list[int]) -> list[TrainBatch]:
        return pack(trajectories(LENGTHS), ADVANTAGES, ones, ROW_TOKENS, 5 * ROW_TOKENS, indices=indices)

    return [*part([0, 2, 4]), *part([1, 3, 5])]


def global_denominators() -> Denominators:
    whole = split(5)
    assert len(whole) == 1 and len(split(1)) == 5 and len(dealt()) == 2
    return count_denominators(whole, 44)


def relative(a: np.ndarray, b: np.ndarray, shares: list[Gradient], path: str) -> float:
    """Frobenius norm of a - b over that of what was added up (the shares may cancel)."""
    return float(np.linalg.norm(a - b) / sum(np.linalg.norm(share[path]) for share in shares))


@pytest.mark.parametrize("preset", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_gradient_of_a_batch_is_the_sum_over_any_split(preset: str) -> None:
    """To roundoff; microbatches of other contents in the same program, and (BF16) of another shape."""
    bound = FP32_BOUND if preset == "fp32" else BF16_BOUND
    denominators = global_denominators()
    whole, _, loss = flow(preset).gradient(split(5), denominators)
    worst = 0.0
    for batches in (dealt(),) if preset == "fp32" else (dealt(), split(1)):
        summed, shares, split_loss = flow(preset).gradient(batches, denominators)
        assert split_loss == pytest.approx(loss, abs=1e-6)
        for path in whole:
            worst = max(worst, relative(whole[path], summed[path], shares, path))
    print(
        f"\n{preset}: largest relative difference of a tensor's gradient between splits {worst:.2e}, "
        f"bound {bound:.2e}"
    )
    assert worst <= bound


def test_gradient_of_a_norm_weight_is_an_fp32_sum() -> None:
    """Each share is rounded by FP32 alone, so shares can be added up."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(50, 64)), jnp.bfloat16) for _ in range(2))
    numerics = flow("bf16").small.numerics
    for weight in (jnp.ones(64, jnp.float32), jnp.full(64, 1.3, jnp.float32)):
        _, pullback = jax.vjp(lambda w: rms_norm(x, w, 1e-6, numerics), weight)
        # normed, rounded once
        ones = np.asarray(rms_norm(x, jnp.ones(64, jnp.float32), 1e-6, numerics)).astype(np.float64)
        terms = np.asarray(dy).astype(np.float64) * ones
        assert np.all(np.abs(np.asarray(pullback(dy)[0]) - terms.sum(0)) <= gamma(51) * np.abs(terms).sum(0))


def test_every_tensor_has_a_gradient_in_fp32() -> None:
    for preset in ("fp32", "bf16", "fp8_unified"):
        whole, _, _ = flow(preset).gradient(split(5), global_denominators())
        assert set(whole) == set(flow(preset).small.paths)
        for path, value in whole.items():
            assert value.dtype == np.float32 and np.all(np.isfinite(value)) and np.any(value != 0), path


def magnitude(array: ScaledArray) -> jax.Array:
    """A of the module docstring for every element of an operand in (128, 1) blocks, from its codes."""
    return jnp.maximum(
        jnp.abs(array.dequantize()) / (1 - U_E4M3), 2.0**-6 * array.scale.max(0, keepdims=True)
    )


def magnitudes(
    monkeypatch: pytest.MonkeyPatch, batches: list[TrainBatch], denominators: Denominators
) -> Gradient:
    """A_dY^T A_X in place of every dW."""
    with monkeypatch.context() as patch:
        patch.setattr(linear, "wgrad", lambda dy, x, **_: magnitude(dy).T @ magnitude(x))
        return Flow("fp8_unified").gradient(batches, denominators)[0]


def test_fp8_gradient_of_a_split_is_within_the_quantisation_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """240 tokens in two blocks, and the same trajectories dealt to two microbatches."""
    denominators = global_denominators()
    whole, _, _ = flow("fp8_unified").gradient(split(5), denominators)
    summed, shares, _ = flow("fp8_unified").gradient(dealt(), denominators)
    magnitude_whole = magnitudes(monkeypatch, split(5), denominators)
    measured, other = {}, 0.0
    for path in whole:
        difference = np.abs(whole[path] - summed[path])
        if not path.endswith("_proj.weight"):
            other = max(other, relative(whole[path], summed[path], shares, path))
            continue
        limit = 2 * (2 * U_E4M3 + U_E4M3**2) * magnitude_whole[path]
        assert np.all(difference <= limit * (1 + BF16_BOUND)), (
            f"{path}: worst ratio {(difference / limit).max()}"
        )
        measured[path] = float(np.linalg.norm(difference) / np.linalg.norm(whole[path]))
    listed = ", ".join(f"{path.split('.')[-2]} {value:.3f}" for path, value in measured.items())
    print(
        f"\nfp8_unified: |difference between splits| / |gradient|, Frobenius: {listed}; other tensors "
        f"{other:.1e}"
    )
    assert min(measured.values()) > 1e-3, "the blocks did not move: the case shows nothing"
    # Two independent quantisations of two operands: (2 u + u^2) twice bounds every product; they do not all
    # line up.
    assert max(measured.values()) <= 2 * (2 * U_E4M3 + U_E4M3**2)
    assert other <= BF16_BOUND  # nothing but WGrad reads the blocks along tokens


def test_fp8_gradients_resemble_the_unquantised() -> None:
    """Straight-through: direction and length of the FP32 gradient, within a few times the quantisation's
    noise.
    """
    denominators = global_denominators()
    reference, _, _ = flow("fp32").gradient(split(5), denominators)
    for preset, least in (("bf16", 1 - 8 * U_BF16), ("fp8_unified", 1 - 4 * U_E4M3)):
        gradient, _, _ = flow(preset).gradient(split(5), denominators)
        for path, expected in reference.items():
            cosine = (
                np.vdot(gradient[path], expected) / np.linalg.norm(gradient[path]) / np.linalg.norm(expected)
            )
            assert cosine >= least, f"{preset} {path}: {cosine}"


def oracle_loss(
    weights: dict[str, np.ndarray], old: list[np.ndarray] | None
) -> tuple[float, list[np.ndarray]]:
    """The GRPO loss (token mean) in float64, and the log-probabilities of the completions."""
    config = {
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "head_dim": CONFIG.head_dim,
        "rope_theta": CONFIG.rope_theta,
        "rope_scaling": None,
        "num_hidden_layers": CONFIG.num_layers,
        "tie_word_embeddings": True,
    }
    logprobs = []
    for trajectory in trajectories(LENGTHS)[3:4] + trajectories(LENGTHS)[2:3]:
        tokens = [*trajectory.prompt_ids.tolist(), *trajectory.completion_ids.tolist()]
        logits = decoder_oracle.logits(config, weights, tokens) / float(np.float32(0.8))
        logits -= logits.max(-1, keepdims=True)
        log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        first = len(trajectory.prompt_ids)
        logprobs.append(np.array([log_softmax[t - 1, tokens[t]] for t in range(first, len(tokens))]))
    advantages = (ADVANTAGES[3], ADVANTAGES[2])
    before = logprobs if old is None else old
    terms = [
        rl_oracle.token_loss(a, b, advantage, ALGORITHM.clip_low, ALGORITHM.clip_high, None)
        for now, then, advantage in zip(logprobs, before, advantages, strict=True)
        for a, b in zip(now, then, strict=True)
    ]
    return float(np.sum(terms) / len(terms)), logprobs


def test_gradient_matches_float64_differences_of_the_oracle_decoder() -> None:
    """The whole chain in FP32, model, packing, temperature, loss: along random directions and along single
    tensors.
    """
    small = flow("fp32").small
    weights = {f"model.{path}": np.asarray(value, np.float64) for path, value in named_params(small.params)}
    batches = pack(
        trajectories(LENGTHS), ADVANTAGES, np.ones(6, bool), ROW_TOKENS, 5 * ROW_TOKENS, indices=[2, 3]
    )
    gradient, _, loss = flow("fp32").gradient(batches, count_denominators(batches, 44))
    value, old = oracle_loss(weights, None)
    assert loss == pytest.approx(value, abs=1e-5)
    rng = np.random.default_rng(0)
    directions = [list(gradient)] + [[path] for path in gradient]
    for paths in directions:
        direction = {f"model.{path}": rng.normal(size=gradient[path].shape) for path in paths}
        step = 1e-5

        def at(sign: int, direction: dict[str, np.ndarray] = direction, step: float = step) -> float:
            return oracle_loss(
                {name: w + sign * step * direction.get(name, 0.0) for name, w in weights.items()}, old
            )[0]

        expected = (at(1) - at(-1)) / (2 * step)
        got = sum(
            float(np.vdot(gradient[path].astype(np.float64), direction[f"model.{path}"])) for path in paths
        )
        length = np.sqrt(sum(float(np.vdot(gradient[path], gradient[path])) for path in paths))
        assert abs(got - expected) <= 1e-4 * length, (
            f"{paths[0]}: got {got}, expected {expected}, |gradient| {length}"
        )


def test_products_that_add_give_the_bits_of_adding_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the kernels of WGrad add to the sum over the microbatches before."""
    programs, state = flow("fp8_unified").programs, flow("fp8_unified").state
    assert not programs.adds_in_kernels and programs.plan.adds("layers.0.mlp.up_proj.weight")
    expected = flow("fp8_unified").gradient(dealt(), global_denominators())[0]
    monkeypatch.setattr(programs, "adds_in_kernels", True)
    total: Any = None
    for batch in dealt():
        total, stats, _ = programs.next_gradient(total, state, batch, global_denominators(), ALGORITHM)
    assert np.isfinite(float(stats["loss"]))
    added = 0
    for path, value in named_params(total):
        if programs.plan.adds(path):
            np.testing.assert_array_equal(np.asarray(value), expected[path], err_msg=path)
            added += 1
        else:  # XLA may begin a sum over tokens with what was there before
            error = np.linalg.norm(np.asarray(value) - expected[path])
            assert error <= 1e-6 * np.linalg.norm(expected[path]), path
    assert added == 7 * CONFIG.num_layers


def test_supervised_gradient_is_that_of_the_mean_cross_entropy() -> None:
    """The same program with weights one: -mean(logprob) has the policy gradient of advantage one at ratio
    one.
    """
    programs, state = flow("fp32").programs, flow("fp32").state
    ones = np.ones(len(LENGTHS))
    (batch,) = pack(trajectories(LENGTHS), ones, ones.astype(bool), ROW_TOKENS, 5 * ROW_TOKENS)
    denominators = count_denominators([batch], 44)
    grads, loss, _ = programs.supervised_gradient(state, batch, float(denominators.tokens))
    policy_grads, _, logprobs = programs.policy_gradient(state, batch, denominators, ALGORITHM)
    assert float(loss) == pytest.approx(
        -float(np.asarray(logprobs)[batch.loss_mask].mean(dtype=np.float64)), rel=1e-6
    )
    for (path, a), (_, b) in zip(named_params(grads), named_params(policy_grads), strict=True):
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= 1e-5 * np.linalg.norm(np.asarray(b)), path


def test_masked_tokens_and_padding_have_no_gradient() -> None:
    programs, state = flow("fp32").programs, flow("fp32").state
    (batch,) = split(5)
    nothing = batch.replace(
        loss_mask=np.zeros_like(batch.loss_mask), advantages=np.full_like(batch.advantages, np.nan)
    )
    grads, stats, _ = programs.policy_gradient(state, nothing, global_denominators(), ALGORITHM)
    assert float(stats["loss"]) == 0 and all(
        not np.any(np.asarray(value)) for _, value in named_params(grads)
    )
    total = programs.add(None, map_params(lambda _, value: value, grads))
    assert all(value.dtype == jnp.float32 for _, value in named_params(total))
