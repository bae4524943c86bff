"""`parameter.slot`: the data-parallel state of a trained parameter (`main_grad.slot_of`). Four attributes beside it are
public:

parameter.placement    where the parameter lives; set by the layer that makes it
parameter.main_grad    where its gradient is accumulated, a view of a gradient buffer; Megatron's name
parameter.uses         gradients that one backward adds, set by a model whose parameter gets more than one
parameter.is_lent      set by a model that passes the parameter to another module too, as a tied table
"""

from typing import Any

from torch import nn

from megatron.core.ops.main_grad_interface import GradSlot


class ParamSlot(GradSlot):
    """A parameter's place in a bucket, elements start .. stop, and the progress of its gradient in this step.

    A layer that accumulates gradients itself reports to `reduce` (`zero.py`) through `core/ops/main_grad_interface.py`.
    """

    def __init__(self, name: str, parameter: nn.Parameter):
        self.name, self.parameter = name, parameter
        self.start = self.stop = 0
        self.bucket: Any = None  # set by `Bucket`; `reduce` by `GradReduce`
        self.reduce: Any = None
        self.added = self.expected = 0  # gradients in this step, and the most in an earlier step
        # A matrix product can overwrite main_grad with the first gradient of a step, which saves setting it to zero.
        # A gradient of this step has come; main_grad holds neither zeros nor a sum of this step.
        self.is_opened = self.is_unset = False
        self.is_overwritten = False  # in an earlier step a product came first
        self._version = 0  # torch's version counter of main_grad when the step began

    def begin(self) -> None:
        """Start a step without a gradient. If `is_unset` is then true, nothing sets `main_grad` to zero."""
        self.is_opened, self.is_unset = False, self.is_overwritten
        self._version = self.parameter.main_grad._version if self.is_unset else 0

    def prepare(self, *, overwrites: bool) -> bool:
        """Set missing zeros, unless the caller can overwrite. Returns True if the caller must overwrite `main_grad`.

        Raises RuntimeError if main_grad has changed since the step began although no layer has opened it.
        """
        if self.is_unset and self.parameter.main_grad._version != self._version:
            raise RuntimeError(
                f"main_grad of {self.name} was changed without being opened, so the first gradient of the step would overwrite "
                "the change; call megatron.core.ops.main_grad_interface.open_main_grad(parameter) before changing it, and "
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


def uses_of(parameter: nn.Parameter) -> int | None:
    """Gradients that one backward adds, as the model declares them; None: the model says nothing."""
    return getattr(parameter, "uses", None)


def is_lent(parameter: nn.Parameter) -> bool:
    """Whether the model passes the parameter to another module than its own too."""
    return getattr(parameter, "is_lent", False)
