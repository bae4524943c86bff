"""The values of --attention-backend. Needs no torch, which the kernels themselves do."""

import sys
from collections.abc import Collection, Iterator

OUR_KERNELS = ("auto", "fused", "flash", "tiled", "tiled-eager", "unfused", "local")


class KernelNames(Collection[str]):
    """The names in `KERNELS`, with those that a script has added; ours until that table is imported."""

    def _names(self) -> Collection[str]:
        kernels = sys.modules.get("megatron.core.ops.attention.kernels")
        return OUR_KERNELS if kernels is None else kernels.KERNELS

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._names()
