"""Megatron's tracker of auxiliary losses, for layers and loops that are written against it.

    save_to_aux_losses_tracker("balance", loss, layer_number, num_layers)     a layer, in each forward
    track_moe_metrics(1 / num_microbatches, iteration, writer, ...)           a loop, once a step, on every rank

It only reports: gradients are those of `MoEAuxLossAutoScaler`. Losses that a layer adds to `LayerContext.aux_losses` are
reported by the loop itself, and are not here. Megatron's file: megatron/core/transformer/moe/moe_utils.py.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_global_state
from megatron.core.parallel.initialize_model_parallel import axis_of_group
from megatron.core.parallel.rank_grid import Axis
from megatron.core.process_groups_config import OWN_GROUPS


def get_moe_layer_wise_logging_tracker() -> dict[str, dict[str, Any]]:
    """Return the sums of this rank: name -> {"values": [num_layers], and the groups that `save` was given}."""
    return get_global_state().aux_losses_tracker


def save_to_aux_losses_tracker(
    name: str,
    loss: Tensor,
    layer_number: int | None,
    num_layers: int,
    reduce_group: Any = None,
    avg_group: Any = None,
    reduce_group_has_dp: bool = False,
) -> None:
    """Add `loss` [] of this microbatch to the sum of a layer, numbered from 1. None: it is not reported.

    reduce_group, avg_group: torch.distributed groups whose ranks have terms to be summed, or to be averaged. What a
    recomputation in the backward saves has been saved by the forward, and is not added again.
    """
    is_in_backward = torch._C._current_graph_task_id() != -1  # torch's own checkpointing asks so, too
    if layer_number is None or is_in_backward:
        return
    if not 1 <= layer_number <= num_layers:
        raise ValueError(
            f"the auxiliary loss {name!r} is saved for layer number {layer_number}; layers are numbered from 1 to "
            f"{num_layers}"
        )
    tracked = get_moe_layer_wise_logging_tracker().setdefault(name, _nothing_of(num_layers, loss.device))
    tracked["values"][layer_number - 1] += loss.detach()
    tracked.update(reduce_group=reduce_group, avg_group=avg_group, reduce_group_has_dp=reduce_group_has_dp)


def _nothing_of(num_layers: int, device: Any) -> dict[str, Any]:
    values = torch.zeros(num_layers, dtype=torch.float64, device=device)
    return {"values": values, "reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}


def clear_aux_losses_tracker() -> None:
    """Set all sums to 0. The names stay."""
    for tracked in get_moe_layer_wise_logging_tracker().values():
        tracked["values"].zero_()


@accepts_defaults_only(pg_collection=OWN_GROUPS)
def reduce_aux_losses_tracker_across_ranks(track_names: Sequence[str] | None = None) -> None:
    """Sum over pipeline stages and `reduce_group`, average over `avg_group` and all ranks with other tokens, in place.

    track_names: default: all names of this rank. Every rank must call with the same names.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    mesh = get_global_state().mesh
    names = list(tracker) if track_names is None else list(track_names)
    missing = [name for name in names if name not in tracker]
    if missing:
        raise ValueError(
            f"no layer of this rank has saved the auxiliary losses {missing}; give track_moe_metrics force_initialize=True "
            "and num_layers, on every rank"
        )
    for name in names:
        tracked = tracker[name]
        values = tracked["values"]  # [num_layers]
        collectives.all_reduce(values, mesh["pp"])
        if tracked["reduce_group"] is not None:
            collectives.all_reduce(values, axis_of_group(tracked["reduce_group"]))
        if tracked["avg_group"] is not None:
            _average(values, axis_of_group(tracked["avg_group"]))
        # ranks that `reduce_group` has summed over hold equal values, whose mean is the same
        _average(values, mesh.tokens)


def _average(values: Tensor, axis: Axis) -> None:
    """Set `values` [n] to their mean over the axis."""
    collectives.all_reduce(values, axis)
    values /= axis.size


@accepts_defaults_only(pg_collection=OWN_GROUPS)
def track_moe_metrics(
    loss_scale: float,
    iteration: int,
    writer: Any = None,
    wandb_writer: Any = None,
    total_loss_dict: MutableMapping[str, Tensor] | None = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: Sequence[str] | None = None,
    num_layers: int | None = None,
    moe_layer_freq: int | Sequence[int] | None = None,
    mtp_num_layers: int | None = None,
) -> None:
    """Write the sums x `loss_scale`, averaged over the layers that have such losses, and clear them. Every rank must call.

    loss_scale: 1 / microbatches of the step, on this rank. writer: of TensorBoard, with `add_scalar`; wandb_writer: with
    `log`. total_loss_dict: the means are added to its entries. per_layer_logging: as moe/NAME_layer_I too, I from 0.
    num_layers: of the whole model. moe_layer_freq: which of them have such losses: every n-th, from the first, or a list
    of 0 and 1; default: all. force_initialize: the names `track_names` exist on ranks whose layers save none.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    if force_initialize:
        if num_layers is None:
            raise ValueError("track_moe_metrics: force_initialize needs num_layers, the layers of the whole model")
        for name in track_names or ():
            tracker.setdefault(name, _nothing_of(num_layers, get_global_state().device))
    reduce_aux_losses_tracker_across_ranks(track_names)

    for name, tracked in tracker.items():
        values = tracked["values"] * loss_scale  # [num_layers]
        mean = values.sum() / _number_of_layers(len(values), num_layers, moe_layer_freq, mtp_num_layers)
        if total_loss_dict is not None:
            total_loss_dict[name] = total_loss_dict[name] + mean if name in total_loss_dict else mean
        by_layer = {}
        if per_layer_logging:
            by_layer = {f"moe/{name}_layer_{i}": value for i, value in enumerate(values.tolist())}
        if writer is not None:
            writer.add_scalar(name, mean, iteration)
            for layer_name, value in by_layer.items():
                writer.add_scalar(layer_name, value, iteration)
        if wandb_writer is not None:
            wandb_writer.log({name: mean}, iteration)
            if by_layer:
                wandb_writer.log(by_layer, iteration)
    clear_aux_losses_tracker()


def _number_of_layers(
    tracked: int, num_layers: int | None, moe_layer_freq: int | Sequence[int] | None, mtp_num_layers: int | None
) -> int:
    """Return how many layers have auxiliary losses. tracked: all that the tracker has a place for."""
    layers = tracked if num_layers is None else num_layers
    if isinstance(moe_layer_freq, int):
        layers = len(range(0, layers, moe_layer_freq))
    elif moe_layer_freq is not None:
        layers = sum(moe_layer_freq)
    return layers + (mtp_num_layers or 0)
