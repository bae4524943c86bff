"""Questions of tools/configure.py. A flag may answer one; --yes takes the defaults of the others. Needs no torch."""

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
WITH_EXPERTS = ("mixtral", "qwen3-moe")
_SIZES = "; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in SIZES.items())


@dataclass(frozen=True)
class Answers(FlagConfig):
    """The job: asked for, unless given."""

    machines: Count | None = option(None, "machines")
    devices: Count | None = option(None, "devices of each machine; with --device cpu the processes of each machine")
    device: Literal["gpu", "cpu"] | None = option(None, "what computes: gpu or cpu")
    memory: Positive | None = option(None, "GiB of each device; with --device cpu of each machine", metavar="GIB")
    model: Literal["gpt", "bert", "llama", "mixtral", "qwen3-moe"] | None = option(
        None, "family of the model: gpt, bert, llama, mixtral or qwen3-moe"
    )
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
        if self.model in WITH_EXPERTS and (self.size == OWN_SHAPE or self.ffn_hidden_size or (own and not self.size)):
            sizes = ", ".join(SIZES[self.model])
            yield f"--model {self.model} has published sizes alone; give --size {sizes}, without flags of another shape"
        if self.model and self.size not in (None, OWN_SHAPE) and self.size not in SIZES[self.model]:
            names = f"{', '.join(SIZES[self.model])}, or {OWN_SHAPE}; the nearest is {nearest(self.model, self.size)}"
            yield f"--size is {self.size}; of {self.model} it is one of {names}"
        if self.num_query_groups and self.model not in (None, "llama"):
            yield f"--num-query-groups is for --model llama, and this is {self.model}; leave it out"


@dataclass(frozen=True)
class Choices(FlagConfig):
    """The search and its result."""

    micro_batch_size: Count | None = option(None, "sequences per forward of a rank; default: tries 1, 2, 4 and 8")
    usable: Annotated[float, "(0, 1]"] = option(
        0.9, "share of the memory that a layout may use; the rest is for workspaces of kernels and communication"
    )
    show: Count = option(3, "stop the search after this many layouts that fit, each with other sizes of TP and PP")
    choose: Count | None = option(None, "number of the layout to choose among those that fit; with --yes default: 1")
    train_iters: Count = option(1000, "value of --train-iters to write")
    lr: Positive = option(3e-4, "value of --lr to write")
    yes: bool = option(False, "ask no questions")
    shell: str | None = option(None, "write a bash script to this file", metavar="FILE.sh")
    yaml: str | None = option(None, "write the flags to this file, for --yaml-cfg", metavar="FILE.yaml")
    overwrite: bool = option(False, "replace existing files")


class Question(NamedTuple):
    """A question for a field of Answers."""

    name: str  # of the field
    default: Callable[[Answers], Any]  # the default, given the answers so far
    is_asked: Callable[[Answers], bool] = lambda answers: True  # whether the answers so far leave the field open


def _has_own_shape(answers: Answers) -> bool:
    return answers.size == OWN_SHAPE


def _round_up(at_least: int, ranks: int) -> int:
    """Return the smallest batch size of at least this that the ranks divide, so that every layout divides it."""
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
    Question("global_batch_size", lambda a: _round_up(256 if a.device == "gpu" else 8, a.machines * a.devices)),
    Question("precision", lambda a: "bf16" if a.device == "gpu" else "fp32"),
)


def complete(answers: Answers, ask: Callable[[str], str] | None, say: Callable[[str], None]) -> Answers:
    """Return `answers` with every open question answered.

    ask: shows a question and returns the text of the answer; None: the defaults are taken. A question is asked again
    after an invalid answer. Raises ConfigError, without `ask`, for a question that has no default.
    """
    if answers.size is None and any(getattr(answers, name) is not None for name in _SHAPE):
        answers = replace(answers, size=OWN_SHAPE)
    for question in QUESTIONS:
        if getattr(answers, question.name) is None and question.is_asked(answers):
            answers = _with_answer(answers, question, ask, say)
    return answers


def _with_answer(answers: Answers, question: Question, ask: Callable | None, say: Callable[[str], None]) -> Answers:
    """Ask a question until its answer is valid; return the answers with it."""
    default = question.default(answers)
    flag = flag_of(question.name)
    if question.name == "size":
        question_text = f"size ({', '.join(SIZES[answers.model])}, or {OWN_SHAPE})"
    else:
        question_text = next(field.metadata["help"] for field in option_fields(Answers) if field.name == question.name)
    prompt = f"{question_text}: " if default is None else f"{question_text} [{default}]: "
    while True:
        text = line(ask, prompt) if ask else ""
        if not text and default is None:
            problem = f"{flag} is needed: {question_text}"
            if not ask:
                raise ConfigError(problem)
            say(problem)
            continue
        try:
            value = read_answer(flag, text) if text else default
            return replace(answers, **{question.name: value})
        except ConfigError as error:
            say("\n".join(error.problems))


def line(ask: Callable[[str], str], prompt: str) -> str:
    """Return the answer to a question. Raises ConfigError at the end of the input."""
    try:
        return ask(prompt).strip()
    except EOFError:
        raise ConfigError("the answers have ended; give flags, or --yes for the defaults") from None


def read_answer(flag: str, text: str, config: type = Answers) -> Any:
    """Parse an answer like the value of a flag of `config`. Raises ConfigError."""
    parser = FlagParser(add_help=False)
    add_flags(parser, config)
    namespace, _ = parser.parse_known_args([f"{flag}={text}"])
    return next(iter(vars(namespace).values()))


def model_of(answers: Answers) -> Model:
    """Return the model of complete answers."""
    if _has_own_shape(answers):
        published_sizes = list(SIZES[answers.model].values())
        vocab = published_sizes[1].vocab  # the first is "tiny"
        shape = (getattr(answers, name) for name in _SHAPE)
        size = Size(*shape, vocab, answers.seq_length, tied=answers.model != "llama")
    else:
        size = SIZES[answers.model][answers.size]
    if answers.num_query_groups:
        size = size._replace(groups=answers.num_query_groups)
    if answers.ffn_hidden_size:
        size = size._replace(ffn=answers.ffn_hidden_size)
    if answers.vocab_size:
        size = size._replace(vocab=answers.vocab_size)
    return Model(answers.model, size)


def work_of(answers: Answers, micro_batch: int | None = None) -> Work:
    """Return the job of complete answers, as numbers. micro_batch: None: several are tried."""
    return Work(
        model=model_of(answers),
        seq_length=answers.seq_length,
        global_batch=answers.global_batch_size,
        micro_batches=(1, 2, 4, 8) if micro_batch is None else (micro_batch,),
        machines=answers.machines,
        devices=answers.devices,
        device=answers.device,
        half=answers.precision != "fp32",
    )
