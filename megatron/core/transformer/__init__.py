"""The layers that models are made of, and their settings.

Every part is built from (config, its layer's number, a `LayerContext`) and looks nothing up. A new attention kernel is a line
in `KERNELS` (`kernels`). Another attention or MLP is handed to `ParallelTransformerLayer`, another layer to the model, as
`make_attention`, `make_mlp`, `make_layer`. A new setting is a knob of one of the configs in `transformer_config`, a new axis a
field of the context. Imported by models, inference and training; imports tensor_parallel, and the type of a boundary.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".attention": "ParallelAttention",
        ".context": "LayerContext",
        ".kernels": "KERNELS Kernel",
        ".mlp": "ParallelMLP",
        ".transformer": "ParallelTransformer",
        ".transformer_layer": "ParallelTransformerLayer",
        ".transformer_config": "TransformerConfig",
    },
)
