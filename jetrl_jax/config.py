"""The configuration of a run: every field, its meaning, unit and default, in one typed schema.

Values are checked here and nowhere else: types and ranges by pydantic (unknown keys are forbidden),
what one field demands of another by the validators of each section.  Reading YAML, applying ``--set``
and turning a ``ValidationError`` into one message a user can act on is `jetrl_jax.config_io`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

BLOCK = 128  # the block of the FP8 format; `pallas_kernels.formats.BLOCK` is the definition, tested equal


class Section(BaseModel):
    """A part of the config: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """The policy: a Hugging Face directory to start from, or the sizes of a new model."""

    path: str | None = Field(None, description="Hugging Face checkpoint directory to start from; null builds a new model from the sizes below.")
    architecture: Literal["qwen3", "qwen2", "llama"] = Field("qwen3", description="Architecture of a new model.")
    hidden_size: PositiveInt = Field(128, description="Width of the residual stream of a new model.")
    intermediate_size: PositiveInt = Field(384, description="Width of the SwiGLU layer of a new model.")
    num_layers: PositiveInt = Field(2, description="Number of decoder layers of a new model.")
    num_heads: PositiveInt = Field(4, description="Number of query heads of a new model.")
    num_kv_heads: PositiveInt = Field(4, description="Number of key/value heads of a new model; divides num_heads.")
    head_dim: PositiveInt = Field(32, description="Width of one head of a new model; even, since RoPE turns pairs.")
    max_position_embeddings: PositiveInt = Field(512, description="Longest sequence of a new model, in tokens.")
    rope_theta: PositiveFloat = Field(10000.0, description="Base of the rotary embedding of a new model.")
    rms_norm_eps: PositiveFloat = Field(1e-6, description="Epsilon of RMSNorm of a new model.")
    tie_word_embeddings: bool = Field(True, description="Whether the head of a new model is its embedding matrix.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelSection:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE turns pairs of channels")
        return self


class TokenizerSection(Section):
    """How text becomes token ids."""

    kind: Literal["character", "byte", "huggingface"] = Field("character", description="character and byte are built in; huggingface loads tokenizer files.")
    path: str | None = Field(None, description="Directory or tokenizer.json of a huggingface tokenizer; null takes model.path.")
    characters: str = Field("0123456789+-*= abcdefghijklmnopqrstuvwxyz", description="Alphabet of the character tokenizer, one token each.")
    chat_template: bool = Field(False, description="Whether a prompt is wrapped by the tokenizer's chat template.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Keyword arguments of the chat template, such as enable_thinking: false.")
    system_prompt: str | None = Field(None, description="System message put before each prompt; needs chat_template.")

    @model_validator(mode="after")
    def _fits(self) -> TokenizerSection:
        if self.kind != "huggingface" and self.chat_template:
            raise ValueError(f"chat_template needs kind: huggingface, got kind={self.kind!r}")
        if (self.chat_template_kwargs or self.system_prompt) and not self.chat_template:
            raise ValueError("chat_template_kwargs and system_prompt have no effect without chat_template: true")
        if self.kind == "character" and len(set(self.characters)) != len(self.characters):
            raise ValueError("characters holds a character twice")
        return self


class PrecisionOverride(Section):
    """One exception to the preset."""

    pattern: str = Field(description="Glob over parameter paths, such as layers.0.* or *.down_proj.weight; one that matches nothing is an error.")
    format: Literal["bf16", "fp8"] = Field(description="bf16 takes the matched linear layers out of FP8; fp8 puts them in.")


class PrecisionSection(Section):
    """Which matrix multiplication runs in which format."""

    preset: Literal["bf16", "fp8_unified", "fp8_forward", "fp8_rollout_only"] = Field("fp8_unified", description="Precision flow of training and rollout.")
    overrides: tuple[PrecisionOverride, ...] = Field((), description="Exceptions to the preset, the last match wins.")
    wgrad_operand: Literal["requantize", "dual", "block"] = Field("requantize", description="How the saved activation reaches WGrad: from its FP8 codes (the paper), quantised twice, or in 128x128 blocks.")
    scale_format: Literal["float32", "power_of_two"] = Field("float32", description="Format of the scales.")
    promotion_order: Literal["deepgemm", "triton"] = Field("deepgemm", description="Order of the products when a 128-block enters the FP32 accumulator.")


class NumericsSection(Section):
    """Rounding points and exactness of the forward pass."""

    exact: bool = Field(True, description="Shape-independent reductions, so that rollout and training logprobs are the same bits; false is faster.")
    engine_variant: Literal["native", "cuda"] = Field("native", description="Whose rounding points the model mirrors: vLLM's native ops or its CUDA kernels.")


class TaskSection(Section):
    """Where prompts, answers and worked solutions come from."""

    kind: Literal["arithmetic", "reasoning_gym", "jsonl", "parquet", "datasets", "gsm8k", "function"] = Field("arithmetic", description="Kind of task.")
    name: str | None = Field(None, description="reasoning_gym: dataset name; datasets: path or hub name; function: module:function; arithmetic: problem family.")
    path: str | None = Field(None, description="jsonl and parquet: the training file; gsm8k: its directory.")
    eval_path: str | None = Field(None, description="jsonl and parquet: the held-out file; null holds out eval_fraction of path.")
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="Share of the items held out where no eval file is given.")
    prompt_field: str = Field("prompt", description="Field of the prompt in a file or dataset.")
    answer_field: str = Field("answer", description="Field of the answer in a file or dataset.")
    prompt_template: str = Field("{prompt}", description="How a prompt is written; {prompt} stands for the task's text.")
    options: dict[str, Any] = Field({}, description="Keyword arguments of the task (arithmetic, reasoning_gym, datasets, function).")


class RewardSection(Section):
    """One reward function."""

    name: str = Field("task", description="task: the task's own verifier; math_verify; exact_match; or module:function.")
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    timeout_s: PositiveFloat = Field(10.0, description="Seconds after which one call counts as failed and its sample is masked.")
    separate_process: bool = Field(False, description="Whether it runs in worker processes; module:function always does.")


class RolloutSection(Section):
    """What is generated in a step and how."""

    prompts_per_step: PositiveInt = Field(32, description="Prompts of one step (P).")
    group_size: Annotated[int, Field(ge=2)] = Field(16, description="Completions of one prompt (G); a group of one has no advantage.")
    max_prompt_tokens: PositiveInt = Field(32, description="Longest prompt, in tokens; a longer one is skipped and counted.")
    max_completion_tokens: PositiveInt = Field(32, description="Longest completion, in tokens.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature of training rollouts; logprobs are taken at it.")
    top_p: float = Field(1.0, description="Must be 1: a truncated distribution is not the policy that is trained.")
    top_k: int = Field(0, description="Must be 0 (off), for the same reason.")
    slots: PositiveInt = Field(256, description="Sequences decoded at once by the embedded engine.")
    prefill_rows: PositiveInt = Field(32, description="Prompts prefilled at once by the embedded engine.")
    decode_chunk_tokens: PositiveInt = Field(8, description="Tokens decoded between two looks at finished sequences.")

    @model_validator(mode="after")
    def _full_distribution(self) -> RolloutSection:
        if self.top_p != 1.0:
            raise ValueError(f"top_p={self.top_p}: training rollouts sample the full distribution, expected 1.0")
        if self.top_k != 0:
            raise ValueError(f"top_k={self.top_k}: training rollouts sample the full distribution, expected 0")
        return self


class AlgorithmSection(Section):
    """Advantage, loss and the rules around them."""

    name: Literal["grpo", "dapo", "dr_grpo", "rloo"] = Field("grpo", description="Algorithm; sets the defaults of the null fields below.")
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = Field(None, description="How token losses become one number; null: constant for dr_grpo, else token_mean.")
    clip_low: PositiveFloat | None = Field(None, description="Lower clip distance of the importance ratio; null: 0.2.")
    clip_high: PositiveFloat | None = Field(None, description="Upper clip distance of the importance ratio; null: 0.28 for dapo, else 0.2.")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(None, description="Bound c of the loss of negative advantages (3 is common); null: off.")
    kl_coef: NonNegativeFloat = Field(0.0, description="Factor of the KL term to the frozen start policy.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of that KL term.")
    epochs: PositiveInt = Field(1, description="Passes over a rollout batch.")
    minibatches: PositiveInt = Field(1, description="Optimiser steps of one pass.")
    mask_truncated: bool = Field(False, description="Whether completions cut at max_completion_tokens get no gradient.")
    dynamic_sampling: bool | None = Field(None, description="Whether groups with equal rewards are replaced by new ones; null: true for dapo.")
    max_generation_rounds: PositiveInt = Field(10, description="Most rounds of dynamic sampling in a step.")
    overlong_buffer_tokens: NonNegativeInt | None = Field(None, description="Length of the soft penalty zone before max_completion_tokens; null: a fifth of it for dapo, else 0 (off).")


class OptimizerSection(Section):
    """AdamW of the RL phase; masters and moments are FP32."""

    learning_rate: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Course of the learning rate after warm-up.")
    warmup_steps: NonNegativeInt = Field(0, description="Optimiser steps of linear warm-up.")
    b1: Fraction = Field(0.9, description="Decay of the first moment.")
    b2: Fraction = Field(0.999, description="Decay of the second moment.")
    eps: PositiveFloat = Field(1e-8, description="Epsilon of Adam.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decoupled weight decay.")
    grad_clip: PositiveFloat = Field(1.0, description="Largest global norm of the gradient.")


class BatchSection(Section):
    """Shapes of the training batch."""

    row_tokens: PositiveInt | None = Field(None, description="Length of a packed row, in tokens; null: longest prompt plus longest completion.")
    microbatch_tokens: PositiveInt = Field(8192, description="Tokens of one forward and backward pass (padding included); a multiple of row_tokens is used.")
    logprob_chunk_tokens: PositiveInt = Field(1024, description="Tokens whose logits exist at once.")


class WarmStartSection(Section):
    """Supervised steps on the task's worked solutions, for a model that begins from scratch."""

    steps: NonNegativeInt = Field(0, description="Supervised steps before RL; 0 is off.")
    batch_size: PositiveInt = Field(256, description="Examples of one step.")
    learning_rate: PositiveFloat = Field(2e-3, description="Peak learning rate, cosine to a tenth of it.")
    noise: Fraction = Field(0.0, description="Chance that a token of the worked solution is replaced by another of the alphabet.")


class EvalSection(Section):
    """Held-out evaluation."""

    every_steps: NonNegativeInt = Field(0, description="Steps between evaluations during training; 0: only before and after.")
    prompts: PositiveInt = Field(512, description="Held-out prompts of one evaluation.")
    samples: PositiveInt = Field(4, description="Completions of one prompt at the rollout temperature (k of pass@k).")


class CheckpointSection(Section):
    """What is kept for resuming."""

    every_steps: PositiveInt = Field(20, description="Steps between checkpoints; the last step always has one.")
    keep_last: PositiveInt = Field(2, description="Most recent checkpoints kept.")
    keep_best: NonNegativeInt = Field(1, description="Best checkpoints by mean reward kept besides.")


class RunSection(Section):
    """Where a run writes and how long it goes."""

    directory: str = Field("runs/run", description="Directory of the run.")
    steps: PositiveInt = Field(100, description="RL steps.")
    samples_per_step: NonNegativeInt = Field(4, description="Completions written to samples.jsonl each step.")
    max_skipped_steps: PositiveInt = Field(5, description="Non-finite steps in a row after which the run stops with an error.")
    tensorboard: bool = Field(True, description="Whether TensorBoard events are written.")
    wandb_project: str | None = Field(None, description="Weights & Biases project; null: off. Its failures never stop a run.")
    profile_steps: NonNegativeInt = Field(0, description="Steps traced by jax.profiler (from the third on); --profile sets 3.")


class RunConfig(Section):
    """The whole config of a run."""

    seed: NonNegativeInt = Field(0, description="Seed of initialisation, data order and sampling.")
    model: ModelSection = Field(default_factory=ModelSection, description="The policy.")
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection, description="Text to token ids.")
    precision: PrecisionSection = Field(default_factory=PrecisionSection, description="Formats of the matrix multiplications.")
    numerics: NumericsSection = Field(default_factory=NumericsSection, description="Rounding points and exactness.")
    task: TaskSection = Field(default_factory=TaskSection, description="Prompts and answers.")
    rewards: tuple[RewardSection, ...] = Field((RewardSection(),), min_length=1, description="Reward functions, summed by weight.")
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="Generation.")
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection, description="Advantage and loss.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="AdamW.")
    batch: BatchSection = Field(default_factory=BatchSection, description="Training batch.")
    warm_start: WarmStartSection = Field(default_factory=WarmStartSection, description="Supervised warm start.")
    eval: EvalSection = Field(default_factory=EvalSection, description="Held-out evaluation.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="Checkpoints.")
    run: RunSection = Field(default_factory=RunSection, description="Run directory and length.")

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence of the run, prompt and completion, in tokens."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def row_tokens(self) -> int:
        """Length of a packed training row, in tokens."""
        return self.batch.row_tokens or self.max_sequence_tokens

    @model_validator(mode="after")
    def _parts_fit(self) -> RunConfig:
        if self.model.path is None and self.max_sequence_tokens > self.model.max_position_embeddings:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_completion_tokens = {self.max_sequence_tokens} exceeds "
                f"model.max_position_embeddings = {self.model.max_position_embeddings}"
            )
        if self.row_tokens < self.max_sequence_tokens:
            raise ValueError(f"batch.row_tokens = {self.row_tokens} is shorter than the longest sequence, {self.max_sequence_tokens} tokens")
        if self.batch.microbatch_tokens < self.row_tokens:
            raise ValueError(f"batch.microbatch_tokens = {self.batch.microbatch_tokens} is less than one row of {self.row_tokens} tokens")
        if self.algorithm.minibatches > self.rollout.prompts_per_step:
            raise ValueError(f"algorithm.minibatches = {self.algorithm.minibatches} exceeds rollout.prompts_per_step = {self.rollout.prompts_per_step}")
        if self.tokenizer.kind == "huggingface" and self.tokenizer.path is None and self.model.path is None:
            raise ValueError("tokenizer.kind: huggingface needs tokenizer.path or model.path")
        if (self.algorithm.overlong_buffer_tokens or 0) > self.rollout.max_completion_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens = {self.algorithm.overlong_buffer_tokens} exceeds "
                f"rollout.max_completion_tokens = {self.rollout.max_completion_tokens}"
            )
        return self
