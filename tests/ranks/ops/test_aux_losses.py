"""Auxiliary losses: a balance of routing that is not linear in a sample's tokens, complete over the ranks that share the sample.

Each layer has a gate of its own, which the balance and the output read, and a probe of its output, which only a loss reads. Losses, gradients and weights of every layout are those of one
process, whose gradients are those of one graph over the whole batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from tiny_run import (
    SEQ,
    TINY_GPT2,
    Layout,
    Subject,
    Texts,
    TinyTrainer,
    assert_equal,
    build_chunks,
    forward_step,
    microbatches,
    pieces_of_chunks,
    put_together,
    run,
    sample,
)
from tiny_t5 import PLAIN as TINY_T5, T5
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.datasets.aux_loss_weight_from_next_microbatches import CountedBatches
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.aux_loss_collector import AuxLosses, declared_aux_losses
from megatron.core.optimizer.loss_scaler import ConstantGradScaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.global_state import get_global_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import BatchShape
from megatron.core.sharding.placement import Normal
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    save_to_aux_losses_tracker,
    track_moe_metrics,
)
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.step import train_step
from megatron.training.zero_engine_for_any_module import Engine, EngineConfig

TEXTS = Texts()
NAMES = ("balance", "size")
EXPERTS = 3
BATCH = 8
COEFFICIENTS = {"balance": 0.3, "size": 0.02}
TOLERANCE = 1e-10


class GatedLayer(nn.Module):
    """forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles) -> the same shape."""

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        self.layer_number = layer + 1
        self.context = context
        self.norm = make_norm(config, context)
        self.attention = ParallelAttention(config, layer, context)
        self.mlp = ParallelMLP(config, layer, context)
        self.gate = context.tp.replicated((EXPERTS, config.hidden_size), Normal(0.5))
        self.probe = context.tp.replicated((2, config.hidden_size), Normal(0.5))

    def forward(self, x: Tensor, mask: Any = None, angles: Any = None) -> Tensor:
        x = x + self.attention(self.norm(x), mask, angles)
        chances = (x @ self.gate.t()).softmax(-1)  # [s, b, experts]
        y = x + chances[..., :1] * self.mlp(x)

        # Switch Transformer (arXiv:2101.03961), equation 4, over the tokens of each sample
        routed = nn.functional.one_hot(chances.argmax(-1), EXPERTS).to(x.dtype).sum(0)  # [b, experts]
        counts = self.context.sum_over_sample(routed) / SEQ
        means = self.context.sum_over_sample(chances.sum(0)) / SEQ
        balance = EXPERTS * (counts * means).sum(-1)  # [b]
        y = self.with_loss(y, "balance", balance)
        if self.layer_number > 1:  # not in every layer
            size = self.context.sum_over_sample((y @ self.probe.t()).square().sum((0, 2))).sqrt()  # [b]
            y = self.with_loss(y, "size", size.mean())
        return y

    def with_loss(self, y: Tensor, name: str, value: Tensor) -> Tensor:
        self.context.aux_losses.add(name, self.layer_number, value, COEFFICIENTS[name])
        return y


def make_model(config: ModelConfig, *, context: LayerContext, **parts: Any) -> GPTModel:
    context.aux_losses.declare(*NAMES)
    return GPTModel(config, positions=SEQ, context=context, make_layer=GatedLayer, **parts)


def masked_sample(number: int, texts: Texts = TEXTS) -> dict[str, Tensor]:
    row = sample(number, texts)
    return row | {"whole_mask": row["mask"]}


def unmasked_sample(number: int, texts: Texts = TEXTS) -> dict[str, Tensor]:
    return sample(number, texts) | {"mask": torch.ones(SEQ, dtype=torch.float64)}


MASKED = Subject(make_model, forward_step, masked_sample, uncut=("documents", "whole_mask"))
UNMASKED = Subject(make_model, forward_step, unmasked_sample)


def batches_of(batch: BatchShape, first: int, mesh: Any, subject: Subject) -> Iterator:
    """The batches of a step. With masks they are counted before the step."""
    batches = microbatches(batch, first, mesh, TEXTS, subject.sample, subject.uncut)
    if any(subject is masked for masked in (MASKED, OF_MEGATRON, SAYS_SO)):
        return CountedBatches(batches, lambda rows: float(rows["whole_mask"].sum()))
    return batches


class AuxTrainer(TinyTrainer):
    def __init__(self, mesh: Any, layout: Layout, subject: Subject, **options: Any):
        """options: of `TinyTrainer`."""
        optimizer = OptimizerConfig(clip_grad=0.0, weight_decay=0.1)
        super().__init__(mesh, TINY_GPT2, layout, global_batch=BATCH, optimizer=optimizer, subject=subject, **options)
        self.pipeline.batch = replace(self.batch, tokens_per_sample=SEQ // layout.cp)

    def step(self, number: int, *, lr: float = 1e-2, **options: Any) -> Any:
        first = number * self.global_batch
        data = {stage: batches_of(self.batch, first, self.mesh, self.subject) for stage in self.chunks}
        return train_step(self.pipeline, self.adam, data, first_sample=first, lr=lr, **options)


def train(mesh: Any, layout: Layout, subject: Subject, steps: int) -> dict[str, Any]:
    trainer = AuxTrainer(mesh, layout, subject)
    results = [trainer.step(number) for number in range(steps)]
    grads = pieces_of_chunks(trainer.chunks, mesh, lambda p: p.main_grad, {"sums": trainer.buffers})
    trainer.finish_param_gather()
    sharded = [buffer for buffer in trainer.buffers if buffer.stage == 3]
    return {
        "reports": [(result.losses, result.aux_by_layer) for result in results if mesh.has_last_stage],
        "norms": [result.grad_norm for result in results],
        "tokens": [(result.weighed_tokens, result.tokens) for result in results],
        "grads": grads,
        "weights": pieces_of_chunks(trainer.chunks, mesh, lambda p: p.data, {"owned_params": sharded}),
    }


def outcome(layout: Layout, subject: Subject, steps: int = 2) -> dict[str, Any]:
    ranks = run_ranks(
        layout.sizes,
        partial(train, layout=layout, subject=subject, steps=steps),
        delayed=layout.delayed,
        stages=layout.stages if layout.pp > 1 else None,
    )
    last = [rank for rank in ranks if rank["reports"]]
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        for weighed, counted in rank["tokens"]:
            assert weighed == counted, "the weight follows the tokens that the loss counts, known before the step"
    return {
        "reports": last[-1]["reports"],
        "norms": ranks[0]["norms"],
        "grads": put_together([rank["grads"] for rank in ranks]),
        "weights": put_together([rank["weights"] for rank in ranks]),
    }


@cache
def alone(subject: Subject) -> dict[str, Any]:
    return outcome(Layout(m=2), subject)


def flat(values: Any) -> list[float]:
    """The numbers of nested mappings, lists and tuples, in the order of their keys."""
    if isinstance(values, dict):
        return [number for key in sorted(values) for number in flat(values[key])]
    if isinstance(values, list | tuple):
        return [number for value in values for number in flat(value)]
    return [values]


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("reports", "norms"):
        torch.testing.assert_close(
            torch.tensor(flat(found[name]), dtype=torch.float64),
            torch.tensor(flat(wanted[name]), dtype=torch.float64),
            rtol=TOLERANCE,
            atol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for name in ("grads", "weights"):
        assert found[name].keys() == wanted[name].keys()
        for key, value in wanted[name].items():
            worst = (found[name][key] - value).abs().max()
            assert worst <= TOLERANCE * value.abs().max(), f"{name} {key} differs by {worst}"


def zero(stage: int, **options: Any) -> DataParallelConfig:
    return DataParallelConfig(zero_stage=stage, overlap_grad_reduce=stage > 0, ddp_bucket_size=1500, **options)


# Layouts, and whether the loss has a mask; a mask's tokens are counted before the step.
LAYOUTS = [
    (Layout(tp=2, m=2), False),
    (Layout(tp=2, sp=True, m=1, recompute="uniform 1"), True),
    (Layout(pp=2, m=4, schedule="zb-h1", recompute="selective"), True),
    (Layout(pp=2, v=2, m=4, schedule="interleaved", tp=2, sp=True), True),
    (Layout(pp=2, v=2, m=4, schedule="zb-v", data_parallel=zero(2), dp=2, delayed=True), True),
    (Layout(cp=2, m=2, tp=2, sp=True, data_parallel=zero(1)), True),
    (Layout(cp=2, cp_types=("a2a",), pp=2, m=2, delayed=True, recompute="block 1"), False),
    (Layout(dp=4, m=1, data_parallel=zero(0), delayed=True), True),
    (Layout(dp=2, m=2, data_parallel=zero(3), recompute="uniform 2"), True),
    (Layout(dp=2, pp=2, m=2, tp=2, data_parallel=zero(3), schedule="zb-h1"), True),
    (Layout(dp=2, cp=2, m=2, data_parallel=zero(3, overlap_param_gather=True), delayed=True), True),
]


@pytest.mark.parametrize(
    ("layout", "has_mask"), LAYOUTS, ids=[f"{layout}-zero{layout.data_parallel.stage}" for layout, _ in LAYOUTS]
)
def test_every_layout_trains_as_one_process(layout: Layout, has_mask: bool):
    subject = MASKED if has_mask else UNMASKED
    assert_same(outcome(layout, subject), alone(subject))


def test_one_process_has_the_gradients_of_one_graph():
    """The mean over tokens + coefficient x mean over samples, summed over layers, differentiated once for the whole batch."""

    def work(mesh: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        trainer = AuxTrainer(mesh, Layout(m=4), MASKED)
        found = trainer.step(0, lr=0.0)
        chunk = trainer.chunks[0]
        gradients = {name: p.main_grad.clone() for name, p in chunk.module.named_parameters()}

        # one microbatch of the whole batch, with its dropout masks
        whole = BatchShape(BATCH, 1, SEQ)
        (batch,) = batches_of(whole, 0, mesh, MASKED)
        for keys in trainer.pipeline.keys:
            keys.samples = whole.samples_of(0, 0, mesh.samples)
        chunk.zero_grad_buffer(1)
        chunk.begin_microbatch(0, backward=False)
        with chunk.module.aux_losses.collecting() as collected:
            losses = chunk(batch["tokens"], batch["positions"], None, labels=batch["labels"])
        objective = (losses * batch["mask"]).sum() / batch["mask"].sum()
        for aux in collected:
            objective = objective + COEFFICIENTS[aux.name] * aux.value
        chunk.begin_microbatch(0, backward=True)
        objective.backward()
        wanted = {name: p.main_grad.clone() for name, p in chunk.module.named_parameters()}
        assert len(collected) == 2 * TINY_GPT2.num_layers - 1
        by_layer = {name: {} for name in NAMES}
        for aux in collected:
            by_layer[aux.name][aux.layer_number] = aux.value.item()
        return gradients, wanted, (found, by_layer)

    ((gradients, wanted, (found, by_layer)),) = run_ranks({}, work)
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=TOLERANCE * value.abs().max().item(), msg=name)
    means = {name: sum(layers.values()) / len(layers) for name, layers in by_layer.items()}
    torch.testing.assert_close(flat(found.aux_by_layer), flat(by_layer), rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(
        [found.losses[name] for name in NAMES], [means[name] for name in NAMES], rtol=TOLERANCE, atol=0
    )


def test_the_loss_scale_multiplies_them_too():
    def work(mesh: Any) -> tuple[list[float], list[float]]:
        plain = AuxTrainer(mesh, Layout(m=2), MASKED)
        scaled = AuxTrainer(mesh, Layout(m=2), MASKED, scaler=ConstantGradScaler(1000.0))
        return [plain.step(number).grad_norm for number in range(2)], [scaled.step(n).grad_norm for n in range(2)]

    ((plain, scaled),) = run_ranks({}, work)
    assert scaled == pytest.approx(plain, rel=TOLERANCE)


def test_tokens_that_nobody_counts_before_the_step_all_count():
    """Then the result says so: the weights are those of a batch without a mask."""

    def work(mesh: Any) -> Any:
        trainer = AuxTrainer(mesh, Layout(m=2), replace(MASKED, sample=masked_sample))
        return trainer.step(0)

    ((result),) = run_ranks({}, work)
    assert result.weighed_tokens == BATCH * SEQ > result.tokens


LOOPS = [
    Layout(m=2),
    Layout(pp=2, v=2, tp=2, sp=True, m=2, schedule="interleaved", recompute="uniform 1"),
    Layout(dp=2, cp=2, pp=2, m=2, data_parallel=zero(3), delayed=True),
]


@pytest.mark.parametrize("layout", LOOPS, ids=str)
def test_a_loop_of_ones_own_has_the_gradients_of_the_train_step(layout: Layout):
    def work(mesh: Any) -> tuple[list, list]:
        chunks, _, _ = build_chunks(mesh, TINY_GPT2, layout, subject=MASKED)
        get_global_state().sequence_parallel = layout.sp
        batch = BatchShape(BATCH // layout.dp // layout.m, layout.m)
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[batches_of(batch, 0, mesh, MASKED) for _ in chunks],
            model=list(chunks.values()),
            num_microbatches=layout.m,
            seq_length=SEQ,
            micro_batch_size=batch.micro_batch_size,
        )
        buffers = [buffer for chunk in chunks.values() for buffer in chunk.buffers]
        return reports, pieces_of_chunks(chunks, mesh, lambda p: p.main_grad, {"sums": buffers})

    ranks = run_ranks(layout.sizes, work, delayed=layout.delayed)
    wanted = first_step()
    for key, value in put_together([pieces for _, pieces in ranks]).items():
        worst = (value - wanted["grads"][key]).abs().max()
        assert worst <= TOLERANCE * value.abs().max(), f"{key} differs by {worst}"
    for reports in filter(None, (reports for reports, _ in ranks)):
        for name in NAMES:
            means = [report[name].item() for report in reports]
            assert means == pytest.approx([wanted["reports"][0][0][name]] * layout.m, rel=TOLERANCE)


@cache
def first_step() -> dict[str, Any]:
    return outcome(Layout(m=2), MASKED, steps=1)


class Penalised(nn.Module):
    """Two layers of a plain module; the second has no auxiliary loss."""

    def __init__(self, aux_losses: AuxLosses):
        super().__init__()
        torch.manual_seed(0)
        self.aux_losses = aux_losses
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 3)
        self.double()

    def inner(self, x: Tensor) -> Tensor:  # [b, 5] -> the same
        x = self.first(x).tanh()
        return self.with_penalty(x, x.square().sum(-1).sqrt())

    def with_penalty(self, x: Tensor, penalty: Tensor) -> Tensor:
        self.aux_losses.add("penalty", 1, penalty, 0.3)
        return x

    def forward(self, x: Tensor) -> Tensor:  # [b, 5] -> [b, 3]
        return self.second(checkpoint(self.inner, x, use_reentrant=False))


class PenalisedAsInMegatron(Penalised):
    def with_penalty(self, x: Tensor, penalty: Tensor) -> Tensor:
        return MoEAuxLossAutoScaler.apply(x, 0.3 * penalty.mean())


@pytest.mark.parametrize(("make", "stage"), [*((Penalised, stage) for stage in range(4)), (PenalisedAsInMegatron, 2)])
def test_the_engine_has_the_gradients_of_one_graph(make: type[Penalised], stage: int):
    """Two micro batches on two ranks, the first with two forwards and two backwards; layers are recomputed."""
    data = torch.randn(
        2, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )  # steps, parts, b, 5

    alone = Penalised(AuxLosses("penalty", num_layers=2))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    means = []
    for step in data:
        optimizer.zero_grad()
        with alone.aux_losses.collecting() as collected:
            loss = alone(step.reshape(-1, 5)).square().mean()
        (loss + collected[0].coefficient * collected[0].value).backward()
        optimizer.step()
        means.append(collected[0].value.item())

    def work(mesh: Any) -> tuple[list[float], dict[str, Tensor]]:
        model = make(AuxLosses(*["penalty"] * (make is Penalised), num_layers=2))
        config = EngineConfig(accumulation=2, data_parallel=DataParallelConfig(zero_stage=stage))
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config, mesh)
        found = []
        for step in data:
            for part in step:
                with torch.no_grad():
                    engine(part)  # adds nothing
                x = part.chunk(2)[mesh.samples.rank]
                loss = engine(x).square().mean()
                if make is Penalised:
                    engine.backward(loss / 4, retain_graph=True)
                    engine.backward(loss * 3 / 4)
                else:  # each backward of a term in the graph counts
                    engine.backward(loss)
                engine.step()
            if make is Penalised:
                found.append(engine.aux_losses["penalty"])
                assert engine.aux_losses_by_layer == {"penalty": {1: found[-1]}}
        return found, engine.module_state_dict()

    for found, state in run_ranks({"dp": 2}, work):
        assert found == pytest.approx(means, rel=TOLERANCE) or make is not Penalised
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE, msg=name)


def test_what_cannot_be_added_is_refused():
    aux_losses = AuxLosses("balance", num_layers=2)
    aux_losses.add("unknown", 9, torch.zeros(2, 2), 1.0)  # outside a forward of training nothing is read
    refused = {
        ("size", 1, torch.zeros(2)): "size balance aux_losses.declare",
        ("balance", 3, torch.zeros(2)): "balance 3 1 2",
        ("balance", 1, torch.zeros(2, 2)): "balance (2, 2) [b]",
    }
    with aux_losses.collecting():
        for (name, layer_number, value), facts in refused.items():
            with pytest.raises(ValueError) as error:
                aux_losses.add(name, layer_number, value, 1.0)
            assert tells(error.value, facts)
    with pytest.raises(ValueError) as error:
        declared_aux_losses([Penalised(AuxLosses(name, num_layers=2)) for name in ("penalty", "other")])
    assert tells(error.value, "other penalty")


def test_values_of_half_precision_are_summed_in_float32():
    aux_losses = AuxLosses("balance", num_layers=1)
    with aux_losses.collecting() as collected:
        aux_losses.add("balance", 1, torch.full((2,), 0.1, dtype=torch.bfloat16), 1.0)
    assert collected[0].value.dtype == torch.float32


# ---------------------------------------------------------------- layers written against Megatron


class GatedLayerOfMegatron(GatedLayer):
    def with_loss(self, y: Tensor, name: str, value: Tensor) -> Tensor:
        save_to_aux_losses_tracker(name, value.mean(), self.layer_number, TINY_GPT2.num_layers)
        return MoEAuxLossAutoScaler.apply(y, COEFFICIENTS[name] * value.mean())


def make_model_of_megatron(config: ModelConfig, *, context: LayerContext, **parts: Any) -> GPTModel:
    model = GPTModel(config, positions=SEQ, context=context, make_layer=GatedLayerOfMegatron, **parts)
    model.config = SimpleNamespace(**vars(config), num_moe_experts=EXPERTS)
    return model


def make_model_that_says_so(config: ModelConfig, *, context: LayerContext, **parts: Any) -> GPTModel:
    """Without experts: the model itself says that its layers add terms to the graph."""
    model = GPTModel(config, positions=SEQ, context=context, make_layer=GatedLayerOfMegatron, **parts)
    model.adds_terms_to_graph = True
    return model


OF_MEGATRON = replace(MASKED, make=make_model_of_megatron)
SAYS_SO = replace(MASKED, make=make_model_that_says_so)


class Writer:
    """Takes the place of TensorBoard's writer, and of wandb."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars[name] = float(value)

    def log(self, scalars: dict[str, Any], iteration: int) -> None:
        self.scalars |= {name: float(value) for name, value in scalars.items()}


@pytest.mark.parametrize("subject", [OF_MEGATRON, SAYS_SO], ids=["by its config", "by itself"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, pp=2, m=2, recompute="uniform 1"),
        pytest.param(Layout(pp=2, v=2, m=4, schedule="zb-v", data_parallel=zero(2), dp=2), marks=pytest.mark.sweep),
        pytest.param(Layout(cp=2, m=2, tp=2, sp=True, data_parallel=zero(3)), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_terms_in_the_graph_have_the_gradients_of_declared_ones(layout: Layout, subject: Subject):
    """And Megatron's tracker has their means, layer by layer. The first stage has no layer with a "size"."""

    def work(mesh: Any) -> dict[str, Any]:
        trainer = AuxTrainer(mesh, layout, subject)
        norm = trainer.step(0).grad_norm
        grads = pieces_of_chunks(trainer.chunks, mesh, lambda p: p.main_grad, {"sums": trainer.buffers})
        writers = [Writer(), Writer()]
        totals: dict[str, Tensor] = {"size": torch.tensor(5.0)}
        of_model = {"track_names": NAMES, "num_layers": TINY_GPT2.num_layers, "force_initialize": True}
        track_moe_metrics(1 / layout.m, 0, *writers, totals, per_layer_logging=True, **of_model)
        left = get_moe_layer_wise_logging_tracker()
        assert all(not tracked["values"].any() for tracked in left.values()) and left.keys() == set(NAMES)
        return {"norm": norm, "grads": grads, "scalars": [writer.scalars for writer in writers], "totals": totals}

    ranks = run_ranks(layout.sizes, work, delayed=layout.delayed, stages=layout.stages if layout.pp > 1 else None)
    wanted = first_step()
    assert ranks[0]["norm"] == pytest.approx(wanted["norms"][0], rel=TOLERANCE)
    assert_gradients([rank["grads"] for rank in ranks], wanted["grads"])
    by_layer = wanted["reports"][0][1]
    scalars = {}
    for name in NAMES:
        scalars[name] = sum(by_layer[name].values()) / TINY_GPT2.num_layers
        for i in range(TINY_GPT2.num_layers):
            scalars[f"moe/{name}_layer_{i}"] = by_layer[name].get(i + 1, 0.0)
    for rank in ranks:
        assert rank["scalars"] == [pytest.approx(scalars, rel=TOLERANCE)] * 2
        totals = {name: float(mean) for name, mean in rank["totals"].items()}
        assert totals == pytest.approx({"balance": scalars["balance"], "size": 5.0 + scalars["size"]}, rel=1e-6)


PER_TOKEN = pytest.param(True, marks=pytest.mark.full, id="calculate_per_token_loss")


@pytest.mark.parametrize("per_token", [pytest.param(False, id="mean"), PER_TOKEN])
def test_terms_in_the_graph_in_a_loop_of_ones_own(per_token: bool):
    """With a loss scale too. Per token, the layer multiplies its term by the tokens of the microbatch, as Megatron's do."""
    layout = Layout(dp=2, pp=2, m=2)
    tokens = BATCH // layout.dp // layout.m * SEQ

    class Layer(GatedLayerOfMegatron):
        def with_loss(self, y: Tensor, name: str, value: Tensor) -> Tensor:
            return super().with_loss(y, name, value * tokens if per_token else value)

    def make(config: ModelConfig, *, context: LayerContext, **parts: Any) -> GPTModel:
        model = GPTModel(config, positions=SEQ, context=context, make_layer=Layer, **parts)
        model.config = SimpleNamespace(**vars(config), params_dtype=torch.float64, calculate_per_token_loss=per_token)
        return model

    def work(mesh: Any) -> Any:
        chunks, _, _ = build_chunks(mesh, TINY_GPT2, layout, subject=replace(UNMASKED, make=make))
        batch = BatchShape(BATCH // layout.dp // layout.m, layout.m)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[batches_of(batch, 0, mesh, UNMASKED) for _ in chunks],
            model=list(chunks.values()),
            num_microbatches=layout.m,
            seq_length=SEQ,
            micro_batch_size=batch.micro_batch_size,
            grad_scale_func=lambda loss: 8.0 * loss,
        )
        for chunk in chunks.values():
            chunk.scale_gradients(1 / 8.0)
        buffers = [buffer for chunk in chunks.values() for buffer in chunk.buffers]
        return pieces_of_chunks(chunks, mesh, lambda p: p.main_grad, {"sums": buffers})

    assert_gradients(run_ranks(layout.sizes, work), outcome(Layout(m=2), UNMASKED, steps=1)["grads"])


def assert_gradients(found: list[Any], wanted: dict[str, Tensor]) -> None:
    for key, value in put_together(found).items():
        worst = (value - wanted[key]).abs().max()
        assert worst <= TOLERANCE * value.abs().max(), f"{key} differs by {worst}"


def test_terms_in_the_graph_of_a_loop_that_calls_backward_itself():
    """Their gradient is the scale that the script sets, of Megatron's shape [1] too. The output is passed on unchanged."""
    x = torch.arange(3.0, requires_grad=True)
    for scale in (torch.tensor(0.5), torch.tensor([0.25])):
        MoEAuxLossAutoScaler.set_loss_scale(scale)
        y = MoEAuxLossAutoScaler.apply(x * 2, (x * x).sum())
        y.sum().backward()
        assert torch.equal(y, 2 * x)
        torch.testing.assert_close(x.grad, 2 + 2 * x.detach() * scale)
        x.grad = None


def test_the_tracker_adds_once_what_a_recomputed_layer_saves():
    def work(mesh: Any) -> list[float]:
        def layer(x: Tensor) -> Tensor:
            save_to_aux_losses_tracker("balance", x.sum(), 2, 3)
            save_to_aux_losses_tracker("balance", x.sum(), None, 3)  # of no layer
            return x.square()

        for _ in range(2):
            checkpoint(layer, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
        with pytest.raises(ValueError) as error:
            save_to_aux_losses_tracker("balance", torch.ones(()), 4, 3)
        assert tells(error.value, "balance 4 1 3")
        with pytest.raises(ValueError) as error:
            track_moe_metrics(1.0, 0, track_names=["other"])
        assert tells(error.value, "other force_initialize num_layers")
        values = get_moe_layer_wise_logging_tracker()["balance"]["values"].tolist()
        clear_aux_losses_tracker()
        return values

    assert run_ranks({}, work) == [[0.0, 8.0, 0.0]]


# ---------------------------------------------------------------- models of two stacks


def penalised(subject: Subject, added: set[int]) -> Subject:
    """The subject with a penalty on the output of each layer, by a hook. added: receives the layers' numbers."""

    def make(config: ModelConfig, *, context: LayerContext, **parts: Any) -> nn.Module:
        context.aux_losses.declare("norm")

        def add(layer: TransformerLayer, _: Any, output: tuple[Tensor, Any]) -> None:
            norms = context.sum_over_sample(output[0].square().sum((0, 2))).sqrt()  # [b]
            context.aux_losses.add("norm", layer.layer_number, norms, 0.2)
            added.update(loss.layer_number for loss in context.aux_losses.collected)

        model = subject.make(config, context=context, **parts)
        for module in model.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_hook(add)
        return model

    return replace(subject, make=make)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, m=2, split=1, tp=2, sp=True, recompute="uniform 1"),
        Layout(pp=2, m=4, split=1, schedule="zb-h1", dp=2, data_parallel=zero(3)),
    ],
    ids=str,
)
def test_both_stacks_of_a_t5_may_add_them(layout: Layout):
    model = replace(TINY_T5, num_layers=2, decoder_num_layers=2)
    added: set[int] = set()
    of_layout, alone = (
        run(model, each, steps=1, global_batch=8, subject=penalised(T5, added)) for each in (layout, Layout(m=2))
    )
    assert_equal(of_layout, alone, TOLERANCE)
    assert added == {1, 2, 3, 4}, "the decoder's layers are numbered after the encoder's"
