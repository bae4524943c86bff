"""The ranks of a job as a grid with named axes, and the groups of ranks along each axis. Pure integers.

`initialize_model_parallel.py` turns groups into communicators; a layer sees only `Axis` objects.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError


@dataclass(frozen=True, eq=False)
class Axis:
    """One named group of ranks that contains this rank."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in the order of their positions
    rank: int  # this rank's position among them
    group: Any = field(default=None, repr=False)  # a collectives.Communicator; None when the axis has one rank
    ledger: Any = field(default=None, repr=False)  # the collectives.Ledger of the mesh

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


ALONE = Axis("alone", (0,), 0)  # the axis of a tensor that is not sharded


class Grid:
    """The ranks 0 .. world_size-1 as points with one coordinate per axis.

    `sizes` runs from the slowest to the fastest varying axis. With {"pp": 2, "dp": 2, "tp": 2}:

        rank        0       1       2       3       4       5       6       7
        (pp,dp,tp)  0,0,0   0,0,1   0,1,0   0,1,1   1,0,0   1,0,1   1,1,0   1,1,1

        groups("tp")        (0,1) (2,3) (4,5) (6,7)
        groups("dp")        (0,2) (1,3) (4,6) (5,7)
        groups("pp")        (0,4) (1,5) (2,6) (3,7)
        groups("pp", "tp")  (0,1,4,5) (2,3,6,7)         one replica of the model each
    """

    def __init__(self, sizes: dict[str, int]):
        self.sizes = dict(sizes)
        self.world_size = prod(self.sizes.values())
        self._strides: dict[str, int] = {}  # the distance of two ranks that differ by 1 on an axis
        stride = 1
        for name in reversed(self.sizes):
            self._strides[name] = stride
            stride *= self.sizes[name]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis."""
        return {name: rank // self._strides[name] % size for name, size in self.sizes.items()}

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups of ranks that differ only in `axes`; each rank is in one group."""
        return list(dict.fromkeys(self.group_of(rank, *axes) for rank in range(self.world_size)))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only in `axes`, with `rank` itself, in ascending coordinates."""
        coordinates = self.coordinates(rank)
        members = [rank]
        for name, size in self.sizes.items():  # from the slowest axis, so that coordinates ascend
            if name in axes:
                steps = range(-coordinates[name], size - coordinates[name])
                members = [member + step * self._strides[name] for member in members for step in steps]
        return tuple(members)


ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class AxisSizes:
    """The size of each axis, and two grids over the same ranks:

        dense     pp, dp, cp, tp      layers that every token passes: attention, norms, embeddings, losses
        expert    pp, edp, ep, etp    experts: each is sharded over etp, distributed over ep, replicated over edp

    A pipeline stage has the same ranks in both grids. Inside a stage experts have a layout of their own, since tokens
    are sent to them anyway (arXiv:2504.14960). With tp 2, dp 4 and ep 4, etp 1, hence edp 2:

        rank             0    1    2    3    4    5    6    7
        (dp, tp)         0,0  0,1  1,0  1,1  2,0  2,1  3,0  3,1
        (edp, ep, etp)   000  010  020  030  100  110  120  130

    order: as in Megatron, the leftmost axis varies fastest; etp takes the place of "tp" and edp of "dp". Axes of one
    rank may be omitted. replicas: dp and edp are split into "_outer" (this many groups) and "_inner" (the ranks of a
    group, which may shard one copy of the optimizer state).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    cp_heads: int = 1  # neighbours on cp that distribute heads among them; see `mesh.py`
    ep: int = 1
    etp: int | None = None  # tp when None
    replicas: int = 1
    order: str = ORDER

    def __post_init__(self) -> None:
        names = self.order.split("-")
        unknown = set(names) - {"tp", "cp", "ep", "dp", "pp"}
        if unknown:
            raise ValueError(f"order {self.order!r} has unknown axes {sorted(unknown)}; allowed are tp, cp, ep, dp, pp")
        if len(set(names)) < len(names):
            raise ValueError(f"order {self.order!r} has an axis twice; give each axis once")
        missing = []
        for name in ("tp", "cp", "ep", "dp", "pp"):
            if getattr(self, name) > 1 and name not in names:
                missing.append(name)
        if missing:
            raise ValueError(f"order {self.order!r} omits {missing}, whose size is above 1; add them")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def dense(self) -> Grid:
        """Return the grid of the layers that every token passes."""
        return self._grid({"tp": ("tp", self.tp), "cp": ("cp", self.cp), "dp": ("dp", self.dp), "pp": ("pp", self.pp)})

    def expert(self) -> Grid:
        """Return the grid of the experts. Raises ConfigError if the expert axes do not divide the ranks of a stage."""
        etp = self.tp if self.etp is None else self.etp
        stage = self.world_size // self.pp  # ranks of a pipeline stage
        names = f"expert-tensor-parallel-size ({etp}) x expert-model-parallel-size ({self.ep})"
        divisor = etp * self.ep * self.replicas
        if stage % divisor:
            of_stage = f" / pipeline-model-parallel-size {self.pp} = {stage}" if self.pp > 1 else ""
            more = f" x num-distributed-optimizer-instances ({self.replicas})" if self.replicas > 1 else ""
            raise ConfigError(
                f"world size {self.world_size}{of_stage} is not a multiple of {divisor} = expert-tensor-parallel-size "
                f"({etp}) x expert-model-parallel-size ({self.ep}){more}; "
                "change the number of processes (torchrun --nproc-per-node) or the sizes"
            )
        edp = stage // (etp * self.ep)
        grid = self._grid({"tp": ("etp", etp), "ep": ("ep", self.ep), "dp": ("edp", edp), "pp": ("pp", self.pp)})
        if grid.group_of(0, "pp") != self.dense().group_of(0, "pp"):
            raise ConfigError(
                f"{names} must be tensor-model-parallel-size ({self.tp}) x context-parallel-size ({self.cp}) if pp "
                f"varies faster than dp (order {self.order}); with another product the experts of a pipeline stage "
                "would be on other ranks than the stage's other layers; leave out --use-tp-pp-dp-mapping"
            )
        return grid

    def _grid(self, axes: dict[str, tuple[str, int]]) -> Grid:
        """Return a grid. axes: name in `order` -> (name, size) of the axis that takes its place."""
        sizes: dict[str, int] = {}
        for place in reversed(self.order.split("-")):  # a grid runs from the slowest axis to the fastest
            if place not in axes:
                continue
            name, size = axes[place]
            if name.endswith("dp"):
                sizes[f"{name}_outer"] = self.replicas
                sizes[f"{name}_inner"] = size // self.replicas
            else:
                sizes[name] = size
        return Grid(sizes)


# The axes over which a parameter is replicated.
DATA_PARALLEL = ("dp_outer", "dp_inner", "cp")


EXPERT_DATA_PARALLEL = ("edp_outer", "edp_inner")
