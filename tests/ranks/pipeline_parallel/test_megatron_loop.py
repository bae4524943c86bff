"""A loop in Megatron's names (schedule, finalize_model_grads, optimizer, scheduler) gives the weights of one process of our own."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from local_ranks import run_ranks
from said import raises_telling
from tiny_run import (
    GPT,
    SEED,
    SEQ,
    TINY_GPT2,
    TINY_LLAMA,
    VOCAB,
    Layout,
    TinyTrainer,
    forward_step,
    microbatches,
    pieces_of_chunks,
    put_together,
)

from megatron.core import dist_checkpointing
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, optimizer_flags_and_registry
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel.global_state import get_global_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.layer_split import split_layers
from megatron.core.pipeline_parallel.schedules import BatchShape
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.training.make_chunks_optimizer_and_pipeline import tie_embeddings

STEPS, BATCH, RATES = 3, 8, (1e-2, 7.5e-3, 5e-3)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def sharded(stage: int, **options) -> DataParallelConfig:
    return DataParallelConfig(data_parallel_sharding_strategy=STRATEGIES[stage], **options)


OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 1500}
LAYOUTS = [
    Layout(tp=2, sp=True, pp=2, m=2, dp=2, data_parallel=sharded(1, overlap_param_gather=True, **OVERLAP)),
    Layout(dp=2, m=2, data_parallel=sharded(3)),
    Layout(),
    Layout(m=4),
    Layout(tp=2),
    Layout(tp=4, sp=True),
    Layout(pp=2, m=4),
    Layout(pp=2, v=2, m=4, schedule="interleaved"),
    Layout(dp=4, data_parallel=DataParallelConfig(**OVERLAP)),
    Layout(dp=2, tp=2, m=2, data_parallel=sharded(2)),
    Layout(dp=2, pp=2, m=2, data_parallel=sharded(2, **OVERLAP)),
    Layout(dp=2, tp=2, sp=True, pp=2, v=2, m=2, schedule="interleaved", data_parallel=sharded(3, **OVERLAP)),
]


@cache
def of_one_process(model):
    """Our own train step; the oracle knows none of Megatron's names."""

    def work(mesh):
        optimizer = optimizer_flags_and_registry.OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
        tiny = TinyTrainer(mesh, model, Layout(), global_batch=BATCH, optimizer=optimizer)
        norms = [tiny.step(number, lr=rate).grad_norm for number, rate in enumerate(RATES)]
        return norms, pieces_of_chunks(tiny.chunks, mesh, lambda p: p.data, {})

    ((norms, weights),) = run_ranks({}, work)
    return norms, put_together([weights])


def megatrons_chunks(mesh, config, layout):
    """This rank's chunks in Megatron's wrapper."""
    get_global_state().sequence_parallel, stages = layout.sp, layout.stages
    context = LayerContext.from_mesh(
        mesh, config.params_dtype, SampleDropoutKeys(SEED), sequence_parallel=layout.sp, fills=False
    )
    split = split_layers(config.num_layers, stages.last + 1)
    make = partial(GPT.make, config, vocab_size=VOCAB, context=context)
    models = {
        stage: make(layers=split[stage], pre_process=stage == 0, post_process=stage == stages.last)
        for stage in stages.of_rank(mesh["pp"].rank)
    }
    if stages.last > 0:
        tie_embeddings(models)
    ours, stage = layout.data_parallel, layout.data_parallel.stage
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=ours.overlap_grad_reduce,
        bucket_size=ours.ddp_bucket_size,
        use_distributed_optimizer=stage == 1,
        use_megatron_fsdp=stage > 1,
        data_parallel_sharding_strategy=STRATEGIES[stage],
        overlap_param_gather=ours.overlap_param_gather,
    )
    for model in models.values():
        initialize_parameters(model, SEED, mesh)
        model.config = SimpleNamespace(**vars(config), params_dtype=config.params_dtype)
    return {stage: DistributedDataParallel(one.config, ddp_config, one) for stage, one in models.items()}


def trained(mesh, config, layout, *, steps=range(STEPS), load=None, save=None):
    """The norm of each step's gradient, and the weights after the loop. load, save: folders of its checkpoints."""
    chunks = megatrons_chunks(mesh, config, layout)
    model, batch = list(chunks.values()), BatchShape(BATCH // layout.dp // layout.m, layout.m)
    sharding = layout.data_parallel.zero.shards_state
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, use_distributed_optimizer=sharding), model
    )
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 0.0, 0, 4 * BATCH, "linear", 0.1, 0.1, 4 * BATCH, "constant"
    )
    norms = []

    def state():
        weights = {name: p for chunk in model for name, p in chunk.module.named_parameters()}
        return {
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(weights),
            "scheduler": scheduler.state_dict(),
        }

    if load is not None:
        loaded = dist_checkpointing.load(state(), load)
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["scheduler"])
        get_global_state().samples = scheduler.num_steps  # dropout's masks are by sample
    for step in steps:
        assert {group["lr"] for group in optimizer.param_groups} == {RATES[step]}
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[microbatches(batch, step * BATCH, mesh) for _ in chunks],
            model=model,
            num_microbatches=layout.m,
            seq_length=SEQ,
            micro_batch_size=batch.micro_batch_size,
        )
        finalize_model_grads(model)
        updated, norm, _ = optimizer.step()
        assert updated
        norms.append(norm)
        scheduler.step(increment=BATCH)
    for chunk in model:
        chunk.finish_param_gather()
    if save is not None:
        dist_checkpointing.save(state(), save)
    passing = [buffer for chunk in model for buffer in chunk.buffers if buffer.stage == 3]
    return norms, pieces_of_chunks(chunks, mesh, lambda p: p.data, {"owned_params": passing})


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(one, id=f"{one}-{one.data_parallel.stage}", marks=[pytest.mark.full] * (i != 1))
        for i, one in enumerate(LAYOUTS)
    ],
)
def test_megatrons_loop_gives_one_processs_weights(layout):
    config = TINY_LLAMA if layout.tp > 2 else TINY_GPT2
    config = replace(config, num_query_groups=4) if layout.tp > 2 else config
    expected_norms, expected = of_one_process(config)
    ranks = run_ranks(
        layout.sizes, lambda mesh: trained(mesh, config, layout), stages=layout.stages if layout.pp > 1 else None
    )
    assert all(norms == pytest.approx(expected_norms, rel=1e-10) for norms, _ in ranks)
    got = put_together([pieces for _, pieces in ranks])
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        worst, scale = (got[name] - weight).abs().max(), weight.abs().max()
        assert worst <= 1e-10 * scale, f"{name} differs by {worst} of {scale}"


@pytest.mark.full
@pytest.mark.parametrize(
    "saved, loaded",
    [
        (Layout(tp=2, dp=2, data_parallel=sharded(1)), Layout(pp=2, m=2)),
        pytest.param(Layout(dp=2, data_parallel=sharded(2)), Layout(tp=2, sp=True, dp=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_loop_goes_on_in_another_layout(saved, loaded, tmp_path):
    def run(layout, **options):
        work = partial(trained, config=TINY_GPT2, layout=layout, **options)
        return run_ranks(layout.sizes, work, stages=layout.stages if layout.pp > 1 else None)

    run(saved, steps=range(2), save=str(tmp_path))
    got = put_together([pieces for _, pieces in run(loaded, steps=range(2, 3), load=str(tmp_path))])
    for name, weight in of_one_process(TINY_GPT2)[1].items():
        assert (got[name] - weight).abs().max() <= 1e-10 * weight.abs().max(), name


def plain_chunk(dtype=torch.float64, **options):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).to(dtype)
    return DistributedDataParallel(None, DistributedDataParallelConfig(**options), module)


def stepped(chunk, optimizer, factor=1.0):
    optimizer.zero_grad()
    inputs = torch.tensor([[0.0, 2.0]], dtype=next(chunk.parameters()).dtype)
    optimizer.scale_loss(chunk(inputs).sum() * factor).backward()
    finalize_model_grads([chunk])
    return optimizer.step()


@pytest.mark.parametrize("shards", [False, True])
def test_zeros_in_the_gradient_are_counted_if_asked(shards):
    """The first of two features is zero, so that it moves none of its three weights."""

    def work(mesh):
        chunk, config = plain_chunk(use_distributed_optimizer=shards), OptimizerConfig(lr=0.1)
        config.log_num_zeros_in_grad = True
        return stepped(chunk, get_megatron_optimizer(config, [chunk]))

    assert [zeros for _, _, zeros in run_ranks({"dp": 2}, work)] == [3, 3]


def test_a_loop_goes_on_where_its_states_were_saved():
    def work(mesh):
        made = []
        for _ in range(2):
            chunk = plain_chunk(use_distributed_optimizer=True)
            optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [chunk])
            scheduler = OptimizerParamScheduler(optimizer, 0.0, 0.1, 0.01, 2, 9, "cosine", 0.0, 0.1, 9, "linear")
            made.append((chunk, optimizer, scheduler))
        (chunk, optimizer, scheduler), (other, *states) = made
        stepped(chunk, optimizer)
        scheduler.step(4)
        other.load_state_dict(chunk.state_dict())
        for state, saved in zip(states, (optimizer, scheduler)):
            state.load_state_dict(saved.state_dict())
        assert states[1].num_steps == 4 and 0 < states[0].param_groups[0]["lr"] < 0.1
        assert stepped(chunk, optimizer) == stepped(other, states[0])
        return all(map(torch.equal, chunk.parameters(), other.parameters()))

    assert all(run_ranks({"dp": 2}, work))


def test_a_scaled_gradient_that_overflows_updates_nothing():
    def work(mesh):
        chunk = plain_chunk(torch.float16)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=0.1, fp16=True, initial_loss_scale=4.0, hysteresis=1), [chunk]
        )
        before = [parameter.clone() for parameter in chunk.parameters()]
        assert stepped(chunk, optimizer, factor=1e5) == (False, None, None) and optimizer.get_loss_scale() == 2.0
        assert all(map(torch.equal, before, chunk.parameters()))
        updated, norm, _ = stepped(chunk, optimizer)
        assert updated and not any(map(torch.equal, before, chunk.parameters())) and norm > 0

    run_ranks({}, work)


def test_groups_are_megatrons():
    """Vectors do not decay; a condition of the script's has the last word, and multiplies rates."""

    def work(mesh):
        chunk, config = plain_chunk(), OptimizerConfig(lr=0.1, min_lr=0.01, weight_decay=0.5)
        usual = get_megatron_optimizer(config, [chunk]).param_groups
        assert [(len(one["params"]), one["wd_mult"], one["weight_decay"]) for one in usual] == [
            (2, 1.0, 0.5),
            (2, 0.0, 0.0),
        ]
        chosen = get_megatron_optimizer(config, [chunk], lambda name, p: True, lambda name, p: p.dim() == 1, 3.0)
        scheduler = OptimizerParamScheduler(chosen, 0.0, 9.0, 0.0, 10, 20, "linear", 0.5, 0.5, 20, "constant")
        scheduler.step(5)
        assert [(one["lr"], one["weight_decay"]) for one in chosen.param_groups] == [(0.05, 0.0), (3 * 0.05, 0.0)]
        with raises_telling(ConfigError, "use_precision_aware_optimizer"):
            get_megatron_optimizer(OptimizerConfig(use_precision_aware_optimizer=True), [chunk])
        with raises_telling(ConfigError, "use_distributed_optimizer DistributedDataParallelConfig"):
            get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=True), [chunk])

    run_ranks({}, work)
