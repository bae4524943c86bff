"""GPT: Megatron's `GPTModel` and layer specs, and our stage of it (`gpt_stage`)."""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {".gpt_model": "GPTModel"})
