"""Megatron's `WrappedTorchNorm`, `WrappedTorchLayerNorm` and `FusedLayerNorm`, over our norm."""

from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import of_process
from megatron.core.transformer.norm import Norm


class FusedLayerNorm(Norm):
    """The norm of `config.normalization` over the last dimension. forward(x [.., hidden_size]) -> the shape of x"""

    @accepts_defaults_only(sequence_parallel=False, zero_centered_gamma=False)
    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        *,
        normalization: str = "LayerNorm",
        layer_context: LayerContext | None = None,
        settings: ModelConfig | None = None,
    ):
        del persist_layer_norm, normalization  # in Megatron's signature
        model_config, place = of_process(config, layer_context, settings, norm_epsilon=eps)
        super().__init__(model_config, place, hidden_size)
        self.config = config


WrappedTorchNorm = WrappedTorchLayerNorm = FusedLayerNorm

__getattr__ = names_of_megatron(__name__)
