"""Render conversations by the chat template of a model's folder, with the parts that the assistant wrote.

A template is a Jinja program out of a folder that somebody published, so it is not trusted: it runs in a process of its own, in
Jinja's sandbox, with limits on time, memory and output (`chat_template_process.py`). The text is that of transformers'
`apply_chat_template(tokenize=False)`.
"""

import importlib.util
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.tokenizers.hf_special_tokens import TokenizerFiles, read_json_object

_PROCESS = Path(__file__).with_name("chat_template_process.py")
_SECONDS = 10.0  # for one conversation; a template takes about a millisecond
_START_SECONDS = 60.0  # for Python and jinja2 to start on a loaded machine
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Messages = Sequence[Mapping[str, Any]]


class ChatTemplateError(ValueError):
    """The template cannot render a conversation, or is none."""


class ChatTemplateStopped(ValueError):
    """The template ran into a limit, so that no other conversation is tried."""


class Rendered(NamedTuple):
    """A conversation as text. spans: characters [start, stop) that the assistant wrote, in order."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """The template `source` with the texts of the special tokens that it may name. origin: its file, for messages.

    One process renders all conversations; `close` ends it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str):
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.origin = origin
        self._process: subprocess.Popen | None = None
        self._unread = b""

    @classmethod
    def of_tokenizer(cls, tokenizer_json: str, file: str | None = None) -> "ChatTemplate | None":
        """Return the template of the folder that `tokenizer_json` is in; None if the folder has none.

        file: a template of the user's, instead. Raises ValueError for files that cannot be read.
        """
        folder = os.path.dirname(tokenizer_json)
        tokens = _special_tokens(TokenizerFiles.read_beside(tokenizer_json))
        if file is not None:
            try:
                return cls(Path(file).read_text(encoding="utf-8"), tokens, file)
            except (OSError, UnicodeDecodeError) as error:
                raise ChatTemplateError(f"--chat-template {file} cannot be read ({error}); give a text file") from None
        found = _template_in(folder)
        return None if found is None else cls(found[1], tokens, found[0])

    def render(self, messages: Messages, *, add_generation_prompt: bool = False, **variables: Any) -> str:
        """Return the text of a conversation.

        add_generation_prompt: with the beginning of an answer. variables: others of the template, such as tools. Raises
        ChatTemplateError, ChatTemplateStopped, ImportError without jinja2.
        """
        request = {"messages": messages, "add_generation_prompt": add_generation_prompt, "variables": variables}
        return self._ask(request)["text"]

    def render_answers(self, messages: Messages, *, last: bool = False, **variables: Any) -> Rendered:
        """Return the text of a conversation, and what of it the assistant wrote; last: only its last message.

        They are the template's {% generation %} blocks. A template without them is rendered twice for each answer: up to the
        answer, with the prompt that begins one, and with it; the difference is the answer. Raises ChatTemplateError, also for
        a template that renders earlier turns otherwise once others follow.
        """
        first = len(messages) - 1 if last else 0
        reply = self._ask({"messages": messages, "answers": True, "first": first, "variables": variables})
        spans = [tuple(span) for span in reply["spans"]]
        return Rendered(reply["text"], spans[-1:] if last else spans)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        seconds = _SECONDS
        if self._process is None:
            self._start()
            seconds = _START_SECONDS
        request["variables"] = {**self.special_tokens, **request["variables"]}
        reply = self._exchange(request, seconds)
        if reply is None:
            self.close()
            raise ChatTemplateStopped(
                f"the chat template {self.origin} used more than {seconds:.0f} s or 1 GB for one conversation, or ended its "
                "process; correct the template, or give another with --chat-template FILE"
            )
        if "error" in reply:
            raise ChatTemplateError(f"the chat template {self.origin}: {reply['error']}")
        return reply

    def _start(self) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise ImportError("chat templates need the package jinja2: pip install 'jinja2>=3.1.6'")
        # -I: neither the environment nor the working folder adds code
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._unread = b""
        reply = self._exchange({"template": self.source}, _START_SECONDS)
        if reply is None or "error" in reply:
            self.close()
            reason = "its process ended" if reply is None else reply["error"]
            raise ChatTemplateStopped(f"{self.origin} is not a chat template that can be used: {reason}")

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send a line and return the answer; None if the process ended or took too long."""
        process = self._process
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([process.stdout], [], [], seconds)
            part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                return None
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
            self._process = None

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _special_tokens(files: TokenizerFiles) -> dict[str, str]:
    """Return the texts of the tokens that the files beside a tokenizer.json name, as templates call them."""
    tokens_map = read_json_object(files.folder, "special_tokens_map.json")
    tokens = {}
    for key in _TOKENS:
        value = files.config.get(key, tokens_map.get(key))
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            tokens[key] = text
    return tokens


def _template_in(folder: str) -> tuple[str, str] | None:
    """Return (file, text) of the template that a folder uses; of several in a list, the one named default."""
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            return path, file.read()
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_json_object(folder, name).get("chat_template")
        if isinstance(value, list):
            named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
            value = named.get("default")
        if isinstance(value, str):
            return os.path.join(folder, name), value
    return None
