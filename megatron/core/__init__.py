"""Training is made of these parts, each usable without the rest. Names load on first use: pure files need no torch.

    base, storage                                           settings and errors; files
    parallel, sharding                                      ranks and their communication; placement of tensors
    ops, offload, datasets, tokenizers                      tensor operations; memory beside the device's; data
    tensor_parallel, pipeline_parallel, context_parallel    one mechanism each
    distributed, dist_checkpointing                         one mechanism each
    transformer, optimizer, models, inference               built from the mechanisms

The loose files, and the folders whose names Megatron core has, offer Megatron's names with Megatron's arguments. A
package imports from the levels below its own (tests/package_graph.py), and nothing of `megatron.training`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.core.base.lazy_imports import names_of_megatron

if TYPE_CHECKING:
    from megatron.core import parallel_state, parallel_state as mpu, pipeline_parallel, tensor_parallel, utils
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.inference_params import InferenceParams
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.package_info import __package_name__, __shortversion__, __version__
    from megatron.core.timers import Timers

_other = names_of_megatron(__name__)
_MODULES = {
    "mpu": "parallel_state",
    "parallel_state": "parallel_state",
    "pipeline_parallel": "pipeline_parallel",
    "tensor_parallel": "tensor_parallel",
    "utils": "utils",
}
_NAMES = {
    "DistributedDataParallel": "distributed",
    "InferenceParams": "inference_params",
    "ModelParallelConfig": "model_parallel_config",
    "Timers": "timers",
    "is_torch_min_version": "utils",
}
_INFO = (
    "__contact_emails__",
    "__contact_names__",
    "__description__",
    "__download_url__",
    "__homepage__",
    "__keywords__",
    "__license__",
    "__package_name__",
    "__repository_url__",
    "__shortversion__",
    "__version__",
)
__all__ = [
    "DistributedDataParallel",
    "InferenceParams",
    "ModelParallelConfig",
    "Timers",
    "__package_name__",
    "__shortversion__",
    "__version__",
    "mpu",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel",
    "utils",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"megatron.core.{_MODULES[name]}")
    if name in _NAMES:
        return getattr(import_module(f"megatron.core.{_NAMES[name]}"), name)
    if name in _INFO:
        return getattr(import_module("megatron.core.package_info"), name)
    return _other(name)


def __dir__() -> list[str]:
    return sorted({*_MODULES, *_NAMES, *_INFO})
