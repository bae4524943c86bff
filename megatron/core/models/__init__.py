"""Whole models, one pipeline stage each, and the parts they share.

A model declares what a run must know of it: `rules` (what it requires of the settings), `boundary` (the tensors between two
stages), and `model_name` where its class does not say it. A new model is a `LanguageModelStage` with its head and loss, or any
module that has `set_input_tensor`. Training imports no model: scripts hand it theirs.
"""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {".bert": "BertModel", ".gpt": "GPTModel", ".language_model": "TransformerLanguageModel"}
)
