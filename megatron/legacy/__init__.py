"""Provide `megatron.legacy` of Megatron-LM core 0.6 to 0.16.

Its older names `megatron.model` and `megatron.data` are provided too.

    model    `GPTModel(...)` and `BertModel(...)`, built from the run's settings
    data     `build_train_valid_test_datasets(...)` of GPT and BERT

Each is a thin wrapper of the one implementation in core.
"""
