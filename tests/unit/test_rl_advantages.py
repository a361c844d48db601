"""Advantages against loops over the papers' formulas, and the properties that make them advantages."""

from __future__ import annotations

import numpy as np
import pytest

from jetrl_jax.rl import advantages
from tests.oracles import rl_oracle

FUNCTIONS = {"grpo": advantages.grpo, "dr_grpo": advantages.dr_grpo, "rloo": advantages.rloo}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def draw(seed=0, shape=(7, 5)):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.normal(size=shape), rng.random(shape) < 0.8
    rewards[0] = 0.7  # all equal
    mask[1] = [True] + [False] * (shape[1] - 1)  # one left
    mask[2] = False  # none left
    mask[3] = True
    # one right answer
    rewards[4] = np.arange(shape[1]) == 1
    mask[4] = True
    return rewards, mask


@every_function
@pytest.mark.parametrize("seed", range(5))
def test_advantages_match_oracle(name, seed):
    rewards, mask = draw(seed)
    expected = rl_oracle.advantages(name, rewards, mask)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(FUNCTIONS[name](rewards, mask), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_reinforce_pp_normalises_the_whole_batch(seed):
    rewards, mask = draw(seed)
    got = advantages.reinforce_pp(np.where(mask, rewards, np.nan), mask)
    np.testing.assert_allclose(
        got, rl_oracle.advantages("reinforce_pp", rewards, mask), rtol=1e-12, atol=1e-13
    )
    assert (got[0][mask[0]] != 0).all()  # a group of equal rewards still differs from the batch
    np.testing.assert_allclose(got[mask].std(ddof=1), 1, rtol=2e-6)
    assert not advantages.reinforce_pp(np.full((2, 3), 0.7)).any()


def test_grpo_of_one_right_answer_in_four():
    # mean 1/4, unbiased std 1/2: the right one 1.5, the others −0.5
    np.testing.assert_allclose(advantages.grpo([[0, 1, 0, 0]]), [[-0.5, 1.5, -0.5, -0.5]], rtol=3e-6)


def test_rloo_of_one_right_answer_in_four():
    np.testing.assert_allclose(advantages.rloo([[0, 1, 0, 0]]), [[-1 / 3, 1, -1 / 3, -1 / 3]], rtol=1e-15)


@every_function
def test_advantages_of_permuted_group_are_permuted(name):
    rewards, mask = draw()
    order = np.random.default_rng(1).permutation(rewards.shape[1])
    np.testing.assert_allclose(
        FUNCTIONS[name](rewards[:, order], mask[:, order]),
        FUNCTIONS[name](rewards, mask)[:, order],
        rtol=1e-12,
        atol=1e-14,
    )


@every_function
def test_advantages_do_not_see_a_shift_of_their_group(name):
    rewards, mask = draw()
    shift = np.random.default_rng(1).normal(size=(len(rewards), 1))
    np.testing.assert_allclose(
        FUNCTIONS[name](rewards + shift, mask), FUNCTIONS[name](rewards, mask), rtol=1e-11, atol=1e-13
    )


@pytest.mark.parametrize(("name", "power"), [("grpo", 0), ("dr_grpo", 1), ("rloo", 1)])
def test_advantages_scale_with_rewards(name, power):
    rewards, mask = draw()
    np.testing.assert_allclose(
        FUNCTIONS[name](8 * rewards, mask), 8**power * FUNCTIONS[name](rewards, mask), rtol=1e-4
    )


@every_function
def test_advantages_sum_to_zero_in_each_group(name):
    np.testing.assert_allclose(FUNCTIONS[name](*draw()).sum(axis=1), 0, atol=1e-13)


@every_function
@pytest.mark.parametrize("reward", [0.0, 0.1, 1e-300, -3e7])
def test_advantages_of_equal_rewards_are_exactly_zero(name, reward):
    assert not FUNCTIONS[name](np.full((2, 3), reward)).any()


@every_function
def test_masked_rewards_are_not_read(name):
    rewards, mask = draw()
    spoiled = np.where(mask, rewards, np.array([np.nan, np.inf, -np.inf, 1e300, -7.0]))
    np.testing.assert_array_equal(FUNCTIONS[name](spoiled, mask), FUNCTIONS[name](rewards, mask))
    assert not FUNCTIONS[name](rewards, mask)[~mask].any()
    # a masked sample is the same as no sample
    np.testing.assert_allclose(
        FUNCTIONS[name]([[1.0, np.nan, 0.0, 3.0]], [[1, 0, 1, 1]])[0, [0, 2, 3]],
        FUNCTIONS[name]([[1.0, 0.0, 3.0]])[0],
        rtol=1e-15,
    )


@every_function
@pytest.mark.parametrize("rewards", [[[1.0]], [1.0, 2.0], np.zeros((3, 0))], ids=["G=1", "one axis", "G=0"])
def test_advantages_raise_without_a_group(name, rewards):
    with pytest.raises(ValueError, match=r"expected \[P, G\] with G >= 2"):
        FUNCTIONS[name](rewards)


def test_advantages_raise_on_nonfinite_counted_reward():
    with pytest.raises(ValueError, match=r"grpo: 1 rewards are not finite: got rewards\[1, 0\]=nan"):
        advantages.grpo([[1.0, 2.0], [np.nan, 0.0]])


def test_advantages_raise_on_other_mask_shape():
    with pytest.raises(ValueError, match=r"mask.shape=\(1, 3\)"):
        advantages.grpo([[1.0, 2.0]], [[True, True, True]])


def test_informative_groups_have_two_different_counted_rewards():
    rewards = [[1, 1, 0], [1, 1, 1], [0, 1, 1], [0, 1, 5], [0, 1, 1]]
    mask = [[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 0]]
    np.testing.assert_array_equal(
        advantages.informative_groups(rewards, mask), [True, False, False, False, True]
    )


@pytest.mark.parametrize(("max_tokens", "buffer"), [(20480, 4096), (10, 10), (7, 3)])
def test_overlong_penalty_matches_oracle(max_tokens, buffer):
    lengths = np.unique(np.linspace(1, max_tokens + 2, 50).astype(int))
    expected = [rl_oracle.overlong(n, max_tokens, buffer) for n in lengths]
    np.testing.assert_allclose(
        advantages.overlong_penalty(lengths, max_tokens, buffer), expected, rtol=1e-15, atol=0
    )
    assert advantages.overlong_penalty(max_tokens, max_tokens, buffer) == -1
    assert advantages.overlong_penalty(max_tokens - buffer, max_tokens, buffer) == 0


def test_overlong_penalty_without_buffer_is_off():
    assert not advantages.overlong_penalty([[3, 10]], 10, 0).any()


@pytest.mark.parametrize("buffer", [-1, 11])
def test_overlong_penalty_raises_on_buffer_that_does_not_fit(buffer):
    with pytest.raises(ValueError, match=f"buffer_tokens={buffer}"):
        advantages.overlong_penalty([1], 10, buffer)


@pytest.mark.parametrize("mask", [[[np.nan, 1.0, 1.0]], [[0.5, 1.0, 1.0]], [["True", "", ""]], [[2, 1, 1]]])
def test_advantages_raise_on_a_mask_that_is_none(mask):
    for function in (
        advantages.grpo,
        advantages.dr_grpo,
        advantages.rloo,
        advantages.reinforce_pp,
        advantages.informative_groups,
    ):
        with pytest.raises(ValueError, match=r"no mask: got mask .* expected true or false, or 0 and 1"):
            function([[1.0, 2.0, 3.0]], mask)
