"""Benchmark results as Markdown. Pure."""

from typing import Any

from tools.benchmarking.contest import ratio

FORMULA = (
    "Model FLOPs per token: 6 N + 6 L s a, with N the elements of all weight matrices (output layer once; no lookup tables, "
    "biases, norms or padding) and causal attention over L layers of width a and sequences of s: half of the full 12 L s a. "
    "Recompute does not count."
)


def markdown(measured: dict[str, Any]) -> str:
    parts = [_heading(measured), _ceilings(measured["ceilings"]), _contenders(measured), _phases(measured["results"])]
    parts += [_operators(measured["results"]["ours"].get("operators", [])), FORMULA]
    parts += [f"Not measured: {name}: {why}" for name, why in measured["not_measured"].items()]
    return "\n\n".join(part for part in parts if part)


def _heading(measured: dict[str, Any]) -> str:
    work, ours = measured["work"], measured["results"]["ours"]
    return (
        f"GPT-2 shape: {work['num_layers']} layers, hidden {work['hidden_size']}, {work['num_attention_heads']} heads, "
        f"vocabulary {work['vocab_size']}: {measured['parameters']:,} parameters; sequences of {work['seq_length']}, "
        f"micro-batch {work['micro_batch_size']}, global batch {work['global_batch_size']}. "
        f"{ours['device']}, {ours['threads']} thread(s), torch {ours['torch']}; medians of {len(ours['all_seconds'])} "
        "rounds in turns."
    )


def _ceilings(ceilings: dict[str, float]) -> str:
    if not ceilings:
        return ""
    rows = [[f"{name} GEMM", f"{ceilings[f'{name}_tflops']:.3f} TFLOP/s"] for name in ("bf16", "fp32")]
    rows.append(["copy, read and written", f"{ceilings['copy_gb_per_s']:.1f} GB/s"])
    return table(["ceiling of the device", "best"], rows)


def _contenders(measured: dict[str, Any]) -> str:
    """A row per contender. The last columns are our speedup by wall time, and by CPU time (for a busy machine)."""
    work, results = measured["work"], measured["results"]
    ceilings = measured["ceilings"]
    tokens = work["seq_length"] * work["global_batch_size"]
    rows = []
    for name, result in results.items():
        tflops = measured["flops_per_token"] * tokens / result["seconds"] / 1e12
        half = work["bf16"] if name == "ours" else "bf16" in name
        share = f"{tflops / ceilings['bf16_tflops' if half else 'fp32_tflops']:.0%}" if ceilings else ""
        ratios = [ratio(results["ours"][kind], result[kind]) for kind in ("all_seconds", "all_cpu_seconds")]
        versus = ["" if name == "ours" else "{:.2f} ({:.2f}-{:.2f})".format(*found) for found in ratios]
        shown = f"ours {'bf16' if work['bf16'] else 'fp32'}" if name == "ours" else name
        numbers = [f"{result['seconds']:.3f}", f"{tokens / result['seconds']:,.0f}", f"{tflops:.3f}", share]
        rows.append([shown, *numbers, f"{result['peak_bytes'] / 2**30:.2f}", *versus])
    head = ["", "s/step", "tokens/s", "model TFLOP/s", "of GEMM", "peak GiB", "ours faster (min-max)", "by CPU time"]
    return table(head, rows)


def _phases(results: dict[str, Any]) -> str:
    names = ("forward", "backward", "clipping", "optimizer", "other")
    shares = {who: [of["phases"].get(name, 0.0) / of["seconds"] for name in names] for who, of in results.items()}
    return table(["share of the step", *names], [[who, *map("{:.0%}".format, row)] for who, row in shares.items()])


def _operators(listed: list[dict[str, Any]]) -> str:
    rows = [[entry["operator"], f"{entry['share']:.1%}", str(entry["calls"])] for entry in listed]
    return table(["operator of our step", "share", "calls"], rows) if rows else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    """An aligned Markdown table: first column left, others right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(line, [head, rule, *rows]))
