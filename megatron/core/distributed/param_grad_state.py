"""`parameter.slot`: the data-parallel state of a trained parameter (`main_grad.slot_of`).

Four attributes beside it are public:

parameter.placement                 how the parameter is sharded; set by the layer that makes it
parameter.main_grad                 where its gradient is accumulated, a view of a gradient buffer, of the parameter's
                                    shape; Megatron's name
parameter.num_grads_per_backward    gradients that one backward adds, set by a model whose parameter gets more than one
parameter.is_tied                   set by a model that passes the parameter to another module too, as a tied embedding
"""

from typing import Any

from torch import nn

from megatron.core.ops.main_grad_interface import GradSlot


class ParamSlot(GradSlot):
    """A parameter's place in a bucket, elements start .. stop, and the progress of its gradient in this step.

    The parameter may have any shape. A layer that accumulates gradients itself reports to `reduce` (`zero.py`)
    through `core/ops/main_grad_interface.py`.

    A matrix product can overwrite main_grad with the first gradient of a step, which saves setting it to zero. A slot
    whose first gradient came from a product in an earlier step therefore begins the next step unset:

        begin()                          is_unset: main_grad holds neither zeros nor a sum of this step
        prepare(overwrites=True)         the product overwrites: beta = 0
        prepare(overwrites=False)        something else comes first: main_grad is set to zero
    """

    def __init__(self, name: str, parameter: nn.Parameter):
        self.name = name
        self.parameter = parameter
        self.start = self.stop = 0
        self.bucket: Any = None  # set by `Bucket`
        self.reduce: Any = None  # set by `GradReduce`
        self.added = 0  # gradients in this step
        self.expected = 0  # the most gradients in an earlier step
        self.is_opened = False  # this step has a gradient
        self.is_unset = False  # main_grad holds neither zeros nor a sum of this step
        self.is_overwritten = False  # in an earlier step a product came first
        self._version = 0  # torch's version counter of main_grad when the step began

    def begin(self) -> None:
        """Begin a step without a gradient. If `is_unset` is then true, the caller leaves `main_grad` as it is."""
        self.is_opened = False
        self.is_unset = self.is_overwritten
        self._version = self.parameter.main_grad._version if self.is_unset else 0

    def prepare(self, *, overwrites: bool) -> bool:
        """Set missing zeros, unless the caller can overwrite. Return True if the caller must overwrite `main_grad`.

        Raises RuntimeError if main_grad has changed since the step began although no layer has opened it.
        """
        if self.is_unset and self.parameter.main_grad._version != self._version:
            raise RuntimeError(
                f"main_grad of {self.name} was changed without a call of open_main_grad, so the first gradient of "
                "the step would overwrite the change; call "
                "megatron.core.ops.main_grad_interface.open_main_grad(parameter) before the change, and "
                "grad_was_added(parameter) after it"
            )
        if self.is_opened:
            return False
        was_unset = self.is_unset
        self.is_unset = False
        self.is_opened = True
        self.is_overwritten |= overwrites
        if was_unset and not overwrites:
            self.parameter.main_grad.zero_()
        return was_unset and overwrites


def declared_num_grads(parameter: nn.Parameter) -> int | None:
    """Return how many gradients one backward adds to a parameter of any shape, as the model declares it.

    None: the model declares nothing.
    """
    return getattr(parameter, "num_grads_per_backward", None)


def is_tied(parameter: nn.Parameter) -> bool:
    """Return whether the model passes the parameter, of any shape, to another module than its own too."""
    return getattr(parameter, "is_tied", False)
