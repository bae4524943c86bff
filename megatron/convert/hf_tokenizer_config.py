"""tokenizer_config.json in a spelling that transformers 4 and 5 both read. No torch.

    5 writes                                        both read
    "tokenizer_class": "TokenizersBackend"          "tokenizer_class": "PreTrainedTokenizerFast"
    "extra_special_tokens": ["</s>", ...]           "additional_special_tokens": ["</s>", ...]

4 knows no class of the first name, and takes an object where 5 lists further special tokens. 5 reads the older names as
its own.
tests/compat/test_transformers.py compares the ids of both.
"""

import json

TOKENIZER_CONFIG = "tokenizer_config.json"
_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
_NEWER, _OLDER = "extra_special_tokens", "additional_special_tokens"


def for_both_versions(data: bytes) -> bytes:
    """The file's content with these two spellings replaced; any other content as it is, to the byte."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):  # it is carried, not judged
        return data
    if (
        not isinstance(config, dict)
        or not isinstance(kind := config.get("tokenizer_class"), str)
        or kind not in _CLASSES
    ):
        return data
    config["tokenizer_class"] = _CLASSES[kind]
    if isinstance(config.get(_NEWER), list) and _OLDER not in config:
        config[_OLDER] = config.pop(_NEWER)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
