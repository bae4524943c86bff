"""The training loop and what top-level scripts need of it. Names are imported when first asked for."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "get_args": "runtime",
        "get_runtime": "runtime",
        "get_timers": "runtime",
        "get_tokenizer": "runtime",
        "initialize_megatron": "initialize",
        "pretrain": "training",
        "print_rank_0": "runtime",
        "print_rank_last": "runtime",
    },
)
