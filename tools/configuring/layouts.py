"""Rank the layouts of a job by the time that each loses, and bound its memory from below. Pure numbers.

A rank computes 1 / ranks of the model's FLOPs, and loses time in three ways. Each is expressed as a share of those
FLOPs:

    idle       (p - 1) / m of a pipeline of p stages and m microbatches (arXiv:2104.04473, section 2.2)
    repeated   FLOPs of recompute: the whole forward is a third of forward and backward
    sent       bytes that a rank sends (docs/parallelism.md: "Per layer and microbatch"), each counted as the FLOPs that
               a device computes in the time of its transfer: `FLOPS_A_BYTE`, inside a machine and between machines

On GPUs the data-parallel transfers overlap with computation: that of one microbatch in ZeRO 1, of all in 2 and 3. To
that extent they count half. The layout that loses least comes first; of those that lose the same in whole %, the one
with most data-parallel ranks, and of these the one with the largest micro-batch, since the speed of a kernel at its
size is not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from megatron.core.distributed.zero_stage_comm_volume import BufferSizes, step_comm_volume
from tools.configuring.sizes import Model

RECOMPUTES = {
    "none": [],
    "mlp": ["--recompute-granularity", "selective", "--recompute-modules", "layernorm", "mlp"],
    "full": ["--recompute-granularity", "full", "--recompute-method", "uniform"],
}
# In the place of "mlp", for layers with experts.
_RECOMPUTE_EXPERTS = ["--recompute-granularity", "selective", "--recompute-modules", "layernorm", "moe"]
# Inside a machine, between machines. An H100 does about 4e14 FLOP/s, and sends 4e11 B/s over NVLink, 4e10 B/s over
# InfiniBand.
FLOPS_A_BYTE = {"gpu": (1_000, 10_000), "cpu": (100, 1_000)}


@dataclass(frozen=True)
class Work:
    """A job whose layout is not chosen yet."""

    model: Model
    seq_length: int
    global_batch: int  # sequences
    micro_batches: tuple[int, ...]  # sizes to try
    machines: int
    devices: int  # of each machine
    device: str  # gpu or cpu
    half: bool  # bf16 or fp16

    @property
    def ranks(self) -> int:
        return self.machines * self.devices

    @property
    def element(self) -> int:
        """Bytes of an element of a parameter or an activation."""
        return 2 if self.half else 4

    def microbatches(self, layout: "Layout") -> int:
        """Number of microbatches of a rank in a step."""
        return self.global_batch // (layout.dp * layout.micro_batch)

    @property
    def flops_of_rank(self) -> float:
        """The model's own FLOPs of a step, on one rank."""
        return self.model.shape(self.seq_length).flops_per_sample * self.global_batch / self.ranks


class Layout(NamedTuple):
    """Sizes of the parallel axes, and the settings that the search chooses with them."""

    tp: int
    pp: int
    dp: int
    zero: int  # stage
    recompute: str  # key of RECOMPUTES
    micro_batch: int = 1
    ep: int = 0  # expert-parallel size; 0: there are no experts. Each expert is whole on its ranks

    @property
    def expert_dp(self) -> int:
        """Ranks of a pipeline stage that have the same experts."""
        return self.tp * self.dp // max(1, self.ep)

    def __str__(self) -> str:
        ranks = f"TP {self.tp} x PP {self.pp} x DP {self.dp}" + (f", EP {self.ep}" if self.ep else "")
        return f"{ranks}, ZeRO {self.zero}, recompute {self.recompute}, micro-batch {self.micro_batch}"

    def flags(self, device: str) -> list[str]:
        """Return the flags of the layout, without those that have no effect."""
        flags = []
        if self.tp > 1:
            flags += ["--tensor-model-parallel-size", str(self.tp), "--sequence-parallel"]
        if self.pp > 1:
            flags += ["--pipeline-model-parallel-size", str(self.pp)]
        if self.dp > 1:
            flags += ["--zero-stage", str(self.zero)]
            if device == "gpu":
                flags += ["--overlap-grad-reduce", "--overlap-param-gather"]
        if self.ep and self.tp * self.dp > 1:
            flags += ["--expert-model-parallel-size", str(self.ep), "--expert-tensor-parallel-size", "1"]
        with_experts = self.ep and self.recompute == "mlp"
        return flags + (_RECOMPUTE_EXPERTS if with_experts else RECOMPUTES[self.recompute])


class Loss(NamedTuple):
    """Time that a layout loses, as shares of the model's own FLOPs, and the bytes that a rank sends in a step."""

    idle: float  # share
    repeated: float  # share
    inside: float  # bytes inside a machine
    between: float  # bytes between machines
    sent: float  # share, of the time of these bytes

    @property
    def total(self) -> float:
        return self.idle + self.repeated + self.sent


def layouts(work: Work) -> Iterator[Layout]:
    """Yield every layout that divides the job evenly. Tensor parallelism stays inside a machine.

    With several data-parallel ranks ZeRO 1 replaces 0: it sends no more and needs less memory.
    """
    size = work.model.size
    num_query_groups = size.groups or size.heads
    for tp in divisors(work.devices):
        divides = size.heads % tp == 0 and work.model.ffn % tp == 0 and work.seq_length % tp == 0
        groups_divide = num_query_groups % tp == 0 or tp % num_query_groups == 0
        if not (divides and groups_divide):
            continue
        for pp in divisors(work.ranks // tp):
            if size.layers % pp != 0:
                continue
            dp = work.ranks // tp // pp
            micro_batches = [micro for micro in work.micro_batches if work.global_batch % (dp * micro) == 0]
            stages = (1, 2, 3) if dp > 1 else (0,)
            eps = [ep for ep in divisors(tp * dp) if size.experts % ep == 0] if size.experts else [0]
            for zero, recompute, micro_batch, ep in product(stages, RECOMPUTES, micro_batches, eps):
                yield Layout(tp, pp, dp, zero, recompute, micro_batch, ep)


def ranked(work: Work) -> list[Layout]:
    """Return every layout, in the order in which to try them."""

    def sort_key(layout: Layout) -> tuple:
        percent_lost = round(100 * loss(work, layout).total)
        return percent_lost, -layout.dp, -layout.micro_batch, layout.zero, layout.recompute, layout.ep

    return sorted(layouts(work), key=sort_key)


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def sent(work: Work, layout: Layout) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by kind of parallelism. tensor: with sequence parallelism."""
    shape = work.model.shape(work.seq_length)
    microbatches = work.microbatches(layout)
    activation = work.seq_length * layout.micro_batch * shape.hidden_size * work.element  # N of docs/parallelism.md

    # tensor parallelism: each collective moves (tp - 1) / tp of N Recompute of full layers repeats 3 collectives of the
    # forward, and with dropout after the last sum of a layer the fourth.
    repeated_collectives = {"none": 0, "mlp": 1, "full": 3 if work.model.is_llama else 4}[layout.recompute]
    collectives = 10
    if layout.ep:  # only attention's: experts take the rows of a rank as they are
        repeated_collectives = {"none": 0, "mlp": 0, "full": 2}[layout.recompute]
        collectives = 5
    bytes_per_layer = (collectives + repeated_collectives) * activation

    # data parallelism: gradients and parameters of this rank's part of the model
    def of_data(parameters: int, ranks: int) -> int:
        flat = BufferSizes(parameters, 0, work.element, sum_bytes=4, sent_bytes=4)
        return sum(step_comm_volume(flat, layout.zero, inner=ranks, microbatches=microbatches).values())

    of_experts = work.model.parameters_of_experts
    data = of_data((work.model.parameters - of_experts) // (layout.tp * layout.pp), layout.dp)

    # experts: dispatch and combine of forward and backward, and of a repeated forward (docs/experts.md: "Dispatch")
    dispatch = 0.0
    if layout.ep:
        data += of_data(of_experts // (layout.ep * layout.pp), layout.expert_dp)
        rows = activation / layout.tp * work.model.size.topk
        transfers = 4 if layout.recompute == "none" else 6
        dispatch = transfers * rows * (1 - 1 / layout.ep) * shape.num_layers / layout.pp * microbatches

    return {
        "tensor": (layout.tp - 1) / layout.tp * bytes_per_layer * shape.num_layers / layout.pp * microbatches,
        "experts": dispatch,
        "data": data,
        "pipeline": 2 * activation / layout.tp * microbatches if layout.pp > 1 else 0.0,
    }


def loss(work: Work, layout: Layout) -> Loss:
    """Compute the time that the layout loses."""
    shape = work.model.shape(work.seq_length)
    microbatches = work.microbatches(layout)

    # the pipeline's bubble, and recompute
    idle = (layout.pp - 1) / microbatches
    num_matrices = 3 if shape.gated else 2
    mlp_parameters = shape.expert_parameters if layout.ep else num_matrices * shape.hidden_size * shape.ffn_size
    mlp_flops = 2 * shape.num_layers * mlp_parameters  # of a token's forward
    repeated = {"none": 0.0, "mlp": mlp_flops / shape.flops_per_token(), "full": 1 / 3}[layout.recompute]

    # transfers; ranks are numbered in the order tp, dp, pp, so the ranks of an axis lie within so many consecutive ones
    span = {"tensor": layout.tp, "experts": layout.ep, "data": layout.tp * layout.dp, "pipeline": work.ranks}
    inside_cost, between_cost = (flops / work.flops_of_rank for flops in FLOPS_A_BYTE[work.device])  # share of a byte
    bytes_inside = 0.0
    bytes_between = 0.0
    sent_share = 0.0
    for kind, size in sent(work, layout).items():
        if span[kind] > work.devices:
            bytes_between += size
            share = size * between_cost
        else:
            bytes_inside += size
            share = size * inside_cost
        if kind == "data" and work.device == "gpu":  # overlapped, by the flags of `Layout.flags`
            overlapped = min(share, 1 if layout.zero > 1 else 1 / microbatches)
            share -= overlapped / 2
        sent_share += share
    return Loss(idle, repeated, bytes_inside, bytes_between, sent_share)


class LayerMemory(NamedTuple):
    """Bytes of a layer on a rank."""

    state: float  # parameters, gradients, and the optimizer's
    saved: float  # for the backward of a microbatch
    recomputed: float  # in its backward


def state_per_parameter(work: Work, layout: Layout, ranks: int) -> float:
    """Return the bytes of state of a parameter that `ranks` share as the ZeRO stage says."""
    bytes_by_stage = {
        3: work.element,  # the parameter
        2: 4,  # its gradient
        1: 12 if work.half else 8,  # optimizer moments, and the master parameter in half precision
    }
    return sum(size / (ranks if layout.zero >= stage else 1) for stage, size in bytes_by_stage.items())


def layer_memory(work: Work, layout: Layout) -> LayerMemory:
    """Return lower bounds for a layer (docs/memory.md)."""
    size = work.model.size
    shape = work.model.shape(work.seq_length)
    h = shape.hidden_size

    # state
    tables = shape.vocab_size * h * (1 if size.tied else 2)
    of_experts = work.model.parameters_of_experts
    dense = (work.model.parameters - of_experts - tables) / shape.num_layers / layout.tp
    experts = of_experts / shape.num_layers / max(1, layout.ep)
    state = dense * state_per_parameter(work, layout, layout.dp)
    state += experts * state_per_parameter(work, layout, layout.expert_dp)

    # activations: elements of a token
    attention = 2 * shape.attention_width + 2 * shape.kv_width
    of_experts = size.topk * (3 * size.expert_ffn + 2 * h)  # with the rows that go to experts and those that come back
    mlp = of_experts if layout.ep else (3 if shape.gated else 2) * shape.ffn_size
    computed = 4 * h + attention + mlp
    saved = {"none": computed, "mlp": 2 * h + attention, "full": h}[layout.recompute]
    token_bytes = work.seq_length * layout.micro_batch / layout.tp * work.element
    return LayerMemory(state, saved * token_bytes, (computed - saved) * token_bytes)


def live_microbatches(work: Work, layout: Layout, pp_rank: int) -> int:
    """Return the most microbatches of which a pipeline rank keeps activations at once, by 1F1B."""
    return min(layout.pp - pp_rank, work.microbatches(layout))


def least_memory(work: Work, layout: Layout) -> float:
    """Return a lower bound of the bytes that the rank with most memory needs (docs/memory.md).

    It counts the state, and the saved activations of the live microbatches, on the first and on the last stage: both have
    a table of the vocabulary, that of words or the output layer.
    """
    shape = work.model.shape(work.seq_length)
    layers = shape.num_layers / layout.pp
    layer = layer_memory(work, layout)

    tables = 1 if layout.pp > 1 or work.model.size.tied else 2
    of_tables = tables * shape.vocab_size * shape.hidden_size / layout.tp
    state = layers * layer.state + of_tables * state_per_parameter(work, layout, layout.dp)

    # with their gradient
    logits = 2 * shape.vocab_size * work.seq_length * layout.micro_batch / layout.tp * work.element
    first_stage = layers * layer.saved * live_microbatches(work, layout, 0) + layer.recomputed
    last_stage = layers * layer.saved + max(logits, layer.recomputed)
    return state + max(first_stage, last_stage)
