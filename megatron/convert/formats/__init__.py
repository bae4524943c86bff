"""Read files and folders of other projects: names, settings, and positions of tensors.

Runs nothing of a file; needs no torch.

    safetensors_header,                          a Hugging Face folder
    hf_config_and_safetensors_headers
    pickle_as_data, torch_save_tensor_offsets    files of torch.save
    read_torch_dcp_metadata                      folders of torch.distributed.checkpoint
    find_megatron_folder, *megatron*                 checkpoints of Megatron-LM, torch and torch_dist, and their args

A file may be hostile: sizes, offsets and paths are checked before they are used.
"""
