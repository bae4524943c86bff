"""Megatron's `dist_checkpointing.save` and `load`, over our checkpoints (docs/checkpoint_format.md)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.dist_checkpointing.checkpoint_folder import saved_iterations
from megatron.core.dist_checkpointing.load_sharded import open_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.save_load_state_dict import load_state_dict, load_whole_tensors, save_state_dict
from megatron.core.parallel.global_state import get_global_state
from megatron.core.storage.path_or_url import path_of


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the data of its ShardedObjects instead of them."""
    plain = {}
    for name, value in state.items():
        if isinstance(value, ShardedObject):
            value = value.data
        if isinstance(value, dict):
            value = _plain(value)
        plain[name] = value
    return plain


def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable | None = None,
    content_metadata: dict | None = None,
) -> None:
    """Save tensors, and plain JSON values beside them, below `checkpoint_dir`. Every rank must call.

    Tensors have their shapes on this rank; a `ShardedTensor` says its part of the global one. Raises CheckpointError,
    and NotImplementedError with `async_sharded_save`.
    """
    del sharded_strategy, common_strategy, validate_access_integrity, preprocess_common_before_consistancy_check
    if async_sharded_save:
        raise NotImplementedError(
            "async_sharded_save is not built: a save returns after everything is written; leave it out"
        )
    state = _plain(sharded_state_dict)
    if content_metadata is not None:
        state["content_metadata"] = content_metadata
    save_state_dict(checkpoint_dir, state, get_global_state().mesh, get_global_state().device)


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = None,
) -> dict[str, Any]:
    """Load the tensors of `sharded_state_dict` from any layout.

    Return them with the JSON values that were saved beside them. Every rank must call. Tensors are filled in place, in
    their shapes on this rank. Raises CheckpointError, also for one that the checkpoint lacks, whatever `strict`.
    """
    del sharded_strategy, common_strategy, validate_access_integrity, strict
    return load_state_dict(
        checkpoint_dir, _plain(sharded_state_dict), get_global_state().mesh, get_global_state().device
    )


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Return the JSON values that were saved beside tensors. Any rank may call alone."""
    return open_checkpoint(checkpoint_dir).state


def load_content_metadata(
    checkpoint_dir: str | None = None, *, preloaded_state_dict: dict[str, Any] | None = None
) -> dict | None:
    """Return the `content_metadata` that `save` got. Any rank may call alone."""
    state = load_common_state_dict(checkpoint_dir) if preloaded_state_dict is None else preloaded_state_dict
    return state.get("content_metadata")


def load_plain_tensors(checkpoint_dir: str) -> dict[str, Tensor]:
    """Return all tensors, unsharded, [global shape], on the CPU. Any rank may call alone."""
    return load_whole_tensors(checkpoint_dir)


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Return whether there is a checkpoint that `load` can read."""
    return bool(saved_iterations(path_of(checkpoint_dir)))


__getattr__ = names_of_megatron(__name__)
