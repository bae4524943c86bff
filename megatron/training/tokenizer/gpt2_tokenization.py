"""The addresses at which the files of GPT-2's tokenizer are published."""

from megatron.core.base.lazy_imports import names_of_megatron

_FOLDER = "https://s3.amazonaws.com/models.huggingface.co/bert"


PRETRAINED_VOCAB_ARCHIVE_MAP = {"gpt2": f"{_FOLDER}/gpt2-vocab.json"}


PRETRAINED_MERGES_ARCHIVE_MAP = {"gpt2": f"{_FOLDER}/gpt2-merges.txt"}

__getattr__ = names_of_megatron(__name__)
