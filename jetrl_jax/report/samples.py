"""The sample browser of the page: the completions of one step at a time,
each token shaded by its log-probability.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jetrl_jax.report.charts import escape

if TYPE_CHECKING:
    from jetrl_jax.report.record import RunRecord

MAX_STEPS = 60  # of a run that the page holds, spread over all that have samples
MAX_SAMPLES = 16  # of a step

# Draws every browser of the page.  Texts enter as text, never as HTML.
DRAW_SAMPLES = """
for (const box of document.querySelectorAll(".browser")) {
  const steps = JSON.parse(box.querySelector("script").textContent);
  const [range, cards, said, token] = [".step", ".cards", ".said", ".token"].map((name) => box.querySelector(name));
  const add = (parent, tag, kind, text) => {
    const made = document.createElement(tag);
    made.className = kind;
    made.textContent = text;
    return parent.appendChild(made);
  };
  const show = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));
  const write = (card, sample) => {
    const known = ["step", "split", "prompt", "completion", "answer", "reward", "tokens", "logprobs", "tokens_left_out"];
    const head = add(card, "p", "head", "");
    add(head, "b", "", "reward " + show(sample.reward));
    if (sample.split) add(head, "span", "soft", sample.split);
    add(card, "pre", "prompt", show(sample.prompt ?? ""));
    const text = add(card, "pre", "completion", "");
    (sample.tokens ?? [sample.completion ?? ""]).forEach((part, index) => {
      const logprob = sample.logprobs?.[index];
      const piece = add(text, "span", "", part || (sample.tokens ? "\\u00b7" : ""));
      if (typeof logprob !== "number") return;
      piece.style.backgroundColor = `rgba(224, 115, 45, ${Math.min(0.75, -logprob / 4).toFixed(3)})`;
      piece.title = `log-probability ${logprob}, probability ${Math.exp(logprob).toPrecision(3)}`;
      piece.addEventListener("pointerover", () => { token.textContent = `${JSON.stringify(part)}: ${piece.title}`; });
    });
    if (sample.tokens_left_out) add(card, "p", "soft", `and ${sample.tokens_left_out} tokens more`);
    if (sample.answer !== undefined) add(card, "p", "soft", "answer: " + show(sample.answer));
    const rest = Object.entries(sample).filter(([name]) => !known.includes(name));
    add(card, "p", "soft", rest.map(([name, value]) => `${name} ${show(value)}`).join(" \\u00b7 "));
  };
  const draw = () => {
    const samples = steps[range.value];
    said.textContent = `step ${samples[0].step}`;
    token.textContent = "point at a token to read its log-probability";
    cards.replaceChildren();
    for (const sample of samples) write(add(cards, "div", "card", ""), sample);
  };
  const move = (by) => { range.value = Number(range.value) + by; draw(); };
  range.addEventListener("input", draw);
  box.querySelector(".back").addEventListener("click", () => move(-1));
  box.querySelector(".on").addEventListener("click", () => move(1));
  draw();
}
"""


def sample_browsers(records: Sequence[RunRecord]) -> str:
    """A browser for each run that kept samples, opened where there is one run only; empty where none did."""
    parts = []
    for record in records:
        steps = _steps(record.samples)
        if not steps:
            continue
        # nothing in it ends the script element
        data = json.dumps(steps, ensure_ascii=False).replace("<", "\\u003c")
        last = len(steps) - 1
        browser = (
            '<div class="browser"><p class="bar"><button class="back" type="button" '
            'aria-label="earlier">◀</button>'
            f'<input class="step" type="range" min="0" max="{last}" value="{last}" aria-label="step">'
            '<button class="on" type="button" aria-label="later">▶</button> <span class="said"></span></p>'
            '<p class="token soft"></p><div class="cards"></div><script '
            f'type="application/samples+json">{data}</script></div>'
        )
        shown = (
            f"{record.name}: {len(steps)} step{'s' * (len(steps) > 1)}; the stronger a token's "
            "colour, the less likely it was"
        )
        parts.append(
            f"<details{' open' if len(records) == 1 else ''}><summary>{escape(shown)}</summary>{browser}</details>"
        )
    return "<h2>Samples</h2>\n" + "\n".join(parts) if parts else ""


def _steps(samples: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The samples of each step, in order; of at most `MAX_STEPS` steps, evenly spread,
    the first and the last among them.
    """
    by_step: dict[Any, list[dict[str, Any]]] = {}
    for sample in samples:
        if len(kept := by_step.setdefault(sample.get("step"), [])) < MAX_SAMPLES:
            kept.append(sample)
    steps = list(by_step.values())
    if len(steps) <= MAX_STEPS:
        return steps
    return [steps[round(place * (len(steps) - 1) / (MAX_STEPS - 1))] for place in range(MAX_STEPS)]
