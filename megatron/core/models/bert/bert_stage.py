"""BERT (arXiv:1810.04805): masked words and sentence order.

With pre-norm blocks, as Megatron trains it, or --norm-placement post.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.common.language_model import LanguageModelStage
from megatron.core.models.common.model_rules import BERT_RULES
from megatron.core.ops.fused_layer_ops import activation_of
from megatron.core.sharding.placement import Constant, InitialValue, Placement
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm


class Dense(nn.Module):
    """x W^T + b with W whole on every rank. `partial`: whether the gradient is partial; None: under sequence
    parallelism."""

    def __init__(self, width: int, out: int, init: InitialValue, context: LayerContext, *, partial: bool | None = None):
        super().__init__()
        self.tp = context.tp
        self.weight = self.tp.replicated((out, width), init, partial=partial)
        self.bias = self.tp.replicated((out,), Constant(0.0), partial=partial)

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.linear(x, self.weight) + self.bias


class Pooler(nn.Module):
    """tanh(W x + b) of the first token.

    forward(x [s, b, h], or the rows of it that a rank has) -> [b, h], the same on every rank that has some.
    """

    def __init__(self, config: ModelConfig, context: LayerContext):
        super().__init__()
        self.context = context
        self.dense = Dense(config.hidden_size, config.hidden_size, config.init, context, partial=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(self.context.first_token(x)))


class WordBias(nn.Module):
    """scores + b, one bias per word of this rank, in their place. forward(scores [s, b, padded vocabulary / t])"""

    def __init__(self, config: ModelConfig, vocab_size: int, context: LayerContext):
        super().__init__()
        tp = context.tp
        rows = config.padded_vocab_size(vocab_size, tp.axis.size) // tp.axis.size
        self.bias = tp.parameter((rows,), Placement((vocab_size,), Constant(0.0), shard={tp.axis.name: 0}))

    def forward(self, scores: Tensor) -> Tensor:
        return scores.add_(self.bias)  # no backward needs them without it


class BertHead(nn.Module):
    """The transform before the output layer. forward(x [s, b, h]) -> the same shape"""

    def __init__(self, config: ModelConfig, context: LayerContext):
        super().__init__()
        self.dense = Dense(config.hidden_size, config.hidden_size, config.init, context)
        self.norm, self.activation = make_norm(config, context), activation_of(config.activation).eager

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class BertModel(LanguageModelStage):
    """One pipeline stage of a BERT. The other keyword arguments are those of `TransformerLanguageModel`.

    forward(input_ids, attention_mask, tokentype_ids, lm_labels, all [b, s]): hidden states [s, b, h]; on the last stage
    a pair:
        the loss of each token [b, s], or without labels the scores [b, s, padded vocabulary / t];
        the scores of the two orders of sentences [b, 2], or None without `add_binary_head`.
    Of ranks that share samples each gives its rows of them, but all columns of the attention_mask: 1 for a token, 0 for
    padding,
    which no query attends to; every stage needs it.
    """

    rules = BERT_RULES

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        context: LayerContext,
        num_tokentypes: int = 2,
        add_binary_head: bool = True,
        **parts: Any,
    ):
        super().__init__(config, vocab_size=vocab_size, context=context, num_tokentypes=num_tokentypes, **parts)
        self.lm_head = self.word_bias = None
        self.pooler = self.binary_head = None
        if self.post_process:
            self.lm_head, self.word_bias = BertHead(config, context), WordBias(config, vocab_size, context)
            if add_binary_head:
                self.pooler = Pooler(config, context)
                self.binary_head = Dense(config.hidden_size, 2, config.init, context, partial=False)

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        positions = (
            None
            if input_ids is None
            else self.context.positions(input_ids.shape[1], input_ids.device).expand_as(input_ids)
        )
        # Only keys are masked: a query without any key would give NaN, and the results of padding are not used.
        nobody_looks_at = attention_mask[:, None, None, :] == 0  # [b, 1, 1, s]
        x = self.language_model(input_ids, positions, nobody_looks_at, tokentype_ids)
        if not self.post_process:
            return x
        order = None if self.pooler is None else self.binary_head(self.pooler(x))
        scores = self.word_bias(self.language_model.scores(self.lm_head(x)))
        if lm_labels is None:
            return self.returned(scores), order
        return self.batch_first(self.losses(scores, lm_labels.t())), order
