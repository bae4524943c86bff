"""Decide which positions of a sample are padding.

Those are the positions that a data set fills up, and a pad token in the files if it has no other meaning. Many
tokenizers are saved with a pad that texts contain too: the token that ends documents (Qwen 2.5, GPT-2 and its
relatives), `<unk>` (Llama's), the token that begins every text, or an ordinary one. Such a token is text wherever it
occurs in a file.
"""

from typing import Any

FILLED = -1  # written by data sets where a sample has no more tokens: an id that no file has

# Attributes of tokenizers with ids of tokens that occur in texts: Megatron's (`eos`), NeMo's (`eos_id`) and those of
# transformers (`eos_token_id`). A tokenizer has some of them.
_IN_TEXTS = tuple(
    f"{token}{ending}"
    for token in ("eod", "unk", "bos", "eos", "cls", "sep", "mask")
    for ending in ("", "_id", "_token_id")
)


def pad_is_text(tokenizer: Any) -> bool:
    """Return whether the pad of a tokenizer also occurs in texts; False if it has no pad.

    tokenizer: any object. Its own `pad_is_text` is trusted where it is True.
    """
    pad = id_of(tokenizer, "pad")
    if pad is None:
        return False
    if getattr(tokenizer, "pad_is_text", False):
        return True
    if pad in [id_of(tokenizer, name) for name in _IN_TEXTS]:
        return True
    try:
        return pad in tokenizer.tokenize("")  # the tokens that the tokenizer's template adds to every text
    except Exception:  # a script's tokenizer may read no text, or no empty one
        return False


def id_of(tokenizer: Any, name: str) -> int | None:
    """Return an id of a tokenizer; None if it has none.

    Megatron's raise NotImplementedError for an id that they lack.
    """
    try:
        return getattr(tokenizer, name, None)
    except NotImplementedError:
        return None
