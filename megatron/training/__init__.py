"""The training loop, and the functions that top-level scripts import. Names are imported on first use."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".build": "build_train_valid_test_data_iterators get_model setup_model_and_optimizer",
        ".runtime": "get_args get_runtime get_timers get_tokenizer is_last_rank print_rank_0 print_rank_last",
        ".initialize": "initialize_megatron",
        ".training": "pretrain",
    },
)
