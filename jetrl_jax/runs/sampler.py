"""Interactive use of a policy: completions of a user's prompt."""

from __future__ import annotations

from jetrl_jax.collect.prompts import derived_seeds
from jetrl_jax.errors import UserError
from jetrl_jax.rollout.types import Request, SamplingParams
from jetrl_jax.runs.engines import sampling_engine
from jetrl_jax.runs.policy import Policy


class PolicySampler:
    """Completes prompts with a policy on its engine.

    Args:
      policy: from `load_policy`; lengths and temperature are those of its config's `rollout`.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.engine = sampling_engine(policy)

    def __call__(self, prompt: str, samples: int = 1, *, seed: int = 0, greedy: bool = False) -> list[str]:
        """`samples` completions of one prompt.

        Raises:
          UserError: the prompt is empty or longer than `rollout.max_prompt_tokens`.
        """
        tokenizer, rollout = self.policy.tokenizer, self.policy.config.rollout
        ids = tokenizer.encode_prompt(prompt)
        if not 0 < len(ids) <= rollout.max_prompt_tokens:
            raise UserError(
                f"prompt {prompt!r}: got {len(ids)} tokens, expected 1 to "
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}."
            )
        requests = [Request(i, ids, one) for i, one in enumerate(derived_seeds(samples, seed))]
        sampling = SamplingParams(
            rollout.temperature, rollout.turn_tokens, tuple(tokenizer.eos_ids), seed, greedy
        )
        return [tokenizer.decode(t.completion_ids.tolist()) for t in self.engine.generate(requests, sampling)]
