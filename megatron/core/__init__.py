"""The library below the training loop: layers, parallelism, optimizer, data, checkpoints. It never imports `megatron.training`.

docs/architecture.md says which package may import which. `mpu` is Megatron's name for `parallel_state`.
"""

from importlib import import_module


def __getattr__(name):
    if name == "mpu":
        return import_module("megatron.core.parallel_state")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
