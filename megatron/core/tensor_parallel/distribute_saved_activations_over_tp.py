"""Saved activations: sharded over ranks that have equal copies of them, or offloaded."""

from collections.abc import Callable

from torch import Tensor

from megatron.core.offload.activation_offload import InputSaver
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis


def keep_clone(x: Tensor) -> Callable[[], Tensor]:
    """Save a shard [numel / t], or any tensor, in the memory of its device; return the function that gives it back.

    It is the default `keep` of a `SavedActivation`.
    """
    copied = x.clone()
    return lambda: copied


class SavedActivation:
    """A tensor x, of any shape, that the forward uses as it is, and the backward restores from the shards of all ranks.

    axis: the ranks with equal copies, each of which saves a shard [numel / t]; None: each saves all of x. keep: stores
    the shard and returns a function that gives it back. Every rank of the axis must `take` its activations in the same
    order. Raises ValueError if the ranks do not divide the elements of x.
    """

    def __init__(self, x: Tensor, axis: Axis | None, keep: InputSaver = keep_clone):
        self._unsharded: Tensor | None = x  # until the forward takes it
        self._axis = axis
        self._shape = x.shape
        self._requires_grad = x.requires_grad
        shard = x.detach()
        if axis is not None:
            shard = shard.flatten()[collectives.local_slice(x.numel(), axis)]  # [numel / t]
        self._load_shard = keep(shard)

    def take(self) -> Tensor:
        """Return x, in its shape: in the forward (the first call) itself, in the backward gathered from the shards.

        The backward's call is a collective: every rank of the axis must make it.
        """
        if self._unsharded is not None:
            x = self._unsharded
            self._unsharded = None
            return x
        x = self._load_shard()
        if self._axis is not None:
            x = collectives.all_gather(x, self._axis).view(self._shape)
        return x.detach().requires_grad_(self._requires_grad)
