"""Write a layout as flags, as launch lines, and as files. Needs no torch."""

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
    """Return the flags of a run: model, layout, batch, learning rate, mock data and a vocabulary size.

    extra: further flags of the user. They come last, so they win, and replace defaults for rate, length, data and
    tokenizer.
    """
    extra_names = {word.split("=")[0] for word in extra}
    flags = [*work.model.flags(work.seq_length), *layout.flags(answers.device)]
    flags += words({"micro_batch_size": layout.micro_batch, "global_batch_size": work.global_batch})
    flags += words({"bf16": answers.precision == "bf16", "fp16": answers.precision == "fp16"})
    if answers.device == "cpu":
        flags += ["--device", "cpu"]
    if not extra_names & {"--train-iters", "--train-samples"}:
        flags += words({"train_iters": choices.train_iters})
    if "--lr" not in extra_names:
        flags += words({"lr": choices.lr})
    if not extra_names.intersection(_DATA):
        flags.append("--mock-data")
    if "--tokenizer-type" not in extra_names:
        flags += words({"tokenizer_type": "NullTokenizer", "vocab_size": work.model.size.vocab})
    return [*flags, *extra]


# Flags that the search decides, and flags that the questions ask for.
_CHOSEN = """
    --tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size --zero-stage --use-distributed-optimizer
    --recompute-granularity --recompute-method --recompute-modules --recompute-activations
"""
_ASKED = """
    --num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --global-batch-size --bf16 --fp16 --device
"""


def refuse_chosen(extra: Sequence[str]) -> None:
    """Raise ConfigError for flags of the run that would contradict the table of layouts."""
    extra_names = {word.split("=")[0] for word in extra}
    chosen = [flag for flag in _CHOSEN.split() if flag in extra_names]
    asked = [flag for flag in _ASKED.split() if flag in extra_names]
    problems = [f"{flag} after --: the search chooses it; leave it out" for flag in chosen]
    problems += [f"{flag} after --: give the answer to its question, before the --" for flag in asked]
    if problems:
        raise ConfigError(problems)


def alone(program: Sequence[str]) -> list[str]:
    """Return the command of a program as one process. program: a file, or an installed command."""
    return ["python", *program] if program[0].endswith(".py") else list(program)


def launch_words(work: Work, program: Sequence[str]) -> list[str]:
    """Return the command that starts the program's processes on a machine, without the program's flags.

    With several machines it reads the environment variables NODE_RANK, MASTER_ADDR and MASTER_PORT.
    """
    if work.ranks == 1:
        return alone(program)
    command = ["torchrun", "--nproc-per-node", str(work.devices)]
    if work.machines > 1:
        command += ["--nnodes", str(work.machines), "--node-rank", '"$NODE_RANK"']
        command += ["--master-addr", '"$MASTER_ADDR"', "--master-port", '"${MASTER_PORT:-6000}"']
    if not program[0].endswith(".py"):
        command.append("--no-python")
    return [*command, *program]


def in_lines(launch: Sequence[str], flags: Sequence[str], width: int = 110) -> str:
    """Break a command into lines that end in a backslash. The words of `flags` are quoted, those of `launch` not."""
    lines = [" ".join(launch)]
    for group in _by_flag(flags):
        text = shlex.join(group)
        if len(lines) > 1 and len(lines[-1]) + len(text) < width:
            lines[-1] += f" {text}"
        else:
            lines.append(f"    {text}")
    return " \\\n".join(lines)


def _by_flag(flags: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    group: list[str] = []
    for word in flags:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def shell_script(work: Work, command: str) -> str:
    """Return a script for bash, which each machine runs."""
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
    """Return the flags as a file for --yaml-cfg: a switch is true, several values are a list."""
    lines = []
    for flag, *values in _by_flag(flags):
        name, *value_after_equals = flag.removeprefix("--").split("=", 1)
        values = value_after_equals or values
        if not values:
            text = "true"
        elif len(values) == 1:
            text = values[0]
        else:
            text = f"[{', '.join(values)}]"
        lines.append(f"{name}: {text}")
    return "\n".join([*lines, ""])


def refuse_files_that_exist(choices: Choices) -> None:
    """Raise ConfigError, before the search, which takes long, if a file to write exists already."""
    if choices.overwrite:
        return
    problems = []
    for flag, path in (("--shell", choices.shell), ("--yaml", choices.yaml)):
        if path and os.path.lexists(path):
            problems.append(f"{flag} {path} is there already; name another file, or give --overwrite")
    if problems:
        raise ConfigError(problems)


def write(path: str, text: str, choices: Choices) -> None:
    """Write a file; with --overwrite it may replace another. Raises FileExistsError."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w" if choices.overwrite else "x", encoding="utf-8") as file:
        file.write(text)
    if path == choices.shell:
        Path(path).chmod(0o755)
