"""Megatron's `MegatronModule` and `Float16Module`, and what its constructors read from the current mesh."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.dist_checkpointing.manifest_format import BUFFER
from megatron.core.dist_checkpointing.sharded_module_buffers import BufferInModel, sharded_buffers
from megatron.core.ops.cpu_half_precision_matmul import NATIVE
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.parallel.global_state import get_global_state
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.buffer_placement_and_sync import BufferPlacement, persistent_buffers
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.transformer_config import model_config


def settings_of(config: Any, **options: Any) -> ModelConfig:
    """Return our ModelConfig for Megatron's config. Inside a run, fields that Megatron lacks have the run's values.

    options: further fields of ModelConfig, by name.
    """
    run = get_global_state().run
    return model_config(config, None if run is None else run.config.transformer, **options)


def context_of(model_config: ModelConfig, config: Any) -> LayerContext:
    """Return the context of layers on the current mesh. All layers of a process draw dropout from one set of keys."""
    state = get_global_state()
    if state.run is not None:
        return state.run.layer_context
    if state.dropout_keys is None:
        state.dropout_keys = SampleDropoutKeys(state.seed or torch.initial_seed() % 2**31)
    sequence_parallel = state.sequence_parallel or getattr(config, "sequence_parallel", False)
    return LayerContext.from_mesh(
        state.mesh,
        model_config.params_dtype,
        state.dropout_keys,
        sequence_parallel=sequence_parallel and state.mesh["tp"].size > 1,
        device=state.device,
        matmul_modes=state.matmul_modes or NATIVE,
        fills=not state.defers_initialization,
    )


def mesh_of_process() -> Mesh:
    """Return the mesh of this process, for modules with Megatron's arguments, which carry none."""
    return get_global_state().mesh


def of_process(
    config: Any, layer_context: LayerContext | None = None, settings: ModelConfig | None = None, **options: Any
) -> tuple[ModelConfig, LayerContext]:
    """Return our ModelConfig for a config, and the `layer_context`, or the process's where none is given.

    Only here does a layer, or a part of one, ask the process, when it is built. A `ModelConfig` (as config or as
    settings, our form of it) and a `layer_context` are taken as they are, and nothing is asked. options: further fields
    of ModelConfig, by name.
    """
    if settings is None and isinstance(config, ModelConfig):
        settings = config
    if settings is None:
        settings = settings_of(config, **options)
    elif options:
        settings = replace(settings, **options)
    return settings, context_of(settings, config) if layer_context is None else layer_context


class MegatronModule(nn.Module):
    """The base of Megatron's modules: a module with a config.

    buffer_placements: the sharding and the agreement of its persistent buffers that are not "copy" and whole, by name.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.buffer_placements: dict[str, BufferPlacement] = {}

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        """Return the module's `state_dict`: name -> tensor, each of this rank's shape."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Tensor | LocalTensor]:
        """Return this rank's parameters and persistent buffers by name, each of its local shape.

        `placement` of each parameter says which part of the whole tensor it is, a buffer is a `LocalTensor`. Raises
        NotImplementedError for sharded_offsets.
        """
        if sharded_offsets:
            raise NotImplementedError(
                "sharded_offsets is not built: parameters are named by the number of their layer; leave it out"
            )
        state: dict[str, Tensor | LocalTensor] = {f"{prefix}{name}": p for name, p in self.named_parameters()}
        buffers = {buffer.name: BufferInModel([0], "", []) for buffer in persistent_buffers(self)}
        if buffers:
            for name, local in sharded_buffers({0: self}, mesh_of_process(), buffers).items():
                state[f"{prefix}{name.removeprefix(BUFFER)}"] = local
        return state


class Float16Module(MegatronModule):
    """A module in the half precision of its config: it rounds inputs, and returns float32 on the last stage.

    forward(inputs of any shapes) -> the module's outputs, in their shapes. Building it raises ValueError if the config
    has neither fp16 nor bf16.
    """

    def __init__(self, config: Any, module: nn.Module):
        super().__init__(config)
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        if not (config.fp16 or config.bf16):
            raise ValueError("Float16Module: config must have fp16 or bf16 set, and has neither")
        self.module = module.to(self.dtype)

    def set_input_tensor(self, input_tensor: Tensor) -> Any:
        """Set the module's input, such as the hidden states [s, b, h] of the previous stage."""
        return self.module.set_input_tensor(input_tensor)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        half_inputs = [_cast(x, self.dtype) for x in inputs]
        half_options = {name: _cast(x, self.dtype) for name, x in options.items()}
        outputs = self.module(*half_inputs, **half_options)
        if not getattr(self.module, "post_process", True):
            return outputs  # the next stage reads half precision
        if isinstance(outputs, tuple):
            return tuple(_cast(x, torch.float32) for x in outputs)
        return _cast(outputs, torch.float32)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Return x, of any shape, in this dtype if it is a floating-point tensor; else x itself."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


__getattr__ = names_of_megatron(__name__)
