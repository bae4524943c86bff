"""Tables of model families that other libraries have: read in both directions, so that what is read can be written.

    config_fields.py, rope.py, sliding_window.py     what keys of a config.json say
    weight_layout.py                      how their tensors lie in ours (no torch)
    family.py, *_like.py, registry.py     a family: its fields, a row for each of its tensors; and all of them
    config_json.py                     a config.json as settings of ours, and back

May import: `transformer.model_config`, and nothing of the files (`formats`) or folders that hold a model.
To add a family: a `Family` in a file of its own, and a line in `registry.py`.
"""
