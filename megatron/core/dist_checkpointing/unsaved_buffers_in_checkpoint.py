"""What a checkpoint's state says of its model's buffers, and of what it lacks of the model's state. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

BUFFERS = (
    "buffers"  # key of a checkpoint's state: name -> [dtype, shape] of each saved buffer; absent before they were saved
)
LOST_BUFFERS = "lost_buffers"  # the names of extra states, and before that of buffers, that changed and are not saved
FROZEN = "frozen"  # {"elements": .., "hash": ..} of the frozen parameters that the checkpoint leaves out
BUFFERS_AT_START = "buffers_at_start"  # before buffers were saved: name -> digest of the first value


def lost_buffers(state: Mapping[str, Any]) -> list[str]:
    """Return the names of what changed and is not saved; none for a checkpoint that lacks nothing, or of another project."""
    names = state.get(LOST_BUFFERS)
    if not isinstance(names, list):
        return []
    return [str(name) for name in names]


def first_names(names: Sequence[str], most: int = 5) -> str:
    """Return the first `most` names as text, and how many more there are."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def note_of_lost_buffers(state: Mapping[str, Any]) -> str | None:
    """Return a note for a tool that reads only the weights; None if the checkpoint lacks nothing."""
    names = lost_buffers(state)
    if not names:
        return None
    return (
        f"WARNING: the checkpoint lacks state of its model that training had changed: {first_names(names)}; without it the "
        "weights may compute something else"
    )
