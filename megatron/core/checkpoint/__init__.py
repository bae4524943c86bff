"""Checkpoints: raw tensor files and one JSON manifest of boxes, written in one layout and read in any other.

    format.py, folder.py     the manifest of one iteration, and the iterations of a run (no torch)
    local_tensor.py          the part of a tensor that one rank holds
    writing.py               the steps of a save, whoever takes them (no torch)
    shares.py                who writes what several ranks hold
    save.py, load.py         collective: every rank calls
    background.py            a save beside training, by a process of each rank: writer.py, and star.py (both no torch)
    state_dict.py            both for a dict of tensors, for a loop of one's own

Knows tensors by name, and neither models nor optimizers: `training/checkpointing.py` lists the tensors of a run.
May import: floors 0 and 1 (`boxes`, `comm`, `grid`, `mesh`, `placement`, `storage`). Names load on first use, so that
`format` needs no torch.
To add a dtype: an entry of `ITEM_BYTES`.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".format": "CheckpointError",
        ".local_tensor": "LocalTensor placed_tensor",
        ".save": "save_checkpoint",
        ".state_dict": "load_state_dict load_whole_tensors save_state_dict",
        ".load": "Checkpoint open_checkpoint",
    },
)
