"""The axes of one rank by name, made from a grid: which communicators there are, and who shares them.

    axis          ranks that differ in                      used for
    tp            the part of each layer                    activations inside a layer
    pp            the pipeline stage                        scalars of a step
    pp_forward    the same ranks, own communicators         activations to the next stage,
    pp_backward                                             gradients to the previous one
    dp            the samples: dp_outer x dp_inner          gradients
    kv            the neighbours in tp that share one       the gradient of shared key/value heads
                  key/value head
    mp            tp and pp: one whole model                sums over all parameters
    embd          first and last stage                      the gradient of a tied embedding
    world         anything                                  agreement

`parallel_state.py` makes the communicators of a job; a test makes its own. Code below the composition root is handed the
`Axis` objects that it uses.
"""

from collections.abc import Callable, Iterator, Mapping

from megatron.core.comm import Group, Ledger
from megatron.core.config import ConfigError
from megatron.core.grid import Axis, Grid


class Mesh(Mapping[str, Axis]):
    """Every axis of this rank by name: `mesh["tp"]`. Also the home of the ledger."""

    def __init__(self, axes: dict[str, Axis], ledger: Ledger):
        self._axes, self.ledger = axes, ledger
        self.virtual_size: int | None = None  # model chunks of each pipeline rank, None without interleaving
        self.virtual_rank: int | None = None  # the chunk that is running, for scripts that ask

    def __getitem__(self, name: str) -> Axis:
        return self._axes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def over(self, names: tuple[str, ...]) -> Axis:
        """The one axis that spans several: ("dp_outer", "dp_inner") is "dp"."""
        return self._axes[_SPANS[names]]


# What each axis of the mesh varies in, and which communicator it has: axes with equal ranks share one, except that
# the two directions of the pipeline have their own, since NCCL runs the transfers of one communicator in order.
_AXES: dict[str, tuple[str, ...]] = {
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
}
_OWN_COMMUNICATOR = ("pp_forward", "pp_backward")
_SPANS = {("dp_outer", "dp_inner"): "dp", ("dp_inner",): "dp_inner", ("dp_outer",): "dp_outer"}

MakeGroup = Callable[[str, tuple[int, ...]], Group]


def build_mesh(grid: Grid, rank: int, make_group: MakeGroup, ranks_per_kv_head: int = 1) -> Mesh:
    """The axes of `rank`. `make_group(axis name, global ranks)` is called in the same order by all members of a group.

    `ranks_per_kv_head`: so many neighbours on "tp" are an axis "kv". With 2 groups on 4 ranks: tp (0,1,2,3), kv (0,1) (2,3).
    """
    if (tensor := grid.sizes["tp"]) % ranks_per_kv_head:
        raise ConfigError(
            f"{ranks_per_kv_head} ranks per key/value head do not divide {tensor} tensor-parallel ranks; "
            "give tensor-parallel size / query groups"
        )
    ledger, axes = Ledger(), {}

    def add(name: str, ranks: tuple[int, ...]) -> None:
        shared = next((a for a in axes.values() if a.ranks == ranks and name not in _OWN_COMMUNICATOR), None)
        group = None if len(ranks) == 1 else shared.group if shared else make_group(name, ranks)
        axes[name] = Axis(name, ranks, ranks.index(rank), group, ledger)

    for name, varying in _AXES.items():
        add(name, next(ranks for ranks in grid.groups(*varying) if rank in ranks))
    stages = axes["pp"].ranks
    ends = tuple(dict.fromkeys((stages[0], stages[-1])))
    add("embd", ends if rank in ends else (rank,))
    first = axes["tp"].rank // ranks_per_kv_head * ranks_per_kv_head
    add("kv", axes["tp"].ranks[first : first + ranks_per_kv_head])
    return Mesh(axes, ledger)
