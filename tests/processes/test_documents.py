"""What README.md and docs/*.md show is run as it stands there, tiny. Processes, because bash, torchrun and pipes are what is shown.

A folder of its own has the repository's programs under the paths that the documents name; flags that make a run tiny come last,
where they win. docs/data_preparation.md is run by tests/unit/tools/test_data_tools.py.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, blocks_of, commands_of
from processes import free_port
from said import tells
from walkthrough_doc import PAGE, SHOWN, trimmed

pytestmark = pytest.mark.full

TINY = {
    "README.md": "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 2 --eval-interval 1 --eval-iters 1 --log-interval 1",
    "docs/tutorial.md": "--train-iters 4 --lr-warmup-iters 1 --eval-interval 2 --eval-iters 1 --log-interval 1 --save-interval 2",
    "docs/watching.md": "",
    "docs/models.md": "--train-iters 4 --lr-warmup-iters 1 --log-interval 1",
    "docs/adding_a_model.md": "--train-iters 20 --eval-iters 1",
}
TRAINS = ("pretrain_gpt.py", "pretrain.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The programs of the repository, and commands `python` and `torchrun` that are those of the tests."""
    for name in ("megatron", "tools", "examples", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, runs in (("python", ""), ("torchrun", f" -m torch.distributed.run --master-port {free_port()}")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable}{runs} "$@"\n')
        (commands / name).chmod(0o755)
    return tmp_path


def bash(script: str, folder: Path, **variables: str) -> str:
    """What a script prints; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "WORLD_SIZE"))}
    environment |= {"PATH": f"{folder}/bin:{environment['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=environment | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def made_tiny(command: str, tiny: str) -> str:
    """The command on at most four processes of this machine's CPU, and with these flags at its end."""
    first, *rest = command.replace("--nproc-per-node 8", "--nproc-per-node 4").split(" | ")
    if any(f"{program} " in first for program in TRAINS):
        first += f" {tiny} --device cpu"
    if "tools/generate.py" in first:
        first += " --max-new-tokens 4 --device cpu"
    return " | ".join([first, *rest])


def shown_in(document: str, *, but: tuple[str, ...] = ()) -> list[str]:
    """The commands of a document, tiny, but those that begin with one of `but`."""
    commands = [command for command in commands_of(ROOT / document) if not command.startswith(but)]
    return [made_tiny(command, TINY.get(document, "")) for command in commands]


def test_the_readme_leads_from_a_text_to_a_sample(folder: Path):
    """And what docs/generation.md does with the same checkpoint: four processes say what one does not draw by chance."""
    texts = [f"Once upon a time there were {n} bears, and {n * n} honey pots. " * 5 for n in range(100)]
    (folder / "books.txt").write_text("\n\n".join(texts))
    (folder / "book.txt").write_text("Once upon a time")  # which docs/generation.md continues
    readme = shown_in("README.md", but=("bash ", "python tools/benchmark.py"))  # which takes minutes
    assert [command.split()[1] for command in readme] == shlex.split(
        "-c tools/train_tokenizer.py tools/preprocess_data.py --nproc-per-node tools/plot_run.py tools/generate.py"
    )
    said = bash("\n".join([*readme, *shown_in("docs/generation.md")]), folder)
    assert (
        all(size in said for size in ("tp 2", "pp 2", "dp 1"))
        and "validation loss at iteration 2 on validation set" in said
    )
    assert (folder / "books.png").stat().st_size > 1000
    assert said.count("Once upon a time") >= 3
    log = (folder / "books.log").read_text()
    longer = bash(f"( {readme[3]} )".replace(" | tee", " --train-iters 3 --override-opt_param-scheduler | tee"), folder)
    assert "going on from iteration 2" in longer and tells(longer, "learning rate")
    assert (folder / "books.log").read_text() == log + longer


def shakespeare() -> Path:
    """The text of the tutorial, which no test downloads."""
    path = Path(os.environ.get("TINYSHAKESPEARE", ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"))
    if not path.is_file():
        pytest.skip(f"needs the tutorial's text: there is no {path}; download it, and name it as TINYSHAKESPEARE=...")
    return path


def test_the_tutorial_leads_from_a_text_to_the_same_numbers_in_four_processes(folder: Path):
    """Word for word but for the download and the length of the run: a few steps, where stops and the lines looked for are earlier too."""
    text = shakespeare()
    commands = shown_in("docs/tutorial.md", but=("bash ", "source ", "export "))
    (download,) = (i for i, command in enumerate(commands) if command.startswith("curl "))
    commands[download] = f"cp {text} runs/shakespeare/input.txt"
    script = "\n".join(commands)
    for long, short in (
        ("exit-interval 500", "exit-interval 2"),
        ("exit-interval 200", "exit-interval 2"),
        ("[12]00/", "2/"),
        ("exit-interval 300", "exit-interval 3"),
        ("300/", "3/"),
    ):
        assert long in script
        script = script.replace(long, short)
    said = bash(script, folder)
    assert tells(said, "1003855 uint16") and "verified" in said
    assert "exiting at iteration 2" in said and said.count("going on from iteration 2") == 2
    assert "validation loss at iteration 4 on validation set" in said and "ROMEO:" in said
    assert (folder / "runs/shakespeare/loss.png").stat().st_size > 1000
    assert all(size in said for size in ("tp 2", "pp 2", "dp 1"))
    seconds = re.findall(r"^iteration +2/\nlm loss: (\S+)\ngrad norm: (\S+)$", said, re.MULTILINE)
    (one_loss, one_norm), (four_loss, four_norm) = ([float(number) for number in numbers] for numbers in seconds)
    assert four_loss == pytest.approx(one_loss, rel=1e-5) and four_norm == pytest.approx(one_norm, rel=1e-3)
    third, third_after_four = map(float, re.findall(r"^lm loss: (\S+)$", said, re.MULTILINE)[-2:])
    assert third_after_four == pytest.approx(third, rel=1e-5) and third < one_loss


def test_the_page_about_watching_shows_what_can_be_seen(folder: Path):
    has_board = importlib.util.find_spec("tensorboard") is not None
    commands = shown_in("docs/watching.md", but=("tensorboard ",))
    said = bash("\n".join(c for c in commands if has_board or "--tensorboard-dir" not in c), folder)
    assert "throughput per GPU" in said and "params norm" in said and "forward-backward" in said
    assert (folder / "runs.png").stat().st_size > 1000
    assert len(list((folder / "runs/profiled/profile").iterdir())) == 2
    assert said.count('"what": "gradient"') == 3


def test_a_description_leads_to_text_and_on_to_a_longer_context(folder: Path):
    """The page's commands as they stand, with a tiny model of 32 positions, then 64, in place of the published one."""
    words = {"<eos>": 0} | {
        word: i + 1 for i, word in enumerate(("Once", "upon", "a", "time", "there", "were", "bears", "."))
    }
    special = {"id": 0, "content": "<eos>", "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    parts = {"version": "1.0", "added_tokens": [special], "pre_tokenizer": {"type": "Whitespace"}, **absent}
    parts["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "<eos>"}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 9, "max_position_embeddings": 32, "tie_word_embeddings": True}
    (folder / "SmolLM2-135M").mkdir()
    for name, what in {
        "config": {"model_type": "llama", "dtype": "bfloat16", **sizes},
        "tokenizer": parts,
        "tokenizer_config": {"eos_token": "<eos>"},
    }.items():
        (folder / "SmolLM2-135M" / f"{name}.json").write_text(json.dumps(what))
    lines = [json.dumps({"text": "Once upon a time there were bears . " * n}) for n in range(1, 60)]
    (folder / "books.jsonl").write_text("\n".join(lines) + "\n")
    script = "\n".join(shown_in("docs/models.md")).replace('embeddings": 8192', 'embeddings": 32')
    script = script.replace("--seq-length 2048", "--seq-length 16")
    longer = "--max-position-embeddings 64 --seq-length 64 --global-batch-size 2"
    script = script.replace("--tensor-model-parallel-size 1", f"--tensor-model-parallel-size 1 {longer}")
    said = bash(script, folder)
    assert "1 rank(s)" in said and tells(said, "rope_scaling yarn None")
    assert re.search(r"^ +context_parallel_size +2\b", said, re.M)
    assert said.count("Once upon a time") >= 2
    written = json.loads((folder / "runs" / "longer-hf" / "config.json").read_text())
    assert (written["max_position_embeddings"], written["rope_scaling"]["factor"]) == (64, 2)
    assert (folder / "runs" / "longer-hf" / "tokenizer.json").read_text() == json.dumps(parts)


def test_the_fork_of_the_page_trains(folder: Path):
    (command, _) = shown_in("docs/adding_a_model.md", but=("python tools/",))
    said = bash(command, folder)
    (ten, first), (twenty, second) = re.findall(r"iteration +(\d+)/ +20 .*lm loss: (\S+) .*restart loss: ", said)
    assert (ten, twenty) == ("10", "20") and float(second) < float(first) and "branch_scale" in said


def test_the_experts_of_the_page_train(folder: Path):
    """Two expert-parallel ranks that have the parts of two tensor-parallel ones."""
    (_, command) = shown_in("docs/adding_a_model.md", but=("python tools/",))
    said = bash(command, folder)
    (ten, first), (twenty, second) = re.findall(r"iteration +(\d+)/ +20 .*lm loss: (\S+) .*load balance: ", said)
    assert (ten, twenty) == ("10", "20") and float(second) < float(first)


def test_the_quickstart_leads_from_nothing_to_a_sample(folder: Path):
    """In a copy, for it writes beside itself; with an environment that is made already."""
    copy, environment = folder / "copy", folder / "environment"
    bash(
        f"mkdir copy && cd {ROOT} && cp -r megatron tools examples pretrain_gpt.py setup.py constraints.txt {copy}",
        folder,
    )
    (environment / "bin").mkdir(parents=True)
    (folder / "bin" / "python").rename(environment / "bin" / "python")
    bash(
        f"cat {copy}/setup.py {copy}/constraints.txt >{environment}/installed_from.txt; echo {copy} >>{environment}/installed_from.txt; "
        f"{environment}/bin/python --version >>{environment}/installed_from.txt",
        folder,
    )
    small = {"TRAIN_ITERS": "4", "MAX_MB": "0.2", "VOCAB_SIZE": "300"}
    said = bash(f"bash {copy}/examples/quickstart.sh", folder, VENV=str(environment), PYTHONPATH=str(copy), **small)
    assert "installing" not in said and "exiting at iteration 2" in said and "going on from iteration 2" in said
    assert "== done in" in said and (copy / "runs/quickstart/loss.png").stat().st_size > 1000


def test_what_configure_writes_trains(folder: Path):
    said = bash("\n".join(commands_of(ROOT / "docs/configure.md")), folder)
    assert "dp 2" in said and "zero" in (folder / "runs" / "tiny.yaml").read_text()
    assert re.search(r"^ \[.*iteration +2/ +2 .*lm loss", said, re.M)


def test_the_walkthrough_shows_what_its_commands_print(folder: Path):
    """Where the page shows an output, all of it."""
    shown = dict(SHOWN.findall(PAGE.read_text()))
    said = {command: bash(command, folder) for command in commands_of(ROOT / "docs/walkthrough.md")}
    assert len(shown) == 6 and len(said) == 8
    for command, text in shown.items():
        printed, there = (re.sub(r"loss \d.*", "loss", one) for one in (trimmed(said[command]), text))
        assert printed == there, "run: python tests/campaigns/walkthrough_doc.py"
    launch, start, *_, engine = said.values()
    assert "launcher='torchrun'" in launch and "rank=5" in launch and "world_size=16" in launch
    assert "rank 3 of 4, gloo: tensor-parallel rank 1 of [2, 3], data-parallel rank 1 of [1, 3]" in start
    losses = re.findall(r"^ZeRO \d, rank 0 .* loss (\S+)$", engine, re.M)
    assert len(losses) == 4 and len(set(losses)) == 1


# ---------------------------------------------------------------- Python


def test_the_python_of_the_pages_runs(folder: Path):
    """Each block alone, where the page says it is run: in the fork's folder, or beside a quickstart that has run."""
    fork, run = folder / "examples" / "minimal_fork", folder / "runs" / "quickstart" / "checkpoints"
    tiny = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 0.1 --eval-iters 0 "
    mock = "--mock-data --tokenizer-type NullTokenizer --vocab-size 31 --train-iters 1 --device cpu"
    bash(f"python pretrain_gpt.py {tiny} {mock} --save {run}", folder)
    said = dict.fromkeys(("docs/adding_a_model.md", "docs/checkpoint_format.md", "docs/generation.md"), "")
    for document, where in zip(said, (fork, folder, folder)):
        for block in blocks_of(ROOT / document, "python"):
            (folder / "block.py").write_text(f"import sys; sys.path[0] = '.'\n{block}")
            said[document] += bash(f"cd {where} && python {folder}/block.py", folder)
    of_models = "rank 0 |F0F1      B0--B1--F2F3", "tensor(18.), tensor(6.)", "lr_multiplier=2.0"
    assert all(text in said["docs/adding_a_model.md"] for text in of_models)
    assert "model/language_model" in said["docs/checkpoint_format.md"]
    new_ids = ast.literal_eval(said["docs/generation.md"].splitlines()[-1])
    assert [len(ids) for ids in new_ids] == [4, 4]


def test_the_script_of_the_page_on_deepspeed_trains(folder: Path):
    """After what such a script has in front: its model, its data, and a ds_config."""
    (block,) = blocks_of(ROOT / "docs/deepspeed.md", "python")
    of_file = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    (folder / "ds_config.json").write_text(json.dumps(of_file))
    (folder / "block.py").write_text(
        "import torch\nfrom torch import nn\n\nargs, dataset = None, list(torch.randn(4, 8))\n"
        "class Model(nn.Linear):\n    def forward(self, x):\n        return super().forward(x).square().mean()\n"
        f"model = Model(8, 8)\n{block}"
    )
    assert "deepspeed: Backend(" in bash("python block.py", folder)
    assert (folder / "checkpoints" / "latest").is_file() and any(
        folder.glob("checkpoints/global_step2/**/manifest.json")
    )


def test_every_page_with_python_is_run():
    pages = {path.name for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if blocks_of(path, "python")}
    elsewhere = {"experts.md"}  # tests/ranks/transformer/test_moe_runs.py
    assert pages == {"adding_a_model.md", "checkpoint_format.md", "deepspeed.md", "generation.md"} | elsewhere, (
        "run the new page's blocks above"
    )
