"""Checkpoints: raw tensor files and one JSON manifest of boxes, written by one layout and read by any other.

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
