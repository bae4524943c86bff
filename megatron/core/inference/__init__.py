"""Text from a trained model. Names are imported when first asked for."""

from importlib import import_module

# The function `generate` is not here: the submodule of that name would shadow it as soon as anything imports it.
_SUBMODULE_OF = {
    "SamplingConfig": "sampling",
    "chooser": "sampling",
    "distribution": "sampling",
    "greedy": "sampling",
    "keep_top_k": "sampling",
    "keep_top_p": "sampling",
    "sample": "sampling",
    "load_gpt": "load",
}


def __getattr__(name):
    if name not in _SUBMODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUBMODULE_OF[name]}"), name)


def __dir__():
    return sorted(_SUBMODULE_OF)
