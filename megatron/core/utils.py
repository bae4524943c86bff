"""Megatron's small helpers: exact division, initial values, wrapped models (Megatron: core/utils.py)."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.sharding.placement import Normal


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ValueError unless the denominator divides the numerator."""
    if numerator % denominator:
        raise ValueError(f"{numerator} must be divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the exact quotient; ValueError if there is none."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def init_method_normal(sigma: float) -> Normal:
    """Return the distribution N(0, sigma^2) of initial weights.

    It is a description, not a function of a tensor, so that a rank draws only its shard.
    """
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """Return the distribution of a block's output matrix: its deviation is sigma / sqrt(multiplier * num_layers).

    The residual stream sums so many outputs. multiplier: the outputs of a layer, attention and MLP.
    """
    return Normal(sigma / math.sqrt(multiplier * num_layers))


def unwrap_model(model: Any, module_instances: tuple[type, ...] | None = None) -> Any:
    """Return the model, or each of a list of models, without its data-parallel wrapper."""
    if isinstance(model, list | tuple):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    wrappers = module_instances or nn.Module
    while isinstance(model, wrappers) and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


@accepts_defaults_only("attr", allow_none=True)
def get_attr_wrapped_model(model: Any, attr: str, return_model_obj: bool = False) -> Any:
    """Return an attribute of the model inside its wrappers, or that model. AttributeError if it lacks the attribute."""
    model = unwrap_model(model)
    value = getattr(model, attr)
    return model if return_model_obj else value


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether torch is this version, or a later one."""
    installed = TorchVersion(torch.__version__)
    return installed >= version if check_equality else installed > version


def get_torch_version() -> TorchVersion:
    """Return the version of torch, which compares with texts such as "2.1.0"."""
    return TorchVersion(torch.__version__)


def get_te_version() -> TorchVersion:
    """Return 0.0.0: Transformer Engine is not used, installed or not."""
    return TorchVersion("0.0.0")


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Return False: Transformer Engine is not used, installed or not."""
    del version, check_equality
    return False


class StragglerDetector:
    """Megatron's detector as scripts use it: `with stimer(bdata=True):` around the batch, `with stimer:` around the model.

    It measures nothing. A run's slow ranks are found by the time that each waits for others (--log-straggler), which
    needs no marks in a script.
    """

    enabled = False

    def configure(self, *_: Any, **__: Any) -> None:
        """Do nothing: --log-straggler configures the run's own detector."""

    def __call__(self, bdata: bool = False) -> "StragglerDetector":
        del bdata
        return self

    def __enter__(self) -> "StragglerDetector":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        """Do nothing, as `with` does."""

    def stop(self) -> None:
        """Do nothing, as `with` does."""

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Return False: nothing was reported."""
        del total_flops, log_interval
        return False


def get_model_config(model: Any) -> Any:
    """Return the config of the model inside its wrappers."""
    return get_attr_wrapped_model(model, "config")


if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import (
        make_sharded_tensor_for_checkpoint as make_sharded_tensor_for_checkpoint,
        make_tp_sharded_tensor_for_checkpoint as make_tp_sharded_tensor_for_checkpoint,
    )
    from megatron.core.parallel_state import GlobalMemoryBuffer as GlobalMemoryBuffer
    from megatron.core.tensor_parallel.batch_on_this_rank import (
        flatten_batch_for_packed_sequences as flatten_batch_for_packed_sequences,
        get_batch_on_this_cp_rank as get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank as get_batch_on_this_tp_rank,
    )

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.dist_checkpointing.mapping": (
            "make_sharded_tensor_for_checkpoint make_tp_sharded_tensor_for_checkpoint"
        ),
        "megatron.core.parallel_state": "GlobalMemoryBuffer",
        "megatron.core.tensor_parallel.batch_on_this_rank": (
            "flatten_batch_for_packed_sequences get_batch_on_this_cp_rank get_batch_on_this_tp_rank"
        ),
    },
)
