"""The error of each FP8 product of a real model, on its own activations and gradients: ``make bench-real``.

SmolLM2-135M-Instruct (``make real-model``) runs in FP32 in transformers on solved questions of GSM8K; hooks
keep the input X of every linear layer and the gradient dY of its output, for the policy-gradient loss -
mean(A logprob) over the tokens of the solutions, A = +1 and -1 in turns.  Of each layer, X, W and dY rounded
to BF16, the three products in FP8

    fprop   X (1, 128)   . W (128, 128)^T
    dgrad   dY (1, 128)  . W (128, 128)
    wgrad   dY (128, 1)^T . X (128, 1)      X quantised along tokens from its FP8 codes (requantize) or from
            BF16 (dual)

are compared with float64 products of the same BF16 operands: ||error|| / ||product||, Frobenius.  One token
with an outlier can be most of such a norm, so fprop's error is also given by token: the median and the
largest over the rows of Y.  Beside
them, what makes a site hard: the largest |X| over X's root mean square, the channel where it stands, the
share of X's squares in that channel, and the share of X's values that the quantiser turns into 0.

    python tests/benchmarks/real_model/fp8_sites.py --questions 8
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jetrl_jax.tasks.gsm8k import directory
from pallas_kernels import ScaledArray, dgrad, fprop, quantize, requantize, wgrad
from tests.benchmarks.real_model.make import DIRECTORY, is_made

SITES = ("fprop", "dgrad", "wgrad", "wgrad_dual")
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# X [M, K], W [N, K], dY [M, N], float64 values of BF16 numbers
Operands = tuple[np.ndarray, np.ndarray, np.ndarray]
Row = dict[str, Any]


def capture(questions: list[dict[str, str]]) -> dict[str, Operands]:
    """{layer's name: its operands} of one forward and backward, question after question."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    linear = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in LAYERS}
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in linear}
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in linear}
    for name, module in linear.items():
        module.register_forward_hook(lambda _, x, y, name=name: inputs[name].append(x[0][0].detach()))
        module.register_full_backward_hook(
            lambda _, dx, dy, name=name: gradients[name].append(dy[0][0].detach())
        )
    for number, question in enumerate(questions):
        messages = [
            {"role": "user", "content": question["question"]},
            {"role": "assistant", "content": question["answer"]},
        ]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        start, ids = len(tokenizer(prompt).input_ids), tokenizer(whole, return_tensors="pt").input_ids
        logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0, start - 1 : -1], -1)
        chosen = logprobs.gather(1, ids[0, start:, None])
        (-chosen.mean() * (1 if number % 2 == 0 else -1)).backward()
        model.zero_grad()
    return {
        name: (
            _bf16(torch.cat(inputs[name])),
            _bf16(module.weight.detach()),
            _bf16(torch.cat(gradients[name])),
        )
        for name, module in linear.items()
    }


def _bf16(value: torch.Tensor) -> np.ndarray:
    return value.to(torch.bfloat16).to(torch.float64).numpy()


def errors(operands: Operands) -> dict[str, float]:
    """{site: relative error of its FP8 product}."""
    x, w, dy = operands
    x16, w16, dy16 = (jnp.asarray(value, jnp.bfloat16) for value in operands)
    rows, weight = quantize(x16, (1, 128)), quantize(w16, (128, 128))
    dy_rows, dy_tokens = quantize(dy16, (1, 128)), quantize(dy16, (128, 1))
    output = {"out_dtype": jnp.float32, "implementation": "xla_fast"}
    gradient, forward = dy.T @ x, x @ w.T
    product = np.asarray(fprop(rows, weight, **output), np.float64)
    by_token = np.linalg.norm(product - forward, axis=1) / np.linalg.norm(forward, axis=1)
    return {
        "fprop": relative(product, forward),
        "token_median": float(np.median(by_token)),
        "token_largest": float(by_token.max()),
        "dgrad": relative(dgrad(dy_rows, weight, **output), dy @ w),
        "wgrad": relative(wgrad(dy_tokens, requantize(rows), **output), gradient),
        "wgrad_dual": relative(wgrad(dy_tokens, quantize(x16, (128, 1)), **output), gradient),
    }


def relative(got: Any, reference: np.ndarray) -> float:
    """||got - reference|| / ||reference||."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - reference) / np.linalg.norm(reference))


def outliers(x: np.ndarray) -> Row:
    """What is large in X [M, K]."""
    squares = x * x
    channel = int(np.abs(x).max(0).argmax())
    codes: ScaledArray = quantize(jnp.asarray(x, jnp.bfloat16), (1, 128))
    zeros = (np.asarray(codes.qvalue, np.float32) == 0) & (x != 0)
    return {
        "peak": float(np.abs(x).max() / np.sqrt(squares.mean())),
        "channel": channel,
        "share": float(squares[:, channel].sum() / squares.sum()),
        "zeros": float(zeros.mean()),
    }


def measure(questions: list[dict[str, str]]) -> list[Row]:
    """One row per linear layer."""
    rows = []
    for name, operands in capture(questions).items():
        _, _, layer, _, kind = name.split(".")
        rows.append(
            {"layer": int(layer), "kind": kind, "tokens": len(operands[0])}
            | errors(operands)
            | outliers(operands[0])
        )
    return rows


def table(rows: list[Row]) -> str:
    """Errors by kind of layer: median over the layers, and the worst with its number; then the sites with the
    largest peaks.
    """
    lines = [f"{rows[0]['tokens']} tokens; median error, and the largest with its layer", ""]
    lines += ["| | " + " | ".join(SITES) + " |", "|---" * (1 + len(SITES)) + "|"]
    for kind in LAYERS:
        mine = [row for row in rows if row["kind"] == kind]
        worst = [max(mine, key=lambda row, site=site: row[site]) for site in SITES]
        cells = [
            f"{np.median([row[site] for row in mine]):.1%}, {w[site]:.1%} ({w['layer']})"
            for site, w in zip(SITES, worst, strict=True)
        ]
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    heads = (
        "input of",
        "largest over RMS",
        "channel",
        "its share of the squares",
        "turned into 0",
        "fprop",
        "by token, median",
        "largest",
    )
    lines += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    # k, v and up read the same
    inputs = [row for row in rows if row["kind"] in ("q_proj", "o_proj", "gate_proj", "down_proj")]
    for row in sorted(inputs, key=lambda row: -row["peak"])[:12]:
        numbers = f"{row['peak']:.0f} | {row['channel']} | {row['share']:.1%} | {row['zeros']:.2%}"
        errors_of_y = " | ".join(f"{row[name]:.1%}" for name in ("fprop", "token_median", "token_largest"))
        lines.append(f"| layer {row['layer']} `{row['kind']}` | {numbers} | {errors_of_y} |")
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in LAYERS}
    worst_token = max(rows, key=lambda row: row["token_largest"])
    lines += [
        "",
        "fprop by token, median over the layers: "
        + ", ".join(
            f"{kind} {np.median([row['token_median'] for row in mine]):.1%}" for kind, mine in kinds.items()
        )
        + f"; the largest of any token: {worst_token['token_largest']:.1%}, layer "
        f"{worst_token['layer']} {worst_token['kind']}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints two Markdown tables and writes the rows as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gsm8k", help="directory of GSM8K's files; default: as task.path")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    if not is_made():
        sys.exit(f"fp8_sites: no model in {DIRECTORY}: run `make real-model` first.")
    lines = (directory(options.gsm8k) / "test.jsonl").read_text("utf-8").splitlines()[: options.questions]
    rows = measure([json.loads(line) for line in lines])
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
