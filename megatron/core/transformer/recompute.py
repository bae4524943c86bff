"""Activations computed again in the backward instead of kept, to the same bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.random import DropoutKeys


def recomputed(run: Callable[..., Tensor], keys: DropoutKeys, *inputs: Any) -> Tensor:
    """run(*inputs), of which only the inputs are kept for the backward.

    Dropout masks follow from their keys, so that no generator's state is saved: the second run names the samples of the first.
    It stops once it has what the backward asks for, and so leaves out the last reduction of the last layer.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    samples = keys.samples

    def run_as_before(*again: Any) -> Tensor:
        with keys.naming(samples):
            return run(*again)

    return checkpoint(run_as_before, *inputs, use_reentrant=False, preserve_rng_state=False)
