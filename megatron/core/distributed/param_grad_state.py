"""`parameter.grad_sink`: the data-parallel state of a trained parameter, which takes its gradients.

`parameter.in_bucket` is the same object. In ZeRO stage 3 a frozen parameter is in a bucket too, and has no sink.

Four attributes beside them are public:

parameter.placement                 how the parameter is sharded; set by the layer that makes it
parameter.main_grad                 where its gradient is accumulated, a view of a gradient buffer, of the parameter's
                                    shape; Megatron's name
parameter.num_grads_per_backward    gradients that one backward adds, set by a model whose parameter gets more than one
parameter.is_tied                   set by a model that passes the parameter to another module too, as a tied embedding
"""

from typing import Any

from torch import Tensor, nn

from megatron.core.ops.main_grad_interface import GradSink, grad_sink_of, main_grad_of


class GradReduceInterface:
    """The methods of a ZeRO stage's gradient strategy that its sinks call (`zero_stage_strategies.py: GradReduce`)."""

    def open(self, sink: "ParamGradSink", *, overwrites: bool = False) -> bool:
        """Prepare `main_grad` for a gradient. Returns True if the caller must overwrite it (`Bucket.open_grad`)."""
        raise NotImplementedError

    def defer(self, sink: "ParamGradSink") -> None:
        """Note that the backward no longer needs the parameter's values, and that its gradient comes later."""
        raise NotImplementedError

    def add(self, sink: "ParamGradSink") -> None:
        """Count a gradient that is in `main_grad`."""
        raise NotImplementedError


_NOT_REDUCED = GradReduceInterface()


class ParamInBucket:
    """A parameter's place in a bucket: elements start .. stop. The parameter may have any shape."""

    def __init__(self, name: str, parameter: nn.Parameter):
        self.name = name
        self.parameter = parameter
        self.start = self.stop = 0
        self.bucket: Any = None  # a `ParamBucket`, which sets it


class ParamGradSink(ParamInBucket, GradSink):
    """The place of a trained parameter, and the progress of its gradient in this step.

    Layers call the methods of `GradSink`, which go to `reduce`, the strategy of the ZeRO stage (`zero_stage_strategies.py`).

    A matrix product can overwrite main_grad with the first gradient of a step, which saves setting it to zero. A sink
    whose first gradient came from a product in an earlier step therefore begins the next step unset. In stages 2 and 3,
    which clear gradients each time they are allocated, the same holds from one microbatch to the next:

        begin()                          is_unset: main_grad holds neither zeros nor a sum of this step
        prepare(overwrites=True)         the product overwrites: beta = 0
        prepare(overwrites=False)        something else comes first: main_grad is set to zero
    """

    def __init__(self, name: str, parameter: nn.Parameter):
        super().__init__(name, parameter)
        self.reduce: GradReduceInterface = _NOT_REDUCED
        self.added = 0  # gradients in this step
        self.expected = 0  # the most gradients in an earlier step
        self.is_opened = False  # this step has a gradient
        self.is_unset = False  # main_grad holds neither zeros nor a sum of this step
        self.is_overwritten = False  # after an earlier `begin` a product came first
        self._version = 0  # torch's version counter of main_grad when the step began

    # ---------------------------------------------------------------- called by layers

    def open(self) -> Tensor:
        self.reduce.open(self)
        return main_grad_of(self.parameter)

    def open_with_beta(self) -> tuple[Tensor, int]:
        is_first_of_step = self.reduce.open(self, overwrites=True)
        return main_grad_of(self.parameter), 0 if is_first_of_step else 1

    def grad_was_deferred(self) -> None:
        self.reduce.defer(self)

    def grad_was_added(self) -> None:
        self.reduce.add(self)

    # ---------------------------------------------------------------- called by the bucket

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


def param_grad_sink_of(tensor: Tensor) -> ParamGradSink | None:
    """Return the sink of a trained parameter or of its main_grad, of any shape; None: none trains it."""
    sink = grad_sink_of(tensor)
    assert sink is None or isinstance(sink, ParamGradSink), type(sink)
    return sink


def place_in_bucket(tensor: Tensor) -> ParamInBucket | None:
    """Return the place of a parameter, of any shape, trained or frozen; None: it is in no bucket."""
    return getattr(tensor, "in_bucket", None)


def put_in_bucket(parameter: nn.Parameter, place: ParamInBucket) -> None:
    """Set the place of a parameter, of any shape."""
    parameter.in_bucket = place


def declared_num_grads(parameter: nn.Parameter) -> int | None:
    """Return how many gradients one backward adds to a parameter of any shape, as the model declares it.

    None: the model declares nothing.
    """
    return getattr(parameter, "num_grads_per_backward", None)


def is_tied(parameter: nn.Parameter) -> bool:
    """Return whether the model passes the parameter, of any shape, to another module than its own too."""
    return getattr(parameter, "is_tied", False)
