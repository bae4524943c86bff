"""A whole model in one process, from a checkpoint that any layout wrote."""

import torch

from megatron.core.checkpoint import Checkpoint, LocalTensor
from megatron.core.config import ConfigError
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import Mesh, build_mesh, grid_for
from megatron.core.placement import pieces
from megatron.core.random import DropoutKeys
from megatron.core.tensor_parallel.layers import TensorParallel
from megatron.core.transformer.transformer_config import TransformerConfig

_PARAMETERS = "model/"  # what precedes a parameter's name in a checkpoint


def load_gpt(
    checkpoint: Checkpoint,
    config: TransformerConfig,
    *,
    vocab_size: int,
    positions: int,
    device: torch.device | str = "cpu",
) -> GPTModel:
    """The GPT of `config` with the checkpoint's weights, in evaluation mode. Raises ConfigError or CheckpointError.

    Only the weights are read, not the optimizer's state. It uses neither torch.distributed nor the registry of groups.
    """
    mesh = lone_mesh()
    model = GPTModel(
        config,
        vocab_size=vocab_size,
        positions=positions,
        layers=range(config.num_layers),
        tp=TensorParallel(mesh["tp"], dtype=config.params_dtype, device=device),
        keys=DropoutKeys(seed=0),  # never asked: there is no dropout in evaluation mode
    )
    wanted = {}
    for name, parameter in model.named_parameters():
        parameter.data.zero_()  # padding, which no checkpoint holds
        placement = parameter.placement
        boxes = pieces(placement, tuple(parameter.shape), mesh)
        wanted[_PARAMETERS + name] = LocalTensor(parameter.data, placement.shape, boxes, is_writer=True)
    _check_same_parameters(checkpoint, set(wanted))
    checkpoint.read_into(wanted, convert=True)
    return model.eval()


def lone_mesh() -> Mesh:
    """The mesh of a process by itself, whatever launched it."""

    def no_group(name: str, ranks: tuple[int, ...]) -> None:
        raise AssertionError(f"axis {name} of a lone process has ranks {ranks}")

    grid = grid_for(1, tensor=1, pipeline=1)
    return build_mesh(grid, 0, no_group)


def _check_same_parameters(checkpoint: Checkpoint, wanted: set[str]) -> None:
    """A model that lacks some of the saved parameters would compute something else."""
    saved = {name for name in checkpoint.names if name.startswith(_PARAMETERS)}
    if saved == wanted:
        return
    differences = [
        f"{what}: {', '.join(sorted(names)[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in (("only in the checkpoint", saved - wanted), ("only in the model", wanted - saved))
        if names
    ]
    raise ConfigError(
        f"{checkpoint.folder} does not hold a GPT of its own settings; parameters {'; '.join(differences)}; "
        "was it written by another kind of model?"
    )
