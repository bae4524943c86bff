"""The parser of all flags of a training script, and its --help and --version, which need no torch."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError, FlagParser, add_flag, flags_of, option_fields
from megatron.core.base.version import version_text
from megatron.training.arguments.config import COMPONENTS
from megatron.training.arguments.help import add_help_flags, flag_groups, meaning_of_shorthand
from megatron.training.arguments.ignored_and_refused_flags import OTHERS, REFUSED, SHORTHAND
from megatron.training.arguments.yaml_arguments import YAML_FLAG

ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


def make_parser(
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    unread: Mapping[str, str] | None = None,
) -> FlagParser:
    """Return the parser of all flags: accepted, refused or without effect.

    args_defaults: the script's, shown in help. unread: settings that this script does not read, with the reason.
    """
    defaults = args_defaults or {}
    unread = unread or {}
    parser = FlagParser(description="Pretrain a transformer.", add_help=False)

    # the settings
    for title, text, fields in flag_groups():
        group = parser.add_argument_group(title, text)
        for component, field in fields:
            add_flag(group, component, field, default=defaults.get(field.name), hidden=field.name in unread)

    # other spellings of settings
    shorthand = parser.add_argument_group("Other ways to say it")
    yaml_help = "read flags from FILE: `key: value` lines, with or without groups; the command line takes precedence"
    shorthand.add_argument(YAML_FLAG, metavar="FILE", default=argparse.SUPPRESS, dest=YAML_FLAG, help=yaml_help)
    for flag in SHORTHAND:
        text = f"the same as {meaning_of_shorthand(flag)}"
        shorthand.add_argument(flag, dest=flag, action="store_true", default=argparse.SUPPRESS, help=text)

    # help
    help_group = add_help_flags(parser, {flag_of_setting(name): reason for name, reason in unread.items()})

    # the script's own flags
    if extra_args_provider is not None:
        try:
            with parser.flags_of_script():
                extra_args_provider(parser)
        except argparse.ArgumentError as error:
            raise ConfigError(f"extra_args_provider: {error}; choose another name for the flag") from None

    # a script may have a --version of its own
    if "--version" not in parser.known_flags():
        help_group.add_argument("--version", action="version", version=version_text(), help="print the version")

    # Megatron's other flags, last: a script may have its own --temperature or --num-classes, which takes precedence
    known = set(parser.known_flags())
    for other in OTHERS.values():
        if other.flag in known:
            continue
        if other.values == "0":
            options = {"action": "store_true"}
        elif other.values == "*":
            options = {"nargs": "*"}
        else:
            options = {"nargs": None}
        parser.add_argument(other.flag, dest=other.flag, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
    parser.refused.update(REFUSED.keys() - known)
    return parser


def flag_of_setting(name: str) -> str:
    """Return the first flag of the setting `name`."""
    return flags_of(field_of_setting(name))[0]


def field_of_setting(name: str) -> Any:
    """Return the dataclass field of the setting `name`. Raises KeyError."""
    for component in COMPONENTS.values():
        for field in option_fields(component):
            if field.name == name:
                return field
    raise KeyError(name)


def answer_help(
    args_defaults: Mapping[str, Any] | None = None,
    unread: Mapping[str, str] | None = None,
    extra_args_provider: ExtraArgs | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Print what --help, --help-all or --version asks for and exit; return if none of them is given.

    A script calls it before it imports torch, which takes seconds. The arguments are those of `parse_args`. Of several
    processes the first prints.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    asked = [word for word in words if word in ("-h", "--help", "--help-all", "--version")]
    if not asked:
        return
    if os.environ.get("RANK", "0") != "0":
        sys.exit()
    make_parser(extra_args_provider, args_defaults, unread).parse_known_args(asked[:1])
