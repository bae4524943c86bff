"""The optimizer over flat buffers, cut into segments of equal parameter groups. No parallelism shows here.

For this rank's part of each buffer (all of it, or a ZeRO shard) it keeps fp32 masters and moments, laid out like the
parameters. Parameters that are fp32 or wider are their own masters. The only number from other ranks is the norm of
the whole gradient.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.memory_category import memory_kind
from megatron.core.distributed.buffer_plan import Slot, overlaps, runs
from megatron.core.distributed.contiguous_buffers import ParamAndGradBuffer, Shard
from megatron.core.offload.offload_fraction import cut_by_fraction
from megatron.core.offload.offload_tiers import Tier
from megatron.core.offload.stored_tensor import Stored, copy_stored
from megatron.core.optimizer import optimizer_registry
from megatron.core.optimizer.adam_and_sgd import UpdateStep, make_update
from megatron.core.optimizer.cpu_offloading.sliced_update import Segment, SlicedUpdater
from megatron.core.optimizer.full_matrix import whole_tensors
from megatron.core.optimizer.loss_scaler import GradScaler
from megatron.core.optimizer.param_groups import GroupRule, ParamGroup, default_group
from megatron.core.optimizer.split_master import SplitMaster
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import flat_run
from megatron.core.sharding.placement import owned_pieces


class FlatOptimizer:
    """Optimizers of OPTIMIZERS on the fp32 masters of all model chunks of this rank.

    group_of: each parameter's group, and its optimizer if not --optimizer. scaler: the loss scale of the gradients.
    fixed_order: compute the norm to the same bits in every pipeline layout. device: of the norm on a rank without
    parameters. tier: storage of `offload_fraction` of masters and moments, which are updated slice by slice; None: the
    buffers' device.
    """

    @memory_kind("other")
    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        config: optimizer_registry.OptimizerConfig,
        mesh: Mesh,
        *,
        group_of: GroupRule = default_group,
        scaler: GradScaler | None = None,
        fixed_order: bool = False,
        device: torch.device | str = "cpu",
        tier: Tier | None = None,
        offload_fraction: float = 1.0,
    ):
        self.buffers, self.config = list(buffers), config
        self.mesh, self.scaler = mesh, scaler
        self.fixed_order = fixed_order
        self.device = self.buffers[0].device if self.buffers else device
        self._kept = kept = [
            _Kept(buffer, tier, offload_fraction, splits=config.reuse_fp32_param) for buffer in self.buffers
        ]
        group_of = config.grouping(group_of)
        self._group_of = {name: group_of(name, p.placement) for b in self.buffers for name, p in b.parameters.items()}
        self._updates = {group: make_update(config, group.optimizer) for group in self._group_of.values()}
        self._states = {group: config.rule(group.optimizer).states(config) for group in self._updates}
        whole = self._of_whole_tensors(offloads=tier is not None and offload_fraction > 0)
        copies = {name: buffer.axes.replica for buffer in self.buffers for name in buffer.parameters}
        self._whole_tensors = whole_tensors(whole, mesh, self.device, copies=copies) if whole else {}
        self.masters = [one.master() for one in kept]
        kinds = dict.fromkeys([*config.moments, *(kind for states in self._states.values() for kind in states)])
        self.moments = {
            kind: [one.zeros(among=lambda name, kind=kind: self._keeps(name, kind)) for one in kept] for kind in kinds
        }
        self.step_count = 0  # updates that the moments have seen
        self._weighted = [_weighted_gradients(buffer, mesh, join=not fixed_order) for buffer in self.buffers]
        self._frozen = set[int]()
        self._divide()

    def _keeps(self, name: str, kind: str) -> bool:
        """Whether the parameter's optimizer has a state of this name."""
        return kind in self._states[self._group_of[name]]

    def _of_whole_tensors(self, *, offloads: bool) -> dict[str, nn.Parameter]:
        """The parameters whose update needs the whole tensor. Raises ConfigError if this rank holds only a part of
        one, or if one is no matrix and its update is of matrices alone."""
        named = {name: p for buffer in self.buffers for name, p in buffer.parameters.items()}
        whole = {name: p for name, p in named.items() if self.config.rule(self._group_of[name].optimizer).whole}
        stages = {f"--zero-stage {buffer.stage}": buffer.stage > 1 for buffer in self.buffers}
        others = {"offloaded state": offloads, "--reuse-fp32-param": self.config.reuse_fp32_param}
        hindrances = [flag for flag, given in (stages | others).items() if given]
        if whole and hindrances:
            name = self._group_of[next(iter(whole))].optimizer or self.config.optimizer
            raise ConfigError(
                f"--optimizer {name} needs whole tensors ({next(iter(whole))} and {len(whole) - 1} more), but "
                f"{' and '.join(hindrances)} leaves a rank parts of them; use "
                "--zero-stage 1 and leave out the rest"
            )
        for name, p in whole.items():
            if p.dim() != 2 and self.config.rule(optimizer := self._group_of[name].optimizer).others is not None:
                raise ConfigError(
                    f"{optimizer} updates matrices, and {name} is {tuple(p.shape)}; group_of must give it another optimizer"
                )
        return whole

    def _divide(self) -> None:
        """Sort the segments: one call per group for resident tensors, slices for the rest."""
        self._together: defaultdict[ParamGroup, list[Segment]] = defaultdict(list)  # updated by one call a group
        in_slices = []
        for segment in self._segments():
            (self._together[segment.group] if segment.is_tensors else in_slices).append(segment)
        self._sliced = SlicedUpdater(in_slices, self._updates.__getitem__)

    def _leave_out_frozen(self) -> None:
        """Drop parameters that were frozen since the last step; with a zero gradient they would still decay."""
        # Looked at each step, since a script may freeze layers during a run.
        frozen = {id(p) for buffer in self.buffers for p in buffer.parameters.values() if not p.requires_grad}
        if frozen != self._frozen:
            self._frozen = frozen
            self._divide()

    def _segments(self) -> Iterator[Segment]:
        """All segments that this rank owns and trains: runs of equal group and storage; whole-tensor updates one by
        one."""
        for i, (buffer, kept) in enumerate(zip(self.buffers, self._kept)):
            labels = {
                name: (self._group_of[name], name if name in self._whole_tensors else None) if p.requires_grad else None
                for name, p in buffer.parameters.items()
            }
            sums = buffer.sums
            whole = [part for run in sums.held for part in overlaps(kept.away + kept.here, *run)]
            for label, first, last in runs(buffer.plan.slots, labels):
                if label is None:
                    continue
                group, name = label
                for start, stop in overlaps(whole, first, last):
                    segment = Segment(
                        group,
                        self.masters[i].at(start, stop),
                        {kind: self.moments[kind][i].at(start, stop) for kind in self._states[group]},
                        sums.at(start, stop),
                        buffer.owned_params.at(start, stop) if kept.rounds else None,
                        is_away=bool(overlaps(kept.away, start, stop)),
                    )
                    yield segment if name is None else self._as_tensor(segment, buffer.parameters[name], name)

    def _as_tensor(self, segment: Segment, parameter: nn.Parameter, name: str) -> Segment:
        """The segment with its tensors in the parameter's shape."""
        assert segment.gradients.numel() == parameter.numel(), (
            f"{name} lies in several shards, but its update needs it whole; pass its name to DistributedDataParallel in `whole`"
        )
        shape = parameter.shape
        states = {kind: stored.view(shape) for kind, stored in segment.moments.items()}
        gradients, whole = segment.gradients.view(shape), self._whole_tensors[name]
        return replace(segment, master=segment.master.view(shape), moments=states, gradients=gradients, whole=whole)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The scaled loss, for Megatron's `grad_scale_func`; `clip_grad_norm(loss scale)` removes the scale."""
        return loss if self.scaler is None else loss * self.scaler.scale

    @memory_kind("other")
    def grad_norm(self) -> float:
        """The L2 norm of the whole model's gradient; each parameter counts once. Every rank must call.

        Communication, for each kind of parameter: one all-reduce of a number over the ranks that hold shards of the
        gradient, and one over the ranks of a model copy. In fixed order, where every rank has whole sums: an
        all-reduce of a count and an all-gather of all parameters' sums of squares over mp.

        The norm is not finite if any gradient on any rank is not finite, counted or not. Otherwise a copy that
        overflows alone (kernels may sum in varying order) would diverge from the other copies.
        """
        self._open_gradients()
        if self.fixed_order:
            return math.sqrt(math.fsum(self._squares_of_all_parameters()))
        squares = [self._sum_of_squares(axes.model) for axes in self.mesh.all_grad_axes()]
        return torch.stack(squares).sum().sqrt().item()

    def _sum_of_squares(self, model: Axis) -> Tensor:
        """The sum of squares of gradients whose copies are spread over `model`. All ranks of `model` must call."""
        # float64: squares of float32 gradients neither overflow nor lose small ones.
        total, shard_axes = torch.zeros((), dtype=torch.float64, device=self.device), ()
        for buffer, weighted in zip(self.buffers, self._weighted):
            if buffer.axes.model.ranks == model.ranks:  # dense or expert parameters: their copies span other ranks
                shard_axes = (buffer.axes.shard, buffer.axes.outer)
                for weight, part in weighted:
                    squares = _sum_of_squares(part)
                    total += squares if weight == 1 else weight * squares  # 0 x infinity is NaN
        for axis in shard_axes:
            collectives.all_reduce(total, axis)
        return collectives.all_reduce(total, model)

    def _squares_of_all_parameters(self) -> list[float]:
        """The sums of squares of each piece of a parameter, from all ranks of mp, padded with zeros, in no certain
        order.

        Add them exactly (fsum). Each is summed as a tensor of its own, since the bits of a sum depend on where it
        begins.
        """
        mine = [weight * part.double().square().sum() for weighted in self._weighted for weight, part in weighted]
        length = collectives.all_reduce(torch.tensor([len(mine)], device=self.device), self.mesh["mp"], "max").item()
        padded = torch.zeros(int(length), dtype=torch.float64, device=self.device)
        if mine:
            padded[: len(mine)] = torch.stack(mine)
        return collectives.all_gather(padded, self.mesh["mp"]).tolist()

    def clip_factor(self, divisor: float = 1.0) -> tuple[float, float]:
        """(norm of gradient / `divisor`, factor for `step` that divides and clips to `clip_grad`). Every rank must
        call.

        The divisor may be negative.
        """
        norm = self.grad_norm() / abs(divisor)
        # 1e-6 is Megatron's and torch's: the same gradients must be clipped to the same bits.
        limit = self.config.clip_grad / (norm + 1e-6) if self.config.clip_grad > 0 else 1.0
        return norm, (limit if limit < 1 else 1.0) / divisor  # a NaN norm clips nothing

    def clip_grad_norm(self, divisor: float = 1.0) -> float:
        """Divide and clip the gradients now, and return the norm. One more pass over the gradients than
        `step(factor=...)`. Every rank must call."""
        norm, factor = self.clip_factor(divisor)
        if factor != 1:
            for buffer in self.buffers:
                for gradients in buffer.sums.tensors:
                    gradients.mul_(factor)
        return norm

    def step(
        self, lr: float, decoupled_lr: float | None = None, *, weight_decay: float | None = None, factor: float = 1.0
    ) -> None:
        """Update masters and parameters with `factor` x the gradients in the buffers; gradients are multiplied in
        place.

        decoupled_lr: learning rate of decoupled groups; None: `lr`. weight_decay: None: the setting's.
        """
        weight_decay = self.config.weight_decay if weight_decay is None else weight_decay

        def step_of(group: ParamGroup) -> UpdateStep:
            rate = decoupled_lr if group.decoupled and decoupled_lr is not None else lr
            decay = weight_decay * group.weight_decay_multiplier
            return UpdateStep(rate * group.lr_multiplier, decay, self.step_count, factor)

        self.update(step_of)

    @torch.no_grad()
    @memory_kind("other")
    def update(self, step_of: Callable[[ParamGroup], UpdateStep]) -> None:
        """`step` with the numbers of each group, whose `updates` is `step_count`."""
        self._leave_out_frozen()
        self._open_gradients()
        for group, held in self._together.items():
            states = {kind: [segment.moments[kind] for segment in held] for kind in self._states[group]}
            masters, gradients = [segment.master for segment in held], [segment.gradients for segment in held]
            wholes = [[segment.whole for segment in held]] if held[0].whole is not None else []
            self._updates[group](masters, gradients, states, step_of(group), *wholes)
        self._sliced.step(step_of)
        self.step_count += 1
        self._publish([kept.here for kept in self._kept])

    def _open_gradients(self) -> None:
        """Before a use of views that were made in an earlier step."""
        for buffer in self.buffers:
            buffer.open_grads()

    @memory_kind("other")
    def publish_masters(self) -> None:
        """Round the masters into the parameters that this rank owns. `DistributedDataParallel.gather_params`
        distributes them."""
        self._publish([kept.here + kept.away for kept in self._kept])

    def _publish(self, runs_of: list[list[tuple[int, int]]]) -> None:
        """Round the masters of these runs of each buffer into parameters, if these are separate memory."""
        for kept, master, held in zip(self._kept, self.masters, runs_of):
            for start, stop in held if kept.rounds else ():
                copy_stored(kept.buffer.owned_params.at(start, stop), master.at(start, stop))

    def tensors(self) -> dict[str, dict[str, Stored]]:
        """The state of a checkpoint: kind -> parameter name -> tensor, in memory or in a file.

        A tensor has the parameter's shape; that of a sharded parameter is flat and holds the elements of `kept_of`.
        """
        kinds = dict(self.moments)
        if any(buffer.is_half_precision for buffer in self.buffers):
            kinds["master"] = self.masters
        return {
            kind: {
                slot.name: _values(flat, buffer, slot)
                for buffer, flat in zip(self.buffers, flats)
                for slot in buffer.plan.slots
                if kind == "master" or self._keeps(slot.name, kind)
            }
            for kind, flats in kinds.items()
        }

    def kept_of(self) -> dict[str, tuple[int, int]]:
        """Sharded parameters: name -> (start, stop), in row-major order, of the elements whose state this rank
        keeps."""
        return {
            slot.name: buffer.kept(slot)
            for buffer in self.buffers
            if buffer.plan.shards > 1
            for slot in buffer.plan.slots
        }


class _Kept:
    """Storage of a buffer's optimizer state: the runs `away` in a tier, the runs `here` on the buffer's device.

    splits: masters are the parameters plus their missing bits; rounds: parameters are rounded copies of the masters.
    """

    def __init__(self, buffer: ParamAndGradBuffer, tier: Tier | None, fraction: float, *, splits: bool = False):
        self.buffer, self.tier = buffer, tier
        self.splits = splits and buffer.is_half_precision
        self.rounds = buffer.is_half_precision and not self.splits
        assert not self.splits or buffer.dtype == torch.bfloat16, f"masters of {buffer.dtype} cannot be split"
        starts = [slot.start for slot in buffer.plan.slots]
        self.away, self.here = cut_by_fraction(buffer.owned, starts, fraction if tier is not None else 0.0)

    def zeros(self, dtype: torch.dtype | None = None, among: Callable[[str], bool] = lambda name: True) -> Shard:
        """Zeros in the layout of the owned parameters of these names; dtype: None: that of the masters."""
        dtype, device = dtype or self.buffer.master_dtype, self.buffer.device
        away, here = self.away, self.here
        labels = {slot.name: among(slot.name) for slot in self.buffer.plan.slots}
        if not all(labels.values()):  # else the gaps too
            wanted = [(first, last) for is_kept, first, last in runs(self.buffer.plan.slots, labels) if is_kept]
            away, here = ([part for run in wanted for part in overlaps(held, *run)] for held in (away, here))
        tensors = [self.tier.zeros(stop - start, dtype) for start, stop in away]
        tensors += [torch.zeros(stop - start, dtype=dtype, device=device) for start, stop in here]
        return Shard(away + here, tensors, dtype)

    def master(self) -> Shard:
        """The owned parameters in fp32: the parameters themselves if they are that precise, otherwise copies or
        `SplitMaster`s."""
        if not self.buffer.is_half_precision:
            return self.buffer.owned_params
        if self.splits:
            owned, residuals = self.buffer.owned_params, self.zeros(torch.int16)
            halves = zip(residuals.held, residuals.tensors)
            masters = [SplitMaster(owned.at(*run), residual) for run, residual in halves]
            return Shard(residuals.held, masters, SplitMaster.dtype)
        wide = self.zeros()
        for (start, stop), tensor in zip(wide.held, wide.tensors):
            copy_stored(tensor, self.buffer.owned_params.at(start, stop))
        return wide


def _values(flat: Shard, buffer: ParamAndGradBuffer, slot: Slot) -> Stored:
    values = flat.values(slot)
    return values.view(buffer.parameters[slot.name].shape) if buffer.plan.shards == 1 else values


_WIDENED_AT_ONCE = 2**24  # elements on an accelerator: 128 MB


def _sum_of_squares(x: Tensor) -> Tensor:
    """The sum of squares in float64, equal in every layout to the last digits.

    Widened piece by piece: a float64 copy of all gradients would take twice their memory. On the CPU, torch's norm
    with a wider dtype is not vectorized, so pieces are copied into a buffer that stays in the cache: 21 ms instead of
    115 ms for 33 million float32 (one thread). A piece is as large as the least work that torch gives to each thread.
    """
    if x.device.type != "cpu":
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in x.split(_WIDENED_AT_ONCE)]
        return torch.stack(norms).square().sum()
    at_once = 2**16 * torch.get_num_threads()
    if x.numel() <= at_once:  # most shards of a small model's units: as few calls as can be
        wide = x.double()
        return torch.dot(wide, wide)
    pieces = x.split(at_once)
    wide = torch.empty(at_once, dtype=torch.float64)
    return torch.stack([torch.dot(part, part) for part in (wide[: len(piece)].copy_(piece) for piece in pieces)]).sum()


def _weighted_gradients(buffer: ParamAndGradBuffer, mesh: Mesh, *, join: bool) -> list[tuple[float, Tensor]]:
    """This rank's sums of gradients, in parts of weight 1 where this rank counts them in the norm, otherwise 0. `join`:
    merge neighbours."""
    slots, end = buffer.plan.slots, 0
    parts: list[tuple[float, int, int]] = []
    for slot, next_start in zip(slots, [slot.start for slot in slots[1:]] + [buffer.plan.numel]):
        shape = tuple(buffer.parameters[slot.name].shape)
        for _, local in owned_pieces(buffer.parameters[slot.name].placement, shape, mesh):
            start, stop = (slot.start + at for at in flat_run(local, shape))
            if join and stop == slot.stop:
                stop = next_start  # the gap that alignment leaves is zero
            if end < start:
                parts.append((0.0, end, start))
            elif join and parts:
                start = parts.pop()[1]
            parts.append((1.0, start, stop))
            end = stop
    parts.append((0.0, end, buffer.plan.numel))
    sums = buffer.sums
    return [(weight, sums.at(*run)) for weight, *span in parts for run in overlaps(sums.held, *span)]
