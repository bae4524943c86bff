"""The optimizer over flat buffers, cut into segments of equal parameter groups. It knows nothing of parallelism.

For this rank's part of each buffer (all of it, or a ZeRO shard) it has fp32 masters and moments, laid out like the
parameters. Parameters that are fp32 or wider are their own masters. The only number from other ranks is the norm of
the whole gradient.

    buffer       [ w1 | b1 | w2 | b2 | embedding ]        parameters, in the order of the buffer
    owned        [       ########################]        this rank's shard
    segments     [       |b1|w2|b2| embedding    ]        runs of one parameter group: here biases do not decay
    step         one update per group over its segments; then masters are rounded into the parameters
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.distributed.buffer_plan import ParamRange, overlaps, runs
from megatron.core.distributed.contiguous_buffers import ParamAndGradBuffer, Shard
from megatron.core.offload.host_and_file_stores import OffloadAllocator
from megatron.core.offload.optimizer_offload_fraction import cut_by_fraction
from megatron.core.offload.tensor_in_memory_or_file import Stored, copy_stored
from megatron.core.optimizer import optimizer_flags_and_registry
from megatron.core.optimizer.adam_and_sgd import UpdateStep, make_update
from megatron.core.optimizer.cpu_offloading.sliced_update import Segment, SlicedUpdater
from megatron.core.optimizer.gather_full_matrices_over_tp import ShardedMatrix, full_matrices
from megatron.core.optimizer.loss_scaler import GradScaler
from megatron.core.optimizer.param_groups import GroupRule, ParamGroup, default_group, stacks_experts
from megatron.core.optimizer.split_master import SplitMaster
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.sharding.boxes import rows_to_flat_range
from megatron.core.sharding.placement import owned_pieces


class FlatOptimizer:
    """Optimizers of OPTIMIZERS on the fp32 masters of all model chunks of this rank.

    group_of: each parameter's group, and its optimizer if not --optimizer. scaler: the loss scale of the gradients.
    fixed_order: compute the norm to the same bits in every pipeline layout. device: of the norm on a rank without
    parameters. offload_store: storage of `offload_fraction` of masters and moments, which are updated slice by slice;
    None: the buffers' device.
    """

    @memory_kind("other")
    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        config: optimizer_flags_and_registry.OptimizerConfig,
        mesh: Mesh,
        *,
        group_of: GroupRule = default_group,
        scaler: GradScaler | None = None,
        fixed_order: bool = False,
        device: torch.device | str = "cpu",
        offload_store: OffloadAllocator | None = None,
        offload_fraction: float = 1.0,
    ):
        self.buffers = list(buffers)
        self.config = config
        self.mesh = mesh
        self.scaler = scaler
        self.fixed_order = fixed_order
        self.device = self.buffers[0].device if self.buffers else device

        # each parameter's group; each group's update, and the names of its states
        group_of = config.grouping(group_of)
        self._group_of: dict[str, ParamGroup] = {}
        for buffer in self.buffers:
            for name, parameter in buffer.parameters.items():
                self._group_of[name] = group_of(name, parameter.placement)
        self._updates = {group: make_update(config, group.optimizer) for group in self._group_of.values()}
        self._states = {group: config.rule(group.optimizer).states(config) for group in self._updates}

        # parameters whose update needs the full matrix
        matrices = self._full_matrix_params(offloads=offload_store is not None and offload_fraction > 0)
        replica_axes = {name: buffer.axes.replica for buffer in self.buffers for name in buffer.parameters}
        self._full_matrices: dict[str, ShardedMatrix] = {}
        if matrices:
            self._full_matrices = full_matrices(matrices, mesh, self.device, copies=replica_axes)

        # masters and moments of the elements that this rank owns, one shard per buffer
        self._storages = [
            _StateStorage(buffer, offload_store, offload_fraction, splits_masters=config.reuse_fp32_param)
            for buffer in self.buffers
        ]
        self.masters = [storage.make_masters() for storage in self._storages]
        kinds = dict.fromkeys([*config.moments, *(kind for states in self._states.values() for kind in states)])
        self.moments: dict[str, list[Shard]] = {}
        for kind in kinds:
            names = {name for name in self._group_of if self._has_state(name, kind)}
            self.moments[kind] = [storage.make_zeros(names=names) for storage in self._storages]
        self.step_count = 0  # updates that the moments have seen

        # views of the gradients for the norm, and segments for the update
        self._weighted = [_weighted_gradients(buffer, mesh, join=not fixed_order) for buffer in self.buffers]
        self._frozen = set[int]()  # ids of parameters that were frozen in the last step
        self._make_segments()

    def _has_state(self, name: str, kind: str) -> bool:
        """Whether the parameter's optimizer has a state of this name."""
        return kind in self._states[self._group_of[name]]

    def _full_matrix_params(self, *, offloads: bool) -> dict[str, nn.Parameter]:
        """Return the parameters whose update needs the full matrix.

        Raises ConfigError if this rank has only a part of one, or if one is no matrix and its update is of matrices
        alone.
        """
        matrices = {
            name: parameter
            for buffer in self.buffers
            for name, parameter in buffer.parameters.items()
            if self.config.rule(self._group_of[name].optimizer).needs_full_matrix
        }
        if not matrices:
            return {}

        # flags that leave a rank only parts
        hindrances = [f"--zero-stage {stage}" for stage in dict.fromkeys(b.stage for b in self.buffers) if stage > 1]
        if offloads:
            hindrances.append("offloaded state")
        if self.config.reuse_fp32_param:
            hindrances.append("--reuse-fp32-param")
        if hindrances:
            first = next(iter(matrices))
            optimizer = self._group_of[first].optimizer or self.config.optimizer
            raise ConfigError(
                f"--optimizer {optimizer} needs complete matrices ({first} and {len(matrices) - 1} more), but with "
                f"{' and '.join(hindrances)} a rank has only parts of them; use at most --zero-stage 1, without "
                "offload and without --reuse-fp32-param"
            )

        for name, parameter in matrices.items():
            optimizer = self._group_of[name].optimizer
            updates_matrices_alone = self.config.rule(optimizer).others is not None
            if updates_matrices_alone and parameter.dim() != 2 and not stacks_experts(parameter.placement):
                raise ConfigError(
                    f"{optimizer} updates only matrices, but {name} has the shape {tuple(parameter.shape)}; group_of "
                    "must give it another optimizer"
                )
        return matrices

    def _make_segments(self) -> None:
        """Sort the segments by how they are updated: one call per group for resident tensors, slices for the rest."""
        self._resident: defaultdict[ParamGroup, list[Segment]] = defaultdict(list)
        in_slices = []
        for segment in self._segments():
            if segment.is_resident:
                self._resident[segment.group].append(segment)
            else:
                in_slices.append(segment)
        self._sliced = SlicedUpdater(in_slices, self._updates.__getitem__)

    def _segments(self) -> Iterator[Segment]:
        """Yield all segments that this rank owns and trains: runs of equal group and storage.

        A parameter whose update needs the full matrix is a segment of its own.
        """
        for i, (buffer, storage) in enumerate(zip(self.buffers, self._storages)):
            # neighbours with one label share a segment; None: frozen
            labels: dict[str, tuple[ParamGroup, str | None] | None] = {}
            for name, parameter in buffer.parameters.items():
                own_name = name if name in self._full_matrices else None
                labels[name] = (self._group_of[name], own_name) if parameter.requires_grad else None

            # cut at the ends of this rank's gradients, and of what is offloaded
            sums = buffer.sums
            stored = storage.offloaded_runs + storage.resident_runs
            owned = [run for sum_run in sums.runs for run in overlaps(stored, *sum_run)]
            for label, first, last in runs(buffer.plan.param_ranges, labels):
                if label is None:
                    continue
                group, name = label
                for start, stop in overlaps(owned, first, last):
                    segment = Segment(
                        group,
                        self.masters[i].at(start, stop),
                        {kind: self.moments[kind][i].at(start, stop) for kind in self._states[group]},
                        sums.at(start, stop),
                        buffer.owned_params.at(start, stop) if storage.rounds_masters else None,
                        is_offloaded=bool(overlaps(storage.offloaded_runs, start, stop)),
                    )
                    if name is not None:
                        segment = self._as_matrix(segment, buffer.parameters[name], name)
                    yield segment

    def _as_matrix(self, segment: Segment, parameter: nn.Parameter, name: str) -> Segment:
        """Return the segment with its tensors in the parameter's shape."""
        assert segment.gradients.numel() == parameter.numel(), (
            f"{name} is split over several shards, but its update needs the full matrix; pass its name to "
            "DistributedDataParallel in `unsplit`"
        )
        shape = parameter.shape
        return replace(
            segment,
            master=segment.master.view(shape),
            moments={kind: stored.view(shape) for kind, stored in segment.moments.items()},
            gradients=segment.gradients.view(shape),
            full_matrix=self._full_matrices[name],
        )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, a scalar [] as the given one, for Megatron's `grad_scale_func`.

        `clip_grad_norm(loss scale)` removes the scale.
        """
        return loss if self.scaler is None else loss * self.scaler.scale

    @memory_kind("other")
    def grad_norm(self) -> float:
        """Return the L2 norm of the whole model's gradient, in which each parameter counts once. Every rank must call.

        Communication, for each kind of parameter: one all-reduce of a number over the ranks that hold shards of the
        gradient, and one over the ranks of a model copy. In fixed order, where every rank has whole sums: an
        all-reduce of a count and an all-gather of all parameters' sums of squares over mp.

        The norm is not finite if any gradient on any rank is not finite, counted or not. Otherwise a copy that
        overflows alone (kernels may sum in varying order) would diverge from the other copies.
        """
        self._open_gradients()
        if self.fixed_order:
            return math.sqrt(math.fsum(self._squares_of_all_parameters()))
        kinds = [self._own_squares(axes.model) for axes in self.mesh.all_grad_axes()]  # dense, experts
        for along in zip(*(axes for _, axes in kinds)):  # sums of both kinds at a time, over axes of their own
            started = []
            for (squares, _), axis in zip(kinds, along):
                started.append(collectives.start_all_reduce(squares, axis))
            for handle in started:
                handle.wait()
        return torch.stack([squares for squares, _ in kinds]).sum().sqrt().item()

    def _own_squares(self, model: Axis) -> tuple[Tensor, tuple[Axis, ...]]:
        """Return the sum of squares of this rank's gradients whose copies are spread over `model`, a scalar.

        And the axes to sum it over: shard, outer, model.
        """
        # float64: squares of float32 gradients neither overflow nor lose small ones.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        shard_axes = (ALONE, ALONE)
        for buffer, weighted in zip(self.buffers, self._weighted):
            if buffer.axes.model.ranks == model.ranks:  # dense or expert parameters: their copies span other ranks
                shard_axes = (buffer.axes.shard, buffer.axes.outer)
                for weight, part in weighted:
                    squares = _sum_of_squares(part)
                    total += squares if weight == 1 else weight * squares  # 0 x infinity is NaN
        return total, (*shard_axes, model)

    def _squares_of_all_parameters(self) -> list[float]:
        """Return the sums of squares of each piece of a parameter, from all ranks of mp.

        They are padded with zeros, in no certain order.

        Add them exactly (fsum). Each is summed as a tensor of its own, since the bits of a sum depend on where it
        begins.
        """
        squares = [weight * part.double().square().sum() for weighted in self._weighted for weight, part in weighted]
        most = collectives.all_reduce(torch.tensor([len(squares)], device=self.device), self.mesh["mp"], "max").item()
        padded = torch.zeros(int(most), dtype=torch.float64, device=self.device)  # [most]
        if squares:
            padded[: len(squares)] = torch.stack(squares)
        return collectives.all_gather(padded, self.mesh["mp"]).tolist()  # [ranks x most]

    def clip_factor(self, divisor: float = 1.0) -> tuple[float, float]:
        """Return (norm of gradient / `divisor`, factor for `step` that divides and clips to `clip_grad`).

        Every rank must call. The divisor may be negative.
        """
        norm = self.grad_norm() / abs(divisor)
        clip = 1.0
        if self.config.clip_grad > 0:
            # 1e-6 is Megatron's and torch's: the same gradients must be clipped to the same bits.
            limit = self.config.clip_grad / (norm + 1e-6)
            if limit < 1:  # a NaN norm clips nothing
                clip = limit
        return norm, clip / divisor

    def clip_grad_norm(self, divisor: float = 1.0) -> float:
        """Divide and clip the gradients now, and return the norm. Every rank must call.

        That takes one more pass over the gradients than `step(factor=...)`.
        """
        norm, factor = self.clip_factor(divisor)
        if factor != 1:
            for buffer in self.buffers:
                for gradients in buffer.sums.tensors:
                    gradients.mul_(factor)
        return norm

    def step(
        self, lr: float, decoupled_lr: float | None = None, *, weight_decay: float | None = None, factor: float = 1.0
    ) -> None:
        """Update masters and parameters with `factor` x the gradients in the buffers.

        Gradients are multiplied in place. lr: learning rate. decoupled_lr: that of decoupled groups; None: `lr`.
        weight_decay: None: the setting's. With optimizers of full matrices the ranks of tp, and those with the same
        parts, must call together.
        """
        if weight_decay is None:
            weight_decay = self.config.weight_decay

        def step_of(group: ParamGroup) -> UpdateStep:
            rate = decoupled_lr if group.decoupled and decoupled_lr is not None else lr
            decay = weight_decay * group.weight_decay_multiplier
            return UpdateStep(rate * group.lr_multiplier, decay, self.step_count, factor)

        self.update(step_of)

    @torch.no_grad()
    @memory_kind("other")
    def update(self, step_of: Callable[[ParamGroup], UpdateStep]) -> None:
        """Update as `step` does, with the numbers of `step_of` for each group; their `updates` is `step_count`."""
        self._drop_frozen()
        self._open_gradients()
        for group, segments in self._resident.items():
            masters = [segment.master for segment in segments]
            gradients = [segment.gradients for segment in segments]
            states = {kind: [segment.moments[kind] for segment in segments] for kind in self._states[group]}
            update = self._updates[group]
            if segments[0].full_matrix is None:
                update(masters, gradients, states, step_of(group))
            else:
                update(masters, gradients, states, step_of(group), [segment.full_matrix for segment in segments])
        self._sliced.step(step_of)  # publishes its own segments
        self.step_count += 1
        self._round_masters([storage.resident_runs for storage in self._storages])

    def _drop_frozen(self) -> None:
        """Drop parameters that were frozen since the last step; with a zero gradient they would still decay."""
        # Looked at each step, since a script may freeze layers during a run.
        frozen = {id(p) for buffer in self.buffers for p in buffer.parameters.values() if not p.requires_grad}
        if frozen != self._frozen:
            self._frozen = frozen
            self._make_segments()

    def _open_gradients(self) -> None:
        """Allocate the memory behind views of gradients that were made in an earlier step."""
        for buffer in self.buffers:
            buffer.open_grads()

    @memory_kind("other")
    def publish_masters(self) -> None:
        """Round the masters into the parameters that this rank owns.

        `DistributedDataParallel.gather_params` distributes them.
        """
        self._round_masters([storage.resident_runs + storage.offloaded_runs for storage in self._storages])

    def reload_masters(self, names: Collection[str]) -> None:
        """Set the masters of these parameters to the parameters' values, which something other than an update has changed.

        In ZeRO 3 they are the values of this rank's shard. Nothing is communicated.
        """
        for storage, master in zip(self._storages, self.masters):
            if not storage.buffer.is_half_precision:
                continue  # the parameters are their own masters
            for param_range in storage.buffer.plan.param_ranges:
                if param_range.name in names:
                    copy_stored(master.values(param_range), storage.buffer.owned_params.values(param_range))

    def _round_masters(self, runs_of: list[list[tuple[int, int]]]) -> None:
        """Round the masters of these runs of each buffer into parameters, if these are separate memory."""
        for storage, master, buffer_runs in zip(self._storages, self.masters, runs_of):
            if storage.rounds_masters:
                for start, stop in buffer_runs:
                    copy_stored(storage.buffer.owned_params.at(start, stop), master.at(start, stop))

    def tensors(self) -> dict[str, dict[str, Stored]]:
        """Return the state for a checkpoint: kind -> parameter name -> tensor, in memory or in a file.

        A tensor has the parameter's shape on this rank; that of a sharded parameter is flat, [elements], and holds the
        elements of `owned_ranges`.
        """
        kinds = dict(self.moments)
        if any(buffer.is_half_precision for buffer in self.buffers):
            kinds["master"] = self.masters
        result: dict[str, dict[str, Stored]] = {}
        for kind, shards in kinds.items():
            result[kind] = {
                param_range.name: _values(shard, buffer, param_range)
                for buffer, shard in zip(self.buffers, shards)
                for param_range in buffer.plan.param_ranges
                if kind == "master" or self._has_state(param_range.name, kind)
            }
        return result

    def owned_ranges(self) -> dict[str, tuple[int, int]]:
        """Return, for sharded parameters, name -> (start, stop) of the elements whose state this rank has.

        Elements are counted in row-major order.
        """
        return {
            param_range.name: buffer.owned_range(param_range)
            for buffer in self.buffers
            if buffer.plan.shards > 1
            for param_range in buffer.plan.param_ranges
        }


class _StateStorage:
    """The storage of a buffer's optimizer state: `offloaded_runs` in a tier, `resident_runs` on the buffer's device.

    splits_masters: masters are the parameters plus their missing bits (`SplitMaster`); rounds_masters: parameters are
    rounded copies of the masters.
    """

    def __init__(
        self,
        buffer: ParamAndGradBuffer,
        offload_store: OffloadAllocator | None,
        fraction: float,
        *,
        splits_masters: bool = False,
    ):
        self.buffer = buffer
        self.offload_store = offload_store
        self.splits_masters = splits_masters and buffer.is_half_precision
        self.rounds_masters = buffer.is_half_precision and not self.splits_masters
        assert not self.splits_masters or buffer.dtype == torch.bfloat16, f"masters of {buffer.dtype} cannot be split"
        starts = [param_range.start for param_range in buffer.plan.param_ranges]
        self.offloaded_runs, self.resident_runs = cut_by_fraction(
            buffer.owned_runs, starts, fraction if offload_store is not None else 0.0
        )

    def make_zeros(self, dtype: torch.dtype | None = None, names: Collection[str] | None = None) -> Shard:
        """Return zeros in the layout of the owned parameters of these names, by default of all: flat runs [elements].

        dtype: None: that of the masters.
        """
        dtype = dtype or self.buffer.master_dtype
        offloaded = self.offloaded_runs
        resident = self.resident_runs
        labels = {name: names is None or name in names for name in self.buffer.parameters}
        if not all(labels.values()):
            # only the named parameters; with all of them, the gaps of alignment too
            wanted = [(first, last) for label, first, last in runs(self.buffer.plan.param_ranges, labels) if label]
            offloaded = [part for run in wanted for part in overlaps(offloaded, *run)]
            resident = [part for run in wanted for part in overlaps(resident, *run)]
        tensors = [self.offload_store.zeros(stop - start, dtype) for start, stop in offloaded]
        for start, stop in resident:
            tensors.append(torch.zeros(stop - start, dtype=dtype, device=self.buffer.device))
        return Shard(offloaded + resident, tensors, dtype)

    def make_masters(self) -> Shard:
        """Return the owned parameters in fp32, in flat runs [elements].

        They are the parameters themselves if they are that precise, otherwise copies or `SplitMaster`s.
        """
        owned = self.buffer.owned_params
        if not self.buffer.is_half_precision:
            return owned
        if self.splits_masters:
            residuals = self.make_zeros(torch.int16)
            masters = [
                SplitMaster(owned.at(*run), residual) for run, residual in zip(residuals.runs, residuals.tensors)
            ]
            return Shard(residuals.runs, masters, SplitMaster.dtype)
        copies = self.make_zeros()
        for run, copy in zip(copies.runs, copies.tensors):
            copy_stored(copy, owned.at(*run))
        return copies


def _values(shard: Shard, buffer: ParamAndGradBuffer, param_range: ParamRange) -> Stored:
    """Return a parameter's elements in the shard: in its shape if the buffer is not sharded, else flat."""
    values = shard.values(param_range)
    if buffer.plan.shards > 1:
        return values
    return values.view(buffer.parameters[param_range.name].shape)


_WIDENED_AT_ONCE = 2**24  # elements on an accelerator: 128 MB


def _sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares in float64, a scalar, equal in every layout to the last digits.

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
    buffer = torch.empty(at_once, dtype=torch.float64)
    squares = []
    for piece in x.split(at_once):
        wide = buffer[: len(piece)].copy_(piece)
        squares.append(torch.dot(wide, wide))
    return torch.stack(squares).sum()


def _weighted_gradients(buffer: ParamAndGradBuffer, mesh: Mesh, *, join: bool) -> list[tuple[float, Tensor]]:
    """Return this rank's sums of gradients, in parts of weight 1 where this rank counts them in the norm, otherwise 0.

    `join`: merge neighbours.
    """
    # parts of the whole buffer: (weight, start, stop)
    ranges = buffer.plan.param_ranges
    next_starts = [param_range.start for param_range in ranges[1:]] + [buffer.plan.numel]
    parts: list[tuple[float, int, int]] = []
    end = 0  # of the last part
    for param_range, next_start in zip(ranges, next_starts):
        parameter = buffer.parameters[param_range.name]
        shape = tuple(parameter.shape)
        for _, local in owned_pieces(parameter.placement, shape, mesh):
            first, last = rows_to_flat_range(local, shape)
            start = param_range.start + first
            stop = param_range.start + last
            if join and stop == param_range.stop:
                stop = next_start  # the gap that alignment leaves is zero
            if end < start:
                parts.append((0.0, end, start))
            elif join and parts:
                _, start, _ = parts.pop()  # continues the last part
            parts.append((1.0, start, stop))
            end = stop
    parts.append((0.0, end, buffer.plan.numel))

    # those of them that this rank has
    sums = buffer.sums
    return [(weight, sums.at(*run)) for weight, start, stop in parts for run in overlaps(sums.runs, start, stop)]
