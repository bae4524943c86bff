"""tools/evaluate.py: the formulas over a plain forward, from a checkpoint and from a Hugging Face folder; bad input is one line."""

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from cases import read_record, write_folder
from documents import ROOT, commands_of
from processes import free_port

import pretrain_gpt
from megatron.core.dist_checkpointing import open_checkpoint
from megatron.core.enums import ModelType
from megatron.core.inference import load_gpt, read_saved_settings
from megatron.training import pretrain
from tools.evaluate import main

LENGTH = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    flags = (
        f"--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} --micro-batch-size 4 "
        f"--train-iters 2 --lr 1e-2 --eval-iters 0 --device cpu --fp64 --save {folder} --position-embedding-type rope "
        "--tokenizer-type NullTokenizer --vocab-size 60"
    )
    parts = (pretrain_gpt.train_valid_test_datasets_provider, pretrain_gpt.model_provider)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        pretrain(*parts, ModelType.encoder_or_decoder, pretrain_gpt.forward_step, argv=flags.split())
    return folder


@pytest.fixture
def tool(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """(exit code, stdout, stderr) of the tool run with these arguments."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["--device", "cpu", *map(str, arguments)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


def logprob(model: torch.nn.Module, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = (context + continuation)[-LENGTH - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]), torch.arange(len(ids) - 1)[None], None)[0, :, : model.vocab_size]
    rows = logits.log_softmax(-1)[-len(continuation) :]
    return sum(float(row[id]) for row, id in zip(rows, continuation)), rows.argmax(-1).tolist() == continuation


def test_results_are_the_formulas_of_a_plain_forward(trained: Path, tool, tmp_path: Path):
    checkpoint = open_checkpoint(trained)
    saved = read_saved_settings(checkpoint.state, str(trained))
    model = load_gpt(checkpoint, saved.transformer, vocab_size=saved.vocab_size, positions=saved.positions)
    pairs = [([1, 2, 3], [4, 5]), (list(range(30)), [7]), ([60], [9, 8])]
    context = [11, 12]
    said = []
    for _ in range(2):  # what the model says itself is greedy
        with torch.no_grad():
            logits = model(torch.tensor([context + said]), torch.arange(len(context + said))[None], None)
        said.append(int(logits[0, -1, : model.vocab_size].argmax()))
    pairs.append((context, said))

    def words(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    data = tmp_path / "pairs.jsonl"
    records = [{"context": words(a), "continuation": " " + words(b)} for a, b in pairs]
    records[2]["context"] = ""
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, err = tool("--load", trained, "--data", data, "--output", tmp_path / "r.json")
    assert code == 0 and "|pairs|" in out and "4 requests" in err

    scores = [logprob(model, *pair) for pair in pairs]
    assert scores[-1][1]
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["results"]["pairs"]["acc,none"] == sum(is_greedy for _, is_greedy in scores) / 4
    perplexity = math.exp(-sum(value for value, _ in scores) / 4)
    assert results["results"]["pairs"]["perplexity,none"] == pytest.approx(perplexity, rel=1e-9)
    assert results["config"]["max_length"] == LENGTH and results["n-samples"]["pairs"]["effective"] == 4

    # a text that is longer than the model sees, and the same ids in a token file's order
    text = tmp_path / "text.txt"
    ids = [(7 * i) % 60 for i in range(40)]
    text.write_text(words(ids))
    code, out, _ = tool("--load", trained, "--data", text, "--output", tmp_path / "r.json", "--batch-tokens", 20)
    windows = [([60], ids[:16]), (ids[15:16], ids[16:32]), (ids[23:32], ids[32:])]
    loss = -sum(logprob(model, *window)[0] for window in windows) / 40
    results = json.loads((tmp_path / "r.json").read_text())["results"]["text"]
    assert code == 0 and results["loss,none"] == pytest.approx(loss, rel=1e-9)
    assert results["word_perplexity,none"] == pytest.approx(math.exp(loss), rel=1e-9)

    # Megatron's tasks
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": words(context + said)}) + "\n")
    for strict in ([], ["--strict-lambada"]):
        code, out, _ = tool("--load", trained, "--data", tmp_path / "lambada.jsonl", "--task", "LAMBADA", *strict)
        assert code == 0 and "number correct: 1.0000E+00 | total examples: 1.0000E+00 | avg accuracy: 1.0000E+00" in out
    code, out, _ = tool("--load", trained, "--data", text, "--task", "WIKITEXT103", "--overlapping-eval", 4)
    windows = [(ids[:1], ids[1:17])] + [(ids[4 * k : 13 + 4 * k], ids[13 + 4 * k : 17 + 4 * k]) for k in range(1, 6)]
    windows += [(ids[24:37], ids[37:])]
    mean = -sum(logprob(model, *window)[0] for window in windows) / 39
    assert (
        code == 0 and f"| avg loss: {mean:.4E} | ppl: {math.exp(mean):.4E} | adjusted ppl: {math.exp(mean):.4E}" in out
    )


@pytest.mark.full
def test_a_hugging_face_folder_in_another_precision(tool, tmp_path: Path):
    write_folder(tmp_path / "hf", read_record("llama"))
    (tmp_path / "ids.jsonl").write_text(json.dumps({"context": "1 2 3", "choices": ["4", "5 6"], "gold": 0}) + "\n")
    flags = ("--load", tmp_path / "hf", "--data", tmp_path / "ids.jsonl")
    code, _, err = tool(*flags)
    assert code in (0, 1) and (code == 0 or "--tokenizer" in err)  # a folder of weights alone names the flag
    flags += (
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] - 1),
    )
    for dtype in ("float32", "bfloat16"):
        code, _, err = tool(*flags, "--dtype", dtype, "--output", tmp_path / "r.json")
        assert code == 0, err
        assert json.loads((tmp_path / "r.json").read_text())["config"]["model_args"]["dtype"] == f"torch.{dtype}"


def test_bad_input_is_one_line(trained: Path, tool, tmp_path: Path):
    (tmp_path / "t.txt").write_text("1 2 3")
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "letters.txt").write_text("abc")
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "t5", read_record("t5"))
    data = ("--data", tmp_path / "t.txt")
    for arguments, code, said in (
        (("--load", trained), 2, "nothing to evaluate on"),
        (data, 2, "--load is needed"),
        (("--load", tmp_path / "empty", *data), 1, str(tmp_path / "empty")),
        (("--load", tmp_path / "missing", *data), 1, "missing"),
        (("--load", tmp_path / "t5", *data), 1, "holds a T5"),
        (("--load", trained, "--data", tmp_path / "none.txt"), 1, "no text"),
        (("--load", trained, "--data", tmp_path / "letters.txt"), 1, "NullTokenizer"),
        (("--load", trained, *data, "--strict-lambada"), 2, "--task LAMBADA"),
        (("--load", trained, *data, "--num-fewshot", 2), 2, "--lm-eval-tasks"),
        (("--load", trained, *data, "--tensor-model-parallel-size", 2), 2, "a multiple"),
        (("--load", trained, *data, "--output", tmp_path / "no" / "r.json"), 2, "no folder"),
        (("--load", trained, *data, "--task", "WIKITEXT103"), 1, "--overlapping-eval"),
    ):
        status, out, err = tool(*arguments)
        assert (status, out) == (code, "") and said in err and err.strip().count("\n") == 0, (arguments, err)


@pytest.mark.full
def test_a_script_builds_the_model(trained: Path, tool, tmp_path: Path):
    """Its model is not packed: other batches, the same numbers."""
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"context": "1 2", "continuation": " 3 4"}) + "\n")
    flags = ("--load", trained, "--data", tmp_path / "pairs.jsonl")
    figures = []
    for more in ([], ["--model", ROOT / "pretrain_gpt.py"]):
        code, _, err = tool(*flags, *more, "--output", tmp_path / "r.json")
        assert code == 0, err
        figures.append(json.loads((tmp_path / "r.json").read_text())["results"]["pairs"])
    assert figures[1] == {
        name: pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        for name, value in figures[0].items()
    }


# ---------------------------------------------------------------- docs/evaluation.md

PAGE = ROOT / "docs" / "evaluation.md"


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's checkpoint and data, tiny, in the working folder."""
    pytest.importorskip("tokenizers")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    byte_tokenizer(tmp_path / "tokenizer.json")
    train(tmp_path, f"--mock-data --train-iters 2 --save {tmp_path}/checkpoints/books")
    (tmp_path / "book.txt").write_text("Once upon a time there were three bears , and 9 honey pots .")
    questions = [{"context": f"{n} bears", "choices": ["sleep", "eat honey"], "gold": n % 2} for n in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "three bears ate honey"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(folder: Path, flags: str) -> None:
    tiny = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --lr 1e-2 --eval-iters 0 "
        f"--device cpu --position-embedding-type rope --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/tokenizer.json"
    )
    words = (
        [*tiny.split(), *flags.split()] if "--use-checkpoint-args" not in flags else [*flags.split(), "--device", "cpu"]
    )
    parts = (pretrain_gpt.train_valid_test_datasets_provider, pretrain_gpt.model_provider)
    pretrain(*parts, ModelType.encoder_or_decoder, pretrain_gpt.forward_step, argv=words)


@pytest.mark.full
def test_the_commands_of_the_page_run(books: Path, tool, capsys: pytest.CaptureFixture):
    said = []
    for command in commands_of(PAGE):
        program, *words = shlex.split(command)[1:]
        if command.startswith("python tools/evaluate.py") and "--lm-eval-tasks" not in words:
            code, out, err = tool(*words)
            assert code == 0, err
            said.append(out)
        elif program == "pretrain_gpt.py":
            train(books, " ".join(words))
            said.append(capsys.readouterr().out)
    assert len(said) == 4
    results = json.loads((books / "checkpoints/results.json").read_text())["results"]
    assert results["book"].keys() > {"bits_per_byte,none"} and results["questions"].keys() > {"acc_norm,none"}
    assert "adjusted ppl" in said[1] and "avg accuracy" in said[2]
    assert said[3].count(" task questions at iteration ") == 2  # within the run, and at its end


@pytest.mark.sweep
def test_replicas_and_tensor_parallel_processes_give_what_one_gives(books: Path):
    """Processes: 12 seconds of a processor."""
    one, four = (command.replace(" \\\n", " ") for command in commands_of(PAGE)[:2])
    launch = f"{sys.executable} -m torch.distributed.run --master-port {free_port()}"
    for command in (one.replace("python", sys.executable, 1), four.replace("torchrun", launch, 1)):
        words = [str(ROOT / word) if word == "tools/evaluate.py" else word for word in shlex.split(command)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([*words, "--device", "cpu", "--dtype", "float64"], check=True, env=environment)
    results = [
        json.loads((books / name).read_text())["results"]
        for name in ("checkpoints/results.json", "checkpoints/four.json")
    ]
    for task, metrics in results[0].items():
        for name, value in metrics.items():
            assert results[1][task][name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-10))
