"""The questions of tools/configure.py. Each is a flag as well; --yes takes the defaults of the others. Without torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from megatron.core.base.dataclass_flags import (
    ConfigError,
    Count,
    FlagConfig,
    FlagParser,
    Positive,
    add_flags,
    flag_of,
    option,
    option_fields,
)
from tools.configuring.layouts import Work
from tools.configuring.sizes import SIZES, Model, Size, nearest

_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
OWN_SHAPE = "shape"
_SIZES = "; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in SIZES.items())


@dataclass(frozen=True)
class Answers(FlagConfig):
    """The job: asked for, unless given."""

    machines: Count | None = option(None, "machines")
    devices: Count | None = option(None, "devices of each machine; with --device cpu the processes of each machine")
    device: Literal["gpu", "cpu"] | None = option(None, "what computes: gpu or cpu")
    memory: Positive | None = option(None, "GiB of each device; with --device cpu of each machine", metavar="GIB")
    model: Literal["gpt", "bert", "llama"] | None = option(None, "family of the model: gpt, bert or llama")
    size: str | None = option(None, f"published size, by its parameters: {_SIZES}; or {OWN_SHAPE}")
    num_layers: Count | None = option(None, "layers, of a model of another size")
    hidden_size: Count | None = option(None, "hidden size")
    num_attention_heads: Count | None = option(None, "attention heads")
    num_query_groups: Count | None = option(None, "key/value heads of a llama; default: one for each head; never asked")
    ffn_hidden_size: Count | None = option(
        None, "width inside the MLP; default: 4 x hidden, of a llama 8/3 x hidden; never asked"
    )
    vocab_size: Count | None = option(None, "words; default: those of the size; never asked")
    seq_length: Count | None = option(None, "tokens of a sequence")
    global_batch_size: Count | None = option(None, "sequences of a step, over all ranks")
    precision: Literal["bf16", "fp16", "fp32"] | None = option(None, "precision of the parameters: bf16, fp16 or fp32")

    def problems(self) -> Iterator[str]:
        own = [flag_of(name) for name in _SHAPE if getattr(self, name) is not None]
        if self.size not in (None, OWN_SHAPE) and own:
            yield f"--size {self.size} and {', '.join(own)} exclude each other; leave one out"
        if self.model and self.size not in (None, OWN_SHAPE) and self.size not in SIZES[self.model]:
            names = f"{', '.join(SIZES[self.model])}, or {OWN_SHAPE}; the nearest is {nearest(self.model, self.size)}"
            yield f"--size is {self.size}; of {self.model} it is one of {names}"
        if self.num_query_groups and self.model not in (None, "llama"):
            yield f"--num-query-groups is for --model llama, and this is {self.model}; leave it out"


@dataclass(frozen=True)
class Choices(FlagConfig):
    """The search and its result."""

    micro_batch_size: Count | None = option(
        None, "sequences that a rank computes at once; default: tries 1, 2, 4 and 8"
    )
    usable: Annotated[float, "(0, 1]"] = option(
        0.9, "share of the memory that a layout may take; the rest is for workspaces of kernels and of communication"
    )
    show: Count = option(3, "end the search at this many layouts that fit, each with other sizes of TP and PP")
    choose: Count | None = option(None, "the layout of those that fit, by its number; with --yes default: 1")
    train_iters: Count = option(1000, "iterations that are written")
    lr: Positive = option(3e-4, "learning rate that is written")
    yes: bool = option(False, "ask nothing")
    shell: str | None = option(None, "write a script for bash", metavar="FILE.sh")
    yaml: str | None = option(None, "write the flags as a file for --yaml-cfg", metavar="FILE.yaml")
    overwrite: bool = option(False, "replace files that are there")


class Question(NamedTuple):
    """A field of Answers that is asked for. default: from the answers so far. is_asked: whether they leave it open."""

    name: str
    default: Callable[[Answers], Any]
    is_asked: Callable[[Answers], bool] = lambda answers: True


def _has_own_shape(answers: Answers) -> bool:
    return answers.size == OWN_SHAPE


def _even(at_least: int, ranks: int) -> int:
    """A batch that every layout divides."""
    return -(-at_least // ranks) * ranks


QUESTIONS = (
    Question("device", lambda _: "gpu"),
    Question("machines", lambda _: 1),
    Question("devices", lambda a: 8 if a.device == "gpu" else 1),
    Question("memory", lambda a: 80.0 if a.device == "gpu" else 16.0),
    Question("model", lambda _: "gpt"),
    Question("size", lambda a: list(SIZES[a.model])[1 if a.device == "gpu" else 0]),
    *(Question(name, lambda _: None, _has_own_shape) for name in _SHAPE),
    Question("seq_length", lambda a: 1024 if _has_own_shape(a) else SIZES[a.model][a.size].seq),
    Question("global_batch_size", lambda a: _even(256 if a.device == "gpu" else 8, a.machines * a.devices)),
    Question("precision", lambda a: "bf16" if a.device == "gpu" else "fp32"),
)


def complete(given: Answers, ask: Callable[[str], str] | None, say: Callable[[str], None]) -> Answers:
    """All questions answered: by flags, by `ask` (a text for each question; None: by the defaults).

    Raises ConfigError for a question that has neither an answer nor a default. A wrong answer is asked for again.
    """
    answers = given
    if answers.size is None and any(getattr(answers, name) is not None for name in _SHAPE):
        answers = replace(answers, size=OWN_SHAPE)
    for question in QUESTIONS:
        if getattr(answers, question.name) is None and question.is_asked(answers):
            answers = _answered(answers, question, ask, say)
    return answers


def _answered(answers: Answers, question: Question, ask: Callable | None, say: Callable[[str], None]) -> Answers:
    default, flag = question.default(answers), flag_of(question.name)
    shown = next(field.metadata["help"] for field in option_fields(Answers) if field.name == question.name)
    if question.name == "size":
        shown = f"size ({', '.join(SIZES[answers.model])}, or {OWN_SHAPE})"
    while True:
        text = line(ask, f"{shown}{'' if default is None else f' [{default}]'}: ") if ask else ""
        if not text and default is None:
            problem = f"{flag} is needed: {shown}"
            if not ask:
                raise ConfigError(problem)
            say(problem)
            continue
        try:
            return replace(answers, **{question.name: read_answer(flag, text) if text else default})
        except ConfigError as error:
            say("\n".join(error.problems))


def line(ask: Callable[[str], str], prompt: str) -> str:
    """The answer to a question. Raises ConfigError at the end of the input."""
    try:
        return ask(prompt).strip()
    except EOFError:
        raise ConfigError("the answers have ended; give flags, or --yes for the defaults") from None


def read_answer(flag: str, text: str, config: type = Answers) -> Any:
    """The value of a flag of `config`. Raises ConfigError."""
    parser = FlagParser(add_help=False)
    add_flags(parser, config)
    return next(iter(vars(parser.parse_known_args([f"{flag}={text}"])[0]).values()))


def model_of(answers: Answers) -> Model:
    """The model of complete answers."""
    if _has_own_shape(answers):
        vocab = SIZES[answers.model][list(SIZES[answers.model])[1]].vocab
        shape = (getattr(answers, name) for name in _SHAPE)
        size = Size(*shape, vocab, answers.seq_length, tied=answers.model != "llama")
    else:
        size = SIZES[answers.model][answers.size]
    changed = {"groups": answers.num_query_groups, "ffn": answers.ffn_hidden_size, "vocab": answers.vocab_size}
    return Model(answers.model, size._replace(**{name: value for name, value in changed.items() if value}))


def work_of(answers: Answers, micro_batch: int | None = None) -> Work:
    """The job of complete answers, as numbers. micro_batch: None: several are tried."""
    micro_batches = (1, 2, 4, 8) if micro_batch is None else (micro_batch,)
    sizes = (answers.seq_length, answers.global_batch_size, micro_batches, answers.machines, answers.devices)
    return Work(model_of(answers), *sizes, answers.device, answers.precision != "fp32")
