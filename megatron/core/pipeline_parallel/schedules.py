"""Drive one step through the pipeline: forwards, backwards and the reduction of gradients, in the order of a schedule.

    Pipeline                        a rank's chunks and their schedules; the trainer's step and evaluation run on it
    run_step                        a step of a script's own loop, which leaves gradients of the mean loss
    get_forward_backward_func       the same with Megatron's arguments (Megatron: core/pipeline_parallel/schedules.py)

A step has three parts: `Pipeline.run` executes this rank's list of actions, `Pipeline.share_totals` sums losses and
token counts over all ranks, and the caller divides the reduced gradients by the tokens of the step.

The schedules themselves are lists of actions, made without torch in `pipeline_parallel/schedule/`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.datasets.aux_loss_weight_from_next_microbatches import CountsTokens
from megatron.core.distributed.clear_reduce_divide_gradients import GradientStep
from megatron.core.offload.activation_offload import HoldsActivations
from megatron.core.ops.aux_loss_collector import AuxLossMeans, adds_terms_to_graph, declared_aux_losses
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys, own_dropout_keys
from megatron.core.ops.main_grad_interface import DataParallelChunkInterface
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_global_state
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.parallel.stage_to_rank import loop
from megatron.core.pipeline_parallel.executor import Executor, ForwardStep
from megatron.core.pipeline_parallel.loss_func_results import LossTotals, keep_reports
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule, stages_in
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import forwards_over
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule.registry import stage_map
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule, peak_inputs
from megatron.core.pipeline_parallel.stage_transport import TensorSpec, Transport
from megatron.core.process_groups_config import check_groups
from megatron.core.utils import get_model_config, unwrap_model

# Megatron's arguments that only concern its own transfers, groups or warm-up.
_WITHOUT_EFFECT = ("first_val_step", "p2p_communicator", "force_all_reduce")


@dataclass(frozen=True)
class BatchShape:
    """The distribution of a step's samples over microbatches and ranks."""

    micro_batch_size: int
    num_microbatches: int  # per rank in a step of validation; the default for a step of training
    tokens_per_sample: int = 1  # on one rank, if none is masked

    @property
    def nominal_tokens(self) -> int:
        """Tokens of one rank's microbatch if none is masked."""
        return self.micro_batch_size * self.tokens_per_sample

    def samples_of(self, first_sample: int, microbatch: int, samples: Axis) -> tuple[int, ...]:
        """Return the samples in the rows of one rank's microbatch, numbered over the run. samples: `Mesh.samples`.

        With micro_batch_size 2, two data-parallel ranks and first_sample 0:

            microbatch 0    rank 0: samples 0 1    rank 1: samples 2 3
            microbatch 1    rank 0: samples 4 5    rank 1: samples 6 7
        """
        first = first_sample + (microbatch * samples.size + samples.rank) * self.micro_batch_size
        return tuple(range(first, first + self.micro_batch_size))


class SharedTotals(NamedTuple):
    """The totals of a step over all ranks."""

    tokens: float
    loss: float  # sum of the losses as returned
    # name -> mean, of entries with a count above 0, and of auxiliary losses; on the last stage, empty elsewhere
    report: dict[str, float]
    uncounted: tuple[str, ...] = ()  # the entries without a mean, since every token is masked
    aux_by_layer: Mapping[str, Mapping[int, float]] = {}  # auxiliary loss -> layer number -> mean; where `report` is


class Pipeline:
    """Runs this rank's chunks by a schedule.

    chunks: by stage, each a DistributedDataParallel or a plain module.
    boundary: the tensors that pass between stages; the ranks of `copies_over` hold equal copies.
    keys: dropout keys; default: all keys of the chunks.
    microbatch_group: of a schedule whose chunks take turns, the microbatches of a turn; default: the pipeline size.
    poison: see `Transport`.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        mesh: Mesh,
        batch: BatchShape,
        *,
        boundary: tuple[TensorSpec, ...],
        forward_step: ForwardStep,
        keys: SampleDropoutKeys | None = None,
        weight_grads: WeightGradStore | None = None,
        schedule_name: str = "1f1b",
        microbatch_group: int | None = None,
        copies_over: Axis | None = None,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ):
        self.chunks = chunks
        self.mesh = mesh
        self.batch = batch
        self.device = device
        self.keys = _keys_in(chunks) if keys is None else {keys}
        self.aux_losses = declared_aux_losses(chunk for chunk in chunks.values() if isinstance(chunk, nn.Module))
        self.adds_terms_to_graph = any(adds_terms_to_graph(unwrap_model(chunk)) for chunk in chunks.values())
        self.per_token_loss = any(bool(_config_of(chunk, "calculate_per_token_loss")) for chunk in chunks.values())
        self.stages = stage_map(schedule_name, mesh["pp"].size, len(chunks))
        self.transport = Transport(mesh, boundary, device, copies_over=copies_over, poison=poison)
        self.forward_step = forward_step
        self.weight_grads = weight_grads or WeightGradStore()
        self.schedule_name = schedule_name
        self.microbatch_group = microbatch_group
        self.around: Callable[[Action], AbstractContextManager] = nullcontext  # entered for each action
        self._schedules: dict[bool, tuple[int, Schedule]] = {}  # training -> (number of microbatches, lowered schedule)

    def run(
        self,
        data_iterators: Mapping[int, object],
        first_sample: int,
        *,
        training: bool = True,
        num_microbatches: int | None = None,
        loss_scale: float = 1.0,
        aux_weight: float = 0.0,
        forward_step: ForwardStep | None = None,
    ) -> LossTotals:
        """Run the forwards, backwards and the start of gradient reduction of one step; only forwards if not `training`.

        Every pipeline rank must call. The result has float64 scalars [] on the last stage, and is empty on others.
        first_sample: the step's first sample, numbered over the run. aux_weight: see `GradientStep`. forward_step:
        default: the pipeline's own.
        """

        def begin(action: Action) -> None:
            """Set what a compute action depends on: the samples of its dropout masks, its chunk, its buffers."""
            # Dropout masks follow from the samples, so that they are the same in every layout of ranks.
            for keys in self.keys:
                keys.samples = self.batch.samples_of(first_sample, action.microbatch, self.mesh.samples)
            get_global_state().virtual_rank = self.stages.chunk_of(action.stage)
            chunk = self.chunks[action.stage]
            if isinstance(chunk, DataParallelChunkInterface):
                chunk.begin_microbatch(action.microbatch, backward=action.op is not Op.F)

        def reduce(stage: int) -> None:
            chunk = self.chunks[stage]
            if isinstance(chunk, DataParallelChunkInterface):
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
            aux_losses=self.aux_losses,
            aux_weight=aux_weight,
            aux_weight_in_graph=1.0 if self.per_token_loss else aux_weight,
            device=self.device,
        )
        schedule = self.schedule(num_microbatches, training=training)
        state = get_global_state()
        before = state.micro_batch_size
        state.micro_batch_size = self.batch.micro_batch_size
        if training:
            state.num_microbatches = num_microbatches or self.batch.num_microbatches
        try:
            return executor.run(schedule, self.mesh["pp"].rank, training=training, loss_scale=loss_scale)
        finally:
            state.micro_batch_size = before

    def schedule(self, num_microbatches: int | None = None, *, training: bool = True) -> Schedule:
        """Return the lowered lists of all pipeline ranks, cached for the last number of microbatches.

        A cache of all sizes of a long batch ramp, each with the actions of every rank, would take gigabytes.
        """
        m = num_microbatches or self.batch.num_microbatches
        cached_m, schedule = self._schedules.get(training, (None, []))
        if cached_m == m:
            return schedule
        if training:
            compute = self._training_schedule(m)
            schedule = add_reduce(add_transfers(compute))
            self._reserve(compute)
        else:
            schedule = add_transfers(forwards_over(self.stages, m))
        self._schedules[training] = m, schedule
        return schedule

    def _training_schedule(self, m: int) -> Schedule:
        """Return the compute actions of a step of m microbatches. ValueError if their stages are on other ranks."""
        name = self.schedule_name
        schedule = make_schedule(name, self.mesh["pp"].size, m, len(self.chunks), self.microbatch_group)
        if stages_in(schedule) != self.stages:
            raise ValueError(
                f"{name}: with {m} microbatches the schedule places its stages on other ranks than the model has them "
                f"on; fix SCHEDULES[{name!r}]"
            )
        return schedule

    @memory_kind("other")
    def weigh_aux_losses(
        self, gradients: GradientStep, data_iterators: Mapping[int, object], num_microbatches: int
    ) -> None:
        """Weigh the model's auxiliary losses, if it has any, against the tokens of the next step. Every rank must call.

        The data iterators of the last stage count the tokens, if they can (`CountsTokens`); else each sample counts
        all of its tokens, masked or not. num_microbatches: per rank.

        Tokens are counted for a model that declares auxiliary losses, or says that it adds terms to the graph
        (`adds_terms_to_graph`). Terms of another model are weighed as if no token were masked.
        """
        if not self.aux_losses and not self.adds_terms_to_graph:
            gradients.aux_weight = float(self.batch.nominal_tokens * self.mesh.sequence.size)
            return

        # one rank of each replica knows its tokens; its ranks share them, then the replicas
        counted = torch.zeros(2, dtype=torch.float64)  # tokens, replicas that know them
        last_iterator = data_iterators.get(self.stages.last)
        if self.mesh["tp"].is_first and self.mesh.sequence.is_first and isinstance(last_iterator, CountsTokens):
            tokens = last_iterator.num_tokens(num_microbatches)
            if tokens is not None:
                counted[0] = tokens
                counted[1] = 1
        counted = counted.to(self.device)
        for axis in (self.mesh["mp"], self.mesh.sequence, self.mesh.samples):
            collectives.all_reduce(counted, axis)
        tokens, num_known = counted.cpu().tolist()

        replicas = self.mesh.samples.size
        if num_known != replicas:
            tokens = self.batch.nominal_tokens * num_microbatches * self.mesh.tokens.size
        gradients.weigh_aux_losses(tokens, num_microbatches * replicas)

    @memory_kind("other")
    def share_totals(self, totals: LossTotals) -> "SharedTotals":
        """Sum the totals over all ranks. Every rank must call.

        One all-reduce over `Mesh.tokens` within the last stage sums everything, [2 + 2 entries]; a second over pp, of
        [2], shares tokens and losses with the ranks of other stages. Auxiliary losses, which each stage has of its own
        layers, are summed over the replicas and over pp, [layers, names, 2].
        """
        # pack the numbers: tokens, loss, then sum and count of each report entry
        names = sorted(totals.report)
        packed = torch.zeros(2 + 2 * len(names), dtype=torch.float64, device=self.device)  # [2 + 2 entries]
        packed[0] = totals.tokens
        packed[1] = totals.value
        for i, name in enumerate(names):
            packed[2 + 2 * i : 4 + 2 * i] = totals.report[name]

        # sum them over the ranks with different tokens, then over the stages
        if self.mesh["pp"].rank == self.stages.rank_of_last:
            collectives.all_reduce(packed, self.mesh.tokens)
        shared = collectives.all_reduce(packed[:2].clone(), self.mesh["pp"])  # [2]; zeros of all stages but the last

        aux = packed.new_empty(0)
        if totals.aux is not None:
            aux = totals.aux.sums.flatten().clone()  # [layers x names x 2]; equal on all ranks that share samples
            for axis in (self.mesh.samples, self.mesh["pp"]):
                collectives.all_reduce(aux, axis)

        # copy them to the host at once, since each read waits for the device
        numbers = torch.cat((shared, packed[2:], aux)).cpu().tolist()
        end = packed.numel()
        means: dict[str, float] = {}
        for name, total, count in zip(names, numbers[2:end:2], numbers[3:end:2], strict=True):
            if count:
                means[name] = total / count
        uncounted = tuple(name for name in names if name not in means)
        if totals.aux is None or not self.mesh.has_last_stage:
            return SharedTotals(numbers[0], numbers[1], means, uncounted)
        aux_means = AuxLossMeans.from_sums(totals.aux.names, numbers[end:])
        return SharedTotals(numbers[0], numbers[1], means | aux_means.means, uncounted, aux_means.by_layer)

    def _reserve(self, schedule: Schedule) -> None:
        """Tell the layers of each chunk the peak number of microbatches whose inputs wait for a backward."""
        for stage, chunk in self.chunks.items():
            for module in _modules_of(chunk):
                if isinstance(module, HoldsActivations):
                    until_weight_grads = module.weight_grads_read_inputs
                    module.reserve(peak_inputs(schedule, stage, until_weight_grads=until_weight_grads))


def _modules_of(chunk: Any) -> list[nn.Module]:
    return list(chunk.modules()) if isinstance(chunk, nn.Module) else []


def _keys_in(chunks: Mapping[int, nn.Module]) -> set[SampleDropoutKeys]:
    """Return the dropout keys of all layers of the chunks."""
    keys: set[SampleDropoutKeys | None] = set()
    for chunk in chunks.values():
        keys |= {own_dropout_keys(module) for module in _modules_of(chunk)}
    return keys - {None}


def run_step(
    chunks: Sequence[nn.Module],
    data_iterators: Sequence[Iterator | None],
    forward_step: ForwardStep,
    mesh: Mesh,
    batch: BatchShape,
    *,
    boundary: tuple[TensorSpec, ...] = (),
    first_sample: int = 0,
    training: bool = True,
    non_loss: bool = False,
    loss_scale: float | None = None,
    before_reduce: Callable[[list[nn.Module]], Any] | None = None,
    microbatch_group: int | None = None,
    device: torch.device | str = "cpu",
) -> list[Any]:
    """Run one step. Return the microbatches' reports on the last stage, [] on others. Every rank must call.

    chunks: this rank's, in order, each with its data iterator: 1F1B, or with several chunks interleaved 1F1B.
    boundary: the tensors that pass between stages.
    first_sample: the step's first, numbered over the run, which dropout masks follow from.
    training: False: only forwards.
    non_loss: the reports are loss_func(output, non_loss_data=True).
    loss_scale: the gradients stay multiplied by it.
    before_reduce(chunks): called before the reduction ends.
    microbatch_group: of several chunks, see `Pipeline`.

    Gradients accumulate in the chunks' buffers (in `.grad` without DistributedDataParallel), are summed over
    data-parallel ranks and divided by the tokens of the step.
    """
    # build the pipeline of this rank's stages
    stages = loop(mesh["pp"].size, len(chunks))
    local_stages = stages.of_rank(mesh["pp"].rank)
    reports: list[Any] = []
    pipeline = Pipeline(
        dict(zip(local_stages, chunks, strict=True)),
        mesh,
        batch,
        boundary=boundary,
        forward_step=keep_reports(forward_step, reports, non_loss=non_loss),
        schedule_name="1f1b" if len(chunks) == 1 else "interleaved",
        microbatch_group=microbatch_group,
        device=device,
    )
    data = dict(zip(local_stages, data_iterators, strict=True))
    if not training or non_loss:
        pipeline.run(data, first_sample, training=False)
        return reports

    # the caller has cleared the gradients; with a loss scale the sum over all tokens would leave float16's range
    gradients = GradientStep(chunks)
    if loss_scale is not None:
        step_tokens = batch.nominal_tokens * batch.num_microbatches * mesh.tokens.size
        gradients = GradientStep(chunks, loss_scale=loss_scale, nominal_tokens=step_tokens, keeps_loss_scale=True)

    # forwards and backwards, then the mean over the counted tokens
    pipeline.weigh_aux_losses(gradients, data, batch.num_microbatches)
    totals = pipeline.run(data, first_sample, loss_scale=gradients.objective_scale, aux_weight=gradients.aux_weight)
    shared = pipeline.share_totals(totals)
    if pipeline.aux_losses:  # their means over the step, in each report, so that means over the reports are right
        means = {name: shared.report[name] for name in pipeline.aux_losses[0].names if name in shared.report}
        aux_means = {name: torch.tensor(mean, dtype=torch.float64, device=device) for name, mean in means.items()}
        reports[:] = [{**report, **aux_means} for report in reports]
    if before_reduce is not None:
        before_reduce(list(chunks))
    gradients.finish(shared.tokens)
    gradients.divide_gradients()
    return reports


@accepts_defaults_only(pp_size=None, vp_size=None)
def get_forward_backward_func() -> Callable[..., list[Any]]:
    """Return `forward_backward`, which serves with and without a pipeline, interleaved or not."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator | Sequence[Iterator | None] | None,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None,
    pg_collection: Any = None,
    **others: Any,
) -> list[Any]:
    """Run the forwards and backwards of one step. Every rank must call.

    Returns the microbatches' reports on the last stage, [] on others. Each has the means of the step's auxiliary losses,
    float64 [], by name.

    Gradients accumulate in the chunks' buffers (in `.grad` without DistributedDataParallel), are summed over
    data-parallel ranks and divided by the tokens of the step: they are gradients of the mean loss. The caller zeroes
    them before (`zero_grad_buffer`) and updates after. `finalize_model_grads` has no effect, called by the script or as
    the `finalize_model_grads_func` of the model's config, which is called here with (chunks, None).

    grad_scale_func(loss []) -> the loss [] times the loss scale, such as the optimizer's `scale_loss`; default: the
    function in the model's config. The caller must divide the gradients by the scale.

    model: this rank's chunk, or its chunks in order, each with a data iterator. Chunks have `set_input_tensor` and, in
    a pipeline, `config` with hidden_size and params_dtype. collect_non_loss_data: forwards only; returns
    loss_func(output, non_loss_data=True) of each microbatch. Raises TypeError for arguments that are not built, and
    ValueError for another decoder_seq_length or number of iterators.
    """
    # check the arguments
    check_groups(pg_collection, "get_forward_backward_func: pg_collection")
    not_built = {name: value for name, value in others.items() if name not in _WITHOUT_EFFECT and value is not None}
    if not_built:
        raise TypeError(f"get_forward_backward_func: {sorted(not_built)} are not built; omit them")
    if decoder_seq_length not in (None, seq_length):
        lengths = f"decoder_seq_length ({decoder_seq_length}) differs from seq_length ({seq_length})"
        raise ValueError(f"{lengths}; encoder-decoder models are not built yet")
    chunks = list(model) if isinstance(model, Sequence) else [model]
    iterators = list(data_iterator) if isinstance(data_iterator, Sequence) else [data_iterator]
    if len(chunks) != len(iterators):
        raise ValueError(f"{len(chunks)} model chunk(s) but {len(iterators)} data iterator(s); give one for each chunk")

    # read the loss scale and the function that finalizes gradients
    state = get_global_state()
    trains = not (forward_only or collect_non_loss_data)
    loss_scale = None
    if trains:
        scale_loss = grad_scale_func or _config_of(chunks[0], "grad_scale_func")
        if scale_loss is not None:
            loss_scale = float(scale_loss(torch.ones((), device=state.device)))
    before_reduce = None
    finalize = _config_of(chunks[0], "finalize_model_grads_func")
    if finalize is not None:

        def before_reduce(chunks: list[nn.Module]) -> Any:
            return finalize(chunks, None)  # None: no token count, the division follows

    # run the step
    tokens = seq_length // state.mesh.sequence.size  # of a sample on this rank
    reports = run_step(
        chunks,
        iterators,
        forward_step_func,
        state.mesh,
        BatchShape(micro_batch_size, num_microbatches, tokens),
        boundary=_boundary(chunks[0], state.mesh, tokens, micro_batch_size),
        first_sample=state.samples,
        training=trains,
        non_loss=collect_non_loss_data,
        loss_scale=loss_scale,
        before_reduce=before_reduce,
        microbatch_group=_config_of(chunks[0], "microbatch_group_size_per_vp_stage"),
        device=state.device,
    )
    if trains:
        state.samples += num_microbatches * micro_batch_size * state.mesh.samples.size
    return reports


def _boundary(chunk: nn.Module, mesh: Mesh, seq_length: int, micro_batch_size: int) -> tuple[TensorSpec, ...]:
    """Return the shape of the hidden states [s, b, h] that pass between two stages; () without a pipeline.

    s: the tokens of a sample on this rank, which sequence parallelism shards between layers.
    """
    if mesh["pp"].size == 1:
        return ()
    config = get_model_config(chunk)
    length = seq_length
    if getattr(config, "sequence_parallel", get_global_state().sequence_parallel):
        length = seq_length // mesh["tp"].size
    dtypes = [getattr(config, name, None) for name in ("residual_dtype", "pipeline_dtype", "params_dtype")]
    dtype = next(filter(None, dtypes), None)  # the first that is set
    if dtype is None:
        raise ValueError("the model's config has no pipeline_dtype: the dtype of the tensors between stages; set it")
    return (TensorSpec((length, micro_batch_size, config.hidden_size), dtype),)


def _config_of(chunk: nn.Module, name: str) -> Any:
    """Return a field of the model's config; None if the model has no config, or the config no such field."""
    return getattr(getattr(unwrap_model(chunk), "config", None), name, None)


# Megatron's three drivers: a schedule decides here what they differ in.
forward_backward_no_pipelining = forward_backward


forward_backward_pipelining_without_interleaving = forward_backward


forward_backward_pipelining_with_interleaving = forward_backward


def deallocate_output_tensor(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Release the memory of a stage's output, of any shape, that has been sent, if told to.

    The tensor is [1] afterwards; the autograd graph stays.
    """
    if out is not None and deallocate_pipeline_outputs:
        out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


__getattr__ = names_of_megatron(__name__)
