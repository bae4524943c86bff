"""GPT: a causal language model."""

from torch import Tensor

from megatron.core.models.common.language_model import LanguageModelStage
from megatron.core.models.common.model_rules import GPT_RULES
from megatron.core.ops.attention.kv_cache import KeyValueCache


class GPTModel(LanguageModelStage):
    """One pipeline stage of a GPT. The keyword arguments are those of `TransformerLanguageModel`.

    forward(input_ids [b, s], position_ids [b, s], attention_mask, labels [b, s]): hidden states [s, b, h]; on the last
    stage
        the loss of each token [b, s] (`LanguageModelStage.losses`), or without labels the scores [b, s, padded
        vocabulary / t].
    attention_mask: [b or 1, 1, s, s], True where attention is masked; None (causal) and `Documents` are faster.
    cache: keys and values of earlier tokens, for generation; the last stage then gives the scores of the last token,
    [b, 1, ..].
    """

    rules = GPT_RULES

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = self.language_model(input_ids, position_ids, attention_mask, cache=cache)  # [s, b, h]
        if not self.post_process:
            return x
        if labels is not None:
            return self.batch_first(self.language_model.scores(x, labels.t(), self.losses))
        return self.returned(self.language_model.scores(x if cache is None else x[-1:]))  # of [s, b, v/t]
