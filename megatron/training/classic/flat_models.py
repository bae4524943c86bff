"""`megatron.model.GPTModel` and `BertModel` of Megatron 2.5 to core 0.5: built from the run's settings."""

from typing import Any

from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.classic import modules
from megatron.core.classic.transformer_config import model_config
from megatron.core.models.bert import bert_stage
from megatron.core.models.gpt import gpt_stage
from megatron.core.parallel.rendezvous import join_alone
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.global_vars import get_runtime


def parts_of_stage(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> dict[str, Any]:
    """The arguments of a model's stage that follow from the run. vp_stage: the chunk; None: the one that is being built."""
    join_alone()
    if vp_stage is None:
        vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank()
    return get_runtime().model_parts(pre_process, post_process, vp_stage)


def settings_of(config: Any) -> ModelConfig:
    """The run's settings of a model, with what `config` says instead; None: nothing."""
    ours = get_runtime().config.transformer
    return ours if config is None else model_config(config, ours)


def check_token_types(name: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise ValueError(f"{name}: num_tokentypes is {given}; this model has {wanted}")


class GPTModel(gpt_stage.GPTModel):
    """One stage of a GPT. config: of `core_transformer_config_from_args(args)`; None: the run's.

    forward(input_ids, position_ids, attention_mask, labels=None): the loss of each token [b, s]; without labels the scores
    [b, s, v/t], whole ([b, s, v]) unless `parallel_output`; before the last stage hidden states [s, b, h].
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
        self.parallel_output, self.flattens = parallel_output, True

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None = None,
        tokentype_ids: None = None,
    ) -> Tensor:
        return super().forward(input_ids, position_ids, attention_mask, labels)


class Float16Module(modules.Float16Module):
    """A module in half precision, of Megatron's arguments."""

    def __init__(self, module: nn.Module, args: Any):
        super().__init__(args, module)


class BertModel(bert_stage.BertModel):
    """One stage of a BERT. config: as for GPTModel.

    forward(bert_model_input, attention_mask, tokentype_ids=None, lm_labels=None): (the loss of each token [b, s], or without
    labels the scores; the scores of the two orders [b, 2] or None); before the last stage hidden states.
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
        self.parallel_output, self.flattens = parallel_output, True

    def forward(
        self,
        bert_model_input: Tensor | None,
        attention_mask: Tensor,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Any:
        return super().forward(bert_model_input, attention_mask, tokentype_ids, lm_labels)
