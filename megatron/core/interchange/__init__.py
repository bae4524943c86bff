"""Exchange with other projects, as data: their folders read as they lie, and written back, by one table of rows a family.

    safetensors.py, hf_folder.py   what lies in a folder, checked (no torch)
    inert_pickle.py, torch_file.py what torch.save has written, read without running it (no torch)
    dcp.py                         folders of torch.distributed.checkpoint, likewise (no torch)
    megatron_*.py                  checkpoints of Megatron-LM, classic and torch_dist, and their args (no torch)
    operations.py                  how their tensors lie in ours, the same list for both directions (no torch)
    fields.py, rope.py, windows.py what keys of a config.json say
    family.py, *_like.py           the tables: fields of config.json, names of tensors
    titan.py                       checkpoints of torchtitan (no torch)
    strided.py, mapped*.py, opened.py    a folder as a checkpoint that any layout reads

May import: floors 0 to 3 (`checkpoint`, `transformer.model_config`). Names load on first use.
To add a family: a table of its own, and a line in `FAMILIES`; a fork does it before it calls `pretrain`.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".copied": "copy_checkpoint",
        ".families": "FAMILIES",
        ".family": "Family Row",
        ".megatron_folder": "unreadable",
        ".opened": "described_by is_foreign open_any open_foreign settings_in",
        ".written": "write_hf_folder",
    },
)
