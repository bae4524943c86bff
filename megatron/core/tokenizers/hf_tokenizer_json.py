"""Build the tokenizer of a Hugging Face folder.

It is that of the tokenizer.json, with the tokens that only the files beside it name.
"""

import json
import os
import re
from typing import Any

from megatron.core.base.lazy_imports import optional_package
from megatron.core.tokenizers.hf_special_tokens import (
    PREFIX_SPACE_CLASSES,
    SpecialTokens,
    Token,
    TokenizerFiles,
    chat_templates_in,
    ids_as_text,
    read_json_object,
    select_version,
    special_tokens_by_version,
    template_ids_of,
    version_conflict,
)
from megatron.core.tokenizers.huggingface_bpe_wordpiece_tiktoken import (
    GPT2_PATTERN,
    FastTokenizer,
    check_exists,
    library_errors,
)

# The usual names of these tokens in published tokenizers, tried in this order where no file names one.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]")
_USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "eos": EOD_NAMES,
    "pad": PAD_NAMES,
    "bos": (),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]",),
}
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


def huggingface_tokenizer(config: Any) -> FastTokenizer:
    """Build a tokenizer with the ids that transformers' AutoTokenizer gives for the folder (see `hf_special_tokens`).

    Its end-of-document token is the eos_token, or where no file names one, the first of EOD_NAMES among the special
    tokens; None without either, as for a BERT. Padding, [CLS], [SEP] and [MASK] are found in the same way.
    """
    library = optional_package("tokenizers", config.tokenizer_type)
    path = config.tokenizer_model
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"--tokenizer-model {path}: there is no such file or folder; give a tokenizer.json or its folder on this "
            "machine (nothing is downloaded from the Hugging Face Hub)"
        )
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    check_exists(path, "--tokenizer-model")
    try:
        tokenizer = library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    with library_errors(path):
        return _with_files_beside(config, path, tokenizer, library)


def _with_files_beside(config: Any, path: str, tokenizer: Any, library: Any) -> FastTokenizer:
    """Return the tokenizer of a tokenizer.json, with what the files beside it add and change."""
    tokenizer.no_truncation()  # a file may carry the truncation and padding of whoever saved it last
    tokenizer.no_padding()

    # which version of transformers counts, and the tokens that it adds
    files = TokenizerFiles.read_beside(path)
    json_tokens = tokenizer.get_added_tokens_decoder()  # of the tokenizer.json alone
    candidates = special_tokens_by_version(
        files, [_as_token(token) for token in json_tokens.values()], is_byte_level=_is_byte_level(tokenizer)
    )
    version = config.tokenizer_transformers_version
    special_tokens = select_version(candidates, tokenizer, files.folder or ".", version)

    # how text is cut, then the added tokens and the template
    if version == "5":
        _apply_rules_of_5(files, tokenizer, library)
    rule_changes = _apply_tokenizer_config(files, tokenizer, library, version or candidates[0].version)
    named_ids, token_changes = _apply_special_tokens(special_tokens, tokenizer, library)

    # the ids of special tokens, and of a T5's sentinels in the order of their numbers
    added = tokenizer.get_added_tokens_decoder()
    special_ids = {token.content: i for i, token in added.items() if token.special}
    ids = {}
    for name, usual_names in _USUAL_NAMES.items():
        ids[name] = _special_id(named_ids.get(f"{name}_token"), special_ids, usual_names)
    sentinels = {}
    for token, i in special_ids.items():
        match = _SENTINEL.fullmatch(token)
        if match:
            sentinels[int(match[1])] = i

    pad_is_text = False
    if ids["pad"] is not None:
        pad_is_text = _is_in_texts(ids["pad"], tokenizer, json_tokens, named_ids, files.folder)
    return FastTokenizer(
        "HuggingFaceTokenizer",
        path,
        tokenizer,
        eod=ids["eos"],
        pad_is_text=pad_is_text,
        word_pattern=GPT2_PATTERN if _is_plain_byte_level(tokenizer) else None,
        added_tokens=[token.content for token in added.values()],
        additional_special_tokens_ids=[sentinels[k] for k in sorted(sentinels)],
        hashed_changes=token_changes + rule_changes,
        **ids,
    )


def _apply_special_tokens(
    special_tokens: SpecialTokens, tokenizer: Any, library: Any
) -> tuple[dict[str, int | None], list[Any]]:
    """Add the tokens and the template to `tokenizer`.

    Returns (the ids of the named tokens, the changes, which the tokenizer's hash includes).
    """
    # before tokens are added, since their ids are counted from the tokenizer's size
    before, after = special_tokens.template_ids(tokenizer)
    if special_tokens.added:
        tokenizer.add_tokens([library.AddedToken(**vars(token)) for token in special_tokens.added])
    named_ids = {}
    for key, token in special_tokens.named.items():
        named_ids[key] = None if token is None else tokenizer.token_to_id(token)
    changes: list[Any] = [[token.content, tokenizer.token_to_id(token.content)] for token in special_tokens.added]

    if (before, after) != template_ids_of(tokenizer):
        parts = ["$A"]  # the text
        tokens = []
        if before:  # the folder names the token, as it does the one at the end
            bos = special_tokens.named["bos_token"]
            parts.insert(0, str(bos))
            tokens.append((str(bos), named_ids["bos_token"]))
        if after:
            eos = special_tokens.named["eos_token"]
            parts.append(str(eos))
            tokens.append((str(eos), named_ids["eos_token"]))
        tokenizer.post_processor = library.processors.TemplateProcessing(single=parts, special_tokens=tokens)
        changes.append({"begin": before, "end": after})
    return named_ids, changes


def _is_in_texts(
    pad: int, tokenizer: Any, json_tokens: dict[int, Any], named_ids: dict[str, int | None], folder: str
) -> bool:
    """Return whether the pad of a folder also occurs in texts.

    It does if it is an ordinary token or stands for unknown words, if it begins or ends a text, by the template or by
    another name that the folder gives it, or if it is part of a chat.

    json_tokens: the added tokens of the tokenizer.json; none of them is an ordinary token, unless merges make it.
    """
    # an ordinary token
    model = _as_json(tokenizer)["model"]
    token = tokenizer.id_to_token(pad)
    is_in_vocabulary = tokenizer.model.token_to_id(token) == pad
    if is_in_vocabulary and (pad not in json_tokens or _is_made_by_merges(token, model)):
        return True

    # the unknown token, and tokens that begin or end a text
    ids = [i for name, i in named_ids.items() if name != "pad_token"]
    ids.append(model.get("unk_id"))
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        ids.append(tokenizer.token_to_id(unknown))
    # These files have all tokens that end a text: of Qwen 2.5's chats <|im_end|> and <|endoftext|> end one.
    for name in ("generation_config.json", "config.json"):
        content = read_json_object(folder, name)
        for key in ("bos_token_id", "eos_token_id"):
            value = content.get(key)
            ids += value if isinstance(value, list) else [value]
    if pad in ids or pad in tokenizer.encode("").ids:
        return True

    # part of a chat: a template names the token itself, or its variable
    return any(token in template or "pad_token" in template for template in chat_templates_in(folder))


def _is_made_by_merges(token: str, model: dict[str, Any]) -> bool:
    """Return whether BPE makes a token of its vocabulary from text.

    transformers adds every named token to a tokenizer.json that it saves, so that a pad "!" (CLIP's in OpenCLIP) is an
    added token there, and yet text; <pad> of Llama's vocabulary is made by no merge.
    """
    if model["type"] != "BPE":
        return False
    if len(token) == 1:
        return True
    for merge in model["merges"]:
        pair = merge if isinstance(merge, list) else merge.split(" ")
        if "".join(pair) == token:
            return True
    return False


def _apply_rules_of_5(files: TokenizerFiles, tokenizer: Any, library: Any) -> None:
    """Replace the rules of a LlamaTokenizer and a GPT2Tokenizer that 5.x does not take from their tokenizer.json."""
    if not isinstance(tokenizer.model, library.models.BPE):
        return
    add_prefix_space = files.config.get("add_prefix_space")
    if files.kind == "LlamaTokenizer" and not _is_byte_level(tokenizer):
        if add_prefix_space is not None and not add_prefix_space:
            scheme = "never"
        elif files.config.get("legacy"):
            scheme = "always"
        else:
            scheme = "first"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    elif files.kind == "GPT2Tokenizer":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=bool(add_prefix_space))


def _apply_tokenizer_config(files: TokenizerFiles, tokenizer: Any, library: Any, version: str) -> list[Any]:
    """Cut text as tokenizer_config.json says; returns the changes, which the tokenizer's hash includes.

    do_lower_case, strip_accents and tokenize_chinese_chars apply to a BERT, split_special_tokens to all.
    add_prefix_space applies to all in 4.57, and in 5.x to `PREFIX_SPACE_CLASSES` alone: ValueError where the two then
    differ and no version is chosen.
    """
    changes: list[Any] = []
    rules = _as_json(tokenizer)
    settings = files.config

    # a BERT's normalizer
    normalizer = rules["normalizer"] or {}
    if files.is_bert and normalizer.get("type") == "BertNormalizer":
        configured = {
            "lowercase": bool(settings.get("do_lower_case", True)),
            "strip_accents": settings.get("strip_accents"),
            "handle_chinese_chars": bool(settings.get("tokenize_chinese_chars", True)),
        }
        if configured.items() - normalizer.items():
            tokenizer.normalizer = library.normalizers.BertNormalizer(clean_text=normalizer["clean_text"], **configured)
            changes.append(configured)

    # special tokens within a text
    if settings.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is the characters that it is made of
        changes.append({"split_special_tokens": True})

    # a space before a text
    add_prefix_space = bool(settings.get("add_prefix_space"))
    pre_tokenizer = rules["pre_tokenizer"] or {}
    is_byte_level = pre_tokenizer.get("type") == "ByteLevel"
    if is_byte_level and pre_tokenizer["add_prefix_space"] != add_prefix_space and files.kind is not None:
        applies_in_both = files.kind in PREFIX_SPACE_CLASSES
        ids_before = tokenizer.encode("a", add_special_tokens=False).ids
        if applies_in_both or version.startswith("4"):
            tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
                add_prefix_space=add_prefix_space, use_regex=pre_tokenizer.get("use_regex", True)
            )
            changes.append({"add_prefix_space": add_prefix_space})
        if not applies_in_both and version == "4.57":  # which was not chosen: a chosen one is "4"
            ids_after = tokenizer.encode("a", add_special_tokens=False).ids
            in_4 = ids_as_text(*ids_after)
            in_5 = ids_as_text(*ids_before)
            difference = f'the text "a" is {in_4} in 4.57 and {in_5} in 5.x (add_prefix_space)'
            raise ValueError(version_conflict(files.folder or ".", difference))
    return changes


def _as_token(added: Any) -> Token:
    """Return the `tokenizers.AddedToken` as a `Token`."""
    return Token(
        content=added.content,
        lstrip=added.lstrip,
        rstrip=added.rstrip,
        single_word=added.single_word,
        normalized=added.normalized,
        special=added.special,
    )


def _special_id(named_id: int | None, special_ids: dict[str, int], usual_names: tuple[str, ...]) -> int | None:
    """Return the id that a file names, else the id of the first of `usual_names` that is special, else None."""
    if named_id is not None:
        return named_id
    for name in usual_names:
        if name in special_ids:
            return special_ids[name]
    return None


def _as_json(tokenizer: Any) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())


def _is_byte_level(tokenizer: Any) -> bool:
    return any("ByteLevel" in repr(part) for part in (tokenizer.pre_tokenizer, tokenizer.decoder))


def _is_plain_byte_level(tokenizer: Any) -> bool:
    """Return whether a tokenizer.json is byte-level BPE and nothing else, as tools/train_tokenizer.py writes it."""
    rules = _as_json(tokenizer)
    model = rules["model"]
    if model["type"] != "BPE" or model.get("dropout") or rules["normalizer"] is not None:
        return False
    pre_tokenizer = rules["pre_tokenizer"] or {}
    if pre_tokenizer.get("type") != "ByteLevel":
        return False
    if pre_tokenizer["add_prefix_space"] or not pre_tokenizer.get("use_regex", True):
        return False
    post_processor = rules["post_processor"]
    return not post_processor or post_processor["type"] == "ByteLevel"
