"""GPT: Megatron's `GPTModel` and layer specs, and our stage of it (`gpt_stage`)."""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel as GPTModel

__getattr__, __dir__ = lazy_names(__name__, {".gpt_model": "GPTModel"})
