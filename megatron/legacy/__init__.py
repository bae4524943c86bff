"""Provide `megatron.legacy` of Megatron-LM core 0.6 to 0.16, also as its older names `megatron.model` and `megatron.data`.

    model    `GPTModel(...)` and `BertModel(...)`, built from the run's settings
    data     `build_train_valid_test_datasets(...)` of GPT and BERT

Each is a thin wrapper of the one implementation in core.
"""
