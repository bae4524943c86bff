"""The common part of the language models: embedding on the first stage, layers, output layer on the last."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.common.embeddings.embedding import Embedding
from megatron.core.models.common.model_rules import NO_RULES
from megatron.core.models.common.output_layer import LanguageModelHead
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.cross_entropy import sharded_losses
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.parallel_transformer import ParallelTransformer
from megatron.core.transformer.tiled_compute import declare_tiles
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


class TransformerLanguageModel(nn.Module):
    """One pipeline stage of a language model.

    forward(tokens [b, s], position_ids [b, s], mask, token_types, cache) -> hidden states [s, b, h], or [s/t, b, h]
    under sequence parallelism. Without `pre_process` it starts from the hidden states of the previous stage, set by
    `set_input_tensor`. With `post_process`, `scores` turns hidden states into scores. `make_layer(config, i,
    context)` builds layer i.
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
        num_tokentypes: int = 0,
        make_layer: MakePart = ParallelTransformerLayer,
    ):
        super().__init__()
        tied = not config.untie_embeddings_and_output_weights
        self.pre_process, self.post_process = pre_process, post_process
        self.embedding = self.output_layer = None
        if pre_process or (post_process and tied):
            self.embedding = Embedding(
                config, vocab_size, positions, context, num_tokentypes=num_tokentypes, words_only=not pre_process
            )
        self.decoder = ParallelTransformer(config, layers, context, post_process=post_process, make_layer=make_layer)
        if post_process:
            self.output_layer = LanguageModelHead(config, vocab_size, context, shares_table=tied and pre_process)
        if tied and post_process:
            table = self.embedding.word_embeddings.weight
            declare_tiles(table, config.tiled_loss)
            if pre_process:
                table.uses, table.is_lent = 1 + config.tiled_loss, True
        self._input_tensor: Tensor | None = None
        self.restarts_positions = context.restarts_positions

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Set the hidden states from which the next forward starts, on every stage but the first."""
        self._input_tensor = x

    def forward(
        self,
        tokens: Tensor | None,
        position_ids: Tensor | None,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """The hidden states after the stage's layers."""
        x = self.embedding(tokens, position_ids, token_types) if self.pre_process else self._input_tensor
        # A fork's layers between the two need not take positions, unless they restart.
        restarted = (position_ids,) if self.restarts_positions else ()
        return self.decoder(x, mask, cache, *restarted)

    def scores(self, x: Tensor, *losses: Any) -> Tensor:
        """As `scores_of`; on the last stage."""
        return scores_of(self.output_layer, self.embedding, x, *losses)


def scores_of(head: LanguageModelHead, embedding: Embedding | None, x: Tensor, *losses: Any) -> Tensor:
    """What the last stage of a model makes of hidden states [s, b, h]: scores [s, b, padded vocabulary / t].

    losses: labels [s, b], and loss(scores, labels) -> [s, b, ..], which then is the result. embedding: has the word
    table, if the
    head has no weight of its own."""
    # ZeRO stage 3 would gather a table that is passed in vain.
    weight = None if head.weight is not None else embedding.word_embeddings.weight
    if losses and head.tiles == 1:  # whoever hooks the output layer gets its scores
        labels, loss = losses
        return loss(head(x, weight), labels)
    return head(x, weight, *losses)


class LanguageModelStage(nn.Module):
    """One pipeline stage of a model around a language model; a subclass adds head and loss.

    parallel_output: scores that the forward returns without labels are this rank's part of the vocabulary; False: whole on
    every rank.
    """

    rules = NO_RULES
    body: Callable[..., nn.Module] = TransformerLanguageModel  # what is between words and scores
    parallel_output = True
    flattens = False  # whether a script flattens what the forward returns, by a view

    def __init__(self, config: ModelConfig, *, vocab_size: int, context: LayerContext, **parts: Any):
        """parts: further arguments of the `body`."""
        super().__init__()
        self.config, self.context = config, context  # a script's model may show another config, of Megatron's names
        self.settings = config
        self.vocab_size, self.axis = vocab_size, context.tp.axis
        self.language_model = self.body(config, vocab_size=vocab_size, context=context, **parts)
        self.pre_process, self.post_process = self.language_model.pre_process, self.language_model.post_process

    def set_input_tensor(self, x: Tensor | tuple[Tensor, ...] | None) -> None:
        self.language_model.set_input_tensor(x)

    def losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        """scores [s, b, v/t], labels [s, b] -> the cross entropy of each token [s, b].

        In training with label smoothing or z-loss [s, b, 2]: with these terms and without. An evaluation has no such terms.
        """
        config, compiled = self.settings, compiles(self.settings, scores.device)
        terms = {"label_smoothing": config.label_smoothing, "z_loss": config.z_loss_coeff} if self.training else {}
        how = {"compiled": compiled, "overwrite": compiled}
        loss, plain = sharded_losses(scores, labels, self.axis, self.vocab_size, **terms, **how)
        return loss if plain is loss else torch.stack((loss, plain), dim=-1)

    def batch_first(self, losses: Tensor) -> Tensor:
        """What `losses` gives, as the forward returns it [b, s]: of two the one with the terms of training. The other is its
        attribute `cross_entropy`, which a loss function reports (`megatron.training.batch_utils.loss_report`)."""
        if losses.dim() == 2:
            return self._batch_first(losses)
        loss, plain = (of.contiguous() for of in losses.unbind(-1))
        made = self._batch_first(loss)
        made.cross_entropy = self._batch_first(plain.detach())
        return made

    def _batch_first(self, losses: Tensor) -> Tensor:
        """[s, b] -> [b, s]: a view, whose sums add in the order of the sequence, or its copy for a script that
        flattens it."""
        return losses.t().contiguous() if self.flattens else losses.t()

    def returned(self, scores: Tensor) -> Tensor:
        """Scores [s, b, v/t] as the forward returns them: [b, s, v/t], or [b, s, v] without `parallel_output`."""
        whole = scores if self.parallel_output else autograd_collectives.gather_last(scores, self.axis)
        return whole.transpose(0, 1).contiguous()  # scripts flatten them by a view

    def boundary(self, micro_batch_size: int, seq_length: int) -> tuple[TensorSpec, ...]:
        """The tensors that a stage sends to the next."""
        return (self.context.hidden_states(self.settings, micro_batch_size, seq_length),)
