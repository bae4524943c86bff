"""finetune_gpt.py from a published folder: layouts, packing, resumes, what is saved, and what is refused."""

import json
import re
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from cases import write_folders
from local_ranks import run_ranks
from script_run import settings_of, trainer_of
from sft_folder import (
    CHATML,
    VOCABULARY,
    FinetuneScript,
    chats,
    counting_chats,
    read_safetensors,
    write_lines,
    write_model,
    write_safetensors,
)
from thread_writers import thread_writers

import finetune_gpt
import pretrain_gpt
from megatron.convert import open_foreign
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing import load_whole_tensors, open_checkpoint
from megatron.core.distributed.sync_and_gather_params import full_state_dict
from megatron.core.inference import read_saved_settings
from megatron.core.inference.generate import generate
from megatron.core.inference.load_model import load_gpt
from megatron.core.inference.score import score
from megatron.core.parallel.mesh import Mesh
from megatron.core.peft.lora_config import LoRAConfig
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.validation import check
from tools import evaluate, generate as generate_tool, lora as lora_tool

SIZES = (
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant --log-interval 1"
)
LORA = " --lora-rank 2 --lora-dropout 0.2"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("base")
    write_model(root / "model")
    write_lines(root / "chats.jsonl", chats(24))
    return root


def flags_of(base: Path, more: str = "") -> str:
    data = f"--data-path {base}/chats.jsonl --split 1,0,0 --pretrained-checkpoint {base}/model --device cpu"
    return f"{SIZES} {data} {more}"


def train(base: Path, sizes: dict[str, int], more: str) -> list[dict[str, torch.Tensor]]:
    flags = flags_of(base, more)
    script = FinetuneScript(flags)

    def train_rank(mesh: Mesh) -> dict[str, torch.Tensor]:
        with trainer_of(script, mesh, flags, predicts=False) as trainer:
            trainer.run()
            return {name: p.clone() for chunk in trainer.model for name, p in full_state_dict(chunk.module).items()}

    return run_ranks(sizes, train_rank)


LAYOUTS = {
    "tp sp zero 3": ({"tp": 2, "dp": 2}, " --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3"),
    "pp cp": ({"pp": 2, "cp": 2}, " --pipeline-model-parallel-size 2 --context-parallel-size 2"),
}


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        pytest.param("tp sp zero 3", LORA, marks=pytest.mark.full),
        pytest.param("pp cp", "", marks=pytest.mark.sweep),
        pytest.param("pp cp", LORA, marks=pytest.mark.sweep),
        pytest.param("tp sp zero 3", "", marks=pytest.mark.sweep),
    ],
)
def test_any_layout_trains_packed_examples_as_one_process(layout: str, lora: str, base: Path, tmp_path: Path):
    """Of which the micro batches are cut otherwise: the loss is divided by the answers' tokens of the whole batch."""
    sizes, flags = LAYOUTS[layout]
    fp64 = (
        f" --fp64 --train-iters 2 --optimizer sgd --lr 1{lora}"  # Adam's first step is a sign, also of a rounding error
    )
    train(base, sizes, f"{fp64}{flags} --save {tmp_path}/layout")
    train(base, {}, f"{fp64} --micro-batch-size 2 --save {tmp_path}/alone")
    got, expected = load_whole_tensors(tmp_path / "layout"), load_whole_tensors(tmp_path / "alone")
    names = [name for name in expected if name.startswith("model/")]
    assert got.keys() == expected.keys() and len(names) > 10
    for name in names:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize(
    "lora", [pytest.param("", marks=pytest.mark.sweep, id="all weights"), pytest.param(LORA, id="adapters")]
)
def test_a_resume_is_bit_for_bit_and_the_base_keeps_its_bytes(lora: str, base: Path, tmp_path: Path, capsys):
    before = {path.name: path.read_bytes() for path in (base / "model").iterdir()}
    (whole,) = train(base, {}, f"{lora} --train-iters 4 --save {tmp_path}/whole")
    train(base, {}, f"{lora} --train-iters 2 --save {tmp_path}/half")
    (again,) = train(base, {}, f"{lora} --train-iters 4 --load {tmp_path}/half")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    assert {path.name: path.read_bytes() for path in (base / "model").iterdir()} == before
    if lora:
        said = capsys.readouterr().out
        assert (
            "has no adapters, as their base: the 28 parameters of them get first values" in said
            and "WARNING" not in said
        )
        saved = [name for name in load_whole_tensors(tmp_path / "half") if name.startswith("model/")]
        assert len(saved) == 28 and all("lora" in name for name in saved)
        weights = read_safetensors(base / "model/model.safetensors")
        proj = whole["language_model.decoder.layers.0.self_attention.linear_proj.weight"]
        assert torch.equal(proj, torch.from_numpy(weights["model.layers.0.self_attn.o_proj.weight"].copy()))
        write_model(tmp_path / "other", seed=1)
        with pytest.raises(RuntimeError, match="is not the base of --load"):
            train(base, {}, f"{lora} --train-iters 4 --load {tmp_path}/half --pretrained-checkpoint {tmp_path}/other")


@pytest.fixture
def writers() -> Iterator[None]:
    with thread_writers():
        yield


@pytest.mark.sweep
def test_a_resume_of_asynchronous_saves_is_bit_for_bit_and_may_have_another_layout(
    base: Path, tmp_path: Path, writers: None
):
    sizes, layout = LAYOUTS["tp sp zero 3"]
    flags = f"{LORA} --fp64 --optimizer sgd --lr 1"
    saved = f"{flags}{layout} --async-save"
    whole = train(base, sizes, f"{saved} --train-iters 4 --save {tmp_path}/whole")
    train(base, sizes, f"{saved} --train-iters 2 --save {tmp_path}/half")
    again = train(base, sizes, f"{saved} --train-iters 4 --load {tmp_path}/half --save {tmp_path}/again")
    for before, after in zip(whole, again, strict=True):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    expected = load_whole_tensors(tmp_path / "whole")
    for name, value in load_whole_tensors(tmp_path / "again").items():
        assert torch.equal(value, expected[name]), name
    sizes, layout = LAYOUTS["pp cp"]
    for other, more in ((sizes, layout), ({}, " --micro-batch-size 2")):
        out = tmp_path / f"of-{len(other)}"
        train(base, other, f"{flags}{more} --train-iters 4 --load {tmp_path}/half --save {out} --async-save")
        got = load_whole_tensors(out)
        for name in [name for name in expected if name.startswith("model/")]:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_merged_folder_has_the_logits_of_the_adapters(kind: str, base: Path, tmp_path: Path):
    folder = write_model(tmp_path / "model", kind)
    flags = f"{LORA} --pretrained-checkpoint {folder}"
    train(base, {}, f"{flags} --train-iters 4 --save {tmp_path}/own")
    assert lora_tool.main(["--load", f"{tmp_path}/own", "--base", str(folder), "--merge", f"{tmp_path}/merged"]) == 0
    tokens, positions = torch.arange(40)[None] * 6, torch.arange(40)[None]
    loading = flags_of(base, f"{flags} --train-iters 4 --load {tmp_path}/own")
    script = FinetuneScript(loading)

    def logits_of_adapters(mesh: Mesh) -> torch.Tensor:
        with trainer_of(script, mesh, loading, predicts=False) as trainer, torch.no_grad():
            return trainer.model[0].module.eval()(tokens, positions, None)

    def logits_of(path: Path) -> torch.Tensor:
        checkpoint = open_foreign(path)
        config = ModelConfig(**checkpoint.state["config"]["transformer"])
        with torch.no_grad():
            return load_gpt(checkpoint, config, vocab_size=checkpoint.state["vocab_size"], positions=256)(
                tokens, positions, None
            )

    (expected,) = run_ranks({}, logits_of_adapters)
    words = VOCABULARY + 5
    torch.testing.assert_close(logits_of(tmp_path / "merged")[..., :words], expected[..., :words], rtol=0, atol=1e-6)
    assert (logits_of(folder) - expected)[..., :words].abs().max() > 1e-3


@pytest.mark.sweep
def test_a_model_with_experts_has_adapters_beside_them(tmp_path: Path, capsys):
    """On attention, and on the MLP of the layer without experts, whose stage is another."""
    base = write_folders(tmp_path, ["qwen3_moe"])["qwen3_moe"]
    lines = [{"prompt": f"{i % 7} {i % 5} 3", "completion": f"{i % 3} 9"} for i in range(16)]
    write_lines(tmp_path / "numbers.jsonl", lines)
    words = json.loads((base / "config.json").read_text())["vocab_size"]
    data = f"--data-path {tmp_path}/numbers.jsonl --split 1,0,0 --tokenizer-type NullTokenizer --vocab-size {words - 1}"
    flags = f"{SIZES} {data} --pretrained-checkpoint {base} --device cpu --fp64 --optimizer sgd --lr 1 --train-iters 2"
    flags = (
        flags.replace("--seq-length 64", "--seq-length 16")
        + " --lora-rank 2 --lora-target-modules linear_proj linear_fc2"
    )

    def work(mesh: Mesh, flags: str) -> None:
        with trainer_of(FinetuneScript(flags), mesh, flags, predicts=False) as trainer:
            trainer.run()

    layout = " --pipeline-model-parallel-size 3 --expert-model-parallel-size 2"
    run_ranks({"pp": 3, "dp": 2, "ep": 2}, partial(work, flags=f"{flags}{layout} --save {tmp_path}/layout"))
    run_ranks({}, partial(work, flags=f"{flags} --save {tmp_path}/alone"))
    got, expected = load_whole_tensors(tmp_path / "layout"), load_whole_tensors(tmp_path / "alone")
    trained = [name for name in expected if name.startswith("model/")]
    assert len(trained) == 2 * (3 + 1)
    for name in trained:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-10)
    assert lora_tool.main(["--load", f"{tmp_path}/layout", "--save-peft", f"{tmp_path}/peft"]) == 0
    assert "WARNING: model.layers.0.mlp.down_proj is named as experts' matrices are" in capsys.readouterr().out
    targets = json.loads((tmp_path / "peft/adapter_config.json").read_text())["target_modules"]
    assert targets == ["model.layers.0.mlp.down_proj", "o_proj"]
    again = flags.partition(" --lora-rank")[0] + f" --lora-adapter {tmp_path}/peft"
    assert FinetuneScript(again).args_defaults["lora_target_modules"] == ["linear_proj", "linear_fc2"]

    write_folders(tmp_path, ["mixtral"])
    of_experts = flags.replace("qwen3_moe", "mixtral").replace("linear_proj", "linear_fc1")
    with pytest.raises(
        RuntimeError, match=r"linear_fc1 linear_fc2: the model's MLPs are experts; give experts\.linear_fc1"
    ):
        run_ranks({}, partial(work, flags=of_experts))


@pytest.mark.sweep
def test_a_tuned_folder_keeps_template_and_stop_ids_and_has_learned_when_to_stop(tmp_path: Path, capsys):
    """Where pad, end of text and end of turn are one id."""
    write_model(tmp_path / "model", one_id=True)
    records = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "ok" * (1 + i % 2)}]}
        for i in range(20)
    ]
    write_lines(tmp_path / "chats.jsonl", records)
    train(tmp_path, {}, f" --epochs 2 --save-hf {tmp_path}/tuned")
    (folder,) = (tmp_path / "tuned").iterdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHATML


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("--data-path missing.jsonl", r"--data-path missing\.jsonl: there is no such file; --sft reads JSON lines"),
        ("--mock-data", "exclude each other|--mock-data has none"),
        (
            "--data-path 0.5 {base}/chats.jsonl 0.5 {base}/chats.jsonl --epochs 2",
            "--epochs 2: a blend with weights has no epoch, since its files are repeated as the weights ask; give --train-iters",
        ),
        (
            "--lora-rank 2 --lora-target-modules linear_x q_proj",
            "--lora-target-modules linear_x: there is no such linear",
        ),
        ("--lora-rank 2 --lora-target-modules linear_qkv linear_q", "gives linear_qkv and parts of it"),
        (
            "--lora-rank 2 --save-hf x",
            "--save-hf writes a whole model, and this run trains adapters; give --save, and merge",
        ),
        ("--lora-rank 0", "--lora-rank is 0; it must be at least 1"),
        ("--lora-dropout 0.1", "--lora-dropout needs --lora-rank: without it all weights are trained"),
        ("--data-path {base}", "it is a folder; --sft reads JSON lines"),
        ("--epochs 1 --global-batch-size 640", "--epochs 1 are .* fewer than one step of --global-batch-size 640"),
        ("--epochs 2 --train-iters 3", "--epochs 2 and --train-iters both give the length; give one"),
        (
            "--lora-adapter {base}/model",
            "has no adapter_config.json; give a folder that PEFT or tools/lora.py has written",
        ),
    ],
)
def test_bad_settings_are_one_line(more: str, problem: str, base: Path):
    flags = flags_of(base, more.format(base=base))
    with pytest.raises(ConfigError) as error:
        script = FinetuneScript(flags)
        config, args = settings_of(script, flags + ("" if "--epochs" in more else " --train-iters 1"))
        check(config, 1)
        if problems := config.data.missing_files():
            raise ConfigError(problems)
        build(LoRAConfig, vars(args))
    assert re.search(problem, " ".join(error.value.problems))


def test_targets_that_the_model_does_not_have_are_refused(base: Path):
    with pytest.raises(RuntimeError, match="--lora-target-modules linear_fc1_gate: the model has no such linear"):
        write_model(base / "gpt2", "gpt2")
        more = f" --lora-rank 2 --lora-target-modules linear_fc1_gate linear_proj --train-iters 1 --pretrained-checkpoint {base}/gpt2"
        train(base, {}, more)
    with pytest.raises(RuntimeError, match="output_layer: the model's output layer has the embedding's weight"):
        train(base, {}, more.replace("linear_fc1_gate linear_proj", "output_layer"))


def test_an_adapter_of_another_base_is_refused_before_anything_is_written(base: Path, tmp_path: Path, capsys):
    adapter = tmp_path / "adapter"
    train(base, {}, f" --lora-rank 2 --train-iters 1 --save {tmp_path}/own")

    # tools open adapters alone with the base of the training, in any layout, and no other base
    assert lora_tool.main(f"--load {tmp_path}/own --base {base}/model --merge {tmp_path}/tuned".split()) == 0
    perplexity = {}
    write_lines(tmp_path / "q.jsonl", [{"context": "What", "continuation": " is it?"}])
    write_model(tmp_path / "other", seed=1)
    for name, folder in (("own", f"own --pretrained-checkpoint {base}/model"), ("tuned", "tuned"), ("again", "own")):
        output = tmp_path / f"{name}.json"
        words = f"--load {tmp_path}/{folder} --data {tmp_path}/q.jsonl --device cpu --dtype float64 --output {output}"
        assert evaluate.main(words.split()) == 0
        perplexity[name] = json.loads(output.read_text())["results"]["q"]["perplexity,none"]
    assert perplexity["own"] == perplexity["again"] == pytest.approx(perplexity["tuned"], rel=1e-5)
    capsys.readouterr()
    words = f"--load {tmp_path}/own --pretrained-checkpoint {tmp_path}/other --device cpu --prompt a"
    assert generate_tool.main(words.split()) == 1
    assert re.search("other is not the base of .*own.* with hash .*, those of the base were", capsys.readouterr().err)
    assert lora_tool.main(["--load", f"{tmp_path}/own", "--save-peft", str(adapter)]) == 0
    write_model(tmp_path / "gpt2", "gpt2")
    assert (
        lora_tool.main(["--adapter", str(adapter), "--base", f"{tmp_path}/gpt2", "--merge", f"{tmp_path}/merged"]) == 2
    )
    assert not (tmp_path / "merged").exists()
    with pytest.raises(ConfigError, match="has tensors that belong to no linear of the model: base_model"):
        FinetuneScript(flags_of(base, f"--lora-adapter {adapter} --pretrained-checkpoint {tmp_path}/gpt2"))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("gpt2", ["c_attn", "c_fc", "c_proj"]),
        ("mixtral", ["k_proj", "mlp.experts.down_proj", "mlp.experts.gate_up_proj", "o_proj", "q_proj", "v_proj"]),
    ],
)
def test_adapters_of_a_base_whose_positions_are_its_sequences_are_those_of_its_family(
    kind: str, targets: list[str], tmp_path: Path
):
    """A run without --max-position-embeddings says nowhere how many positions its model has."""
    experts = (
        "--num-experts 4 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --ffn-hidden-size 16"
    )
    sizes = f"--num-layers 1 --hidden-size 16 --num-attention-heads 2 {experts if kind == 'mixtral' else ''}"
    data = "--mock-data --tokenizer-type NullTokenizer --vocab-size 15 --device cpu --train-iters 1"

    def run(mesh: Mesh, script: ModuleType | FinetuneScript, flags: str) -> None:
        with trainer_of(script, mesh, flags, predicts=False) as trainer:
            trainer.run()

    flags = f"{SIZES} {sizes} {data} --eval-iters 0 --save {tmp_path}/base"
    run_ranks({}, partial(run, script=pretrain_gpt, flags=flags))
    write_lines(tmp_path / "numbers.jsonl", [{"prompt": "1 2", "completion": "3"}] * 4)
    tuned = f"{SIZES} --train-iters 1 --lora-rank 2 --device cpu --data-path {tmp_path}/numbers.jsonl --split 1,0,0"
    tuned += f" --pretrained-checkpoint {tmp_path}/base --save {tmp_path}/own"
    run_ranks({}, partial(run, script=FinetuneScript(tuned), flags=tuned))
    assert lora_tool.main(["--load", f"{tmp_path}/own", "--save-peft", f"{tmp_path}/peft"]) == 0
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert sorted(config["target_modules"] + (config["target_parameters"] or [])) == targets


def write_adapter(folder: Path, **pairs: tuple[int, int]) -> Path:
    """Write a folder as PEFT's: (in, out) of each module, and beside an output layer's pair its frozen weight."""
    folder.mkdir()
    tensors = {}
    for module, (width, rows) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = np.ones((2, width), np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = np.ones((rows, 2), np.float32)
        if module == "lm_head":
            tensors[f"base_model.model.{module}.base_layer.weight"] = np.ones((rows, width), np.float32)
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folder


def test_a_folder_of_peft_may_have_the_output_layers_weight_and_no_experts(base: Path, tmp_path: Path):
    flags = flags_of(base, "--lora-adapter ")
    folder = write_adapter(tmp_path / "head", lm_head=(16, VOCABULARY + 5))
    assert FinetuneScript(f"{flags}{folder}").args_defaults["lora_target_modules"] == ["output_layer"]
    folder = write_adapter(tmp_path / "experts", **{"model.layers.0.block_sparse_moe.experts.0.w1": (16, 24)})
    with pytest.raises(
        ConfigError, match=r"adapts experts that the model does not have, .* such as .*; is it an adapter of"
    ):
        FinetuneScript(f"{flags}{folder}")


def test_half_written_and_damaged_peft_folders_are_one_line(base: Path, tmp_path: Path, monkeypatch, capsys):
    good = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    problems = {
        '{"r": ': "cannot be read",
        "[]": "is not an object",
        json.dumps(good | {"target_modules": 7}): "target_modules is 7; it must be a name or a list of names",
        json.dumps(good): "has no adapter_model.safetensors",
    }
    for text, problem in problems.items():
        (tmp_path / "adapter_config.json").write_text(text)
        monkeypatch.setattr("sys.argv", ["finetune_gpt.py", *flags_of(base, f"--lora-adapter {tmp_path}").split()])
        with pytest.raises(SystemExit) as stopped:
            finetune_gpt.main()
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and problem in said and said.startswith("cannot start, 1 problem(s)")


@pytest.mark.sweep
def test_adapters_with_their_base_compute_in_any_layout_what_one_process_computes(base: Path, tmp_path: Path):
    train(base, {}, f" --fp64 --lora-rank 2 --train-iters 2 --save {tmp_path}/own")

    def scores(mesh: Mesh) -> list[float]:
        checkpoint = open_checkpoint(tmp_path / "own")
        saved = read_saved_settings(checkpoint.state, "own")
        settings = {"vocab_size": saved.vocab_size, "positions": saved.positions, "lora": saved.lora, "mesh": mesh}
        model = load_gpt(checkpoint, saved.transformer, **settings, base=open_foreign(base / "model"))
        return [one.logprob for one in score(model, [([1, 2], [3, 4, 5]), ([6], [7])], max_length=32, mesh=mesh)]

    expected, *_ = run_ranks({}, scores)
    for sizes in ({"tp": 2}, {"pp": 2}, {"cp": 2}, {"tp": 2, "pp": 2}):
        assert run_ranks(sizes, scores) == [pytest.approx(expected, abs=1e-10)] * prod(sizes.values())


@pytest.mark.sweep
@pytest.mark.parametrize("one_id", [False, True], ids=["ids of their own", "one id for pad, text and turn"])
def test_a_tuned_model_stops(one_id: bool, tmp_path: Path):
    """Of 100 prompts of the training set's form 95 end with the end-of-turn token within 64 tokens, greedy."""
    write_model(tmp_path / "model", one_id=one_id)
    write_lines(tmp_path / "chats.jsonl", counting_chats(100))
    train(tmp_path, {}, f" --train-iters 200 --seq-length 128 --no-sft-packing --save-hf {tmp_path}/tuned")
    (folder,) = (tmp_path / "tuned").iterdir()
    checkpoint = open_foreign(folder)
    config = ModelConfig(**checkpoint.state["config"]["transformer"])
    model = load_gpt(checkpoint, config, vocab_size=checkpoint.state["vocab_size"], positions=256)
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))
    ended = 0
    for i in range(100):
        prompt = tokenizer.tokenize(f"<|im_start|>user\ncount {i}<|im_end|>\n<|im_start|>assistant\n")
        options = {
            "max_new_tokens": 64,
            "max_length": 128,
            "stop_id": None,
            "choose": lambda logits: int(logits.argmax()),
        }
        ended += VOCABULARY - 1 in list(generate(model, prompt, **options))
    assert ended >= 95
