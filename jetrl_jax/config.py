"""The configuration of a run: every field, its meaning, unit and default, in one typed schema.

    RunConfig
      model  tokenizer  precision  loss_scale  numerics     the policy and its arithmetic
      sharding  distributed                                 the devices and the processes that hold them
      task  rewards  rollout  vllm                          what is generated, by which engine
      algorithm  correction                                 what is learned from it
      optimizer  batch  warm_start                          how the weights move
      eval  checkpoint  run                                 what is measured, kept and written

Types and ranges are stated by the fields and checked by pydantic: unknown keys are forbidden and nothing is
converted silently.  What one field demands of another, and which fields have no effect together, is
the table of `jetrl_jax.config_rules`.  Reading YAML and ``--set``, and turning every mistake into one
message, is `jetrl_jax.config_io`.  None of these modules imports jax: a mistake costs no device.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from jetrl_jax.config_algorithm import AlgorithmSection, CorrectionSection
from jetrl_jax.config_distributed import DistributedSection
from jetrl_jax.config_rules import find_problems, rewarded_verifier
from jetrl_jax.config_sharding import ShardingSection
from jetrl_jax.config_types import (
    INT32_MAX,
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
    value_at,
)
from jetrl_jax.config_vllm import VllmSection


class ModelSection(Section):
    """The policy: a Hugging Face directory to start from, or the sizes of a new model."""

    path: Text | None = Field(
        None, description="Hugging Face checkpoint directory to start from; null builds a new model from the sizes below."
    )
    architecture: Literal["qwen3", "qwen2", "llama"] = Field("qwen3", description="Architecture of a new model.")
    hidden_size: PositiveInt = Field(
        128, description="Width of the residual stream of a new model, in channels; any size, FP8 blocks may be partial."
    )
    intermediate_size: PositiveInt = Field(384, description="Width of the SwiGLU layer of a new model, in channels.")
    num_layers: PositiveInt = Field(2, description="Number of decoder layers of a new model.")
    num_heads: PositiveInt = Field(4, description="Number of query heads of a new model.")
    num_kv_heads: PositiveInt = Field(4, description="Number of key/value heads of a new model; divides num_heads.")
    head_dim: PositiveInt = Field(32, description="Width of one head of a new model, in channels; even, since RoPE turns pairs.")
    max_position_embeddings: PositiveInt = Field(512, description="Longest sequence of a new model, in tokens.")
    rope_theta: PositiveFloat = Field(10000.0, description="Base of the rotary embedding of a new model.")
    rms_norm_eps: PositiveFloat = Field(1e-6, description="Epsilon added to the mean square in the RMSNorm of a new model.")
    tie_word_embeddings: bool = Field(True, description="Whether the head of a new model is its embedding matrix.")


class TokenizerSection(Section):
    """How text becomes token ids."""

    kind: Literal["character", "byte", "huggingface"] = Field(
        "character", description="character and byte are built in; huggingface loads tokenizer files."
    )
    path: Text | None = Field(None, description="Directory or tokenizer.json of a huggingface tokenizer; null takes model.path.")
    characters: Text = Field(
        "0123456789+-*= abcdefghijklmnopqrstuvwxyz", description="Alphabet of the character tokenizer, one token per character."
    )
    chat_template: bool = Field(False, description="Whether a prompt is wrapped by the tokenizer's chat template.")
    chat_template_kwargs: Options = Field({}, description="Keyword arguments of the chat template, such as enable_thinking: false.")
    system_prompt: str | None = Field(None, description="System message put before each prompt by the chat template; null: none.")


class PrecisionOverride(Section):
    """One exception to the preset."""

    pattern: Text = Field(
        description="Glob over parameter paths, such as layers.0.* or *.down_proj.weight; one that matches nothing is an error."
    )
    format: Literal["bf16", "fp8"] = Field(description="bf16 takes the matched linear layers out of FP8; fp8 puts them in.")


class PrecisionSection(Section):
    """Which matrix multiplication runs in which format."""

    preset: Literal["fp32", "bf16", "fp16", "fp8_unified", "fp8_forward", "fp8_rollout_only"] = Field(
        "fp8_unified",
        description="Precision flow: fp8_unified is FP8 in rollout, forward and backward; fp8_forward has a BF16 backward; "
        "fp8_rollout_only trains in BF16; bf16 has no FP8; fp16 has none either and scales its loss.",
    )
    overrides: tuple[PrecisionOverride, ...] = Field((), description="Exceptions to the preset; the last match wins.")
    wgrad_operand: Literal["requantize", "dual", "block"] = Field(
        "requantize",
        description="How the saved activation reaches WGrad: from its FP8 codes (requantize, the paper's), quantised a second time "
        "from BF16 (dual) or in 128x128 blocks (block).",
    )
    scale_format: Literal["float32", "power_of_two"] = Field("float32", description="Values that a block's scale may take.")
    promotion_order: Literal["deepgemm", "triton"] = Field(
        "deepgemm", description="Order of the two scale products when a 128-block enters the FP32 accumulator."
    )


class LossScaleSection(Section):
    """Dynamic loss scaling of the FP16 flow."""

    initial: Annotated[float, Field(ge=1, le=2**24)] = Field(32768.0, description="Factor of the loss at the first update.")
    growth_interval: PositiveInt = Field(400, description="Finite updates in a row after which the factor doubles; an overflow halves it.")


class NumericsSection(Section):
    """Rounding points and exactness of the forward pass."""

    exact: bool = Field(
        True, description="Shape-independent reductions, so that rollout and training logprobs are the same bits; false is faster."
    )
    engine_variant: Literal["native", "cuda"] = Field(
        "native", description="Whose rounding points the model mirrors: those of vLLM's native operations or of its CUDA kernels."
    )
    kernels: Literal["auto", "xla", "xla_fast", "mosaic_gpu", "mosaic_interpret"] = Field(
        "auto",
        description="What forms the FP8 products, and the codes that they multiply: Pallas kernels on a Hopper GPU (mosaic_gpu; "
        "mosaic_interpret on a CPU, slowly), XLA exactly or with FP32 sums. auto: the kernels where they run, else xla for the "
        "forward of an exact run and xla_fast elsewhere.",
    )
    attention: Literal["auto", "xla", "cudnn"] = Field(
        "auto",
        description="What computes attention, in training and in the embedded engine: cuDNN's flash kernels, which keep no scores and "
        "are not exact, or XLA. auto: cudnn where it can run (a GPU, exact: false, not fp32), else xla.",
    )


class TaskSection(Section):
    """Where prompts, answers and worked solutions come from."""

    kind: Literal["arithmetic", "reasoning_gym", "jsonl", "parquet", "datasets", "gsm8k", "function"] = Field(
        "arithmetic",
        description="Kind of task: arithmetic and reasoning_gym are made, jsonl, parquet, datasets and gsm8k read; function is yours.",
    )
    name: Text | None = Field(
        None,
        description="arithmetic: sum, chain, reverse or sort, null takes sum; reasoning_gym: dataset name; datasets: path or hub name; "
        "function: module:function.",
    )
    path: Text | None = Field(
        None,
        description="jsonl and parquet: the training file (JSONL plain, .gz or .zst); gsm8k: its directory, null takes $GSM8K_DIR or "
        "the one beside the checkout.",
    )
    eval_path: Text | None = Field(None, description="jsonl and parquet: the held-out file; null holds out eval_fraction of path.")
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="Share of the items held out where no eval file or split is given."
    )
    prompt_field: Text = Field("prompt", description="Field of the prompt in a file or dataset.")
    answer_field: Text = Field("answer", description="Field of the answer in a file or dataset.")
    prompt_template: Text = Field("{prompt}", description="How a prompt is written; {prompt} stands for the task's text.")
    options: Options = Field(
        {}, description="Options of the task, by kind; an unknown one is an error that lists them. function: its keyword arguments."
    )


class RewardSection(Section):
    """One reward function."""

    name: Text = Field(
        "task", description="task: the task's own verifier; exact_match, gsm8k, boxed, last_number, math_verify; or module:function."
    )
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    timeout_s: PositiveFloat = Field(10.0, description="Time after which a call counts as failed and its sample is masked, in seconds.")
    separate_process: bool = Field(False, description="Whether it runs in worker processes; module:function always does.")


class RolloutSection(Section):
    """What is generated in a step and how."""

    engine: Literal["jax", "vllm"] = Field(
        "jax", description="Rollout engine: the embedded one on the trainer's own model, or vLLM (section vllm)."
    )
    prompts_per_step: PositiveInt = Field(32, description="Number of prompts of one step (P).")
    group_size: Annotated[int, Field(ge=2, le=INT32_MAX)] = Field(
        16, description="Completions of one prompt (G); a group of one has no advantage."
    )
    max_prompt_tokens: PositiveInt = Field(32, description="Longest prompt, in tokens; a longer one is skipped and counted.")
    max_completion_tokens: PositiveInt = Field(32, description="Longest completion, in tokens.")
    temperature: PositiveFloat = Field(
        1.0, description="Sampling temperature of training rollouts, 0.001 to 1e6, with vLLM 0.01 to 2; logprobs are taken at it."
    )
    top_p: float = Field(
        1.0, description="Nucleus of the sampling; must be 1, since a truncated distribution is not the policy that is trained."
    )
    top_k: int = Field(
        0,
        description="Candidate tokens of the sampling; must be 0 (off), since a truncated distribution is not the policy that is trained.",
    )
    slots: PositiveInt = Field(256, description="Number of sequences that the embedded engine decodes at once, on each device.")
    prefill_rows: PositiveInt = Field(32, description="Number of prompts that the embedded engine prefills at once.")
    decode_chunk_tokens: PositiveInt = Field(8, description="Tokens decoded between two looks at finished sequences.")


class OptimizerSection(Section):
    """AdamW of the RL phase; masters and moments are FP32."""

    learning_rate: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after warm-up; linear and cosine end at 0."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Optimiser steps of linear warm-up.")
    b1: Decay = Field(0.9, description="Decay of the first moment per optimiser step.")
    b2: Decay = Field(0.999, description="Decay of the second moment per optimiser step.")
    eps: PositiveFloat = Field(1e-8, description="Epsilon added to the root of the second moment.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decoupled weight decay, multiplied by the learning rate.")
    grad_clip: PositiveFloat = Field(1.0, description="Largest global norm of the gradient; a longer one is scaled down.")


class BatchSection(Section):
    """Shapes of the training batch."""

    row_tokens: PositiveInt | None = Field(
        None, description="Length of a packed row, in tokens; null: longest prompt plus longest completion."
    )
    microbatch_tokens: PositiveInt = Field(
        8192,
        description="Size of one forward and backward pass of one device, in tokens (padding included); rounded down to whole rows.",
    )
    remat: Literal["none", "layer"] = Field(
        "none", description="What the backward computes again: nothing; or all within a layer, whose input alone is kept."
    )
    logprob_chunk_tokens: PositiveInt = Field(1024, description="Number of tokens whose logits exist at once.")


class WarmStartSection(Section):
    """Supervised steps on the task's worked solutions, for a model that begins from scratch."""

    steps: NonNegativeInt = Field(0, description="Supervised optimiser steps before RL; 0 is off.")
    batch_size: PositiveInt = Field(256, description="Number of examples of one supervised step.")
    learning_rate: PositiveFloat = Field(2e-3, description="Peak learning rate of the supervised steps, cosine to a tenth of it.")
    noise: Fraction = Field(0.0, description="Chance that a token of the worked solution is replaced by another of the alphabet.")


class EvalSection(Section):
    """Held-out evaluation."""

    every_steps: NonNegativeInt = Field(0, description="RL steps between evaluations during training; 0: only before and after.")
    prompts: PositiveInt = Field(512, description="Number of held-out prompts of one evaluation.")
    samples: PositiveInt = Field(4, description="Completions of one prompt at the rollout temperature (k of pass@k).")
    verifier: Literal["task", "exact_match", "gsm8k", "boxed", "last_number", "math_verify"] | None = Field(
        None,
        description="What says whether a held-out completion is right; null: the verifier that rewards name (task, where it is among "
        "them or none is), so that accuracy and --step best measure what is trained.",
    )


class CheckpointSection(Section):
    """What is kept for resuming."""

    every_steps: PositiveInt = Field(20, description="RL steps between checkpoints; the last step always has one.")
    keep_last: PositiveInt = Field(2, description="Number of most recent checkpoints kept.")
    keep_best: NonNegativeInt = Field(1, description="Number of best checkpoints, by mean reward, kept besides.")


class RunSection(Section):
    """Where a run writes and how long it goes."""

    directory: Text = Field("runs/run", description="Directory that the run writes to.")
    steps: PositiveInt = Field(100, description="Number of RL steps.")
    samples_per_step: NonNegativeInt = Field(4, description="Completions written to samples.jsonl each step.")
    max_skipped_steps: PositiveInt = Field(
        5, description="Updates in a row that are not finite, or have nothing to train on, after which the run stops with an error."
    )
    max_steps_without_signal: NonNegativeInt = Field(
        0,
        description="Steps in a row in which all rewards of each group are equal, after which the run stops with an error; 0: a warning.",
    )
    tensorboard: bool = Field(True, description="Whether TensorBoard events are written.")
    wandb_project: Text | None = Field(None, description="Weights & Biases project; null: off. Its failures never stop a run.")
    profile_steps: NonNegativeInt = Field(0, description="RL steps traced by jax.profiler, from the third on; 0 is off, --profile sets 3.")


class RunConfig(Section):
    """The whole config of a run."""

    seed: NonNegativeInt = Field(0, description="Seed of initialisation, data order and sampling.")
    model: ModelSection = Field(
        default_factory=ModelSection, description="The policy: a checkpoint to start from, or the sizes of a new model."
    )
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection, description="How text becomes token ids.")
    precision: PrecisionSection = Field(default_factory=PrecisionSection, description="Which matrix multiplication runs in which format.")
    loss_scale: LossScaleSection = Field(default_factory=LossScaleSection, description="Dynamic loss scaling of the FP16 flow.")
    numerics: NumericsSection = Field(default_factory=NumericsSection, description="Rounding points and exactness of the forward pass.")
    sharding: ShardingSection = Field(default_factory=ShardingSection, description="The mesh of devices of a run.")
    distributed: DistributedSection = Field(
        default_factory=DistributedSection, description="The processes that a run is shared by; see docs/scaling.md."
    )
    task: TaskSection = Field(default_factory=TaskSection, description="Where prompts, answers and worked solutions come from.")
    rewards: tuple[RewardSection, ...] = Field((RewardSection(),), min_length=1, description="Reward functions, summed by weight.")
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="What is generated in a step and how.")
    vllm: VllmSection = Field(default_factory=VllmSection, description="vLLM as rollout engine.")
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection, description="Advantage, loss and the rules around them.")
    correction: CorrectionSection = Field(
        default_factory=CorrectionSection, description="What is done about tokens whose rollout and trainer logprobs differ."
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="AdamW of the RL phase.")
    batch: BatchSection = Field(default_factory=BatchSection, description="Shapes of the training batch.")
    warm_start: WarmStartSection = Field(default_factory=WarmStartSection, description="Supervised steps before RL.")
    eval: EvalSection = Field(default_factory=EvalSection, description="Held-out evaluation.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="What is kept for resuming.")
    run: RunSection = Field(default_factory=RunSection, description="Where a run writes and how long it goes.")

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence of the run, prompt and completion, in tokens."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def row_tokens(self) -> int:
        """Length of a packed training row, in tokens."""
        return self.batch.row_tokens or self.max_sequence_tokens

    @property
    def microbatch_tokens(self) -> int:
        """Size of one forward and backward pass over all devices, in tokens: whole rows, equally many on each."""
        return self.batch.microbatch_tokens // self.row_tokens * self.row_tokens * self.sharding.row_shards

    @property
    def total_updates(self) -> int:
        """Optimiser steps of the run."""
        return self.run.steps * self.algorithm.epochs * self.algorithm.minibatches

    @property
    def eval_verifier(self) -> str:
        """What judges held-out completions: `eval.verifier`, where it is null what the rewards say."""
        return self.eval.verifier or rewarded_verifier((reward.name, reward.weight) for reward in self.rewards)

    @property
    def dynamic_sampling(self) -> bool:
        """Whether groups with equal rewards are replaced by new ones."""
        return bool(self.algorithm.resolved("dynamic_sampling", self.rollout.max_completion_tokens))

    def resolved_nulls(self) -> dict[str, Any]:
        """What a null stands for, by dotted path, for every field that is null and stands for a value."""
        names = ("loss_aggregation", "clip_low", "clip_high", "dynamic_sampling", "overlong_buffer_tokens")
        resolved = {f"algorithm.{name}": self.algorithm.resolved(name, self.rollout.max_completion_tokens) for name in names}
        resolved |= {"correction.reject_high": self.correction.resolved_reject_high, "batch.row_tokens": self.row_tokens}
        resolved["eval.verifier"] = self.eval_verifier
        return {path: value for path, value in resolved.items() if value_at(self, path) is None}

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        problems = find_problems(self)
        if problems:
            report = "; ".join(f"{problem.path}: {problem.what}: got {problem.got}, expected {problem.expected}" for problem in problems)
            raise PydanticCustomError("config_rules", "{report}", {"report": report, "problems": problems})
        return self
