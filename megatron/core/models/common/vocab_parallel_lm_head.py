"""The output layer: from hidden states to logits, sharded over the vocabulary."""

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from megatron.core.ops.count_flops_by_module import Flops, LayerInput
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.sharding.placement import Constant, Placement
from megatron.core.tensor_parallel.exchange_parallel_linears_for_adapters import ExchangesLinear
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.tiled_compute import declare_tiled_use, run_tiled


class LanguageModelHead(ExchangesLinear):
    """Compute logits x W^T (+ b) for this rank's rows of W, then multiply and cap them where the config says so.

    W is the head's own weight or, if tied, the embedding weight passed to forward, [padded vocabulary / t, h].
    shares_embedding_weight: this stage's embedding holds the same tensor. Every rank of tp must call.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), tied_weight) -> [s, b, padded vocabulary / t]
    forward(x, tied_weight, labels [s, b], loss) -> loss(logits, labels) [s, b, ..], tile by tile with `--tiled-loss`
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, context: LayerContext, *, shares_embedding_weight: bool = False
    ):
        super().__init__()
        tp = context.tp
        # The gradient of a shared weight has two sources on this stage; deferred, they would be added in another order.
        self.tp = replace(tp, weight_grads=WeightGradStore()) if shares_embedding_weight else tp
        self.weight = None
        self.bias = None
        self.linear: nn.Module | None = None  # in place of the product, if a script has exchanged it
        self.tiles = config.tiled_loss
        self.keys = context.keys
        self.multiplier = config.logit_multiplier
        self.softcap = config.final_logit_softcapping
        rows = config.padded_vocab_size(vocab_size, tp.axis.size) // tp.axis.size
        weight_placement = Placement((vocab_size, config.hidden_size), config.init, shard={tp.axis.name: 0})
        self.global_shape = weight_placement.shape  # of the weight, without padding: [vocabulary, h]
        # of the product; a tied weight is the embedding's
        self.matmul_state = tp.matmul_state(weight_placement, (rows, config.hidden_size))
        if config.untie_embeddings_and_output_weights:
            self.weight = tp.parameter((rows, config.hidden_size), weight_placement)
            declare_tiled_use(self.weight, self.tiles)
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
            return self.logits(x, weight)

        # Under sequence parallelism a tile of x gives the logits of some rows of each rank's part of the sequence. A
        # tile of labels must have the same rows, so labels are viewed as [t, s/t, b] and tiled along dimension 1.
        ranks = len(labels) // len(x)

        def tile_losses(x: Tensor, labels: Tensor) -> Tensor:
            labels = labels.transpose(0, 1).flatten(0, 1)  # [rows, t, b] -> [t rows, b]
            losses = loss(self.logits(x, weight), labels)  # [t rows, b, ..]
            return losses.unflatten(0, (ranks, -1)).transpose(0, 1)  # [rows, t, b, ..]

        labels = labels.unflatten(0, (ranks, -1)).transpose(0, 1)  # [s, b] -> [s/t, t, b]
        losses = run_tiled(tile_losses, self.tiles, self.keys, x, labels)  # [s/t, t, b, ..]
        return losses.transpose(0, 1).flatten(0, 1)  # [s, b, ..]

    def count_flops(self, x: LayerInput, tied_weight: Tensor | None = None) -> Flops:
        """tied_weight: the embedding's, if the head has none of its own; None: a trained one."""
        weight = tied_weight if self.weight is None else self.weight
        product = 2 * x.tokens * math.prod(self.global_shape)
        is_trained = weight is None or weight.requires_grad
        flops = Flops(product, product if x.requires_grad else 0, product if is_trained else 0)
        return flops.recomputed() if self.tiles > 1 else flops

    def linear_to_exchange(self) -> ColumnParallelLinear | None:
        if self.weight is None:
            return None
        return ColumnParallelLinear.of_weight(self.weight, tp=self.tp, matmul_state=self.matmul_state)

    def exchange_linear(self, new: nn.Module) -> None:
        # The weight and its state stay this module's, by their names; the new module sees them as plain attributes.
        del new.weight
        del new.matmul_state
        vars(new).update(weight=self.weight, matmul_state=self.matmul_state)
        for parameter in new.parameters():
            declare_tiled_use(parameter, self.tiles)
        self.linear = new

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the logits [s, b, padded vocabulary / t] of x for a weight [padded vocabulary / t, h].

        x: [s, b, h] ([s/t, b, h] under sequence parallelism). Every rank of tp must call.
        """
        if self.linear is None:
            logits = self.tp.column_linear(x, weight, self.matmul_state)
        else:
            logits = self.linear(x)[0].clone()  # changed in place below, which its backward may not bear
        if self.bias is not None:
            logits = logits.add_(self.bias)
        scale = self.multiplier / (self.softcap or 1.0)
        if scale != 1:
            logits = logits.mul_(scale)
        if self.softcap is not None:
            logits = logits.tanh_() * self.softcap
        return logits
