"""Tables of model families that other libraries have, read in both directions.

    config_fields, rope, sliding_window    what keys of a config.json say
    weight_layout                          how their tensors lie in ours (no torch)
    family                                 a family: its fields, a row for each of its tensors
    bert, gpt_like, llama_like, t5         the families; `registry` has all of them by model_type
    config_json                            a config.json as settings of ours, and back

To add a family: a `Family` in a file of its own, and a line in `registry`.
"""
