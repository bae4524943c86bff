"""Folders of other projects, read as they lie by any layout: equal to what transformers computed (tests/exchange/record.py)."""

import json
import sys
from pathlib import Path

import pytest
import torch
from local_ranks import run_ranks

from megatron.core.boxes import slices
from megatron.core.inference.load import load_gpt
from megatron.core.interchange import open_foreign
from megatron.core.interchange.mapped import family_of, heads_of, rows_of
from megatron.core.interchange.written import their_tensors
from megatron.core.placement import pieces
from megatron.core.transformer.model_config import ModelConfig

sys.path.append(str(Path(__file__).parent.parent / "exchange"))
from cases import CASES, ids, read_record, weight, write_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each case, of float64."""
    root = tmp_path_factory.mktemp("hf")
    for name in CASES:
        write_folder(root / name, read_record(name))
    return {name: root / name for name in CASES}


def model_of(root: Path, mesh=None, **options) -> torch.nn.Module:
    checkpoint = open_foreign(root, **({"world": mesh["world"]} if mesh else {}))
    config = ModelConfig(**checkpoint.state["config"]["transformer"], make_vocab_size_divisible_by=8, fp64=True)
    positions = config.max_position_embeddings
    return load_gpt(
        checkpoint, config, vocab_size=checkpoint.state["vocab_size"], positions=positions, mesh=mesh, **options
    )


def scores_of(model: torch.nn.Module, words: int) -> torch.Tensor:
    tokens = torch.tensor(ids())
    return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))[..., :words]


def theirs(root: Path, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of ours (parameters or gradients of a whole model) under their names."""
    state = open_foreign(root).state
    config, kind = ModelConfig(**state["config"]["transformer"]), json.loads((root / "config.json").read_text())
    family, found = family_of(kind, "config.json"), {}
    for row in rows_of(family, config):
        if row.ours in ours:
            found |= dict(zip(row.theirs, their_tensors(row.operation, heads_of(config), ours[row.ours])))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_scores_and_gradients_of_transformers(case: str, folders: dict[str, Path]):
    record = read_record(case)
    model, words = model_of(folders[case]), record["config"]["vocab_size"]
    scores = scores_of(model, words)
    assert (scores - torch.tensor(record["scores"], dtype=torch.float64)).abs().max() < 1e-10
    tokens = torch.tensor(ids())
    torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: p.grad[:words] if "word_emb" in name else p.grad for name, p in model.named_parameters()}
    found = {
        name: (x * torch.tensor(weight(f"direction of {name}", tuple(x.shape)))).sum()
        for name, x in theirs(folders[case], gradients).items()
    }
    assert found.keys() == record["gradients"].keys()
    for name, value in record["gradients"].items():
        assert abs(found[name] - value) < 1e-10 * max(1, abs(value)), name


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_goes_back_to_the_bit(case: str, folders: dict[str, Path]):
    record = read_record(case)
    model, words = model_of(folders[case]), record["config"]["vocab_size"]
    ours = {
        name: p[:words] if "word_emb" in name or "output_layer" in name else p for name, p in model.named_parameters()
    }
    found = theirs(folders[case], ours)
    assert {name: list(x.shape) for name, x in found.items()} == record["shapes"]
    for name, shape in record["shapes"].items():
        assert torch.equal(found[name], torch.tensor(weight(name, tuple(shape)))), name


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_every_rank_reads_its_boxes_of_a_folder(case: str, folders: dict[str, Path]):
    """TP 2 x PP 2: each parameter is the part of the whole that its placement says."""
    whole = dict(model_of(folders[case]).named_parameters())

    def work(mesh):
        for name, mine in model_of(folders[case], mesh).named_parameters():
            for box, local in pieces(mine.placement, tuple(mine.shape), mesh):
                assert torch.equal(mine[slices(local)], whole[name][slices(box)]), name

    run_ranks({"tp": 2, "pp": 2}, work)
