"""Calls of layers and schedules to data parallelism, without importing it.

    GradSink                        of a parameter that a `DistributedDataParallel` trains: takes its gradients
    open_main_grad, grad_was_added  the same for any parameter; they do nothing for one that has no sink
    DataParallelChunkInterface      what schedules call: which part of a step begins

A layer that accumulates a gradient into `main_grad` itself, instead of leaving it to autograd, opens `main_grad` before
and reports the gradient after.
"""

from torch import Tensor, nn


class GradSink:
    """Takes the gradients of one parameter in a step, and passes them to the reduction over the data-parallel ranks.

        main_grad = sink.open()               zeros, or the sum so far: add to it
        main_grad, beta = sink.open_with_beta()    set it to beta x main_grad + gradient
        sink.grad_was_added()                 after either
        sink.grad_was_deferred()              at the gradient's place in the backward, if it is written later

    `distributed/param_grad_state.py: ParamGradSink` is the class; layers may not import it.
    """

    name: str  # of the parameter

    def open(self) -> Tensor:
        """Return the tensor to add gradients to, [parameter's shape]: zeros, or their sum so far.

        With ZeRO stage 2 or 3 released memory is allocated again, after the sum in flight over the same memory has
        ended.
        """
        raise NotImplementedError

    def open_with_beta(self) -> tuple[Tensor, int]:
        """Return (main_grad, beta): the caller sets main_grad to beta x main_grad + gradient, as a matrix product can.

        beta is 0 for the first gradient of a step. The memory is then neither set to zero nor read, which saves two
        passes over all gradients. main_grad: [parameter's shape].
        """
        raise NotImplementedError

    def grad_was_deferred(self) -> None:
        """Report that one gradient is deferred, and that this backward no longer needs the parameter's values."""
        raise NotImplementedError

    def grad_was_added(self) -> None:
        """Report that the gradient of one use is in `main_grad`.

        This may start the reduction of a bucket over the data-parallel ranks: all of them must report the same
        gradients. Raises RuntimeError after the reduction of the step began.
        """
        raise NotImplementedError


def grad_sink_of(tensor: Tensor) -> GradSink | None:
    """Return the sink of a trained parameter, or of its main_grad.

    None: no `DistributedDataParallel` trains it. tensor: of any shape; only its attribute is read.
    """
    return getattr(tensor, "grad_sink", None)


def set_grad_sink(tensor: Tensor, sink: GradSink) -> None:
    """Set the sink of a parameter, or of its main_grad, of any shape."""
    tensor.grad_sink = sink


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """Return the tensor in which the parameter's gradient is accumulated, by Megatron's name: [parameter's shape].

    None: it is accumulated in `.grad` alone.
    """
    return getattr(parameter, "main_grad", None)


def open_main_grad(parameter: nn.Parameter | Tensor) -> Tensor | None:
    """Return the tensor to add gradients of the parameter to, [parameter's shape]; see `GradSink.open`.

    None if the parameter has no gradient buffer.
    """
    sink = grad_sink_of(parameter)
    return main_grad_of(parameter) if sink is None else sink.open()


def main_grad_and_beta(parameter: nn.Parameter | Tensor) -> tuple[Tensor | None, int]:
    """Return (main_grad, beta) of a parameter of any shape; see `GradSink.open_with_beta`.

    (None, 1) if the parameter has no gradient buffer.
    """
    sink = grad_sink_of(parameter)
    return (main_grad_of(parameter), 1) if sink is None else sink.open_with_beta()


def grad_was_deferred(parameter: nn.Parameter | Tensor) -> None:
    """Report that one gradient of a parameter of any shape is deferred; see `GradSink.grad_was_deferred`."""
    sink = grad_sink_of(parameter)
    if sink is not None:
        sink.grad_was_deferred()


def grad_was_added(parameter: nn.Parameter | Tensor) -> None:
    """Report that the gradient of one use of a parameter of any shape is in `main_grad`; see `GradSink.grad_was_added`."""
    sink = grad_sink_of(parameter)
    if sink is not None:
        sink.grad_was_added()


class DataParallelChunkInterface(nn.Module):
    """The methods of a model chunk under data parallelism that schedules call.

    `DistributedDataParallel` inherits it, since schedules may not import that class; a chunk of another class is a
    plain module to them.
    """

    def zero_grad_buffer(self, num_microbatches: int | None = None) -> None:
        """Forget the gradients of the last step. num_microbatches: of the next."""
        raise NotImplementedError

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Prepare for a forward or backward of this microbatch."""
        raise NotImplementedError

    def start_grad_reduce(self) -> None:
        """Start to reduce the step's gradients over the data-parallel ranks."""
        raise NotImplementedError

    def finish_grad_reduce(self) -> None:
        """Wait for the reduced gradients."""
        raise NotImplementedError

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply every gradient of the chunk."""
        raise NotImplementedError
