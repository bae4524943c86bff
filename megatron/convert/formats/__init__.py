"""Files and folders of other projects: what lies where in them. Nothing of a file is run, and no torch is needed.

    safetensors.py, hf_folder.py       a Hugging Face folder
    safe_unpickle.py, torch_file.py     what torch.save has written
    torch_dcp.py                             folders of torch.distributed.checkpoint
    megatron_*.py                      checkpoints of Megatron-LM, classic and torch_dist, and their args

A file may be hostile: sizes, offsets and paths are checked before they are used.
May import: `checkpoint.format`, `storage`, `families` (names of our tensors, operations).
To add a format: a reader that gives `TensorInFile`s, and in the room above what maps them (`mapped_*.py`).
"""
