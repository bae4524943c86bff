"""Writes docs/communication.md from the ledger: what each kind of parallelism sends, counted on a running model.

python tests/campaigns/communication_doc.py
"""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "tests" / "support"))
sys.path.insert(2, str(ROOT / "tests" / "campaigns"))

from local_ranks import run_ranks  # noqa: E402
from tiny_run import GPT2, SEQ, Layout, OptimizerConfig, train_rank  # noqa: E402

BATCH, FLOAT64 = 6, 8
MODEL = replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0, num_layers=4)
ACTIVATION = SEQ * BATCH * MODEL.hidden_size * FLOAT64
LAYOUTS = {
    "tensor parallel, t = 2": (Layout(tp=2), 0),
    "tensor and sequence parallel, t = 2": (Layout(tp=2, sp=True), 0),
    "the same, every layer recomputed": (Layout(tp=2, sp=True, recompute="uniform 1"), 0),
    "pipeline, p = 4, middle rank, 3 microbatches": (Layout(pp=4, m=3), 1),
    "pipeline with t = 2, boundary sent in parts, middle rank": (Layout(tp=2, pp=4), 2),
    "data parallel, d = 2": (Layout(dp=2), 0),
}
TEXT = """# Communication

This page lists the collectives that a rank issues in one training step, for each kind of parallelism.
`python tests/campaigns/communication_doc.py` writes it from a running model: the ledger of `megatron/core/parallel/collectives.py`
records every collective. A test keeps this page current, and `tests/ranks/parallel/test_ledger.py` compares the counts with the
formulas of Narayanan et al. (arXiv:2104.04473) and Korthikanti et al. (arXiv:2205.05198).

The model has {layers} layers and tied embeddings. Sizes are those of the tensor that one rank passes to the collective. N is one
activation [s, b, h] of the whole batch of a rank: {activation:,} bytes in float64. *Per layer* counts the calls that one more layer adds
to a step. [Memory](memory.md) derives what the ZeRO stages send, and a run prints it at its start.

One kind of call is missing from this ledger and from what a run prints at its start. In ZeRO stages 2 and 3 the data-parallel ranks check
that they all issue the same calls (`megatron/core/distributed/zero_collective_order_check.py`, which has a ledger of its own). The check is an
all-reduce of two integers, 16 bytes, within each group of ranks that together hold all shards, once at the end of a step.
`--poison-released-buffers` adds one before the reduce-scatter of each bucket and, in stage 3, before each all-gather of a unit.

"""


def calls_of(layout: Layout, rank: int, layers: int) -> Counter:
    """(op, axis, bytes) -> calls of one step of one rank."""

    def work(mesh):
        with mesh.ledger.record() as calls:
            train_rank(
                mesh,
                replace(MODEL, num_layers=layers),
                layout,
                steps=1,
                global_batch=BATCH * layout.dp,
                optimizer=OptimizerConfig(clip_grad=0.0),
            )
        return Counter((call.op, call.axis, call.bytes) for call in calls)

    return run_ranks({"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}, work)[rank]


def rows(title: str, layout: Layout, rank: int) -> list[str]:
    whole, more = (calls_of(layout, rank, layers) for layers in (MODEL.num_layers, 2 * MODEL.num_layers))
    repeated = {key: (more[key] - whole[key]) // MODEL.num_layers for key in whole if more[key] > whole[key]}
    lines = []
    for key in sorted(whole):
        op, axis, size = key
        per_layer = repeated.get(key, 0) if layout.pp == 1 else 0
        rest = whole[key] - per_layer * MODEL.num_layers
        units = f"{size / ACTIVATION:g} N" if size >= ACTIVATION / 16 else f"{size} B"
        lines.append(f"| {title} | {op} | {axis} | {units} | {per_layer or ''} | {rest or ''} |")
        title = ""
    return lines


def document() -> str:
    head = ["| layout | op | axis | size | per layer | others per step |", "|---|---|---|---|---|---|"]
    body = [line for title, (layout, rank) in LAYOUTS.items() for line in rows(title, layout, rank)]
    return TEXT.format(layers=MODEL.num_layers, activation=ACTIVATION) + "\n".join(head + body) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "communication.md").write_text(document())
