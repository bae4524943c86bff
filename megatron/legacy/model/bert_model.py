"""Provide `BertModel` of Megatron 2.5 to core 0.5."""

from typing import Any

from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.models.bert import bert_stage
from megatron.legacy.model.language_model import parts_of_stage, settings_of


class BertModel(bert_stage.BertModel):
    """One pipeline stage of a BERT. config: as for GPTModel.

    forward(bert_model_input, attention_mask, tokentype_ids=None, lm_labels=None), with input, token types and labels
    [b, s], returns (loss of each token [b, s], or without labels the logits; logits of the binary head [b, 2] or None),
    and before the last stage hidden states.
    """

    def __init__(
        self,
        config: Any = None,
        num_tokentypes: int = 2,
        add_binary_head: bool = True,
        parallel_output: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
    ):
        options = {"num_tokentypes": num_tokentypes, "add_binary_head": add_binary_head}
        super().__init__(settings_of(config), **options, **parts_of_stage(pre_process, post_process))
        self.config = config or self.settings
        self.parallel_output = parallel_output
        self.returns_contiguous = True

    def forward(
        self,
        bert_model_input: Tensor | None,
        attention_mask: Tensor,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Any:
        """See the class for shapes. Ids are None on other stages than the first.

        Every tensor-parallel rank must call.
        """
        return super().forward(bert_model_input, attention_mask, tokentype_ids, lm_labels)


__getattr__ = names_of_megatron(__name__)
