"""Read files and folders of other projects: names, settings, and positions of tensors.

Runs nothing of a file; needs no torch.

    safetensors_header, read_hf_config_and_headers   a Hugging Face folder
    pickle_as_data, read_torch_file                  files of torch.save
    read_torch_dcp_metadata                          folders of torch.distributed.checkpoint
    find_megatron_folder, *megatron*                 checkpoints of Megatron-LM, torch and torch_dist, and their args

A file may be hostile: sizes, offsets and paths are checked before they are used.
"""
