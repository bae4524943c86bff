"""T5 (arXiv:1910.10683): an encoder reads a text with spans left out, and a decoder attends to it and writes the spans.

Tensors that pipeline stages send to the next stage, and whose gradients come back:

    first stage       embeds both texts
    encoder's layers  x ---- x ---- x, normed --------------+ --------------+      to the last decoder layer
    decoder's layers  y - - - - - - - - - - - - - y ------- y ------------- y ---- final norm, logits
    bias weights      of relative positions, one for each stack, used by all of its layers

So only the first stage has the parameters of relative positions. The embedding weight is on the first stage and, if
tied, on the last, as in a GPT. A stage may end anywhere, also in the middle of a stack.

    s, m   tokens of the encoder's text, of the decoder's text        b, h   batch, hidden        v   vocabulary
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.common.embeddings.embedding import Embedding
from megatron.core.models.common.language_model import LanguageModelStage, head_flops, output_logits
from megatron.core.models.common.model_rules import T5_RULES
from megatron.core.models.common.vocab_parallel_lm_head import LanguageModelHead
from megatron.core.ops.attention.document_and_window_masks import MaskWithBias
from megatron.core.ops.attention.kv_cache import DecoderCache
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, further_flops
from megatron.core.ops.layout_invariant_dropout import HiddenDropout
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.transformer.layer_parallel_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.relative_position_bias import RelativeBiasFromWeight, RelativePositionEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer, submodules_of


class EncoderDecoder(nn.Module):
    """One pipeline stage of a model with an encoder and a decoder.

    forward(encoder ids [b, s], decoder ids [b, m], key_padding_mask bool [b, 1, 1, s], True where padding) -> the
    tensors from which the next stage starts: x [s, b, h], y [m, b, h] ([s/t, b, h] and [m/t, b, h] under sequence
    parallelism), and the weights [buckets, heads] of both relative position biases if the model has them. A rank that
    shares its samples with others passes its own rows of both texts, and the mask of the whole text. All ranks of this
    stage in one replica must call.

    layers: numbers over the whole model, those of the encoder first; parameter names count each stack from 0.
    encoder_spec, decoder_spec: of the layers, and encoder_config, decoder_config: from which those are built, see
    `TransformerBlock`. make_layer(config, i, context), make_decoder_layer: build a layer i, over the whole model, of a
    script's own; the decoder's takes a `CrossAttentionState` for a mask. With a cache, in generation, `decode_next`
    runs the decoder alone on further tokens.
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
        make_layer: MakePart | None = None,
        make_decoder_layer: MakePart | None = None,
        encoder_spec: Any = None,
        decoder_spec: Any = None,
        encoder_config: Any = None,
        decoder_config: Any = None,
    ):
        super().__init__()
        tied = not config.untie_embeddings_and_output_weights
        num_encoder_layers = config.num_layers
        self.pre_process = pre_process
        self.post_process = post_process
        self.settings = config
        self.context = context
        self.embedding = None
        self.output_layer = None
        self.encoder = None
        self.decoder = None

        # embedding, and how often one forward uses its weights
        if pre_process or (post_process and tied):
            self.embedding = Embedding(config, vocab_size, positions, context, tokens_only=not pre_process)
            weight = self.embedding.word_embeddings.weight
            uses = 0
            if pre_process:
                uses += 2  # two texts
            if post_process and tied:
                uses += config.tiled_loss  # the tiles of the output layer
            if uses > 1:
                weight.num_grads_per_backward = uses
            if pre_process and post_process and tied:
                weight.is_tied = True  # the output layer reads it outside its own module
        if pre_process and self.embedding.position_embeddings is not None:
            self.embedding.position_embeddings.weight.num_grads_per_backward = 2
        self.decoder_dropout = context.hidden_dropout(config.hidden_dropout, "embedding of the decoder", 0)

        # relative positions
        self.has_relative_positions = config.position_embedding_type == "relative"
        self.encoder_relative_pos_emb = None
        self.decoder_relative_pos_emb = None
        if self.has_relative_positions and pre_process:
            self.encoder_relative_pos_emb = RelativePositionEmbedding(config, context)
            self.decoder_relative_pos_emb = RelativePositionEmbedding(config, context)
        self._encoder_bias = RelativeBiasFromWeight(config, context.tp.axis, bidirectional=True)
        self._decoder_bias = RelativeBiasFromWeight(config, context.tp.axis, bidirectional=False)

        # the layers of both stacks on this stage
        layers = list(layers)
        encoder_layers = [i for i in layers if i < num_encoder_layers]
        decoder_layers = [i - num_encoder_layers for i in layers if i >= num_encoder_layers]
        if encoder_layers:
            self.encoder = TransformerBlock(
                config if encoder_config is None else encoder_config,
                encoder_spec,
                post_process=encoder_layers[-1] == num_encoder_layers - 1,
                layers=encoder_layers,
                layer_context=context,
                settings=config,
                make_layer=make_layer,
            )
        if decoder_layers or post_process:
            self.decoder = TransformerBlock(
                config if decoder_config is None else decoder_config,
                decoder_spec or ModuleSpec(TransformerLayer, submodules=submodules_of(config, cross_attention=True)),
                post_process=post_process,
                layers=decoder_layers,
                layer_context=context,
                settings=config,
                numbered_from=num_encoder_layers,
                make_layer=make_decoder_layer,
            )
        if post_process:
            self.output_layer = LanguageModelHead(
                config, vocab_size, context, shares_embedding_weight=tied and pre_process
            )
        self._input_tensor: Sequence[Tensor] | None = None

    def set_input_tensor(self, x: Sequence[Tensor] | None) -> None:
        """Set the tensors of the previous stage, on every stage but the first.

        They are those that forward returns, or y [new, b, h] alone before `decode_next`.
        """
        self._input_tensor = x

    def forward(
        self,
        ids: Tensor | None,
        decoder_ids: Tensor | None,
        key_padding_mask: Tensor,
        cache: DecoderCache | None = None,
    ) -> tuple[Tensor, ...]:
        # embed both texts, or take the tensors of the previous stage
        if self.pre_process:
            x = self._embed(ids, None)  # [s, b, h]
            y = self._embed(decoder_ids, self.decoder_dropout)  # [m, b, h]
            bias_weights = []  # encoder's and decoder's, [buckets, heads] each
            if self.has_relative_positions:
                bias_weights = [self.encoder_relative_pos_emb(), self.decoder_relative_pos_emb()]
        else:
            x, y, *bias_weights = self._input_tensor

        # the encoder's layers of this stage
        if self.encoder is not None:
            encoder_mask = key_padding_mask
            if bias_weights:
                encoder_mask = MaskWithBias(
                    self._position_bias(self._encoder_bias, bias_weights[0], x), key_padding_mask
                )
            x = self.encoder(x, encoder_mask).to(self.settings.residual_dtype)

        # the decoder's layers of this stage, which are causal
        if self.decoder is not None:
            decoder_mask = None
            if bias_weights:
                decoder_mask = MaskWithBias(self._position_bias(self._decoder_bias, bias_weights[1], y), None)
            y = self.decoder(y, decoder_mask, x, key_padding_mask, inference_context=cache)

        if cache is not None:
            cache.tables = tuple(bias_weights)
            cache.advance(y.shape[0])
        return x, y, *bias_weights

    def decode_next(self, decoder_ids: Tensor | None, key_padding_mask: Tensor, cache: DecoderCache) -> Tensor:
        """Return the hidden states [new, b, h] of the decoder's next tokens [b, new], with the cache of both texts.

        key_padding_mask: bool [b, 1, 1, s], True where padding. All ranks of this stage in one replica must call.
        """
        if self.pre_process:
            positions = cache.positions(decoder_ids.shape[1])
            y = self.embedding(decoder_ids, positions, None, self.decoder_dropout)
        else:
            (y,) = self._input_tensor
        if self.decoder is not None:
            decoder_mask = None
            length = cache.length + len(y)
            if cache.tables:
                query_positions = torch.arange(cache.length, length)
                decoder_mask = MaskWithBias(self._decoder_bias.bias(cache.tables[1], length, query_positions), None)
            y = self.decoder(y, decoder_mask, None, key_padding_mask, inference_context=cache)
        cache.advance(len(y))
        return y

    def _embed(self, ids: Tensor, dropout: HiddenDropout | None) -> Tensor:
        """Embed a text [b, s] -> [s, b, h]. dropout: None: the embedding's own."""
        positions = self.context.positions(ids.shape[1], ids.device).expand_as(ids)
        return self.embedding(ids, positions, None, dropout)

    def _position_bias(self, bias: RelativeBiasFromWeight, weight: Tensor, x: Tensor) -> Tensor:
        """Return the bias [heads/t, rows, s] for this rank's rows of a text with hidden states x [rows, b, h].

        weight: [buckets, heads]. Every rank of tp must call.
        """
        rows = self.context.rows
        num_rows = x.shape[0] * rows.sp.size  # inside a layer
        positions = self.context.positions(num_rows, torch.device("cpu"))
        return bias.bias(weight, rows.within_layers.global_length(num_rows), positions)

    def count_flops(self, x: LayerInput, *, decoder_seq_length: int) -> Flops:
        """x: the encoder's text."""
        if self.pre_process:
            x = x.after(self.embedding)
        y = replace(x, tokens=decoder_seq_length)
        x = replace(x, causal=False)
        flops = flops_of(self.encoder, x)
        y = replace(y, memory=x.after(self.encoder))
        flops += flops_of(self.decoder, y)
        flops += head_flops(self.output_layer, self.embedding, y.after(self.encoder, self.decoder))
        return flops + further_flops(self, x, (self.encoder, self.decoder, self.output_layer))

    def logits(self, x: Tensor, *labels_and_loss: Any) -> Tensor:
        """Apply the output layer of the last stage to x [m, b, h]: -> logits [m, b, padded vocabulary / t].

        labels_and_loss: see `output_logits`. Every rank of tp must call.
        """
        return output_logits(self.output_layer, self.embedding, x, *labels_and_loss)


class T5Model(LanguageModelStage):
    """One pipeline stage of a T5. The other keyword arguments are those of `EncoderDecoder`.

    forward(encoder_input_ids [b, s], decoder_input_ids [b, m], encoder_mask [b, s], lm_labels [b, m], cache) -> the
    tensors of `boundary`. On the last stage it returns the loss of each token [b, m], or without labels the logits
    [b, m, padded vocabulary / t]. All ranks of this stage in one replica must call.

    encoder_mask: 1 for a token, 0 for padding; every stage needs it.
    cache: for generation, filled by the first forward of a batch; further ones take the decoder's next tokens alone,
    and stages then send only their hidden states [new, b, h].

    The decoder is causal and has no padding mask: padding stands at the end, and no token attends to later ones. With
    tied weights, hidden states are divided by the square root of their width before the output layer, as in the
    published models of version 1.0; `scale_decoder_outputs` False leaves that out.
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
        key_padding_mask = encoder_mask[:, None, None, :] == 0  # [b, 1, 1, s]
        if cache is not None and cache.length:
            # generation after the first token: the decoder alone
            y = self.language_model.decode_next(decoder_input_ids, key_padding_mask, cache)  # [new, b, h]
            if not self.post_process:
                return (y,)
        else:
            outputs = self.language_model(encoder_input_ids, decoder_input_ids, key_padding_mask, cache)
            if not self.post_process:
                return outputs
            y = outputs[1]  # [m, b, h]
        y = y * self.factor
        if lm_labels is None:
            return self.batch_first_logits(self.language_model.logits(y))  # [b, m, v/t]
        losses = self.language_model.logits(y, lm_labels.t(), self.losses_of_own_logits)  # [m, b]
        return self.batch_first(losses)

    def count_flops(self, x: LayerInput) -> Flops:
        flops = flops_of(self.language_model, x, decoder_seq_length=self.decoder_seq_length)
        return flops + further_flops(self, x, (self.language_model,))

    def boundary(
        self, micro_batch_size: int, seq_length: int, decoder_seq_length: int | None = None
    ) -> tuple[TensorSpec, ...]:
        """Return shape and dtype of the tensors between two stages: x, y, and both bias weights if there are any.

        They are this rank's rows of [s, b, h] and [m, b, h], and [buckets, heads]. decoder_seq_length: default: that
        of training.
        """
        config = self.settings
        x = self.context.hidden_states(config, micro_batch_size, seq_length)
        y = self.context.hidden_states(config, micro_batch_size, decoder_seq_length or self.decoder_seq_length)
        if not self.language_model.has_relative_positions:
            return x, y
        shape = (config.relative_attention_num_buckets, config.num_attention_heads)
        bias_weight = TensorSpec(shape, config.params_dtype)
        return x, y, bias_weight, bias_weight
