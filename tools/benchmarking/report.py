"""Format benchmark results as Markdown. Pure."""

from typing import Any

from tools.benchmarking.contest import ratio
from tools.benchmarking.records import Record, best

FORMULA = (
    "Model FLOPs per token: 6 N + 6 L s a, with N the elements of all weight matrices (output layer once; no lookup tables, "
    "biases, norms or padding) and causal attention over L layers of width a and sequences of s: half of the full 12 L s a, "
    "which counts for BERT. Recompute does not count."
)
CHECKED = (
    "All contenders start from our weights and train on the same batches; their losses of the first batch without dropout agree "
    "before the first step and after the warm-up. transformers' BERT, whose norms come after the blocks, is not compared."
)
_SHAPES = {"gpt": "GPT-2 shape", "llama": "Llama shape", "bert": "BERT"}


def markdown(measured: Record) -> str:
    """Return all measurements of one work."""
    parts = [
        _heading(measured),
        _ceilings(measured["ceilings"]),
        _contenders(measured),
        _phases(measured["results"]),
        _operators(measured["operators"]),
        FORMULA,
        CHECKED,
    ]
    parts += [f"Not measured: {name}: {reason}" for name, reason in measured["not_measured"].items()]
    return "\n\n".join(part for part in parts if part)


def _heading(measured: Record) -> str:
    """Return a paragraph on the model, the batch, the machine and the rounds."""
    work = measured["work"]
    first = next(iter(measured["results"].values()))  # device and threads are the same for all
    groups = f", {work['num_query_groups']} key/value heads" if work["num_query_groups"] else ""
    dropout = ""
    for name in ("attention", "hidden"):
        if work[f"{name}_dropout"]:
            dropout += f", {name} dropout {work[f'{name}_dropout']}"
    ranks = f" {work['ranks']} ranks ({work['parallel']})," if work["ranks"] > 1 else ""
    return (
        f"{_SHAPES[work['family']]}: {work['num_layers']} layers, hidden {work['hidden_size']}, "
        f"{work['num_attention_heads']} heads{groups}, "
        f"vocabulary {work['vocab_size']}: {measured['parameters']:,} parameters; sequences of {work['seq_length']}, "
        f"micro-batch {work['micro_batch_size']}, global batch {work['global_batch_size']}{dropout}. "
        f"{first['device']},{ranks} {first['threads']} thread(s), torch {first['torch']}; medians of "
        f"{len(first['all_seconds'])} rounds in turns."
    )


def _ceilings(ceilings: dict[str, float]) -> str:
    if not ceilings:
        return ""
    rows = [[f"{name} GEMM", f"{ceilings[f'{name}_tflops']:.3f} TFLOP/s"] for name in ("bf16", "fp32")]
    rows.append(["copy, read and written", f"{ceilings['copy_gb_per_s']:.1f} GB/s"])
    return table(["ceiling of the device", "best"], rows)


def tflops_of(measured: Record, title: str) -> float:
    """Return the model TFLOP/s of a contender."""
    work = measured["work"]
    tokens = work["seq_length"] * work["global_batch_size"]
    return measured["flops_per_token"] * tokens / measured["results"][title]["seconds"] / 1e12


def share_of_gemm(measured: Record, title: str) -> str:
    """Return the share of the GEMM ceiling of the contender's precision; empty if it was not measured."""
    ceilings = measured["ceilings"]
    if not ceilings:
        return ""
    is_half = measured["contenders"][title]["bf16"]
    if is_half is None:
        is_half = measured["work"]["bf16"]
    return f"{tflops_of(measured, title) / ceilings['bf16_tflops' if is_half else 'fp32_tflops']:.0%}"


def versus(measured: Record, ours: str, peer: str, kind: str = "all_seconds") -> str:
    """Return our speedup over a peer, as `1.05 (1.02-1.11)`: median and range of the rounds."""
    results = measured["results"]
    middle, smallest, largest = ratio(results[ours][kind], results[peer][kind])
    return f"{middle:.2f} ({smallest:.2f}-{largest:.2f})"


def _contenders(measured: Record) -> str:
    """Return a table with a row for each contender.

    start: from the start of the process to the end of the first step, by the clock and by processor time. The last
    columns are the speedup of our fastest contender, by the clock, and by CPU time, which is meaningful on a busy
    machine.
    """
    work = measured["work"]
    ours = best(measured, ours=True)
    rows = []
    for title, result in measured["results"].items():
        tokens_per_second = work["seq_length"] * work["global_batch_size"] / result["seconds"]
        label = title
        if title == "ours":
            label += " bf16" if work["bf16"] else " fp32"
        row = [
            label,
            f"{result['seconds']:.3f}",
            f"{tokens_per_second:,.0f}",
            f"{tflops_of(measured, title):.3f}",
            share_of_gemm(measured, title),
            f"{result['peak_bytes'] / 2**30:.2f}",
            f"{result['start_seconds']:.1f}",
            f"{result['start_cpu_seconds']:.1f}",
        ]
        if title == ours:
            row += ["", ""]
        else:
            row += [versus(measured, ours, title, kind) for kind in ("all_seconds", "all_cpu_seconds")]
        rows.append(row)
    faster = f"{ours}: faster (min-max)" if ours != "ours" else "ours faster (min-max)"
    head = [
        "",
        "s/step",
        "tokens/s",
        "model TFLOP/s",
        "of GEMM",
        "peak GiB",
        "start s",
        "start CPU s",
        faster,
        "by CPU time",
    ]
    return table(head, rows)


def _phases(results: dict[str, Any]) -> str:
    """Return a table with the share of each phase of a step."""
    names = ("forward", "backward", "forward and backward", "clipping", "optimizer", "other")
    names = [name for name in names if any(name in result["phases"] for result in results.values())]
    rows = []
    for title, result in results.items():
        shares = [result["phases"].get(name, 0.0) / result["seconds"] for name in names]
        rows.append([title, *(f"{share:.0%}" for share in shares)])
    return table(["share of the step", *names], rows)


def _operators(listed: list[dict[str, Any]]) -> str:
    rows = [[entry["operator"], f"{entry['share']:.1%}", str(entry["calls"])] for entry in listed]
    return table(["operator of our step", "share", "calls"], rows) if rows else ""


def overview(measured: dict[str, Record]) -> str:
    """Return a table with a row for each work: our fastest contender beside the fastest peer."""
    rows = []
    for name, record in measured.items():
        results = record["results"]
        ours = best(record, ours=True)
        peer = best(record, ours=False)
        titles = [title for title in (ours, peer) if title is not None]
        rounds = str(len(results[ours]["all_seconds"]))
        seconds = " / ".join(f"{results[title]['seconds']:.3f}" for title in titles)
        faster = versus(record, ours, peer) if peer else ""
        gemm = " / ".join(share_of_gemm(record, title) for title in titles)
        peaks = " / ".join(f"{results[title]['peak_bytes'] / 2**30:.2f}" for title in titles)
        rows.append([name, rounds, seconds, faster, gemm, peaks, ours, peer or ""])
    head = [
        "work",
        "rounds",
        "s/step, ours / peer",
        "ours faster (min-max)",
        "of GEMM",
        "peak GiB",
        "ours is",
        "fastest peer",
    ]
    return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return an aligned Markdown table: the first column to the left, others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(line, [head, rule, *rows]))
