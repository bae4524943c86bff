"""The script's own flags are printed at the start of the run, saved in checkpoints, and compared on resume."""

import argparse
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.base.dataclass_flags import FlagParser, default_of, field_of_action


@dataclass(frozen=True)
class OwnFlag:
    """A flag of the script. value, default: as JSON."""

    name: str
    title: str  # of its argument group
    value: Any
    default: Any
    of_model: bool  # whether the meaning of the parameters depends on the value


@dataclass(frozen=True)
class OwnFlags:
    """All flags of the script, in the order in which it adds them."""

    flags: tuple[OwnFlag, ...] = ()

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Return {"own": ordinary flags, "own_model": flags that the meaning of the parameters depends on}."""
        return {
            "own": {flag.name: flag.value for flag in self.flags if not flag.of_model},
            "own_model": {flag.name: flag.value for flag in self.flags if flag.of_model},
        }

    def by_title(self) -> dict[str, list[OwnFlag]]:
        """Return the flags of each argument group."""
        groups: dict[str, list[OwnFlag]] = {}
        for flag in self.flags:
            groups.setdefault(flag.title, []).append(flag)
        return groups


def script_flag_values(parser: FlagParser, settings: Mapping[str, Any], ours: Collection[str]) -> OwnFlags:
    """Return the flags that a script added to `parser`, with values from `settings` or their defaults.

    Aliases of the settings `ours` are left out.
    """
    titles = {id(action): group.title for group in parser._action_groups for action in group._group_actions}
    flags: dict[str, OwnFlag] = {}
    for action in parser.own:
        if action.dest in ours:
            continue
        field = field_of_action(action)
        title = titles.get(id(action))
        default = _default_of(parser, action)
        value = settings.get(action.dest, default)
        of_model = field is not None and field.metadata["of_model"]
        # --do and --dont share a name and are one setting.
        flags.setdefault(action.dest, OwnFlag(action.dest, title or "", plain(value), plain(default), of_model))
    return OwnFlags(tuple(flags.values()))


def _default_of(parser: FlagParser, action: argparse.Action) -> Any:
    """Return the value of a flag that is not given."""
    field = field_of_action(action)
    if field is not None:
        return default_of(field)
    if action.default is argparse.SUPPRESS:
        return None
    if isinstance(action.default, str):  # argparse converts a text default like a given value
        return parser._get_value(action, action.default)
    return action.default


def plain(value: Any) -> Any:
    """Return `value` as JSON, or else as text that is equal in every process."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    # an object's text without its address, which differs between processes
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
