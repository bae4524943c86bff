"""Saved activations: sharded over the ranks that hold copies, or offloaded."""

from collections.abc import Callable

from torch import Tensor

from megatron.core.offload.activation_offload import Keep
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis


def keep_copy(x: Tensor) -> Callable[[], Tensor]:
    copied = x.clone()
    return lambda: copied


class SavedActivation:
    """A tensor that the forward uses as it is, and the backward restores from the shards that the ranks of the axis
    keep.

    axis: None if each rank keeps the whole tensor. keep: stores the shard. Every rank of the axis must `take` its
    activations in the same order.
    """

    def __init__(self, x: Tensor, axis: Axis | None, keep: Keep = keep_copy):
        self._whole: Tensor | None = x
        self._axis = axis
        self._shape, self._requires_grad = x.shape, x.requires_grad
        mine = x.detach()
        self._kept = keep(mine if axis is None else mine.flatten()[collectives.my_part(x.numel(), axis)])

    def take(self) -> Tensor:
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return whole
        kept = self._kept()
        whole = kept if self._axis is None else collectives.all_gather(kept, self._axis).view(self._shape)
        return whole.detach().requires_grad_(self._requires_grad)
