"""The layers that models are made of, and their settings.

Every part is built from (config, its layer's number, a `LayerContext`) and looks nothing up.

May import: floors 0 to 2 (`tensor_parallel`, and the type of a boundary). Models, inference and training import it.
To add an attention kernel: a line of `KERNELS` (`kernels`).
To add a layer, an attention or an MLP: pass it as `make_layer`, `make_attention`, `make_mlp`.
To add a setting: a knob of a config in `model_config`; an axis: a field of the context.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".attention": "ParallelAttention",
        ".layer_context": "LayerContext",
        "megatron.core.ops.attention.kernels": "KERNELS Kernel",
        ".mlp": "ParallelMLP",
        ".parallel_transformer": "ParallelTransformer",
        ".transformer_layer": "ParallelTransformerLayer",
        ".model_config": "ModelConfig",
        "megatron.core.classic.layers": "TransformerLayer TransformerLayerSubmodules",
        "megatron.core.classic.modules": "MegatronModule",
        "megatron.core.classic.specs": "ModuleSpec build_module",
        "megatron.core.classic.transformer_config": "TransformerConfig",
    },
)
