"""Megatron's `dist_checkpointing.save` and `load`, over our checkpoints (docs/checkpoint_format.md)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.dist_checkpointing.checkpoint_folder import saved_iterations
from megatron.core.dist_checkpointing.load_sharded import open_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_io import load_state_dict, load_whole_tensors, save_state_dict
from megatron.core.parallel.global_state import get_global_state
from megatron.core.storage.paths import path_of


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the values of its objects."""
    values = {name: one.data if isinstance(one, ShardedObject) else one for name, one in state.items()}
    return {name: _plain(one) if isinstance(one, dict) else one for name, one in values.items()}


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
    """Write tensors, and what else is plain JSON, below `checkpoint_dir`. Every rank must call."""
    del sharded_strategy, common_strategy, validate_access_integrity, preprocess_common_before_consistancy_check
    if async_sharded_save:
        raise NotImplementedError("async_sharded_save: a save returns when all is written; leave it out")
    about = {} if content_metadata is None else {"content_metadata": content_metadata}
    save_state_dict(
        checkpoint_dir, {**_plain(sharded_state_dict), **about}, get_global_state().mesh, get_global_state().device
    )


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = None,
) -> dict[str, Any]:
    """The same names with the values that were saved, in any layout, and what was saved beside tensors. Every rank must
    call.

    Tensors of `sharded_state_dict` are filled in place. One that is missing in the checkpoint is an error, whatever
    `strict`.
    """
    del sharded_strategy, common_strategy, validate_access_integrity, strict
    return load_state_dict(
        checkpoint_dir, _plain(sharded_state_dict), get_global_state().mesh, get_global_state().device
    )


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """What was saved beside tensors. Any rank may call alone."""
    return open_checkpoint(checkpoint_dir).state


def load_content_metadata(
    checkpoint_dir: str | None = None, *, preloaded_state_dict: dict[str, Any] | None = None
) -> dict | None:
    """What `save` was given as `content_metadata`. Any rank may call alone."""
    state = load_common_state_dict(checkpoint_dir) if preloaded_state_dict is None else preloaded_state_dict
    return state.get("content_metadata")


def load_plain_tensors(checkpoint_dir: str) -> dict[str, Tensor]:
    """All tensors, whole, on the CPU. Any rank may call alone."""
    return load_whole_tensors(checkpoint_dir)


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Whether there is a checkpoint that `load` reads."""
    return bool(saved_iterations(path_of(checkpoint_dir)))


__getattr__ = names_of_megatron(__name__)
