"""The experts of examples/toy_moe, on an unchanged megatron: any layout trains them as one process, and saves what any other loads."""

import importlib.util
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from local_ranks import run_ranks
from same_code import ROOT
from tiny_run import (
    SEQ,
    TINY_GPT2,
    TINY_LLAMA,
    Layout,
    Outcome,
    Subject,
    Texts,
    TinyTrainer,
    assert_equal,
    forward_step,
    pieces_of_chunks,
    put_together,
    sample,
)
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.optimizer.optimizer_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh

HERE = ROOT / "examples" / "toy_moe"


def module_at(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"toy_moe_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MOE = module_at("experts")
OWN = MOE.ToyMoEConfig(toy_expert_width=12, toy_balance_coefficient=0.3, toy_bias_update_rate=2e-4)
MODELS = {"gpt2": TINY_GPT2, "llama": TINY_LLAMA}
BATCH = 8


def make(config: Any, *, context: Any, own: Any = OWN, **parts: Any) -> nn.Module:
    context.aux_losses.declare("load balance")
    return MOE.ToyMoEModel(config, positions=SEQ, context=context, spec=MOE.spec_of(config, own), **parts)


def unmasked(number: int, texts: Texts = Texts()) -> dict[str, Tensor]:
    return sample(number, texts) | {"mask": torch.ones(SEQ, dtype=torch.float64)}


EXPERTS = Subject(make, forward_step, unmasked, tokens=SEQ)


class Found(dict):
    """What one rank knows: of `Outcome`, with the biases of its layers, and its calls of the last step."""


def train(mesh: Mesh, config: Any, layout: Layout, steps: int) -> Found:
    optimizer = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
    tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, optimizer=optimizer, subject=EXPERTS)
    found = Found(losses=[], norms=[], grads=[])
    for number in range(steps):
        with mesh.ledger.record() as calls:
            result = tiny.step(number)
        found["losses"].append(sum(result.losses.values()))
        found["norms"].append(result.grad_norm)
        found["grads"].append(pieces_of_chunks(tiny.chunks, mesh, lambda p: p.main_grad, {"sums": tiny.buffers}))
    tiny.finish_param_gather()
    sharded = [buffer for buffer in tiny.buffers if buffer.stage == 3]
    found["weights"] = pieces_of_chunks(tiny.chunks, mesh, lambda p: p.data, {"owned_params": sharded})
    named = [pair for chunk in tiny.model for pair in chunk.module.named_buffers()]
    found["biases"] = {name: value for name, value in named if name.endswith("expert_bias")}
    assert all(not value.any() for name, value in named if name.endswith("tokens_per_expert"))
    found["calls"] = Counter((call.op, call.axis) for call in calls)
    found["is_last"] = mesh.has_last_stage
    return found


def outcome(config: Any, layout: Layout, steps: int = 2) -> tuple[Outcome, dict[str, Tensor], list[Found]]:
    ranks = run_ranks(
        layout.sizes,
        partial(train, config=layout.applied_to(config), layout=layout, steps=steps),
        delayed=layout.delayed,
        ranks_per_kv_head=config.ranks_per_kv_head(layout.tp),
        stages=layout.stages if layout.pp > 1 else None,
    )
    biases: dict[str, Tensor] = {}
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        for name, value in rank["biases"].items():
            assert torch.equal(biases.setdefault(name, value), value), f"{name} differs between ranks"
    whole = Outcome(
        losses=[rank for rank in ranks if rank["is_last"]][-1]["losses"],
        norms=ranks[0]["norms"],
        grads=[put_together([rank["grads"][step] for rank in ranks]) for step in range(steps)],
        weights=put_together([rank["weights"] for rank in ranks]),
    )
    return whole, biases, ranks


@cache
def one_process(model: str) -> tuple[Outcome, dict[str, Tensor]]:
    return outcome(MODELS[model], Layout(m=2))[:2]


def zero(stage: int, **options: Any) -> DataParallelConfig:
    return DataParallelConfig(zero_stage=stage, overlap_grad_reduce=stage > 0, ddp_bucket_size=1500, **options)


LAYOUTS = [
    Layout(dp=2, tp=2, pp=2, ep=2, m=2, data_parallel=zero(3)),
    Layout(dp=4, ep=4, m=1, data_parallel=zero(1), delayed=True),
    Layout(tp=2, sp=True, ep=2, etp=1, m=2, recompute="uniform 1"),
    Layout(tp=2, m=2),
    Layout(cp=2, dp=2, ep=4, m=2, data_parallel=zero(2)),
    Layout(pp=2, dp=2, ep=2, m=2, schedule="zb-h1", data_parallel=zero(3, overlap_param_gather=True)),
    Layout(pp=2, v=2, tp=2, sp=True, dp=2, ep=2, m=2, schedule="interleaved", data_parallel=zero(1)),
    Layout(dp=4, ep=2, m=1, data_parallel=zero(3), recompute="all parts", delayed=True),
    Layout(tp=2, dp=2, ep=4, etp=1, m=2, data_parallel=zero(2), schedule="1f1b"),
    Layout(dp=2, etp=2, m=2, data_parallel=zero(0)),
    Layout(cp=2, tp=2, sp=True, ep=2, m=2, recompute="uniform 2", data_parallel=zero(0)),
    Layout(dp=4, ep=2, m=1, data_parallel=zero(1, num_distributed_optimizer_instances=2)),
    Layout(pp=2, v=2, dp=2, ep=2, m=2, schedule="zb-v", data_parallel=zero(2), recompute="selective"),
    Layout(tp=2, pp=2, dp=2, ep=2, m=2, schedule="zb-h1", data_parallel=zero(2), delayed=True),
]
# zb-v ties no embedding, as llama's are not
CASES = [(layout, list(MODELS)[(i + (layout.schedule == "zb-v")) % 2]) for i, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize(
    ("layout", "model"), CASES, ids=[f"{layout}-zero{layout.data_parallel.stage}-{model}" for layout, model in CASES]
)
def test_every_layout_trains_as_one_process(layout: Layout, model: str):
    got, biases, _ = outcome(MODELS[model], layout)
    expected, biases_of_one = one_process(model)
    assert_equal(got, expected, 1e-10)
    assert biases.keys() == biases_of_one.keys() and len(biases) == 4
    for name, value in biases_of_one.items():
        assert torch.equal(biases[name], value) and value.any(), name
