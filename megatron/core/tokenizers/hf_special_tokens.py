"""The tokens that a folder's tokenizer.json lacks and the files beside it name, with the ids that transformers gives them.

    tokenizer_config.json     added_tokens_decoder, bos_token, eos_token, ..., additional_special_tokens,
                              extra_special_tokens,
                              add_bos_token, add_eos_token
    special_tokens_map.json   the same names, and
    added_tokens.json         token -> id; both are read only where tokenizer_config.json has no added_tokens_decoder

A token that tokenizer.json does not have gets the next free id, in this order: those of added_tokens_decoder by its ids
(which
count for the order alone), the named ones, the others. transformers 4.57 and 5.23 read the files in slightly different ways:

                                                   4.57                         5.23
    add_bos_token, add_eos_token                   hold for `_TEMPLATE_OF_4`    never; tokenizer.json's template holds
    extra_special_tokens, a list                   cannot be read               further special tokens
    image_token and the like, outside of           ignored                      special tokens
      extra_special_tokens
    order of the others                            additional_special_tokens,   then the lists
                                                   then those with a name

`SpecialTokens` is what one of them makes of the files. How text is cut is what tokenizer.json says, which 4.57 follows,
and a
few keys of tokenizer_config.json (do_lower_case, split_special_tokens, add_prefix_space and the like). 5.23 has rules of
its own
for a LlamaTokenizer (no space is put before a text that begins with one) and a GPT2Tokenizer, which count where that version
was chosen (`hugging_face`).
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

# What the classes of transformers name where tokenizer_config.json does not; without "Fast" at the end.
_BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_BERTS = {  # by model_type of config.json, which counts where tokenizer_config.json names no class
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
    "mobilebert": "MobileBertTokenizer",
}
_ROBERTA = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
_LLAMA = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
_T5 = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
_GPT2 = dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")
_QWEN2 = dict.fromkeys(("eos", "unk", "pad"), "<|endoftext|>")
_GEMMA = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>"}
_DEFAULTS: dict[str, dict[str, str]] = {
    **dict.fromkeys(_BERTS.values(), _BERT),
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer"), _ROBERTA),
    **dict.fromkeys(("T5Tokenizer", "MT5Tokenizer"), _T5),
    **dict.fromkeys(("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer", "WhisperTokenizer"), _GPT2),
    "LlamaTokenizer": _LLAMA,
    "GemmaTokenizer": _GEMMA,
    "Qwen2Tokenizer": _QWEN2,
}
_ONLY_OF_5 = {"GemmaTokenizer": {"mask": "<mask>"}, "GPTNeoXTokenizer": {"pad": "<|padding|>"}}
# Classes whose add_bos_token and add_eos_token 4.57 puts in the place of tokenizer.json's template, with their defaults.
_TEMPLATE_OF_4 = {
    "LlamaTokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "CohereTokenizer": (True, False),
    "GPTNeoXTokenizer": (False, False),
}
_TEMPLATE_OF_5 = {
    "CodeLlamaTokenizer": (True, False),
    "GPTNeoXTokenizer": (False, False),
    "RobertaTokenizer": (True, True),
}
# Classes whose add_prefix_space counts in both versions, for a tokenizer.json that cuts text into bytes at once.
SPACED_BY_CONFIG = tuple(f"{name}Tokenizer" for name in ("GPT2", "Roberta", "CodeGen", "Whisper", "GPTNeoX"))
_WITH_SENTINELS = ("T5Tokenizer", "MT5Tokenizer")


@dataclass(frozen=True)
class Token:
    """A token and how it is found in text: `tokenizers.AddedToken`, which cannot be compared."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True

    @classmethod
    def of(cls, value: Any, source: str) -> "Token":
        """The token that a JSON value describes. Raises ValueError, naming `source`."""
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, dict) and isinstance(value.get("content"), str):
            flags = {name: bool(value.get(name, False)) for name in _FLAGS}
            return cls(value["content"], **flags | {"normalized": bool(value.get("normalized", not flags["special"]))})
        raise ValueError(f"{source} is {value!r:.80}, neither a string nor an object with a content; correct the file")


@dataclass
class Files:
    """What the files beside a tokenizer.json say. kind: tokenizer_class, without "Fast"; None where no file says it."""

    folder: str
    config: dict[str, Any]
    kind: str | None = None
    by_id: dict[int, Token] = field(default_factory=dict)  # added_tokens_decoder, added_tokens.json
    mapped: dict[str, Any] = field(default_factory=dict)  # special_tokens_map.json, where it counts

    @classmethod
    def beside(cls, path: str) -> "Files":
        """Those beside the tokenizer.json `path`; without any, nothing is said. Raises ValueError for one that cannot
        be read."""
        folder = os.path.dirname(path)
        config = object_in(folder, "tokenizer_config.json")
        kind = config.get("tokenizer_class")
        result = cls(folder, config, kind.removesuffix("Fast") if isinstance(kind, str) else None)
        result._read_tokens()
        return result

    def _read_tokens(self) -> None:
        name = "tokenizer_config.json: added_tokens_decoder"
        if (given := self.config.get("added_tokens_decoder")) is not None:
            if not isinstance(given, dict) or not all(key.isdecimal() for key in given):
                raise ValueError(
                    f"{self.folder}/{name} is {given!r:.80}, not an object of ids and tokens; correct the file"
                )
            self.by_id = {int(i): Token.of(token, f"{self.folder}/{name}/{i}") for i, token in given.items()}
            return
        self.mapped = object_in(self.folder, "special_tokens_map.json")
        specials = {self.token(key).content for key in NAMED if self.token(key)}
        specials |= {token.content for key in _LISTS for token in self.listed(key)}
        for token, i in object_in(self.folder, "added_tokens.json").items():
            if type(i) is not int:
                raise ValueError(
                    f"{self.folder}/added_tokens.json gives {token!r:.40} the id {i!r:.40}; correct the file"
                )
            special = token in specials
            self.by_id[i] = Token(token, normalized=not special, special=special)

    @property
    def is_bert(self) -> bool:
        if self.kind is not None:
            return self.kind in _BERTS.values()
        kind = object_in(self.folder, "config.json").get("model_type")
        return isinstance(kind, str) and kind in _BERTS

    def says(self, key: str) -> bool:
        return key in self.mapped or key in self.config

    def token(self, key: str) -> Token | None:
        """The token that `key` names: with the flags of added_tokens_decoder where it is there too."""
        value = self.mapped.get(key, self.config.get(key))
        if value is None:
            return None
        token = Token.of(value, f"{self.folder}: {key} of its tokenizer")
        if key in self.mapped:
            token = Token(**vars(token) | {"special": True})
        return next((other for other in self.by_id.values() if other.content == token.content), token)

    def listed(self, *keys: str) -> list[Token]:
        """The tokens of additional_special_tokens or extra_special_tokens, if that is a list: of tokenizer_config.json, then
        those that special_tokens_map.json has besides."""
        found: dict[str, Token] = {}
        for said in (self.config, self.mapped):
            for key in keys:
                value = said.get(key) or []
                if not isinstance(value, dict | list):
                    raise ValueError(
                        f"{self.folder}: {key} of its tokenizer is {value!r:.80}, not a list; correct the file"
                    )
                for token in value if isinstance(value, list) else ():
                    token = Token.of(token, f"{self.folder}: {key} of its tokenizer")
                    found.setdefault(token.content, token)
        return list(found.values())

    def listed_as_5(self) -> list[Token]:
        """What 5.x takes for the list: the newer key's, else the older's, which the newer of special_tokens_map.json
        adds to."""
        older, newer = _LISTS
        extra = self.config.get(newer)
        if isinstance(extra, list) and extra:
            config = {newer: extra}
        elif not extra and older in self.config:
            config = {older: self.config[older]}
        else:
            config = {older: self.mapped.get(older, self.config.get(older))}
        return replace(self, config=config, mapped={newer: self.mapped.get(newer)}).listed(older, newer)

    def with_names(self) -> dict[str, Token]:
        """name -> token of extra_special_tokens, if that is an object."""
        value = self.mapped.get("extra_special_tokens", self.config.get("extra_special_tokens"))
        if not isinstance(value, dict):
            return {}
        return {key: Token.of(token, f"{self.folder}: {key} of its tokenizer") for key, token in value.items() if token}


_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass
class SpecialTokens:
    """What one version of transformers makes of a folder.

    named: eos_token and the like -> content, None where the files say there is none; added: tokens that tokenizer.json
    has not,
    or has with other flags, in the order of their new ids; template: whether begin and end are put around a text,
    (begin, end);
    None: as tokenizer.json says.
    """

    version: str
    named: dict[str, str | None]
    added: list[Token]
    template: tuple[bool, bool] | None

    def ids(self, library: Any) -> dict[str, int]:
        """content -> id of `added`."""
        found, free = {}, library.get_vocab_size(with_added_tokens=True)
        for token in self.added:
            known = library.token_to_id(token.content)
            found[token.content] = free if known is None else known
            free += known is None
        return found

    def ends(self, library: Any) -> tuple[list[int], list[int]]:
        """The ids (before, after) every text."""
        if self.template is None:
            return ends_of(library)
        ids = self.ids(library)
        tokens = [self.named.get(name) if given else None for name, given in zip(NAMED, self.template)]
        first, last = ([] if token is None else [ids.get(token, library.token_to_id(token))] for token in tokens)
        return first, last


def ends_of(library: Any) -> tuple[list[int], list[int]]:
    """The ids that the template of a tokenizer.json puts (before, after) every text."""
    whole, plain = (library.encode("a", add_special_tokens=given).ids for given in (True, False))
    at = next((k for k in range(len(whole)) if whole[k : k + len(plain)] == plain), 0)
    return whole[:at], whole[at + len(plain) :]


def readings(files: Files, there: Iterable[Token], *, is_byte_level: bool) -> list[SpecialTokens]:
    """What transformers 4.57 and 5.x make of the folder; one alone where only 5.x can read it.

    there: the added tokens of tokenizer.json; is_byte_level: whether it cuts text into bytes.
    """
    there = list(there)
    found = [_reading(files, there, "5.x", is_byte_level)]
    is_of_5 = any(isinstance(said.get(_LISTS[1]), list) for said in (files.config, files.mapped))
    if not is_of_5 and files.kind is not None:  # without a class, 4.57 asks config.json, which is about the model
        first = _reading(files, there, "4.57", is_byte_level)
        needed = first.template or (False, False)
        if all(first.named.get(name) for name, is_put in zip(NAMED, needed) if is_put):  # else 4.57 raises
            found.insert(0, first)
    return found


def _reading(files: Files, there: list[Token], version: str, is_byte_level: bool) -> SpecialTokens:
    is_4 = version == "4.57"
    # 5.x takes a Llama's class for an error of the file where the tokenizer is byte-level.
    kind = None if not is_4 and files.kind == "LlamaTokenizer" and is_byte_level else files.kind
    defaults = _DEFAULTS.get(kind, {}) | ({} if is_4 else _ONLY_OF_5.get(kind, {}))
    named: dict[str, Token | None] = {}
    for key in NAMED:
        if files.says(key):
            named[key] = files.token(key)
        elif (default := defaults.get(key.removesuffix("_token"))) is not None:
            named[key] = next((token for token in files.by_id.values() if token.content == default), Token(default))
    additional = files.listed(_LISTS[0])
    with_names = files.with_names()
    if not is_4:
        said = files.config | files.mapped
        own = {key: value for key, value in said.items() if key.endswith("_token") and key not in NAMED}
        own = {key: Token.of(value, key) for key, value in own.items() if isinstance(value, str)}
        with_names = own | with_names
        additional = files.listed_as_5()
    if kind in _WITH_SENTINELS and not any("<extra_id_" in token.content for token in additional):
        count = files.config.get("extra_ids", 100)
        additional = additional + [Token(f"<extra_id_{i}>") for i in range(count if type(count) is int else 100)]
    others = [*additional, *with_names.values()] if is_4 else [*with_names.values(), *additional]

    known = {*there}
    added = {token.content: token for _, token in sorted(files.by_id.items()) if token not in known}
    contents = {token.content for token in there} | added.keys()
    specials = {token.content for token in named.values() if token} | ({t.content for t in others} if is_4 else set())
    for token in [*filter(None, named.values()), *others]:
        if token.content not in contents:
            added[token.content] = token
            contents.add(token.content)
    tokens = [Token(**vars(t) | {"special": t.special or t.content in specials}) for t in added.values()]
    return SpecialTokens(
        version, {key: token and token.content for key, token in named.items()}, tokens, _template(files, kind, is_4)
    )


def _template(files: Files, kind: str | None, is_4: bool) -> tuple[bool, bool] | None:
    if not is_4:
        return _TEMPLATE_OF_5.get(kind)
    if kind not in _TEMPLATE_OF_4:
        return None
    first, last = _TEMPLATE_OF_4[kind]
    return bool(files.config.get("add_bos_token", first)), bool(files.config.get("add_eos_token", last))


def chosen(found: list[SpecialTokens], library: Any, folder: str, version: str | None) -> SpecialTokens:
    """The reading that counts. version: --tokenizer-transformers-version. Raises ValueError where it is needed and
    not given."""
    if version is not None:
        return next((reading for reading in found if reading.version.startswith(version)), found[-1])
    one, other = found[0], found[-1]
    if difference := _difference(one, other, library):
        raise ValueError(refusal(folder, difference))
    return one


def refusal(folder: str, difference: str) -> str:
    return (
        f"{folder}: transformers 4.57 and 5.x read its tokenizer differently: {difference}; choose one by "
        "--tokenizer-transformers-version 4 or 5"
    )


def _difference(one: SpecialTokens, other: SpecialTokens, library: Any) -> str:
    """Where two readings give other ids, with both; "" if they do not."""
    named = [{key: _id_of(reading, library, key) for key in NAMED} for reading in (one, other)]
    ids = [reading.ids(library) for reading in (one, other)]
    for key in NAMED:
        a, b = named[0][key], named[1][key]
        if a != b and (
            key in NAMED[:2] or None not in (a, b)
        ):  # padding, or a mask, that no text gives may be there or not
            return f"{key} is {shown(a)} in 4.57 and {shown(b)} in 5.x"
    for token in ids[0] | ids[1]:
        known = library.token_to_id(token)
        a, b = (known if i is None else i for i in (of.get(token) for of in ids))
        if a != b:
            return f"{token} is {shown(a)} in 4.57 and {shown(b)} in 5.x"
    for place, a, b in zip(("begins", "ends"), one.ends(library), other.ends(library)):
        if a != b:
            return f"every text {place} with {shown(*a)} in 4.57 and with {shown(*b)} in 5.x"
    return ""


def _id_of(reading: SpecialTokens, library: Any, key: str) -> int | None:
    token = reading.named.get(key)
    return None if token is None else reading.ids(library).get(token, library.token_to_id(token))


def shown(*ids: int | None) -> str:
    return " ".join("no token" if i is None else f"id {i}" for i in ids) or "no token"


def object_in(folder: str, name: str) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file. Raises ValueError."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            held = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return held if isinstance(held, Mapping) else {}


def chat_templates_in(folder: str) -> list[str]:
    """The text of every chat template of a folder: in files of their own, and in tokenizer_config.json and
    chat_template.json, where several are a list of names and templates."""
    held = [object_in(folder, name).get("chat_template") for name in ("tokenizer_config.json", "chat_template.json")]
    found = [part.get("template") if isinstance(part, Mapping) else part for one in held for part in _as_list(one)]
    paths = [os.path.join(folder, "chat_template.jinja")]
    more = os.path.join(folder, "additional_chat_templates")
    if os.path.isdir(more):
        paths += [os.path.join(more, name) for name in sorted(os.listdir(more)) if name.endswith(".jinja")]
    for path in filter(os.path.isfile, paths):
        with open(path, encoding="utf-8", errors="replace") as file:
            found.append(file.read())
    return [template for template in found if isinstance(template, str)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
