"""A policy: a model with its tokenizer and precision plan, newly made or read from disk.

Apart from the commands, only this module of `jetrl_jax` reads and writes Hugging Face directories (through
`bridge`, without torch).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.hf.draft import read_draft_head
from bridge.hf.peft import PeftAdapter, read_adapter, save_adapter
from bridge.hf.read import open_checkpoint, read_config, read_into
from bridge.hf.write import decoder_parameters, save_checkpoint
from jetrl_jax.config.arithmetic import build_adapters, build_numerics, build_plan
from jetrl_jax.config.load import load_config, override_config
from jetrl_jax.config.model import NewModelSection
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.types import user_path
from jetrl_jax.devices.compilation_cache import keep_programs
from jetrl_jax.devices.gpu_memory import share_gpu
from jetrl_jax.errors import UserError
from jetrl_jax.models.choices import resolve
from jetrl_jax.models.config import ModelConfig
from jetrl_jax.models.decoder import Decoder
from jetrl_jax.models.draft_head import DraftHead
from jetrl_jax.models.lora import Adapters, start
from jetrl_jax.precision.formats import is_adapter
from jetrl_jax.precision.kv_cache import KVCalibration, scales_for
from jetrl_jax.precision.numerics import kv_kinds
from jetrl_jax.precision.parameters import jit, map_params, named_params, select
from jetrl_jax.precision.plan import PrecisionPlan
from jetrl_jax.record.checkpoint import CheckpointStore, CorruptCheckpoint, Restored
from jetrl_jax.record.console import print_warning
from jetrl_jax.record.metrics import read_metrics
from jetrl_jax.record.run_directory import METRICS_FILE
from jetrl_jax.rl.batching import padded_rows
from jetrl_jax.runs.policy_config import (
    BASE_DIRECTORY,
    adapter_sections,
    is_adapter_directory,
    is_run,
    policy_config,
)
from jetrl_jax.tasks.fingerprint import sha256_of
from jetrl_jax.text.tokenizer import Tokenizer, build_tokenizer
from pallas_kernels import ScaledArray

ACCURACY = "eval/accuracy"
HEAD_DIRECTORY = "draft_head"  # in a run that trained a draft head to its end
PROBE_TOKENS, PROBE_SEED = 128, 20250101


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer, precision plan and config.

    step, scales: of the checkpoint it was read from; the scales [L, n] of keys and values if they are in FP8.
    head: the draft head that was trained beside it, if its config asks for one and there is one.
    """

    model: Decoder
    tokenizer: Tokenizer
    plan: PrecisionPlan
    config: RunConfig
    step: int | None = None
    scales: jax.Array | None = None
    head: DraftHead | None = None

    @property
    def params(self) -> nnx.State:
        """The FP32 masters; a base that nothing trains may be in the format in which it is published."""
        return nnx.state(self.model, nnx.Param)

    def save_base(self, directory: str | Path, params: nnx.State | None = None) -> None:
        """Writes the frozen base of adapters, rounded as it is published, as a Hugging Face directory.

        Published again it has the same codes, since these are made of the rounded values.
        """
        chosen = self.params if params is None else params
        arrays = {path: value for path, value in named_params(chosen) if not is_adapter(path)}
        save_checkpoint(
            directory,
            self.model.config,
            arrays,
            dtype=self.plan.value.dtype,
            tokenizer=self.tokenizer,
            overwrite=True,
        )

    def merged(self) -> dict[str, np.ndarray]:
        """Path -> float32 of the policy without adapters: W + s B A, of the values that are multiplied.

        Those of an FP8 base are its dequantised codes.  One matrix at a time is in float64.
        """
        masters = dict(named_params(self.params))
        scale = self.model.adapters.scale if self.model.adapters is not None else 0.0

        def values(path: str) -> np.ndarray:
            published = self.plan.publish_one(path, masters[path])
            held = published.dequantize() if isinstance(published, ScaledArray) else published
            return np.asarray(held, np.float64)

        made = {}
        for path in masters:
            if not is_adapter(path):
                a, b = (path.removesuffix("weight") + f"lora_{side}.weight" for side in "AB")
                added = scale * values(b) @ values(a) if a in masters else 0.0
                made[path] = (values(path) + added).astype(np.float32)
        return made

    def save_adapter(
        self, directory: str | Path, base: str, params: nnx.State | None = None, *, overwrite: bool = False
    ) -> Path:
        """Writes adapters as a PEFT directory, which names `base` as that of their base, with its hashes."""
        section = self.config.lora
        assert section is not None
        chosen = self.params if params is None else params
        arrays = {path: np.asarray(value) for path, value in named_params(chosen) if is_adapter(path)}
        own, files = (section.rank, section.alpha, section.rslora, section.targets), base_files(Path(base))
        made = PeftAdapter(*own, base, arrays, files or None)
        return save_adapter(directory, made, overwrite=overwrite)

    def save(
        self, directory: str | Path, params: nnx.State | None = None, *, dtype: str = "bfloat16"
    ) -> None:
        """Writes a Hugging Face checkpoint directory that transformers and vLLM load."""
        model = self.model
        if params is not None:
            graphdef, _, *others = nnx.split(model, nnx.Param, ...)
            model = nnx.merge(graphdef, params, *others)
        save_checkpoint(
            directory,
            self.model.config,
            decoder_parameters(model),
            dtype=dtype,
            tokenizer=self.tokenizer,
            overwrite=True,
        )


def new_model_config(section: NewModelSection, tokenizer: Tokenizer) -> ModelConfig:
    """The architecture of a new model with the tokenizer's vocabulary."""
    return ModelConfig(
        architecture=section.architecture,
        vocab_size=tokenizer.vocab_size,
        hidden_size=section.hidden_size,
        intermediate_size=section.intermediate_size,
        num_layers=section.num_layers,
        num_heads=section.num_heads,
        num_kv_heads=section.num_kv_heads,
        head_dim=section.head_dim,
        max_position_embeddings=section.max_position_embeddings,
        rope_theta=section.rope_theta,
        rope_scaling=None,
        rms_norm_eps=section.rms_norm_eps,
        tie_word_embeddings=section.tie_word_embeddings,
        attention_bias=section.architecture == "qwen2",
        qk_norm=section.architecture == "qwen3",
        eos_token_ids=tuple(tokenizer.eos_ids),
        pad_token_id=tokenizer.pad_id,
    )


def build_policy(
    config: RunConfig,
    *,
    model: Decoder | str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    restored: bool = False,
) -> Policy:
    """The policy that a run starts from.

    Args:
      config: the run's config.
      model: a `Decoder` or a Hugging Face directory, in place of the config's; None takes the config's.
      tokenizer: replaces the config's.
      restored: a checkpoint follows: of a policy with adapters the base is not trained again, and `lora.path`
        is not read.

    Raises:
      UserError: kernels or attention that cannot run here, a checkpoint that cannot be read, sequences longer
        than the model's positions, or a tokenizer with more ids than the model.
    """
    keep_programs()
    path = _model_path(config, model)
    tokenizer, sizes = policy_parts(config, model, tokenizer)
    numerics = resolve(build_numerics(config.precision, config.numerics, config.samples_by_vllm), sizes)
    adapters = build_adapters(config.lora)
    if isinstance(model, Decoder) or path is None:
        built = Decoder(sizes, numerics, rngs=nnx.Rngs(config.seed), adapters=adapters)
        if isinstance(model, Decoder):
            nnx.update(built, nnx.state(model, nnx.Param))
    else:
        # a base that nothing trains stays on the host until it is published
        frozen = adapters is not None and (restored or config.warm_start is None)
        kept = numerics.dtype if frozen else None
        built = _read_model(path, sizes, numerics, adapters, kept)
    if adapters is not None and getattr(model, "adapters", None) is None:
        nnx.update(built, _start_adapters(built, config, path, restored))
    built.remat = config.batch.remat == "layer"
    plan = build_plan([name for name, _ in named_params(nnx.state(built, nnx.Param))], config.precision)
    return Policy(built, tokenizer, plan, config)


def policy_parts(
    config: RunConfig, model: Decoder | str | Path | None, tokenizer: Tokenizer | None
) -> tuple[Tokenizer, ModelConfig]:
    """The tokenizer and model sizes for `build_policy`, checked against each other.

    Touches no device and reads no weights.

    Raises:
      UserError: as `build_policy`, except for problems that depend on the device.
    """
    path = _model_path(config, model)
    tokenizer = tokenizer or build_tokenizer(config.tokenizer, path)
    if isinstance(model, Decoder):
        sizes = model.config
    elif path is not None:
        sizes = read_config(path)
    else:
        assert isinstance(config.model, NewModelSection)
        sizes = new_model_config(config.model, tokenizer)
    if tokenizer.vocab_size > sizes.vocab_size:
        raise UserError(
            f"build_policy: the tokenizer does not fit the model: got {tokenizer.vocab_size} token ids, "
            "expected at most "
            f"vocab_size={sizes.vocab_size}."
        )
    if config.max_sequence_tokens > sizes.max_position_embeddings:
        raise UserError(
            "build_policy: sequences do not fit the model: got rollout.max_prompt_tokens + "
            "rollout.max_completion_tokens = "
            f"{config.max_sequence_tokens}, expected at most "
            f"max_position_embeddings={sizes.max_position_embeddings}."
        )
    # so that an exported policy stops at the same tokens as the run
    return tokenizer, dataclasses.replace(sizes, eos_token_ids=tuple(tokenizer.eos_ids))


def _model_path(config: RunConfig, model: Decoder | str | Path | None) -> str | None:
    return config.model_path if model is None or isinstance(model, Decoder) else str(model)


def _read_model(
    path: str | Path, sizes: ModelConfig, numerics: Any, adapters: Adapters | None, on_host: Any
) -> Decoder:
    """A decoder with the weights of a Hugging Face directory, without a random initialisation first."""
    model = nnx.eval_shape(lambda: Decoder(sizes, numerics, rngs=nnx.Rngs(0), adapters=adapters))
    read_into(model, path, on_host)
    return model


def load_policy(
    directory: str | Path,
    overrides: Sequence[str] = (),
    config: str | Path | None = None,
    step: int | Literal["last", "best"] = "last",
) -> Policy:
    """A trained policy: a checkpoint of a run directory, or a Hugging Face directory with tokenizer files.

    Args:
      directory: a run directory, a Hugging Face directory, or one of PEFT, which names its base's.
      overrides: `a.b=c` changes of the config, such as `precision.preset=bf16`.
      config: YAML file in place of the run's; a Hugging Face directory without one runs in BF16.
      step: the checkpoint of a run: a step number, "last" (the latest undamaged one), or "best" (the highest
        recorded held-out accuracy, the later of equals).

    Raises:
      UserError: the directory is neither, is unreadable, or has no checkpoint of that step.
    """
    path = user_path(directory)
    if is_run(path):
        settings, trained = policy_config(path, overrides, config), load_config(path / "config.yaml")
        asked, had, left = settings.draft_head, trained.draft_head, path / HEAD_DIRECTORY
        own = asked is not None and had is not None and asked.head_path == had.head_path
        policy = _build(
            settings,
            model=path / BASE_DIRECTORY if settings.lora is not None else None,
            head=left if own and left.is_dir() else None,
            restored=True,
        )
        scales, head = policy.plan.unit_scales, policy.head
        template: dict[str, Any] = {"params": select(policy.params, policy.plan.trained)}
        kept = trained.precision.kv_cache, trained.precision.kv_query
        if scales is not None and kv_kinds(*kept) == policy.plan.kinds:
            template["kv"] = KVCalibration.start(scales)
        if own:
            head = head or first_head(policy)
            template["draft"] = {"params": nnx.state(head, nnx.Param)}
        restored = _restore(path, step, template)
        if settings.lora is not None:
            _check_base(path, restored.metadata)
        nnx.update(policy.model, restored.state["params"])
        if "draft" in template:
            nnx.update(head, restored.state["draft"]["params"])
        kv = restored.state.get("kv")
        scales = None if kv is None else kv.scales
        return dataclasses.replace(policy, step=restored.step, scales=scales, head=head)
    if step != "last":
        raise UserError(
            f"load_policy: only a run has steps: got step={step} of {path}, expected a run directory "
            "(config.yaml)."
        )
    if config is not None:
        model = None if is_adapter_directory(path) else path
        return _build(policy_config(path, overrides, config), model=model)
    base = user_path(adapter_sections(path)["model"]["path"]) if is_adapter_directory(path) else path
    lengths = _lengths(read_config(base)) if (base / "config.json").is_file() else None
    return _build(policy_config(path, overrides, rollout=lengths))


def _start_adapters(model: Decoder, config: RunConfig, base: str | None, restored: bool) -> nnx.State:
    """New adapters, or those of `lora.path`; base: the directory of the model."""
    fresh, section = start(model, config.seed), config.lora
    assert section is not None
    if section.path is None or restored:
        return fresh
    found = read_adapter(section.path, model.config)
    problems = [
        f"{name}={theirs!r}, expected lora.{name} = {ours!r}"
        for name, theirs, ours in (
            ("rank", found.rank, section.rank),
            ("alpha", found.alpha, section.alpha),
            ("rslora", found.rslora, section.rslora),
            ("targets", sorted(found.targets), sorted(section.targets)),
        )
        if theirs != ours
    ]
    if problems:
        raise UserError(f"lora.path: {section.path} has other adapters: got {'; '.join(problems)}.")
    _check_named_base(section.path, found, base)
    return map_params(lambda path, _: jnp.asarray(found.arrays[path]), fresh)


def _check_named_base(adapter: str | Path, found: PeftAdapter, base: str | None) -> None:
    """Compares the base of a PEFT directory with the one that is read; base: its directory.

    Another one gets a warning, and raises if it is now in the place of the adapter's own.
    """
    same = base is not None and user_path(base).resolve() == user_path(found.base or base).resolve()
    files = None if base is None or found.base_files is None else base_files(user_path(base))
    if found.base is None or (same if files is None else files == found.base_files):
        return
    if same:
        differing = "; ".join(_differing_files(files or {}, found.base_files or {}))
        raise UserError(
            f"lora.path: the base of {adapter} was replaced: {base}: {differing}. Adapters fit only the "
            "weights that they were trained beside."
        )
    print_warning(
        f"lora.path: {adapter} names another base: got base_model_name_or_path={found.base!r}, "
        f"expected model.path = {base!r}. Adapters fit only the weights that they were trained beside."
    )


def base_files(directory: Path) -> dict[str, str]:
    """The hash of each file that makes the base of adapters: its weights and its architecture."""
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("config.json")])
    return {file.name: sha256_of(file) for file in files}


def _differing_files(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Both hashes of every file that has others."""
    return [
        f"{name}: got {found.get(name, '(absent)')}, expected {expected.get(name, '(absent)')}"
        for name in sorted({*found, *expected})
        if found.get(name) != expected.get(name)
    ]


def _check_base(run: Path, metadata: Mapping[str, Any]) -> None:
    """Raises if the base of a run is not the one that its adapters were trained for."""
    if differing := _differing_files(base_files(run / BASE_DIRECTORY), metadata.get("base") or {}):
        raise UserError(
            f"load_policy: {run / BASE_DIRECTORY} is not the base of the run's adapters: "
            f"{'; '.join(differing)}."
        )


def with_base(policy: Policy, directory: Path) -> nnx.State:
    """The parameters of a policy with the base that `Policy.save_base` wrote, in the format it has there."""
    dtype = jnp.dtype(policy.plan.value.dtype)
    arrays = {path: array.astype(dtype) for path, array in open_checkpoint(directory).arrays()}
    return map_params(lambda path, value: arrays.get(path, value), policy.params)


def first_head(policy: Policy, directory: Path | None = None) -> DraftHead:
    """The draft head that a policy's config asks for, before training: read from `head_path`, or new.

    directory: in place of `head_path`.

    Raises:
      UserError: a policy of too few layers, or a head of another policy.
    """
    section, model = policy.config.draft_head, policy.model
    assert section is not None
    path = directory or section.head_path
    try:
        if path is not None:
            return read_draft_head(path, model.config, model.numerics)
        ids = np.arange(model.config.vocab_size)
        return DraftHead(model.config, model.numerics, ids, rngs=nnx.Rngs(policy.config.seed))
    except ValueError as error:
        raise UserError(f"rollout.engine: no draft head of this policy: {error}") from None


def _build(
    config: RunConfig, model: Path | None = None, head: Path | None = None, *, restored: bool = False
) -> Policy:
    """A policy for use without training: no trainer shares the GPU, so vLLM stays awake.

    head: a directory in place of the config's `head_path`, if that is set and may be gone.
    """
    # before the first array and with the run's own settings, so that JAX does not preallocate a fixed share
    share_gpu(config)
    if config.shared_vllm is not None:
        config = override_config(config, ["rollout.engine.sleep=false"])
    policy = build_policy(config, model=model, restored=restored)
    section = config.draft_head
    return (
        policy
        if section is None or section.head_path is None
        else dataclasses.replace(policy, head=first_head(policy, head))
    )


def _restore(run: Path, step: int | Literal["last", "best"], template: Any) -> Restored:
    """Restores a checkpoint of a run, in the structure of `template`."""
    with CheckpointStore(run / "checkpoints", read_only=True) as store:
        steps = store.steps()
        if not steps:
            raise UserError(
                f"load_policy: no checkpoint: got the run {run}, expected one in {run / 'checkpoints'}."
            )
        if step == "last":
            restored = store.restore_latest(template, subset=True)
            assert restored is not None  # with steps present it returns one or raises
            return restored
        number = _best_step(run, steps) if step == "best" else step
        if number not in steps:
            raise UserError(
                f"load_policy: no checkpoint of that step: got step={number} of {run}, expected one of "
                f"{steps}."
            )
        try:
            return store.restore(number, template, subset=True)
        except CorruptCheckpoint as error:
            raise UserError(
                f"load_policy: the checkpoint is damaged: got step={number} of {run}: {error}. There "
                f"are {steps}."
            ) from error


def has_checkpoint(run: str | Path) -> bool:
    """Whether a run directory has a checkpoint, whole or damaged."""
    return bool(CheckpointStore(user_path(run) / "checkpoints", read_only=True).steps())


def _best_step(run: Path, steps: Sequence[int]) -> int:
    """The step among `steps` with the highest recorded `eval/accuracy`, the last of equals."""
    rows = read_metrics(run / METRICS_FILE) if (run / METRICS_FILE).is_file() else []
    accuracy = {int(row["step"]): row[ACCURACY] for row in rows if math.isfinite(row.get(ACCURACY, math.nan))}
    recorded = [step for step in steps if step in accuracy]
    if not recorded:
        raise UserError(
            f"load_policy: no best checkpoint: got none of the steps {list(steps)} of {run} with "
            f"{ACCURACY} on record, expected one. "
            f"It is on record for {sorted(accuracy)} (eval.every_steps); give a step."
        )
    return max(recorded, key=lambda step: (accuracy[step], step))


def _lengths(config: ModelConfig) -> dict[str, int]:
    """Prompt and completion lengths that fit the model's positions."""
    half = min(config.max_position_embeddings // 2, 1024)
    return {"max_prompt_tokens": half, "max_completion_tokens": half}


def kv_scales(policy: Policy) -> jax.Array | None:
    """The scales [L, n] of keys and values that are in FP8, else None.

    They are the checkpoint's.  A policy that is not from such a run has none; its scales follow from a
    forward over fixed random tokens.  Values of other tokens beyond their range are clipped.
    """
    scales = policy.plan.unit_scales
    if scales is None or policy.scales is not None:
        return policy.scales
    count = min(PROBE_TOKENS, policy.config.max_sequence_tokens)
    ids = np.random.default_rng(PROBE_SEED).integers(0, policy.model.config.vocab_size, (1, count))
    (batch,) = padded_rows(ids.tolist(), 1, count)
    params, publish, graphdef = policy.params, jit(policy.plan.publish), nnx.graphdef(policy.model)
    program = jit(lambda weights, *arrays: nnx.merge(graphdef, weights).with_use(*arrays)[1])
    for _ in range(2):  # with scales of 1, then with the first pass's
        largest = program(publish(params, scales), *batch).largest
        scales = scales_for(largest, policy.model.numerics.compute_dtype)
    return scales


def published_weights(policy: Policy) -> nnx.State:
    """The policy's weights in the form that an engine multiplies, with `kv_scales`."""
    return jit(policy.plan.publish)(policy.params, kv_scales(policy))
