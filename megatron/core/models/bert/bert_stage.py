"""BERT (arXiv:1810.04805): a masked language model with sentence order prediction.

Its blocks are pre-norm, as Megatron trains it, or post-norm with --norm-placement post.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.models.common.language_model import LanguageModelStage
from megatron.core.models.common.model_rules import BERT_RULES
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, further_flops, weight_flops
from megatron.core.ops.fused_layer_ops import activation_of
from megatron.core.sharding.placement import Constant, InitialValue, Placement
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm


class Dense(nn.Module):
    """Compute x W^T + b with W [out, width] replicated on every rank. forward(x [.., width]) -> [.., out]

    partial: whether a rank's gradient is partial; None: it is under sequence parallelism.
    """

    def __init__(self, width: int, out: int, init: InitialValue, context: LayerContext, *, partial: bool | None = None):
        super().__init__()
        self.tp = context.tp
        self.weight = self.tp.replicated((out, width), init, partial=partial)
        self.matmul_state = self.tp.matmul_state(self.weight.placement)
        self.bias = self.tp.replicated((out,), Constant(0.0), partial=partial)

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.linear(x, self.weight, self.matmul_state) + self.bias

    def count_flops(self, x: LayerInput) -> Flops:
        return weight_flops(x, self.weight)


class Pooler(nn.Module):
    """Compute tanh(W x + b) of each sample's first token.

    forward(x [s, b, h], or this rank's rows of it) -> [b, h], equal on all ranks of this stage in one replica. All of
    them must call.
    """

    def __init__(self, config: ModelConfig, context: LayerContext):
        super().__init__()
        self.context = context
        self.dense = Dense(config.hidden_size, config.hidden_size, config.init, context, partial=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(self.context.first_token(x)))


class WordBias(nn.Module):
    """Add a bias to the logits in place, one for each token of this rank's part of the vocabulary.

    forward(logits [s, b, padded vocabulary / t]) -> the same tensor
    """

    def __init__(self, config: ModelConfig, vocab_size: int, context: LayerContext):
        super().__init__()
        tp = context.tp
        rows = config.padded_vocab_size(vocab_size, tp.axis.size) // tp.axis.size
        self.bias = tp.parameter((rows,), Placement((vocab_size,), Constant(0.0), shard={tp.axis.name: 0}))

    def forward(self, logits: Tensor) -> Tensor:
        return logits.add_(self.bias)  # in place, since no backward needs the logits without the bias


class BertHeadTransform(nn.Module):
    """Transform hidden states before the output layer: norm(f(W x + b)). forward(x [s, b, h]) -> the same shape"""

    def __init__(self, config: ModelConfig, context: LayerContext):
        super().__init__()
        self.dense = Dense(config.hidden_size, config.hidden_size, config.init, context)
        self.norm = make_norm(config, context)
        self.activation = activation_of(config.activation).eager

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class BertModel(LanguageModelStage):
    """One pipeline stage of a BERT. The other keyword arguments are those of `TransformerLanguageModel`.

    forward(input_ids, attention_mask, tokentype_ids, lm_labels, all [b, s]) -> hidden states [s, b, h] ([s/t, b, h]
    under sequence parallelism). On the last stage it returns a pair:

        the loss of each token [b, s], or without labels the logits [b, s, padded vocabulary / t];
        the logits of the two orders of sentences [b, 2], or None without `add_binary_head`.

    attention_mask: 1 for a token, 0 for padding, to which no query attends; every stage needs it. A rank that shares
    its samples with others passes its own rows of all arguments but the attention_mask, which has whole samples. All
    ranks of this stage in one replica must call.
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
        self.lm_head = None
        self.word_bias = None
        self.pooler = None
        self.binary_head = None
        if self.post_process:
            self.lm_head = BertHeadTransform(config, context)
            self.word_bias = WordBias(config, vocab_size, context)
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
        positions = None
        if input_ids is not None:
            positions = self.context.positions(input_ids.shape[1], input_ids.device).expand_as(input_ids)  # [b, s]
        # Only keys are masked: a query without any key would give NaN, and the results of padding are not used.
        key_padding_mask = attention_mask[:, None, None, :] == 0  # [b, 1, 1, s]
        x = self.language_model(input_ids, positions, key_padding_mask, tokentype_ids)  # [s, b, h]
        if not self.post_process:
            return x

        # sentence order
        order_logits = None if self.pooler is None else self.binary_head(self.pooler(x))  # [b, 2]

        # masked tokens
        logits = self.word_bias(self.language_model.logits(self.lm_head(x)))  # [s, b, v/t]
        if lm_labels is None:
            return self.batch_first_logits(logits), order_logits
        return self.batch_first(self.losses_of_own_logits(logits, lm_labels.t())), order_logits

    def modules_of_logits(self) -> tuple[nn.Module, ...]:
        return (*super().modules_of_logits(), self.word_bias)

    def count_flops(self, x: LayerInput) -> Flops:
        """The order of sentences, for which one token of a sample is read, does not count."""
        x = replace(x, causal=False)
        flops = flops_of(self.language_model, x, transform=self.lm_head)
        return flops + further_flops(self, x, (self.language_model, self.lm_head, self.pooler, self.binary_head))
