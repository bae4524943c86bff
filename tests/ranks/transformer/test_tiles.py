"""The MLP, and output layer with loss, in tiles along the sequence: the same numbers, and never the activations of all tokens.

tests/campaigns/context_matrix.py has tiles with every other axis, ZeRO, recompute and positions.
"""

from dataclasses import replace

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, SEQ, VOCAB, Layout, assert_equal, build, run, sample
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig

TILED = {"tiled_mlp": 3, "tiled_loss": 4}  # 3 do not divide the rows
OVERLAP = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1500)
CASES: dict[str, tuple[ModelConfig, dict, Layout]] = {
    "tied, sequence parallel": (GPT2, {}, Layout(tp=2, sp=True, dp=2, m=2, data_parallel=OVERLAP, delayed=True)),
    "norms computed again, smoothing": (
        replace(LLAMA, label_smoothing=0.1, z_loss_coeff=0.01),
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]},
        Layout(tp=2, m=2),
    ),
    "offloaded activations": (
        LLAMA,
        {"cpu_offloading_num_layers": 2, "min_offloaded_tensor_size": 1},
        Layout(pp=2, m=2, schedule="zb-h1"),
    ),
    "offloaded parameters": (
        GPT2,
        {},
        Layout(
            dp=2,
            offload=OffloadConfig(optimizer_cpu_offload=True, offload_params=True),
            data_parallel=DataParallelConfig(zero_stage=3, overlap_grad_reduce=True, overlap_param_gather=True),
        ),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if i == 0 else pytest.param(name, marks=pytest.mark.full) for i, name in enumerate(CASES)]
)
def test_tiles_change_no_number(name: str):
    model, more, layout = CASES[name]
    if "recompute_granularity" in more:
        layout = replace(layout, recompute="selective")
    whole = run(model, Layout(), global_batch=8, steps=2)
    assert_equal(run(replace(model, **TILED, **more), layout, global_batch=8, steps=2), whole, 1e-10)


class Largest(TorchDispatchMode):
    """The largest tensors of tokens [rows, b, width] that operators make: elements, by their width."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.dim() == 3:
                self.found[x.shape[-1]] = max(self.found.get(x.shape[-1], 0), x.numel())
        return result


@pytest.mark.parametrize("tiles", [1, 4])
def test_whole_scores_and_whole_inner_activations_never_exist(tiles: int):
    """Of 8 rows in 4 tiles an operator makes scores, and the MLP's inner activations, of 2 rows at most; in one tile of all."""
    model = replace(GPT2, num_layers=1, ffn_hidden_size=104, tiled_mlp=tiles, tiled_loss=tiles)
    padded = model.padded_vocab_size(VOCAB, 1)

    def work(mesh: Mesh) -> dict[int, int]:
        chunk, _ = build(mesh, model, sp=False)
        row = {key: x[None] for key, x in sample(0).items()}
        with Largest() as largest:
            chunk(row["tokens"], row["positions"], None, labels=row["labels"]).sum().backward()
        return largest.found

    (found,) = run_ranks({}, work)
    assert found[model.ffn_size] == model.ffn_size * SEQ // tiles
    assert found[padded] == padded * SEQ // tiles
