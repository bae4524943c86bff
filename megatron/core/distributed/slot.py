"""What data parallelism knows of one trained parameter: `parameter.slot`. Three facts beside it are for all to read:

parameter.placement    where the parameter lives; the layer that makes it says so
parameter.main_grad    where its gradient is added, a view of a gradient buffer; Megatron's name
parameter.uses         gradients that one backward adds, where a model knows that they are others than one
"""

from typing import Any

from torch import nn


class ParamSlot:
    """One parameter: its elements start .. stop of a bucket, and how far its gradient is in this step.

    A layer that adds gradients itself calls `open`, and then `add` or `put_off` (`core/main_grad.py`). What follows
    from that is for `reduce` (`zero.py`), since it depends on the ZeRO stage.
    """

    def __init__(self, name: str, parameter: nn.Parameter):
        self.name, self.parameter = name, parameter
        self.start = self.stop = 0
        self.bucket: Any = None  # set by the bucket, and by what sums its gradients
        self.reduce: Any = None
        self.added = self.expected = 0  # gradients in this step, and the most in a step before
        # A product may put the first gradient of a step in place of what memory holds, and then nobody sets that to
        # zero.
        self.is_opened = self.is_unset = False  # whether something came, and whether there are neither zeros nor a sum
        self.is_overwritten = False  # whether a product came first once
        self._version = 0  # torch's count of changes of main_grad when the step began

    def begin(self) -> None:
        """No gradient is there; if `is_unset` is true then, nobody sets it to zero."""
        self.is_opened, self.is_unset = False, self.is_overwritten
        self._version = self.parameter.main_grad._version if self.is_unset else 0

    def prepare(self, *, overwrites: bool) -> bool:
        """Make up for zeros that are missing, unless the caller can overwrite: then True says that it must."""
        if self.is_unset and self.parameter.main_grad._version != self._version:
            raise RuntimeError(
                f"something has added to main_grad of {self.name} without opening it, where the first gradient of a step "
                "overwrites what is there; call megatron.core.main_grad.open_main_grad(parameter) before, and "
                "grad_was_added(parameter) after it"
            )
        if self.is_opened:
            return False
        was_unset, self.is_unset = self.is_unset, False
        self.is_opened = True
        self.is_overwritten |= overwrites
        if was_unset and not overwrites:
            self.parameter.main_grad.zero_()
        return was_unset and overwrites
