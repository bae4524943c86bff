"""What a run remembers of the folder that it began as: its checkpoints leave as that family, with that tokenizer."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import read_record, read_tensors, write_folder
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of
from whole_run import run

import pretrain_gpt
from megatron.convert import open_foreign
from megatron.core.dist_checkpointing import manifest_format as disk, open_checkpoint
from megatron.core.parallel.accelerator import Device
from megatron.training.checkpointing.hf_origin import provenance_of_run
from tools import checkpoint_convert

SCRIPT = SimpleNamespace(**vars(pretrain_gpt))
REST = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --micro-batch-size 1 --global-batch-size 2 --lr 0.1 --eval-iters 0 "
    "--seq-length 8 --make-vocab-size-divisible-by 8 --device cpu"
)
TINY = "--num-layers 1 --hidden-size 16 --num-attention-heads 2"
KEPT = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": -1, "initializer_range": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral without a window, which a Llama can say as well, with a tokenizer."""
    root, record = tmp_path_factory.mktemp("hf") / "mistral", read_record("mistral")
    write_folder(root, record | {"config": record["config"] | {"sliding_window": None} | KEPT})
    for name in ("tokenizer.json", "generation_config.json", "additional_chat_templates/tool.jinja"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"this is {name}\n")
    return root


@pytest.fixture(scope="module")
def kept(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of one step from that folder."""
    root = tmp_path_factory.mktemp("run") / "kept"
    run(f"--load {folder} --save {root} --train-iters 1", tiny=REST.split())
    return root


def written(source: Path, out: Path, *more: str) -> dict:
    """The config.json of the folder that the tool writes."""
    assert checkpoint_convert.main(["--load", str(source), "--save-hf", str(out), *more]) == 0
    return json.loads((out / "config.json").read_text())


def of_rank(mesh, flags: str) -> None:
    with trainer_of(SCRIPT, mesh, f"{REST} {flags}", predicts=False) as trainer:
        trainer.run()


@pytest.mark.full
def test_a_run_leaves_as_the_family_it_began_as_with_its_tokenizer(kept: Path, folder: Path, tmp_path: Path, capsys):
    config = written(kept, tmp_path / "out")
    assert "not written" not in capsys.readouterr().out
    assert {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **KEPT}.items() <= config.items()
    for name in ("tokenizer.json", "generation_config.json", "additional_chat_templates/tool.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert written(kept, tmp_path / "llama", "--model-type", "llama")["model_type"] == "llama"
    assert read_tensors(tmp_path / "llama") == read_tensors(tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_run_of_a_description_without_weights_leaves_as_its_family_too(
    given: str, folder: Path, tmp_path: Path, capsys
):
    """Over a restart, and by --save-hf; a file speaks of itself alone, so it gives no tokenizer."""
    source = shutil.copytree(folder, tmp_path / "source")
    (source / "model.safetensors").unlink(missing_ok=True)
    shutil.copy(Path(__file__).parents[3] / "LICENSE", source / "tokenizer.json")
    path = source if given == "folder" else source / "config.json"
    flags = f"--hf-config {path} --load {tmp_path / 'run'} --save {tmp_path / 'run'} --save-hf {tmp_path / 'hf'}"
    flags += " --tokenizer-type NullTokenizer --vocab-size 30 --override-opt_param-scheduler"
    for steps in (1, 2):
        run(f"{flags} --train-iters {steps}", tiny=REST.split())
        origin = open_checkpoint(tmp_path / "run").state["origin"]
        assert (origin["model_type"], origin["folder"], origin["kept"]) == ("mistral", str(source), KEPT)
        assert len(origin["files"]) == (3 if given == "folder" else 0)
    config = written(tmp_path / "run", tmp_path / "out")
    assert {"model_type": "mistral", **KEPT}.items() <= config.items()
    last = tmp_path / "hf" / "iter_0000002"
    assert json.loads((last / "config.json").read_text()) == config
    assert [(root / "tokenizer.json").exists() for root in (tmp_path / "out", last)] == [given == "folder"] * 2


@pytest.mark.parametrize("flag", ["load", "pretrained-checkpoint"])
def test_a_run_does_not_save_into_the_folder_that_it_begins_as(flag: str, folder: Path, tmp_path: Path, capsys):
    """Its checkpoints beside the config.json would make the folder one of ours, and the same command would start as another run."""
    source = shutil.copytree(folder, tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(SystemExit):
        run(f"--{flag} {source} --save {tmp_path / 'link'} --train-iters 1", tiny=REST.split())
    assert tells(capsys.readouterr().err, f"{source} --save --pretrained-checkpoint --load")
    assert not (source / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.full
def test_a_resumed_run_keeps_it_in_any_layout(kept: Path, folder: Path, tmp_path: Path):
    """From one process to TP 2 x PP 3, back to one, and on as the weights of another run."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --zero-stage 1"
    on = "--use-checkpoint-args --override-opt_param-scheduler"
    run_ranks({"tp": 2, "pp": 3}, partial(of_rank, flags=f"{on} {sizes} --load {kept} --save {first} --train-iters 2"))
    run(f"{on} --load {first} --save {second} --train-iters 3", tiny=REST.split())
    run(f"--use-checkpoint-args --pretrained-checkpoint {second} --save {third} --train-iters 1", tiny=REST.split())
    began = open_checkpoint(kept).state["origin"]
    assert began["model_type"] == "mistral" and began["folder"] == str(folder) and len(began["files"]) == 3
    for root in (first, second, third):
        assert open_checkpoint(root).state["origin"] == began
    assert written(third, tmp_path / "out")["model_type"] == "mistral"


@pytest.mark.full
def test_what_a_tokenizer_has_become_is_said_and_another_folder_may_be_named(folder: Path, tmp_path: Path, capsys):
    """A file that has changed since the run began, one that is gone, and a folder that is gone."""
    source, run_of = shutil.copytree(folder, tmp_path / "source"), tmp_path / "run"
    run(f"--load {source} --save {run_of} --train-iters 1", tiny=REST.split())
    (source / "tokenizer.json").write_text("another\n")
    (source / "generation_config.json").unlink()
    capsys.readouterr()
    written(run_of, tmp_path / "changed")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not written" in line]
    assert tells(line, f"{source} tokenizer.json changed generation_config.json --tokenizer")
    assert sorted(path.name for path in (tmp_path / "changed").iterdir() if path.suffix != ".safetensors") == [
        "additional_chat_templates",
        "config.json",
    ]
    shutil.rmtree(source)
    written(run_of, tmp_path / "gone")
    assert tells(capsys.readouterr().out, f"{source} tokenizer.json --tokenizer")
    written(run_of, tmp_path / "named", "--tokenizer", str(folder))
    assert (tmp_path / "named/tokenizer.json").read_text() == "this is tokenizer.json\n"
    assert "not written" not in capsys.readouterr().out


@pytest.mark.full
def test_a_run_with_another_tokenizer_carries_none(folder: Path, tmp_path: Path, capsys):
    """The ids of a text's ends go too: another tokenizer gives them to other words."""
    source = shutil.copytree(folder, tmp_path / "source")
    shutil.copy(Path(__file__).parents[3] / "LICENSE", source / "tokenizer.json")
    run(f"--load {source} --save {tmp_path / 'run'} --train-iters 1", tiny=REST.split())
    state = open_checkpoint(tmp_path / "run").state
    assert state["tokenizer_sha256"] and state["origin"]["files"]
    again = "--use-checkpoint-args --allow-tokenizer-change --tokenizer-type NullTokenizer --vocab-size 30"
    disk_state = state | {"tokenizer_sha256": "0" * 64}
    changed_state(tmp_path / "run", disk_state)
    run(
        f"{again} --pretrained-checkpoint {tmp_path / 'run'} --save {tmp_path / 'other'} --train-iters 1",
        tiny=REST.split(),
    )
    assert tells(capsys.readouterr().out, f"tokenizer {source}")
    config = written(tmp_path / "other", tmp_path / "out")
    assert config["model_type"] == "mistral" and config["eos_token_id"] is None
    assert not (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.parametrize("said_in", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_run_from_scratch_leaves_with_the_ids_of_the_ends_that_its_tokenizer_names(
    said_in: str, tmp_path: Path, capsys
):
    """Without them generate() of transformers writes past the end of a text. An id beyond the word table is none."""
    tokenizer, run_of = tmp_path / "tokenizer", tmp_path / "run"
    tokenizer.mkdir()
    added = [{"id": 28, "content": "<s>", "special": True}, {"id": 29, "content": "</s>", "special": True}]
    held = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": added}
    (tokenizer / "tokenizer.json").write_text(json.dumps(held))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "</s>"}
    (tokenizer / said_in).write_text(json.dumps(names))
    run(f"--save {run_of} --train-iters 1", tiny=[*TINY.split(), *REST.split()])
    ends = {"bos_token_id": 28, "eos_token_id": 29, "pad_token_id": None}
    assert ends.items() <= written(run_of, tmp_path / "out", "--tokenizer", str(tokenizer)).items()
    assert written(run_of, tmp_path / "none")["eos_token_id"] is None

    (tokenizer / "tokenizer.json").write_text(json.dumps(held | {"added_tokens": [added[0] | {"id": 31}, added[1]]}))
    config = written(run_of, tmp_path / "beyond", "--tokenizer", str(tokenizer))
    assert config["bos_token_id"] is None and config["eos_token_id"] == 29

    (tokenizer / "tokenizer.json").write_text("no JSON\n")
    capsys.readouterr()
    assert written(run_of, tmp_path / "unread", "--tokenizer", str(tokenizer))["eos_token_id"] is None
    assert tells(capsys.readouterr().out, f"eos_token_id --tokenizer {tokenizer}/tokenizer.json")


def changed_state(root: Path, state: dict) -> None:
    """Give a checkpoint another state, under its own hash."""
    path = next(root.glob("iter_*")) / disk.MANIFEST
    manifest = disk.parse_manifest(path.read_text(), path)
    path.write_text(disk.to_json(disk.Manifest(manifest.iteration, state, manifest.files, manifest.tensors)))


WRONG = {
    "no object": 7,
    "no family": {"folder": "/x"},
    "a key too many": {"model_type": "llama", "folder": "/x", "code": "import os"},
    "a family that is a path": {"model_type": "../x", "folder": "/x"},
    "a folder that is a number": {"model_type": "llama", "folder": 3},
    "a folder of two lines": {"model_type": "llama", "folder": "/x\n/y"},
    "a key of the model": {"model_type": "llama", "folder": "/x", "kept": {"hidden_size": 3}},
    "an id that is text": {"model_type": "llama", "folder": "/x", "kept": {"eos_token_id": "2"}},
    "a file out of the folder": {"model_type": "llama", "folder": "/x", "files": {"../tokenizer.json": "0" * 64}},
    "a file of code": {"model_type": "llama", "folder": "/x", "files": {"own.py": "0" * 64}},
    "a hash that is none": {"model_type": "llama", "folder": "/x", "files": {"tokenizer.json": "0"}},
}


@pytest.mark.full
@pytest.mark.parametrize("case", WRONG)
def test_an_origin_that_no_run_has_written_is_refused(case: str, kept: Path, tmp_path: Path, capsys):
    root = shutil.copytree(kept, tmp_path / "kept")
    changed_state(root, open_checkpoint(root).state | {"origin": WRONG[case]})
    assert checkpoint_convert.main(["--load", str(root), "--save-hf", str(tmp_path / "out")]) == 2
    assert "origin" in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as stop:
        run(f"--use-checkpoint-args --load {root} --train-iters 2", tiny=REST.split())
    assert stop.value.code == 2 and "origin" in capsys.readouterr().err


@pytest.mark.full
def test_a_checkpoint_of_before_has_no_origin_and_is_written_as_the_first_family_that_fits(
    kept: Path, tmp_path: Path, capsys
):
    root = shutil.copytree(kept, tmp_path / "kept")
    changed_state(root, {name: x for name, x in open_checkpoint(root).state.items() if name != "origin"})
    assert written(root, tmp_path / "out")["model_type"] == "llama"
    assert tells(capsys.readouterr().out, "tokenizer --tokenizer")
    on = "--use-checkpoint-args --override-opt_param-scheduler"
    run(f"{on} --load {root} --save {tmp_path / 'on'} --train-iters 2", tiny=REST.split())
    assert "origin" not in open_checkpoint(tmp_path / "on").state


def test_a_family_that_is_not_known_here_is_named(kept: Path, tmp_path: Path, capsys):
    root = shutil.copytree(kept, tmp_path / "kept")
    state = open_checkpoint(root).state
    changed_state(root, state | {"origin": state["origin"] | {"model_type": "of_a_fork"}})
    assert checkpoint_convert.main(["--load", str(root), "--save-hf", str(tmp_path / "out")]) == 2
    assert tells(capsys.readouterr().err, "model_type of_a_fork llama")
    assert written(root, tmp_path / "out", "--model-type", "llama")["model_type"] == "llama"


def test_a_link_that_leads_out_of_a_folder_is_not_carried(folder: Path, tmp_path: Path, capsys):
    source = shutil.copytree(folder, tmp_path / "source")
    (tmp_path / "secret").write_text("a key")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    written(source, tmp_path / "out")
    assert tells(capsys.readouterr().out, f"tokenizer.json link {tmp_path}/secret")
    assert not (tmp_path / "out/tokenizer.json").exists() and (tmp_path / "out/generation_config.json").exists()
    words = ["--load", str(folder), "--save-hf", str(tmp_path / "no"), "--tokenizer", str(source)]
    assert checkpoint_convert.main(words) == 1 and not (tmp_path / "no").exists()


@pytest.mark.parametrize("mine, carries", [("this is tokenizer.json\n", True), ("another\n", False)])
def test_a_tokenizer_of_another_file_than_the_folders_is_another(
    mine: str, carries: bool, folder: Path, tmp_path: Path
):
    """--tokenizer-model may name a copy of the folder's, or a tokenizer of the same size that means other words."""
    (tmp_path / "mine.json").write_text(mine)
    tokenizer = SimpleNamespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "mine.json"))

    def work(mesh) -> object:
        config = SimpleNamespace(tokenizer=tokenizer)
        runtime = SimpleNamespace(mesh=mesh, device=Device("cpu"), config=config, tokenizer_sha256=None)
        return provenance_of_run(runtime, open_foreign(folder), "--load")

    for origin in run_ranks({"dp": 2}, work):
        assert bool(origin.files) is carries and ("eos_token_id" in origin.kept) is carries


def test_a_folder_says_where_it_is_and_keys_that_it_may_carry(folder: Path):
    origin = open_foreign(folder).state["origin"]
    assert origin == {"model_type": "mistral", "folder": str(folder), "kept": KEPT}


@pytest.mark.parametrize(
    "mine, carries", [('{"eos_token": "</s>"}', True), ('{"eos_token": "<|im_end|>"}', False), (None, True)]
)
def test_a_tokenizer_beside_other_named_tokens_is_another(
    mine: str | None, carries: bool, folder: Path, tmp_path: Path
):
    """The same tokenizer.json; the file beside it names another end of a text."""
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(folder / "tokenizer.json", own)
    if mine is not None:
        (own / "tokenizer_config.json").write_text(mine)
    tokenizer = SimpleNamespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(own / "tokenizer.json"))

    def work(mesh) -> object:
        config = SimpleNamespace(tokenizer=tokenizer)
        runtime = SimpleNamespace(mesh=mesh, device=Device("cpu"), config=config, tokenizer_sha256=None)
        return provenance_of_run(runtime, open_foreign(folder), "--load")

    for origin in run_ranks({"dp": 2}, work):
        assert bool(origin.files) is carries
