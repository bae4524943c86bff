"""Choose the layout of a job: ask for machines and model; print flags, the launch line, and the memory of each choice.

    python -m megatron.configure                                                      asks questions
    python -m megatron.configure --machines 2 --devices 8 --memory 80 --model llama --size 8b --yes
    python -m megatron.configure ... -- --data-path data/books --lr 1e-4              flags after -- are added to the run's

Nothing is written unless --shell or --yaml names a file. docs/configure.md has the rule by which layouts are ranked.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.console_scripts import program_of, programs_folder
from megatron.core.base.dataclass_flags import ConfigError, FlagParser, add_flags, build, read_flags
from tools.configuring.answers import Answers, Choices, complete, line, read_answer, work_of
from tools.configuring.command import (
    alone,
    flags_of,
    in_lines,
    launch_words,
    refuse_chosen,
    refuse_files_that_exist,
    shell_script,
    write,
    yaml_file,
)
from tools.configuring.layouts import Layout, Work
from tools.errors import exit_status


def configure(arguments: Sequence[str], ask: Callable[[str], str] = input) -> None:
    """Run the tool: read flags and answers, search layouts, print and write the chosen one. Raises ConfigError."""
    # read the flags; those after -- are for the run
    words = list(arguments)
    run_flags = []
    if "--" in words:
        separator = words.index("--")
        run_flags = words[separator + 1 :]
        words = words[:separator]
    values = read_flags(_parser(), words)
    choices = build(Choices, values)
    refuse_chosen(run_flags)
    refuse_files_that_exist(choices)

    # ask what the flags leave open
    ask_or_none = None if choices.yes else ask
    answers = complete(build(Answers, values), ask_or_none, print)
    work = work_of(answers, choices.micro_batch_size)
    memory_per_rank = answers.memory * 2**30 * choices.usable  # bytes
    if answers.device == "cpu":
        memory_per_rank = memory_per_rank / work.devices  # --memory is of the machine

    def flags(layout: Layout) -> list[str]:
        return flags_of(answers, choices, work, layout, run_flags)

    # predict the layouts
    search = import_module("tools.configuring.search")  # imports torch, which takes long; the questions come first
    num_wanted = max(choices.show, choices.choose or 1)
    predictions = search.search(work, flags, memory_per_rank, num_wanted, lambda text: print(text, file=sys.stderr))
    print("\n".join(search.as_text(work, predictions, memory_per_rank)))

    # choose one of those that fit
    fitting = [prediction.layout for prediction in predictions if prediction.fits]
    choices = replace(choices, choose=choices.choose or _ask_for_layout(len(fitting), ask_or_none))
    if choices.choose > len(fitting):
        raise ConfigError(f"--choose is {choices.choose}, and {len(fitting)} layout(s) fit; choose one of them")
    chosen_flags = flags(fitting[choices.choose - 1])
    _print_and_write(work, choices, chosen_flags, shlex.join([*search.estimate_words(work), *chosen_flags]))


def _ask_for_layout(count: int, ask: Callable[[str], str] | None) -> int:
    """Return the number of a layout, from 1 to `count`; 1 without an answer."""
    if ask is None or count <= 1:
        return 1
    text = line(ask, f"which of these {count} [1]: ")
    return int(read_answer("--choose", text, Choices)) if text else 1


def _parser() -> FlagParser:
    description, epilog = __doc__.split("\n\n", 1)
    parser = FlagParser(prog="python -m megatron.configure", description=description, epilog=epilog)
    for config in (Answers, Choices):
        add_flags(parser, config)
    return parser


def _print_and_write(work: Work, choices: Choices, flags: Sequence[str], estimate_flags: str) -> None:
    """Print the launch line and write the files that were asked for. estimate_flags: of tools/estimate_memory.py."""
    launch_flags = flags
    if choices.yaml:
        write(choices.yaml, yaml_file(flags), choices)
        launch_flags = ["--yaml-cfg", choices.yaml]
    command = in_lines(launch_words(work, _program(work.model.script)), launch_flags)
    estimate = " ".join(alone(_program("estimate_memory")))
    print(f"\nlayout {choices.choose}, its memory again: {estimate} {estimate_flags}\n")
    if work.machines > 1:
        print(
            f"on each machine, with NODE_RANK 0 to {work.machines - 1} and "
            "MASTER_ADDR, the name of the machine whose NODE_RANK is 0:\n"
        )
    print(command)
    if choices.shell:
        write(choices.shell, shell_script(work, command), choices)
    for path in filter(None, (choices.shell, choices.yaml)):
        print(f"\nwritten: {path}")


def _program(name: str) -> list[str]:
    """Return how a program is called here: by its file in a checkout, by its command where it is installed."""
    folder = programs_folder()
    if folder.name == "_programs":
        return [f"megatron-{name.replace('_', '-')}"]
    path = program_of(name, folder)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return [str(path)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return exit_status("configure", lambda: configure(words), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
