"""A dense model that is given experts computes what it computed: scores in float64, and the first loss of a run."""

from pathlib import Path

import pytest
import torch
from cases import ids, read_record, write_folder
from said import tells
from whole_run import run

from megatron.convert import open_any, open_foreign, write_hf_folder
from megatron.convert.stream_foreign_checkpoint_to_ours import copy_checkpoint
from megatron.convert.upcycle_to_experts import Upcycling, upcycle
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import LocalTensor, load_whole_tensors
from megatron.core.inference.load_model import load_gpt
from megatron.core.sharding.boxes import whole
from megatron.core.transformer.model_config import ModelConfig
from tools import checkpoint_convert


def scores_of(root: Path) -> torch.Tensor:
    checkpoint = open_any(root)
    state = checkpoint.state
    config = ModelConfig(**state["config"]["transformer"] | {"make_vocab_size_divisible_by": 8, "fp64": True})
    model = load_gpt(
        checkpoint, config, vocab_size=state["vocab_size"], positions=state["config"]["data"]["seq_length"]
    )
    tokens = torch.tensor(ids())
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


EXPERTS = {
    "copies": ("llama", {}, 1),
    "copies with biases, in some layers": ("llama-biases", {"moe_layer_freq": "[0,1,1]"}, 1),
    "halves": ("llama-biases", {"num_experts": 8, "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5}, 2),
    "not gated, sigmoid": ("gpt2", {"moe_router_score_function": "sigmoid", "moe_router_topk": 4}, 4),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "halves")) for name in EXPERTS]
)
def test_the_scores_are_those_of_the_dense_model(name: str, tmp_path: Path):
    case, more, granularity = EXPERTS[name]
    write_folder(tmp_path / "dense", read_record(case))
    settings = {"num_experts": 4, "moe_router_topk": 2} | more
    upcycle(open_foreign(tmp_path / "dense"), tmp_path / "experts", Upcycling(settings, granularity))
    expected = scores_of(tmp_path / "dense")
    assert (scores_of(tmp_path / "experts") - expected).abs().max() < 1e-12 * expected.abs().max()
    found = open_any(tmp_path / "experts").manifest.tensors
    routers = [key for key in found if key.endswith("mlp.router.weight")]
    assert len(routers) == (2 if "moe_layer_freq" in more else 3)
    # the router's rows differ by copies alone, and between layers
    values = {}
    for key in routers:
        rows = torch.empty(found[key].shape, dtype=torch.float64)
        box = whole(rows.shape)
        open_any(tmp_path / "experts").read_into({key: LocalTensor(rows, rows.shape, [(box, box)], False)})
        assert len(rows.unique(dim=0)) == settings["num_experts"] // granularity
        values[key] = rows
    assert not torch.equal(*list(values.values())[:2])


def test_a_factor_is_rounded_to_the_dtype_of_the_result_alone(tmp_path: Path):
    """A bfloat16 model whose experts are written in float64: 2 halves / 2.5 is no power of two."""
    write_folder(tmp_path / "folder", read_record("llama-biases"))
    copy_checkpoint(open_foreign(tmp_path / "folder"), tmp_path / "dense", "bfloat16")
    settings = {"num_experts": 8, "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5}
    upcycle(open_any(tmp_path / "dense"), tmp_path / "experts", Upcycling(settings, 2), "float64")
    dense, experts = load_whole_tensors(tmp_path / "dense"), load_whole_tensors(tmp_path / "experts")
    mlp = "model/language_model.decoder.layers.0.mlp."
    for name, factor in (("linear_fc2.weight", 2 / 2.5), ("linear_fc2.bias", 1 / 2.5)):
        x = dense[mlp + name].double()
        if x.dim() == 2:
            x = x.unflatten(1, (2, -1))[:, 1]  # the second half of the hidden features, as expert 3 has
        torch.testing.assert_close(experts[f"{mlp}experts.{name}"][3], x * factor, rtol=1e-15, atol=0)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path):
    write_folder(tmp_path / "dense", read_record("llama"))
    dense = open_foreign(tmp_path / "dense")
    for settings, granularity, told in (
        ({"num_experts": 6, "moe_router_topk": 2}, 4, "--num-experts 6 --moe-upcycling-granularity 4"),
        ({"num_experts": 4, "moe_router_topk": 3}, 2, "--moe-router-topk 3 --moe-upcycling-granularity 2"),
        ({"num_experts": 4}, 3, "--moe-upcycling-granularity 3 40"),
        ({"num_experts": 1}, 1, "--num-experts 1 is no mixture"),
        ({"num_experts": 4, "moe_router_topk": 1}, 1, "--moe-router-topk 1 give 2 or more"),
        ({"num_experts": 4, "moe_router_topk": 1, "moe_router_score_function": "sigmoid"}, 1, "give 2 or more"),
        ({"num_experts": 4, "moe_router_topk": 8}, 1, "--moe-router-topk 8 4"),
        ({"num_experts": 4, "moe_router_pre_softmax": True}, 1, "--moe-router-pre-softmax"),
    ):
        with pytest.raises(ConfigError) as error:
            upcycle(dense, tmp_path / "out", Upcycling(settings, granularity))
        assert tells(error.value, told), told
        assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.parametrize("scores, bias", [("softmax", ""), ("sigmoid", "--moe-router-enable-expert-bias")])
def test_a_run_of_the_experts_begins_with_the_loss_of_the_dense_run(scores: str, bias: str, tmp_path: Path, capsys):
    """The dense model trains, is given experts by the tool, and a run goes on from both: its first loss is the same."""
    flags = "--swiglu --ffn-hidden-size 12 --normalization RMSNorm --disable-bias-linear --fp64 --hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope"
    run(f"{flags} --train-iters 2 --save {tmp_path}/dense")
    words = ["--load", f"{tmp_path}/dense", "--save", f"{tmp_path}/experts", "--num-experts", "4"]
    words += ["--moe-router-score-function", scores]
    assert checkpoint_convert.main(words) == 0
    capsys.readouterr()
    losses = []
    for folder, more in (
        ("dense", ""),
        ("experts", f"--num-experts 4 --moe-router-topk 2 --moe-router-score-function {scores} {bias}"),
    ):
        run(f"{flags} {more} --pretrained-checkpoint {tmp_path}/{folder} --train-iters 1 --log-interval 1")
        said = capsys.readouterr().out
        losses.append(said.split("lm loss")[1].split("|")[0])
        assert "tokens_per_expert" not in said, "what a step begins with zeros is missed by nobody"
        assert "holds no values of these buffers" not in said
    assert losses[0] == losses[1], losses
    if bias:
        assert "another moe_router_enable_expert_bias: False before, True now" in said
        return
    assert write_hf_folder(open_any(tmp_path / "experts"), tmp_path / "hf") == "mixtral"
