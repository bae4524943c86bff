"""Linears of a built model are exchanged before it is wrapped: for adapters, and for products of one's own.

replace_linears      exchanges them
output_parameter     a parameter [out, ..] of an adapter, of which a rank has the part of its linear's output
input_parameter      a parameter [.., in] of an adapter, of which a rank has the part of its linear's input
"""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from megatron.core.ops.main_grad_interface import grad_sink_of
from megatron.core.sharding.placement import InitialValue, Placement, placement_of
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.stacked_linear import StackedLinear

ParallelLinear = ColumnParallelLinear | RowParallelLinear
MakeLinear = (
    Callable[[str, ParallelLinear], nn.Module | None]
    | Callable[[str, ParallelLinear | StackedLinear], nn.Module | None]
)


def output_parameter(linear: ParallelLinear, *more: int, init: InitialValue) -> nn.Parameter:
    """Make a parameter [out, *more], of which each rank has the rows that it has of the linear's output.

    Of a column-parallel linear they are sharded as the rows of its weight are: [out/t, *more] on a rank. Of a row-parallel
    one every rank has all; under sequence parallelism it works on its own tokens, so the gradient is a partial sum. init:
    of the whole parameter.
    """
    whole = (linear.weight.placement.shape[0], *more)
    if isinstance(linear, RowParallelLinear):
        return linear.tp.replicated(whole, init)
    local = (linear.weight.shape[0], *more)
    placement = replace(linear.weight.placement, shape=whole, init=init, init_per_matrix=False)
    return linear.tp.parameter(local, placement)


def input_parameter(linear: ParallelLinear, *before: int, init: InitialValue) -> nn.Parameter:
    """Make a parameter [*before, in], of which each rank has the columns of the input features that it is given.

    Of a row-parallel linear they are sharded: [*before, in/t] on a rank. Of a column-parallel one every rank has all; under
    sequence parallelism it is given its own tokens, so the gradient is a partial sum. init: of the whole parameter.
    """
    whole = (*before, linear.weight.placement.shape[1])
    if isinstance(linear, ColumnParallelLinear):
        return linear.tp.replicated(whole, init)
    local = (*before, linear.weight.shape[1])
    return linear.tp.parameter(local, Placement(whole, init, shard={linear.tp.axis.name: len(before)}))


class ExchangesLinear(nn.Module):
    """A module with a weight of a linear product of its own, such as the output layer: that product may be exchanged."""

    def linear_to_exchange(self) -> ColumnParallelLinear | None:
        """Return the product as a linear; None if the weight is another module's."""
        raise NotImplementedError

    def exchange_linear(self, new: nn.Module) -> None:
        """Compute the product by `new`, which has the linear's forward."""
        raise NotImplementedError


def replace_linears(
    chunk: nn.Module, make: MakeLinear, *, output_layer: bool = False, experts: bool = False
) -> list[str]:
    """Exchange parallel linears of a model chunk; return the names of those that were exchanged.

    make(name, linear) -> the module in its place, with the same forward; None: the linear stays. It must hold the
    linear's Parameter objects under their names (`weight`, `bias`), so that seeds, checkpoints and placements stay, and
    its `matmul_state` if a `MatmulBackend` has one; it may have more. A model_provider calls this before it returns the
    model: a DistributedDataParallel moves the parameters into buffers. Nothing is communicated, but every rank must
    exchange the same linears. output_layer: also that of an untied output layer, a column-parallel linear without a bias;
    what is exchanged is then its submodule `linear`, and the weight keeps its name. experts: also each `StackedLinear`, whose
    rows come with their counts.

    Raises RuntimeError for a model that is wrapped already, and ValueError for a module without the linear's parameters or
    state, or, where several tensor-parallel ranks share the linear, with parameters that do not say which part a rank has;
    then nothing has been exchanged.
    """
    wrapped = next((name for name, p in chunk.named_parameters() if grad_sink_of(p) is not None), None)
    if wrapped is not None:
        raise RuntimeError(
            f"replace_linears: {wrapped} is in the buffers of a DistributedDataParallel already; exchange linears before "
            "the model is wrapped, as in model_provider"
        )

    kinds = ParallelLinear | StackedLinear if experts else ParallelLinear
    # make all first, so that an error leaves the model as it was
    exchanged: dict[str, nn.Module] = {}
    for name, module in list(chunk.named_modules()):
        linear = module
        if output_layer and isinstance(module, ExchangesLinear):
            linear = module.linear_to_exchange()
        if not isinstance(linear, kinds):
            continue
        new = make(name, linear)
        if new is None or new is linear:
            continue
        own = {**dict(new.named_parameters(recurse=False)), **dict(new.named_children())}
        parameters = [(key, parameter, "parameter") for key, parameter in linear.named_parameters(recurse=False)]
        states = [(key, state, "state") for key, state in linear.named_children()]
        for key, value, what in parameters + states:
            if own.get(key) is not value:
                raise ValueError(
                    f"replace_linears: the {type(new).__name__} in place of {name} must hold its {what} {key} itself, under "
                    f"this name; set self.{key} = linear.{key}"
                )
        if linear.tp.axis.size > 1:
            _check_parts_are_declared(new, name)
        exchanged[name] = new

    for name, new in exchanged.items():
        path, _, attribute = name.rpartition(".")
        before = chunk.get_submodule(name)
        if isinstance(before, ExchangesLinear):
            new.kept_of_linear = ()
            before.exchange_linear(new)
        else:
            new.kept_of_linear = tuple(key for key, _ in before.named_children())
            setattr(chunk.get_submodule(path), attribute, new)
    return list(exchanged)


def _check_parts_are_declared(new: nn.Module, name: str) -> None:
    """Raise ValueError for a parameter that would count as whole on every rank, and may be a part or have partial gradients.

    new: the module in place of the linear `name`.
    """
    for key, parameter in new.named_parameters():
        if placement_of(parameter) is None and not hasattr(parameter, "sequence_parallel"):
            raise ValueError(
                f"replace_linears: {key} of the {type(new).__name__} in place of {name} does not say which part of it a "
                "tensor-parallel rank has; make it by output_parameter, input_parameter or linear.tp.replicated, or set "
                "its sequence_parallel: False if it is whole on every rank, with its whole gradient, True if the gradient "
                "is a partial sum"
            )


def modules_of_linear(module: nn.Module) -> list[nn.Module] | None:
    """Return the submodules that a module in place of a linear has of that linear; None for any other module."""
    names = getattr(module, "kept_of_linear", None)
    return None if names is None else [module.get_submodule(name) for name in names]
