"""What several ranks hold copies of, kept in parts until it is needed again."""

from torch import Tensor

from megatron.core import comm
from megatron.core.grid import Axis


class InParts:
    """A tensor for one use as it is, and for another, later, from the parts that the ranks of the axis keep. Both ask in one order."""

    def __init__(self, x: Tensor, axis: Axis):
        self._whole: Tensor | None = x
        self._axis, self._shape, self._requires_grad = axis, x.shape, x.requires_grad
        self._part = x.detach().flatten()[comm.my_part(x.numel(), axis)].clone()

    def take(self) -> Tensor:
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return whole
        return comm.all_gather(self._part, self._axis).view(self._shape).requires_grad_(self._requires_grad)
