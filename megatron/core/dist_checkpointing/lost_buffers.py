"""Buffers of the model that a checkpoint lacks: its state names those that had changed when it was saved. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

LOST_BUFFERS = "lost_buffers"  # key of a checkpoint's state: the names of these buffers
BUFFERS_AT_START = "buffers_at_start"  # key of a checkpoint's state: name -> digest of the first value


def lost_buffers(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the buffers; none for a checkpoint that lacks nothing, or of another project."""
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
        f"WARNING: the checkpoint lacks buffers of its model that training had changed: {first_names(names)}; without them its "
        "weights may compute something else"
    )
