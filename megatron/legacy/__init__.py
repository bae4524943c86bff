"""Megatron's own folder of this name, 0.6 to 0.16, and what its older flat names (`megatron.model`, `megatron.data`)
stand for.

    model    `GPTModel(...)` and `BertModel(...)`, built from the run's settings
    data     `build_train_valid_test_datasets(...)` of GPT and BERT

Each is a thin form of the one implementation in core.
"""
