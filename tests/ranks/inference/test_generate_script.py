"""tools/generate.py --model SCRIPT: the script's own model, built by its model_provider, writes what that model says."""

import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from said import tells
from same_code import ROOT
from script_run import leaving_nothing_of

from megatron.core.dist_checkpointing import load_whole_tensors, open_checkpoint
from megatron.core.inference import greedy, load_gpt, read_saved_settings
from megatron.core.inference.generate import generate, generate_batch
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.attention.kv_cache import CACHES
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.training.training import run_script
from tools.generate import main
from tools.script import script_at

LENGTH = 16
PROMPT = [5, 6, 7]
TINY = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} --micro-batch-size 4 --train-iters 2 "
    "--lr 1e-2 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 60 --device cpu --fp64 "
)


def forgetting(script: Path) -> AbstractContextManager:
    """Afterwards the script's modules are not imported; those of the repository's own folder stay."""
    return nullcontext() if script.parent == ROOT else leaving_nothing_of(script.parent)


def train(script: Path, flags: str) -> None:
    with forgetting(script):
        run_script(script_at(str(script))._replace(argv=(TINY + flags).split()))


@pytest.fixture
def tool(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """(exit code, stdout, stderr) of the tool run with these arguments, and with the prompt."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    caches = dict(CACHES)

    def call(script: Path | None, *arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        words = ["--device", "cpu", "--prompt", " ".join(map(str, PROMPT)), "--greedy", "--max-new-tokens", "6"]
        words += map(str, arguments)
        if script is None:
            return main(words), *capsys.readouterr()
        with forgetting(script):
            return main([*words, "--model", str(script)]), *capsys.readouterr()

    yield call
    CACHES.data = caches


def text_of(ids: list[int]) -> str:
    return " ".join(map(str, [*PROMPT, *ids])) + "\n"


def continued(model: torch.nn.Module) -> list[int]:
    """Six ids, each the highest score of the plain forward over the text so far."""
    ids = list(PROMPT)
    for _ in range(6):
        with torch.no_grad():
            scores = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0, -1, : model.vocab_size]
        ids.append(int(scores.argmax()))
    return ids[len(PROMPT) :]


LORA = ROOT / "examples" / "lora" / "pretrain.py"


@pytest.mark.full
def test_adapters_write_what_the_base_with_merged_weights_writes(tool, tmp_path):
    """Oracle: a plain GPTModel, loaded without the script, whose weights are W + alpha / rank B A."""
    train(ROOT / "pretrain_gpt.py", f"--mock-data --save {tmp_path / 'base'}")
    base = f"--pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    train(LORA, f"--mock-data --lora-rank 2 --lora-alpha 64 --train-iters 6 {base} --save {tmp_path / 'adapted'}")

    checkpoint = open_checkpoint(tmp_path / "base")
    saved = read_saved_settings(checkpoint.state, "base")
    model = load_gpt(checkpoint, saved.transformer, vocab_size=saved.vocab_size, positions=saved.positions)
    before = continued(model)
    adapted = {name.removeprefix("model/"): x for name, x in load_whole_tensors(tmp_path / "adapted").items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            linear = name.removesuffix(".weight")
            if f"{linear}.lora_a" in adapted:
                parameter += 32 * adapted[f"{linear}.lora_b"] @ adapted[f"{linear}.lora_a"]
    expected = continued(model)
    assert expected != before, "or nothing would be seen of the adapters"

    code, out, err = tool(LORA, "--load", tmp_path / "adapted")
    assert (code, out) == (0, text_of(expected)) and "settings are ignored" not in err
    assert tool(LORA, "--load", tmp_path / "adapted", "--recompute")[1] == out
    code, out, err = tool(None, "--load", tmp_path / "adapted")
    assert (code, out) == (1, "") and tells(err, "lora_rank 2 --model")
    code, out, err = tool(LORA, "--load", tmp_path / "base")
    assert (code, out) == (
        1,
        "",
    ) and "contains a GPTModel, and the script of --model builds a GPTModel of ColumnLoRA" in err
    code, out, err = tool(ROOT / "pretrain_gpt.py", "--load", tmp_path / "adapted")
    assert (code, out) == (1, "") and tells(err, "lora_rank 2 flag")


OWN = """
import sys

sys.path.insert(0, {root!r})

from functools import partial

import torch
from torch import nn

import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.spec_utils import ContextSpec, ModuleSpec
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer, TransformerLayer, submodules_of
from megatron.training import get_args, get_runtime, pretrain

{parts}

def model_provider(pre_process=True, post_process=True, vp_stage=None):
    runtime, args = get_runtime(), get_args()
    assert (args.hidden_size, args.seq_length, args.greeting) == (32, 16, "hi")
    return GPTModel(runtime.config.transformer, **runtime.model_parts(pre_process, post_process, vp_stage), {layer})


def own_flags(parser):
    parser.add_argument("--greeting", default="hello")


if __name__ == "__main__":
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, pretrain_gpt.forward_step,
        extra_args_provider=own_flags, rules=GPTModel.rules,
    )
"""

LAYER = """
class Quiet(ParallelTransformerLayer):
    def forward(self, x, mask=None, angles=None{cache}):
        return x + 0.5 * (super().forward(x, mask, angles{cache_argument}) - x)
"""
ATTENTION = """
class Half(ParallelAttention):
    def forward(self, x, mask=None, angles=None, cache=None):
        return 0.5 * super().forward(x, mask, angles, cache)

def spec_of(config):
    parts = submodules_of(config)
    parts.self_attention = ContextSpec(Half)
    return ModuleSpec(TransformerLayer, submodules=parts)
"""
OF_MEGATRON = """
class Theirs(nn.Module):
    def __init__(self, config, layer_number, attn_mask_type=None, *, layer_context):
        super().__init__()
        self.inner = ParallelAttention(get_runtime().config.transformer, layer_number - 1, layer_context)

    def forward(self, hidden_states, attention_mask=None, rotary_pos_emb=None):
        return self.inner(hidden_states, attention_mask), None

def spec_of(config):
    parts = submodules_of(config)
    parts.self_attention = Theirs
    return ModuleSpec(TransformerLayer, submodules=parts)
"""
SPEC = "spec=spec_of(runtime.config.transformer)"
GENERATING = {
    "a layer": (LAYER.format(cache=", cache=None", cache_argument=", cache"), "make_layer=Quiet"),
    "an attention in a spec": (ATTENTION, SPEC),
    "an attention of a layer": (ATTENTION, "make_layer=partial(ParallelTransformerLayer, make_attention=Half)"),
}
REFUSED = {"Quiet": (LAYER.format(cache="", cache_argument=""), "make_layer=Quiet"), "Theirs": (OF_MEGATRON, SPEC)}


def write_script(folder: Path, parts: str, layer: str) -> Path:
    path = folder / "own.py"
    path.write_text(textwrap.dedent(OWN).format(root=str(ROOT), parts=parts, layer=layer))
    return path


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (i > 0)) for i, case in enumerate(GENERATING)]
)
def test_a_layer_or_attention_of_a_script_writes_what_its_plain_forward_says(case, tool, tmp_path):
    """Its flags have the values of the training, though the tool is not given them."""
    script = write_script(tmp_path, *GENERATING[case])
    train(script, f"--mock-data --greeting hi --init-method-std 0.3 --save {tmp_path / 'saved'}")
    code, out, _ = tool(script, "--load", tmp_path / "saved")
    assert code == 0

    # oracle: the same parameters in plain layers, whose branches are halved in their last weights or by a wrapper
    checkpoint = open_checkpoint(tmp_path / "saved")
    saved = read_saved_settings(checkpoint.state, "saved")
    context = LayerContext.from_mesh(single_rank_mesh(), torch.float64)
    parts = {"vocab_size": saved.vocab_size, "positions": saved.positions, "layers": range(2), "context": context}
    plain = GPTModel(saved.transformer, **parts).eval()
    tensors = load_whole_tensors(tmp_path / "saved")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            value = tensors[f"model/{name}"]
            parameter.zero_()
            parameter[tuple(slice(0, size) for size in value.shape)] = value
    if case == "a layer":
        for layer in plain.language_model.decoder.layers:
            layer.register_forward_hook(
                lambda _, inputs, output: (inputs[0] + 0.5 * (output[0] - inputs[0]), output[1])
            )
    else:
        for layer in plain.language_model.decoder.layers:
            layer.self_attention.register_forward_hook(lambda _, inputs, output: 0.5 * output)
    assert out == text_of(continued(plain))

    code, out, err = tool(None, "--load", tmp_path / "saved")
    assert (code, out) == (1, "") and tells(err, "GPTModel --model")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (i > 0)) for i, kind in enumerate(REFUSED)]
)
def test_a_layer_without_a_cache_is_refused_in_words(kind, tool, tmp_path):
    script = write_script(tmp_path, *REFUSED[kind])
    train(script, f"--mock-data --greeting hi --save {tmp_path / 'saved'}")
    code, out, err = tool(script, "--load", tmp_path / "saved")
    assert (code, out) == (1, "") and err.startswith(
        f"generate: {kind} takes no key/value cache, so it cannot generate text"
    )


def test_a_model_without_a_cache_is_refused_in_words():
    class Own(torch.nn.Module):
        vocab_size = 9

        def forward(self, tokens, positions):
            return tokens

    options = {"max_new_tokens": 1, "max_length": 4, "stop_id": None}
    with pytest.raises(ValueError, match="Own cannot generate text, since its forward takes no argument `cache`"):
        generate_batch(Own(), [[1]], choose=[greedy], **options)
    with pytest.raises(ValueError, match="Own cannot generate text"):
        generate(Own(), [1], choose=greedy, **options)
