"""ZeRO: what is kept in shards over the data-parallel ranks changes no number, is sent as the formulas say, and survives a save."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import product
from random import Random

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from tiny_run import (
    TINY_GPT2,
    TINY_LLAMA,
    Layout,
    Outcome,
    TinyTrainer,
    assert_equal,
    assert_same_bits,
    forward_step,
    microbatches,
    run,
)

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.distributed.zero_stage_comm_volume import step_comm_volume
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.collectives import bytes_sent
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.schedules import BatchShape
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.step import train_step

MODELS = {"gpt2-tied": TINY_GPT2, "llama-untied": TINY_LLAMA}
BUCKET = 1500  # elements: several buckets on every rank
SHARDED = {
    "zero3": {"zero_stage": 3},
    "zero2": {"zero_stage": 2},
    "hybrid3": {"zero_stage": 3, "num_distributed_optimizer_instances": 2},
    "hybrid3-optim": {"zero_stage": 3, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
    "hybrid2": {"zero_stage": 2, "num_distributed_optimizer_instances": 2},
    "zero1": {"use_distributed_optimizer": True},
    "hybrid": {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
}
OVERLAP = {
    "": {},
    "grads": {"overlap_grad_reduce": True, "ddp_bucket_size": BUCKET},
    "both": {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": BUCKET},
}
LAYOUTS = [
    {},
    {"tp": 2, "sp": True},
    {"pp": 2},
    {"pp": 2, "v": 2, "schedule": "interleaved"},
    {"tp": 2, "pp": 2, "schedule": "zb-h1"},
    {"tp": 4},  # key/value heads shared by ranks
]


def cases() -> list:
    """What `zero_matrix.py` has not: some axes, and two ways to shard, each with a way to overlap; accumulation, recompute, delayed
    calls and models take turns."""
    found = []
    for number, (layout, sharded, overlap) in enumerate(product(LAYOUTS, SHARDED, OVERLAP)):
        in_matrix = "tp" not in layout and sharded not in ("hybrid", "hybrid2")
        if number % 15 and (in_matrix or (number + number // 3) % 3):
            continue
        draw = Random(number)
        config = DataParallelConfig(**SHARDED[sharded], **OVERLAP[overlap])
        dp = 4 if "hybrid" in sharded else draw.choice((2, 3, 4))
        whole = Layout(
            **layout,
            dp=dp,
            m=2 if dp == 4 else draw.choice((2, 4)),
            recompute=draw.choice(("none", "selective", "uniform 2")),
            delayed=draw.random() < 0.7,
            data_parallel=config,
        )
        model = list(MODELS)[number % 2]
        marks = [pytest.mark.full] * (number % 15 > 0 or whole.tp * whole.pp * whole.dp > 8)
        found.append(pytest.param(model, whole, id=f"{whole}-{sharded}-{overlap}-{model}", marks=marks))
    return found


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout(), steps=2)


FAST_BITS = (("", "float32"), ("both", "bfloat16"))


@pytest.mark.parametrize(("model", "layout"), cases())
def test_shards_equal_one_process(model: str, layout: Layout):
    assert_equal(run(MODELS[model], layout, steps=2), one_process(model), 1e-10)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overlap", "precision"),
    [
        pytest.param(overlap, precision, marks=[pytest.mark.full] * ((overlap, precision) not in FAST_BITS))
        for overlap in OVERLAP
        for precision in ("float32", "bfloat16")
    ],
)
def test_shards_have_the_bits_of_whole_tensors(precision: str, overlap: str):
    """The ranks' gradients are added in one order either way, and the update of an element asks for no other."""
    model = replace(MODELS["gpt2-tied"], fp64=False, bf16=precision == "bfloat16")
    optimizer = OptimizerConfig(clip_grad=0.0, weight_decay=0.1)  # the norm is summed in other parts
    layout = Layout(
        dp=2, pp=2, m=2, data_parallel=DataParallelConfig(**OVERLAP[overlap] | {"overlap_param_gather": False})
    )
    sharded = replace(layout, data_parallel=DataParallelConfig(**SHARDED["zero1"], **OVERLAP[overlap]))
    got, expected = (run(model, x, optimizer=optimizer) for x in (sharded, layout))
    got.norms = expected.norms = []
    assert_same_bits(got, expected)


@pytest.mark.full
def test_shards_in_fixed_order_have_the_bits_of_one_process():
    fixed = DataParallelConfig(fixed_order_grad_reduce=True, use_distributed_optimizer=True)
    model = replace(MODELS["gpt2-tied"], fp64=False, bf16=True)
    alone = Layout(m=8, data_parallel=DataParallelConfig(fixed_order_grad_reduce=True))
    assert_same_bits(
        run(model, Layout(dp=4, pp=2, m=2, data_parallel=fixed), global_batch=8), run(model, alone, global_batch=8)
    )


STAGES = {
    f"stage {stage} {name}".strip(): {"zero_stage": stage, **flags}
    for stage in range(4)
    for name, flags in OVERLAP.items()
    if stage or name != "both"
}


SOME_STAGES = [pytest.param(name, marks=[pytest.mark.full] * (name != "stage 3 both")) for name in STAGES]


@pytest.mark.full
@pytest.mark.parametrize("name", SOME_STAGES)
def test_an_error_in_a_step_leaves_nothing_to_the_next(name: str):
    """Raised in the second of three microbatches, in turn in the forward and in the backward; the step after it has the norm it has without."""
    layout = Layout(dp=2, m=3, data_parallel=DataParallelConfig(**STAGES[name]))

    class Stop(Exception):
        pass

    def norms(mesh: Mesh, fails: str | None) -> list[float]:
        trainer, calls = TinyTrainer(mesh, MODELS["gpt2-tied"], layout), iter(range(1000))

        def stop(*_) -> None:
            raise Stop

        def step_that_fails(data, model):
            output, loss = forward_step(data, model)
            if next(calls) == 1:
                if fails == "forward":
                    stop()
                output.register_hook(stop)
            return output, loss

        found = [trainer.step(0).grad_norm]
        if fails:
            trainer.pipeline.forward_step = step_that_fails
            with pytest.raises((Stop, RuntimeError)):
                trainer.step(1)
            trainer.pipeline.forward_step = forward_step
        found += [trainer.step(1).grad_norm, trainer.step(2).grad_norm]
        trainer.finish_param_gather()
        return found

    (expected, *_) = run_ranks({"dp": 2}, partial(norms, fails=None))
    fails = ("forward", "backward")[list(STAGES).index(name) % 2]
    for got in run_ranks({"dp": 2}, partial(norms, fails=fails)):
        assert got == pytest.approx(expected, rel=1e-12), fails


@pytest.mark.full
@pytest.mark.parametrize("name", SOME_STAGES)
def test_steps_may_have_other_numbers_of_microbatches(name: str):
    """As a growing batch has."""

    def norms(mesh: Mesh, config: DataParallelConfig) -> list[float]:
        layout, found = Layout(dp=2, data_parallel=config), []
        trainer = TinyTrainer(mesh, MODELS["gpt2-tied"], layout, global_batch=4)
        for number, m in enumerate((2, 4, 4, 1, 3)):
            data = {0: microbatches(BatchShape(2, m), 40 * number, mesh)}
            step = train_step(
                trainer.pipeline, trainer.adam, data, first_sample=40 * number, lr=1e-2, num_microbatches=m
            )
            found.append(step.grad_norm)
        trainer.finish_param_gather()
        return found

    (expected, *_) = run_ranks({"dp": 2}, partial(norms, config=DataParallelConfig()))
    for got in run_ranks({"dp": 2}, partial(norms, config=DataParallelConfig(**STAGES[name]))):
        assert got == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------- what is sent and what is kept


@pytest.mark.parametrize(("stage", "replicas", "outer"), [*product((1, 2, 3), (1, 2), ("no_shard",)), (3, 2, "optim")])
def test_a_step_sends_what_the_formula_says(stage: int, replicas: int, outer: str):
    """Per step of P elements in m microbatches over d ranks in shards, by stage:

         1   a reduce-scatter of P gradients, then an all-gather of P / d parameters each
         2   m reduce-scatters of P, then the all-gather
         3   m reduce-scatters of P, and 2 m all-gathers, for each forward and backward

    With replicas an all-reduce of P / d gradients between them, once; where state is divided over them, a reduce-scatter of P / d
    and an all-gather of what each has updated. `by_unit`: a tied table is fetched by the embedding and the output layer in the
    forward, and once for both in the backward. The bytes that travel are those that `step_comm_volume` announces."""
    model, d = replace(MODELS["gpt2-tied"], fp64=False, bf16=True), 4 // replicas
    config = DataParallelConfig(
        zero_stage=stage, num_distributed_optimizer_instances=replicas, outer_dp_sharding_strategy=outer
    )

    def work(mesh: Mesh):
        trainer = TinyTrainer(mesh, model, Layout(dp=4, m=2, data_parallel=config))
        (buffer,) = trainer.adam.buffers
        with mesh.ledger.record() as calls:
            trainer.step(0)
        table = next(b for b in buffer.plan.buckets if any("word_embeddings" in name for name in b.names))
        large = [c for c in calls if c.bytes > 8 and c.axis in ("dp_inner", "dp_outer")]
        (flat,) = trainer.chunks[0].buffer_sizes()
        announced = step_comm_volume(
            flat, stage, inner=d, outer=replicas, microbatches=2, divides_outer=config.divides_over_outer
        )
        return buffer.plan.numel, table.stop - table.start, large, announced

    m = 2
    for padded, table, calls, announced in run_ranks({"dp": 4, "replicas": replicas}, work):
        sent = {
            1: {("reduce_scatter", "dp_inner"): padded * 4, ("all_gather", "dp_inner"): padded // d * 2},
            2: {("reduce_scatter", "dp_inner"): padded * 4 * m, ("all_gather", "dp_inner"): padded // d * 2},
            3: {
                ("reduce_scatter", "dp_inner"): padded * 4 * m,
                ("all_gather", "dp_inner"): (2 * padded + table) // d * 2 * m,
            },
        }[stage]
        between = {("all_reduce", "dp_outer"): padded // d * 4} if replicas > 1 else {}
        if outer == "optim":
            between = {("reduce_scatter", "dp_outer"): padded // d * 4, ("all_gather", "dp_outer"): padded // 4 * 2}
        total, on_the_wire = Counter(), Counter()
        for call in calls:
            total[call.op, call.axis] += call.bytes
            on_the_wire[call.op, call.axis] += bytes_sent(call)
        assert total == sent | between
        names = {"shard": "dp_inner", "replica": "dp_outer", "outer": "dp_outer"}
        assert on_the_wire == pytest.approx({(op, names[axis]): n for (op, axis), n in announced.items()}, rel=1e-12)


@pytest.mark.parametrize(
    ("wide", "stage"),
    [
        pytest.param(wide, stage, marks=[pytest.mark.full] * ((wide, stage) != (True, 3)))
        for wide, stage in product((False, True), (1, 2, 3))
    ],
)
@pytest.mark.full
def test_gradients_may_be_kept_in_bfloat16(stage: int, wide: bool):
    """What is summed over ranks is float32 all the same, as are masters; the norm is that of float32 gradients to rounding."""
    model = replace(MODELS["gpt2-tied"], fp64=False, bf16=True)

    def norms(mesh: Mesh, **settings) -> list[float]:
        trainer = TinyTrainer(
            mesh, model, Layout(dp=2, m=2, data_parallel=DataParallelConfig(zero_stage=stage, **settings))
        )
        found = [trainer.step(number).grad_norm for number in range(3)]
        trainer.finish_param_gather()
        (buffer,) = trainer.adam.buffers
        kept = torch.bfloat16 if settings else torch.float32
        assert (buffer.grads or buffer.grads_of[0].data).dtype == kept
        assert {t.dtype for t in (*buffer.sums.tensors, *trainer.adam.masters[0].tensors)} == {torch.float32}
        return found

    narrow = partial(norms, main_grads_dtype="bf16", reduce_scatter_with_fp32_accumulation=wide)
    assert run_ranks({"dp": 2}, narrow)[0] == pytest.approx(run_ranks({"dp": 2}, norms)[0], rel=2e-2)


@pytest.mark.parametrize("config", [{"use_distributed_optimizer": True}, SHARDED["hybrid3-optim"]], ids=["1", "3"])
def test_a_rank_keeps_its_share_of_masters_and_moments(config: dict):
    model = replace(MODELS["gpt2-tied"], fp64=False, bf16=True)

    def work(mesh: Mesh):
        trainer = TinyTrainer(mesh, model, Layout(dp=4, data_parallel=DataParallelConfig(**config)))
        kept = [trainer.adam.masters, *trainer.adam.moments.values()]
        return trainer.adam.buffers[0].plan.numel, [
            sum(tensor.numel() for shard in kind for tensor in shard.tensors) for kind in kept
        ]

    outer = config.get("num_distributed_optimizer_instances", 1)
    for padded, kept in run_ranks({"dp": 4, "replicas": outer}, work):
        assert kept == [padded // 4] * 3


# ---------------------------------------------------------------- save and load


ZERO = DataParallelConfig(use_distributed_optimizer=True)
HYBRID = DataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
LATE = DataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=BUCKET
)
ALL = replace(LATE, use_distributed_optimizer=False, zero_stage=3)
DIVIDED = replace(ALL, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy="optim")
SAVED, LOADED = (
    [
        Layout(dp=4, data_parallel=ZERO),
        Layout(tp=2, dp=3, data_parallel=LATE),
        Layout(pp=2, dp=4, data_parallel=HYBRID),
    ],
    [Layout(), Layout(tp=4, dp=2, data_parallel=ZERO), Layout(dp=3, data_parallel=LATE)],
)


@cache
def norms_of_four_steps(model: ModelConfig) -> list[float]:
    """Of one process."""

    def through(mesh: Mesh) -> list[float]:
        trainer = TinyTrainer(mesh, model, Layout())
        return [trainer.step(number).grad_norm for number in range(4)]

    return run_ranks({}, through)[0]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(source, target, id=f"{source} to {target}", marks=[pytest.mark.full] * ((i + j) % 4 > 0))
        for i, source in enumerate(SAVED)
        for j, target in enumerate(LOADED)
    ]
    + [
        pytest.param(*pair, id=f"{name} shards divided between groups", marks=[pytest.mark.full] * (name == "from"))
        for name, pair in {
            "from": (Layout(dp=4, tp=2, data_parallel=DIVIDED), LOADED[2]),
            "to": (SAVED[0], Layout(dp=4, data_parallel=DIVIDED)),
        }.items()
    ],
)
def test_shards_load_into_any_layout(source: Layout, target: Layout, tmp_path):
    """Two steps in one layout, saved; the third in another has the norm of the third step of one process."""
    model = MODELS["llama-untied" if source.pp > 1 else "gpt2-tied"]
    sharing = model.ranks_per_kv_head

    def first(mesh: Mesh) -> list[float]:
        trainer = TinyTrainer(mesh, model, source)
        norms = [trainer.step(number).grad_norm for number in range(2)]
        trainer.save(tmp_path, 2)
        return norms

    def then(mesh: Mesh) -> list[float]:
        trainer = TinyTrainer(mesh, model, target)
        trainer.load(tmp_path)
        norms = [trainer.step(number).grad_norm for number in (2, 3)]
        trainer.finish_param_gather()
        return norms

    expected = norms_of_four_steps(model)
    before = run_ranks(source.sizes, first, ranks_per_kv_head=sharing(source.tp))
    after = run_ranks(target.sizes, then, ranks_per_kv_head=sharing(target.tp))
    for norms in (one + other for one in before for other in after):
        assert norms == pytest.approx(expected, rel=1e-10)


# ---------------------------------------------------------------- settings


SETTINGS_AND_MESSAGES = [
    ({"zero_stage": 0, "use_distributed_optimizer": True}, "--use-distributed-optimizer ZeRO 1 --zero-stage 0"),
    (
        {"zero_stage": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
        "--zero-stage 2 --data-parallel-sharding-strategy optim_grads_params ZeRO 3",
    ),
    ({"zero_stage": 2, "fixed_order_grad_reduce": True}, "--fixed-order-grad-reduce ZeRO 2"),
    ({"num_distributed_optimizer_instances": 2}, "--use-distributed-optimizer"),
    ({"num_distributed_optimizer_instances": 0}, "--num-distributed-optimizer-instances 0 1"),
    (
        {"zero_stage": 2, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
        "--zero-stage 3 --num-distributed-optimizer-instances 2",
    ),
    ({"reduce_scatter_with_fp32_accumulation": True, "zero_stage": 2}, "bfloat16 --grad-reduce-in-bf16"),
    ({"main_grads_dtype": "bf16"}, "--main-grads-dtype bf16 float32"),
    ({"zero_stage": 3, "outer_dp_sharding_strategy": "optim"}, "--outer-dp-sharding-strategy optim 2"),
    ({"overlap_param_gather": True}, "--overlap-param-gather"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS_AND_MESSAGES)
def test_settings_that_cannot_be_followed_are_refused(settings: dict, message: str):
    with pytest.raises(ConfigError) as refused:
        DataParallelConfig(**settings)
    assert tells(refused.value, message)


def test_the_ways_to_ask_for_a_stage():
    assert DataParallelConfig().stage == DataParallelConfig(zero_stage=0).stage == 0
    for settings in (
        {"use_distributed_optimizer": True},
        {"zero_stage": 1},
        {"data_parallel_sharding_strategy": "optim"},
    ):
        assert DataParallelConfig(**settings).stage == 1
