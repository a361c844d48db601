"""Errors that end a command with a message and an exit status, not a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: one message says what is wrong, where, and what was got and expected; exit status 2."""

    exit_code = 2


class RunStopped(Exception):
    """A run stopped by its own rules (non-finite steps, mismatch over budget) or a full disk: status 3."""

    exit_code = 3


class ProcessLost(RunStopped):
    """Another process of the run was lost; exit status 4."""

    exit_code = 4


def missing_extra(where: str, package: str, extra: str) -> UserError:
    """The error for a package that is not installed and comes with an optional extra."""
    return UserError(
        f"{where}: needs the package {package}, which is not installed. Install it with: pip install "
        f"'jetrl-jax[{extra}]'"
    )
