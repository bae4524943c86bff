"""Generate docs/context_parallel.md: drawings, the bytes of each --cp-comm-type by formula, and predicted memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from tools.drawing.ring import text_of_chunks, text_of_ring, text_of_scores


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention on one tensor-parallel rank."""

    length: int
    batch: int = 1
    heads: int = 32
    groups: int = 8  # key/value heads
    width: int = 128  # of a head
    number: int = 2  # bytes of an element of keys and values
    wide: int = 4  # bytes of an element of summed gradients


def bytes_sent(kind: str, ranks: int, shape: Shape, neighbours: int = 2) -> tuple[int, int]:
    """Return the bytes that a rank sends for one attention in the forward and in the backward, without recompute.

    kind: --cp-comm-type. ranks: context-parallel size. neighbours: ranks that exchange heads, of a2a+p2p.
    """
    head_bytes = shape.length // ranks * shape.batch * shape.width * shape.number  # one head of a rank's tokens
    head_ranks = {"a2a": ranks, "a2a+p2p": neighbours}.get(kind, 1)  # ranks that exchange heads for tokens
    groups = math.lcm(shape.groups, head_ranks)  # a key/value head is sent to each rank that needs it
    kv_bytes = 2 * groups * head_bytes
    if kind == "all_gather":
        return (ranks - 1) * kv_bytes, (ranks - 1) * kv_bytes

    # all-to-all: queries and output, keys and values; a rank keeps its own part
    exchanged = 2 * (shape.heads + groups) * head_bytes * (head_ranks - 1) // head_ranks

    # ring: keys and values make all steps but the last; in the backward their gradients make every step
    ring_size = ranks // head_ranks
    ring_bytes = (ring_size - 1) * kv_bytes
    grad_bytes = 0
    if ring_size > 1:
        wide_bytes = ring_bytes // shape.number * shape.wide  # sums are sent in float32 ...
        grad_bytes = wide_bytes + kv_bytes  # ... until they are complete, and rounded for the last step
    return exchanged + ring_bytes, exchanged + ring_bytes + grad_bytes


def page() -> str:
    """Return the text of docs/context_parallel.md."""
    parts = [_HEAD, *_fenced(text_of_chunks(4)), _RING, *_fenced(text_of_ring(4)), _SCORES, *_fenced(text_of_scores(4))]
    return "\n".join([*parts, _PICTURE, _TYPES, *_rows_of_bytes(), _MEMORY, *_rows_of_memory(), _REFUSED])


def _fenced(lines: list[str]) -> list[str]:
    return ["```", *lines, "```"]


def _rows_of_bytes() -> Iterator[str]:
    """Yield the rows of the table of bytes, in MiB."""
    for length in (8192, 32768, 131072):
        for ranks in (4, 8):
            sent = [bytes_sent(kind, ranks, Shape(length)) for kind in ("p2p", "all_gather", "a2a", "a2a+p2p")]
            cells = [f"{forward / 2**20:g} + {backward / 2**20:g}" for forward, backward in sent]
            yield f"| {length} | {ranks} | {' | '.join(cells)} |"


def _rows_of_memory() -> Iterator[str]:
    """Yield the rows of the table of memory, in MiB, as tools/estimate_memory.py predicts them."""
    # imported here because they need torch, and the drawings do not
    read = import_module("tools.estimating.job").read
    forecast = import_module("megatron.training.memory.forecast_memory_along_schedule").forecast
    for length in (8192, 32768):
        cells = []
        for ranks in (1, 2, 4, 8):
            words = f"{MODEL} --seq-length {length} --world-size {ranks} --context-parallel-size {ranks}"
            first_rank = forecast(read(words.split()).job)[0]
            cells.append(f"{first_rank.bytes['activations'] / 2**20:.0f}")
        yield f"| {length} | {' | '.join(cells)} |"


PICTURE = "context_ring.svg"  # beside the page
RANKS_DRAWN = 4
MODEL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 1 --vocab-size 1023 "
    "--bf16 --attention-dropout 0 --hidden-dropout 0"
)
_HEAD = """\
# Context parallelism, drawn

This page is for those who train on long sequences with `--context-parallel-size`. It shows which rank holds,
computes and sends what, and compares the types of `--cp-comm-type`.
[parallelism.md](parallelism.md#context-parallel-each-sequence) has the algebra.

The same drawings for another size:

```bash
python tools/plot_context.py --context-parallel-size 4
python tools/plot_context.py --context-parallel-size 8 --svg plots/ring.svg
```

`python tools/plot_context.py --write-docs docs/context_parallel.md` makes this page and its picture, and a test checks
that they agree with the code.

## The split

`--context-parallel-size c` cuts each sample into 2 c chunks. Rank r holds chunks r and 2 c - 1 - r. For c = 4:
"""
_RING = """
## What the ring computes and sends

With `--cp-comm-type p2p` the ranks form a ring. In step i rank r has the keys and values of rank r - i, and sends
them to the next rank while it computes. `3 x 0 1` means the queries of chunk 3 with the keys of chunks 0 and 1. A /
marks a diagonal: there a query sees the keys up to its own.
"""
_SCORES = """
In the last step nothing is sent. In the backward the keys are sent in the same way, and their gradients follow one
step behind them. A rank sends gradients in every step; after the last step they have arrived at the rank that the
keys came from.

The next drawing shows all pairs of chunks, each with the step in which it is computed. A pair marked . is skipped,
because its keys come after its queries. Every rank computes the same number of pairs in each step: two, and in step
0 one pair and two diagonals.
"""
_PICTURE = f"""
As a picture, which `--svg` writes, a square for each step:

![the pairs of chunks that each of four ranks computes in each step of the ring]({PICTURE})
"""
_TYPES = """
## The four types, and bytes against length

| `--cp-comm-type` | what is sent | when |
|---|---|---|
| p2p (default) | keys and values, to the next rank | while a block is computed |
| all_gather | keys and values of all ranks | before the blocks |
| a2a | heads are exchanged for rows, so that a rank computes whole samples with 1/c of the heads | before and after attention |
| a2a+p2p | heads within groups of neighbours, as in a2a; keys and values round a ring of these groups, as in p2p | both |

The table has the MiB that a rank sends for one layer and microbatch, forward + backward, without recompute, by the
formulas: for 32 heads of width 128, 8 heads of keys and values, one sample, half precision. The ring sends sums of
gradients in float32 until they are complete. a2a+p2p has groups of 2 neighbours. Bytes grow with the length, not
with its square.

| length | c | p2p | all_gather | a2a | a2a+p2p |
|---|---|---|---|---|---|"""
_MEMORY = f"""
## Memory against length

The table has the MiB of activations at the peak on one rank, as `tools/estimate_memory.py` predicts them, with p2p.
The flags are `{MODEL}`.

| length | c = 1 | c = 2 | c = 4 | c = 8 |
|---|---|---|---|---|"""
_REFUSED = """
## What is refused

| given | instead |
|---|---|
| a `--seq-length` that 2 c does not divide | change one of the two |
| `--sequence-parallel` with s / c tokens that the tensor-parallel size does not divide | change a size |
| a2a, if c does not divide the heads of a tensor-parallel rank | p2p or all_gather |
| a2a+p2p, if the number of neighbours does not divide them | p2p or all_gather |
| a2a+p2p without `--hierarchical-context-parallel-sizes` | give two numbers whose product is c |
| p2p or all_gather with an `--attention-backend` that computes only whole samples | a2a, or another backend |
| an attention of one's own that asks no other rank | [gather the samples](adding_a_model.md#an-attention-without-a-softmax) |
| generation with a cache that defines no `append` | define it, or c = 1 |
| a number of types that is neither 1 nor the number of layers | one for all layers, or one for each |
"""
