"""Checkpoints: raw tensor files and one JSON manifest of boxes, written by one layout and read by any other.

    format.py, folder.py     what lies on disk: the manifest of one iteration, and the iterations of a run (no torch)
    local_tensor.py          what one rank holds of a tensor
    save.py, load.py         all ranks together

Knows tensors by name and nothing of models or optimizers: `training/checkpointing.py` says which tensors there are. A new dtype
is an entry of `ITEM_BYTES`.

Names load on first use, so that `format`, which says what lies on disk, can be imported without torch.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".format": "CheckpointError",
        ".local_tensor": "LocalTensor",
        ".save": "save_checkpoint",
        ".load": "Checkpoint open_checkpoint",
    },
)
