"""The command line: flags from the components' dataclasses, Megatron's other flags by table, the user's own by function."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.config import ConfigError, FlagParser, add_flags, build, unknown_flag_message
from megatron.core.tokenizers.tokenizer_config import NEEDED
from megatron.training.config import COMPONENTS, Config

# Flags of Megatron's scripts that need no action here: flag -> (values it takes, why it changes nothing).
NO_EFFECT: dict[str, tuple[str, str]] = {
    "--accumulate-allreduce-grads-in-fp32": (
        "0",
        "gradients are always accumulated in float32; --grad-reduce-in-bf16 is about what travels",
    ),
    "--apply-query-key-layer-scaling": (
        "0",
        "queries are scaled before the product and the softmax is taken in float32, so float16 scores do not overflow",
    ),
    "--attention-softmax-in-fp32": ("0", "the softmax is always taken in float32"),
    "--calculate-per-token-loss": ("0", "the loss is always the mean over all tokens of the step"),
    "--cross-entropy-loss-fusion": ("0", "there is one cross entropy, and it never gathers the vocabulary"),
    "--data-impl": ("1", "data files are always memory-mapped"),
    "--dataloader-type": ("1", "samples are read in order; other loaders are not built yet"),
    "--DDP-impl": ("1", "there is one data-parallel wrapper"),
    "--fp16-lm-cross-entropy": ("0", "the cross entropy is always taken in float32"),
    "--no-async-tensor-model-parallel-allreduce": (
        "0",
        "the all-reduce overlaps the weight gradient, which changes no number",
    ),
    "--no-bias-dropout-fusion": ("0", "kernels are chosen by what the device can do"),
    "--no-bias-gelu-fusion": ("0", "kernels are chosen by what the device can do"),
    "--no-create-attention-mask-in-dataloader": ("0", "no mask is ever made for causal attention"),
    "--no-gradient-accumulation-fusion": ("0", "weight gradients are written straight into their buffer"),
    "--no-masked-softmax-fusion": ("0", "kernels are chosen by what the device can do"),
    "--no-mmap-bin-files": ("0", "data files are always memory-mapped"),
    "--no-persist-layer-norm": ("0", "kernels are chosen by what the device can do"),
    "--no-rope-fusion": ("0", "kernels are chosen by what the device can do"),
    "--no-load-rng": ("0", "random numbers follow from --seed and the position in the run; there is no state to load"),
    "--no-save-rng": ("0", "random numbers follow from --seed and the position in the run; there is no state to save"),
    "--num-workers": ("1", "samples are read by the training process"),
    "--transformer-impl": ("1", "there is one implementation"),
    "--use-contiguous-buffers-in-ddp": ("0", "gradients always lie in contiguous buffers"),
    "--use-cpu-initialization": ("0", "initial weights are always the same in every layout"),
    "--use-flash-attn": ("0", "the fused attention kernel is used wherever it can do the work"),
    "--use-mcore-models": ("0", "there is one implementation"),
}

# Flags that would change the run, and cannot yet: flag -> (values it takes, what to do instead).
REFUSED: dict[str, tuple[str, str]] = {
    "--batch-size": ("1", "was renamed; use --micro-batch-size"),
    "--model-parallel-size": ("1", "was renamed; use --tensor-model-parallel-size"),
    "--warmup": ("1", "was renamed; use --lr-warmup-fraction"),
    "--num-experts": ("1", "mixtures of experts are not built yet; leave it out"),
    "--tensorboard-dir": ("1", "is not built yet; tools/plot_run.py draws the log"),
    "--wandb-project": ("1", "is not built yet; tools/plot_run.py draws the log"),
}

# Other spellings of a setting: flag -> the fields that it stands for.
SHORTHAND: dict[str, dict[str, Any]] = {
    "--use-rotary-position-embeddings": {"position_embedding_type": "rope"},
    "--recompute-activations": {"recompute_granularity": "selective"},
    "--checkpoint-activations": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "--no-position-embedding": {},  # classic scripts give it beside the rotary flag
}


class ArgumentsError(ConfigError):
    """A command line that cannot be; `parts` are the components that can."""

    def __init__(self, problems: list[str], parts: dict[str, Any]):
        super().__init__(problems)
        self.parts = parts


ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


class Arguments:
    """A read-only view of all settings by field name, as `get_args()` gives it to users' scripts."""

    def __init__(self, values: Mapping[str, Any]):
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":  # asked for by copy, before there are values
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"there is no setting {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"settings are read-only: {name} cannot be changed to {value!r}; give it on the command line"
        )

    def __contains__(self, name: str) -> bool:
        return name in self._values


def make_parser(extra_args_provider: ExtraArgs | None = None) -> FlagParser:
    """The parser of every flag that a run accepts, refuses or passes over."""
    parser = FlagParser(description="Pretrain a transformer.")
    for component in COMPONENTS.values():
        add_flags(parser, component)
    shorthand = parser.add_argument_group("Other spellings")
    for flag, fields in SHORTHAND.items():
        text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in fields.items())
        text = f"the same as {text}" if text else "the same as --position-embedding-type none, unless another is given"
        shorthand.add_argument(flag, dest=flag, action="store_true", default=argparse.SUPPRESS, help=text)
    _add_table(parser, "Accepted without effect", NO_EFFECT)
    _add_table(parser, "Refused", REFUSED)
    if extra_args_provider is not None:
        extra_args_provider(parser)
    return parser


def _add_table(parser: argparse.ArgumentParser, title: str, table: Mapping[str, tuple[str, str]]) -> None:
    group = parser.add_argument_group(title)
    for flag, (values, why) in table.items():
        takes = {"action": "store_true"} if values == "0" else {"nargs": int(values), "metavar": "X"}
        group.add_argument(flag, dest=flag, default=argparse.SUPPRESS, help=why.replace("%", "%%"), **takes)


def parse_args(
    argv: Sequence[str] | None = None,
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> tuple[Config, Arguments, list[str]]:
    """(config, view for scripts, lines about flags that have no effect) of a command line.

    args_defaults: values for settings that the command line leaves out. Raises ConfigError with all problems at once.
    """
    parser = make_parser(extra_args_provider)
    known, unknown = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    given = vars(known)
    problems = [unknown_flag_message(flag, parser.known_flags()) for flag in unknown if flag.startswith("--")]
    if unknown and not problems:
        problems = [f"{' '.join(unknown)} does not belong to any flag"]
    problems += [f"{flag} {REFUSED[flag][1]}" for flag in given if flag in REFUSED]
    notes = [f"{flag} has no effect: {NO_EFFECT[flag][1]}" for flag in given if flag in NO_EFFECT]
    settings = {name: value for name, value in given.items() if not name.startswith("--")}
    for flag in SHORTHAND.keys() & given.keys():
        settings |= SHORTHAND[flag]
    if "--no-position-embedding" in given and "position_embedding_type" not in settings:
        settings["position_embedding_type"] = "none"
    _add_defaults(settings, args_defaults or {})
    parts, more = _build_all(settings)
    if problems + more:
        raise ArgumentsError(problems + more, parts)
    config = Config(**parts)
    flat = {name: value for part in config.as_json().values() for name, value in part.items()}
    return config, Arguments({**settings, **flat}), notes


def _add_defaults(settings: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Fill in a script's defaults; but not a tokenizer of which nothing is given, which would be blamed for a choice nobody made."""
    needed = NEEDED.get(defaults.get("tokenizer_type"), ())
    guessed = bool(needed) and all(settings.get(name) is None for name in needed)
    for name, value in defaults.items():
        if settings.get(name) is None and not (guessed and name == "tokenizer_type"):
            settings[name] = value


def _build_all(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Each component's config, and the problems of those that could not be built."""
    parts, problems = {}, []
    for name, component in COMPONENTS.items():
        try:
            parts[name] = build(component, dict(settings))
        except ConfigError as error:
            problems += error.problems
    return parts, problems
