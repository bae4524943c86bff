"""Checkpoints: raw tensor files and one JSON manifest of boxes, written in one layout and read in any other.

    manifest_format, checkpoint_folder          the manifest of one iteration; the iterations of a run (no torch)
    local_tensor                                one rank's part of a tensor
    write_and_publish                           the steps of a save, whichever processes take them (no torch)
    publish_by_rename_and_cleanup,              how its files become a checkpoint (no torch)
    object_store_commit
    write_balance                               which of the ranks that hold a copy writes it
    save_sharded, load_sharded                  save and load; every rank must call
    async_snapshot_to_writer_process            a save beside training, by a process of each rank
    writer_process, sockets_between_writers     that process, and its messages (no torch)
    save_load_state_dict                        save and load of a dict of tensors, for a training loop of one's own
    retention, unsaved_buffers_in_checkpoint    deleting older checkpoints; buffers that a checkpoint lacks
    mapping, serialization                      Megatron's ShardedTensor, save and load over these

Tensors are known by name; models and optimizers are not known here: `training/checkpointing/save_and_load_run_state.py`
lists the tensors of a run. Names are imported on first use, so that `manifest_format` needs no torch. To add a dtype:
an entry of `ITEM_BYTES`.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.load_sharded import (
        Checkpoint as Checkpoint,
        open_checkpoint as open_checkpoint,
    )
    from megatron.core.dist_checkpointing.local_tensor import LocalTensor as LocalTensor, placed_tensor as placed_tensor
    from megatron.core.dist_checkpointing.manifest_format import CheckpointError as CheckpointError
    from megatron.core.dist_checkpointing.mapping import ShardedObject as ShardedObject, ShardedTensor as ShardedTensor
    from megatron.core.dist_checkpointing.save_load_state_dict import (
        load_state_dict as load_state_dict,
        load_whole_tensors as load_whole_tensors,
        save_state_dict as save_state_dict,
    )
    from megatron.core.dist_checkpointing.save_sharded import save_checkpoint as save_checkpoint
    from megatron.core.dist_checkpointing.serialization import (
        check_is_distributed_checkpoint as check_is_distributed_checkpoint,
        load as load,
        load_common_state_dict as load_common_state_dict,
        load_content_metadata as load_content_metadata,
        load_plain_tensors as load_plain_tensors,
        save as save,
    )

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".manifest_format": "CheckpointError",
        ".local_tensor": "LocalTensor placed_tensor",
        ".save_sharded": "save_checkpoint",
        ".save_load_state_dict": "load_state_dict load_whole_tensors save_state_dict",
        ".load_sharded": "Checkpoint open_checkpoint",
        ".mapping": "ShardedObject ShardedTensor",
        ".serialization": (
            "check_is_distributed_checkpoint load load_common_state_dict load_content_metadata load_plain_tensors save"
        ),
    },
)
