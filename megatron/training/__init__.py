"""The training loop and what top-level scripts need of it. Names are imported when first asked for."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "build_train_valid_test_data_iterators": "build",
        "get_args": "runtime",
        "get_model": "build",
        "get_runtime": "runtime",
        "get_timers": "runtime",
        "get_tokenizer": "runtime",
        "initialize_megatron": "initialize",
        "is_last_rank": "runtime",
        "pretrain": "training",
        "print_rank_0": "runtime",
        "print_rank_last": "runtime",
        "setup_model_and_optimizer": "build",
    },
)
