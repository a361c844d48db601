"""`python -m jetrl_jax report RUN [RUN ...] [--out PAGE]`: an HTML page about one run or several overlaid.

The page is self-contained, chart library included, so it opens without a network.  The command reads only the
files that `jetrl_jax.record.run_directory` writes, starts no device, and may be used while a run is going on.
Without --out it writes RUN/report.html for one run, and report.html in the current directory for several.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jetrl_jax.commands.entry import command_parser
from jetrl_jax.config.types import user_path
from jetrl_jax.errors import UserError
from jetrl_jax.report.record import read_run

PAGE_FILE = "report.html"


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the page about ``runs`` (run directories) to ``out`` and returns its path.

    Raises `UserError` for a path that is not a run directory, a run without metrics, a run named twice, a
    file of a run that cannot be read, or a page that cannot be written.
    """
    from jetrl_jax.report.page import render  # plotly is slow to import

    paths = [user_path(run).resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise UserError(f"report: a run is named twice: got {', '.join(str(run) for run in runs)}")
    records = [read_run(path, name) for path, name in zip(paths, _short_names(paths), strict=True)]
    target = user_path(out) if out is not None else (paths[0] if len(paths) == 1 else Path()) / PAGE_FILE
    page = render(records)
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"report: the page cannot be written: got --out {target}: {error.strerror}"
        ) from error
    return target


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def main(argv: list[str]) -> int:
    """Parses the command line, writes the page and prints its path; returns the exit status."""
    parser = command_parser(
        "report",
        "Write an HTML page about one or several runs.",
        "report runs/tiny_cpu",
        "report runs/a runs/b --out both.html",
    )
    parser.add_argument("runs", type=user_path, metavar="RUN", nargs="+", help="directory of a run")
    parser.add_argument(
        "--out",
        type=user_path,
        metavar="PAGE",
        help=f"the page; default RUN/{PAGE_FILE}, for several runs {PAGE_FILE} here",
    )
    arguments = parser.parse_args(argv)
    page = write_report(arguments.runs, arguments.out)
    print(f"wrote {page}")
    return 0
