"""The two ways in which a command ends that are not a bug of ours."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: one message that says what, where, what was got, what is expected; exit status 2."""

    exit_code = 2


class RunStopped(Exception):
    """A run that ended by its own rules (non-finite steps, mismatch above its budget)
    or can no longer write; exit status 3.
    """

    exit_code = 3


class ProcessLost(RunStopped):
    """Another process of the run was lost; exit status 4."""

    exit_code = 4


def missing_extra(where: str, package: str, extra: str) -> UserError:
    """The one error for a package of an extra that is not installed."""
    return UserError(
        f"{where}: needs the package {package}, which is not installed. Install it with: pip install "
        f"'jetrl-jax[{extra}]'"
    )
