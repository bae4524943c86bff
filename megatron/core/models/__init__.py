"""Models: Megatron's classes at Megatron's paths, and our pipeline stage of each.

Our stages are in `gpt_stage`, `bert_stage`, `t5_stage`. A stage declares `rules` (its requirements on the settings),
`boundary` (the tensors between two stages), and `model_name` if its class has another name. Training imports no model:
scripts pass theirs.

To add a model: a `LanguageModelStage` with its head and loss, or any module that has `set_input_tensor`.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.models.bert.bert_stage import BertModel as BertModel
    from megatron.core.models.common.language_model import TransformerLanguageModel as TransformerLanguageModel
    from megatron.core.models.gpt.gpt_stage import GPTModel as GPTModel
    from megatron.core.models.T5.t5_stage import T5Model as T5Model

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.models.bert.bert_stage": "BertModel",
        "megatron.core.models.gpt.gpt_stage": "GPTModel",
        "megatron.core.models.common.language_model": "TransformerLanguageModel",
        "megatron.core.models.T5.t5_stage": "T5Model",
    },
)
