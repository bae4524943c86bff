"""The layers of models, and their settings.

    model_config, *_config                                settings: shape, positions, attention, layer (no torch)
    transformer_layer, transformer_block     one layer; the layers of a pipeline stage
    parallel_transformer, numbered_layers    the block's classic name; its list of layers
    attention, cross_attention,              the parts of a layer
    dot_product_attention, mlp, norm,
    qk_norm,
    rotary_angles_and_frequency_scaling
    recompute_without_rng_state,             ways to run a layer with less memory or time
    compile_before_and_after_attention,
    tiled_compute
    transformer_config, spec_utils, module, ...           Megatron's names

Our parts are built from (config, their layer's number, a `LayerContext`). To add an attention kernel: a line of
`KERNELS` in `core/ops/attention/kernels`. To add a layer, pass it as `make_layer`; to add an attention or an MLP, name
it in the layer's `TransformerLayerSubmodules`.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.ops.attention.kernels import KERNELS as KERNELS, Kernel as Kernel
    from megatron.core.transformer.attention import ParallelAttention as ParallelAttention
    from megatron.core.transformer.layer_parallel_context import LayerContext as LayerContext
    from megatron.core.transformer.mlp import ParallelMLP as ParallelMLP
    from megatron.core.transformer.model_config import ModelConfig as ModelConfig
    from megatron.core.transformer.module import MegatronModule as MegatronModule
    from megatron.core.transformer.parallel_transformer import ParallelTransformer as ParallelTransformer
    from megatron.core.transformer.spec_utils import ModuleSpec as ModuleSpec, build_module as build_module
    from megatron.core.transformer.transformer_config import TransformerConfig as TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        ParallelTransformerLayer as ParallelTransformerLayer,
        TransformerLayer as TransformerLayer,
        TransformerLayerSubmodules as TransformerLayerSubmodules,
    )

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".attention": "ParallelAttention",
        ".layer_parallel_context": "LayerContext",
        "megatron.core.ops.attention.kernels": "KERNELS Kernel",
        ".mlp": "ParallelMLP",
        ".parallel_transformer": "ParallelTransformer",
        ".model_config": "ModelConfig",
        ".transformer_layer": "ParallelTransformerLayer TransformerLayer TransformerLayerSubmodules",
        ".module": "MegatronModule",
        ".spec_utils": "ModuleSpec build_module",
        ".transformer_config": "TransformerConfig",
    },
)
