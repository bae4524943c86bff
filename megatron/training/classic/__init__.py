"""What Megatron's scripts build from, with Megatron's arguments: models and data sets of its releases 2.5 to 23.04.

    flat_models   `megatron.model.GPTModel(...)` and `BertModel`
    flat_data     `build_train_valid_test_datasets(...)`

Each is a thin form of the one implementation in core. `megatron.core.classic` holds what needs no run.

May import: everything. Nothing imports it but files that re-export, which stand under Megatron's import paths.
To add a name: define it here, list it in the file of Megatron's path and in `tests/pure/test_names.py`.
"""
