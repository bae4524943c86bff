"""`MegatronModule` and `Float16Module`; what Megatron's constructors ask of the current mesh."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.ops.cpu_half_precision_matmul import NATIVE
from megatron.core.ops.dropout import DropoutKeys
from megatron.core.parallel.global_state import current
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.transformer_config import model_config


def settings_of(config: Any, **options: Any) -> ModelConfig:
    """Our settings for Megatron's config; inside a run, the run's for what Megatron's has no field for."""
    run = current().run
    return model_config(config, None if run is None else run.config.transformer, **options)


def context_of(ours: ModelConfig, config: Any) -> LayerContext:
    """The context of layers on the current mesh; the layers of a process draw dropout from one set of keys."""
    here = current()
    if here.run is not None:
        return here.run.layer_context
    if here.dropout_keys is None:
        here.dropout_keys = DropoutKeys(here.seed or torch.initial_seed() % 2**31)
    of_tensors = {"device": here.device, "products": here.products or NATIVE, "fills": not here.fills_by_name}
    asked = here.sequence_parallel or getattr(config, "sequence_parallel", False)
    divided = asked and here.mesh["tp"].size > 1
    return LayerContext.on(here.mesh, ours.params_dtype, here.dropout_keys, sequence_parallel=divided, **of_tensors)


class MegatronModule(nn.Module):
    """A module with a config."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Tensor]:
        """The parameters of this rank by name; each knows by its `placement` which part of the whole it is."""
        if sharded_offsets:
            raise NotImplementedError(
                "sharded_offsets: parameters are named by their layer's number here; leave it out"
            )
        return {f"{prefix}{name}": parameter for name, parameter in self.named_parameters()}


class Float16Module(MegatronModule):
    """A module in the half precision of its config: inputs are rounded, outputs are float32."""

    def __init__(self, config: Any, module: nn.Module):
        super().__init__(config)
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        if not (config.fp16 or config.bf16):
            raise ValueError("Float16Module: config has neither fp16 nor bf16; set one")
        self.module = module.to(self.dtype)

    def set_input_tensor(self, input_tensor: Tensor) -> Any:
        return self.module.set_input_tensor(input_tensor)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        round_one = lambda x: _cast(x, self.dtype)  # noqa: E731
        results = self.module(*map(round_one, inputs), **{name: round_one(x) for name, x in options.items()})
        if not getattr(self.module, "post_process", True):
            return results
        of_one = [_cast(x, torch.float32) for x in (results if isinstance(results, tuple) else (results,))]
        return tuple(of_one) if isinstance(results, tuple) else of_one[0]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


__getattr__ = names_of_megatron(__name__)
