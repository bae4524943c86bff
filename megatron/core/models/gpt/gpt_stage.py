"""GPT: a causal language model."""

from torch import Tensor

from megatron.core.models.common.language_model import LanguageModelStage
from megatron.core.models.common.model_rules import GPT_RULES
from megatron.core.ops.attention.kv_cache import AttentionCache


class GPTModel(LanguageModelStage):
    """One pipeline stage of a GPT. The keyword arguments are those of `TransformerLanguageModel`.

    forward(input_ids [b, s], position_ids [b, s], attention_mask, labels [b, s], cache) -> hidden states [s, b, h]
    ([s/t, b, h] under sequence parallelism); on the last stage the loss of each token [b, s]
    (`LanguageModelStage.losses`), or without labels the logits [b, s, padded vocabulary / t]. All ranks of this stage
    in one replica must call.

    attention_mask: bool [b or 1, 1, s, s], True where attention is masked; None (causal) and `Documents` are faster.
    cache: keys and values of earlier tokens, for generation; the last stage then returns the logits of the last token,
    [b, 1, padded vocabulary / t].
    """

    rules = GPT_RULES

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        x = self.language_model(input_ids, position_ids, attention_mask, cache=cache)  # [s, b, h]
        if not self.post_process:
            return x
        if labels is not None:
            losses = self.language_model.logits(x, labels.t(), self.losses_of_own_logits)  # [s, b]
            return self.batch_first(losses)  # [b, s]
        if cache is not None:
            x = x[-1:]  # [1, b, h]
        return self.batch_first_logits(self.language_model.logits(x))  # [b, s or 1, v/t]
