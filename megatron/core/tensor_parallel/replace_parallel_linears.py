"""Linears of a built model are exchanged before it is wrapped: for adapters, and for products of one's own."""

from collections.abc import Callable

from torch import nn

from megatron.core.ops.main_grad_interface import grad_sink_of
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear

ParallelLinear = ColumnParallelLinear | RowParallelLinear
MakeLinear = Callable[[str, ParallelLinear], nn.Module | None]


class ExchangesLinear(nn.Module):
    """A module with a weight of a linear product of its own, such as the output layer: that product may be exchanged."""

    def linear_to_exchange(self) -> ColumnParallelLinear | None:
        """Return the product as a linear; None if the weight is another module's."""
        raise NotImplementedError

    def exchange_linear(self, new: nn.Module) -> None:
        """Compute the product by `new`, which has the linear's forward."""
        raise NotImplementedError


def replace_linears(chunk: nn.Module, make: MakeLinear, *, output_layer: bool = False) -> list[str]:
    """Exchange parallel linears of a model chunk; return the names of those that were exchanged.

    make(name, linear) -> the module in its place, with the same forward; None: the linear stays. It must hold the
    linear's Parameter objects under their names (`weight`, `bias`), so that seeds, checkpoints and placements stay, and
    its `matmul_state` if a `MatmulBackend` has one; it may have more. A model_provider calls this before it returns the
    model: a DistributedDataParallel moves the parameters into buffers. Nothing is communicated, but every rank must
    exchange the same linears. output_layer: also that of an untied output layer, a column-parallel linear without a bias;
    what is exchanged is then its submodule `linear`, and the weight keeps its name.

    Raises RuntimeError for a model that is wrapped already, and ValueError for a module without the linear's parameters or
    state; then nothing has been exchanged.
    """
    wrapped = next((name for name, p in chunk.named_parameters() if grad_sink_of(p) is not None), None)
    if wrapped is not None:
        raise RuntimeError(
            f"replace_linears: {wrapped} is in the buffers of a DistributedDataParallel already; exchange linears before "
            "the model is wrapped, as in model_provider"
        )

    # make all first, so that an error leaves the model as it was
    exchanged: dict[str, nn.Module] = {}
    for name, module in list(chunk.named_modules()):
        linear = module
        if output_layer and isinstance(module, ExchangesLinear):
            linear = module.linear_to_exchange()
        if not isinstance(linear, ParallelLinear):
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


def modules_of_linear(module: nn.Module) -> list[nn.Module] | None:
    """Return the submodules that a module in place of a linear has of that linear; None for any other module."""
    names = getattr(module, "kept_of_linear", None)
    return None if names is None else [module.get_submodule(name) for name in names]
