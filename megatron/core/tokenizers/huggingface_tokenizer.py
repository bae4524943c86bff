"""The tokenizer of a Hugging Face folder: its tokenizer.json, with the tokens that only the files beside it name."""

import json
import os
import re
from typing import Any

from megatron.core.base.lazy_imports import optional_package
from megatron.core.tokenizers.bpe_wordpiece_tiktoken import GPT2_PATTERN, LibraryTokenizer, check_exists
from megatron.core.tokenizers.hf_special_tokens import (
    NAMED,
    SPACED_BY_CONFIG,
    Files,
    SpecialTokens,
    Token,
    chat_templates_in,
    chosen,
    ends_of,
    object_in,
    readings,
    refusal,
    shown,
)

# The names under which published tokenizers keep these tokens, in the order in which they are looked for where no file says.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]")
_NAMES = {"eos": EOD_NAMES, "pad": PAD_NAMES, "bos": (), **{"cls": ("[CLS]",), "sep": ("[SEP]",), "mask": ("[MASK]",)}}
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


def huggingface_tokenizer(config: Any) -> LibraryTokenizer:
    """The ids of transformers' AutoTokenizer for the folder, as `special_tokens` says.

    Its end-of-document token is the eos_token, or where no file names one, the first of EOD_NAMES among the special
    tokens; None
    without either, as for a BERT. Likewise for padding, [CLS], [SEP] and [MASK].
    """
    library = optional_package("tokenizers", config.tokenizer_type)
    path = config.tokenizer_model
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"--tokenizer-model {path}: there is no such file or folder; give a tokenizer.json or its folder on this "
            "machine: names of the Hugging Face Hub are not fetched"
        )
    path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    check_exists(path, "--tokenizer-model")
    try:
        tokenizer = library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is no tokenizer.json: {error}") from None
    tokenizer.no_truncation()  # a file may carry the truncation and padding of whoever saved it last
    tokenizer.no_padding()

    files = Files.beside(path)
    own = tokenizer.get_added_tokens_decoder()
    there = [_token(added) for added in own.values()]
    found = readings(files, there, is_byte_level=_is_byte_level(tokenizer))
    reading = chosen(found, tokenizer, files.folder or ".", config.tokenizer_transformers_version)
    if config.tokenizer_transformers_version == "5":
        _cut_as_5(files, tokenizer, library)
    told = _cut_as_told(files, tokenizer, library, config.tokenizer_transformers_version or found[0].version)
    named, changes = _apply(reading, tokenizer, library)

    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    ids = {name: _special_id(named.get(f"{name}_token"), special, names) for name, names in _NAMES.items()}
    sentinels = {int(found[1]): i for token, i in special.items() if (found := _SENTINEL.fullmatch(token))}
    return LibraryTokenizer(
        "HuggingFaceTokenizer",
        path,
        tokenizer,
        eod=ids["eos"],
        pad_is_text=ids["pad"] is not None and _is_in_texts(ids["pad"], tokenizer, own, named, files.folder),
        words=GPT2_PATTERN if _is_plain_byte_level(tokenizer) else None,
        never=[token.content for token in added.values()],
        additional_special_tokens_ids=[sentinels[k] for k in sorted(sentinels)],
        beside=changes + told,
        **ids,
    )


def _apply(reading: SpecialTokens, tokenizer: Any, library: Any) -> tuple[dict[str, int | None], list[Any]]:
    """Add the tokens and the template of `reading`; returns (the ids of the named tokens, what has changed, for a hash)."""
    first, last = reading.ends(tokenizer)
    if reading.added:
        tokenizer.add_tokens([library.AddedToken(**vars(token)) for token in reading.added])
    named = {key: None if token is None else tokenizer.token_to_id(token) for key, token in reading.named.items()}
    changes: list[Any] = [[token.content, tokenizer.token_to_id(token.content)] for token in reading.added]
    if (first, last) != ends_of(tokenizer):
        around = [f"{reading.named[key]}" for key in NAMED[:2]]
        parts = [around[0]] * bool(first) + ["$A"] + [around[1]] * bool(last)
        tokens = [(around[k], named[NAMED[k]]) for k, ids in enumerate((first, last)) if ids]
        tokenizer.post_processor = library.processors.TemplateProcessing(single=parts, special_tokens=tokens)
        changes.append({"begin": first, "end": last})
    return named, changes


def _is_in_texts(pad: int, tokenizer: Any, own: dict[int, Any], named: dict[str, int | None], folder: str) -> bool:
    """Whether texts hold the pad of a folder: it is a word, stands for unknown words, begins or ends a text by the
    template or by another name that the folder gives it, or is part of a chat.

    own: the added tokens of the tokenizer.json; a word is none of them, unless merges make it.
    """
    model, token = _parts(tokenizer)["model"], tokenizer.id_to_token(pad)
    if tokenizer.model.token_to_id(token) == pad and (pad not in own or _is_made_by_merges(token, model)):
        return True
    unknown = model.get("unk_token")
    ids = [i for name, i in named.items() if name != "pad_token"]
    ids += [model.get("unk_id"), tokenizer.token_to_id(unknown) if isinstance(unknown, str) else None]
    # These have all tokens that begin or end a text: of Qwen 2.5's chats <|im_end|> and <|endoftext|> end one.
    for name in ("generation_config.json", "config.json"):
        said = object_in(folder, name)
        for key in ("bos_token_id", "eos_token_id"):
            value = said.get(key)
            ids += value if isinstance(value, list) else [value]
    if pad in [*ids, *tokenizer.encode("").ids]:
        return True
    names = (token, "pad_token")  # a template says the token itself, or its variable
    return any(name in template for template in chat_templates_in(folder) for name in names)


def _is_made_by_merges(token: str, model: dict[str, Any]) -> bool:
    """Whether BPE makes a token of its vocabulary from text. transformers adds every named token to a tokenizer.json that
    it saves, so that a pad "!" (CLIP's in OpenCLIP) is an added token there; <pad> of Llama's vocabulary is made by no
    merge."""
    if model["type"] != "BPE":
        return False
    pairs = (merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"])
    return len(token) == 1 or any("".join(pair) == token for pair in pairs)


def _cut_as_5(files: Files, tokenizer: Any, library: Any) -> None:
    """Replace the rules that 5.x does not take from the tokenizer.json of these classes."""
    if not isinstance(tokenizer.model, library.models.BPE):
        return
    spaced = files.config.get("add_prefix_space")
    if files.kind == "LlamaTokenizer" and not _is_byte_level(tokenizer):
        scheme = "always" if files.config.get("legacy") else "first"
        if spaced is not None and not spaced:
            scheme = "never"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    elif files.kind == "GPT2Tokenizer":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=bool(spaced))


def _cut_as_told(files: Files, tokenizer: Any, library: Any, version: str) -> list[Any]:
    """Cut text as tokenizer_config.json tells the classes of transformers; returns what has changed, for a hash.

    do_lower_case, strip_accents and tokenize_chinese_chars hold for a BERT, split_special_tokens for all.
    add_prefix_space holds
    for all in 4.57, in 5.x for `SPACED_BY_CONFIG` alone: refused where the two then differ and no version is chosen.
    """
    changes: list[Any] = []
    parts, said = _parts(tokenizer), files.config
    rules, cut = parts["normalizer"] or {}, parts["pre_tokenizer"] or {}
    if files.is_bert and rules.get("type") == "BertNormalizer":
        told = {
            "lowercase": bool(said.get("do_lower_case", True)),
            "strip_accents": said.get("strip_accents"),
            "handle_chinese_chars": bool(said.get("tokenize_chinese_chars", True)),
        }
        if told.items() - rules.items():
            tokenizer.normalizer = library.normalizers.BertNormalizer(clean_text=rules["clean_text"], **told)
            changes.append(told)
    if said.get("split_special_tokens"):
        tokenizer.encode_special_tokens = True  # a text's "<|endoftext|>" is the characters that it is made of
        changes.append({"split_special_tokens": True})
    spaced = bool(said.get("add_prefix_space"))
    if cut.get("type") == "ByteLevel" and cut["add_prefix_space"] != spaced and files.kind is not None:
        before = tokenizer.encode("a", add_special_tokens=False).ids
        if files.kind in SPACED_BY_CONFIG or version.startswith("4"):
            use_regex = cut.get("use_regex", True)
            tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=use_regex)
            changes.append({"add_prefix_space": spaced})
        if files.kind not in SPACED_BY_CONFIG and version == "4.57":
            after = tokenizer.encode("a", add_special_tokens=False).ids
            difference = f'the text "a" is {shown(*after)} in 4.57 and {shown(*before)} in 5.x (add_prefix_space)'
            raise ValueError(refusal(files.folder or ".", difference))
    return changes


def _token(added: Any) -> Token:
    names = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    return Token(**{name: getattr(added, name) for name in names})


def _special_id(given: int | None, special: dict[str, int], names: tuple[str, ...]) -> int | None:
    """The id that a file gives, else that of the first of `names` that is special, else None."""
    return given if given is not None else next((special[name] for name in names if name in special), None)


def _parts(tokenizer: Any) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())


def _is_byte_level(tokenizer: Any) -> bool:
    return any("ByteLevel" in repr(part) for part in (tokenizer.pre_tokenizer, tokenizer.decoder))


def _is_plain_byte_level(tokenizer: Any) -> bool:
    """Whether a tokenizer.json is byte-level BPE and nothing else, as tools/train_tokenizer.py writes it."""
    parts = _parts(tokenizer)
    cut, after = parts["pre_tokenizer"] or {}, parts["post_processor"] or {"type": "ByteLevel"}
    model = parts["model"]
    cuts_as_gpt2 = cut.get("type") == "ByteLevel" and not cut["add_prefix_space"] and cut.get("use_regex", True)
    is_bpe = model["type"] == "BPE" and not model.get("dropout")
    return cuts_as_gpt2 and is_bpe and after["type"] == "ByteLevel" and parts["normalizer"] is None
