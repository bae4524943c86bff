"""Every command of docs/after_pretraining.md, on a tiny folder in place of the published one, in this process."""

import glob
import json
import shlex
from pathlib import Path

import pytest
from documents import ROOT, commands_of
from local_ranks import run_ranks
from script_run import trainer_of
from sft_folder import CHATML, FinetuneScript, chats, read_safetensors, write_lines, write_model
from whole_run import run

import finetune_gpt
import pretrain_gpt
from megatron.core.parallel.mesh import Mesh
from tools import evaluate, generate, lora, plot_run, preprocess_data, stdlib_corpus, train_tokenizer

TINY = " --seq-length 96 --log-interval 1 --device cpu"
TOOLS = {"generate": generate, "lora": lora, "preprocess_data": preprocess_data, "train_tokenizer": train_tokenizer}
TOOLS |= {"evaluate": evaluate, "plot_run": plot_run, "stdlib_corpus": stdlib_corpus}
LIBRARY = "runs/library"  # of the second example


def train(words: list[str]) -> None:
    defaults = finetune_gpt.defaults_of(words)
    run(words, script=finetune_gpt, tiny=[], args_defaults=defaults, extra_args_provider=finetune_gpt.add_own_flags)


def obey(command: str) -> None:
    """Run one command of the page."""
    program, *words = shlex.split(command.replace("python ", "", 1))
    words = [(glob.glob(word) or [word])[0] for word in words]  # as a shell does
    if program == "torchrun":
        flags = " ".join(words[3:]) + TINY
        script = FinetuneScript(flags)

        def train_rank(mesh: Mesh) -> None:
            with trainer_of(script, mesh, flags, predicts=False) as trainer:
                trainer.run()

        run_ranks({"tp": 2}, train_rank)
    elif program == "-c":
        exec(compile(words[0], "the page", "exec"), {})
    elif program == "finetune_gpt.py":
        train(words + TINY.split())
    elif program == "pretrain_gpt.py":
        run([*words, *TINY.split(), "--train-iters", "2", "--lr-warmup-iters", "1"], script=pretrain_gpt, tiny=[])
    else:
        more = {"generate": "--max-new-tokens 4 --device cpu", "evaluate": "--device cpu"}.get(
            Path(program).stem, ""
        ).split()
        assert TOOLS[Path(program).stem].main(words + more) == 0


@pytest.mark.full
def test_every_command_of_the_page_works(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("finetune_gpt.py").symlink_to(ROOT / "finetune_gpt.py")
    write_model(Path("Llama-3.2-1B-Instruct"))
    write_lines(Path("chats.jsonl"), chats(40))
    Path("runs/speeches").mkdir(parents=True)
    speeches = [f"{'ROMEO' if i % 2 else 'JULIET'}:\nIt is the {i}th of them." for i in range(216)]
    Path("runs/speeches/input.txt").write_text("\n\n".join(speeches))
    for command in commands_of(ROOT / "docs" / "after_pretraining.md"):
        if not command.startswith(("mkdir ", "curl ")) and LIBRARY not in command:
            obey(command)
    said = capsys.readouterr().out
    assert "<|im_start|>assistant\n>>>It is 0.<|im_end|><<<" in said

    # the folders that the page makes
    (tuned,) = Path("runs/tuned").iterdir()
    assert json.loads((tuned / "tokenizer_config.json").read_text())["chat_template"] == CHATML
    base, again = (
        read_safetensors(Path(name) / "model.safetensors") for name in ("Llama-3.2-1B-Instruct", "runs/llama-untuned")
    )
    merged = read_safetensors(Path("runs/llama-tuned/model.safetensors"))
    assert base.keys() == again.keys() == merged.keys()
    assert (
        max(abs(base[name] - again[name]).max() for name in base)
        < 2e-6
        < max(abs(base[name] - merged[name]).max() for name in base)
    )
    assert (Path("runs/llama-tuned/tokenizer_config.json").read_bytes()) == (
        Path("Llama-3.2-1B-Instruct/tokenizer_config.json").read_bytes()
    )


@pytest.mark.sweep
def test_every_command_of_the_second_example_works(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(LIBRARY).mkdir(parents=True)
    source_files = stdlib_corpus.source_files
    monkeypatch.setattr(stdlib_corpus, "source_files", lambda library: source_files(library)[:60])
    commands = [command for command in commands_of(ROOT / "docs" / "after_pretraining.md") if LIBRARY in command]
    for command in commands:
        if not command.startswith("mkdir "):
            obey(command)
    assert len(commands) == 12 and "|choices|" in capsys.readouterr().out
    assert Path("runs/library/tuning.png").stat().st_size > 1000
