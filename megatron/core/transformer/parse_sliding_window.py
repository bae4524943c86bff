"""Sliding window attention: `--window-size` and `--window-attn-skip-freq`, read as Megatron-LM reads them. Pure."""

import argparse
from collections.abc import Iterator

from megatron.core.transformer.layer_freq_pattern import is_exception, layer_pattern


def window_left(size: str | None, skip_freq: str | None, layer: int) -> int | None:
    """Return how many keys before its own a query of the layer sees; None: all. layer: from 0, over the whole model.

    size: as `read_window` returns it. skip_freq: as `read_pattern` returns it; layers N - 1, 2 N - 1, ..., or those
    with a 0 in a list, have no window.
    """
    if size is None:
        return None
    left, _ = parse_window_size(size)
    if left < 0 or is_exception(skip_freq, layer, marked=0):
        return None
    return left


def window_skip_freq_problems(size: str | None, skip_freq: str | None, num_layers: int) -> Iterator[str]:
    """Yield one line for each violated rule between the two settings and the model's layers."""
    if skip_freq is None:
        return
    if size is None:
        yield (
            f"--window-attn-skip-freq {skip_freq} needs --window-size L,0; give both, or leave out "
            "--window-attn-skip-freq"
        )
    pattern = layer_pattern(skip_freq)
    if isinstance(pattern, list) and len(pattern) != num_layers:
        yield (
            f"--window-attn-skip-freq has {len(pattern)} entries, but --num-layers is {num_layers}; give one "
            "entry for each layer"
        )


def read_window(text: str) -> str:
    """Return a window in one spelling: "4095,0", also for "(4095,0)" and "4095, 0"."""
    try:
        left, right = parse_window_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be L,0, where L is the number of keys before the query, such as 4095,0"
        ) from None
    if left < -1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: L is {left}; give the number of keys before the query, or -1 for all"
        )
    if right != 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} ends in {right}; give {left},0, because a query does not attend to later keys"
        )
    return f"{left},{right}"


def parse_window_size(size: str | tuple[int, int]) -> tuple[int, int]:
    """Return (left, right), as (4095, 0), from any of its spellings, or from itself. Raises ValueError for others."""
    left, right = (int(part) for part in str(size).strip(" ()").split(","))
    return left, right
