"""Entries of open tables in a fork, and what they compute: a resume by another function of the same name is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from local_ranks import run_ranks
from torch import Tensor

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import manifest_format, open_checkpoint
from megatron.core.inference import load_gpt, read_saved_settings
from megatron.core.ops.attention.kernels import (
    KERNELS,
    SOFTMAX,
    AttentionCase,
    Kernel,
    attention_function,
    kernel_or_fallback,
    unfused_attention,
)
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys
from megatron.core.optimizer import OPTIMIZERS, UpdateRule
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers.tokenizer_registry import TOKENIZERS, NullTokenizer, TokenizerType
from megatron.core.transformer.dot_product_attention import CoreAttention
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from tools import checkpoint_convert

MORE = "--attention-dropout 0 --train-iters 3 --override-opt_param-scheduler"


def mean_of_values(q: Tensor, k: Tensor, v: Tensor, mask: object, dropout: AttentionDropout) -> Tensor:
    """Of all values up to the query's."""
    count = torch.arange(1, v.shape[2] + 1, dtype=v.dtype)[:, None]
    return v.cumsum(dim=2) / count


MEAN = Kernel(mean_of_values)


@pytest.fixture
def trained(said, tmp_path, monkeypatch):
    """A folder with a checkpoint of one step, trained with an entry of a table; which is gone again."""

    def train(table: dict, name: str, entry: object, flags: str) -> Path:
        with monkeypatch.context() as fork:
            fork.setitem(table, name, entry)
            said(f"--attention-dropout 0 --train-iters 2 --save {tmp_path} {flags}")
        return tmp_path

    return train


def functions_in(root: Path) -> dict[str, str]:
    return json.loads((root / "iter_0000002" / "manifest.json").read_text())["state"]["functions"]


def test_a_manifest_says_what_the_entries_compute(trained):
    root = trained(KERNELS, "mean", MEAN, "--attention-backend mean --optimizer muon")
    found = {"optimizer": "Muon", "muon_scalar_optimizer": "AdamW", "tokenizer_type": "NullTokenizer"}
    assert functions_in(root) == {"attention_backend": "mean of a script", **found}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "entry"), [("mean", MEAN), ("auto", MEAN), ("fused", replace(MEAN, computes="means"))]
)
def test_a_checkpoint_of_another_attention_is_refused(name: str, entry: Kernel, trained, refused, said, monkeypatch):
    root = trained(KERNELS, name, entry, f"--attention-backend {name}")
    words = f"{MORE} --load {root}"
    for flags in (words, f"{words} --finetune", words.replace("--load", "--pretrained-checkpoint")):
        message = refused(flags)
        assert f"--attention-backend {name}" in message and repr(functions_in(root)["attention_backend"]) in message
        assert repr(SOFTMAX) in message and "computes=" in message
    with monkeypatch.context() as fork:
        fork.setitem(KERNELS, name, entry)
        assert "loaded checkpoint" in said(f"{words} --attention-backend {name}")


def test_kernels_of_one_function_are_exchanged_freely(trained, said, monkeypatch):
    root = trained(KERNELS, "mean", replace(MEAN, computes="mean of the past"), "--attention-backend mean")
    monkeypatch.setitem(KERNELS, "running", Kernel(mean_of_values, computes="mean of the past"))
    assert "loaded checkpoint" in said(f"{MORE} --load {root} --attention-backend running")


def test_a_kernel_that_names_one_of_ours_in_its_place_computes_the_same(trained, said, monkeypatch):
    faster = Kernel(lambda *case: unfused_attention(*case), instead="unfused")
    root = trained(KERNELS, "faster", faster, "--attention-backend faster")
    assert functions_in(root)["attention_backend"] == SOFTMAX
    assert "loaded checkpoint" in said(f"{MORE} --load {root}")
    monkeypatch.setitem(KERNELS, "ours", Kernel(unfused_attention, refuses=lambda case: None))
    assert attention_function("ours") == SOFTMAX and {attention_function(name) for name in KERNELS} == {SOFTMAX}
    for name, other in (("one", "two"), ("two", "one")):
        monkeypatch.setitem(KERNELS, name, Kernel(lambda *case: None, instead=other))
    assert attention_function("one") == "one of a script"


@pytest.mark.parametrize("name", ["auto", "mean"])
def test_no_folder_is_written_of_attention_that_no_config_json_says(
    name: str, trained, refused, tmp_path, monkeypatch, capsys
):
    llama = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --ffn-hidden-size 32"
    root = trained(KERNELS, name, MEAN, f"--attention-backend {name} {llama}")
    target = tmp_path / "folder"
    assert checkpoint_convert.main(["--load", str(root), "--save-hf", str(target)]) != 0
    told = capsys.readouterr()
    assert repr(SOFTMAX) in told.out + told.err and not target.exists()
    with monkeypatch.context() as fork:
        fork.setitem(KERNELS, name, MEAN)
        assert repr(SOFTMAX) in refused(f"{MORE} {llama} --attention-backend {name} --save-hf {target}")


def test_a_folder_is_written_of_a_script_s_kernel_that_computes_what_ours_do(trained, tmp_path):
    llama = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --ffn-hidden-size 32"
    root = trained(KERNELS, "mine", Kernel(unfused_attention), f"--attention-backend mine {llama}")
    assert checkpoint_convert.main(["--load", str(root), "--save-hf", str(tmp_path / "folder")]) == 0
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["model_type"] == "llama"


def edited(root: Path, change) -> None:
    path = root / "iter_0000002" / "manifest.json"
    manifest = manifest_format.parse_manifest(path.read_text(), path)
    change(manifest.state)
    path.write_text(manifest_format.to_json(manifest))


@pytest.mark.full
def test_an_older_checkpoint_is_compared_by_the_name_of_its_kernel(trained, refused, said, monkeypatch):
    root = trained(KERNELS, "mean", MEAN, "--attention-backend mean")
    edited(root, lambda state: state.pop("functions"))
    assert "'mean of a script'" in refused(f"{MORE} --load {root}")
    monkeypatch.setitem(KERNELS, "mean", replace(MEAN, computes="mean of the past"))
    assert "loaded checkpoint" in said(f"{MORE} --load {root} --attention-backend mean")


def test_functions_that_no_run_has_written_are_refused(trained, refused):
    root = trained(KERNELS, "mean", MEAN, "")
    edited(root, lambda state: state.update(functions={"attention_backend": 3}))
    assert "functions/attention_backend is 3, not a text" in refused(f"{MORE} --load {root}")


def test_a_model_of_another_attention_does_not_generate(trained):
    checkpoint = open_checkpoint(trained(KERNELS, "auto", MEAN, ""))
    settings = read_saved_settings(checkpoint.state, "it")
    with pytest.raises(ConfigError, match=re.escape("'auto of a script', but --attention-backend auto")):
        load_gpt(checkpoint, settings.transformer, vocab_size=settings.vocab_size, positions=settings.positions)


def test_a_refused_case_goes_to_no_kernel_of_another_function(monkeypatch):
    case = AttentionCase(torch.empty(1, 1, 4, 8), torch.empty(1, 1, 4, 8), None, 0.1)
    refuses = lambda case: "has no dropout" if case.dropout else None  # noqa: E731
    monkeypatch.setitem(KERNELS, "mean", Kernel(mean_of_values, refuses, instead="unfused", computes="means"))
    with pytest.raises(
        ConfigError, match=re.escape(f"unfused cannot replace it, because it computes {SOFTMAX!r}, not 'means'")
    ):
        kernel_or_fallback("mean", case)
    assert kernel_or_fallback("mean", case._replace(dropout=0.0)) is KERNELS["mean"]


def test_keys_that_travel_are_refused_by_a_kernel_of_another_function(monkeypatch):
    """Under a name of ours too: the ranks would compute softmax attention, block by block."""
    monkeypatch.setitem(KERNELS, "auto", MEAN)

    def attend(mesh: Mesh) -> None:
        context = LayerContext.from_mesh(mesh, torch.float32, SampleDropoutKeys(0), fills=False)
        CoreAttention(ModelConfig(attention_dropout=0.0), 0, context)(*torch.randn(3, 4, 1, 2, 8))

    with pytest.raises(Exception, match=r"--attention-backend auto computes 'auto of a script'.*--cp-comm-type a2a"):
        run_ranks({"cp": 2}, attend)


# ---------------------------------------------------------------- the other open tables


def backwards(parameters, gradients, states, step) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(gradient, alpha=step.lr)


BACKWARDS = UpdateRule(lambda config: backwards, lambda config: ("exp_avg", "exp_avg_sq"))


@pytest.mark.full
def test_the_state_of_another_update_of_one_name_is_refused(trained, refused, said, monkeypatch):
    root = trained(OPTIMIZERS, "adam", BACKWARDS, "")
    message = refused(f"{MORE} --load {root}")
    assert "'adam of a script'" in message and "'AdamW'" in message and "--no-load-optim" in message
    assert "loaded weights" in said(f"{MORE} --load {root} --no-load-optim")
    monkeypatch.setitem(OPTIMIZERS, "adam", BACKWARDS)
    assert "loaded checkpoint" in said(f"{MORE} --load {root}")


class Reversed(NullTokenizer):
    """The same ids for other words."""

    def tokenize(self, text: str) -> list[int]:
        return [self.vocab_size - 1 - i for i in super().tokenize(text)]


@pytest.mark.full
def test_a_tokenizer_of_one_name_and_other_ids_is_refused(trained, refused, said):
    entry = TokenizerType(lambda config: Reversed(config.vocab_size), ("vocab_size",), ("null_tokenizer_eod_id",))
    root = trained(TOKENIZERS, "NullTokenizer", entry, "")
    message = refused(f"{MORE} --load {root}")
    assert "'NullTokenizer of a script'" in message and "--allow-tokenizer-change" in message
    assert "loaded checkpoint" in said(f"{MORE} --load {root} --allow-tokenizer-change")
