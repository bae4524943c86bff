"""Choose the layout of a job: asks for machines and model; prints flags, the launch line, and the memory of each choice.

    python -m megatron.configure                                                      asks
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
    """What the docstring above says. Raises ConfigError."""
    words = [*arguments, "--"]
    own, extra = words[: words.index("--")], words[words.index("--") + 1 : -1]
    given = read_flags(_parser(), own)
    choices = build(Choices, given)
    refuse_chosen(extra)
    refuse_files_that_exist(choices)
    answers = complete(build(Answers, given), None if choices.yes else ask, print)
    work = work_of(answers, choices.micro_batch_size)
    room = answers.memory * 2**30 * choices.usable / (work.devices if answers.device == "cpu" else 1)

    def flags(layout: Layout) -> list[str]:
        return flags_of(answers, choices, work, layout, extra)

    search = import_module("tools.configuring.search")  # imports torch, for which no question waits
    wanted = max(choices.show, choices.choose or 1)
    found = search.search(work, flags, room, wanted, lambda text: print(text, file=sys.stderr))
    print("\n".join(search.as_text(work, found, room)))
    fitting = [one.layout for one in found if one.fits]
    choices = replace(choices, choose=choices.choose or _asked_for(len(fitting), None if choices.yes else ask))
    if choices.choose > len(fitting):
        raise ConfigError(f"--choose is {choices.choose}, and {len(fitting)} layout(s) fit; choose one of them")
    chosen = flags(fitting[choices.choose - 1])
    _hand_over(work, choices, chosen, shlex.join([*search.estimate_words(work), *chosen]))


def _asked_for(count: int, ask: Callable[[str], str] | None) -> int:
    """The number of a layout."""
    text = line(ask, f"which of these {count} [1]: ") if ask and count > 1 else ""
    return int(read_answer("--choose", text, Choices)) if text else 1


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m megatron.configure", description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1]
    )
    for config in (Answers, Choices):
        add_flags(parser, config)
    return parser


def _hand_over(work: Work, choices: Choices, flags: Sequence[str], estimate: str) -> None:
    """Print the launch line and write the files that were asked for. estimate: flags of tools/estimate_memory.py."""
    shown = flags
    if choices.yaml:
        write(choices.yaml, yaml_file(flags), choices)
        shown = ["--yaml-cfg", choices.yaml]
    launch = launch_words(work, _program(work.model.script))
    command = in_lines(launch, shown)
    print(f"\nlayout {choices.choose}, its memory again: {' '.join(alone(_program('estimate_memory')))} {estimate}\n")
    if work.machines > 1:
        last, first = work.machines - 1, "MASTER_ADDR, the name of the machine whose NODE_RANK is 0"
        print(f"on each machine, with NODE_RANK 0 to {last} and {first}:\n")
    print(command)
    if choices.shell:
        write(choices.shell, shell_script(work, command), choices)
    for path in filter(None, (choices.shell, choices.yaml)):
        print(f"\nwritten: {path}")


def _program(name: str) -> list[str]:
    """A program as it is called here: by its file in a checkout, by its command where it is installed."""
    folder = programs_folder()
    if folder.name == "_programs":
        return [f"megatron-{name.replace('_', '-')}"]
    path = program_of(name, folder)
    return [str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return exit_status("configure", lambda: configure(words), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
