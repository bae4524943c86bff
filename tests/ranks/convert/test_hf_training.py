"""Folders of other projects trained: five steps of AdamW, float32, bfloat16 and any layout, against tests/support/exchange/record.py."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, LENGTH, ids, read_record, read_tensors, write_folders
from local_ranks import run_ranks
from tiny_run import GPT, Layout, build_chunks, build_pipeline, forward_step

from megatron.convert import open_any, open_foreign
from megatron.convert.families.read_and_write_hf_config import family_of
from megatron.convert.formats.hf_config_and_safetensors_headers import read_json
from megatron.convert.open_hf_safetensors_folder import param_mappings
from megatron.convert.stream_checkpoint_to_hf_folder import write_hf_folder
from megatron.core.dist_checkpointing import placed_tensor, save_checkpoint
from megatron.core.dist_checkpointing.load_sharded import Checkpoint
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.schedules import BatchShape
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.step import train_step

LAYOUT = Layout(tp=2, pp=2, m=2, first=2)
EXPERTS = (
    "mixtral",
    "qwen2_moe",
    "qwen2_moe-window",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "flex_olmo",
    "granitemoe",
    "granitemoeshared",
)
LAYOUT_OF_EXPERTS = Layout(dp=2, ep=2, pp=2, first=2)  # texts of 13 tokens cannot be dealt out to two ranks of tp
FAST = ("gemma3", "cohere-norms")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("hf"), CASES)


def settings_of(checkpoint: Checkpoint, **changed: Any) -> ModelConfig:
    return ModelConfig(**checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8} | changed)


def group_of(name: str, placement: Any, *, vectors: set[str]) -> ParamGroup:
    return ParamGroup(weight_decay_multiplier=0.0 if name in vectors else 1.0)


def vectors_of(root: Path, record: dict[str, Any]) -> set[str]:
    """Parameters of ours that are vectors in theirs: what one of them calls a matrix, such as norms by head, decays."""
    config = ModelConfig(**open_foreign(root).state["config"]["transformer"])
    rows = param_mappings(family_of(read_json(root / "config.json"), ""), config)
    return {row.param for row in rows if len(record["shapes"].get(row.hf_params[0], ())) == 1}


def text(number: int) -> dict[str, torch.Tensor]:
    row = torch.tensor(ids()[number : number + 1])
    positions = torch.arange(LENGTH - 1)[None]
    return {"tokens": row[:, :-1], "labels": row[:, 1:], "positions": positions, "mask": torch.ones_like(positions)}


def losses_of(root: Path, mesh: Mesh, vectors: set[str], kept: Path, layout: Layout = LAYOUT) -> list[float]:
    """This rank's losses of five steps of the folder's model; what it has read is saved in `kept` before them."""
    checkpoint = open_foreign(root, mesh["world"])
    config, words = settings_of(checkpoint, hidden_dropout=0.0, attention_dropout=0.0), checkpoint.state["vocab_size"]
    subject = replace(GPT, make=partial(GPTModel, positions=config.max_position_embeddings))
    parts = build_chunks(mesh, config, layout, words, subject)
    chunks, wanted = parts[0], {}
    for chunk in chunks.values():
        for name, p in chunk.module.named_parameters():
            p.data.zero_()
            wanted[f"model/{name}"] = placed_tensor(p.data, p.placement, mesh)
    checkpoint.read_into(wanted, mesh["world"], convert=True)
    save_checkpoint(kept, 1, wanted, {k: v for k, v in checkpoint.state.items() if k != "origin"}, mesh["world"])
    buffers = [buffer for chunk in chunks.values() for buffer in chunk.buffers]
    options = OptimizerConfig(clip_grad=0.0, weight_decay=0.1, adam_beta2=0.999, adam_eps=1e-8)
    adam = FlatOptimizer(buffers, options, mesh, group_of=partial(group_of, vectors=vectors))
    pipeline = build_pipeline(mesh, config, layout, BatchShape(1, layout.m), parts, forward_step, tokens=LENGTH - 1)
    losses = []
    texts = [text(0), text(1)] if layout.dp == 1 else [text(mesh["dp"].rank)]
    for _ in range(5):
        data = {stage: iter(texts) for stage in chunks}
        losses.append(train_step(pipeline, adam, data, first_sample=0, lr=0.01).losses.get("lm loss"))
    return losses


def marks_of(number: int, case: str) -> list[pytest.MarkDecorator]:
    """A third of the families, another third than test_hf_generation.py has over these ranks; the others by `-m sweep`."""
    return [] if case in FAST else [pytest.mark.sweep] if number % 3 else [pytest.mark.full]


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=marks_of(i, name)) for i, name in enumerate(CASES) if name not in EXPERTS]
)
def test_five_steps_at_tp_2_and_pp_2_follow_transformers(case: str, folders: dict[str, Path], tmp_path: Path):
    """And a checkpoint of these four ranks is written as the folder that it was, to the bit."""
    record = read_record(case)
    work = partial(losses_of, folders[case], vectors=vectors_of(folders[case], record), kept=tmp_path / "kept")
    *_, losses = run_ranks({"tp": 2, "pp": 2}, work)
    for mine, expected in zip(losses, record["losses"], strict=True):
        assert abs(mine - expected) < 1e-9
    kind = record["config"]["model_type"]
    write_hf_folder(open_any(tmp_path / "kept"), tmp_path / "out", kind=kind)
    assert read_tensors(tmp_path / "out") == read_tensors(folders[case])


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.sweep] * (i not in (1, 5))) for i, name in enumerate(EXPERTS)]
)
def test_five_steps_at_ep_2_and_pp_2_follow_transformers(case: str, folders: dict[str, Path], tmp_path: Path):
    """Each rank has half of a layer's experts and one of the two texts; and the checkpoint is the folder, to the bit."""
    record = read_record(case)
    layout = LAYOUT_OF_EXPERTS
    vectors = vectors_of(folders[case], record)
    work = partial(losses_of, folders[case], vectors=vectors, kept=tmp_path / "kept", layout=layout)
    *_, losses = run_ranks(layout.sizes, work, stages=layout.stages)
    for mine, expected in zip(losses, record["losses"], strict=True):
        assert abs(mine - expected) < 1e-9
    kind = record["config"]["model_type"]
    write_hf_folder(open_any(tmp_path / "kept"), tmp_path / "out", kind=kind)
    assert read_tensors(tmp_path / "out") == read_tensors(folders[case])
