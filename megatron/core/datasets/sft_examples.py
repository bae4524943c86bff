"""Turn records for fine-tuning into tokens, and which of them give loss: the answers, with the tokens that end them.

    {"messages": [{"role": "user", "content": ".."}, ..]}                OpenAI's form, by the model's chat template
    {"conversations": [{"from": "human", "value": ".."}, ..]}            ShareGPT's, likewise
    {"prompt": "..", "completion": ".."}                                 texts, or lists of messages
    {"input": "..", "output": ".."}                                      texts with a space between
    {"instruction": "..", "input": "..", "output": ".."}                 Alpaca's
    {"text": ".."}                                                       loss on all tokens

The keys of a file's first record decide. A record that cannot be used raises `UnusableRecord`, whose reasons are counted.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.vocab_check import CappedVocabTokenizer, tokenizer_name
from megatron.core.tokenizers.bpe_wordpiece_tiktoken import FastTokenizer
from megatron.core.tokenizers.chat_template import ChatTemplate, ChatTemplateError

# ShareGPT's names of roles, and ours
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
# the texts around Alpaca's instructions (Stanford, 2023), for a model without a chat template
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_ALPACA_PAIRED = ", paired with an input that provides further context"


class UnusableRecord(ValueError):
    """A record without an example. The text is the reason, the same for records with the same fault."""


class Example(NamedTuple):
    """tokens: int64 [n]. is_trained: uint8 [n], 1 where predicting the token gives loss."""

    tokens: np.ndarray
    is_trained: np.ndarray


@dataclass(eq=False)
class SFTEncoder:
    """Encodes records. template: None for a model without one.

    split_turns: each answer of a conversation is an example of its own, which ends with it. form: name of `FORMS`; None
    until the first record decides.
    """

    tokenizer: Any
    template: ChatTemplate | None = None
    split_turns: bool = False
    end_ids: frozenset[int] = frozenset()  # tokens that end a turn: the folder's stop ids
    form: str | None = None
    fast: FastTokenizer | None = field(init=False)  # the tokenizer, if it tells which characters a token stands for
    special_ids: frozenset[int] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        self.fast = fast_tokenizer_of(self.tokenizer)
        if self.fast is not None:
            added = self.fast.library.get_added_tokens_decoder()
            self.special_ids = frozenset(i for i, token in added.items() if token.special)
        eod = self.tokenizer.eod
        if eod is not None:
            self.end_ids = self.end_ids | {eod}

    def encode(self, record: Any) -> list[Example]:
        """Return the examples of a record: one, or one for each answer with split_turns.

        Raises UnusableRecord; ConfigError for the first record, if its keys are those of no form or the tokenizer cannot
        encode the form.
        """
        if self.form is None:
            self.form = form_of(record)
        if not isinstance(record, dict):
            raise UnusableRecord(f"is {type(record).__name__}, not an object")
        missing = [key for key in FORMS[self.form].keys if key not in record]
        if missing:
            raise UnusableRecord(f"lacks {', '.join(missing)}, which the file's first line has")
        examples = []
        for example in FORMS[self.form].encode(self, record):
            if len(example.tokens) < 2 or not example.is_trained[1:].any():
                raise UnusableRecord("has no token that gives loss: no answer, or an empty one")
            examples.append(example)
        if not examples:
            raise UnusableRecord("has no answer")
        return examples

    # ---- conversations

    def _conversation(self, record: Mapping[str, Any], messages: list[Any], first_answer: int = 0) -> Iterator[Example]:
        """Yield the examples of messages. first_answer: answers before this message give no loss."""
        template = self._checked_template()
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise UnusableRecord("has a message that is no object with a role")
        variables = {key: record[key] for key in ("tools", "documents") if record.get(key) is not None}
        if isinstance(record.get("chat_template_kwargs"), dict):  # TRL's key
            variables |= record["chat_template_kwargs"]
        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant" and k >= first_answer]
        if not answers:
            raise UnusableRecord("has no message of the assistant")
        parts = [messages[: k + 1] for k in answers] if self.split_turns else [messages]
        for part in parts:
            try:
                rendered = template.render_answers(part, last=self.split_turns, **variables)
            except ChatTemplateError as error:
                raise UnusableRecord(str(error)) from None
            spans = rendered.spans
            if first_answer and not self.split_turns:
                spans = spans[len([m for m in messages[:first_answer] if m["role"] == "assistant"]) :]
            yield self._of_spans(rendered.text, spans)

    def _checked_template(self) -> ChatTemplate:
        name = tokenizer_name(self.tokenizer)
        if self.template is None:
            raise ConfigError(
                f"the data are conversations, but {name} has no chat template; give one with --chat-template FILE, or data "
                "with the keys prompt and completion"
            )
        if self.fast is None:
            raise ConfigError(
                f"the data are conversations, and {name} does not tell which characters a token stands for; use "
                "--tokenizer-type HuggingFaceTokenizer, or data with the keys prompt and completion"
            )
        return self.template

    def _of_spans(self, text: str, spans: list[tuple[int, int]]) -> Example:
        """Return the tokens of a rendered conversation; those that begin inside a span give loss, and the turn's end."""
        with self.fast.library_errors():
            encoding = self.fast.library.encode(text, add_special_tokens=False)  # the template has its own
        ids = np.array(encoding.ids, np.int64)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        is_trained = np.zeros(len(ids), np.uint8)
        for start, stop in spans:
            first, past = np.searchsorted(starts, (start, stop))
            # White space that a template puts after the token that ends the turn is not the model's to write.
            while (
                past - first > 1 and self._is_space(encoding, past - 1, text) and int(ids[past - 2]) in self.special_ids
            ):
                past -= 1
            # The end of the turn must have loss, or the model never stops, also where the template's block leaves it out.
            if past < len(ids) and int(ids[past]) in self.end_ids and starts[past] == stop:
                past += 1
            is_trained[first:past] = 1
        return Example(ids, is_trained)

    @staticmethod
    def _is_space(encoding: Any, number: int, text: str) -> bool:
        start, stop = encoding.offsets[number]
        return text[start:stop].isspace()

    # ---- texts

    def _pair(self, prompt: Any, completion: Any) -> Iterator[Example]:
        """Yield a prompt, which gives no loss, with what follows it and the token that ends a document."""
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise UnusableRecord("has a prompt or an answer that is no text")
        if not completion:
            raise UnusableRecord("has no token that gives loss: no answer, or an empty one")
        before = self._ids(prompt, begins=True)
        after = self._ids(completion, begins=False) + self._end()
        ids = np.array(before + after, np.int64)
        is_trained = np.zeros(len(ids), np.uint8)
        is_trained[len(before) :] = 1
        yield Example(ids, is_trained)

    def _text(self, text: Any) -> Iterator[Example]:
        if not isinstance(text, str) or not text:
            raise UnusableRecord("has a text that is none or empty")
        ids = np.array(self._ids(text, begins=True) + self._end(), np.int64)
        yield Example(ids, np.ones(len(ids), np.uint8))

    def _ids(self, text: str, *, begins: bool) -> list[int]:
        """Return the ids of a text. begins: with what the tokenizer puts before a text, such as <s>."""
        tokenizer = self.tokenizer
        try:
            if self.fast is None:
                return list(tokenizer.tokenize(text)) if text else []
            with self.fast.library_errors():
                ids = self.fast.library.encode(text, add_special_tokens=begins).ids
        except ValueError as error:
            raise UnusableRecord(str(error)) from None
        if begins and ids and ids[-1] == tokenizer.eod and not text.endswith(tokenizer.detokenize([tokenizer.eod])):
            ids = ids[:-1]  # some tokenizers end every text
        return ids

    def _end(self) -> list[int]:
        return [] if self.tokenizer.eod is None else [self.tokenizer.eod]


# ---------------------------------------------------------------- forms


def _of_messages(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    messages = record["messages"]
    if not isinstance(messages, list):
        raise UnusableRecord("has messages that are no list")
    return encoder._conversation(record, messages)


def _of_sharegpt(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRecord("has conversations that are no list of objects")
    messages = []
    if isinstance(record.get("system"), str) and record["system"]:
        messages.append({"role": "system", "content": record["system"]})
    for turn in turns:
        role = _ROLES.get(turn.get("from", turn.get("role")))
        if role is None:
            raise UnusableRecord(f"has a turn from {turn.get('from')!r:.40}; known are {', '.join(_ROLES)}")
        messages.append({"role": role, "content": turn.get("value", turn.get("content"))})
    return encoder._conversation(record, messages)


def _of_prompt(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return encoder._conversation(record, prompt + completion, first_answer=len(prompt))
    return encoder._pair(prompt, completion)


def _of_alpaca(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    instruction, given, output = record["instruction"], record.get("input") or "", record["output"]
    if not all(isinstance(text, str) for text in (instruction, given, output)):
        raise UnusableRecord("has a prompt or an answer that is no text")
    if encoder.template is not None:
        question = f"{instruction}\n\n{given}" if given else instruction
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        return encoder._conversation(record, messages)
    paired = _ALPACA_PAIRED if given else ""
    prompt = _ALPACA.format(paired=paired, instruction=instruction, input=f"### Input:\n{given}\n\n" if given else "")
    return encoder._pair(prompt, output)


def _of_input(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    if not isinstance(record["output"], str):
        raise UnusableRecord("has a prompt or an answer that is no text")
    return encoder._pair(record["input"], f" {record['output']}" if record["output"] else "")


def _of_text(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    return encoder._text(record["text"])


class Form(NamedTuple):
    """One form of records: the keys that all of them have, and how one becomes examples."""

    keys: tuple[str, ...]
    encode: Callable[[SFTEncoder, Mapping[str, Any]], Iterator[Example]]


# the first whose keys a record has
FORMS = {
    "messages": Form(("messages",), _of_messages),
    "ShareGPT": Form(("conversations",), _of_sharegpt),
    "prompt and completion": Form(("prompt", "completion"), _of_prompt),
    "Alpaca": Form(("instruction", "output"), _of_alpaca),
    "input and output": Form(("input", "output"), _of_input),
    "text": Form(("text",), _of_text),
}


def form_of(record: Any) -> str:
    """Return the name of a file's form, by the keys of its first record. Raises ConfigError."""
    if isinstance(record, dict):
        for name, form in FORMS.items():
            if all(key in record for key in form.keys):
                return name
    found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    known = "; ".join(" and ".join(form.keys) for form in FORMS.values())
    raise ConfigError(f"the first line has {found or 'no keys'}, and examples need one of these sets of keys: {known}")


def read_json_line(line: bytes) -> Any:
    """Return the value of a line of JSON. Raises UnusableRecord."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise UnusableRecord("is not valid JSON in UTF-8") from None


def fast_tokenizer_of(tokenizer: Any) -> FastTokenizer | None:
    """Return the tokenizer as one of the library `tokenizers`; None for another kind."""
    inner = tokenizer.tokenizer if isinstance(tokenizer, CappedVocabTokenizer) else tokenizer
    return inner if isinstance(inner, FastTokenizer) else None


def marked_text(example: Example, tokenizer: Any) -> str:
    """Return an example's text with its parts that give loss between >>> and <<<."""
    is_trained = example.is_trained.astype(bool)
    borders = np.flatnonzero(np.diff(is_trained)) + 1
    parts = []
    for run in np.split(np.arange(len(is_trained)), borders):
        text = tokenizer.detokenize([int(i) for i in example.tokens[run]])
        parts.append(f">>>{text}<<<" if is_trained[run[0]] else text)
    return "".join(parts)
