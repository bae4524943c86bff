"""A folder of a BERT: what it computes, in any layout, against tests/support/exchange/record.py; and its way back."""

import json
import struct
from pathlib import Path

import pytest
import torch
from adamw_steps import assert_losses
from cases import read_record, read_tensors, sentences, weight, write_folder
from local_ranks import run_ranks
from torch import Tensor

from megatron.convert import open_foreign
from megatron.convert.families.read_and_write_hf_config import family_of
from megatron.convert.formats.hf_config_and_safetensors_headers import read_json
from megatron.convert.open_hf_safetensors_folder import head_counts_of, param_mappings
from megatron.convert.plan_hf_folder import to_hf_tensors
from megatron.convert.stream_checkpoint_to_hf_folder import write_hf_folder
from megatron.core.dist_checkpointing import CheckpointError, placed_tensor
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.placement import pieces
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig

RECORD = read_record("bert")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "bert", RECORD)
    return tmp_path / "bert"


def model_of(root: Path, mesh: Mesh, **options: bool) -> BertModel:
    """This rank's stage of the folder's model."""
    checkpoint, stage = open_foreign(root, mesh["world"]), mesh["pp"].rank
    settings = checkpoint.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8, "fp64": True} | options
    config, last = ModelConfig(**settings), mesh["pp"].size - 1
    model = BertModel(
        config,
        vocab_size=checkpoint.state["vocab_size"],
        positions=16,
        layers=range(stage * 2, config.num_layers if stage == last else 2),
        context=LayerContext.from_mesh(mesh, config.params_dtype, fills=False),
        pre_process=stage == 0,
        post_process=stage == last,
    )
    wanted = {}
    for name, parameter in model.named_parameters():
        parameter.data.zero_()
        wanted[f"model/{name}"] = placed_tensor(parameter.data, parameter.placement, mesh)
    checkpoint.read_into(wanted, mesh["world"], convert=True)
    return model.eval()


def said_by(model: BertModel) -> tuple[Tensor, Tensor]:
    given = {name: torch.tensor(x) for name, x in sentences().items()}
    return model(given["text"], given["seen"], given["types"])


def loss_of(model: BertModel) -> Tensor:
    given, (words, order) = {name: torch.tensor(x) for name, x in sentences().items()}, said_by(model)
    masked = given["masked"].bool()
    loss = torch.nn.functional.cross_entropy(words[..., :31][masked], given["asked"][masked])
    return loss + torch.nn.functional.cross_entropy(order, given["order"])


def test_scores_and_gradients_equal_transformers(folder: Path):
    model = model_of(folder, single_rank_mesh())
    words, order = said_by(model)
    assert (words[..., :31] - torch.tensor(RECORD["scores"], dtype=torch.float64)).abs().max() < 1e-10
    assert (order - torch.tensor(RECORD["order"], dtype=torch.float64)).abs().max() < 1e-10
    loss_of(model).backward()
    config, found = model.config, {}
    rows = {row.param: row for row in param_mappings(family_of(read_json(folder / "config.json"), ""), config)}
    for name, p in model.named_parameters():
        whole = p.grad[:31] if name.endswith(("word_embeddings.weight", "word_bias.bias")) else p.grad
        found |= dict(zip(rows[name].hf_params, to_hf_tensors(rows[name].operation, head_counts_of(config), whole)))
    assert found.keys() == RECORD["gradients"].keys()
    for name, value in RECORD["gradients"].items():
        mine = (found[name] * torch.tensor(weight(f"direction of {name}", tuple(found[name].shape)))).sum().item()
        assert abs(mine - value) < 1e-10 * max(1, abs(value)), name


def test_five_steps_and_float32_follow_transformers(folder: Path):
    model = model_of(folder, single_rank_mesh())
    assert_losses(model, loss_of, RECORD["losses"])
    single, _ = said_by(model_of(folder, single_rank_mesh(), fp64=False))
    assert (single[..., :31] - torch.tensor(RECORD["scores"])).abs().max() < 1e-4


@pytest.mark.full
def test_tp_2_and_pp_2_read_their_boxes_and_give_the_scores(folder: Path):
    whole = dict(model_of(folder, single_rank_mesh()).named_parameters())

    def work(mesh: Mesh) -> None:
        model = model_of(folder, mesh)
        for name, mine in model.named_parameters():
            for box, local in pieces(mine.placement, tuple(mine.shape), mesh):
                assert torch.equal(mine[slices(local)], whole[name][slices(box)]), name

    run_ranks({"tp": 2, "pp": 2}, work)

    def scores(mesh: Mesh) -> Tensor:
        words, _ = said_by(model_of(folder, mesh))
        return collectives.all_gather(words, mesh["tp"], dim=-1)[..., :31]

    for words in run_ranks({"tp": 2}, scores):
        assert (words - torch.tensor(RECORD["scores"], dtype=torch.float64)).abs().max() < 1e-10


def test_a_folder_is_written_as_it_was_to_the_bit(folder: Path, tmp_path: Path):
    assert write_hf_folder(open_foreign(folder), tmp_path / "out", most_bytes=20_000) == "bert"
    assert read_tensors(tmp_path / "out") == read_tensors(folder)
    written, given = read_json(tmp_path / "out" / "config.json"), RECORD["config"]
    assert all(written[key] == given[key] for key in ("hidden_act", "layer_norm_eps", "type_vocab_size", "vocab_size"))


def rewritten(folder: Path, changed: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """The folder's tensors in one file, under other names."""
    header, data = {}, b""
    for name, (dtype, shape, values) in changed.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def test_names_and_copies_of_old_files_are_read(folder: Path):
    """gamma and beta; the output layer beside the table that it is, which must be equal."""
    before = {name: p.clone() for name, p in model_of(folder, single_rank_mesh()).named_parameters()}
    tensors = read_tensors(folder)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = bias = tensors["cls.predictions.bias"]
    for name, p in model_of(rewritten(folder, old), single_rank_mesh()).named_parameters():
        assert torch.equal(p, before[name]), name
    old["cls.predictions.decoder.bias"] = (*bias[:2], bytes(len(bias[2])))
    with pytest.raises(CheckpointError, match=r"decoder\.bias and cls\.predictions\.bias"):
        open_foreign(rewritten(folder, old))
