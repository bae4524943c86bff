"""Which ranks work together: the ranks of a job as the points of a grid whose axes have names.

Pure integers. `model_parallel.py` turns the groups into communicators; a layer only ever sees an `Axis`.
"""

from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any


@dataclass(frozen=True, eq=False)
class Axis:
    """One named group that this rank belongs to: all that a layer or a collective needs to know of the other ranks."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in the order of their positions
    rank: int  # my position among them
    group: Any = field(default=None, repr=False)  # a comm.Group; None when the axis has one rank
    ledger: Any = field(default=None, repr=False)  # the comm.Ledger of the mesh the axis comes from

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


ALONE = Axis("alone", (0,), 0)  # what is divided over it is whole


class Grid:
    """The ranks 0 .. world_size-1 as points with one coordinate per axis.

    `sizes` runs from the slowest to the fastest varying axis. With {"pp": 2, "dp": 2, "tp": 2}:

        rank        0       1       2       3       4       5       6       7
        (pp,dp,tp)  0,0,0   0,0,1   0,1,0   0,1,1   1,0,0   1,0,1   1,1,0   1,1,1

        groups("tp")        (0,1) (2,3) (4,5) (6,7)
        groups("dp")        (0,2) (1,3) (4,6) (5,7)
        groups("pp")        (0,4) (1,5) (2,6) (3,7)
        groups("pp", "tp")  (0,1,4,5) (2,3,6,7)         one whole copy of the model each
    """

    def __init__(self, sizes: dict[str, int]):
        self.sizes = dict(sizes)
        self.world_size = prod(self.sizes.values())
        self._strides, stride = {}, 1
        for name in reversed(self.sizes):
            self._strides[name] = stride
            stride *= self.sizes[name]

    def coordinates(self, rank: int) -> dict[str, int]:
        return {name: rank // self._strides[name] % size for name, size in self.sizes.items()}

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only in `axes`; every rank is in exactly one of them."""
        varying = [name for name in self.sizes if name in axes]
        fixed = [name for name in self.sizes if name not in axes]
        return [tuple(start + offset for offset in self._offsets(varying)) for start in self._offsets(fixed)]

    def _offsets(self, names: list[str]) -> list[int]:
        points = product(*(range(self.sizes[name]) for name in names))
        return [sum(self._strides[name] * at for name, at in zip(names, point)) for point in points]


def grid_of(order: str, sizes: dict[str, int]) -> Grid:
    """A grid from Megatron's order string, whose leftmost axis varies fastest: "tp-cp-ep-dp-pp".

    Axes that `order` leaves out must have size one. The data-parallel axis "dp" stands for its two parts: "dp_outer"
    (replicas) around "dp_inner" (the ranks that may share one copy of sharded state).
    """
    names = order.split("-")
    if unknown := set(names) - {"tp", "cp", "ep", "dp", "pp"}:
        raise ValueError(f"order {order!r} names unknown axes {sorted(unknown)}; allowed are tp, cp, ep, dp and pp")
    if len(set(names)) < len(names):
        raise ValueError(f"order {order!r} names an axis twice")
    parts = {"dp": ("dp_outer", "dp_inner")}
    large = [n for n in ("tp", "cp", "dp", "pp") if any(sizes.get(part, 1) > 1 for part in parts.get(n, (n,)))]
    if missing := [n for n in large if n not in names]:
        raise ValueError(f"order {order!r} leaves out {missing}, of size above one; name every such axis in it")
    slow_to_fast = [part for n in reversed(names) for part in parts.get(n, (n,))]
    return Grid({name: sizes.get(name, 1) for name in slow_to_fast if name != "ep"})
