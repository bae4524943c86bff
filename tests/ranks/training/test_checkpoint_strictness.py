"""--dist-ckpt-strictness: a checkpoint with more or with fewer parameters than the model of the run."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from said import tells
from torch import nn
from whole_run import run

import pretrain_gpt
from megatron.core.dist_checkpointing.save_load_state_dict import load_whole_tensors
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.gpt_and_bert_local_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.arguments.config import CheckpointConfig


class Scaled(TransformerLayer):
    """A layer of a script that has been changed between two runs: it has one parameter more, or not."""

    has_gain = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.has_gain:
            self.gain = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, hidden_states, *inputs, **options):
        out, context = super().forward(hidden_states, *inputs, **options)
        if self.has_gain:
            out = out * (0.5 + self.gain.mean()).to(out.dtype)
        return out, context


def script(model: str) -> ModuleType:
    """pretrain_gpt.py with such layers. model: "plain" or "scaled"."""

    def provide(pre_process=True, post_process=True, vp_stage=None):
        Scaled.has_gain = model == "scaled"
        args, spec = get_args(), get_gpt_layer_local_spec()
        spec.module = Scaled
        ends = {"pre_process": pre_process, "post_process": post_process}
        return GPTModel(core_transformer_config_from_args(args), spec, args.padded_vocab_size, 8, **ends)

    made = ModuleType("script")
    vars(made).update(vars(pretrain_gpt), model_provider=provide)
    return made


MODELS = ("plain", "scaled")
GAIN = "language_model.decoder.layers.1.gain"
FIRST_GAIN = "language_model.decoder.layers.0.gain"
TRAIN = "--num-layers 2 --lr-decay-style constant --clip-grad 0 --untie-embeddings-and-output-weights --save-interval 100 --dist-ckpt-strictness"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of three iterations of each of the two models."""
    folders = {}
    for name in MODELS:
        folders[name] = tmp_path_factory.mktemp(name)
        run(f"--train-iters 3 {TRAIN} log_all --save {folders[name]}", script=script(name))
    return folders


# (model saved, model that loads, value, whether it loads)
CASES = [
    ("scaled", "plain", "raise_unexpected", True),
    ("scaled", "plain", "raise_all", False),
    ("plain", "scaled", "log_unexpected", True),
    ("plain", "scaled", "assume_ok_unexpected", False),
]


def test_a_value_allows_more_parameters_or_fewer_too():
    allowed = {}
    for value in ("raise_all", "raise_unexpected", "assume_ok_unexpected", "log_unexpected", "log_all", "ignore_all"):
        config = CheckpointConfig(dist_ckpt_strictness=value)
        allowed[value] = (config.loads_more_parameters, config.loads_fewer_parameters)
    assert list(allowed.values()) == [
        (False, False),
        (True, False),
        (True, False),
        (True, True),
        (True, True),
        (True, True),
    ]


@pytest.mark.full
@pytest.mark.parametrize(("before", "now", "strictness", "loads"), CASES)
def test_a_difference_of_parameters_is_refused_or_named(before, now, strictness, loads, saved, tmp_path, capsys):
    """What both have is loaded, the optimizer's state too; a parameter that is new starts with new state."""
    flags = f"--train-iters 3 {TRAIN} {strictness} --load {saved[before]} --save {tmp_path}"
    if not loads:
        with pytest.raises(SystemExit):
            run(flags, script=script(now))
        assert tells(capsys.readouterr().err, "decoder.layers.1.gain")
        return
    run(flags.replace("--train-iters 3", "--train-iters 4"), script=script(now))
    told = capsys.readouterr().out
    # a parameter that is new is named once for all layers
    assert "WARNING" in told and tells(told, "decoder.layers.*.gain" if now == "scaled" else "decoder.layers.1.gain")
    assert "loaded checkpoint of iteration 3" in told
    resumed = load_whole_tensors(tmp_path)
    assert (f"model/{GAIN}" in resumed) == (now == "scaled")
    assert (f"optimizer/exp_avg/{GAIN}" in resumed) == (now == "scaled")


def test_what_both_have_is_loaded_and_the_rest_is_new(saved, tmp_path):
    """One step more equals the step of the model that was saved: a gain of 0.5 changes nothing."""
    for name in MODELS:
        flags = f"--train-iters 4 {TRAIN} log_all --load {saved['plain']} --save {tmp_path / name}"
        run(flags, script=script(name))
    plain, scaled = (load_whole_tensors(tmp_path / name) for name in MODELS)
    assert all(torch.equal(tensor, scaled[name]) for name, tensor in plain.items())
    added = scaled.keys() - plain.keys()
    assert added == {name for name in scaled if name.endswith("gain")}
    first, second = (scaled[f"optimizer/{kind}/{FIRST_GAIN}"].double() for kind in ("exp_avg", "exp_avg_sq"))
    gradient = first / 0.1  # of the only step that it has taken
    torch.testing.assert_close(second, gradient**2 * 0.001, rtol=1e-4, atol=0)
