"""Tables of Hugging Face model families, which serve reading and writing.

    hf_family_fields_and_param_mappings     the table of a family: fields of its config.json, a mapping for each
                                            parameter
    config_fields, rope, sliding_window     the fields: keys of a config.json <-> our settings
    strided_views_of_hf_weights             the operations of mappings: tensors of a folder <-> our tensors (no torch)
    bert, gpt2_neox_phi_starcoder2,         the families; `registry` has all of them by model_type
    llama_like,
    mixtral_qwen_moe_olmoe_gpt_oss, t5
    read_and_write_hf_config                a full config.json <-> our settings

To add a family: a `Family` in a file of its own, and a line in `registry`.
"""
