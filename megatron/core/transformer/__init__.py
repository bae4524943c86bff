"""The layers that models are made of."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".attention": "ParallelAttention",
        ".mlp": "ParallelMLP",
        ".transformer": "ParallelTransformer",
        ".transformer_layer": "ParallelTransformerLayer",
        ".transformer_config": "TransformerConfig",
    },
)
