"""Checkpoints without frozen parameters (--no-save-frozen): what was trained, and a hash of the base that it was trained on.

save     `model/<parameter>` of trained parameters alone; the state's "frozen" has the number and the hash of the others
load     frozen parameters come from --pretrained-checkpoint, and must have this hash
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.convert import open_any
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.frozen_weights_hash import elements_and_hash
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.sharded_model_and_optimizer_state import sharded_model_state
from megatron.core.parallel.mesh import Mesh
from megatron.core.storage.path_or_url import path_of
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.global_vars import print_rank_0

_MODEL = "model/"

Chunks = Sequence[DistributedDataParallel]


def frozen_names(chunks: Chunks) -> set[str]:
    """Return the names in a checkpoint of this rank's frozen parameters."""
    return {
        f"{_MODEL}{name}"
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
        if not parameter.requires_grad
    }


def frozen_state(chunks: Chunks, mesh: Mesh, device: torch.device | str) -> dict[str, Any]:
    """Return the number of frozen elements of the whole model, and their hash. One all-reduce; every rank must call."""
    names = frozen_names(chunks)
    frozen = {name: local for name, local in sharded_model_state(chunks, mesh).items() if name in names}
    return elements_and_hash(frozen, mesh["world"], device)


def load_base(
    chunks: Chunks,
    parameters: Mapping[str, LocalTensor],
    config: CheckpointConfig,
    saved: Mapping[str, Any],
    source: str,
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Fill the frozen parameters from --pretrained-checkpoint, and check that they are the base of the checkpoint.

    saved: the entry `FROZEN` of the checkpoint's state. source: its flag and folder. Every rank must call. Raises ConfigError, or
    CheckpointError for damage.
    """
    root = config.pretrained_checkpoint
    if root is None:
        raise ConfigError(
            f"{source} holds what was trained alone, without the {saved['elements']:,} frozen weights of its base; give the "
            "base model as --pretrained-checkpoint"
        )
    own = frozen_names(chunks)
    base = open_any(path_of(root), None, mesh["world"], device)
    base.read_into(
        {name: local for name, local in parameters.items() if name in own}, mesh["world"], convert=True, device=device
    )
    now = frozen_state(chunks, mesh, device)
    if now != dict(saved):
        raise ConfigError(
            f"--pretrained-checkpoint {root} is not the base of {source}: its frozen weights are {now['elements']:,} with "
            f"hash {now['hash']}, those of the base were {saved['elements']:,} with hash {saved['hash']}; give the folder that "
            "the run began from, in the same precision"
        )
    print_rank_0(f"loaded the frozen weights from {root}")
