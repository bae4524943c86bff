"""Benchmark results as Markdown. Pure."""

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
    """All that was measured of one work."""
    parts = [_heading(measured), _ceilings(measured["ceilings"]), _contenders(measured), _phases(measured["results"])]
    parts += [_operators(measured["operators"]), FORMULA, CHECKED]
    parts += [f"Not measured: {name}: {why}" for name, why in measured["not_measured"].items()]
    return "\n\n".join(part for part in parts if part)


def _heading(measured: Record) -> str:
    work, said = measured["work"], next(iter(measured["results"].values()))
    groups = f", {work['num_query_groups']} key/value heads" if work["num_query_groups"] else ""
    dropouts = {name: work[f"{name}_dropout"] for name in ("attention", "hidden")}
    dropout = "".join(f", {name} dropout {share}" for name, share in dropouts.items() if share)
    ranks = f" {work['ranks']} ranks ({work['parallel']})," if work["ranks"] > 1 else ""
    return (
        f"{_SHAPES[work['family']]}: {work['num_layers']} layers, hidden {work['hidden_size']}, "
        f"{work['num_attention_heads']} heads{groups}, "
        f"vocabulary {work['vocab_size']}: {measured['parameters']:,} parameters; sequences of {work['seq_length']}, "
        f"micro-batch {work['micro_batch_size']}, global batch {work['global_batch_size']}{dropout}. "
        f"{said['device']},{ranks} {said['threads']} thread(s), torch {said['torch']}; medians of "
        f"{len(said['all_seconds'])} rounds in turns."
    )


def _ceilings(ceilings: dict[str, float]) -> str:
    if not ceilings:
        return ""
    rows = [[f"{name} GEMM", f"{ceilings[f'{name}_tflops']:.3f} TFLOP/s"] for name in ("bf16", "fp32")]
    rows.append(["copy, read and written", f"{ceilings['copy_gb_per_s']:.1f} GB/s"])
    return table(["ceiling of the device", "best"], rows)


def tflops_of(measured: Record, title: str) -> float:
    """Model TFLOP/s."""
    work = measured["work"]
    tokens = work["seq_length"] * work["global_batch_size"]
    return measured["flops_per_token"] * tokens / measured["results"][title]["seconds"] / 1e12


def share_of_gemm(measured: Record, title: str) -> str:
    """Of the measured ceiling of the contender's precision."""
    own = measured["contenders"][title]["bf16"]
    half = measured["work"]["bf16"] if own is None else own
    ceilings = measured["ceilings"]
    return f"{tflops_of(measured, title) / ceilings['bf16_tflops' if half else 'fp32_tflops']:.0%}" if ceilings else ""


def versus(measured: Record, ours: str, peer: str, kind: str = "all_seconds") -> str:
    """`1.05 (1.02-1.11)`: how many times as fast as the peer ours is."""
    return "{:.2f} ({:.2f}-{:.2f})".format(*ratio(*(measured["results"][one][kind] for one in (ours, peer))))


def _contenders(measured: Record) -> str:
    """A row per contender.

    start: from the process to the end of the first step, by the clock and by processor time. The last columns are the speedup of
    our fastest, by wall time, and by CPU time for a busy machine.
    """
    work, results = measured["work"], measured["results"]
    ours, rows = best(measured, ours=True), []
    for title, result in results.items():
        tokens = work["seq_length"] * work["global_batch_size"] / result["seconds"]
        numbers = [f"{result['seconds']:.3f}", f"{tokens:,.0f}", f"{tflops_of(measured, title):.3f}"]
        numbers += [share_of_gemm(measured, title), f"{result['peak_bytes'] / 2**30:.2f}"]
        numbers += [f"{result[start]:.1f}" for start in ("start_seconds", "start_cpu_seconds")]
        kinds = ("all_seconds", "all_cpu_seconds")
        ratios = ["" if title == ours else versus(measured, ours, title, kind) for kind in kinds]
        shown = f"{title} {'bf16' if work['bf16'] else 'fp32'}" if title == "ours" else title
        rows.append([shown, *numbers, *ratios])
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
    names = ("forward", "backward", "forward and backward", "clipping", "optimizer", "other")
    names = [name for name in names if any(name in of["phases"] for of in results.values())]
    shares = {who: [of["phases"].get(name, 0.0) / of["seconds"] for name in names] for who, of in results.items()}
    return table(["share of the step", *names], [[who, *map("{:.0%}".format, row)] for who, row in shares.items()])


def _operators(listed: list[dict[str, Any]]) -> str:
    rows = [[entry["operator"], f"{entry['share']:.1%}", str(entry["calls"])] for entry in listed]
    return table(["operator of our step", "share", "calls"], rows) if rows else ""


def overview(measured: dict[str, Record]) -> str:
    """A row per work, by name: our fastest contender beside the fastest peer."""
    rows = []
    for name, of in measured.items():
        ours, peer = best(of, ours=True), best(of, ours=False)
        pair = [one for one in (ours, peer) if one is not None]
        seconds = [f"{of['results'][one]['seconds']:.3f}" for one in pair]
        peaks = [f"{of['results'][one]['peak_bytes'] / 2**30:.2f}" for one in pair]
        faster = versus(of, ours, peer) if peer else ""
        gemm = " / ".join(share_of_gemm(of, one) for one in pair)
        rounds = str(len(of["results"][ours]["all_seconds"]))
        rows.append([name, rounds, " / ".join(seconds), faster, gemm, " / ".join(peaks), ours, peer or ""])
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
    """An aligned Markdown table: first column left, others right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(line, [head, rule, *rows]))
