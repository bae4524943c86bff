"""Which layers have a sliding window, and how far back a query sees there: `--window-size` and `--window-attn-skip-freq`,
which are read as Megatron-LM reads them. Pure."""

import argparse
from collections.abc import Iterator

from megatron.core.transformer.layer_freq_pattern import is_exception, layer_pattern


def keys_before(size: str | None, skip_freq: str | None, layer: int) -> int | None:
    """Keys before its own that a query of the layer sees; None: all. layer: from 0, over the whole model.

    size: as `read_window` returns it. skip_freq: as `read_pattern`: N leaves layers N - 1, 2 N - 1, ... without a
    window, and
    of a list those with a 0; None leaves out no layer.
    """
    if size is None:
        return None
    before = window_pair(size)[0]
    return None if is_exception(skip_freq, layer, marked=0) or before < 0 else before


def window_problems(size: str | None, skip_freq: str | None, num_layers: int) -> Iterator[str]:
    """One line for each violated rule between the two settings and the model's layers."""
    if skip_freq is None:
        return
    if size is None:
        yield f"--window-attn-skip-freq {skip_freq} needs --window-size L,0; give that too, or leave it out"
    pattern = layer_pattern(skip_freq)
    if isinstance(pattern, list) and len(pattern) != num_layers:
        yield f"--window-attn-skip-freq has {len(pattern)} entries and --num-layers is {num_layers}; give one for each layer"


def read_window(text: str) -> str:
    """ "4095,0" from that, "(4095,0)" or "4095, 0"."""
    try:
        before, after = window_pair(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not L,0 with L keys before the query, such as 4095,0") from None
    if before < -1:
        raise argparse.ArgumentTypeError(f"{text!r}: L is {before}; give the keys before the query, or -1 for all")
    if after != 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} ends in {after}; give {before},0: no query sees a key after its own"
        )
    return f"{before},{after}"


def window_pair(size: str | tuple[int, int]) -> tuple[int, int]:
    """(4095, 0) of itself and of each of its spellings, as Megatron's scripts read it. Raises ValueError for others."""
    before, after = (int(part) for part in str(size).strip(" ()").split(","))
    return before, after
