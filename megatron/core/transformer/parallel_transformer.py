"""The layers of one pipeline stage by their classic name, `ParallelTransformer`."""

from collections.abc import Iterable

from torch import Tensor

from megatron.core.ops.attention.document_and_window_masks import Mask
from megatron.core.ops.attention.kv_cache import AttentionCache
from megatron.core.transformer.layer_parallel_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


class ParallelTransformer(TransformerBlock):
    """Run the layers numbered `layers` (from 0, over the whole model) and, with `post_process`, the final norm.

    It is the `TransformerBlock`, built from (config, layers, context). `make_layer(config, i, context)` builds layer i;
    a fork passes its own.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, cache, position_ids [b, s]) -> the same shape.
    mask: a `Mask`; a tensor is bool [b or 1, 1, s, s], True where masked. cache, position_ids: `inference_context` and
    `position_ids` of the block. All ranks of this stage in one replica must call.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int],
        context: LayerContext,
        *,
        post_process: bool = True,
        make_layer: MakePart = ParallelTransformerLayer,
    ):
        super().__init__(config, post_process=post_process, layers=layers, layer_context=context, make_layer=make_layer)

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Mask = None, cache: AttentionCache | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return super().forward(x, mask, inference_context=cache, position_ids=position_ids)
