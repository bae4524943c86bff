"""Megatron-style pretraining. The names that scripts of Megatron 2.x import from here are found where they live now."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "get_args": "training.runtime",
        "get_timers": "training.runtime",
        "get_tokenizer": "training.runtime",
        "is_last_rank": "training.runtime",
        "mpu": "core",
        "print_rank_0": "training.runtime",
        "print_rank_last": "training.runtime",
    },
)
