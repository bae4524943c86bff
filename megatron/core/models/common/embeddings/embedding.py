"""The embedding: from tokens and positions to the first hidden states."""

import torch
from torch import Tensor, nn

from megatron.core.ops.count_flops_by_module import Flops, LayerInput
from megatron.core.ops.layout_invariant_dropout import HiddenDropout
from megatron.core.tensor_parallel.embedding_grad_in_buffer_dtype import lookup
from megatron.core.tensor_parallel.linear_layers import VocabParallelEmbedding, local_sequence_slice
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm


class ReplicatedEmbedding(nn.Module):
    """A learned vector for each id (a position, a token type), equal on every rank. forward(ids [s, b]) -> [s, b, h]"""

    def __init__(self, size: int, config: ModelConfig, context: LayerContext):
        super().__init__()
        self.weight = context.tp.replicated((size, config.hidden_size), config.embedding_init)

    def forward(self, ids: Tensor) -> Tensor:
        return lookup(ids, self.weight)

    def count_flops(self, x: LayerInput) -> Flops:
        return Flops()  # a lookup is no product


class Embedding(nn.Module):
    """Add token, position and token type embeddings in the dtype of the residual stream, then apply norm and dropout.

    The norm is there with `--norm-placement post`.

    forward(input_ids, position_ids, tokentype_ids, all [b, s]) -> [s, b, h], or [s/t, b, h] under sequence parallelism.
    Every rank of tp must call. Raises ConfigError for an id outside the vocabulary. tokens_only: no position and token
    type embeddings, for the last stage of a model with tied weights, whose output layer uses the embedding weight.
    """

    gives_hidden_states = True

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        positions: int,
        context: LayerContext,
        *,
        num_tokentypes: int = 0,
        tokens_only: bool = False,
    ):
        super().__init__()
        tp = context.tp
        tied = not config.untie_embeddings_and_output_weights
        self.tp = tp
        self.dtype = config.residual_dtype
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            tp=tp,
            init=config.embedding_init,
            ends=context.ends if tied else None,
            padded_size=config.padded_vocab_size(vocab_size, tp.axis.size),
        )
        self.position_embeddings = None
        self.tokentype_embeddings = None
        self.norm = None
        if not tokens_only:
            if config.position_embedding_type == "learned_absolute" and positions:
                self.position_embeddings = ReplicatedEmbedding(positions, config, context)
            if num_tokentypes:
                self.tokentype_embeddings = ReplicatedEmbedding(num_tokentypes, config, context)
            if config.norm_placement == "post":
                self.norm = make_norm(config, context)
        self.multiplier = torch.tensor(config.embedding_multiplier, dtype=tp.dtype).item()  # as Gemma rounds it
        self.dropout = context.hidden_dropout(config.hidden_dropout, "embedding", 0)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tokentype_ids: Tensor | None = None,
        dropout: HiddenDropout | None = None,
    ) -> Tensor:
        """input_ids, position_ids, tokentype_ids: [b, s] -> [s, b, h] ([s/t, b, h] under sequence parallelism)

        dropout: in place of the embedding's own, for another sequence.
        """
        x = self.word_embeddings(input_ids.t()).to(self.dtype)  # [s, b, h] ([s/t, b, h] under sequence parallelism)
        if self.multiplier != 1:
            x = x * self.multiplier
        local_rows = local_sequence_slice(input_ids.shape[1], self.tp)  # of the sequence, under sequence parallelism
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(position_ids.t()[local_rows])
        if self.tokentype_embeddings is not None:
            x = x + self.tokentype_embeddings(tokentype_ids.t()[local_rows])
        if self.norm is not None:
            x = self.norm(x)
        return (dropout or self.dropout)(x)
