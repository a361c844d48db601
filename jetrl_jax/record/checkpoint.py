"""Checkpoints of a run: Orbax files, and a hash of every array.

A checkpoint is ``checkpoints/<step>/`` with the items of an Orbax `CheckpointManager`: ``state`` (the
arrays, under their tree paths), ``metadata`` (the trainer's JSON, and the manifest: shape, dtype and SHA-256
of each array) and ``metrics`` (the score that ranks it).

A kill at any moment leaves the earlier checkpoints whole.  Orbax writes into a temporary directory and
renames it when it is complete, and an old checkpoint is renamed before it is deleted.  A checkpoint damaged
on disk is found by its manifest at restore, and skipped with a warning.  Files are not synced one by one, so
a power cut may lose the newest checkpoint, but not the one before it.

Several processes save and restore together, on a shared file system.  Each writes its shards and reads whole
arrays.  The first process hashes (each array is gathered for it, one at a time), renames and removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jetrl_jax.devices import processes
from jetrl_jax.errors import RunStopped, UserError
from jetrl_jax.record.console import print_warning

FORMAT = 1
_DELETED = ".deleted"  # Orbax moves old checkpoints here; emptied after each save
_TEMPORARY = ".orbax-checkpoint-tmp"


class Restored(NamedTuple):
    """A restored checkpoint: its step, the state in the template's structure, and the trainer's metadata."""

    step: int
    state: Any
    metadata: dict[str, Any]


class CorruptCheckpoint(Exception):
    """The files of a checkpoint are missing, unreadable or not the saved ones."""


class CheckpointStore:
    """Saves and restores the checkpoints under one directory.

    Keeps the last ``keep_last`` checkpoints and also the best ``keep_best`` by ``best_metric`` (higher is
    better, missing or non-finite is worst, the later of equals wins).  With ``read_only`` nothing on disk
    changes, so that a run can be read while it goes on.

    The state is any pytree (dicts, optax states, nnx.State) whose leaves are JAX or numpy arrays, typed PRNG
    keys or Python numbers.  A restored leaf has the same bits and kind, and is on the template's devices.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        best_metric: str = "reward/mean",
        read_only: bool = False,
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        self.directory = Path(directory).resolve()
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._best_metric = best_metric
        self._read_only = read_only
        self._tidies = not read_only and processes.is_first()
        self._warn = warn
        self._manager: ocp.CheckpointManager | None = None
        if self._tidies:
            self._clean_up()
        if not read_only:
            processes.barrier()

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending; only a restore shows whether they are whole."""
        if not self.directory.is_dir():
            return []
        return sorted(
            int(entry.name) for entry in self.directory.iterdir() if entry.name.isdecimal() and entry.is_dir()
        )

    def save(
        self, step: int, state: Any, metadata: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> bool:
        """Saves ``state`` and ``metadata`` (JSON) as the checkpoint of ``step``; returns when it is written.

        ``metrics``: the step's row, whose ``best_metric`` ranks the checkpoint.  If ``step`` already has a
        checkpoint, does nothing and returns False.  Raises ``ValueError`` for a step before the newest
        checkpoint, ``TypeError`` for metadata that is not JSON or a leaf that is not an array, and
        `RunStopped` if writing fails.
        """
        if self._read_only:
            raise RuntimeError("CheckpointStore.save: the store was opened with read_only=True")
        steps = self.steps()
        if step in steps:
            return False
        if steps and step < steps[-1]:
            raise ValueError(
                f"CheckpointStore.save: got step={step}, expected more than {steps[-1]}, the newest "
                "checkpoint's"
            )
        leaves = _named_leaves(state)
        plain = json.loads(json.dumps(dict(metadata)))
        document = _seal({"format": FORMAT, "step": step, "manifest": _manifest(leaves), "metadata": plain})
        score = float((metrics or {}).get(self._best_metric, -math.inf))
        manager = self._open_manager()
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_nest(_storable(leaves))), metadata=ocp.args.JsonSave(document)
        )
        try:
            with _only_the_exception():
                saved = manager.save(
                    step, args=args, metrics={"score": score if math.isfinite(score) else -math.inf}
                )
        except Exception as error:  # tensorstore reports a full disk by errors of many types
            raise RunStopped(
                f"CheckpointStore.save: the checkpoint of step {step} could not be written into "
                f"{self.directory}: {error}. "
                "The earlier ones are whole: make room and continue with --resume."
            ) from error
        if not saved:
            raise RuntimeError(f"CheckpointStore.save: Orbax did not save step {step} into {self.directory}")
        if self._tidies:
            shutil.rmtree(self.directory / _DELETED, ignore_errors=True)
        return True

    def restore_latest(self, template: Any, *, subset: bool = False) -> Restored | None:
        """The newest undamaged checkpoint, in the structure of ``template``; None if nothing is saved.

        ``template``: a pytree like the saved one, of arrays or ``jax.ShapeDtypeStruct``; ``subset`` as in
        `restore`.  A damaged checkpoint is skipped with a warning and, unless ``read_only``, renamed to
        ``<step>.corrupt``.  Raises `UserError` if the template differs from the saved state, or if every
        checkpoint is damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                restored = self.restore(step, template, subset=subset)
            except CorruptCheckpoint as error:
                damaged[step] = str(error)
                self._warn(f"checkpoint {self.directory / str(step)} is damaged and left out: {error}")
                continue
            for bad in damaged:
                self._set_aside(bad)
            return restored
        if damaged:
            raise UserError(
                f"restore_latest: no checkpoint is whole: got {self.directory} with steps "
                f"{sorted(damaged)}, each damaged "
                f"(the newest: {damaged[max(damaged)]}). Start a new run, or remove them to begin this "
                "one again."
            )
        return None

    def restore(self, step: int, template: Any, *, subset: bool = False) -> Restored:
        """The checkpoint of ``step``, in the structure of ``template``.

        With ``subset``, ``template`` may cover only a part of the state, such as the parameters.  Raises
        `CorruptCheckpoint` if it is damaged, and `UserError` if its arrays differ from ``template``'s.
        """
        document = self.read_metadata(step)
        wanted = _named_leaves(template)
        _check_template(wanted, document["manifest"], subset, self.directory / str(step))
        host = self._read_arrays(step, wanted, document["manifest"])
        leaves = [
            _as_template(host[name], leaf, document["manifest"][name]["dtype"])
            for name, leaf in wanted.items()
        ]
        return Restored(step, jax.tree.unflatten(jax.tree.structure(template), leaves), document["metadata"])

    def read_metadata(self, step: int) -> dict[str, Any]:
        """The verified metadata file of ``step``: ``format``, ``step``, ``manifest`` and ``metadata``.

        Raises `CorruptCheckpoint`, and `UserError` if another version of this program wrote it.
        """
        path = self.directory / str(step) / "metadata" / "metadata"
        try:
            document = json.loads(path.read_bytes())
            digest = document.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptCheckpoint(f"its metadata cannot be read: {error}") from error
        if _seal(document)["sha256"] != digest or document.get("step") != step:
            raise CorruptCheckpoint("its metadata is not what was saved (hash or step differ)")
        if document["format"] != FORMAT:
            raise UserError(
                f"read_metadata: another format of checkpoint: got format={document['format']} in "
                f"{path}, expected {FORMAT}"
            )
        return document

    def close(self) -> None:
        """Releases Orbax's resources.  May be called twice; the store can be used again afterwards."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_arrays(
        self, step: int, wanted: Mapping[str, Any], manifest: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """The arrays named in ``wanted``, as numpy, each checked against its hash."""
        item = _nest({name: np.empty((0,)) for name in wanted})
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        try:
            with ocp.Checkpointer(
                ocp.PyTreeCheckpointHandler(), multiprocessing_options=_alone()
            ) as checkpointer:
                arguments = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
                tree = checkpointer.restore(self.directory / str(step) / "state", args=arguments)
            arrays = {name: np.asarray(_look_up(tree, name)) for name in wanted}
        except MemoryError:
            raise
        except Exception as error:  # Orbax and tensorstore raise many types for a missing or truncated file
            raise CorruptCheckpoint(
                f"its arrays cannot be read: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        wrong = [name for name, digest in _digests(arrays).items() if digest != manifest[name]["sha256"]]
        if wrong:
            names = ", ".join(wrong[:3])
            raise CorruptCheckpoint(
                f"{len(wrong)} of {len(arrays)} arrays are not what was saved (SHA-256 differs): {names}"
            )
        return arrays

    def _open_manager(self) -> ocp.CheckpointManager:
        if self._manager is not None:
            return self._manager
        for step in self.steps() if self._tidies else ():
            # Orbax's manager cannot be created while one of these is unreadable
            if not _readable(self.directory / str(step)):
                self._warn(f"checkpoint {self.directory / str(step)} is damaged and set aside")
                self._set_aside(step)
        processes.barrier()
        policies = ocp.checkpoint_managers
        policy = policies.AnyPreservationPolicy(
            [policies.LatestN(self._keep_last), policies.BestN(get_metric_fn=_score, n=self._keep_best)],
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=_score,  # makes Orbax write the metrics; the policy above decides what is kept
            enable_async_checkpointing=False,
            todelete_subdir=_DELETED,
        )
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "metadata": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, item_handlers=handlers, options=options)
        return self._manager

    def _set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint, so that its step can be saved again and nothing is lost."""
        if not self._tidies:
            return
        self.close()
        target, count = self.directory / f"{step}.corrupt", 1
        while target.exists():
            count += 1
            target = self.directory / f"{step}.corrupt-{count}"
        (self.directory / str(step)).rename(target)

    def _clean_up(self) -> None:
        """Removes checkpoints that a kill left half written (with a warning) or half deleted."""
        shutil.rmtree(self.directory / _DELETED, ignore_errors=True)
        for entry in sorted(self.directory.glob(f"*{_TEMPORARY}*")):
            self._warn(f"checkpoint {entry} was not finished and is removed")
            shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def _only_the_exception() -> Iterator[None]:
    """A save that fails inside raises, and prints nothing beside.

    Each thread of Orbax logs its error with a traceback, and each write that it abandons finds the event loop
    closed, some only after the error was raised: behind a failure all this stays hidden.
    """
    report = sys.unraisablehook

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        undo.callback(setattr, sys, "unraisablehook", report)
        sys.unraisablehook = report_others
        absl, asyncio = logging.getLogger("absl"), logging.getLogger("asyncio")
        undo.callback(absl.removeFilter, _has_no_traceback)
        absl.addFilter(_has_no_traceback)
        undo.callback(asyncio.setLevel, asyncio.level)
        asyncio.setLevel(logging.CRITICAL)
        try:
            yield
        except Exception:
            undo.pop_all()
            raise


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["score"]


def _readable(path: Path) -> bool:
    """Whether the small files can be read that Orbax needs of every checkpoint."""
    try:
        json.loads((path / "_CHECKPOINT_METADATA").read_bytes())
        return isinstance(_score(json.loads((path / "metrics" / "metrics").read_bytes())), float)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """``document`` with the SHA-256 of its canonical JSON."""
    return {**document, "sha256": hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()}


def _named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by path, with parts joined by ``/``; nnx.Param wrappers are dropped."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
            path = path[:-1]
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        name = "/".join(parts)
        if name in named or not name or any("/" in part for part in parts):
            raise TypeError(
                f"CheckpointStore: bad tree path: got {name!r}, expected a container with distinct keys "
                "without '/'"
            )
        named[name] = leaf
    return named


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _dtype_name(leaf: Any) -> str:
    if _is_key(leaf):
        return str(leaf.dtype)
    return np.dtype(leaf.dtype).name if hasattr(leaf, "dtype") else np.asarray(leaf).dtype.name


def _storable(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays given to Orbax: keys become their data, Python numbers 0-d arrays."""
    arrays: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if _is_key(leaf):
            arrays[name] = jax.random.key_data(leaf)
        elif isinstance(leaf, jax.Array):
            # an array that every process holds by itself
            alone = processes.count() > 1 and leaf.is_fully_addressable
            arrays[name] = np.asarray(leaf) if alone else leaf
        elif isinstance(leaf, np.ndarray | np.generic | bool | int | float):
            arrays[name] = np.asarray(leaf)
        else:
            raise TypeError(
                f"CheckpointStore.save: no array: got {name} of type {type(leaf).__name__}, expected an "
                "array or a number"
            )
    return arrays


def _manifest(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape, dtype and hash of each array.

    With several processes all must call this; the result is empty except in the first.
    """
    arrays = _storable(leaves)
    if processes.count() == 1:
        digests = _digests({name: np.asarray(array) for name, array in arrays.items()})
    else:  # one at a time: each is gathered whole
        digests = {}
        for name, array in arrays.items():
            whole = processes.fetch(array)
            if processes.is_first():
                digests |= _digests({name: whole})
    described = {
        name: {"shape": list(np.shape(leaf)), "dtype": _dtype_name(leaf)} for name, leaf in leaves.items()
    }
    return {name: {**described[name], "sha256": digest} for name, digest in digests.items()}


def _alone() -> Any:
    """Orbax's options for files that this process reads by itself."""
    return ocp.options.MultiprocessingOptions(
        primary_host=None,
        active_processes={processes.index()},
        barrier_sync_key_prefix=f"process{processes.index()}",
    )


def _digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """SHA-256 of dtype, shape and bytes of each array; in threads, as hashing releases the interpreter."""

    def digest(array: np.ndarray) -> str:
        head = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
        head.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return head.hexdigest()

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(arrays, pool.map(digest, arrays.values()), strict=True))


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _look_up(tree: Mapping[str, Any], name: str) -> Any:
    for part in name.split("/"):
        tree = tree[part]
    return tree


def _as_template(array: np.ndarray, leaf: Any, dtype_name: str) -> Any:
    """``array`` as the same kind as ``leaf`` and on its devices; bits unchanged."""
    if isinstance(leaf, bool | int | float):
        return type(leaf)(array.item())
    if isinstance(leaf, np.ndarray | np.generic):
        return array if isinstance(leaf, np.ndarray) else array[()]
    sharding = getattr(leaf, "sharding", None)
    if _is_key(leaf):
        return jax.device_put(
            jax.random.wrap_key_data(jnp.asarray(array), impl=_key_impl(dtype_name)), sharding
        )
    return jax.device_put(array, sharding)


def _key_impl(dtype_name: str) -> str:
    """``key<fry>`` -> ``threefry2x32``."""
    return {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[
        dtype_name.removeprefix("key<").removesuffix(">")
    ]


def _check_template(wanted: Mapping[str, Any], manifest: Mapping[str, Any], subset: bool, path: Path) -> None:
    """Raises `UserError` listing every array that is missing, surplus, or of another shape or dtype."""
    problems = [f"  {name}: not in the checkpoint" for name in wanted if name not in manifest]
    if not subset:
        problems += [f"  {name}: only in the checkpoint" for name in manifest if name not in wanted]
    for name, leaf in wanted.items():
        if name not in manifest:
            continue
        saved = (tuple(manifest[name]["shape"]), manifest[name]["dtype"])
        now = (tuple(np.shape(leaf)), _dtype_name(leaf))
        if saved != now:
            problems.append(f"  {name}: saved {saved[1]}{list(saved[0])}, now {now[1]}{list(now[0])}")
    if problems:
        more = [f"  … and {len(problems) - 30} more"] if len(problems) > 30 else []
        raise UserError(
            f"restore: {path} holds another state than this run's:\n" + "\n".join(problems[:30] + more)
        )
