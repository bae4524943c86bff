"""The embedding: words and positions to the first hidden states."""

import torch
from torch import Tensor, nn

from megatron.core.ops.dropout import HiddenDropout
from megatron.core.tensor_parallel.embedding_grad_accumulation import lookup
from megatron.core.tensor_parallel.linear_layers import VocabParallelEmbedding, my_sequence_part
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm


class WholeEmbedding(nn.Module):
    """A learned vector per id (a position, a token type), whole on every rank. forward(ids [s, b]) -> [s, b, h]"""

    def __init__(self, size: int, config: ModelConfig, context: LayerContext):
        super().__init__()
        self.weight = context.tp.replicated((size, config.hidden_size), config.embedding_init)

    def forward(self, ids: Tensor) -> Tensor:
        return lookup(ids, self.weight)


class Embedding(nn.Module):
    """Word table + position table + token type table in the dtype of the residual stream, a norm with `--norm-placement
    post`,
    then dropout.

    forward(input_ids, position_ids, tokentype_ids, all [b, s]) -> [s, b, h], or [s/t, b, h] under sequence parallelism.
    words_only: no other tables, for the last stage of a model with tied weights, whose output layer uses the word
    table.
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
        words_only: bool = False,
    ):
        super().__init__()
        tp, tied = context.tp, not config.untie_embeddings_and_output_weights
        self.tp, self.dtype = tp, config.residual_dtype
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            tp=tp,
            init=config.embedding_init,
            ends=context.ends if tied else None,
            padded_size=config.padded_vocab_size(vocab_size, tp.axis.size),
        )
        rows = 0 if words_only or config.position_embedding_type != "learned_absolute" else positions
        types = 0 if words_only else num_tokentypes
        self.position_embeddings = WholeEmbedding(rows, config, context) if rows else None
        self.tokentype_embeddings = WholeEmbedding(types, config, context) if types else None
        has_norm = config.norm_placement == "post" and not words_only
        self.norm = make_norm(config, context) if has_norm else None
        self.multiplier = torch.tensor(config.embedding_multiplier, dtype=tp.dtype).item()  # as Gemma rounds it
        self.dropout = context.hidden_dropout(config.hidden_dropout, "embedding", 0)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tokentype_ids: Tensor | None = None,
        dropout: HiddenDropout | None = None,
    ) -> Tensor:
        """dropout: in place of the embedding's own, for another sequence."""
        x = self.word_embeddings(input_ids.t()).to(self.dtype)
        x = x if self.multiplier == 1 else x * self.multiplier
        mine = my_sequence_part(input_ids.shape[1], self.tp)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(position_ids.t()[mine])
        if self.tokentype_embeddings is not None:
            x = x + self.tokentype_embeddings(tokentype_ids.t()[mine])
        return (dropout or self.dropout)(x if self.norm is None else self.norm(x))
