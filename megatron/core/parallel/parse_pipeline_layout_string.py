"""The text of --pipeline-model-parallel-layout is read: the parts of the model in each pipeline stage. Pure text."""

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from enum import Enum

_LAYOUT_LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}  # letter -> Megatron's name of the part
LAYOUT_FLAG = "--pipeline-model-parallel-layout"


def stages_of_layout(layout: str | Sequence[Sequence[str]]) -> list[str]:
    """Return the letters of each stage of a pipeline layout: E the embedding, t a layer, L output layer and loss.

    layout: Megatron's text, with | between two stages, x*n for n times x, (...)*n for n times several, and commas that
    mean nothing; or, as Megatron also takes it, the names of the parts of each stage.

        Ett|t*2|(tt|)*2 L                   Ett  tt  tt  tt  L
        [["embedding", "decoder"], ["decoder", "loss"]]      Et  tL

    Raises ValueError for other letters, a group without a number, and groups within groups.
    """
    if not isinstance(layout, str):
        letter_of = {name: letter for letter, name in _LAYOUT_LETTERS.items()}
        names = [[part.name if isinstance(part, Enum) else part for part in stage] for stage in layout]
        unknown = sorted({str(name) for stage in names for name in stage if str(name).strip().lower() not in letter_of})
        if unknown:
            raise ValueError(f"{LAYOUT_FLAG} has {', '.join(unknown)}; the parts of a stage are {', '.join(letter_of)}")
        return ["".join(letter_of[name.strip().lower()] for name in stage) for stage in names]
    text = layout.replace(",", "").replace(" ", "")
    spread = re.sub(r"\(([^()]+)\)\*(\d+)", lambda group: group[1] * int(group[2]), text)
    spread = re.sub(r"([^()*])\*(\d+)", lambda part: part[1] * int(part[2]), spread)
    wrong = sorted({letter for letter in spread if letter not in _LAYOUT_LETTERS and letter != "|"})
    if wrong:
        raise ValueError(
            f"{LAYOUT_FLAG} {layout!r} has {' '.join(wrong)} after its repetitions x*n and (...)*n are written "
            "out; a stage has E (embedding), t (layer) and L (output layer and loss), and | stands between two stages"
        )
    return spread.split("|")


def read_layout(text: str) -> str:
    """Return a layout of the command line as it is given. Raises ArgumentTypeError for a text that is none."""
    try:
        stages_of_layout(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error).removeprefix(f"{LAYOUT_FLAG} ")) from None
    return text
