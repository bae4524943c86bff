"""The training loop and what top-level scripts need of it. Names are imported when first asked for."""

from importlib import import_module

_SUBMODULE_OF = {
    "get_args": "runtime",
    "get_runtime": "runtime",
    "get_tokenizer": "runtime",
    "initialize_megatron": "initialize",
    "pretrain": "training",
    "print_rank_0": "runtime",
    "print_rank_last": "runtime",
}


def __getattr__(name):
    if name not in _SUBMODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUBMODULE_OF[name]}"), name)


def __dir__():
    return sorted(_SUBMODULE_OF)
