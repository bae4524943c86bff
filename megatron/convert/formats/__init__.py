"""Files and folders of other projects: what lies where in them. Nothing of a file is run, and no torch is needed.

    safetensors, hf_folder           a Hugging Face folder
    safe_unpickle, torch_file        what torch.save has written
    torch_dcp                        folders of torch.distributed.checkpoint
    megatron_*                       checkpoints of Megatron-LM, torch and torch_dist, and their args

A file may be hostile: sizes, offsets and paths are checked before they are used.
"""
