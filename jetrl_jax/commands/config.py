"""`python -m jetrl_jax config [NAME]`: the reference of all fields, which is the page docs/config.md, or a config to start from."""

from __future__ import annotations

from jetrl_jax.commands.entry import command_parser
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import all_fields, default_of, type_of
from jetrl_jax.config.shipped import shipped_config, shipped_configs

REFERENCE_INTRODUCTION = """
A config is one YAML file; every entry point takes it as `--config FILE`. Fields that are left out have their default.

- `--set KEY=VALUE` changes a field after the file was read, as often as needed, the last one counts: `--set rollout.group_size=8`,
  `--set rewards.0.weight=2`, `--set 'model={path: runs/a/hf}'` (a section is replaced whole). The value is YAML; a text field takes
  it as it stands.
- Booleans are `true` and `false` only (`yes` and `on` are text), `1e-6` is a number, a whole number is fine where a number is expected.
- An unknown field, a field twice, a wrong type, sizes that do not fit together and a field without an effect are errors; all of
  them are told at once, before anything starts, with exit status 2.
- A field has no effect where another one switches it off (the sizes of a new model beside `model.path`). Where a `--set` is the
  switch, the file's settings of what is then off are dropped.
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
    for name, info in RunConfig.model_fields.items():
        kind = type_of(RunConfig, name)
        lines += ["", f"## {name}", "", str(info.description), ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        rows = (
            [(name, kind, info)] if kind.section is None else list(all_fields(kind.section, name + (".N." if kind.kind == "list" else ".")))
        )
        lines += [f"| `{path}` | {row.in_words()} | `{default_of(field)}` | {field.description} |" for path, row, field in rows]
    return "\n".join(lines).replace("| `required` |", "| required |") + "\n"


def main(argv: list[str]) -> int:
    """Prints the reference, or the config of a name; returns the exit status."""
    parser = command_parser("config", "Print every field of a config, or a config to start from.", "config tiny_cpu > my.yaml")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"one of {', '.join(shipped_configs())}: print its file")
    arguments = parser.parse_args(argv)
    print(reference() if arguments.name is None else shipped_config(arguments.name), end="")
    return 0
