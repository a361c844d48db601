"""The report: what the page shows is what the rows say, it needs nothing from outside, and a browser draws
every chart.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from plotly.offline import get_plotlyjs

from jetrl_jax.commands import report
from jetrl_jax.config.run_config import RunConfig
from jetrl_jax.errors import UserError
from jetrl_jax.record.metrics import MetricsWriter, find_metric
from jetrl_jax.record.run_directory import RunDirectory
from jetrl_jax.report.charts import MAX_POINTS, SECTIONS
from jetrl_jax.report.page import MAX_STEPS

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (path := shutil.which(name))
    ),
    None,
)


ENVIRONMENT = {
    "commit": "0123456789abcdef",
    "dirty": True,
    "python": "3.11.7",
    "device_kind": "cpu",
    "device_count": 1,
    "packages": {"jax": "0.10.2", "vllm": "0.32.0"},
    "algorithm": {"name": "grpo", "clip_low": 0.2},
    "fp8_products": {
        "forward": {"name": "xla", "reason": "no GPU"},
        "backward": {"name": "xla_fast", "reason": "no GPU"},
    },
    "attention": {"name": "cudnn", "reason": "<asked for>"},
    "rollout_engine": {"mode": "vllm", "operations": {"norm": "ExactRMSNorm"}},
}


def row(step: int, k3: float = 1e-4) -> dict[str, float]:
    """A row with every kind of metric; each value of a step is its own."""
    values = {
        "reward/mean": 0.1 + step / 1000,
        "reward/task_mean": 0.2 + step / 1000,
        "reward/mod:format_mean": 0.3,
        "mismatch/k3": k3 * step,
        "mismatch/logprob_abs_mean": k3 * step * 2,
        "mismatch/logprob_abs_max": k3 * step * 3,
        "clip/positive_fraction": 0.01 * (step % 5),
        "clip/negative_fraction": 0.02 * (step % 5),
        "length/completion_tokens_mean": 7.0 + step / 10,
        "length/truncated_fraction": 0.0,
        "time/rollout_s": 1.0 if step == 1 else 0.25,
        "time/train_s": 9.0 if step == 1 else 0.75,
        "time/step_s": 10.0 if step == 1 else 1.0,
        "rate/rollout_tokens_per_s": 20000.0,
        "optimizer/learning_rate": 3e-4,
        "count/skipped_updates": 0,
        "count/masked_samples": 1 if step == 3 else 0,
    }
    if step % 10 == 0:
        values |= {
            "eval/accuracy": 0.39 + step / 100,
            "eval/greedy_accuracy": 0.9,
            "eval/pass_at_2": 0.5,
            "eval/pass_at_16": 0.75,
        }
    return values


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run of 30 steps with the program's own writers."""

    def make(
        name: str,
        *,
        k3: float = 1e-4,
        steps: int = 30,
        precision: str = "site  format\nfprop e4m3 <1,128>\n",
        **config: Any,
    ) -> Path:
        with RunDirectory.create(tmp_path / name) as run:
            document = RunConfig.model_validate(config).model_dump(mode="json")
            run.write_config(yaml.safe_dump(document))
            run.write_precision(precision)
            run.write_environment(ENVIRONMENT)
            with MetricsWriter(run.metrics_path) as writer:
                writer.write(
                    0,
                    {
                        "eval/accuracy": 0.25,
                        "eval/greedy_accuracy": 0.95,
                        "eval/pass_at_2": 0.3,
                        "eval/pass_at_16": 0.6,
                    },
                )
                for step in range(1, steps + 1):
                    writer.write(step, row(step, k3))
                    sample = {
                        "prompt": f"{step}+1=",
                        "completion": "<script>alert(1)</script>",
                        "answer": "2",
                        "reward": 1.0,
                    }
                    run.append_samples(
                        step,
                        [
                            sample
                            | {
                                "tokens": ["<script>", "alert(1)", "</script>"],
                                "logprobs": [-0.5, -3.0, None],
                            }
                        ],
                    )
        return tmp_path / name

    return make


class Page(HTMLParser):
    """The page's charts, its text, and whatever it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, dict[str, Any]] = {}
        self.samples: list[list[list[dict[str, Any]]]] = []
        self.fetches: list[str] = []
        self.text = ""
        self._metric = self._script = ""
        self.feed(text.replace(get_plotlyjs(), ""))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self._metric = given.get("data-metric") or self._metric
        self._script = (given.get("type") or "code") if tag == "script" else ""
        self.fetches += [
            f"{name}={value}"
            for name, value in attributes
            if name in ("src", "href", "srcset", "data", "action", "background")
        ]

    def handle_endtag(self, tag: str) -> None:
        self._script = ""

    def handle_data(self, data: str) -> None:
        if self._script == "application/json":
            self.figures[self._metric] = json.loads(data)
        elif self._script == "application/samples+json":
            self.samples.append(json.loads(data))
        elif not self._script:
            self.text += data + "\n"

    def points(self, metric: str, trace: int = 0) -> list[tuple[float, float]]:
        drawn = self.figures[metric]["data"][trace]
        return list(zip(drawn["x"], drawn["y"], strict=True))


def page_of(*runs: Path) -> Page:
    return Page(report.write_report(list(runs), runs[0].parent / "page.html").read_text(encoding="utf-8"))


def test_every_panel_is_a_declared_metric() -> None:
    for _, panels in SECTIONS:
        for panel in panels:
            assert find_metric(panel.metric.replace("*", "x")).name == panel.metric


def test_charts_show_the_rows(make_run: Callable[..., Path]) -> None:
    page = page_of(make_run("a"))
    assert page.points("eval/accuracy") == [(0, 0.25), *((step, 0.39 + step / 100) for step in (10, 20, 30))]
    assert page.points("mismatch/k3") == [(step, 1e-4 * step) for step in range(1, 31)]
    assert page.figures["mismatch/k3"]["layout"]["yaxis"]["type"] == "log"
    assert page.points("reward/mod:format_mean")[0] == (1, 0.3)
    # the largest k, not the last name
    assert "eval/pass_at_16" in page.figures and "eval/pass_at_2" not in page.figures
    assert "count/masked_samples" in page.figures and "count/skipped_updates" not in page.figures  # always 0
    assert "policy/entropy" not in page.figures  # no run has it
    phases = {trace["name"]: trace["x"] for trace in page.figures["phases"]["data"]}
    assert phases == {"rollout": [0.25], "train": [0.75]}  # the first step left out
    assert "25.0 → 69.0 % (+44.0)" in page.text and "95.0 → 90.0 % (-5.0)" in page.text
    assert "30 of 100" in page.text and "0123456789ab + changes" in page.text
    assert "fprop e4m3 <1,128>" in page.text


def test_several_runs_lie_over_one_another_in_their_colours(make_run: Callable[..., Path]) -> None:
    one, two = (
        make_run("one"),
        make_run("two", k3=2e-4, precision="site  format\nfprop bf16\n", rollout={"group_size": 8}, seed=3),
    )
    page = page_of(one, two)
    for metric in ("mismatch/k3", "eval/accuracy", "length/completion_tokens_mean"):
        first, second = page.figures[metric]["data"]
        assert (first["name"], second["name"]) == ("one", "two")
        assert first["line"]["color"] != second["line"]["color"]
    assert page.points("mismatch/k3", 1)[4] == (5, 1e-3)
    assert page.figures["phases"]["data"][0]["y"] == ["one", "two"]
    differing = page.text[page.text.index("Config") : page.text.index("Fields that differ")].split()
    assert differing == [
        "Config",
        "field",
        "one",
        "two",
        "default",
        "rollout.group_size",
        "16",
        "8",
        "16",
        "seed",
        "0",
        "3",
        "0",
    ]
    assert "fprop bf16" in page.text and "fprop e4m3" in page.text


def test_an_exact_flow_is_said_to_be_exact(make_run: Callable[..., Path]) -> None:
    page = page_of(make_run("exact", k3=0.0))
    assert "exactly 0 at every step" in page.text
    assert page.figures["mismatch/k3"]["layout"]["yaxis"].get("type") != "log"
    assert page.points("mismatch/k3")[0] == (1, 0.0)
    page = page_of(make_run("exact2", k3=0.0), make_run("other"))
    assert "exact2: exactly 0 at every step" in page.text
    assert [trace["name"] for trace in page.figures["mismatch/k3"]["data"]] == ["other"]


def test_long_runs_are_thinned_without_losing_a_peak(make_run: Callable[..., Path]) -> None:
    path = make_run("long", steps=0)
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for step in range(1, 3 * MAX_POINTS):
            writer.write(
                step,
                {
                    "optimizer/grad_norm": 50.0 if step == 1234 else 1 + math.sin(step) / 2,
                    "reward/mean": float(step % 2),
                },
            )
    page = page_of(path)
    points = page.points("optimizer/grad_norm")
    assert len(points) <= MAX_POINTS + 2
    assert (1234, 50.0) in points
    assert points == sorted(points)
    faint, average = page.figures["reward/mean"]["data"]
    assert faint["opacity"] < 1
    assert all(abs(value - 0.5) < 0.02 for value in average["y"][-20:])


def test_page_says_what_ran(make_run: Callable[..., Path]) -> None:
    page = page_of(make_run("one", precision="", numerics={"exact": False}), make_run("two"))
    words = [line for line in page.text[page.text.index("What ran") :].split("\n") if line.strip()]

    def said(name: str, runs: int = 1) -> list[str]:
        return words[words.index(name) + 1 :][:runs]

    assert said("exact", 2) == ["false", "true"]
    assert words.index("exact") < words.index("The same in all runs") < words.index("precision")
    assert said("precision") == ["fp8_unified"]
    assert said("rollout engine") == ["mode vllm, operations.norm ExactRMSNorm"]
    assert said("fp8 products") == ["forward xla, backward xla_fast (no GPU)"]
    assert said("attention") == ["cudnn (<asked for>)"]
    assert said("packages") == ["Python 3.11.7, jax 0.10.2, vllm 0.32.0"]
    assert "sharding" not in words  # none has any


def test_page_holds_the_samples_of_some_steps(make_run: Callable[..., Path]) -> None:
    short, long = (
        page_of(make_run("short", steps=3)),
        page_of(make_run("long", steps=200), make_run("other", steps=3)),
    )
    assert [[sample["step"] for sample in step] for step in short.samples[0]] == [[1], [2], [3]]
    assert short.samples[0][2][0]["tokens"] == ["<script>", "alert(1)", "</script>"]
    assert short.samples[0][2][0]["logprobs"] == [-0.5, -3.0, None]
    kept = [step[0]["step"] for step in long.samples[0]]
    assert len(kept) == MAX_STEPS and kept[0] == 1 and kept[-1] == 200 and len(set(kept)) == MAX_STEPS
    assert len(long.samples) == 2


def test_page_is_alone_and_escapes_what_runs_wrote(make_run: Callable[..., Path]) -> None:
    path = make_run("<b>&x", precision="</pre><script>alert(2)</script>")
    text = report.write_report([path], path.parent / "page.html").read_text(encoding="utf-8")
    ours = text.replace(get_plotlyjs(), "")
    assert len(ours) < 200_000
    assert "alert(1)" in ours and "<script>alert" not in ours
    assert Page(text).fetches == []
    assert not re.search(r"https?://|@import|url\(", ours)
    assert "prefers-color-scheme: dark" in ours
    assert "&lt;b&gt;&amp;x" in ours


def test_a_run_that_goes_on_and_metrics_of_another_version_are_read(make_run: Callable[..., Path]) -> None:
    path = make_run("a")
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 31, "group/of_the_future": 1, "reward/mean": null}\n{"step": 32, "rew')
    page = page_of(path)
    assert "31 of 100" in page.text
    assert page.points("reward/mean")[-1][0] == 30


def test_files_that_are_missing_leave_their_part_out(make_run: Callable[..., Path]) -> None:
    path = make_run("a")
    for name in ("config.yaml", "environment.json", "precision.txt", "samples.jsonl"):
        (path / name).unlink()
    page = page_of(path)
    assert "Held-out evaluation" in page.text and "Precision" not in page.text and "Config" not in page.text


def test_default_place_and_names(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = make_run("x/run")
    two = make_run("y/run")
    assert report.write_report([one]) == one / "report.html"
    monkeypatch.chdir(tmp_path)
    page = Page(report.write_report(["x/run", two]).read_text())
    assert (tmp_path / "report.html").exists()
    assert "x/run" in page.text and "y/run" in page.text


def break_rows(path: Path) -> None:
    (path / "metrics.jsonl").write_text('{"step": 1}\n{"step":\n{"step": 3}\n')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "no run directory: got "),
        (
            lambda path: (path / "metrics.jsonl").unlink(),
            r"a run that has no row yet: got .* without metrics\.jsonl",
        ),
        (
            lambda path: [(path / name).unlink() for name in ("metrics.jsonl", "config.yaml")],
            r"no run directory: got .* without metrics",
        ),
        (lambda path: (path / "metrics.jsonl").write_text(""), "has no row yet"),
        (break_rows, r"metrics\.jsonl:2"),
        (
            lambda path: (path / "config.yaml").write_text("a: [1"),
            r"a config that is no YAML: got .*config\.yaml",
        ),
        (
            lambda path: (path / "environment.json").write_text("[]"),
            r"unreadable file: got .*environment\.json",
        ),
        (lambda path: (path / "report.html").mkdir(), r"cannot be written: got --out .*report\.html"),
    ],
)
def test_write_report_raises_on(
    make_run: Callable[..., Path], spoil: Callable[[Path], Any], message: str
) -> None:
    path = make_run("a")
    spoil(path)
    with pytest.raises(UserError, match=message):
        report.write_report([path])


def test_write_report_raises_on_a_run_named_twice(make_run: Callable[..., Path]) -> None:
    path = make_run("a")
    with pytest.raises(UserError, match="a run is named twice"):
        report.write_report([path, path / ".." / "a"])


def test_command_line_writes_the_page(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert report.main([str(make_run("a")), "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert page.exists()


def test_command_line_ends_with_2_on_bad_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jetrl_jax", "report", str(tmp_path / "nowhere")]
    bad = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr.startswith("error: report: no run directory") and bad.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome is installed: the page is not drawn")
def test_a_browser_without_a_network_draws_every_chart(make_run: Callable[..., Path], tmp_path: Path) -> None:
    runs = [make_run("one"), make_run("two", k3=0.0)]
    page = report.write_report(runs, tmp_path / "page.html")
    expected = len(Page(page.read_text()).figures)
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    command += [
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'browser'}",
        "--virtual-time-budget=20000",
        "--window-size=1300,900",
    ]
    drawn = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in drawn.stderr  # no error of a script, nothing that could not be fetched
    dom = drawn.stdout.replace(get_plotlyjs(), "")
    charts = re.findall(r'<div class="chart js-plotly-plot".*?</figure>', dom, re.S)
    assert len(charts) == expected > 10
    for chart in charts:
        assert re.search(r'class="(js-line|point)"', chart), chart[-300:]
        width = int(re.search(r'<svg class="main-svg"[^>]* width="(\d+)', chart).group(1))
        assert 250 < width < 700  # fits its card of the grid
    assert dom.count('<div class="card">') == 2  # the last step's sample of each run
    assert len(re.findall(r'title="log-probability -3, probability 0.0498"[^>]*>alert\(1\)</span>', dom)) == 2
    assert dom.count("&lt;script&gt;</span>") == 2
