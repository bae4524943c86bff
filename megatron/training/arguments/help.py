"""--help shows first the flags that every run needs, then all that have an effect, by component.

--help-all adds the other flags of Megatron.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import FlagParser, option_fields, title_of
from megatron.training.arguments.config import COMPONENTS
from megatron.training.arguments.ignored_and_refused_flags import (
    NO_EFFECT,
    OTHERS,
    REFUSED,
    SHORTHAND,
    SILENT,
    WARNED,
    OtherFlag,
)

NEEDED = (
    *("micro_batch_size", "seq_length", "lr", "train_iters", "train_samples"),
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "data_path", "mock_data"),
)
NEEDED_TITLE = "What every run needs"
NEEDED_TEXT = """Batch size, sequence length, learning rate, iterations or samples, a tokenizer with its files, and data.
To try things out:
  --num-layers 2 --hidden-size 64 --num-attention-heads 4
  --micro-batch-size 4 --seq-length 64 --lr 1e-3 --train-iters 100 --log-interval 10
  --tokenizer-type NullTokenizer --vocab-size 1000 --mock-data"""
OTHER_KINDS = {
    "Accepted without effect": NO_EFFECT,
    "Accepted in silence": SILENT,
    "Accepted with a WARNING": WARNED,
    "Refused": REFUSED,
}


class FlagGroup(NamedTuple):
    """Settings that help and docs/flags.md show together. fields: (component, field)."""

    title: str
    text: str | None
    fields: list[tuple[type, Field]]


def flag_groups() -> Iterator[FlagGroup]:
    """Yield first the flags that every run needs, then the other flags of each component."""
    fields = {field.name: (component, field) for component in COMPONENTS.values() for field in option_fields(component)}
    yield FlagGroup(NEEDED_TITLE, NEEDED_TEXT, [fields[name] for name in NEEDED])
    for component in COMPONENTS.values():
        others = [(component, field) for field in option_fields(component) if field.name not in NEEDED]
        yield FlagGroup(title_of(component), None, others)


def add_help_flags(parser: FlagParser, unread: Mapping[str, str]) -> argparse._ArgumentGroup:
    """Add --help and --help-all in a group, and return it. unread: flag -> why it has no effect in this script."""
    parser.epilog = (
        f"--help-all also lists {len(OTHERS)} flags of Megatron-LM that set nothing here: accepted without effect, accepted\n"
        "with a WARNING, or refused with an alternative."
    )
    group = parser.add_argument_group("Help")
    text = "show the flags that have an effect"
    group.add_argument("-h", "--help", action="help", default=argparse.SUPPRESS, help=text)
    group.add_argument("--help-all", action=_HelpAll, unread=unread, help="show all flags, and why some have no effect")
    return group


class _HelpAll(argparse.Action):
    """Prints --help, followed by the flags without effect."""

    def __init__(self, option_strings: list[str], dest: str, unread: Mapping[str, str], help: str):
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self._unread = unread

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.epilog = _text_of_others(self._unread)
        parser.print_help()
        parser.exit()


def _text_of_others(unread: Mapping[str, str]) -> str:
    """Return all flags that set nothing, by kind and reason, with the flags that this script does not read."""
    lines = []
    for kind, others in OTHER_KINDS.items():
        flags = {reason: [other.flag for other in same] for reason, same in by_reason(others).items()}
        if others is NO_EFFECT:
            for flag, reason in unread.items():
                flags.setdefault(reason, []).append(flag)
        lines.append(f"{kind}:")
        for reason, names in flags.items():
            lines += ["", f"  {reason}", *(f"    {name}" for name in names)]
        lines.append("")
    return "\n".join(lines)


def by_reason(others: Mapping[str, OtherFlag]) -> dict[str, list[OtherFlag]]:
    """Return the flags of each reason, in the order of the table."""
    grouped: dict[str, list[OtherFlag]] = {}
    for other in others.values():
        grouped.setdefault(other.reason, []).append(other)
    return grouped


def meaning_of_shorthand(flag: str) -> str:
    """Return the flags that a shorthand stands for, as on the command line."""
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SHORTHAND[flag].items())
    return flags or "--position-embedding-type none, unless another is given"
