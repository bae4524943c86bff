"""Which positions of a sample are padding: those that a data set fills up, and a pad token of the files that is nothing
else.

Many tokenizers are saved with a pad that texts hold too: the token that ends documents (Qwen 2.5, GPT-2's kin), `<unk>`
(Llama's), the token that begins every text, or a word. Such a token is text wherever it stands in a file.
"""

from typing import Any

FILLED = -1  # what a data set writes where a sample has no more tokens: no token of any file

# The names of ids of tokens that texts hold, as Megatron, NeMo (`eos_id`) and transformers (`eos_token_id`) have them; a
# tokenizer has some of them.
_IN_TEXTS = tuple(
    f"{token}{ending}"
    for token in ("eod", "unk", "bos", "eos", "cls", "sep", "mask")
    for ending in ("", "_id", "_token_id")
)


def pad_is_text(tokenizer: Any) -> bool:
    """Whether the pad of a tokenizer is a token of texts too; False if it has none.

    tokenizer: any object. Its own `pad_is_text` is believed where it is True.
    """
    pad = id_of(tokenizer, "pad")
    if pad is None:
        return False
    if getattr(tokenizer, "pad_is_text", False) or pad in [id_of(tokenizer, name) for name in _IN_TEXTS]:
        return True
    try:
        return pad in tokenizer.tokenize("")  # what the tokenizer's template adds to every text
    except Exception:  # a script's tokenizer may read no text, or no empty one
        return False


def id_of(tokenizer: Any, name: str) -> int | None:
    """An id that a tokenizer may have; Megatron's tokenizers raise NotImplementedError for one that they lack."""
    try:
        return getattr(tokenizer, name, None)
    except NotImplementedError:
        return None
