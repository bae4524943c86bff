"""The layouts of a job, what each loses, and the least that it keeps in memory. Pure numbers.

A rank does 1 / ranks of the model's FLOPs, and loses time to three things. Each is a share of those FLOPs:

    idle        (p - 1) / m of a pipeline of p stages and m microbatches (arXiv:2104.04473, section 2.2)
    repeated    what recompute does again: the whole forward is a third of forward and backward
    sent        bytes of a rank (docs/parallelism.md: "Per layer and microbatch"), each counted as the FLOPs that a device does
                while it passes: `FLOPS_A_BYTE`, inside a machine and between machines

On GPUs data-parallel bytes pass beside computation: of one microbatch in ZeRO 1, of all in 2 and 3. So far they count half. The
layout that loses least is the first; of those that lose the same in whole %, that of most data-parallel ranks, and of these the
one with the largest micro-batch, since the speed of a kernel at its size is not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, starmap
from typing import NamedTuple

from megatron.core.distributed.comm_volume import BufferSizes, step_comm_volume
from tools.configuring.sizes import Model

RECOMPUTES = {
    "none": [],
    "mlp": ["--recompute-granularity", "selective", "--recompute-modules", "layernorm", "mlp"],
    "full": ["--recompute-granularity", "full", "--recompute-method", "uniform"],
}
# Inside a machine, between machines. An H100 does about 4e14 FLOP/s, and sends 4e11 B/s over NVLink, 4e10 B/s over InfiniBand.
FLOPS_A_BYTE = {"gpu": (1_000, 10_000), "cpu": (100, 1_000)}


@dataclass(frozen=True)
class Work:
    """A job before its layout is chosen."""

    model: Model
    seq_length: int
    global_batch: int
    micro_batches: tuple[int, ...]  # those to try
    machines: int
    devices: int  # of a machine
    device: str  # gpu or cpu
    half: bool  # bf16 or fp16

    @property
    def ranks(self) -> int:
        return self.machines * self.devices

    @property
    def element(self) -> int:
        """Bytes of a parameter and of an activation."""
        return 2 if self.half else 4

    def microbatches(self, layout: "Layout") -> int:
        """Of a rank in a step."""
        return self.global_batch // (layout.dp * layout.micro_batch)

    @property
    def flops_of_rank(self) -> float:
        """The model's own FLOPs of a step, on one rank."""
        return self.model.shape(self.seq_length).flops_per_sample * self.global_batch / self.ranks


class Layout(NamedTuple):
    """How many ranks share what, the ZeRO stage, and a name of RECOMPUTES."""

    tp: int
    pp: int
    dp: int
    zero: int
    recompute: str
    micro_batch: int = 1

    def __str__(self) -> str:
        ranks = f"TP {self.tp} x PP {self.pp} x DP {self.dp}"
        return f"{ranks}, ZeRO {self.zero}, recompute {self.recompute}, micro-batch {self.micro_batch}"

    def flags(self, device: str) -> list[str]:
        """Without those that change nothing."""
        found = ["--tensor-model-parallel-size", str(self.tp), "--sequence-parallel"] if self.tp > 1 else []
        found += ["--pipeline-model-parallel-size", str(self.pp)] if self.pp > 1 else []
        if self.dp > 1:
            found += ["--zero-stage", str(self.zero)]
            found += ["--overlap-grad-reduce", "--overlap-param-gather"] if device == "gpu" else []
        return found + RECOMPUTES[self.recompute]


class Loss(NamedTuple):
    """Shares of the model's own FLOPs, and bytes of one rank in a step."""

    idle: float
    repeated: float
    inside: float
    between: float
    sent: float

    @property
    def total(self) -> float:
        return self.idle + self.repeated + self.sent


def layouts(work: Work) -> Iterator[Layout]:
    """Every layout that divides the job evenly. Tensor parallelism stays inside a machine.

    With several data-parallel ranks ZeRO 1 takes the place of 0: it sends no more and keeps less.
    """
    size = work.model.size
    for tp in divisors(work.devices):
        groups = size.groups or size.heads
        if size.heads % tp or work.model.ffn % tp or work.seq_length % tp or (groups % tp and tp % groups):
            continue
        for pp in divisors(work.ranks // tp):
            dp = work.ranks // tp // pp
            at_once = [micro for micro in work.micro_batches if work.global_batch % (dp * micro) == 0]
            if size.layers % pp == 0:
                stages = (1, 2, 3) if dp > 1 else (0,)
                yield from starmap(Layout, product((tp,), (pp,), (dp,), stages, RECOMPUTES, at_once))


def ranked(work: Work) -> list[Layout]:
    """Every layout, the one to try first in front."""

    def place(one: Layout) -> tuple:
        return round(100 * loss(work, one).total), -one.dp, -one.micro_batch, one.zero, one.recompute

    return sorted(layouts(work), key=place)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def sent(work: Work, layout: Layout) -> dict[str, float]:
    """Bytes that a rank sends in a step, by kind of parallelism. tensor: with sequence parallelism."""
    shape, microbatches = work.model.shape(work.seq_length), work.microbatches(layout)
    activation = work.seq_length * layout.micro_batch * shape.hidden_size * work.element  # N of docs/parallelism.md
    again = 3 if work.model.family == "llama" else 4  # dropout behind a layer's last sum has that made again
    moved = (10 + {"none": 0, "mlp": 1, "full": again}[layout.recompute]) * activation  # in a layer
    flat = BufferSizes(work.model.parameters // (layout.tp * layout.pp), 0, work.element, sum_bytes=4, sent_bytes=4)
    traffic = step_comm_volume(flat, layout.zero, inner=layout.dp, microbatches=microbatches)
    return {
        "tensor": (layout.tp - 1) / layout.tp * moved * shape.num_layers / layout.pp * microbatches,
        "data": sum(traffic.values()),
        "pipeline": 2 * activation / layout.tp * microbatches if layout.pp > 1 else 0.0,
    }


def loss(work: Work, layout: Layout) -> Loss:
    """What the layout loses."""
    shape, microbatches = work.model.shape(work.seq_length), work.microbatches(layout)
    mlp = 2 * shape.num_layers * (3 if shape.gated else 2) * shape.hidden_size * shape.ffn_size  # FLOPs of a token
    repeated = {"none": 0.0, "mlp": mlp / shape.flops_per_token(), "full": 1 / 3}[layout.recompute]
    ranks = {
        "tensor": layout.tp,
        "data": layout.tp * layout.dp,
        "pipeline": work.ranks,
    }  # in the order of ranks: tp, dp, pp
    costs = [flops / work.flops_of_rank for flops in FLOPS_A_BYTE[work.device]]
    passed, counted = [0.0, 0.0], 0.0
    for kind, size in sent(work, layout).items():
        is_between = ranks[kind] > work.devices
        passed[is_between] += size
        share = size * costs[is_between]
        if kind == "data" and work.device == "gpu":  # `Layout.flags` overlaps it
            share -= min(share, 1 if layout.zero > 1 else 1 / microbatches) / 2
        counted += share
    return Loss((layout.pp - 1) / microbatches, repeated, passed[0], passed[1], counted)


def least_memory(work: Work, layout: Layout) -> float:
    """Bytes that the rank with most memory needs at least (docs/memory.md): state, and saved tensors of the live microbatches."""
    shape, element = work.model.shape(work.seq_length), work.element
    of_parameter = {
        3: element,
        2: 4,
        1: 12 if work.half else 8,
    }  # by the ZeRO stage that shards it: itself, gradient, state
    bytes_each = sum(size / (layout.dp if layout.zero >= stage else 1) for stage, size in of_parameter.items())
    state = work.model.parameters / (layout.tp * layout.pp) * bytes_each

    h, attention = shape.hidden_size, 2 * shape.attention_width + 2 * shape.kv_width
    mlp = (3 if shape.gated else 2) * shape.ffn_size
    of_layer = {"none": 4 * h + attention + mlp, "mlp": 2 * h + attention, "full": h}[layout.recompute]
    of_stage, scores = of_layer * shape.num_layers / layout.pp, 2 * shape.vocab_size  # logits and their gradient
    live = min(layout.pp, work.microbatches(layout))  # microbatches on the first stage, 1F1B; 1 on the last
    saved = max(of_stage * live + scores * (layout.pp == 1), of_stage + scores)
    return state + saved * work.seq_length * layout.micro_batch / layout.tp * element
