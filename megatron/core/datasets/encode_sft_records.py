"""Turn records for fine-tuning into tokens, and which of them give loss: the answers, with the tokens that end them.

    {"messages": [{"role": "user", "content": ".."}, ..]}                OpenAI's form, by the model's chat template
    {"conversations": [{"from": "human", "value": ".."}, ..]}            ShareGPT's, likewise; from function_call: calls of tools
    {"prompt": "..", "completion": ".."}                                 texts, or lists of messages
    {"input": "..", "output": ".."}                                      texts with a space between
    {"instruction": "..", "input": "..", "output": ".."}                 Alpaca's, with LLaMA-Factory's `system` and `history`
    {"instruction": "..", "context": "..", "response": ".."}             Dolly's
    {"text": ".."}                                                       loss on all tokens

The keys of a file's first record decide. A record that cannot be used raises `UnusableRecord`, whose reasons are counted.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.token_ids_without_embedding_row import CappedVocabTokenizer, tokenizer_name
from megatron.core.tokenizers.chat_template import ChatTemplate, ChatTemplateError, Rendered
from megatron.core.tokenizers.huggingface_bpe_wordpiece_tiktoken import FastTokenizer

# ShareGPT's names of roles, and ours
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
# the texts around Alpaca's instructions (Stanford, 2023), for a model without a chat template
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_NO_TEXT = "has a prompt or an answer that is no text"
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
        messages = [_in_openai_form(self._with_text(message)) for message in messages]
        weights = [_weight_of(message) for message in messages]
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        variables = {key: record[key] for key in ("tools", "documents") if record.get(key) is not None}
        if isinstance(variables.get("tools"), str):  # LLaMA-Factory's
            variables["tools"] = _tools_in(variables["tools"])
        if isinstance(record.get("chat_template_kwargs"), dict):  # TRL's key
            variables |= record["chat_template_kwargs"]
        written = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [k for k in written if k >= first_answer and weights[k]]
        if not answers:
            raise UnusableRecord("has no message of the assistant" + (", or all have the weight 0" if written else ""))
        parts = [messages[: k + 1] for k in answers] if self.split_turns else [messages]
        for part in parts:
            rendered = self._rendered(template, part, variables)
            spans = rendered.spans
            if not self.split_turns and len(answers) < len(written):
                if len(spans) != len(written):
                    raise UnusableRecord(
                        "has answers without loss, and the chat template does not mark each answer; split them"
                    )
                spans = [span for k, span in zip(written, spans, strict=True) if k in answers]
            yield self._of_spans(rendered.text, spans)

    def _with_text(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with parts of text as one text, unless the template reads parts."""
        content = message.get("content")
        if not isinstance(content, list):
            return dict(message)
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise UnusableRecord(f"has a part of a message that is no text but {kind!s:.40}")
            texts.append(part["text"])
        return dict(message) if self._reads_parts else {**message, "content": "\n".join(texts)}

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads a message's content as a list of parts; some print the list as Python does."""
        try:
            message = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
            text = self._checked_template().render([message])
        except ChatTemplateError:
            return False
        return "Hello" in text and "'text'" not in text and '"text"' not in text

    def _rendered(
        self, template: ChatTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any]
    ) -> Rendered:
        """Render a conversation as it is, or as the template can read it.

        OpenAI's calls of tools have the content null, of which some templates fail or write None; and arguments as a text of
        JSON, which some write as JSON once more. Raises UnusableRecord.
        """

        def render(given: list[dict[str, Any]]) -> Rendered:
            return template.render_answers(given, last=self.split_turns, **variables)

        try:
            empty = [{**m, "content": ""} if m.get("content") is None and _functions_of(m) else m for m in messages]
            rendered = None
            if empty != messages:
                try:
                    rendered = render(messages)
                except ChatTemplateError:
                    messages = empty
                else:
                    if "None" in rendered.text and rendered.text.count("None") > render(empty).text.count("None"):
                        rendered, messages = None, empty
            rendered = rendered or render(messages)
            if any(json.dumps(text)[1:-1] in rendered.text for text in _texts_of_arguments(messages) if '"' in text):
                rendered = render([_with_arguments(message) for message in messages])
            names = [function.get("name") for message in messages for function in _functions_of(message)]
            if any(isinstance(name, str) and name not in rendered.text for name in names):
                raise UnusableRecord(
                    "has calls of tools, which the chat template leaves out; give one that writes them"
                )
            self._check_results(template, messages, variables, rendered.text)
            return rendered
        except ChatTemplateError as error:
            raise UnusableRecord(str(error)) from None

    @staticmethod
    def _check_results(
        template: ChatTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any], text: str
    ) -> None:
        """Raise UnusableRecord if the template leaves out what a tool has answered. text: the rendered conversation."""
        unseen = [
            m
            for m in messages
            if m["role"] == "tool" and isinstance(m.get("content"), str) and m["content"] not in text
        ]
        if not unseen:
            return
        # it may be there in another form, as JSON: then the text follows it
        others = [{**m, "content": m["content"] * 2} if m in unseen else m for m in messages]
        try:
            is_read = template.render(others, **variables) != template.render(messages, **variables)
        except ChatTemplateError:
            is_read = True
        if not is_read:
            raise UnusableRecord("has results of tools, which the chat template leaves out; give one that writes them")

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
            raise UnusableRecord(_NO_TEXT)
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


# ---------------------------------------------------------------- messages


def _weight_of(message: Mapping[str, Any]) -> int:
    """Return OpenAI's `weight` of a message: 0 for an answer that gives no loss."""
    weight = message.get("weight")
    if weight is None:
        return 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise UnusableRecord(f"has a message of the weight {weight!r:.40}, which must be 0 or 1")
    return int(weight)


def _in_openai_form(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with OpenAI's first form of a call, `function_call` and the role function, in that of `tool_calls`."""
    if message["role"] == "function":
        return {**message, "role": "tool"}
    call = message.get("function_call")
    if not isinstance(call, dict) or message.get("tool_calls"):
        return message
    message = {key: value for key, value in message.items() if key != "function_call"}
    return message | {"tool_calls": [{"type": "function", "function": call}]}


def _calls_in(text: Any) -> list[dict[str, Any]]:
    """Return the calls that a ShareGPT turn from function_call has as JSON: of one function, or a list. Raises UnusableRecord."""
    try:
        given = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        given = None
    functions = given if isinstance(given, list) else [given]
    if not functions or not all(
        isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function
        for function in functions
    ):
        raise UnusableRecord("has a turn from function_call that is no JSON with name and arguments, or a list of such")
    return [{"type": "function", "function": function} for function in functions]


def _tools_in(text: str) -> list[Any] | None:
    """Return the tools that a record has as a text of JSON; None without any. Raises UnusableRecord."""
    if not text.strip():
        return None
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError):
        tools = None
    if not isinstance(tools, list):
        raise UnusableRecord("has tools that are a text, which is no list in JSON")
    return tools or None


def _functions_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [call["function"] if isinstance(call.get("function"), dict) else call for call in calls]


def _texts_of_arguments(messages: list[dict[str, Any]]) -> list[str]:
    texts = [function.get("arguments") for message in messages for function in _functions_of(message)]
    return [text for text in texts if isinstance(text, str)]


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy whose calls have their arguments as objects, where they are texts of JSON."""
    copy = json.loads(json.dumps(message))
    for function in _functions_of(copy):
        try:
            arguments = json.loads(function["arguments"])
        except (KeyError, TypeError, ValueError):
            continue
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return copy


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
        message = {"role": role, "content": turn.get("value", turn.get("content")), "weight": turn.get("weight")}
        if turn.get("from", turn.get("role")) == "function_call":
            message |= {"content": "", "tool_calls": _calls_in(message["content"])}
        messages.append(message)
    return encoder._conversation(record, messages)


def _of_prompt(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return encoder._conversation(record, prompt + completion, first_answer=len(prompt))
    return encoder._pair(prompt, completion)


def _of_alpaca(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    return _of_instruction(encoder, record, record.get("input") or "", record["output"])


def _of_dolly(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    return _of_instruction(encoder, record, record.get("context") or "", record["response"])


def _of_instruction(encoder: SFTEncoder, record: Mapping[str, Any], given: Any, output: Any) -> Iterator[Example]:
    """Encode an instruction with what it is about and the answer. system, history: of LLaMA-Factory."""
    instruction = record["instruction"]
    system, history = record.get("system") or "", record.get("history") or []
    if not all(isinstance(text, str) for text in (instruction, given, output, system)):
        raise UnusableRecord(_NO_TEXT)
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise UnusableRecord("has a history that is no list of pairs of texts")
    if encoder.template is not None:
        question = f"{instruction}\n\n{given}" if given else instruction
        texts = [text for pair in history for text in pair] + [question, output]
        messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return encoder._conversation(record, messages)
    if system or history:
        raise UnusableRecord("has system or history, which need a chat template")
    paired = _ALPACA_PAIRED if given else ""
    prompt = _ALPACA.format(paired=paired, instruction=instruction, input=f"### Input:\n{given}\n\n" if given else "")
    return encoder._pair(prompt, output)


def _of_input(encoder: SFTEncoder, record: Mapping[str, Any]) -> Iterator[Example]:
    if not isinstance(record["output"], str):
        raise UnusableRecord(_NO_TEXT)
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
    "Dolly": Form(("instruction", "response"), _of_dolly),
    "input and output": Form(("input", "output"), _of_input),
    "text": Form(("text",), _of_text),
}


AN_ARRAY = (
    "the first line has list, and examples need an object on each line; write the elements to lines: python -c "
    '"import json, sys; [print(json.dumps(x)) for x in json.load(sys.stdin)]" < FILE.json > FILE.jsonl'
)


def form_of(record: Any) -> str:
    """Return the name of a file's form, by the keys of its first record. Raises ConfigError."""
    if isinstance(record, list):
        raise ConfigError(AN_ARRAY)
    if isinstance(record, dict):
        if {"text", "role", "parent_id"} <= record.keys():
            raise ConfigError(
                "the first line is one message of a tree (text, role, parent_id); make a line of each path from a question to "
                "its last answer, with the key messages"
            )
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
