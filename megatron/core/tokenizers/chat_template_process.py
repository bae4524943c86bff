"""Render chat templates in a process of its own: `chat_template.py` starts it, and sends and reads a JSON object a line.

It imports nothing of this package, so that it starts quickly and has nothing to lose. Jinja's sandbox keeps a template from
attributes of Python's objects; the limits on time, memory and output stop one that counts to 10^9 or repeats a text without end.
"""

import datetime
import json
import resource
import secrets
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

_MEMORY = 1 << 30  # bytes of address space beyond those at the start
_LONGEST = 1 << 20  # characters of a conversation's text
_MARK = secrets.token_hex(8)  # a template cannot know it
BEGIN, END = f"\ue000{_MARK}<", f"\ue000{_MARK}>"


class TemplateProblem(Exception):
    """A line for the user."""


class GenerationBlocks(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} around what the assistant writes. Marks it where `marks` is set."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)
    marks = False

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        text = caller()
        return f"{BEGIN}{text}{END}" if self.marks else text


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment that transformers renders chat templates in."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
    )

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # not Jinja's own, which escapes the characters of HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise TemplateProblem(str(message))

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class Renderer:
    """A compiled template."""

    def __init__(self, source: str):
        environment = make_environment()
        self.blocks = environment.extensions[f"{GenerationBlocks.identifier}"]
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateProblem(f"line {error.lineno}: {error.message}") from None
        self.has_blocks = "generation" in source and _has_generation(environment, source)

    def render(
        self, messages: list, variables: dict, *, add_generation_prompt: bool = False, marks: bool = False
    ) -> str:
        names = {"tools": None, "documents": None, **variables}
        self.blocks.marks = marks
        parts, length = [], 0
        for part in self.template.generate(messages=messages, add_generation_prompt=add_generation_prompt, **names):
            length += len(part)
            if length > _LONGEST:
                raise TemplateProblem(f"it makes more than {_LONGEST:,} characters of one conversation")
            parts.append(part)
        return "".join(parts)

    def answers(self, messages: list, variables: dict, first: int) -> tuple[str, list[list[int]]]:
        """Return the text and the spans of the assistant's parts; without blocks only those from message `first` on."""
        if self.has_blocks:
            return without_marks(self.render(messages, variables, marks=True))
        text = self.render(messages, variables)
        spans = []
        for k, message in enumerate(messages):
            if message.get("role") != "assistant" or k < first:
                continue
            # An answer that follows another has no prompt of its own, where the template joins them.
            before = self.render(messages[:k], variables, add_generation_prompt=True) if k else ""
            until = self.render(messages[: k + 1], variables)
            if not until.startswith(before):
                raise TemplateProblem(
                    f"the conversation up to turn {k + 1} with its answer does not begin with the conversation that asks for "
                    "it, so that the answer's part is unknown; add {% generation %} blocks to the template, or give another "
                    "with --chat-template FILE"
                )
            if not text.startswith(until):
                raise TemplateProblem(
                    f"turn {k + 1} is rendered otherwise once other turns follow (a template may drop earlier thinking); "
                    "give --sft-split-turns, so that each answer is an example of its own"
                )
            spans.append([len(before), len(until)])
        return text, spans


def _has_generation(environment: Any, source: str) -> bool:
    calls = environment.parse(source).find_all(jinja2.nodes.ExtensionAttribute)
    return any(call.identifier == GenerationBlocks.identifier for call in calls)


def without_marks(marked: str) -> tuple[str, list[list[int]]]:
    """Return (the text without marks, the spans that they enclosed)."""
    text, spans = "", []
    for part in marked.split(BEGIN):
        inside, end, after = part.partition(END)
        if end:
            spans.append([len(text), len(text) + len(inside)])
            text += inside + after
        else:
            text += part
    return text, spans


def answer(renderer: Renderer, request: dict) -> dict:
    messages, variables = request["messages"], request["variables"]
    if request.get("answers"):
        text, spans = renderer.answers(messages, variables, request["first"])
        return {"text": text, "spans": spans}
    prompt = request["add_generation_prompt"]
    return {"text": renderer.render(messages, variables, add_generation_prompt=prompt)}


def main() -> None:
    limit = _MEMORY
    with open("/proc/self/statm") as file:
        limit += int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    renderer = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if renderer is None:
                renderer = Renderer(request["template"])
                reply: dict = {}
            else:
                reply = answer(renderer, request)
        except MemoryError:
            reply = {"error": "it uses more than 1 GB of memory"}
        except RecursionError:
            reply = {"error": "it calls itself without end"}
        except (TemplateProblem, jinja2.TemplateError) as error:
            reply = {"error": " ".join(str(error).split())[:500] or type(error).__name__}
        except Exception as error:  # whatever a template's operations raise, such as a missing key
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
