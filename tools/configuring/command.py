"""A layout as flags, as launch lines, and as files. Without torch."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.core.base.dataclass_flags import ConfigError
from tools.configuring.answers import Answers, Choices
from tools.configuring.layouts import Layout, Work
from tools.configuring.sizes import words

_DATA = ("--mock-data", "--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path")


def flags_of(answers: Answers, choices: Choices, work: Work, layout: Layout, extra: Sequence[str]) -> list[str]:
    """The flags of a run: model, layout, batch, rate, made-up data and words; `extra` comes last, where it wins."""
    given = {word.split("=")[0] for word in extra}
    flags = [*work.model.flags(work.seq_length), *layout.flags(answers.device)]
    flags += words({"micro_batch_size": layout.micro_batch, "global_batch_size": work.global_batch})
    flags += words({"bf16": answers.precision == "bf16", "fp16": answers.precision == "fp16"})
    flags += ["--device", "cpu"] if answers.device == "cpu" else []
    if not given & {"--train-iters", "--train-samples"}:
        flags += words({"train_iters": choices.train_iters})
    flags += [] if "--lr" in given else words({"lr": choices.lr})
    flags += [] if given.intersection(_DATA) else ["--mock-data"]
    if "--tokenizer-type" not in given:
        flags += words({"tokenizer_type": "NullTokenizer", "vocab_size": work.model.size.vocab})
    return [*flags, *extra]


# What the search decides, and what the questions ask for.
_CHOSEN = """
    --tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size --zero-stage --use-distributed-optimizer
    --recompute-granularity --recompute-method --recompute-modules --recompute-activations
"""
_ASKED = """
    --num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --global-batch-size --bf16 --fp16 --device
"""


def refuse_chosen(extra: Sequence[str]) -> None:
    """Raise ConfigError for flags of the run that would contradict the table of layouts."""
    given = {word.split("=")[0] for word in extra}
    reasons = {"the search chooses it; leave it out": _CHOSEN, "give the answer to its question, before the --": _ASKED}
    found = [
        f"{flag} after --: {reason}" for reason, flags in reasons.items() for flag in flags.split() if flag in given
    ]
    if found:
        raise ConfigError(found)


def alone(program: Sequence[str]) -> list[str]:
    """A program as one process. program: a file, or an installed command."""
    return ["python", *program] if program[0].endswith(".py") else list(program)


def launch_words(work: Work, program: Sequence[str]) -> list[str]:
    """What starts the program on a machine. Several machines: NODE_RANK, MASTER_ADDR and MASTER_PORT are of the environment."""
    if work.ranks == 1:
        return alone(program)
    found = ["torchrun", "--nproc-per-node", str(work.devices)]
    if work.machines > 1:
        found += ["--nnodes", str(work.machines), "--node-rank", '"$NODE_RANK"']
        found += ["--master-addr", '"$MASTER_ADDR"', "--master-port", '"${MASTER_PORT:-6000}"']
    return [*found, *([] if program[0].endswith(".py") else ["--no-python"]), *program]


def in_lines(launch: Sequence[str], flags: Sequence[str], width: int = 110) -> str:
    """The command over lines that end in a backslash; the words of `flags` are quoted, those of `launch` stand as they are."""
    lines = [" ".join(launch)]
    for group in _by_flag(flags):
        text = shlex.join(group)
        if len(lines) > 1 and len(lines[-1]) + len(text) < width:
            lines[-1] += f" {text}"
        else:
            lines.append(f"    {text}")
    return " \\\n".join(lines)


def _by_flag(flags: Sequence[str]) -> Iterator[list[str]]:
    """A flag with its values."""
    group: list[str] = []
    for word in flags:
        if word.startswith("--") and group:
            yield group
            group = []
        group = [*group, word]
    if group:
        yield group


def shell_script(work: Work, command: str) -> str:
    """A script for bash, which each machine runs."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {work.model.family}, {work.ranks} rank(s). Further flags come last, so they win.",
    ]
    if work.machines > 1:
        lines.append(
            f"# On each of {work.machines} machines: NODE_RANK=0 ... {work.machines - 1}, MASTER_ADDR=the first machine's name."
        )
    return "\n".join([*lines, "set -euo pipefail", f'{command} "$@"', ""])


def yaml_file(flags: Sequence[str]) -> str:
    """The flags as a file for --yaml-cfg: a switch is true, several values are a list."""
    lines = []
    for flag, *values in _by_flag(flags):
        name, *value = flag.removeprefix("--").split("=", 1)
        values = value or values
        text = values[0] if len(values) == 1 else f"[{', '.join(values)}]" if values else "true"
        lines.append(f"{name}: {text}")
    return "\n".join([*lines, ""])


def refuse_files_that_exist(choices: Choices) -> None:
    """Before the search, which takes long. Raises ConfigError."""
    found = [flag for flag in ("shell", "yaml") if (path := getattr(choices, flag)) and os.path.lexists(path)]
    if found and not choices.overwrite:
        raise ConfigError(
            [
                f"--{name} {getattr(choices, name)} is there already; name another file, or give --overwrite"
                for name in found
            ]
        )


def write(path: str, text: str, choices: Choices) -> None:
    """Write a file, with --overwrite over another."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w" if choices.overwrite else "x", encoding="utf-8") as file:
        file.write(text)
    if path == choices.shell:
        Path(path).chmod(0o755)
