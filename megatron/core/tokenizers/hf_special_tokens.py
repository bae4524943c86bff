"""The special tokens of a Hugging Face folder, with the ids that transformers gives them.

A tokenizer.json may lack tokens that only the files beside it name:

    tokenizer_config.json     added_tokens_decoder, bos_token, eos_token, ..., additional_special_tokens,
                              extra_special_tokens, add_bos_token, add_eos_token
    special_tokens_map.json   the same names, and
    added_tokens.json         token -> id; both are read only where tokenizer_config.json has no added_tokens_decoder

A token that tokenizer.json does not have gets the next free id, in this order: the tokens of added_tokens_decoder by
their ids (which matter for the order alone), the named ones, the others. transformers 4.57 and 5.23 read the files in
slightly different ways:

                                                  4.57                         5.23
    add_bos_token, add_eos_token                  for classes in               ignored; tokenizer.json's template counts
                                                  `_TEMPLATE_OF_4`
    extra_special_tokens, a list                  cannot be read               further special tokens
    image_token and the like, outside of          ignored                      special tokens
      extra_special_tokens
    order of the others                           additional_special_tokens,   then the lists
                                                  then those with a name

`SpecialTokens` is the result of one version. How text is cut is decided by tokenizer.json, which 4.57 follows, and by a
few keys of tokenizer_config.json (do_lower_case, split_special_tokens, add_prefix_space and the like). 5.23 has rules
of its own for a LlamaTokenizer (no space is put before a text that begins with one) and a GPT2Tokenizer, which are
applied where that version was chosen (`hf_tokenizer_json`).
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

# The tokens of transformers' classes where tokenizer_config.json names none. Classes are without "Fast" at the end.
_BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_BERTS = {  # by model_type of config.json, which decides where tokenizer_config.json names no class
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
# Classes whose add_bos_token and add_eos_token replace tokenizer.json's template in 4.57, with their defaults.
_TEMPLATE_OF_4 = {
    "LlamaTokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "CohereTokenizer": (True, False),
    "GPTNeoXTokenizer": (False, False),
}
# Classes with a fixed template in 5.x.
_TEMPLATE_OF_5 = {
    "CodeLlamaTokenizer": (True, False),
    "GPTNeoXTokenizer": (False, False),
    "RobertaTokenizer": (True, True),
}
# Classes whose add_prefix_space applies in both versions, for a tokenizer.json that cuts text into bytes at once.
PREFIX_SPACE_CLASSES = tuple(f"{name}Tokenizer" for name in ("GPT2", "Roberta", "CodeGen", "Whisper", "GPTNeoX"))
_WITH_SENTINELS = ("T5Tokenizer", "MT5Tokenizer")
# The keys of lists of further special tokens, the older first.
_OLD_LIST = "additional_special_tokens"
_NEW_LIST = "extra_special_tokens"


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
    def from_json(cls, value: Any, source: str) -> "Token":
        """Return the token that a JSON value describes. Raises ValueError, naming `source`."""
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, dict) or not isinstance(value.get("content"), str):
            raise ValueError(
                f'{source} is {value!r:.80}; it must be a string, or an object with the key "content"; correct the file'
            )
        flags = {name: bool(value.get(name, False)) for name in _FLAGS}
        flags["normalized"] = bool(value.get("normalized", not flags["special"]))
        return cls(value["content"], **flags)


@dataclass
class TokenizerFiles:
    """The content of the files beside a tokenizer.json.

    kind: tokenizer_class without "Fast"; None where no file has it.
    """

    folder: str
    config: dict[str, Any]
    kind: str | None = None
    by_id: dict[int, Token] = field(default_factory=dict)  # added_tokens_decoder, added_tokens.json
    tokens_map: dict[str, Any] = field(default_factory=dict)  # special_tokens_map.json, where it is read

    @classmethod
    def read_beside(cls, path: str) -> "TokenizerFiles":
        """Read the files beside the tokenizer.json `path`, if there are any.

        Raises ValueError for one that is damaged.
        """
        folder = os.path.dirname(path)
        config = read_json_object(folder, "tokenizer_config.json")
        kind = config.get("tokenizer_class")
        files = cls(folder, config, kind.removesuffix("Fast") if isinstance(kind, str) else None)
        files._read_tokens()
        return files

    def _read_tokens(self) -> None:
        """Read the tokens with ids: added_tokens_decoder, or where there is none, added_tokens.json."""
        # added_tokens_decoder
        name = "tokenizer_config.json: added_tokens_decoder"
        decoder = self.config.get("added_tokens_decoder")
        if decoder is not None:
            if not isinstance(decoder, dict) or not all(key.isdecimal() for key in decoder):
                raise ValueError(
                    f"{self.folder}/{name} is {decoder!r:.80}; it must be an object of ids and tokens; correct the file"
                )
            for i, token in decoder.items():
                self.by_id[int(i)] = Token.from_json(token, f"{self.folder}/{name}/{i}")
            return

        # added_tokens.json: a token is special if another file names it
        self.tokens_map = read_json_object(self.folder, "special_tokens_map.json")
        specials = set()
        for key in NAMED:
            token = self.named_token(key)
            if token is not None:
                specials.add(token.content)
        for key in (_OLD_LIST, _NEW_LIST):
            specials |= {token.content for token in self.listed_tokens(key)}
        for token, i in read_json_object(self.folder, "added_tokens.json").items():
            if type(i) is not int:
                raise ValueError(
                    f"{self.folder}/added_tokens.json gives {token!r:.40} the id {i!r:.40}, which is not valid; "
                    "correct the file"
                )
            is_special = token in specials
            self.by_id[i] = Token(token, normalized=not is_special, special=is_special)

    @property
    def is_bert(self) -> bool:
        if self.kind is not None:
            return self.kind in _BERTS.values()
        model_type = read_json_object(self.folder, "config.json").get("model_type")
        return isinstance(model_type, str) and model_type in _BERTS

    def has_key(self, key: str) -> bool:
        return key in self.tokens_map or key in self.config

    def named_token(self, key: str) -> Token | None:
        """Return the token that `key` names, with the flags of added_tokens_decoder where that has it too."""
        value = self.tokens_map.get(key, self.config.get(key))
        if value is None:
            return None
        token = Token.from_json(value, f"{self.folder}: {key} of its tokenizer")
        if key in self.tokens_map:
            token = replace(token, special=True)
        return self.find_by_content(token)

    def find_by_content(self, token: Token) -> Token:
        """Return the token of `by_id` with the same content; `token` itself if there is none."""
        for other in self.by_id.values():
            if other.content == token.content:
                return other
        return token

    def listed_tokens(self, *keys: str) -> list[Token]:
        """Return the tokens of additional_special_tokens or of extra_special_tokens, if that is a list.

        Those of tokenizer_config.json come first, then those that special_tokens_map.json has besides.
        """
        tokens: dict[str, Token] = {}
        for content in (self.config, self.tokens_map):
            for key in keys:
                value = content.get(key) or []
                if not isinstance(value, dict | list):
                    raise ValueError(
                        f"{self.folder}: {key} of its tokenizer is {value!r:.80}; it must be a list; correct the file"
                    )
                if isinstance(value, dict):  # tokens with names, see `extra_named_tokens`
                    continue
                for entry in value:
                    token = Token.from_json(entry, f"{self.folder}: {key} of its tokenizer")
                    tokens.setdefault(token.content, token)
        return list(tokens.values())

    def listed_tokens_in_5(self) -> list[Token]:
        """Return the list that 5.x reads.

        It is that of the newer key, else of the older; extra_special_tokens of special_tokens_map.json is added to it.
        """
        new_list = self.config.get(_NEW_LIST)
        if isinstance(new_list, list) and new_list:
            config = {_NEW_LIST: new_list}
        elif not new_list and _OLD_LIST in self.config:
            config = {_OLD_LIST: self.config[_OLD_LIST]}
        else:
            config = {_OLD_LIST: self.tokens_map.get(_OLD_LIST, self.config.get(_OLD_LIST))}
        tokens_map = {_NEW_LIST: self.tokens_map.get(_NEW_LIST)}
        return replace(self, config=config, tokens_map=tokens_map).listed_tokens(_OLD_LIST, _NEW_LIST)

    def extra_named_tokens(self) -> dict[str, Token]:
        """Return name -> token of extra_special_tokens, if that is an object."""
        value = self.tokens_map.get(_NEW_LIST, self.config.get(_NEW_LIST))
        if not isinstance(value, dict):
            return {}
        return {
            key: Token.from_json(token, f"{self.folder}: {key} of its tokenizer")
            for key, token in value.items()
            if token
        }


@dataclass
class SpecialTokens:
    """The special tokens of a folder as one version of transformers reads them.

    named: eos_token and the like -> content, None where the files say there is none. added: tokens that tokenizer.json
    has not, or has with other flags, in the order of their new ids. template: whether bos and eos are put around a
    text, (begin, end); None: the template of tokenizer.json is used.
    """

    version: str
    named: dict[str, str | None]
    added: list[Token]
    template: tuple[bool, bool] | None

    def ids(self, library: Any) -> dict[str, int]:
        """Return content -> id of `added`. library: the tokenizer of tokenizer.json, which is not changed."""
        ids: dict[str, int] = {}
        next_free = library.get_vocab_size(with_added_tokens=True)
        for token in self.added:
            i = library.token_to_id(token.content)
            if i is None:
                i = next_free
                next_free += 1
            ids[token.content] = i
        return ids

    def named_id(self, key: str, library: Any) -> int | None:
        """Return the id of the token that `key` names; None if there is none."""
        token = self.named.get(key)
        if token is None:
            return None
        return self.ids(library).get(token, library.token_to_id(token))

    def template_ids(self, library: Any) -> tuple[list[int | None], list[int | None]]:
        """Return the ids (before, after) every text."""
        if self.template is None:
            return template_ids_of(library)
        has_begin, has_end = self.template
        before: list[int | None] = []
        after: list[int | None] = []
        if has_begin and self.named.get("bos_token") is not None:
            before.append(self.named_id("bos_token", library))
        if has_end and self.named.get("eos_token") is not None:
            after.append(self.named_id("eos_token", library))
        return before, after


def template_ids_of(library: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the template of a tokenizer.json puts (before, after) every text."""
    text = _known_text(library)
    with_template = library.encode(text, add_special_tokens=True).ids
    plain = library.encode(text, add_special_tokens=False).ids
    start = 0
    for k in range(len(with_template)):
        if with_template[k : k + len(plain)] == plain:
            start = k
            break
    return with_template[:start], with_template[start + len(plain) :]


_MOST_TRIED = 1000  # tokens


def _known_text(library: Any) -> str:
    """Return a short text that the tokenizer can encode: one without unknown token knows only its own words."""
    for text in itertools.chain("a", itertools.islice(library.get_vocab(), _MOST_TRIED)):
        with contextlib.suppress(Exception):  # the library raises bare Exception
            if library.encode(text, add_special_tokens=False).ids:
                return text
    return "a"


def special_tokens_by_version(
    files: TokenizerFiles, present: Iterable[Token], *, is_byte_level: bool
) -> list[SpecialTokens]:
    """Return the special tokens of the folder in transformers 4.57 and 5.x; of 5.x alone where only that can read it.

    present: the added tokens of tokenizer.json; is_byte_level: whether it cuts text into bytes.
    """
    present = list(present)
    in_5 = _special_tokens(files, present, "5.x", is_byte_level)
    if isinstance(files.config.get(_NEW_LIST), list) or isinstance(files.tokens_map.get(_NEW_LIST), list):
        return [in_5]
    if files.kind is None:  # 4.57 then takes the class from config.json, which is about the model
        return [in_5]
    in_4 = _special_tokens(files, present, "4.57", is_byte_level)
    has_begin, has_end = in_4.template or (False, False)
    # 4.57 raises an error where the template needs a token that is not named
    if has_begin and not in_4.named.get("bos_token"):
        return [in_5]
    if has_end and not in_4.named.get("eos_token"):
        return [in_5]
    return [in_4, in_5]


def _special_tokens(files: TokenizerFiles, present: list[Token], version: str, is_byte_level: bool) -> SpecialTokens:
    """Return the special tokens of the folder in one version, "4.57" or "5.x"."""
    is_4 = version == "4.57"
    kind = files.kind
    if not is_4 and kind == "LlamaTokenizer" and is_byte_level:
        kind = None  # 5.x takes the class for an error of the file: Llama's own tokenizer is not byte-level

    # bos_token, eos_token and so on: those of the files, else the defaults of the class
    defaults = dict(_DEFAULTS.get(kind, {}))
    if not is_4:
        defaults |= _ONLY_OF_5.get(kind, {})
    named: dict[str, Token | None] = {}
    for key in NAMED:
        if files.has_key(key):
            named[key] = files.named_token(key)
            continue
        default = defaults.get(key.removesuffix("_token"))
        if default is not None:
            named[key] = files.find_by_content(Token(default))

    # the other special tokens: with names of their own, and in lists
    with_names = files.extra_named_tokens()
    listed = files.listed_tokens(_OLD_LIST)
    if not is_4:
        own_names = {}  # image_token and the like
        for key, value in (files.config | files.tokens_map).items():
            if key.endswith("_token") and key not in NAMED and isinstance(value, str):
                own_names[key] = Token.from_json(value, key)
        with_names = own_names | with_names
        listed = files.listed_tokens_in_5()
    if kind in _WITH_SENTINELS and not any("<extra_id_" in token.content for token in listed):
        count = files.config.get("extra_ids", 100)
        if type(count) is not int:
            count = 100
        listed = listed + [Token(f"<extra_id_{i}>") for i in range(count)]
    others = [*listed, *with_names.values()] if is_4 else [*with_names.values(), *listed]

    # the tokens to add, in the order of their new ids: by id, the named ones, the others
    present_tokens = set(present)
    added: dict[str, Token] = {}
    for _, token in sorted(files.by_id.items()):
        if token not in present_tokens:
            added[token.content] = token
    contents = {token.content for token in present} | added.keys()
    for token in [*filter(None, named.values()), *others]:
        if token.content not in contents:
            added[token.content] = token
            contents.add(token.content)

    # a named token is special whatever its flags say; in 4.57 the others are too
    specials = {token.content for token in named.values() if token is not None}
    if is_4:
        specials |= {token.content for token in others}
    return SpecialTokens(
        version=version,
        named={key: None if token is None else token.content for key, token in named.items()},
        added=[replace(token, special=token.special or token.content in specials) for token in added.values()],
        template=_template(files, kind, is_4),
    )


def _template(files: TokenizerFiles, kind: str | None, is_4: bool) -> tuple[bool, bool] | None:
    """Return whether (bos, eos) are put around a text; None where tokenizer.json's template is used."""
    if not is_4:
        return _TEMPLATE_OF_5.get(kind)
    if kind not in _TEMPLATE_OF_4:
        return None
    default_begin, default_end = _TEMPLATE_OF_4[kind]
    has_begin = bool(files.config.get("add_bos_token", default_begin))
    has_end = bool(files.config.get("add_eos_token", default_end))
    return has_begin, has_end


def select_version(candidates: list[SpecialTokens], library: Any, folder: str, version: str | None) -> SpecialTokens:
    """Return the candidate of the chosen version.

    candidates: those of `special_tokens_by_version`. version: --tokenizer-transformers-version. Raises ValueError where
    the candidates give different ids and no version is chosen.
    """
    if version is None:
        difference = _difference(candidates[0], candidates[-1], library)
        if difference:
            raise ValueError(version_conflict(folder, difference))
        return candidates[0]
    for candidate in candidates:
        if candidate.version.startswith(version):
            return candidate
    return candidates[-1]


def version_conflict(folder: str, difference: str) -> str:
    """Return the error message for a folder that the two versions read differently."""
    return (
        f"{folder}: transformers 4.57 and 5.x read its tokenizer differently: {difference}; choose one by "
        "--tokenizer-transformers-version 4 or 5"
    )


def _difference(in_4: SpecialTokens, in_5: SpecialTokens, library: Any) -> str:
    """Say where the two versions give different ids, with both; "" if they do not."""
    # the named tokens
    for key in NAMED:
        a = in_4.named_id(key, library)
        b = in_5.named_id(key, library)
        if a == b:
            continue
        # padding, or a mask, that no text gives may be missing in one of them; bos and eos may not
        is_missing_in_one = a is None or b is None
        if key in ("bos_token", "eos_token") or not is_missing_in_one:
            return f"{key} is {ids_as_text(a)} in 4.57 and {ids_as_text(b)} in 5.x"

    # the added tokens
    ids_in_4 = in_4.ids(library)
    ids_in_5 = in_5.ids(library)
    for token in ids_in_4 | ids_in_5:
        own_id = library.token_to_id(token)
        a = ids_in_4.get(token, own_id)
        b = ids_in_5.get(token, own_id)
        if a != b:
            return f"{token} is {ids_as_text(a)} in 4.57 and {ids_as_text(b)} in 5.x"

    # the template
    for verb, a, b in zip(("begins", "ends"), in_4.template_ids(library), in_5.template_ids(library)):
        if a != b:
            return f"every text {verb} with {ids_as_text(*a)} in 4.57 and with {ids_as_text(*b)} in 5.x"
    return ""


def ids_as_text(*ids: int | None) -> str:
    """Write ids for a message: "id 5 id 7", or "no token"."""
    return " ".join("no token" if i is None else f"id {i}" for i in ids) or "no token"


def read_json_object(folder: str, name: str) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no such file, or it has no object. Raises ValueError."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return content if isinstance(content, Mapping) else {}


def chat_templates_in(folder: str) -> list[str]:
    """Return the text of every chat template of a folder.

    They are in files of their own, and in tokenizer_config.json and chat_template.json, where several are a list of
    names and templates.
    """
    templates: list[Any] = []
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json_object(folder, name).get("chat_template")
        for entry in value if isinstance(value, list) else [value]:
            templates.append(entry.get("template") if isinstance(entry, Mapping) else entry)

    paths = [os.path.join(folder, "chat_template.jinja")]
    more = os.path.join(folder, "additional_chat_templates")
    if os.path.isdir(more):
        paths += [os.path.join(more, name) for name in sorted(os.listdir(more)) if name.endswith(".jinja")]
    for path in filter(os.path.isfile, paths):
        with open(path, encoding="utf-8", errors="replace") as file:
            templates.append(file.read())
    return [template for template in templates if isinstance(template, str)]
