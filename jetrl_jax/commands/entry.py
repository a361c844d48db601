"""Code shared by all commands: the config arguments, and the exit status.

    exit status   0 done · 1 a bug (traceback) · 2 bad input · 3 stopped by the run's own rules, or the
                  disk is full · 4 another process of the run was lost · 130 interrupted ·
                  141 the reader of our output went away

The modules needed to read a config do not import jax, so that bad input is reported before any device is
touched.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jetrl_jax.config.load import load_config
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import RunStopped, UserError

INTERRUPTED = 130
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
BROKEN_PIPE = 141


def command_parser(name: str, description: str, *examples: str) -> argparse.ArgumentParser:
    """The parser of `python -m jetrl_jax NAME`, whose --help ends with examples.

    name: of the command; ``train`` is `python -m jetrl_jax.train`.
    examples: example command lines, without the leading ``python -m jetrl_jax``.
    """
    program = "python -m jetrl_jax.train" if name == "train" else f"python -m jetrl_jax {name}"
    start = "python -m jetrl_jax." if name == "train" else "python -m jetrl_jax "
    lines = "\n".join(f"  {start}{example}" for example in examples)
    return argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=f"example{'s' if len(examples) > 1 else ''}:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --config and --set, which `config_from_arguments` reads."""
    parser.add_argument(
        "--config",
        type=user_path,
        metavar="FILE",
        help="YAML file of the run (fields left out have their defaults, see docs/config.md)",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="change a field of the config, such as rollout.group_size=8 or rewards.0.weight=2; "
        "repeatable, the last one counts",
    )


def add_step_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --step, the checkpoint of a run, as `jetrl_jax.runs.policy.load_policy` takes it."""
    parser.add_argument(
        "--step",
        type=_step,
        default="last",
        metavar="N|best|last",
        help="checkpoint of a run (default: last); best: the highest held-out accuracy among those kept",
    )


def _step(text: str) -> int | str:
    if text not in ("last", "best") and not text.isdecimal():
        raise UserError(f"--step: no step: got {text!r}, expected a number, best or last.")
    return int(text) if text.isdecimal() else text


def config_from_arguments(arguments: argparse.Namespace) -> RunConfig:
    """The config that --config and --set describe; raises UserError if it is invalid."""
    return load_config(arguments.config, arguments.overrides)


def check_output_files(command: str, *files: Path | None) -> None:
    """Raises UserError, before anything is computed, if an output file cannot be written; skips None."""
    for file in files:
        if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
            what = "is a directory" if file.is_dir() else "is not in a writable directory"
            raise UserError(
                f"{command}: the output {what}: got {str(file)!r}, expected a file in an existing, writable "
                "directory."
            )


def run_entry_point(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Runs `main(sys.argv[1:])` and exits with its status; a `UserError` ends with a message only."""
    try:
        status = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except UserError as error:
        status = _end(f"error: {error}", error.exit_code)
    except RunStopped as error:
        status = _end(f"stopped: {error}", error.exit_code)
    except KeyboardInterrupt:
        status = _end("interrupted", INTERRUPTED)
    except BrokenPipeError:
        if not _nobody_reads():
            raise  # another pipe broke, such as that of a worker process; a bug must not be hidden
        status = BROKEN_PIPE
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        status = _end(
            f"stopped: {error}. Everything saved before is intact: make room and continue with --resume.",
            RunStopped.exit_code,
        )
    if _nobody_reads():
        # Python's own flush at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _end(message: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()  # earlier output comes before the message
    print(message, file=sys.stderr, flush=True)
    return status


def _nobody_reads() -> bool:
    """Whether stdout is a pipe whose other end is closed."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # replaced by an object that is not a file
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
