"""`python -m jetrl_jax config [NAME]`: prints the reference of all fields, or a config to start from."""

from __future__ import annotations

import difflib
from pathlib import Path

from jetrl_jax.commands.entry import command_parser
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import Place, all_fields, look_up
from jetrl_jax.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]

REFERENCE_INTRODUCTION = """
A config is one YAML file; every entry point takes it as `--config FILE`. Fields that are left out have their
default.

- `--set KEY=VALUE` changes a field after the file was read, as often as needed, the last one counts: `--set
  rollout.group_size=8`, `--set rewards.0.weight=2`, `--set 'model={path: runs/a/hf}'` (a section is replaced
  whole). The value is YAML; a text field takes it as it stands.
- Booleans are `true` and `false` only (`yes` and `on` are text), `1e-6` is a number, a whole number is fine
  where a number is expected.
- An unknown field, a field twice, a wrong type, sizes that do not fit together and a field without an effect
  are errors; all of them are told at once, before anything starts, with exit status 2.
- A task, a tokenizer, a precision, an engine, an algorithm and a correction are one of several kinds, each
  with its own fields and defaults: "of kind ..." says which. The kind stands alone or with other fields:
  `algorithm: dapo` is `algorithm: {name: dapo}`. A field of another kind is an error. Where a `--set` changes
  the kind, the fields in the file that this kind does not have are dropped.
- There are no anchors, aliases, tags or includes: a config can be read alone.
"""


def reference() -> str:
    """The page docs/config.md: every field with its type, default and meaning."""
    lines = [
        "# Config reference",
        "",
        "Written by `python -m jetrl_jax config > docs/config.md`; a test compares them.",
        "",
        *REFERENCE_INTRODUCTION.strip().splitlines(),
    ]
    for name in RunConfig.model_fields:
        lines += ["", f"## {name}", "", look_up((name,)).meaning, ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(*field) for field in all_fields() if field[0].split(".")[0] == name]
    return "\n".join(lines).replace("| `required` |", "| required |") + "\n"


def _row(path: str, only: str, found: dict[str, Place]) -> str:
    """A field's row; it says which kinds of the section have other defaults, or the field at all."""
    types = "; or ".join(dict.fromkeys(place.words for place in found.values()))
    meanings = " ".join(dict.fromkeys(place.meaning for place in found.values()))
    default, *_ = (place.default for place in found.values())
    others = [f"{kind}: `{place.default}`" for kind, place in found.items() if place.default != default]
    return f"| `{path}` | {types} | {'; '.join([f'`{default}`', *others])} | {only}{meanings} |"


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with the project: of `configs/`, or of the installed wheel."""
    installed, checkout = _PACKAGE / "configs", _PACKAGE.parent / "configs"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _shipped_config(name: str) -> str:
    """The text of the config of that name; raises `UserError`, with the names that there are."""
    configs = shipped_configs()
    if name not in configs:
        close = difflib.get_close_matches(name, configs, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(f"config: no such config: got {name!r}, expected one of {', '.join(configs)}.{hint}")
    return configs[name].read_text(encoding="utf-8")


def main(argv: list[str]) -> int:
    """Prints the reference, or the config of a name; returns the exit status."""
    parser = command_parser(
        "config", "Print every field of a config, or a config to start from.", "config tiny_cpu > my.yaml"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help=f"one of {', '.join(shipped_configs())}: print its file"
    )
    arguments = parser.parse_args(argv)
    print(reference() if arguments.name is None else _shipped_config(arguments.name), end="")
    return 0
