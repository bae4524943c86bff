"""--save-hf: the folder that running ranks write has the bits of the one that a single process makes of their checkpoint."""

import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pretrain_t5
import pytest
import torch
import whole_run
from cases import read_record, read_tensors, write_folder
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of
from sentence_files import write_sentences
from whole_run import run

import pretrain_bert
import pretrain_gpt
from megatron.convert import gather_ranks_to_hf_folder, is_foreign, open_foreign
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import CheckpointError, open_checkpoint
from megatron.core.inference.load_model import load_gpt
from megatron.core.parallel import collectives
from megatron.core.transformer.model_config import ModelConfig
from tools import checkpoint_convert

GPT = SimpleNamespace(**vars(pretrain_gpt))
SMALL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 30 --make-vocab-size-divisible-by 8 --micro-batch-size 1 --global-batch-size 4 --lr 0.1 --eval-iters 0 "
    "--device cpu --train-iters 2"
)
LLAMA = (
    " --swiglu --ffn-hidden-size 24 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 2 --hidden-dropout 0 --attention-dropout 0"
)
TP, PP = " --tensor-model-parallel-size 2", " --pipeline-model-parallel-size 2"
# name: (ranks, flags)
LAYOUTS = {
    "tp 2, pp 2, llama, bf16": ({"tp": 2, "pp": 2}, LLAMA + TP + PP + " --sequence-parallel --bf16"),
    "vpp 2, zero 1": ({"pp": 2, "dp": 2}, PP + " --num-virtual-stages-per-pipeline-rank 2 --zero-stage 1"),
    "tp 2, ep 2, zero 1, experts, bf16": (
        {"tp": 2, "dp": 2, "ep": 2},
        LLAMA
        + TP
        + " --num-experts 4 --moe-ffn-hidden-size 12 --expert-model-parallel-size 2 --zero-stage 1 --bf16"
        + " --moe-token-dispatcher-type alltoall --sequence-parallel",
    ),
    "zero 3, llama": ({"dp": 4}, LLAMA + " --zero-stage 3"),
    "cp 2, zero 3, params in files": (
        {"cp": 2, "dp": 2},
        " --attention-dropout 0 --context-parallel-size 2 --zero-stage 3 --offload-params --offload-dir {tmp}/files",
    ),
}


def train(mesh, flags: str) -> None:
    with trainer_of(GPT, mesh, flags, predicts=False) as trainer:
        trainer.run()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def converted(root: Path, out: Path, *more: str) -> dict[str, bytes]:
    """The folder that the tool writes of a checkpoint."""
    assert checkpoint_convert.main(["--load", str(root), "--save-hf", str(out), *more]) == 0
    return files_of(out)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_write_the_bytes_of_one_process(layout: str, tmp_path: Path, monkeypatch):
    """In files of two kilobytes, and parts of 512 bytes at a time."""
    monkeypatch.setattr(gather_ranks_to_hf_folder, "_ROW_BLOCK_BYTES", 512)
    sizes, flags = LAYOUTS[layout]
    folders = f" --save {tmp_path}/own --save-interval 1 --save-hf {tmp_path}/hf --save-hf-interval 1 --save-hf-max-shard-size 2KB"
    run_ranks(sizes, partial(train, flags=SMALL + flags.format(tmp=tmp_path) + folders))
    assert sorted(os.listdir(tmp_path / "hf")) == ["iter_0000001", "iter_0000002"]
    for iteration in (1, 2):
        words = ["--iteration", str(iteration), "--max-shard-size", "2KB"]
        expected = converted(tmp_path / "own", tmp_path / f"of {iteration}", *words)
        assert files_of(tmp_path / f"hf/iter_000000{iteration}") == expected and len(expected) > 5
    assert files_of(tmp_path / "hf/iter_0000001") != files_of(tmp_path / "hf/iter_0000002")


@pytest.mark.full
def test_a_folder_loads_back_with_the_scores_of_the_checkpoint(tmp_path: Path):
    """And a run that starts from it, by --load, begins with its weights."""
    run(f"--train-iters 2 --save {tmp_path}/own --save-hf {tmp_path}/hf")
    folder = tmp_path / "hf/iter_0000002"
    scores = []
    for checkpoint in (open_checkpoint(tmp_path / "own"), open_foreign(folder)):
        config = ModelConfig(**open_foreign(folder).state["config"]["transformer"])
        model = load_gpt(checkpoint, config, vocab_size=checkpoint.state["vocab_size"], positions=8)
        scores.append(model(torch.arange(8)[None], torch.arange(8)[None]))
    assert torch.equal(*scores)
    run(f"--load {folder} --train-iters 1 --save-hf {tmp_path}/again --save-hf-dtype bfloat16")
    found, before = read_tensors(tmp_path / "again/iter_0000001"), read_tensors(folder)
    assert found.keys() == before.keys() and {x[0] for x in found.values()} == {"BF16"}


def test_a_run_from_a_folder_writes_its_family_and_tokenizer(tmp_path: Path):
    record = read_record("mistral")
    write_folder(tmp_path / "in", record | {"config": record["config"] | {"sliding_window": None}})
    (tmp_path / "in/tokenizer.json").write_text("of a Mistral")
    rest = "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --micro-batch-size 1 --lr 0.1 --eval-iters 0 --device cpu"
    run(f"--load {tmp_path}/in --seq-length 8 --train-iters 1 --save-hf {tmp_path}/hf", tiny=rest.split())
    folder = tmp_path / "hf/iter_0000001"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mistral"
    assert (folder / "tokenizer.json").read_text() == "of a Mistral"


@pytest.mark.full
def test_berts_and_t5s_are_written_too(tmp_path: Path):
    documents = [((5 + np.arange(12)) % 50, [4, 4, 4])] * 40
    data = write_sentences(tmp_path, documents, words=60, pieces=20)
    shared = [
        *[
            "--num-layers",
            "2",
            "--hidden-size",
            "16",
            "--num-attention-heads",
            "4",
            "--seq-length",
            "16",
            "--micro-batch-size",
            "2",
            "--lr",
            "1e-2",
            "--train-iters",
            "1",
        ],
        *["--device", "cpu", "--eval-iters", "0", "--num-workers", "0", "--split", "8,2,0"],
        *data,
    ]
    t5 = "--decoder-num-layers 2 --decoder-seq-length 10 --vocab-extra-ids 5 --position-embedding-type relative --normalization RMSNorm "
    t5 += "--disable-bias-linear --softmax-scale 1 --activation relu --relative-attention-num-buckets 8"
    models = {pretrain_bert: "--norm-placement post", pretrain_t5: t5}
    for script, flags in models.items():
        own, hf = tmp_path / f"{script.__name__}-own", tmp_path / f"{script.__name__}-hf"
        run(f"{flags} --save {own} --save-hf {hf}", script=script, tiny=shared)
        assert files_of(hf / "iter_0000001") == converted(own, tmp_path / f"{script.__name__}-expected")


# ---------------------------------------------------------------- when, and what is in the way


def iterations_in(root: Path) -> list[str]:
    return sorted(name.removeprefix("iter_000000") for name in os.listdir(root))


@pytest.mark.full
def test_folders_come_at_the_interval_and_where_the_run_ends(tmp_path: Path, capsys):
    """By --exit-interval too; a later run replaces those that it comes to again, and --async-save changes nothing."""
    flags = f"--save {tmp_path}/own --load {tmp_path}/own --save-hf {tmp_path}/hf --save-hf-interval 2 --train-iters 7"
    run(f"{flags} --exit-interval 5")
    assert iterations_in(tmp_path / "hf") == ["2", "4", "5"]
    before = files_of(tmp_path / "hf/iter_0000005")
    run(f"{flags} --async-save")
    assert iterations_in(tmp_path / "hf") == ["2", "4", "5", "6", "7"]
    assert files_of(tmp_path / "hf/iter_0000005") == before
    (tmp_path / "hf/iter_0000004/config.json").write_text('{"model_type": "gpt2"}')
    run(f"{flags.replace('--load', '--pretrained-checkpoint')} --exit-interval 4")
    assert json.loads((tmp_path / "hf/iter_0000004/config.json").read_text())["n_layer"] == 1
    assert "no tokenizer is written" in capsys.readouterr().out


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing of the product catches it."""


def dying(real: Callable, count: int) -> Callable:
    """A function that is killed at its `count`-th call."""
    calls = itertools.count(1)

    def function(*given: object) -> object:
        if next(calls) == count:
            raise Killed
        return real(*given)

    return function


@pytest.mark.full
def test_a_kill_in_an_export_leaves_nothing_that_looks_whole_and_the_same_command_writes_it(
    tmp_path: Path, monkeypatch
):
    """At each file of weights, and before the last file is there."""
    flags = f"--save {tmp_path}/own --load {tmp_path}/own --save-hf {tmp_path}/hf --save-hf-max-shard-size 1KB --train-iters 1"
    for name, count in (("write_weights_file", 2), ("write_config_and_aux_files", 1)):
        with monkeypatch.context() as patched:
            patched.setattr(gather_ranks_to_hf_folder, name, dying(getattr(gather_ranks_to_hf_folder, name), count))
            with pytest.raises(Killed):
                run(flags)
        parallel_state.stop_distributed()  # as the end of a process does
        assert os.listdir(tmp_path / "hf") == ["iter_0000001.partial"]
        assert not is_foreign(tmp_path / "hf/iter_0000001.partial")
    run(flags)
    assert files_of(tmp_path / "hf/iter_0000001") == converted(
        tmp_path / "own", tmp_path / "out", "--max-shard-size", "1KB"
    )


@pytest.mark.full
def test_a_full_disk_fails_on_all_ranks_and_the_checkpoint_is_there(tmp_path: Path, monkeypatch):
    def full(*given) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gather_ranks_to_hf_folder, "write_weights_file", full)
    flags = f"{SMALL} --zero-stage 1 --save {tmp_path}/own --save-hf {tmp_path}/hf"

    def work(mesh) -> str:
        with pytest.raises((CheckpointError, collectives.PeerError)) as error:
            train(mesh, flags)
        return str(error.value)

    said = run_ranks({"dp": 2}, work)
    assert all("No space left" in text for text in said) and tells(said[0], f"{tmp_path}/hf/iter_0000002")
    assert open_checkpoint(tmp_path / "own").iteration == 2


@pytest.mark.full
def test_numbers_that_the_dtype_cannot_hold_are_refused_by_the_run_and_by_the_tool(tmp_path: Path, capsys):
    """On all ranks: a folder with infinity in it would look whole. Gathered parts of a tensor stay in step to its end."""
    flags = f"{SMALL} --train-iters 1 --init-method-std 1e5{TP} --save {tmp_path}/own --save-hf {tmp_path}/hf --save-hf-dtype float16"

    def work(mesh) -> str:
        with pytest.raises((CheckpointError, collectives.PeerError)) as error:
            train(mesh, flags)
        return str(error.value)

    said = run_ranks({"tp": 2}, work)
    assert tells(said[0], "float16 65504 --save-hf-dtype") and not (tmp_path / "hf/iter_0000001").exists()
    assert (
        checkpoint_convert.main(
            ["--load", str(tmp_path / "own"), "--save-hf", str(tmp_path / "out"), "--dtype", "float16"]
        )
        == 1
    )
    assert tells(capsys.readouterr().err, "float16 65504 --dtype") and not (tmp_path / "out").exists()
    converted(tmp_path / "own", tmp_path / "wide", "--dtype", "bfloat16")


@pytest.mark.full
def test_the_folder_of_an_interval_that_a_killed_run_left_out_is_written_where_the_next_begins(tmp_path: Path):
    flags = f"--save {tmp_path}/own --load {tmp_path}/own --save-hf {tmp_path}/hf --save-hf-interval 2 --train-iters 5"
    run(f"{flags} --exit-interval 4")
    expected = files_of(tmp_path / "hf/iter_0000004")
    (tmp_path / "hf/iter_0000004").rename(tmp_path / "hf/iter_0000004.partial")
    run(flags)
    assert iterations_in(tmp_path / "hf") == ["2", "4", "5"] and files_of(tmp_path / "hf/iter_0000004") == expected


@pytest.mark.full
def test_a_link_in_place_of_a_folder_is_replaced_and_what_it_leads_to_stays(tmp_path: Path):
    run(f"--train-iters 1 --save-hf {tmp_path}/elsewhere")
    before = files_of(tmp_path / "elsewhere")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/iter_0000001").symlink_to(tmp_path / "elsewhere/iter_0000001")
    run(f"--train-iters 1 --save-hf {tmp_path}/hf --save-hf-dtype bfloat16")
    assert os.listdir(tmp_path / "hf") == ["iter_0000001"] and not (tmp_path / "hf/iter_0000001").is_symlink()
    assert files_of(tmp_path / "elsewhere") == before != files_of(tmp_path / "hf")


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--save-hf s3://bucket/x", "--save-hf s3://bucket/x URL"),
        ("--save-dcp s3://bucket/x", "--save-dcp s3://bucket/x URL"),
        ("--save-hf {tmp}/out --tokenizer {tmp}/none", "--tokenizer {tmp}/none"),
        ("--save-hf {tmp}/out --tokenizer {tmp}/own", "--tokenizer {tmp}/own tokenizer.json"),
    ],
)
def test_what_the_tool_cannot_write_or_take_is_refused_before_it_writes(
    flags: str, named: str, tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run(f"--train-iters 1 --save {tmp_path}/own")
    capsys.readouterr()
    assert checkpoint_convert.main(["--load", f"{tmp_path}/own", *flags.format(tmp=tmp_path).split()]) == 2
    assert tells(capsys.readouterr().err, named.format(tmp=tmp_path)) and os.listdir(tmp_path) == ["own"]


def test_the_tool_takes_file_urls(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(f"--train-iters 1 --save {tmp_path}/own")
    assert checkpoint_convert.main(["--load", f"file://{tmp_path}/own", "--save-hf", f"file://{tmp_path}/hf"]) == 0
    assert is_foreign(tmp_path / "hf") and sorted(os.listdir(tmp_path)) == ["hf", "own"]


REFUSED = {
    "the folder of --save": ("--save {tmp}/x --save-hf {tmp}/x", "--save-hf --save {tmp}/x"),
    "a folder of something else": ("--save-hf {tmp}/other", "--save-hf {tmp}/other notes.txt"),
    "the folder of folders with --load": (
        "--load {tmp}/hf/iter_0000001 --save-hf {tmp}/hf",
        "--load --save-hf {tmp}/hf",
    ),
    "the name of a checkpoint": ("--save {tmp}/x --save-hf {tmp}/x/iter_0000001", "--save-hf --save {tmp}/x/hf"),
    "a file": ("--save-hf {tmp}/other/notes.txt", "--save-hf {tmp}/other/notes.txt"),
    "a URL": ("--save-hf s3://bucket/x", "--save-hf s3://bucket/x folder"),
    "nothing is trained": ("--save-hf {tmp}/x --skip-train --eval-iters 1", "--save-hf --skip-train"),
    "an interval alone": ("--save-hf-interval 2", "--save-hf-interval --save-hf"),
    "no size": ("--save-hf {tmp}/x --save-hf-max-shard-size 5G", "--save-hf-max-shard-size 5GB"),
    "an option that no family has": ("--save-hf {tmp}/x --softmax-type learnable", "--save-hf gpt2 softmax_type"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", REFUSED)
def test_what_stands_in_the_way_refuses_the_run_before_its_first_step(case: str, tmp_path: Path, refused, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    flags, names = REFUSED[case]
    assert tells(refused(f"--train-iters 1 {flags.format(tmp=tmp_path)}"), names.format(tmp=tmp_path))
    assert (tmp_path / "other/notes.txt").read_text() == "mine" and not (tmp_path / "x").exists()


def test_of_what_no_family_can_say_the_nearest_is_shown_and_none_of_another_kind_of_model(refused, tmp_path: Path):
    said = refused(f"--train-iters 1 --save-hf {tmp_path}/x --qk-layernorm")
    assert tells(said, "gpt2 qk_layernorm True") and said.count("it would be") == 1
    assert "t5" not in said and "bert" not in said


def test_the_folder_of_all_iterations_is_no_checkpoint_and_says_what_to_give(tmp_path: Path, refused):
    run(f"--train-iters 1 --save-hf {tmp_path}/hf")
    assert tells(refused(f"--train-iters 1 --load {tmp_path}/hf"), f"--load {tmp_path}/hf/iter_0000001 --save-hf")


def test_a_run_with_the_files_of_gpt2_writes_a_tokenizer_and_the_id_that_ends_a_text(tmp_path: Path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    (tmp_path / "v.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "m.txt").write_text("#version: 0.2\n")
    tokenizer = f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path}/v.json --merge-file {tmp_path}/m.txt"
    kept = [word for word in whole_run.TINY if word not in ("--tokenizer-type", "NullTokenizer", "--vocab-size", "31")]
    run(f"{tokenizer} --train-iters 1 --save {tmp_path}/own --save-hf {tmp_path}/hf", tiny=kept)
    out = tmp_path / "hf/iter_0000001"
    assert {"vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"} <= {*os.listdir(out)}
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 256
    assert files_of(out) == converted(tmp_path / "own", tmp_path / "expected"), "the tool writes the same"
    assert "no tokenizer is written" not in capsys.readouterr().out


# Keys of config.json that a written folder lacks: what the class sets itself, or repeats.
NOT_WRITTEN = {"transformers_version", "use_cache", "max_window_layers"}
OF_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe", "granitemoeshared", "gpt_oss")


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.sweep] * (name not in ("qwen2_moe", "gpt_oss"))) for name in OF_EXPERTS],
)
def test_a_folder_of_experts_goes_through_four_ranks_to_the_bit(case: str, tmp_path: Path):
    """A bfloat16 folder trained at EP 2 x TP 2, by steps too small to change a number, is written as it was."""
    record = read_record(case)
    config = record["config"] | {"dtype": "bfloat16", "router_aux_loss_coef": 0.25}
    config["sliding_window"] = config.get("sliding_window") or None  # 0 says the same
    write_folder(tmp_path / "in", record | {"config": config}, "BF16")
    flags = (
        f"--load {tmp_path}/in --save-hf {tmp_path}/hf --seq-length 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 30 "
        "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-37 --weight-decay 0 --eval-iters 0 --device cpu "
        "--expert-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
    )
    run_ranks({"tp": 2, "dp": 2, "ep": 2}, partial(train, flags=flags + TP))
    folder = tmp_path / "hf/iter_0000002"
    assert read_tensors(folder) == read_tensors(tmp_path / "in")
    written = json.loads((folder / "config.json").read_text())
    differing = {key for key, value in config.items() if written.get(key) != value and value is not None}
    assert differing <= NOT_WRITTEN
