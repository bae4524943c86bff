"""A check of token ids against the vocabulary.

Without it, a sharded lookup treats an invalid id as another rank's token.
"""

import contextlib

import torch
from torch import Tensor

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.accelerator import is_accelerator


def check_token_ids(ids: Tensor, vocab_size: int, what: str, *, least: int | None = 0) -> None:
    """Raise ConfigError for an id of at least `vocab_size`, or below `least`.

    ids: integers of any shape. least: None: no lower bound, as for labels without a loss. what: the ids' name in
    the message.

    On an accelerator the device raises a RuntimeError later, so that the host does not block. 60 microseconds for 8,192
    ids on a CPU.
    """
    if not ids.numel():
        return
    if is_accelerator(ids.device):
        is_valid = ids < vocab_size
        if least is not None:
            is_valid = is_valid & (ids >= least)
        with contextlib.suppress(NotImplementedError):  # some back ends have no asserts
            torch._assert_async(is_valid.all(), f"{what} lie outside the vocabulary of {vocab_size}")
        return
    if ids.device.type != "cpu":  # no device that computes: there are no values
        return
    smallest, largest = (int(bound) for bound in ids.aminmax())
    is_too_large = largest >= vocab_size
    is_too_small = least is not None and smallest < least
    if is_too_large or is_too_small:
        wrong = largest if is_too_large else smallest
        raise ConfigError(
            f"{what} contain the id {wrong}, but the model's vocabulary has only {vocab_size} tokens (0 to "
            f"{vocab_size - 1}): the data or prompts come from another tokenizer; give that one (--tokenizer-type "
            "and its file), or tokenize again"
        )
