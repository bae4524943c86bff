"""Generation: what the tool writes is what the trained model says, from a checkpoint of any layout."""

import io
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from local_ranks import run_ranks
from said import raises_telling, tells
from script_run import leaving_nothing_of
from tiny_run import GPT2, LLAMA, SEQ, VOCAB, build

import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError, add_flags, option
from megatron.core.dist_checkpointing import manifest_format, open_checkpoint, save_checkpoint
from megatron.core.enums import ModelType
from megatron.core.inference import load_gpt, read_saved_settings
from megatron.core.inference.generate import generate, next_logits, text_pieces
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.inference.top_k_top_p_sampling import greedy
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.tokenizers import build_tokenizer
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer
from megatron.training import get_runtime, pretrain
from megatron.training.checkpointing.save_and_load_run_state import sharded_model_state
from tools.generate import main, read_settings

tokenizers = pytest.importorskip("tokenizers")

LENGTH = 16  # positions of the trained models
ROTARY = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
NULL = "--tokenizer-type NullTokenizer --vocab-size 60"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Checkpoints of short trainings in folders learned, rotary and text; the last beside its tokenizer.json."""
    root = tmp_path_factory.mktemp("runs")
    byte_tokenizer(root / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        train(root / "learned", NULL)
        train(root / "rotary", f"{NULL} {ROTARY} --bf16")
        train(root / "text", f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {root}/tokenizer.json")
    return root


def train(folder: Path, flags: str, provider=pretrain_gpt.model_provider, **more) -> None:
    flags = (
        f"--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} "
        "--micro-batch-size 4 --train-iters 4 --lr 1e-2 --eval-iters 0 --device cpu "
        f"--save-interval 2 --save {folder} {flags}"
    )
    parts = (pretrain_gpt.train_valid_test_datasets_provider, provider)
    pretrain(*parts, ModelType.encoder_or_decoder, pretrain_gpt.forward_step, argv=flags.split(), **more)


@pytest.fixture
def tool(capsys):
    """(exit code, stdout, stderr) of the tool run with these arguments."""

    def call(*arguments):
        code = main(["--device", "cpu", *map(str, arguments)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


def load(folder: Path, iteration: int | None = None):
    """The trained model."""
    checkpoint = open_checkpoint(folder, iteration)
    saved = read_saved_settings(checkpoint.state, str(folder))
    return load_gpt(checkpoint, saved.transformer, vocab_size=saved.vocab_size, positions=saved.positions)


def by_hand(model, ids: list[int], count: int, stop_id: int | None = None) -> list[int]:
    """`count` ids after `ids`, each the highest score at the last position of the last LENGTH tokens."""
    ids, start = list(ids), len(ids)
    for _ in range(count):
        seen = torch.tensor([ids[-LENGTH:]])
        with torch.no_grad():
            scores = model(seen, torch.arange(seen.shape[1])[None], None)[0, -1, : model.vocab_size]
        if scores.argmax() == stop_id:
            break
        ids.append(int(scores.argmax()))
    return ids[start:]


# ---------------------------------------------------------------- the tool


@pytest.mark.parametrize("kind", [pytest.param("learned", marks=pytest.mark.full), "rotary"])
@pytest.mark.full
def test_greedy_text_is_the_argmax_of_the_model(runs, tool, kind):
    expected = by_hand(load(runs / kind), [5, 6, 7], 12, stop_id=60)
    code, out, err = tool("--load", runs / kind, "--prompt", "5 6 7", "--greedy", "--max-new-tokens", 12)
    assert (code, out) == (0, " ".join(map(str, [5, 6, 7, *expected])) + "\n")
    assert "iteration 4 of" in err


@pytest.mark.full
def test_same_seed_gives_the_same_text_however_many_are_asked_for(runs, tool):
    flags = ("--load", runs / "learned", "--prompt", "5 6", "--max-new-tokens", 20, "--temperature", 1.5, "--top-k", 30)
    first = tool(*flags, "--seed", 7)[1]
    assert tool(*flags, "--seed", 7)[1] == first
    assert tool(*flags, "--seed", 8)[1] != first
    many = tool(*flags, "--seed", 7, "--num-samples", 3, "--prompt", "9")[1].splitlines()
    assert many[0::2] == [f"=== prompt {i}, sample {j}" for i in (1, 2) for j in (1, 2, 3)]
    assert many[1] == first.rstrip("\n") and len(set(many[1::2])) == 6


def test_an_empty_prompt_begins_after_the_end_of_a_document(runs, tool):
    code, out, _ = tool("--load", runs / "learned", "--prompt", "", "--greedy", "--max-new-tokens", 5)
    assert (code, [int(word) for word in out.split()]) == (0, by_hand(load(runs / "learned"), [60], 5, stop_id=60))


def test_iteration_and_prompt_file(runs, tool, tmp_path):
    (tmp_path / "prompt.txt").write_text("5 6 7\n")
    flags = ("--load", runs / "learned", "--prompt-file", tmp_path / "prompt.txt", "--greedy", "--max-new-tokens", 8)
    code, out, err = tool(*flags, "--iteration", 2)
    expected = by_hand(load(runs / "learned", 2), [5, 6, 7], 8, stop_id=60)
    assert (code, [int(word) for word in out.split()]) == (0, [5, 6, 7, *expected])
    assert "iteration 2 of" in err


def test_prompts_from_everywhere_go_to_one_file(runs, tool, tmp_path, monkeypatch):
    (tmp_path / "lines.txt").write_text("9 10\n\n11\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"7\n8\n")))
    sources = ("--prompt", "5", "--prompt", "6", "--prompt-file", "-", "--sample-input-file", tmp_path / "lines.txt")
    flags = ("--load", runs / "learned", "--greedy", "--out-seq-length", 4, "--genfile", tmp_path / "out.jsonl")
    code, out, err = tool(*flags, *sources)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (code, out) == (0, "")
    assert [record["prompt"] for record in records] == ["5", "6", "7\n8", "9 10", "11"]
    model = load(runs / "learned")
    for record in records:
        expected = by_hand(model, [int(word) for word in record["prompt"].split()], 4, stop_id=60)
        assert [int(word) for word in record["text"].split()] == [int(w) for w in record["prompt"].split()] + expected
        assert (record["length"], record["finished"]) == (len(expected), len(expected) < 4)
    assert re.search(rf"^{sum(r['length'] for r in records)} tokens in [\d.]+ s: [\d.]+ tokens/s$", err, re.MULTILINE)


BATCH, RECOMPUTE = ("--batch-size", 4), ("--recompute",)


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "kind"),
    [
        pytest.param(BATCH, "learned", id="batch-learned"),
        pytest.param(RECOMPUTE, "rotary", id="recompute-rotary", marks=pytest.mark.full),
        pytest.param(BATCH, "rotary", id="batch-rotary", marks=pytest.mark.full),
        pytest.param(RECOMPUTE, "learned", id="recompute-learned", marks=pytest.mark.full),
    ],
)
def test_neither_batch_nor_cache_changes_the_text(runs, tool, kind, more):
    flags = ("--load", runs / kind, "--prompt", "5 6", "--prompt", "1 2 3 4", "--num-samples", 3)
    flags += ("--max-new-tokens", 20, "--top_k", 20, "--top_p", 0.9)
    assert tool(*flags, *more)[1] == tool(*flags)[1]


def test_a_tokenizer_that_has_moved(runs, tool, tmp_path):
    moved = tmp_path / "elsewhere.json"
    flags = ("--load", runs / "text", "--prompt", "na\u00efve", "--max-new-tokens", 5)
    expected = tool(*flags)
    assert expected[0] == 0 and expected[1].startswith("na\u00efve")
    shutil.move(runs / "tokenizer.json", moved)
    try:
        code, out, err = tool(*flags)
        assert (code, out) == (1, "")
        assert "--tokenizer-model" in err and "no such file" in err and err.count("\n") == 1
        assert tool(*flags, "--tokenizer-model", moved)[1] == expected[1]
    finally:
        shutil.move(moved, runs / "tokenizer.json")


def test_a_tokenizer_flag_that_the_checkpoint_s_tokenizer_does_not_read_is_named(runs, tool):
    flags = ("--load", runs / "learned", "--prompt", "5 6", "--max-new-tokens", 3, "--greedy")
    code, out, err = tool(*flags, "--tokenizer-model", "elsewhere.json")
    assert (code, out) == tool(*flags)[:2] and code == 0
    assert "no effect here: --tokenizer-model: --tokenizer-type NullTokenizer does not read it" in err


@pytest.mark.full
def test_another_tokenizer_of_the_same_size_is_refused_by_what_its_file_holds(runs, tool, tmp_path, capsys):
    """One that has moved, or was laid out anew, is the same; by a run that goes on likewise."""
    held = json.loads((runs / "tokenizer.json").read_text())
    (tmp_path / "same.json").write_text(json.dumps(held | {"padding": None}, indent=4))
    ids = held["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "other.json").write_text(json.dumps(held))
    flags = ("--load", runs / "text", "--prompt", "ab", "--max-new-tokens", 2)
    assert tool(*flags, "--tokenizer-model", tmp_path / "same.json")[:2] == tool(*flags)[:2]
    code, out, err = tool(*flags, "--tokenizer-model", tmp_path / "other.json")
    assert (code, out) == (1, "") and tells(err, "--tokenizer-type")
    text = f"--load {runs}/text --train-iters 4 --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    train(tmp_path / "saved", f"{text}/same.json")
    assert "another tokenizer" not in capsys.readouterr().out
    for more in ("", "--finetune"):
        with pytest.raises(SystemExit) as stop:
            train(tmp_path / "saved", f"{text}/other.json {more}")
        said = capsys.readouterr().err
        assert stop.value.code == 2 and "another tokenizer" in said and tells(said, f"{tmp_path}/other.json")


class Quiet(ParallelTransformerLayer):
    """A fork's layer with the names of a GPT's, which computes something else."""

    def forward(self, x, *more):
        return x + 0.5 * (super().forward(x, *more) - x)


def quiet_gpt(pre_process=True, post_process=True):
    config, parts = get_runtime().config.transformer, get_runtime().model_parts(pre_process, post_process)
    return GPTModel(config, **parts, make_layer=Quiet)


class Louder(GPTModel):
    """Likewise, of a class of its own."""


def louder_gpt(pre_process=True, post_process=True):
    return Louder(get_runtime().config.transformer, **get_runtime().model_parts(pre_process, post_process))


class ScaledMLP(ParallelMLP):
    """Likewise, in place of a part of each layer."""

    def forward(self, x):
        return 0.5 * super().forward(x)


def gpt_of_scaled_mlps(pre_process=True, post_process=True):
    model = pretrain_gpt.model_provider(pre_process, post_process)
    for part in model.modules():
        part.__class__ = ScaledMLP if isinstance(part, ParallelMLP) else type(part)
    return model


def gpt_by_the_same_name(pre_process=True, post_process=True):
    own = type("GPTModel", (GPTModel,), {"__module__": "__main__"})
    return own(get_runtime().config.transformer, **get_runtime().model_parts(pre_process, post_process))


FORKS = {
    "its layers": (quiet_gpt, "GPTModel of Quiet"),
    "its class": (louder_gpt, "Louder"),
    "a part of its layers": (gpt_of_scaled_mlps, "GPTModel of ScaledMLP"),
    "its class of the same name": (gpt_by_the_same_name, "script's GPTModel"),
}


@pytest.mark.full
@pytest.mark.parametrize("provider, name", FORKS.values(), ids=FORKS)
def test_a_checkpoint_of_a_forks_model_is_not_run_with_the_layers_of_a_gpt(provider, name, tool, tmp_path, capsys):
    """Though parameters and settings are those of a GPT. Both models are named, by the tool and by a run that would go on."""
    train(tmp_path, NULL, provider)
    assert open_checkpoint(tmp_path).state["model"] == name
    capsys.readouterr()
    code, out, err = tool("--load", tmp_path, "--prompt", "5 6")
    assert (code, out) == (1, "") and tells(err, f"{name} GPTModel")
    for more in ("", "--finetune"):
        with pytest.raises(SystemExit) as stop:
            train(tmp_path, f"{NULL} --load {tmp_path} {more}")
        said = capsys.readouterr().err
        assert stop.value.code == 2 and tells(said, f"{name} GPTModel")


@dataclass(frozen=True)
class Volume:
    """Volume."""

    volume: float = option(1.0, "of its layers", of_model=True)


@pytest.mark.full
@pytest.mark.parametrize("of_model", [False, True])
def test_a_class_may_say_that_it_is_a_gpt_unless_flags_of_its_own_shape_it(of_model, tool, tmp_path, monkeypatch):
    def own_flags(parser):
        parser.add_argument("--greeting", default="hello")
        if of_model:
            add_flags(parser, Volume)

    monkeypatch.setattr(Louder, "model_name", "GPTModel", raising=False)
    train(tmp_path, NULL, louder_gpt, extra_args_provider=own_flags)
    code, _, err = tool("--load", tmp_path, "--prompt", "5 6")
    assert (
        code == of_model
        and ("volume 1.0" if of_model else "the script's own settings are ignored: greeting hello") in err
    )


def test_a_checkpoint_that_does_not_name_its_model_is_taken_for_a_gpt(runs, tool, tmp_path):
    shutil.copytree(runs / "learned", tmp_path / "older")
    path = tmp_path / "older" / "iter_0000004" / "manifest.json"
    manifest = manifest_format.parse_manifest(path.read_text(), path)
    for name in ("model", "tokenizer_sha256"):
        del manifest.state[name]
    path.write_text(manifest_format.to_json(manifest))
    code, _, err = tool("--load", tmp_path / "older", "--prompt", "5 6")
    assert code == 0 and tells(err, "GPT")


def test_text_comes_in_whole_characters(runs):
    from megatron.core.tokenizers import TokenizerConfig, build_tokenizer

    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(runs / "tokenizer.json")))
    before, text = "a\u00ef", "\u4f60 x\U0001f600"
    ids = tokenizer.tokenize(text)
    pieces = [piece for piece in text_pieces(tokenizer, tokenizer.tokenize(before), ids) if piece]
    assert pieces == ["\u4f60", " ", "x", "\U0001f600"]
    cut = list(text_pieces(tokenizer, tokenizer.tokenize(before), ids[:-1]))
    assert "".join(cut).startswith("\u4f60 x") and cut[-1].endswith("\ufffd"), "half a character comes at the end"


LOAD = ("--load", "learned")
PROMPT = (*LOAD, "--prompt", "5 6")


FLAG_MISTAKES = [
    (("--prompt", "5"), "--load"),
    (LOAD, "--prompt TEXT --prompt-file FILE"),
    ((*PROMPT, "--max-new-tokens", "0"), "--max-new-tokens 0 1"),
    ((*PROMPT, "--num-samples", "0"), "--num-samples 0 1"),
    ((*PROMPT, "--batch-size", "0"), "--batch-size 0 1"),
    ((*PROMPT, "--seed", "-1"), "--seed -1 0 2^32"),
    ((*PROMPT, "--iteration", "-1"), "--iteration -1"),
    ((*PROMPT, "--greedy", "--num-samples", "2"), "--greedy 2"),
    ((*PROMPT, "--temperature", "0"), "--temperature is 0.0"),
    ((*PROMPT, "--tempreture", "1"), "--tempreture --temperature"),
    ((*PROMPT, "--tensor-model-parallel-size", "2"), "1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size"),
    ((*PROMPT, "--context-parallel-size", "2"), "1 --pipeline-model-parallel-size 1 --context-parallel-size 2"),
    ((*LOAD, "--prompt-file", "-", "--sample-input-file", "-"), "cannot both be standard input"),
    # what only the model of --load shows
    ((*PROMPT, "--pretrained-checkpoint", "rotary"), "--pretrained-checkpoint rotary"),
    ((*PROMPT, "--cp-comm-type", "ring"), "--cp-comm-type ring p2p"),
    ((*PROMPT, "--cp-comm-type", "p2p", "p2p", "p2p"), "--cp-comm-type 3 --num-layers 2"),
    ((*PROMPT, "--hierarchical-context-parallel-sizes", "2", "1"), "--hierarchical-context-parallel-sizes 2 1"),
]
OTHER_MISTAKES = [
    ((*PROMPT, "--iteration", "3"), "2 4"),
    ((*LOAD, "--prompt", "five"), "five NullTokenizer"),
    ((*LOAD, "--prompt", "61"), "0 60"),
    ((*LOAD, "--prompt", "\udcff"), "0"),
    ((*LOAD, "--prompt", "7 " * 17), "17 16 --seq-length"),
    ((*LOAD, "--prompt-file", "absent.txt"), "--prompt-file absent.txt"),
    ((*LOAD, "--prompt-file", "bytes.txt"), "bytes.txt UTF-8 1"),
    ((*LOAD, "--prompt-file", "blank.txt"), "blank.txt --prompt"),
    ((*LOAD, "--sample-input-file", "blank.txt"), "--sample-input-file blank.txt"),
    ((*PROMPT, "--genfile", "nowhere/out.jsonl"), "--genfile nowhere/out.jsonl"),
    ((*PROMPT, "--vocab-size", "70"), "61 NullTokenizer 71"),
    ((*PROMPT, "--tokenizer-type", "GPT2BPETokenizer"), "--tokenizer-type GPT2BPETokenizer --vocab-file"),
    (("--load", "nowhere", "--prompt", "5"), "nowhere"),
    (("--load", ".", "--prompt", "5"), "latest_checkpointed_iteration.txt"),
]


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [(2, *mistake) for mistake in FLAG_MISTAKES] + [(1, *mistake) for mistake in OTHER_MISTAKES],
)
def test_mistakes_are_one_line(runs, tool, monkeypatch, code, arguments, message):
    """Exit code 2 says that the flags are wrong, 1 that something else is."""
    monkeypatch.chdir(runs)
    Path("bytes.txt").write_bytes(b"5\xff")
    Path("blank.txt").write_bytes(b" \n\n")
    got, out, err = tool(*arguments)
    assert (got, out) == (code, "") and tells(err, message)
    assert err.startswith("generate: ") and err.count("\n") == 1


def test_another_iteration_than_the_newest_is_read_with_a_warning(runs, tool, tmp_path):
    shutil.copytree(runs / "learned", tmp_path / "learned")
    call = ("--load", tmp_path / "learned", "--prompt", "5", "--max-new-tokens", 1)
    pointer = tmp_path / "learned" / "latest_checkpointed_iteration.txt"
    assert "WARNING" not in tool(*call)[2]
    pointer.write_text("2\n")
    for told in (("iteration 2", "iteration 4"), ("iteration 4",)):
        code, _, err = tool(*call)
        (warning,) = [line for line in err.splitlines() if line.startswith("WARNING")]
        assert code == 0 and all(text in warning for text in told) and f"{told[0]} of " in err
        pointer.unlink(missing_ok=True)
    assert "WARNING" not in tool(*call, "--iteration", 2)[2]


def test_a_state_that_names_no_model_is_refused():
    with pytest.raises(ValueError, match=r"^X "):
        read_saved_settings({"vocab_size": 5}, "X")
    saved = {"transformer": {"num_layers": 2, "num_wings": 2}, "data": {}, "tokenizer": {}}
    with pytest.raises(ValueError, match="num_wings"):
        read_saved_settings({"vocab_size": 5, "config": saved}, "X")


def test_experts_have_no_capacity_at_inference():
    transformer = {"num_experts": 4, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    config = {"transformer": transformer, "data": {}, "tokenizer": {}}
    read = read_saved_settings({"vocab_size": 5, "config": config}, "X").transformer
    assert (read.num_experts, read.moe_expert_capacity_factor) == (4, None)


def test_a_tokenizer_that_a_script_adds_is_there_with_that_script():
    script = Path(__file__).parents[2] / "promises/tokenizer/pretrain.py"
    config = {"transformer": {}, "data": {}, "tokenizer": {"tokenizer_type": "Letters"}}
    with raises_telling(ConfigError, "X --tokenizer-type Letters --model"):
        read_saved_settings({"vocab_size": 5, "config": config}, "X")
    with leaving_nothing_of(script.parent):
        read_settings(["--load", "X", "--prompt", "fox", "--model", str(script)])
        saved = read_saved_settings({"vocab_size": 5, "config": config}, "X")
        assert build_tokenizer(saved.tokenizer).tokenize("ab") == [0, 1]


# ---------------------------------------------------------------- the parts


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=("gpt2", "llama"))
def test_weights_of_any_layout_make_the_same_model(tmp_path, config, tp, pp):
    def save(mesh):
        chunk, _ = build(mesh, config, sp=tp > 1)
        save_checkpoint(tmp_path, 1, sharded_model_state([chunk], mesh), {}, mesh["world"])

    run_ranks({"tp": tp, "pp": pp, "dp": 2}, save)
    loaded = load_gpt(open_checkpoint(tmp_path), config, vocab_size=VOCAB, positions=SEQ)
    expected = build(single_rank_mesh(), config, sp=False)[0].module  # initial weights are the same in every layout
    for (name, a), (_, b) in zip(loaded.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    expected.eval()
    assert torch.equal(next_logits(loaded, [3, 1, 4]), next_logits(expected, [3, 1, 4]))


def test_a_model_of_another_kind_is_refused(tmp_path):
    def save(mesh):
        save_checkpoint(tmp_path, 1, sharded_model_state([build(mesh, GPT2, sp=False)[0]], mesh), {}, mesh["world"])

    run_ranks({"tp": 1, "pp": 1, "dp": 1}, save)
    with pytest.raises(ValueError, match="GPT"):
        load_gpt(open_checkpoint(tmp_path), LLAMA, vocab_size=VOCAB, positions=SEQ)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["learned", "rotary"])
def test_a_text_longer_than_the_window_slides(runs, kind):
    model, count = load(runs / kind), 3 * LENGTH
    ids = list(generate(model, [5, 6, 7], max_new_tokens=count, max_length=LENGTH, stop_id=None, choose=greedy))
    assert len(ids) == count and ids == by_hand(model, [5, 6, 7], count)


def test_a_text_that_grows_beyond_the_old_length_of_longrope_is_rotated_anew_from_there_on():
    scaling = {"factor": 2, "original_max_position_embeddings": 5, "short_factor": [1, 3], "long_factor": [5, 2]}
    config = replace(LLAMA, rope_scaling=json.dumps({"rope_type": "longrope"} | scaling))
    model, seen, ids = build(single_rank_mesh(), config, sp=False)[0].module.eval(), [], [1, 2, 3]

    def choose(scores):
        seen.append(scores)
        return greedy(scores)

    limits = {"max_new_tokens": 5, "max_length": SEQ}
    for new in generate(model, ids.copy(), **limits, stop_id=None, choose=choose):
        with torch.no_grad():
            whole = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1, : model.vocab_size]
        torch.testing.assert_close(seen[-1], whole, rtol=0, atol=1e-12)
        ids.append(new)
    assert len(ids) == SEQ


def test_generation_keeps_the_mode_and_the_gradients_of_its_caller():
    model = build(single_rank_mesh(), GPT2, sp=False)[0].module  # in training mode, with dropout
    model.language_model.output_layer.eval()
    modes = [module.training for module in model.modules()]
    ids = generate(model, [1, 2], max_new_tokens=5, max_length=SEQ, stop_id=None, choose=greedy)
    first = next(ids)
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled(), "between two ids"
    model.eval()
    assert [first, *ids] == list(generate(model, [1, 2], max_new_tokens=5, max_length=SEQ, stop_id=None, choose=greedy))


def test_the_stop_id_ends_the_text_and_padding_is_never_chosen():
    model = build(single_rank_mesh(), GPT2, sp=False)[0].module
    seen = []

    def choose(scores):
        assert not scores.requires_grad, "no graph is kept"
        seen.append(len(scores))
        return len(seen)

    settings = {"max_new_tokens": 9, "max_length": SEQ, "choose": choose}
    assert list(generate(model, [0], stop_id=4, **settings)) == [1, 2, 3]
    seen.clear()
    assert list(generate(model, [0], stop_id=[9, 4, 60], **settings)) == [1, 2, 3]
    assert seen == [VOCAB] * 4 and model.language_model.embedding.word_embeddings.weight.shape[0] > VOCAB


PROMPTS_AND_MESSAGES = [
    ([], {}, "the prompt has no token"),
    ([0, VOCAB], {}, f"ids from 0 to {VOCAB}, the model those from 0 to {VOCAB - 1}"),
    ([-1], {}, "ids from -1 to -1"),
    ([1], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
    ([1], {"max_length": 0}, "max_length is 0; it must be at least 1"),
    ([1, 2, 3], {"max_length": 2}, "the prompt has 3 tokens, and the model sees 2 at once; shorten it"),
]


@pytest.mark.parametrize(("prompt", "changed", "message"), PROMPTS_AND_MESSAGES)
def test_what_cannot_be_generated_is_refused_at_once(prompt, changed, message):
    model = build(single_rank_mesh(), GPT2, sp=False)[0].module
    settings = {"max_new_tokens": 1, "max_length": SEQ, "stop_id": None, "choose": greedy} | changed
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, **settings)


def test_the_saved_settings_are_json(runs):
    state = open_checkpoint(runs / "learned").state
    assert read_saved_settings(json.loads(json.dumps(state)), "X") == read_saved_settings(state, "X")
