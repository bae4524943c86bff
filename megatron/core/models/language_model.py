"""What every language model of ours is made of: embedding on the first stage, layers, output layer on the last."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from megatron.core.models.embedding import Embedding
from megatron.core.models.head import LanguageModelHead
from megatron.core.models.rules import NO_RULES
from megatron.core.pipeline_parallel.transport import TensorSpec
from megatron.core.transformer.context import LayerContext, MakePart
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.transformer import ParallelTransformer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


class TransformerLanguageModel(nn.Module):
    """One pipeline stage of a language model.

    With `pre_process` it takes tokens [b, s], else the hidden states of the stage before, handed to `set_input_tensor`. With
    `post_process` it returns scores [s, b, padded vocabulary / t], else hidden states [s, b, h] ([s/t, b, h] under
    sequence parallelism). `make_layer(config, i, context)` builds layer i. With a cache
    it returns the scores of the last token alone: whoever continues a text asks for no others.
    """

    def __init__(
        self,
        config: TransformerConfig,
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
        if tied and pre_process and post_process:
            self.embedding.word_embeddings.weight.uses = 2
        self._input_tensor: Tensor | None = None

    def set_input_tensor(self, x: Tensor | None) -> None:
        """The hidden states that the next forward starts from, on every stage but the first."""
        self._input_tensor = x

    def forward(
        self,
        tokens: Tensor | None,
        position_ids: Tensor | None,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """What the stage's layers make of its input: [s, b, h], or [s/t, b, h] under sequence parallelism."""
        x = self.embedding(tokens, position_ids, token_types) if self.pre_process else self._input_tensor
        return self.decoder(x, mask, cache)

    def scores(self, x: Tensor) -> Tensor:
        """Hidden states to scores over the words, on the last stage."""
        has_its_own = self.output_layer.weight is not None  # and in ZeRO stage 3 a table handed over would be fetched
        return self.output_layer(x, None if has_its_own else self.embedding.word_embeddings.weight)


class LanguageModelStage(nn.Module):
    """One pipeline stage of a model around a language model, for the head and the loss that a subclass adds."""

    rules = NO_RULES

    def __init__(self, config: TransformerConfig, *, vocab_size: int, context: LayerContext, **parts: Any):
        """parts: of `TransformerLanguageModel`."""
        super().__init__()
        self.config, self.context = config, context
        self.vocab_size, self.axis = vocab_size, context.tp.axis
        self.language_model = TransformerLanguageModel(config, vocab_size=vocab_size, context=context, **parts)

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.language_model.set_input_tensor(x)

    def boundary(self, micro_batch_size: int, seq_length: int) -> tuple[TensorSpec, ...]:
        """The tensors that a stage hands to the next."""
        return (self.context.hidden_states(self.config, micro_batch_size, seq_length),)
