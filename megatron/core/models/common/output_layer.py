"""The output layer: hidden states to scores, sharded over the vocabulary."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from megatron.core.ops.deferred_wgrad import WeightGradStore
from megatron.core.sharding.placement import Constant, Placement
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.tiled_compute import declare_tiles, in_tiles


class LanguageModelHead(nn.Module):
    """x -> x W^T (+ b) for this rank's rows of W: its own weight, or, if tied, the word table passed to forward. Scores
    are then
    multiplied and capped where the config says so.

    shares_table: this stage's embedding holds the same tensor.
    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), tied_weight) -> [s, b, padded vocabulary / t]
    forward(x, tied_weight, labels [s, b], loss) -> [s, b, ..], of loss(scores, labels), tile by tile with `--tiled-loss`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, context: LayerContext, *, shares_table: bool = False):
        super().__init__()
        tp = context.tp
        # A shared table's gradient has two sources on this stage; deferred, they would be added in another order.
        self.tp = replace(tp, weight_grads=WeightGradStore()) if shares_table else tp
        self.weight = self.bias = None
        self.tiles, self.keys = config.tiled_loss, context.keys
        self.multiplier, self.cap = config.logit_multiplier, config.final_logit_softcapping
        rows = config.padded_vocab_size(vocab_size, tp.axis.size) // tp.axis.size
        if config.untie_embeddings_and_output_weights:
            self.weight = tp.parameter(
                (rows, config.hidden_size),
                Placement((vocab_size, config.hidden_size), config.init, shard={tp.axis.name: 0}),
            )
            declare_tiles(self.weight, self.tiles)
        if config.add_output_bias:
            self.bias = tp.parameter((rows,), Placement((vocab_size,), Constant(0.0), shard={tp.axis.name: 0}))

    def forward(
        self,
        x: Tensor,
        tied_weight: Tensor | None = None,
        labels: Tensor | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        weight = tied_weight if self.weight is None else self.weight
        if loss is None:
            return self.scores(x, weight)
        # A tile of x holds some rows of each rank that divides the sequence, and so must a tile of labels: [s/t, t, b].
        ranks = len(labels) // len(x)

        def of_tile(x: Tensor, labels: Tensor) -> Tensor:
            losses = loss(self.scores(x, weight), labels.transpose(0, 1).flatten(0, 1))
            return losses.unflatten(0, (ranks, -1)).transpose(0, 1)

        losses = in_tiles(of_tile, self.tiles, self.keys, x, labels.unflatten(0, (ranks, -1)).transpose(0, 1))
        return losses.transpose(0, 1).flatten(0, 1)

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        scores = self.tp.column_linear(x, weight)
        scores = scores if self.bias is None else scores.add_(self.bias)
        scale = self.multiplier / (self.cap or 1.0)
        scores = scores if scale == 1 else scores.mul_(scale)
        return scores if self.cap is None else scores.tanh_() * self.cap
