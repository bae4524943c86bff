"""The driver of a step: runs this rank's chunks by the schedules of training and of evaluation.

`train_step` and `own_loop.run_step` both run on a `Pipeline`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.core.base.memory_kind import memory_kind
from megatron.core.offload.activation_offload import HoldsActivations
from megatron.core.ops.deferred_wgrad import WeightGradStore
from megatron.core.ops.dropout import DropoutKeys, keys_of
from megatron.core.ops.main_grad import DataParallelBase
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import current
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.executor import Executor, ForwardStep
from megatron.core.pipeline_parallel.microbatch_loss import LossTotals
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule, forwards_over, stages_in
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule.registry import stage_map
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule, peak_inputs
from megatron.core.pipeline_parallel.stage_transport import TensorSpec, Transport


@dataclass(frozen=True)
class BatchShape:
    """How the samples of a step are distributed over microbatches and ranks."""

    micro_batch_size: int
    num_microbatches: int  # per rank in a step of validation; the default for a step of training
    tokens_per_sample: int = 1  # on one rank, if none is masked

    @property
    def nominal_tokens(self) -> int:
        """Tokens of one rank's microbatch if none is masked."""
        return self.micro_batch_size * self.tokens_per_sample

    def samples_of(self, first_sample: int, microbatch: int, samples: Axis) -> tuple[int, ...]:
        """The samples in the rows of one rank's microbatch, numbered over the run. samples: `Mesh.samples`."""
        first = first_sample + (microbatch * samples.size + samples.rank) * self.micro_batch_size
        return tuple(range(first, first + self.micro_batch_size))


class SharedTotals(NamedTuple):
    """Totals of a step over all ranks."""

    tokens: float
    loss: float  # sum of the losses as returned
    report: dict[str, float]  # mean of each entry that counts something; on the last stage, empty elsewhere
    uncounted: tuple[str, ...] = ()  # the other entries, which have no mean: every token is masked


class Pipeline:
    """Runs this rank's chunks by a schedule.

    chunks: by stage, each a DistributedDataParallel or a plain module. boundary: the tensors that pass between stages; the
    ranks of `copies_over` hold equal copies. keys: dropout keys; default: all found in the chunks. poison: see `Transport`.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        mesh: Mesh,
        batch: BatchShape,
        *,
        boundary: tuple[TensorSpec, ...],
        forward_step: ForwardStep,
        keys: DropoutKeys | None = None,
        weight_grads: WeightGradStore | None = None,
        schedule_name: str = "1f1b",
        copies_over: Axis | None = None,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ):
        self.chunks, self.mesh = chunks, mesh
        self.batch, self.device = batch, device
        self.keys = _keys_in(chunks) if keys is None else {keys}
        self.stages = stage_map(schedule_name, mesh["pp"].size, len(chunks))
        self.transport = Transport(mesh, boundary, device, copies_over=copies_over, poison=poison)
        self.forward_step, self.weight_grads = forward_step, weight_grads or WeightGradStore()
        self.schedule_name = schedule_name
        self.around: Callable[[Action], AbstractContextManager] = nullcontext  # entered for each action
        self._schedules: dict[bool, tuple[int, Schedule]] = {}  # by whether it trains

    def run(
        self,
        data_iterators: Mapping[int, object],
        first_sample: int,
        *,
        training: bool = True,
        num_microbatches: int | None = None,
        loss_scale: float = 1.0,
        forward_step: ForwardStep | None = None,
    ) -> LossTotals:
        """Runs the forwards, backwards and the start of gradient reduction of one step; only forwards if not `training`.

        Every pipeline rank must call. first_sample: the step's first sample, numbered over the run. forward_step:
        default: the
        pipeline's own.
        """

        def begin(action: Action) -> None:
            for keys in self.keys:
                keys.samples = self.batch.samples_of(first_sample, action.microbatch, self.mesh.samples)
            current().virtual_rank = self.stages.chunk_of(action.stage)
            chunk = self.chunks[action.stage]
            if isinstance(chunk, DataParallelBase):
                chunk.begin_microbatch(action.microbatch, backward=action.op is not Op.F)

        def reduce(stage: int) -> None:
            chunk = self.chunks[stage]
            if isinstance(chunk, DataParallelBase):
                chunk.start_grad_reduce()

        executor = Executor(
            self.chunks,
            self.stages,
            transport=self.transport,
            forward_step=forward_step or self.forward_step,
            data_iterators=data_iterators,
            begin=begin,
            reduce=reduce,
            weight_grads=self.weight_grads,
            nominal_tokens=self.batch.nominal_tokens,
            around=self.around,
        )
        schedule = self.schedule(num_microbatches, training=training)
        return executor.run(schedule, self.mesh["pp"].rank, training=training, loss_scale=loss_scale)

    def schedule(self, num_microbatches: int | None = None, *, training: bool = True) -> Schedule:
        """The lowered lists of all pipeline ranks, cached for one number of microbatches.

        A cache of all sizes of a long batch ramp, each with the actions of every rank, would take gigabytes.
        """
        m = num_microbatches or self.batch.num_microbatches
        made_for, schedule = self._schedules.get(training, (None, []))
        if made_for != m:
            made = self._step_of(m) if training else forwards_over(self.stages, m)
            schedule = add_transfers(made)
            if training:
                schedule = add_reduce(schedule)
                self._reserve(made)
            self._schedules[training] = m, schedule
        return schedule

    def _step_of(self, m: int) -> Schedule:
        made = make_schedule(name := self.schedule_name, self.mesh["pp"].size, m, len(self.chunks))
        if stages_in(made) != self.stages:
            raise ValueError(f"{name}: {m} microbatches move its stages to other ranks; fix SCHEDULES[{name!r}]")
        return made

    @memory_kind("other")
    def share_totals(self, totals: LossTotals) -> "SharedTotals":
        """The totals of all ranks. Every rank must call.

        One all-reduce over `Mesh.tokens` within the last stage sums everything; a second over pp shares tokens and losses.
        """
        names = sorted(totals.report)
        packed = torch.zeros(2 + 2 * len(names), dtype=torch.float64, device=self.device)
        packed[0], packed[1] = totals.tokens, totals.value
        for i, name in enumerate(names):
            packed[2 + 2 * i : 4 + 2 * i] = totals.report[name]
        if self.mesh["pp"].rank == self.stages.rank_of_last:
            collectives.all_reduce(packed, self.mesh.tokens)
        shared = collectives.all_reduce(packed[:2].clone(), self.mesh["pp"])
        numbers = torch.cat((shared, packed[2:])).cpu().tolist()  # read at once: each read waits for the device
        pairs = list(zip(names, numbers[2::2], numbers[3::2]))
        means = {name: total / count for name, total, count in pairs if count}
        return SharedTotals(numbers[0], numbers[1], means, tuple(name for name in names if name not in means))

    def _reserve(self, schedule: Schedule) -> None:
        """Tells the layers of each chunk the peak number of microbatches that wait for a backward."""
        for stage, chunk in self.chunks.items():
            for module in _modules_of(chunk):
                if isinstance(module, HoldsActivations):
                    module.reserve(peak_inputs(schedule, stage))


def _modules_of(chunk: Any) -> list[nn.Module]:
    return list(chunk.modules()) if isinstance(chunk, nn.Module) else []


def _keys_in(chunks: Mapping[int, nn.Module]) -> set[DropoutKeys]:
    found = (keys_of(module) for chunk in chunks.values() for module in _modules_of(chunk))
    return {keys for keys in found if keys is not None}
