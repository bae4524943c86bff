"""A small GPT trained inside `run_ranks`, and its whole tensors put together again from all ranks: the parity tests' subject."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from layouts import Layout
from local_ranks import run_ranks
from torch import Tensor, nn

from megatron.core.distributed.buffer_plan import overlaps
from megatron.core.distributed.contiguous_buffers import ParamBuffer
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.offload.host_and_file_stores import OffloadAllocator, make_offload_store
from megatron.core.offload.tensor_in_memory_or_file import start_reading
from megatron.core.ops.attention.document_and_window_masks import Documents
from megatron.core.ops.cpu_half_precision_matmul import NATIVE
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.shard_sequence import shard_sequence
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.loss_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.layer_split import split_layers, split_two_stacks
from megatron.core.pipeline_parallel.schedules import BatchShape, Pipeline
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.sharding.boxes import pieces_in_flat_range, size_of, slices
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.sharding.placement import Placement, owned_pieces
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.config import Config
from megatron.training.checkpointing import save_and_load_run_state
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.make_chunks_optimizer_and_pipeline import tie_embeddings
from megatron.training.step import StepResult, train_step

VOCAB, SEQ, SEED = 61, 8, 3

GPT2 = ModelConfig(
    num_layers=4, hidden_size=32, num_attention_heads=8, make_vocab_size_divisible_by=8, fp64=True
)  # with dropout, biases, learned positions, tied weights
LLAMA = replace(
    GPT2,
    group_query_attention=True,
    num_query_groups=4,
    ffn_hidden_size=48,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    untie_embeddings_and_output_weights=True,
)
# The same styles where many steps are taken.
TINY_GPT2 = replace(GPT2, hidden_size=16, num_attention_heads=4)
TINY_LLAMA = replace(LLAMA, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, num_query_groups=2)


@dataclass
class Outcome:
    """What must not depend on the layout; and what each rank sent for it, which does."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)  # of each step, clipped
    weights: dict[str, Tensor] = field(default_factory=dict)
    calls: list[tuple[int, Counter]] = field(
        default_factory=list
    )  # of each rank: its pipeline rank, its last step's calls


@dataclass(frozen=True)
class Texts:
    """An endless data set."""

    vocab: int = VOCAB
    documents: bool = False  # mask attention by hand: causal, and not across a document's end at position number % SEQ
    as_mask: bool = True  # ... with a mask of s x s, or else with the numbers of the documents


@cache
def sample(number: int, texts: Texts = Texts()) -> dict[str, Tensor]:
    """Sample `number` of an endless data set, with a mask of its own; to be read only."""
    generator = torch.Generator().manual_seed(1000 + number)
    text = torch.randint(0, texts.vocab, (SEQ + 1,), generator=generator)
    mask = (torch.rand(SEQ, generator=generator, dtype=torch.float32) > 0.3).double()
    row = {"tokens": text[:-1], "labels": text[1:], "mask": mask, "positions": torch.arange(SEQ)}
    if texts.documents:
        document = (torch.arange(SEQ) > number % SEQ).long()
        if not texts.as_mask:
            return row | {"documents": document}
        other = document[:, None] != document[None, :]
        row["attention_mask"] = (torch.ones(SEQ, SEQ).triu(1).bool() | other)[None]  # [1, s, s]
    return row


def microbatches(
    batch: BatchShape,
    first_sample: int,
    mesh: Mesh,
    texts: Texts = Texts(),
    sample=sample,
    uncut: Collection[str] = ("documents",),
) -> Iterator[dict[str, Tensor]]:
    for i in range(batch.num_microbatches):
        rows = [sample(number, texts) for number in batch.samples_of(first_sample, i, mesh["dp"])]
        whole = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        yield {
            key: x if key in uncut else shard_sequence(x, mesh["cp"], dim=2 if x.dim() == 4 else 1)
            for key, x in whole.items()
        }


def loss_func(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses * mask.to(losses.dtype)).sum(), mask.sum()
    return total, count, {"lm loss": torch.stack((total.detach().double(), count))}


def forward_step(data: Iterator, model: nn.Module) -> tuple[Tensor, partial]:
    batch = next(data)
    mask = Documents(batch["documents"]) if "documents" in batch else batch.get("attention_mask")
    losses = model(batch["tokens"], batch["positions"], mask, labels=batch["labels"])
    return losses, partial(loss_func, batch["mask"])


@dataclass(frozen=True)
class Subject:
    """Which model is trained, and on what."""

    make: Callable[..., nn.Module]
    forward_step: Callable
    sample: Callable[[int, Texts], dict[str, Tensor]]
    uncut: Collection[str] = ("documents",)  # of a sample: what each rank that has a part of it needs whole
    tokens: int = 1  # of a sample, by which auxiliary losses are weighed


GPT = Subject(lambda config, **parts: GPTModel(config, positions=SEQ, **parts), forward_step, sample)


def build_chunks(
    mesh: Mesh,
    config: ModelConfig,
    layout: Layout,
    vocab: int = VOCAB,
    subject: Subject = GPT,
    offload_store: OffloadAllocator | None = None,
    frozen: str | Callable[[str], bool] = "",
    full_matrix_params: Callable[[dict[str, Placement]], Collection[str]] = lambda placements: (),
) -> tuple[dict[int, DistributedDataParallel], SampleDropoutKeys, WeightGradStore]:
    """This rank's stages in their buffers. frozen: parameters whose names have this in them, or that it says of, are not trained."""
    keys, store, chunks = SampleDropoutKeys(SEED), WeightGradStore(), {}
    config, stages = layout.applied_to(config), layout.stages
    poisoned = replace(layout.data_parallel, poison_released_buffers=layout.poison)
    options = {"sequence_parallel": layout.sp, "weight_grads": store, "fills": False, "cp_types": layout.cp_types}
    if layout.split is None:
        split = split_layers(config.all_layers, stages.last + 1, first=layout.first)
    else:
        split = split_two_stacks(config.num_layers, config.decoder_layers, stages, layout.split)
    models = {
        stage: subject.make(
            config,
            vocab_size=vocab,
            layers=split[stage],
            context=LayerContext.from_mesh(mesh, config.params_dtype, keys, offload_store=offload_store, **options),
            pre_process=stage == 0,
            post_process=stage == stages.last,
        )
        for stage in stages.of_rank(mesh["pp"].rank)
    }
    if stages.last > 0:
        tie_embeddings(models)
    for stage, model in models.items():
        initialize_parameters(model, SEED, mesh)
        named = dict(model.named_parameters())
        for name, parameter in named.items() if frozen else ():
            parameter.requires_grad_(not frozen(name) if callable(frozen) else frozen not in name)
        params_tier = offload_store if layout.offload.offload_params else None
        whole = full_matrix_params({name: p.placement for name, p in named.items()})
        chunks[stage] = DistributedDataParallel(model, mesh, poisoned, store, offload_store=params_tier, unsplit=whole)
    return chunks, keys, store


def build(
    mesh: Mesh, config: ModelConfig, sp: bool, vocab: int = VOCAB
) -> tuple[DistributedDataParallel, SampleDropoutKeys]:
    """This rank's only stage in its buffers."""
    chunks, keys, _ = build_chunks(mesh, config, Layout(sp=sp, pp=mesh["pp"].size), vocab)
    return chunks[mesh["pp"].rank], keys


def build_pipeline(
    mesh: Mesh,
    config: ModelConfig,
    layout: Layout,
    batch: BatchShape,
    parts: tuple[dict[int, DistributedDataParallel], SampleDropoutKeys, WeightGradStore],
    forward_step: Callable = forward_step,
    tokens: int = SEQ,
) -> Pipeline:
    """What runs this rank's stages, from the parts that `build_chunks` gives. tokens: of a sample."""
    chunks, keys, store = parts
    length = tokens // layout.cp // (layout.tp if layout.sp else 1)
    spec = TensorSpec((length, batch.micro_batch_size, config.hidden_size), config.residual_dtype)
    model = next(iter(chunks.values())).module
    between = (spec,) if config.decoder_num_layers is None else model.boundary(batch.micro_batch_size, SEQ)
    return Pipeline(
        chunks,
        mesh,
        batch,
        boundary=between,
        forward_step=forward_step,
        keys=keys,
        weight_grads=store,
        schedule_name=layout.schedule,
        copies_over=mesh["tp"] if layout.scatter and not layout.sp else None,
        poison=layout.poison,
    )


class TinyTrainer:
    """This rank's part of a small model, with its pipeline and its optimizer; a step takes the next `global_batch` samples."""

    def __init__(
        self,
        mesh: Mesh,
        config: ModelConfig,
        layout: Layout,
        *,
        global_batch: int = 24,
        optimizer: OptimizerConfig | None = None,
        texts: Texts = Texts(),
        subject: Subject = GPT,
        frozen: str | Callable[[str], bool] = "",
        scaler: DynamicGradScaler | None = None,
        kind: Callable[..., FlatOptimizer] | None = None,
        group_of: GroupRule = default_group,
    ):
        """kind: of the optimizer, in place of FlatOptimizer. frozen: as `build_chunks` is given."""
        self.mesh, self.config, self.global_batch, self.texts, self.subject = mesh, config, global_batch, texts, subject
        tokens = max(subject.tokens // layout.cp, 1)
        self.batch, self.state = BatchShape(global_batch // layout.dp // layout.m, layout.m, tokens), TrainState()
        self.offload_store = make_offload_store(layout.offload, mesh["world"].rank, torch.device("cpu"), block=4096)
        optimizer = optimizer or OptimizerConfig()
        full_matrix_params = partial(optimizer.full_matrix_params, group_of=group_of)
        parts = build_chunks(mesh, config, layout, texts.vocab, subject, self.offload_store, frozen, full_matrix_params)
        self.chunks = parts[0]
        self.model = list(self.chunks.values())
        self.buffers = [buffer for chunk in self.model for buffer in chunk.buffers]
        self.adam = (kind or FlatOptimizer)(
            self.buffers,
            optimizer,
            mesh,
            group_of=group_of,
            fixed_order=layout.data_parallel.fixed_order_grad_reduce,
            offload_store=self.offload_store,
            offload_fraction=layout.offload.optimizer_offload_fraction,
            scaler=scaler,
        )
        self.pipeline = build_pipeline(mesh, config, layout, self.batch, parts, subject.forward_step)

    def step(self, number: int, *, lr: float = 1e-2, **options) -> StepResult:
        """Step `number` of a run. options: of `train_step`."""
        first = number * self.global_batch
        data = {
            stage: microbatches(self.batch, first, self.mesh, self.texts, self.subject.sample, self.subject.uncut)
            for stage in self.chunks
        }
        return train_step(self.pipeline, self.adam, data, first_sample=first, lr=lr, **options)

    def finish_param_gather(self) -> None:
        for chunk in self.model:
            chunk.finish_param_gather()

    def save(self, folder: Path, iteration: int) -> None:
        runtime = self.runtime(folder)
        self.state.iteration = iteration
        save_and_load_run_state.save(runtime, self.model, self.adam, self.state, {})
        save_and_load_run_state.record_save(runtime, self.state, iteration)

    def load(self, folder: Path, **more: Any) -> None:
        """more: of `runtime_for`."""
        save_and_load_run_state.load(self.runtime(folder, **more), self.model, self.adam)

    def runtime(self, folder: Path, **more: Any) -> SimpleNamespace:
        return runtime_for(self.mesh, self.config, folder, self.global_batch, self.adam.config, **more)

    def close(self) -> None:
        if self.offload_store is not None:
            self.offload_store.close()


def runtime_for(
    mesh: Mesh,
    config: ModelConfig,
    folder: Path,
    global_batch: int,
    optimizer: OptimizerConfig | None = None,
    **more: Any,
) -> SimpleNamespace:
    """What `checkpointing` asks of a run that saves to, and loads from, `folder`. more: other settings of its CheckpointConfig."""
    settings = _settings()
    folders = {"save": str(folder), "load": str(folder), "allow_precision_change": True}
    checkpoint = replace(settings.checkpoint, **folders | more)
    return SimpleNamespace(
        mesh=mesh,
        config=replace(settings, transformer=config, checkpoint=checkpoint, optimizer=optimizer or settings.optimizer),
        device=Device("cpu"),
        vocab_size_if_any=VOCAB,
        tokenizer=None,
        tokenizer_sha256=None,
        data_sha256=None,
        global_batch_size=global_batch,
        matmul_modes=NATIVE,
    )


@cache
def _settings() -> Config:
    """Those of an empty command line, read once: that takes longer than a step of the model."""
    config, _, _ = parse_args([])
    return config


def train_rank(
    mesh: Mesh,
    config: ModelConfig,
    layout: Layout,
    *,
    steps: int,
    global_batch: int,
    optimizer: OptimizerConfig,
    texts: Texts = Texts(),
    subject: Subject = GPT,
    group_of: GroupRule = default_group,
    make_scaler: Callable[[], DynamicGradScaler | None] = lambda: None,
) -> dict:
    """Train this rank's part; returns what it knows of the outcome."""
    tiny = TinyTrainer(
        mesh,
        config,
        layout,
        global_batch=global_batch,
        optimizer=optimizer,
        texts=texts,
        subject=subject,
        group_of=group_of,
        scaler=make_scaler(),
    )
    known: dict = {"losses": [], "norms": [], "grads": []}
    for step in range(steps):
        with mesh.ledger.record() as calls:
            result = tiny.step(step)
        known["losses"].append(result.losses.get("lm loss"))
        known["norms"].append(result.grad_norm)
        known["grads"].append(pieces_of_chunks(tiny.chunks, mesh, gradient_of, {"sums": tiny.buffers}))
    known["weights"] = weights_at_the_end(tiny, mesh)
    known["calls"] = mesh["pp"].rank, Counter((call.op, call.axis, call.bytes) for call in calls)
    tiny.close()
    return known


def gradient_of(parameter: nn.Parameter) -> Tensor:
    # not zeros_like: with ZeRO 3 a frozen parameter is away
    return parameter.main_grad if parameter.requires_grad else torch.zeros(parameter.shape, dtype=parameter.dtype)


def weights_at_the_end(tiny: TinyTrainer, mesh: Mesh) -> list[tuple]:
    """`my_pieces` of the weights once the last step is over, frozen ones among them."""
    tiny.finish_param_gather()
    passing = [buffer for buffer in tiny.buffers if buffer.stage == 3]
    passing += [buffer for chunk in tiny.model for buffer in chunk.frozen_buffers]
    return pieces_of_chunks(tiny.chunks, mesh, lambda p: p.data, {"owned_params": passing})


def pieces_of_chunks(
    chunks: dict[int, DistributedDataParallel], mesh: Mesh, tensor_of, shards: dict[str, list[ParamBuffer]]
) -> list[tuple]:
    return [piece for chunk in chunks.values() for piece in my_pieces(chunk.module, mesh, tensor_of, shards)]


def my_pieces(
    module: nn.Module, mesh: Mesh, tensor_of, shards: dict[str, list[ParamBuffer]] | None = None
) -> list[tuple]:
    """(name, whole shape, box, values) of everything that this rank speaks for.

    shards: in which attribute of a buffer a rank has its part of the values, for buffers where it has no more.
    """
    held = {
        slot.name: (slot, getattr(buffer, attribute), buffer)
        for attribute, buffers in (shards or {}).items()
        for buffer in buffers
        if buffer.stage
        for slot in buffer.plan.param_ranges
    }
    if not hasattr(module, "owned_by_rank"):  # asked for after every step
        module.owned_by_rank = [
            (name, p, owned_pieces(p.placement, tuple(p.shape), mesh)) for name, p in module.named_parameters()
        ]
    result = []
    for name, p, owned in module.owned_by_rank:
        shape, placement = tuple(p.shape), p.placement
        if name not in held:
            if mesh.grad_axes(placement.reduce_over).reduce.is_first:
                result += [(name, placement.shape, box, tensor_of(p)[slices(local)].clone()) for box, local in owned]
            continue
        slot, shard, buffer = held[name]
        for start, stop in overlaps(buffer.owned_runs, slot.start, slot.stop) if buffer.axes.replica.is_first else ():
            values, run = start_reading(shard.at(start, stop)).wait(), (start - slot.start, stop - slot.start)
            for box, ((first, last),) in pieces_in_flat_range(owned, run, shape):
                result.append((name, placement.shape, box, values[first:last].reshape(size_of(box)).clone()))
    return result


def put_together(parts: list[list[tuple]]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks; every element must be there exactly once."""
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, shape, box, values in (piece for rank in parts for piece in rank):
        whole.setdefault(name, torch.zeros(shape, dtype=values.dtype))[slices(box)] = values
        seen.setdefault(name, torch.zeros(shape))[slices(box)] += 1
    for name, count in seen.items():
        assert bool((count == 1).all()), f"{name}: some elements are held by no rank, or spoken for by two"
    return whole


def run(
    config: ModelConfig,
    layout: Layout,
    *,
    steps: int = 3,
    global_batch: int = 24,
    optimizer: OptimizerConfig | None = None,
    texts: Texts = Texts(),
    subject: Subject = GPT,
    group_of: GroupRule = default_group,
    make_scaler: Callable[[], DynamicGradScaler | None] = lambda: None,
) -> Outcome:
    """Train `steps` steps under a layout and collect the outcome from all ranks. make_scaler: of each rank's loss."""
    optimizer = optimizer or OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
    work = partial(
        train_rank,
        config=config,
        layout=layout,
        steps=steps,
        global_batch=global_batch,
        optimizer=optimizer,
        texts=texts,
        subject=subject,
        group_of=group_of,
        make_scaler=make_scaler,
    )
    sharing = config.ranks_per_kv_head(layout.tp)
    ranks = run_ranks(
        layout.sizes,
        work,
        delayed=layout.delayed,
        ranks_per_kv_head=sharing,
        stages=layout.stages if layout.pp > 1 else None,
    )
    said = {repr(rank["norms"]) for rank in ranks}  # texts, by which NaN is NaN
    assert len(said) == 1, f"ranks disagree on the gradient norm: {said}"
    return Outcome(
        losses=[rank for rank in ranks if rank["calls"][0] == layout.stages.rank_of_last][-1]["losses"],
        norms=ranks[0]["norms"],
        grads=[put_together([rank["grads"][step] for rank in ranks]) for step in range(steps)],
        weights=put_together([rank["weights"] for rank in ranks]),
        calls=[rank["calls"] for rank in ranks],
    )


def differences(got: Outcome, expected: Outcome) -> Iterator[tuple[str, float, float]]:
    """(what, largest difference, largest value expected) of each loss, norm, gradient and weight."""
    for name in ("losses", "norms"):
        for step, (a, b) in enumerate(zip(getattr(got, name), getattr(expected, name), strict=True)):
            yield f"{name} of step {step}", abs(a - b), abs(b)
    pairs = {f"gradient of step {i}": pair for i, pair in enumerate(zip(got.grads, expected.grads, strict=True))}
    for what, (a, b) in (pairs | {"weight": (got.weights, expected.weights)}).items():
        assert a.keys() == b.keys(), f"{what}: {a.keys() ^ b.keys()} are in one model only"
        for name in b:
            yield f"{what} {name}", (a[name] - b[name]).abs().max().item(), b[name].abs().max().item()


def assert_equal(got: Outcome, expected: Outcome, tolerance: float) -> None:
    """Per tensor max|a - b| <= tolerance * max|b|, and the same relative bound for losses and norms."""
    for what, worst, scale in differences(got, expected):
        assert worst <= tolerance * scale, f"{what} differs by {worst}, its largest value is {scale}"


def assert_same_bits(got: Outcome, expected: Outcome) -> None:
    """Every loss, norm, gradient and weight, to the last bit."""
    assert_equal(got, expected, 0.0)
