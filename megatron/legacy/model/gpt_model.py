"""Provide `GPTModel` of Megatron 2.5 to core 0.5."""

from typing import Any

from torch import Tensor

from megatron.core import parallel_state
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.models.gpt import gpt_stage
from megatron.legacy.model.language_model import check_token_types, parts_of_stage, settings_of


class GPTModel(gpt_stage.GPTModel):
    """One pipeline stage of a GPT. config: of `core_transformer_config_from_args(args)`; None: the run's settings.

    forward(input_ids, position_ids, attention_mask, labels=None), with ids and labels [b, s], returns the loss of each
    token [b, s]; without labels the logits, [b, s, v/t] if `parallel_output`, else [b, s, v]; before the last stage the
    hidden states [s, b, h].
    """

    def __init__(
        self,
        config: Any = None,
        num_tokentypes: int = 0,
        parallel_output: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
    ):
        check_token_types("GPTModel", num_tokentypes, 0)
        super().__init__(settings_of(config), **parts_of_stage(pre_process, post_process))
        self.config = config or self.settings
        self.parallel_output = parallel_output
        self.returns_contiguous = True
        self.vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank()

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        tokentype_ids: None = None,
    ) -> Tensor:
        """See the class for shapes. Ids are None on other stages than the first.

        Every tensor-parallel rank must call.
        """
        return super().forward(input_ids, position_ids, attention_mask, labels)


__getattr__ = names_of_megatron(__name__)
