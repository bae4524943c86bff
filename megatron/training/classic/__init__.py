"""What Megatron's scripts build from, with Megatron's arguments: models, data sets, batches, of its releases 2.5 to core 0.16.

    flat_models, core_models   `megatron.model.GPTModel(...)`; `megatron.core.models.gpt.GPTModel(config=, ...)` and layer specs
    flat_data, core_data       `build_train_valid_test_datasets(...)`; `BlendedMegatronDatasetBuilder` and its configs
    batches                    `get_batch_on_this_tp_rank` and its kin

Each is a thin form of the one implementation in core. `megatron.core.classic` holds what needs no run.

May import: everything. Nothing imports it but files that re-export, which stand under Megatron's import paths.
To add a name: define it here, list it in the file of Megatron's path and in `tests/pure/test_names.py`.
"""
