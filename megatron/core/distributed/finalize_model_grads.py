"""Megatron's `finalize_model_grads`: the last reductions of a step's gradients, for a script's own loop."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import make_callable, names_of_megatron
from megatron.core.distributed.clear_reduce_divide_gradients import GradientStep
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_global_state
from megatron.core.process_groups_config import check_groups


def finalize_model_grads(
    model: Sequence[DistributedDataParallel],
    num_tokens: Tensor | float | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """Finish the step's gradient reductions over all chunks of this rank. Every rank must call.

    A step that is complete, as `get_forward_backward_func` leaves it, is neither reduced nor divided again.
    num_tokens: this rank's tokens of the step, a number or a tensor [] or [1]; the sums are divided by their total over
    the ranks of the last stage.
    force_all_reduce: accepted without effect; pg_collection: this job's groups, which the chunks know.
    """
    check_groups(pg_collection, "finalize_model_grads: pg_collection")
    chunks = [chunk for chunk in model if not chunk.is_complete]
    gradients = GradientStep(chunks)
    if num_tokens is None or not chunks:
        gradients.finish(0.0)
        return
    mesh = chunks[0].mesh
    # Only the last stage knows the tokens; elsewhere a caller's number would be counted again.
    counted = num_tokens if mesh.has_last_stage else 0.0
    total = torch.as_tensor(counted, dtype=torch.float64).detach().reshape(1).clone().to(get_global_state().device)
    for axis in (mesh.tokens, mesh["pp"]):
        collectives.all_reduce(total, axis)
    gradients.finish(total.item())
    gradients.divide_gradients()


# Importing this module sets `megatron.core.distributed.finalize_model_grads` to the module; so it can be called too.
make_callable(__name__, finalize_model_grads)

__getattr__ = names_of_megatron(__name__)
