"""Initial values that follow from other weights (`InitializesFromWeights`), set once a run has its weights."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.sync_and_gather_params import FullParameters
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.parallel import collectives
from megatron.core.sharding.initial_values import InitializesFromWeights
from megatron.training.checkpointing.frozen_weights import frozen_state
from megatron.training.global_vars import Runtime


@torch.no_grad()
def initialize_from_weights(
    runtime: Runtime,
    chunks: Sequence[DistributedDataParallel],
    optimizer: FlatOptimizer | None,
    drawn: Collection[str] | None = None,
) -> None:
    """Call `initialize_from_weights` of each module that has a drawn value. Every rank must call.

    drawn: names of the parameters that no checkpoint has filled, the same on all ranks; None: all. optimizer: its masters
    follow; None: there is none yet. Raises ConfigError if a frozen weight changes in a run that does not save it.
    """
    mesh = runtime.mesh
    modules: list[tuple[InitializesFromWeights, dict[str, nn.Parameter]]] = []  # each with its parameters by name
    for chunk in chunks:
        names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
        for module in chunk.module.modules():
            if not isinstance(module, InitializesFromWeights):
                continue
            parameters = {names[id(parameter)]: parameter for parameter in _parameters_of(module)}
            if drawn is None or not parameters.keys().isdisjoint(drawn):
                modules.append((module, parameters))

    # a base that is not saved must be loadable again, as it is
    device = runtime.device.torch_device
    before = None
    if not runtime.config.checkpoint.save_frozen:
        ranks_with_modules = torch.tensor([bool(modules)], dtype=torch.int64, device=device)
        if collectives.all_reduce(ranks_with_modules, mesh["world"]).item():
            before = frozen_state(chunks, mesh, device)

    for module, parameters in modules:
        with FullParameters(parameters.values(), keeps_own=True):
            module.initialize_from_weights()
            for parameter in parameters.values():  # another kind of processor may have rounded otherwise
                collectives.broadcast(parameter.data, mesh.grad_axes(parameter.placement.reduce_over).reduce)
        if optimizer is not None:
            optimizer.reload_masters(parameters)

    if before is not None and frozen_state(chunks, mesh, device) != before:
        raise ConfigError(
            "--no-save-frozen: a module's initialize_from_weights has changed frozen weights, so that the base no longer has "
            "them; leave the flag out, or keep the difference in a parameter or buffer of the module"
        )


def _parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's parameters, and a weight that it shares with the module around it: the output layer's."""
    yield from module.parameters()
    yield from (value for value in vars(module).values() if isinstance(value, nn.Parameter))
