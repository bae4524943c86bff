"""Files and folders of other projects: what lies where in them. Nothing of a file is run, and no torch is needed.

    safetensors, read_hf_folder           a Hugging Face folder
    pickle_as_data, read_torch_file        what torch.save has written
    read_torch_dcp                        folders of torch.distributed.checkpoint
    megatron_*                       checkpoints of Megatron-LM, torch and torch_dist, and their args

A file may be hostile: sizes, offsets and paths are checked before they are used.
"""
