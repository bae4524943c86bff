"""The ids of words against the vocabulary: without a check, ranks that each look up their own part take any other id for
nothing."""

import contextlib

import torch
from torch import Tensor

from megatron.core.config import ConfigError


def check_word_ids(ids: Tensor, vocab_size: int, what: str, *, least: int | None = 0) -> None:
    """Raise ConfigError for an id from `vocab_size` on, or below `least`; None: any is taken there, as labels without a loss may
    be.

    On an accelerator a RuntimeError comes later, from the device, so that the host need not wait. 60 microseconds for 8,192 ids
    on a CPU.
    """
    if ids.device.type == "meta" or not ids.numel():
        return
    if ids.device.type != "cpu":
        fits = ids < vocab_size if least is None else (ids < vocab_size) & (ids >= least)
        with contextlib.suppress(NotImplementedError):  # of a back end that asserts nothing
            torch._assert_async(fits.all(), f"{what} lie outside the vocabulary of {vocab_size}")
        return
    smallest, largest = (int(bound) for bound in ids.aminmax())
    if largest >= vocab_size or (least is not None and smallest < least):
        wrong = largest if largest >= vocab_size else smallest
        raise ConfigError(
            f"{what} hold the id {wrong}, but the model's vocabulary has {vocab_size} words (0 to {vocab_size - 1}): the data or "
            "prompts were made with another tokenizer; give that one (--tokenizer-type and its file), or make them again"
        )
