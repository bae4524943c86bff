"""T5 (arXiv:1910.10683): an encoder that sees a text with spans left out, and a decoder that looks at it and writes the
spans.

What the pipeline's stages hand on, forwards, and backwards as gradients:

    first stage       embeds both texts
    encoder's layers  x ---- x ---- x, normed --------------+ --------------+      to the last decoder layer
    decoder's layers  y - - - - - - - - - - - - - y ------- y ------------- y ---- final norm, scores
    tables            of relative positions, one for each stack, used by all of its layers

So the first stage alone has the tables' parameters, the word table is on the first and, if tied, the last, as a GPT's
is, and
a stage may end in any place, in the middle of a stack too.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.common.embeddings.embedding import Embedding
from megatron.core.models.common.language_model import LanguageModelStage, scores_of
from megatron.core.models.common.model_rules import T5_RULES
from megatron.core.models.common.output_layer import LanguageModelHead
from megatron.core.ops.attention.kv_cache import DecoderCache
from megatron.core.ops.attention.masks import Biased, Mask
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.transformer.cross_attention import BesideEncoder, ParallelCrossAttention
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.parallel_transformer import ParallelTransformer
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.relative_position_bias import RelativeBias, RelativePositions
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


class T5DecoderLayer(ParallelTransformerLayer):
    """A layer with attention to the encoder's result between its own attention and its MLP, with a norm before each.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), what it sees, angles) -> the shape of x.
    """

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__(config, layer, context)
        self.pre_cross_attn_layernorm = make_norm(config, context)
        # Numbered behind all layers, so that its dropout is not that of the layer's own attention.
        self.cross_attention = ParallelCrossAttention(config, config.all_layers + layer, context)
        self.cross_attention_dropout = context.hidden_dropout(config.hidden_dropout, "after cross attention", layer)

    def forward(self, x: Tensor, mask: BesideEncoder, angles: Tensor | None = None) -> Tensor:
        attend = lambda normed: self.self_attention(normed, mask.own, angles, mask.cache)  # noqa: E731
        x, out = self._of_norm(self.input_layernorm, x, attend)
        x = self._sum(x, out, self.attention_dropout)

        def look(normed: Tensor) -> Tensor:
            memory = None if mask.memory is None else mask.memory.to(normed.dtype)
            return self.cross_attention(normed, memory, mask.hidden, mask.kept)

        x, out = self._of_norm(self.pre_cross_attn_layernorm, x, look)
        x = self._sum(x, out, self.cross_attention_dropout)
        mlp = partial(recomputed, self.mlp, self.keys) if self.recomputes_mlp else self.mlp
        x, out = self._of_norm(self.pre_mlp_layernorm, x, mlp)
        return self._sum(x, out, self.mlp_dropout)


class EncoderDecoder(nn.Module):
    """One pipeline stage of a model of two stacks.

    forward(encoder ids [b, s], decoder ids [b, t], hidden keys of the encoder [b, 1, 1, s]) -> (x [s, b, h], y [t, b,
    h], the
    tables of relative positions if the model has them), what the next stage starts from; under sequence parallelism a
    part of
    each text. Ranks that share samples each give their rows of both texts, and all hidden keys. layers: numbers over the
    whole
    model, those of the encoder first; their names count each stack from 0. With a cache, in generation, further words of the
    decoder alone: `go_on`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        positions: int,
        layers: Iterable[int],
        context: LayerContext,
        pre_process: bool = True,
        post_process: bool = True,
        make_layer: MakePart = ParallelTransformerLayer,
        make_decoder_layer: MakePart = T5DecoderLayer,
    ):
        super().__init__()
        tied, n = not config.untie_embeddings_and_output_weights, config.num_layers
        self.pre_process, self.post_process = pre_process, post_process
        self.settings, self.context = config, context
        self.embedding = self.output_layer = None
        self.encoder = self.decoder = None
        if pre_process or (post_process and tied):
            self.embedding = Embedding(config, vocab_size, positions, context, words_only=not pre_process)
            table = self.embedding.word_embeddings.weight
            uses = 2 * pre_process + config.tiled_loss * (
                tied and post_process
            )  # two texts, and the tiles of the scores
            if uses > 1:
                table.uses = uses
            if pre_process and post_process and tied:
                table.is_lent = True
        if pre_process and self.embedding.position_embeddings is not None:
            self.embedding.position_embeddings.weight.uses = 2
        self.decoder_dropout = context.hidden_dropout(config.hidden_dropout, "embedding of the decoder", 0)
        self.has_tables = config.position_embedding_type == "relative"
        has_parameters = self.has_tables and pre_process
        self.encoder_relative_pos_emb = RelativePositions(config, context) if has_parameters else None
        self.decoder_relative_pos_emb = RelativePositions(config, context) if has_parameters else None
        self._biases = [RelativeBias(config, context.tp.axis, bidirectional=both) for both in (True, False)]
        numbers = list(layers)
        if mine := [i for i in numbers if i < n]:
            self.encoder = ParallelTransformer(
                config, mine, context, post_process=mine[-1] == n - 1, make_layer=make_layer
            )
        mine = [i - n for i in numbers if i >= n]
        if mine or post_process:
            self.decoder = ParallelTransformer(
                config,
                mine,
                context,
                post_process=post_process,
                make_layer=lambda config, i, context: make_decoder_layer(config, n + i, context),
            )
        if post_process:
            self.output_layer = LanguageModelHead(config, vocab_size, context, shares_table=tied and pre_process)
        self._input_tensor: Sequence[Tensor] | None = None

    def set_input_tensor(self, x: Sequence[Tensor] | None) -> None:
        """Set what the previous stage hands on, on every stage but the first."""
        self._input_tensor = x

    def forward(
        self, ids: Tensor | None, decoder_ids: Tensor | None, hidden: Tensor, cache: DecoderCache | None = None
    ) -> tuple[Tensor, ...]:
        given = self._embedded(ids, decoder_ids) if self.pre_process else self._input_tensor
        x, y = given[:2]
        tables = given[2:]
        if self.encoder is not None:
            x = self.encoder(x, self._mask(0, tables, x, hidden)).to(self.settings.residual_dtype)
        if self.decoder is not None:
            y = self.decoder(y, BesideEncoder(self._mask(1, tables, y, None), x, hidden, cache))
        if cache is not None:
            cache.tables = tables
            cache.advance(y.shape[0])
        return x, y, *tables

    def go_on(self, decoder_ids: Tensor | None, hidden: Tensor, cache: DecoderCache) -> Tensor:
        """Hidden states [new, b, h] of the decoder's next words [b, new], by what the cache holds of both texts."""
        if self.pre_process:
            positions = cache.positions(decoder_ids.shape[1])
            y = self.embedding(decoder_ids, positions, None, self.decoder_dropout)
        else:
            (y,) = self._input_tensor
        if self.decoder is not None:
            own, length = None, cache.length + len(y)
            if cache.tables:
                rows = torch.arange(cache.length, length)
                own = Biased(self._biases[1].of(cache.tables[1], length, rows), None)
            y = self.decoder(y, BesideEncoder(own, None, hidden, cache))
        cache.advance(len(y))
        return y

    def _embedded(self, *texts: Tensor) -> list[Tensor]:
        x, y = (
            self.embedding(ids, self.context.positions(ids.shape[1], ids.device).expand_as(ids), None, dropout)
            for ids, dropout in zip(texts, (None, self.decoder_dropout))
        )
        return [x, y, *([self.encoder_relative_pos_emb(), self.decoder_relative_pos_emb()] if self.has_tables else [])]

    def _mask(self, stack: int, tables: Sequence[Tensor], x: Tensor, hidden: Tensor | None) -> Mask:
        """hidden: of keys; None: causal."""
        if not tables:
            return hidden
        rows = self.context.rows
        held = x.shape[0] * rows.sp.size
        mine = self.context.positions(held, torch.device("cpu"))
        return Biased(self._biases[stack].of(tables[stack], rows.within_layers.length_of(held), mine), hidden)

    def scores(self, x: Tensor, *losses: Any) -> Tensor:
        """Of hidden states [t, b, h], as `scores_of`; on the last stage."""
        return scores_of(self.output_layer, self.embedding, x, *losses)


class T5Model(LanguageModelStage):
    """One pipeline stage of a T5. The other keyword arguments are those of `EncoderDecoder`.

    forward(encoder_input_ids [b, s], decoder_input_ids [b, t], encoder_mask [b, s] (1 for a token, 0 for padding; every
    stage
    needs it), lm_labels [b, t]): what the next stage starts from; on the last stage the loss of each token [b, t], or
    without
    labels the scores [b, t, padded vocabulary / t]. cache: for generation, filled by the first forward of a batch; each
    further
    one takes the next words of the decoder alone, and hands on their hidden states alone.

    The decoder is causal and has no mask of its own: padding stands at the end, where no token looks. With tied weights
    hidden
    states are divided by the square root of their width before the scores, as the published models of version 1.0 have it;
    `scale_decoder_outputs` False leaves that out.
    """

    rules = T5_RULES
    body = EncoderDecoder

    def __init__(self, config: ModelConfig, *, decoder_seq_length: int, **parts):
        super().__init__(config, **parts)
        self.decoder_seq_length = decoder_seq_length
        scales = config.scale_decoder_outputs and not config.untie_embeddings_and_output_weights
        self.factor = config.hidden_size**-0.5 if scales else 1.0

    def forward(
        self,
        encoder_input_ids: Tensor | None,
        decoder_input_ids: Tensor | None,
        encoder_mask: Tensor,
        lm_labels: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        # Only keys are masked: a query without any key would give NaN, and the results of padding are not used.
        hidden = encoder_mask[:, None, None, :] == 0
        if cache is not None and cache.length:
            y = self.language_model.go_on(decoder_input_ids, hidden, cache)
            if not self.post_process:
                return (y,)
        else:
            handed_on = self.language_model(encoder_input_ids, decoder_input_ids, hidden, cache)
            if not self.post_process:
                return handed_on
            y = handed_on[1]
        y = y * self.factor
        if lm_labels is None:
            return self.returned(self.language_model.scores(y))
        return self.batch_first(self.language_model.scores(y, lm_labels.t(), self.losses))

    def boundary(
        self, micro_batch_size: int, seq_length: int, decoder_seq_length: int | None = None
    ) -> tuple[TensorSpec, ...]:
        """x, y, and both tables if there are any. decoder_seq_length: default: that of training."""
        config, context = self.settings, self.context
        lengths = seq_length, decoder_seq_length or self.decoder_seq_length
        states = (context.hidden_states(config, micro_batch_size, length) for length in lengths)
        shape = config.relative_attention_num_buckets, config.num_attention_heads
        tables = [TensorSpec(shape, config.params_dtype)] * 2 if self.language_model.has_tables else []
        return *states, *tables
