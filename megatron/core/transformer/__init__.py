"""The layers that models are made of."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ParallelAttention": "attention",
        "ParallelMLP": "mlp",
        "ParallelTransformer": "transformer",
        "ParallelTransformerLayer": "transformer_layer",
        "TransformerConfig": "transformer_config",
    },
)
