"""The mesh holds all axes of this rank by name, made from a grid, and their communicators.

    axis          ranks differ in                           used for
    tp            the shard of each layer                   activations inside a layer
    pp            the pipeline stage                        scalars of a step
    pp_forward    the same, own communicators               activations to the next stage,
    pp_backward                                             gradients to the previous stage
    cp            the shard of each sequence                keys and values, or heads, in attention
    cp_heads      neighbours in cp: cp is cp_ring x         heads dealt out among ranks that share
    cp_ring       cp_heads                                  a part of the sequence (a2a+p2p)
    dp            the samples: dp_outer x dp_inner          data loading
    dp_cp         the tokens                                losses, gradients
    etp, ep, edp  the shard of each expert, the experts,    experts and their gradients
                  the replicas of experts
    kv            neighbours in tp that share a             the gradient of shared key/value heads
                  key/value head
    mp, emp       tp and pp, or etp, ep and pp: one         sums over all parameters
                  replica of the model or its experts
    embd          first and last stage, or a script's       the gradient of a tied embedding
                  choice
    pos_embd      the first stage, or a script's choice     a position table that stages share
    world         everything                                agreement

`initialize_model_parallel.py` makes the communicators of a job, a test makes its own. Lower layers receive single axes,
as `Axis` objects.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.collectives import Communicator, Ledger
from megatron.core.parallel.rank_grid import ALONE, DATA_PARALLEL, EXPERT_DATA_PARALLEL, Axis, AxisSizes
from megatron.core.parallel.stage_to_rank import StageMap, loop


@dataclass(frozen=True)
class GradAxes:
    """The axes over which one kind of parameter is reduced and sharded: `reduce` = `shard` x (`replica` or `outer`)."""

    reduce: Axis  # ranks that replicate a parameter: its gradient is summed over them
    shard: Axis  # ranks that shard one copy of the state (ALONE: not sharded)
    replica: Axis  # ranks that hold equal shards
    outer: Axis  # ranks that shard each shard further, in the place of `replica` (ALONE: no)
    model: Axis  # ranks that together hold one copy of all such parameters


class Mesh(Mapping[str, Axis]):
    """The axes of this rank by name, such as `mesh["tp"]`, the ledger, and the stage map."""

    def __init__(self, axes: dict[str, Axis], ledger: Ledger, sharing: Mapping[str, tuple[int, ...]], stages: StageMap):
        self._axes = axes
        self.ledger = ledger
        self.stages = stages
        # Global ranks of this pipeline that share an embedding weight; the axis of any other rank has one rank.
        self.embedding_ranks = sharing["embd"]
        self.position_embedding_ranks = sharing["pos_embd"]

    def __getitem__(self, name: str) -> Axis:
        return self._axes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank runs the last stage, which computes the loss."""
        return self["pp"].rank == self.stages.rank_of_last

    def reporter(self, axis_name: str = "world") -> int:
        """Return the position on an axis of its last rank that runs the last stage: it knows the losses, and logs."""
        axis = self[axis_name]
        pipeline = self["pp"].ranks
        # The pipeline of the axis's last rank is shifted against this one: the last stage is equally far from its end.
        from_end = pipeline[-1] - pipeline[self.stages.rank_of_last]
        return axis.ranks.index(axis.ranks[-1] - from_end)

    @property
    def samples(self) -> Axis:
        """The axis whose ranks read different samples: for data loading and batch sizes."""
        return self["dp"]

    @property
    def sequence(self) -> Axis:
        """The axis whose ranks hold different tokens of the same samples."""
        return self["cp"]

    @property
    def tokens(self) -> Axis:
        """The axis whose ranks hold different tokens: for sums of losses and token counts."""
        return self["dp_cp"]

    @property
    def replicas_sharing_experts(self) -> int:
        """How many neighbouring replicas of the other layers have one replica of the experts among them."""
        return max(1, self["ep_etp"].size // (self["tp"].size * self["cp"].size))

    def grad_axes(
        self, reduce_over: tuple[str, ...] = DATA_PARALLEL, *, shards: bool = False, divides_outer: bool = False
    ) -> GradAxes:
        """Return the axes for placements with this `reduce_over`.

        shards: state is sharded over the inner axis. divides_outer: it is sharded over the outer axis too.
        """
        names = _GRADS[reduce_over]
        reduce = self[names.reduce]
        outer = self[names.outer]
        inner = self[names.inner]
        model = self[names.model]
        if not shards or (inner.size == 1 and not divides_outer):
            return GradAxes(reduce, shard=ALONE, replica=reduce, outer=ALONE, model=model)
        if divides_outer:
            return GradAxes(reduce, shard=inner, replica=ALONE, outer=outer, model=model)
        return GradAxes(reduce, shard=inner, replica=outer, outer=ALONE, model=model)

    def all_grad_axes(self) -> list[GradAxes]:
        """Return the axes of dense and of expert parameters, only the dense ones if the ranks are equal.

        The number of entries and their order are the same on all ranks.
        """
        by_ranks: dict[tuple[int, ...], GradAxes] = {}
        for reduce_over in reversed(_GRADS):  # expert parameters first, so that equal dense axes replace theirs
            axes = self.grad_axes(reduce_over)
            by_ranks[axes.model.ranks] = axes
        return list(by_ranks.values())


# The coordinates in which the ranks of an axis differ, by grid. Axes with equal ranks share a communicator, except the
# two directions of the pipeline: NCCL runs the transfers of one communicator in order.
_DENSE: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "dp": ("dp_outer", "dp_inner"),
    "dp_outer": ("dp_outer",),
    "dp_inner": ("dp_inner",),
    "mp": ("pp", "tp"),
    "world": ("pp", "dp_outer", "dp_inner", "cp", "tp"),
    "pp_forward": ("pp",),
    "pp_backward": ("pp",),
    "dp_cp": ("dp_outer", "dp_inner", "cp"),
    "dp_inner_cp": ("dp_inner", "cp"),
    "tp_cp": ("cp", "tp"),
}
_EXPERT: dict[str, tuple[str, ...]] = {
    "etp": ("etp",),
    "ep": ("ep",),
    "edp": ("edp_outer", "edp_inner"),
    "edp_outer": ("edp_outer",),
    "edp_inner": ("edp_inner",),
    "ep_etp": ("ep", "etp"),
    "emp": ("pp", "ep", "etp"),
}
_OWN_COMMUNICATOR = ("pp_forward", "pp_backward")


class _GradNames(NamedTuple):
    """The names of the axes of `GradAxes`."""

    reduce: str  # spans `outer` and `inner`
    outer: str
    inner: str
    model: str


_GRADS = {  # by a placement's `reduce_over`
    DATA_PARALLEL: _GradNames("dp_cp", "dp_outer", "dp_inner_cp", "mp"),
    EXPERT_DATA_PARALLEL: _GradNames("edp", "edp_outer", "edp_inner", "emp"),
}

MakeGroup = Callable[[str, tuple[int, ...]], Communicator]
StageRanks = Callable[[tuple[int, ...]], tuple[int, ...]]  # ranks of one pipeline -> a subset of them


def build_mesh(
    sizes: AxisSizes,
    rank: int,
    make_group: MakeGroup,
    ranks_per_kv_head: int = 1,
    *,
    stages: StageMap | None = None,
    embedding_ranks: StageRanks | None = None,
    position_embedding_ranks: StageRanks | None = None,
) -> Mesh:
    """Build the mesh of `rank`. All members of a group call `make_group(axis name, global ranks)` in the same order.

    stages: default one stage per pipeline rank. embedding_ranks, position_embedding_ranks: choose from the ranks of a
    pipeline those that share an embedding weight; default first and last stage for tokens, the first for positions.
    ranks_per_kv_head: that many neighbours on "tp" form an axis "kv". ConfigError if they do not divide it.

    With tp 4 and ranks_per_kv_head 2 (4 heads of queries, 2 of keys and values):

        tp              0     1     2     3
        query heads     q0    q1    q2    q3
        key/value head  k0    k0    k1    k1
        kv              (0    1)    (2    3)      the gradient of k0 is summed over ranks 0 and 1

    With cp 8 and cp_heads 2:    cp_heads (0 1) (2 3) (4 5) (6 7)      cp_ring (0 2 4 6) (1 3 5 7)
    """
    if sizes.tp % ranks_per_kv_head:
        problem = f"{ranks_per_kv_head} ranks per key/value head do not divide {sizes.tp} tensor-parallel ranks"
        raise ConfigError(f"{problem}; give ranks_per_kv_head = tensor-parallel size / query groups")
    ledger = Ledger()
    axes: dict[str, Axis] = {}

    def add(name: str, ranks: tuple[int, ...]) -> None:
        """Add an axis, with the communicator of an earlier axis of equal ranks, or with one of its own."""
        group = None
        if len(ranks) > 1:
            same_ranks = [axis for axis in axes.values() if axis.ranks == ranks and name not in _OWN_COMMUNICATOR]
            group = same_ranks[0].group if same_ranks else make_group(name, ranks)
        name_in_ledger = name if sizes.cp > 1 else name.removesuffix("_cp")
        axes[name] = Axis(name_in_ledger, ranks, ranks.index(rank), group, ledger)

    # the axes of the two grids
    for grid, table in ((sizes.dense(), _DENSE), (sizes.expert(), _EXPERT)):
        for name, varying in table.items():
            add(name, grid.group_of(rank, *varying))

    # the ends of the pipeline, which share an embedding weight
    pipeline = axes["pp"].ranks
    stages = loop(len(pipeline)) if stages is None else stages
    first = pipeline[stages.rank_of_first]
    last = pipeline[stages.rank_of_last]
    ends = {"embd": (embedding_ranks, (first, last)), "pos_embd": (position_embedding_ranks, (first,))}
    sharing: dict[str, tuple[int, ...]] = {}
    for name, (ranks_of, default) in ends.items():
        members = tuple(dict.fromkeys(default))  # the first and the last stage may be on one rank
        if ranks_of is not None:
            members = ranks_of(pipeline)
        outside = set(members) - set(pipeline)
        if outside:
            raise ConfigError(f"ranks {sorted(outside)} of {name} must be in the pipeline {pipeline}, and are not")
        sharing[name] = members
        add(name, members if rank in members else (rank,))

    # context parallelism by heads among neighbours, and by a ring between groups of them
    cp = axes["cp"]
    heads_start = cp.rank // sizes.cp_heads * sizes.cp_heads
    add("cp_heads", cp.ranks[heads_start : heads_start + sizes.cp_heads])
    add("cp_ring", cp.ranks[cp.rank % sizes.cp_heads :: sizes.cp_heads])

    # the tensor-parallel neighbours that share a key/value head
    tp = axes["tp"]
    kv_start = tp.rank // ranks_per_kv_head * ranks_per_kv_head
    add("kv", tp.ranks[kv_start : kv_start + ranks_per_kv_head])
    return Mesh(axes, ledger, sharing, stages)
