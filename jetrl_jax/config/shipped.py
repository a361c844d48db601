"""The configs that come with this project, by name: in a checkout those of `configs/`,
in an installed wheel its own copies.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from jetrl_jax.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_configs() -> dict[str, Path]:
    """Name -> file, in the order of names."""
    installed, checkout = _PACKAGE / "configs", _PACKAGE.parent / "configs"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def shipped_config(name: str) -> str:
    """The text of the config of that name; raises `UserError`, with the names that there are."""
    configs = shipped_configs()
    if name not in configs:
        close = difflib.get_close_matches(name, configs, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(f"config: no such config: got {name!r}, expected one of {', '.join(configs)}.{hint}")
    return configs[name].read_text(encoding="utf-8")
