"""What a checkpoint's state says that it lacks: buffers of the model that had changed when it was saved. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

LOST_BUFFERS = "lost_buffers"  # of a checkpoint's state: their names
BUFFERS_AT_START = "buffers_at_start"  # of a checkpoint's state: name -> digest of what the model began with


def lost_buffers(state: Mapping[str, Any]) -> list[str]:
    """The names of the buffers; none in a checkpoint that lacks nothing, or of another project."""
    names = state.get(LOST_BUFFERS)
    return [str(name) for name in names] if isinstance(names, list) else []


def first_names(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def note_of_lost_buffers(state: Mapping[str, Any]) -> str | None:
    """A note for a tool that reads the weights alone; None if nothing is lost."""
    names = lost_buffers(state)
    if not names:
        return None
    return (
        f"WARNING: the checkpoint lacks buffers of its model that training had changed: {first_names(names)}; without them its "
        "weights may compute something else"
    )
