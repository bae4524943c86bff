"""Checkpoints of Megatron-LM, read as they lie by any layout: equal to what transformers computes of the same weights."""

from pathlib import Path

import dist_files
import megatron_files
import numpy as np
import pytest
import torch
from cases import ids, read_record, read_tensors
from local_ranks import run_ranks
from whole_run import run

from megatron.convert import open_any
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.inference.load_model import load_gpt
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.placement import pieces
from megatron.core.transformer.model_config import ModelConfig
from tools import checkpoint_convert

# (case, options of `write`): each age of names and order of rows, and each way in which ranks divide the layers.
FILES = {
    "version 0": ("gpt2", {"tp": 2, "version": 0, "age": "transformer"}),
    "version 1.0": ("gpt2", {"tp": 3, "pp": 2, "version": 1.0, "age": "transformer"}),
    "version 2.0": ("gpt2", {"tp": 2, "pp": 2, "vpp": 2, "version": 2.0}),
    "before torch 1.6": ("gpt2", {"tp": 2, "version": 0, "age": "transformer", "zipped": False}),
    "core": ("llama", {"tp": 2, "pp": 3}),
    "core, virtual stages": ("llama", {"tp": 2, "pp": 1, "vpp": 3}),
    "core, more ranks than groups": ("llama", {"tp": 4, "fused_norms": True}),
    "core, tied": ("llama-tied", {"tp": 2, "pp": 2, "rotary_base": 5e5, "kv_channels": 6, "fused_norms": True}),
    "experts one by one": ("qwen2_moe", {"tp": 2, "pp": 3, "ep": 2}),
    "experts numbered, one stage": ("qwen2_moe", {"ep": 4, "layout": "numbered", "fused_norms": True}),
    "experts grouped": ("qwen2_moe", {"tp": 2, "ep": 2, "layout": "grouped"}),
    "whole experts beside two tensor ranks": ("qwen2_moe", {"tp": 2, "ep": 4, "etp": 1}),
    "halves of experts beside four": ("qwen2_moe", {"tp": 4, "ep": 2, "etp": 2, "pp": 3, "layout": "grouped"}),
}

# (case, options of `write_dist`): torch_dist, with layers stacked or apart, and arguments in a file or in an object of the folder.
DIST = {
    "layers stacked": ("gpt2", {"tp": 2}),
    "layers apart, args within": ("llama", {"tp": 4, "stacked": False, "common": "item"}),
    "gates and ups apart": ("llama", {"tp": 2, "halves": True}),
    "tied": ("llama-tied", {"tp": 2, "rotary_base": 5e5, "kv_channels": 6}),
    "experts": ("qwen2_moe", {"tp": 2, "stacked": False}),
    "experts, gates and ups apart": ("qwen2_moe", {"tp": 2, "stacked": False, "halves": True}),
}


def model_of(root: Path, mesh=None) -> torch.nn.Module:
    checkpoint = open_any(root, **({"world": mesh["world"]} if mesh else {}))
    state = checkpoint.state
    config = ModelConfig(**state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8, "fp64": True})
    positions = config.max_position_embeddings
    return load_gpt(checkpoint, config, vocab_size=state["vocab_size"], positions=positions, mesh=mesh)


def scores_of(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.tensor(ids())
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))[..., :31]


@pytest.mark.full
@pytest.mark.parametrize("files", FILES)
def test_files_of_each_age_give_the_scores_of_transformers(files: str, tmp_path: Path):
    case, options = FILES[files]
    megatron_files.write(tmp_path, case, **options)
    expected = torch.tensor(read_record(case)["scores"], dtype=torch.float64)
    assert (scores_of(model_of(tmp_path)) - expected).abs().max() < 1e-10


@pytest.mark.full
@pytest.mark.parametrize("files", DIST)
def test_torch_dist_gives_the_scores_of_transformers(files: str, tmp_path: Path):
    case, options = DIST[files]
    dist_files.write_dist(tmp_path, case, **options)
    expected = torch.tensor(read_record(case)["scores"], dtype=torch.float64)
    assert (scores_of(model_of(tmp_path)) - expected).abs().max() < 1e-10


@pytest.mark.full
@pytest.mark.parametrize(
    "files",
    [
        *("version 1.0", "layers stacked"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("version 0", "core, tied", "gates and ups apart")),
        *("experts grouped", "experts"),
    ],
)
def test_every_rank_of_another_layout_reads_its_boxes(files: str, tmp_path: Path):
    """Files of one layout, read at TP 2 x PP 2: each parameter is the part of the whole that its placement says."""
    case, options = (FILES | DIST)[files]
    (megatron_files.write if files in FILES else dist_files.write_dist)(tmp_path, case, **options)
    whole = dict(model_of(tmp_path).named_parameters())

    def work(mesh):
        for name, mine in model_of(tmp_path, mesh).named_parameters():
            for box, local in pieces(mine.placement, tuple(mine.shape), mesh):
                assert torch.equal(mine[slices(local)], whole[name][slices(box)]), name

    run_ranks({"tp": 2, "pp": 2}, work)


@pytest.mark.full
def test_the_biases_that_balance_experts_are_read(tmp_path: Path):
    """They are buffers of the router; counts of tokens are not read, and a gap in the experts is told."""
    biases = {0: [0.5, -0.25, 1.0, 2.0], 2: [3.0, 0.0, -1.0, 0.125]}

    def with_biases(rank: int, stage: int, values: dict) -> None:
        for layer, bias in biases.items():
            values["model"][f"decoder.layers.{layer}.mlp.router.expert_bias"] = torch.tensor(bias)
            values["model"][f"decoder.layers.{layer}.mlp.router.local_tokens_per_expert"] = torch.ones(4)

    options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    options |= {"moe_router_pre_softmax": False, "layout": "numbered"}
    megatron_files.write(tmp_path / "theirs", "qwen2_moe", ep=2, change=with_biases, **options)
    buffers = dict(model_of(tmp_path / "theirs").named_buffers())
    for layer, bias in biases.items():
        name = f"language_model.decoder.layers.{layer}.mlp.router.expert_bias"
        assert buffers[name].tolist() == bias and buffers[name].dtype == torch.float32

    def torn(rank: int, stage: int, values: dict) -> None:
        with_biases(rank, stage, values)
        values["model"].pop("decoder.layers.2.mlp.experts.linear_fc1.weight1", None)

    megatron_files.write(tmp_path / "torn", "qwen2_moe", ep=2, change=torn, **options)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.linear_fc1.*has experts \[0\], not 0 to 1"):
        open_any(tmp_path / "torn")


@pytest.mark.full
def test_a_missing_rank_of_whole_experts_is_told(tmp_path: Path):
    """Of 2 tensor-parallel ranks beside 4 with whole experts no rank of both kinds is doubled, so each must be there."""
    folder = megatron_files.write(tmp_path, "qwen2_moe", tp=2, ep=4, etp=1)
    assert {path.name for path in folder.iterdir()} == {f"mp_rank_{e % 2:02d}_{e:03d}" for e in range(4)}
    (folder / "mp_rank_00_002").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="no file of expert-parallel rank 2, stage 0, of 2 tensor- and 4"):
        open_any(tmp_path)
    (folder / "mp_rank_01_003").rename(tmp_path / "away too")
    with pytest.raises(CheckpointError, match="4 expert-parallel ranks, as args say, and has 2"):
        open_any(tmp_path)


REST = "--mock-data --tokenizer-type NullTokenizer --vocab-size 25 --micro-batch-size 1 --lr 0.1 --eval-iters 0 --device cpu"


@pytest.mark.full
def test_a_run_starts_from_the_files_and_takes_their_args(tmp_path: Path, capsys):
    """What it saves is written as a Hugging Face folder; a flag that says another model is refused."""
    megatron_files.write(tmp_path / "theirs", "gpt2", tp=2, pp=2, version=2.0)
    words = f"--load {tmp_path / 'theirs'} --seq-length 16 --train-iters 1"
    run(f"{words} --save {tmp_path / 'run'} --ckpt-step 7", tiny=REST.split())
    said = capsys.readouterr().out
    assert f"loaded weights of iteration 7 from {tmp_path / 'theirs'}" in said
    assert "num_layers 3" in said and "its weights are read, and not its optimizer's state" in said
    assert checkpoint_convert.main(["--load", str(tmp_path / "run"), "--save-hf", str(tmp_path / "out")]) == 0
    assert read_tensors(tmp_path / "out").keys() == read_record("gpt2")["shapes"].keys()
    for flags, told in {
        f"{words} --num-layers 2": "num_layers: the checkpoint has 3, this run has 2",
        f"{words} --ckpt-step 8": "iter_0000008: does not exist",
        f"{words} --save {tmp_path / 'theirs'}": "give it as --pretrained-checkpoint",
    }.items():
        with pytest.raises(SystemExit):
            run(flags, tiny=REST.split())
        assert told in capsys.readouterr().err, flags


def test_the_files_become_a_hugging_face_folder(tmp_path: Path):
    """Bit-equal tensors, but for the padding of the vocabulary, whose rows are kept."""
    megatron_files.write(tmp_path / "theirs", "llama", tp=2, pp=3)
    assert checkpoint_convert.main(["--load", str(tmp_path / "theirs"), "--save-hf", str(tmp_path / "out")]) == 0
    found, expected = read_tensors(tmp_path / "out"), megatron_files.tensors_of("llama")
    assert found.keys() == expected.keys()
    for name, (dtype, shape, data) in found.items():
        values = np.frombuffer(data, {"F64": "<f8"}[dtype]).reshape(shape)
        assert np.array_equal(values[: len(expected[name])], expected[name].numpy()), name
