"""Import path of Megatron core."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"megatron.core.classic.layers": "get_gpt_layer_local_spec get_gpt_layer_with_transformer_engine_spec"}
)
