"""`python -m jetrl_jax config [NAME]`: prints the reference of all fields, or a config to start from."""

from __future__ import annotations

from jetrl_jax.commands.entry import command_parser
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.config.schema import Found, all_fields, default_of, look_up
from jetrl_jax.config.shipped import shipped_config, shipped_configs

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
    fields = dict(all_fields())
    for name in RunConfig.model_fields:
        section = look_up((name,))
        assert section is not None
        lines += ["", f"## {name}", "", section.meaning, ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(path, found) for path, found in fields.items() if path.split(".")[0] == name]
    return "\n".join(lines).replace("| `required` |", "| required |") + "\n"


def _row(path: str, found: list[Found]) -> str:
    """A field's row; it names variants of the section that lack the field or have another default."""
    types = dict.fromkeys(field.takes.in_words() for field in found)
    meanings = " ".join(dict.fromkeys(field.meaning for field in found))
    parts, only, default, others = path.split("."), "", default_of(found[0].info), []
    for end in range(1, len(parts)):
        parent = look_up(tuple(parts[:end]))
        if parent is None or parent.takes.kind != "section":
            break
        having = [section for section in parent.takes.sections if parts[end] in section.model_fields]
        if len(having) < len(parent.takes.sections):
            only += f"Of {parent.takes.named(having)}. "
        if end == len(parts) - 1 and parts[end] != parent.takes.tag:
            own = {section: default_of(section.model_fields[parts[end]]) for section in having}
            others = [
                f"{parent.takes.named([section])}: `{value}`"
                for section, value in own.items()
                if value != default
            ]
    return f"| `{path}` | {'; or '.join(types)} | {'; '.join([f'`{default}`', *others])} | {only}{meanings} |"


def main(argv: list[str]) -> int:
    """Prints the reference, or the config of a name; returns the exit status."""
    parser = command_parser(
        "config", "Print every field of a config, or a config to start from.", "config tiny_cpu > my.yaml"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help=f"one of {', '.join(shipped_configs())}: print its file"
    )
    arguments = parser.parse_args(argv)
    print(reference() if arguments.name is None else shipped_config(arguments.name), end="")
    return 0
