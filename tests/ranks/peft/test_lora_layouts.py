"""Adapters train as in one process in every pair of layouts' choices: TP, SP, pipelines, CP, EP, ZeRO, recomputation, compilation,
offload. The frozen base keeps its bytes.

    python -m pytest tests/ranks/peft/test_lora_layouts.py -m sweep
"""

from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from covering import Combined, covering
from expert_models import ROUTERS, SUBJECT
from local_ranks import run_ranks
from offload_runs import offload
from tiny_run import GPT2, LLAMA, SEQ, Layout, Outcome, Subject, assert_equal, build_chunks, run
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.compile import compiled_region
from megatron.core.optimizer.optimizer_registry import OptimizerConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.peft.lora import adapter_names, add_lora
from megatron.core.peft.lora_config import LoRAConfig
from megatron.core.sharding.placement import Normal
from megatron.core.transformer.model_config import ModelConfig

_EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 12}
MODELS = {
    "llama": replace(LLAMA, num_query_groups=4),
    "gpt2": GPT2,
    # experts with a shared one, whose linears have adapters as those of attention do
    "experts": replace(LLAMA, **_EXPERTS, **ROUTERS["bias"]),
    "gpt2 experts": replace(GPT2, **_EXPERTS, **ROUTERS["softmax"]),
}
ADAPTERS = {
    "parts": LoRAConfig(lora_rank=2, lora_alpha=4.0, lora_dropout=0.3),
    "some parts": LoRAConfig(lora_rank=3, use_rslora=True, lora_target_modules=["linear_proj", "linear_qkv"]),
    "output": LoRAConfig(lora_rank=2, lora_target_modules=["all-linear", "output_layer"]),
}
PIPELINES = {
    "alone": {},
    "1f1b": {"pp": 2},
    "vpp": {"pp": 2, "v": 2, "schedule": "interleaved"},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zb-interleaved": {"pp": 2, "v": 2, "schedule": "zb-interleaved"},
    "zb-v": {"pp": 2, "v": 2, "schedule": "zb-v"},
}
DIMENSIONS = {
    "tp": (1, 2, 8),
    "sp": (False, True),
    "pipeline": tuple(PIPELINES),
    "cp": (1, 2),
    "dp": (1, 2, 4),
    "ep": (1, 2, 4),
    "stage": (0, 1, 2, 3),
    "recompute": ("none", "uniform 1", "selective", "all parts"),
    "compile": ("off", "regions", "layers"),
    "offload": ("none", "host", "file", "half", "params"),
    "delayed": (False, True),
    "model": tuple(MODELS),
    "adapters": tuple(ADAPTERS),
}


@dataclass(frozen=True)
class Case(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    tp: int
    sp: bool
    pipeline: str
    cp: int
    dp: int
    ep: int
    stage: int
    recompute: str
    compile: str
    offload: str
    delayed: bool
    model: str
    adapters: str

    def layout(self, folder: Path) -> Layout:
        config = DataParallelConfig(
            zero_stage=self.stage,
            overlap_grad_reduce=self.stage > 0,
            overlap_param_gather=self.stage > 0,
            ddp_bucket_size=1500,
        )
        same = {name: getattr(self, name) for name in ("tp", "sp", "cp", "dp", "ep", "recompute", "delayed")}
        return Layout(
            **same, **PIPELINES[self.pipeline], m=2, data_parallel=config, offload=offload(self.offload, folder)
        )

    @property
    def config(self) -> ModelConfig:
        return replace(MODELS[self.model], compile=self.compile)

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * PIPELINES[self.pipeline].get("pp", 1)

    @property
    def can_be(self) -> bool:
        has_experts = "experts" in self.model
        is_tied = "gpt2" in self.model
        return (
            self.ranks <= 16
            and not (self.sp and self.tp == 1)
            and not (self.tp == 8 and ((self.sp and self.cp > 1) or has_experts))
            and not (self.ep > 1 and not has_experts)
            and self.tp * self.cp * self.dp % (self.ep * self.tp) == 0
            and not (is_tied and (self.pipeline == "zb-v" or self.adapters == "output"))
            and not (self.offload == "params" and self.stage < 3)
        )


PLAIN = Case(1, False, "alone", 1, 1, 1, 0, "none", "off", "none", False, "llama", "parts")
CHOSEN = [  # in the test command
    Case(2, True, "alone", 1, 2, 2, 3, "selective", "off", "host", False, "experts", "parts")
]


@cache
def covering_cases() -> tuple[Case, ...]:
    """Cases in which every two choices that can stand together do."""
    seeds = [
        replace(PLAIN, tp=tp, sp=tp > 1, dp=dp, cp=cp, stage=3) for tp in (1, 2) for dp in (1, 2, 4) for cp in (1, 2)
    ]
    seeds += [replace(seed, model="experts") for seed in seeds]
    return covering(Case, DIMENSIONS, 2, seeds=[asdict(seed) for seed in seeds], chosen=CHOSEN)


def adapted(config: ModelConfig, lora: LoRAConfig, **parts) -> nn.Module:
    model = GPTModel(config, positions=SEQ, **parts)
    add_lora(model, lora, keys=model.context.keys, rows_of_sample=model.context.rows)
    names = adapter_names(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in names)
        if "lora_b" in name:  # else A has no gradient in the first step
            parameter.placement = replace(parameter.placement, init=Normal(0.1))
    return model


def trained(model: ModelConfig, adapters: str, layout: Layout) -> Outcome:
    optimizer = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
    return run(model, layout, subject=subject_of(adapters), steps=2, global_batch=8, optimizer=optimizer)


def subject_of(adapters: str) -> Subject:
    return replace(SUBJECT, make=partial(adapted, lora=ADAPTERS[adapters]))


@cache
def one_process(model: str, adapters: str) -> Outcome:
    return trained(MODELS[model], adapters, Layout())


@cache
def first_weights(model: str, adapters: str) -> dict[str, Tensor]:
    """What a run begins with."""

    def work(mesh: Mesh) -> dict[str, Tensor]:
        chunks, _, _ = build_chunks(mesh, MODELS[model], Layout(), subject=subject_of(adapters))
        return {name: p.detach().clone() for name, p in chunks[0].module.named_parameters()}

    return run_ranks({}, work)[0]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{i}", marks=pytest.mark.full if case in CHOSEN else pytest.mark.sweep)
        for i, case in enumerate(covering_cases())
    ],
)
def test_every_pair_of_choices_trains_adapters_as_one_process(case: Case, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(compiled_region, "BACKEND", "eager")  # formulas are traced as for a compiler, and run eagerly
    got = trained(case.config, case.adapters, case.layout(tmp_path))
    expected = one_process(case.model, case.adapters)
    assert_equal(got, expected, 1e-10)
    first = first_weights(case.model, case.adapters)
    moved = {key for key, value in got.weights.items() if not torch.equal(value, first[key][: len(value)])}
    assert moved == {key for key in first if ".lora_" in key} and moved
    assert list(tmp_path.iterdir()) == []
