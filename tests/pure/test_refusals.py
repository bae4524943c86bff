"""Bad input of every kind that is decided before processes communicate: what was given, what is allowed, what to change."""

import shlex
from pathlib import Path

import pytest

from megatron.core import parallel_state
from megatron.core.config import ConfigError
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.initialize import read_settings

BASE = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--device cpu"
)
MOCK = " --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
REAL = " --tokenizer-type NullTokenizer --vocab-size 60 "

# What is wrong: (ranks, flags after BASE, what the message says). {tmp} is a folder with a file "file" in it.
REFUSALS = {
    # ---- the line itself
    "unknown flag": (1, MOCK + "--num-layer 3", ["unknown flag --num-layer", "did you mean --num-layers?"]),
    "abbreviation": (1, MOCK + "--micro-batch 3", ["unknown flag --micro-batch", "--micro-batch-size"]),
    "unlike anything": (1, MOCK + "--xyzzy", ["unknown flag --xyzzy", "--help"]),
    "word without a flag": (1, MOCK + "--bf16 yes", ["yes does not belong to any flag"]),
    "not a number": (1, MOCK + "--lr fast", ["--lr", "'fast' is not a number"]),
    "not a whole number": (1, MOCK + "--train-iters 1e3", ["--train-iters", "'1e3' is not a whole number"]),
    "infinite": (1, MOCK + "--lr inf", ["--lr", "inf is not a finite number"]),
    "no value": (1, MOCK + "--seed", ["--seed", "expected one argument"]),
    "empty value": (1, MOCK + "--save ''", ["--save", "the value is empty", "leave the flag out"]),
    "not a choice": (1, MOCK + "--normalization Batch", ["--normalization", "'Batch'", "LayerNorm, RMSNorm"]),
    "renamed": (1, MOCK + "--batch-size 4", ["--batch-size: was renamed", "use --micro-batch-size"]),
    "not built": (1, MOCK + "--use-megatron-fsdp", ["--use-megatron-fsdp: there is one data-parallel wrapper", "use --zero-stage 3"]),
    "experts": (1, MOCK + "--num-experts 8", ["--num-experts: mixtures of experts are not built yet", "leave it out"]),
    "context parallel": (2, MOCK + "--context-parallel-size 2", ["--context-parallel-size is 2", "use 1"]),
    "contradiction": (
        1, MOCK + "--recompute-activations --checkpoint-activations",
        ["--checkpoint-activations stands for --recompute-granularity full", "--recompute-activations", "give one"],
    ),
    "settings file missing": (1, MOCK + "--yaml-cfg {tmp}/no.yaml", ["--yaml-cfg {tmp}/no.yaml", "name a YAML file"]),
    # ---- one component
    "out of range": (1, MOCK + "--seed -1", ["--seed is -1", "[0, 2^32)"]),
    "negative": (1, MOCK + "--weight-decay -1", ["--weight-decay is -1", "not be negative"]),
    "dropout": (1, MOCK + "--hidden-dropout 1", ["--hidden-dropout is 1.0", "[0, 1)"]),
    "local rank": (1, MOCK + "--local-rank -1", ["--local-rank is -1", "must not be negative"]),
    "loss scale": (1, MOCK + "--initial-loss-scale 3", ["--initial-loss-scale is 3.0", "power of two"]),
    "two precisions": (1, MOCK + "--bf16 --fp16", ["--bf16 and --fp16 exclude each other", "give one"]),
    "hidden by heads": (1, MOCK + "--hidden-size 50", ["--hidden-size 50", "--num-attention-heads 4", "change one"]),
    "query groups": (
        1, MOCK + "--group-query-attention --num-query-groups 3",
        ["--num-attention-heads 4", "--num-query-groups 3", "change one"],
    ),
    "groups without a switch": (1, MOCK + "--num-query-groups 2", ["--num-query-groups needs --group-query-attention"]),
    "minimum rate": (1, MOCK + "--min-lr 1", ["--min-lr is 1.0", "between 0 and --lr (0.001)"]),
    "two warm-ups": (
        1, MOCK + "--lr-warmup-iters 2 --lr-warmup-fraction 0.1",
        ["--lr-warmup-fraction and --lr-warmup-iters exclude each other", "give one"],
    ),
    "recompute what": (1, MOCK + "--recompute-method block", ["--recompute-method", "need --recompute-granularity full"]),
    "split": (1, REAL + "--data-path x --split 1e3,1", ["--split 1e3,1", "'1e3' is not a number", "969,30,1"]),
    "split of nan": (1, REAL + "--data-path x --split 1,nan,0", ["--split 1,nan,0", "'nan' is not a number"]),
    "blend": (1, REAL + "--data-path 0.5 a 0 b", ["--data-path: weight 0.0 of b must be a positive number"]),
    "tokenizer without files": (
        1, " --mock-data --tokenizer-type GPT2BPETokenizer",
        ["--tokenizer-type GPT2BPETokenizer needs --vocab-file", "--tokenizer-type GPT2BPETokenizer needs --merge-file"],
    ),
    # ---- several components, and the number of processes
    "world size": (
        6, MOCK + "--tensor-model-parallel-size 4",
        ["world size 6 is not a multiple of 4", "tensor-model-parallel-size (4)", "another number of processes"],
    ),
    "heads by ranks": (
        3, MOCK + "--tensor-model-parallel-size 3",
        ["--num-attention-heads (4) must be a multiple of --tensor-model-parallel-size (3)"],
    ),
    "groups by ranks": (
        4, MOCK + "--num-attention-heads 12 --group-query-attention --num-query-groups 6 --tensor-model-parallel-size 4",
        ["--num-query-groups (6)", "--tensor-model-parallel-size (4)", "change one"],
    ),
    "layers by stages": (
        3, MOCK + "--pipeline-model-parallel-size 3",
        ["the number of layers (4) must be a multiple of the number of stages (3", "change --num-layers"],
    ),
    "layers by chunks": (
        2, MOCK + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        ["--num-layers (4) must be a multiple of 6", "--num-layers-per-virtual-pipeline-stage (3)"],
    ),
    "chunks without a pipeline": (
        1, MOCK + "--num-virtual-stages-per-pipeline-rank 2",
        ["several chunks per rank need a pipeline", "--pipeline-model-parallel-size to 2 or more"],
    ),
    "uneven stages": (
        2, MOCK + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 5",
        ["--decoder-first-pipeline-num-layers (5) leaves -1 of --num-layers (4)", "change one"],
    ),
    "microbatches by stages": (
        4, MOCK + "--pipeline-model-parallel-size 4 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 12",
        ["interleaved", "6", "multiple", "4", "--global-batch-size"],
    ),
    "sequence by ranks": (
        4, MOCK + "--seq-length 30 --tensor-model-parallel-size 4 --sequence-parallel",
        ["--seq-length (30)", "--tensor-model-parallel-size (4)", "change one"],
    ),
    "positions": (1, MOCK + "--max-position-embeddings 16", ["--max-position-embeddings (16) must be at least --seq-length (32)"]),
    "batch": (
        4, MOCK + "--global-batch-size 12",
        ["--global-batch-size (12) must be a multiple of 8", "--micro-batch-size (2) x data-parallel size (4)"],
    ),
    "recomputed layers": (
        2, MOCK + "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 99",
        ["--recompute-num-layers is 99", "at most 2"],
    ),
    "warm-up past the decay": (1, MOCK + "--lr-warmup-iters 10", ["warm-up (10 iterations)", "(10)", "lower --lr-warmup-iters"]),
    "save interval without a folder": (1, MOCK + "--save-interval 5", ["--save-interval needs --save"]),
    "nothing to do": (
        1, MOCK + "--skip-train --eval-iters 0", ["--skip-train with --eval-iters 0 leaves nothing to do", "raise --eval-iters"]
    ),
    "data twice": (1, MOCK + "--data-path x", ["--data-path and --mock-data exclude each other", "give one"]),
    "no data": (1, REAL, ["no data", "--data-path PREFIX", "--mock-data"]),
    # ---- files and devices
    "data file": (1, REAL + "--data-path {tmp}/no", ["--data-path {tmp}/no", "{tmp}/no.idx does not exist", "prefix"]),
    "vocabulary": (
        1, " --mock-data --tokenizer-type GPT2BPETokenizer --vocab-file {tmp}/v.json --merge-file {tmp}/m.txt",
        ["--vocab-file {tmp}/v.json", "no such file"],
    ),
    "tokenizer file": (
        1, " --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp}/file", ["{tmp}/file is no tokenizer.json"]
    ),
    "save into a file": (1, MOCK + "--save {tmp}/file", ["--save {tmp}/file cannot be written", "is a file", "another folder"]),
    "save below a file": (1, MOCK + "--save {tmp}/file/a/b", ["--save {tmp}/file/a/b", "{tmp}/file is a file", "another folder"]),
    "load a file": (1, MOCK + "--load {tmp}/file", ["--load {tmp}/file is a file", "folder"]),
    "device": (1, MOCK + "--device xpu", ["--device xpu is not available", "--device cpu"]),
}  # fmt: skip


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """launched(ranks, flags) -> the words of a command line, in a process that was started as one of so many."""

    def start(ranks: int, flags: str) -> list[str]:
        (tmp_path / "file").write_text("not a folder")
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that the threads of this process stay as they are
        monkeypatch.setattr(parallel_state, "start_distributed", lambda *_: pytest.fail("the processes meet"))
        return shlex.split((BASE + flags).replace("{tmp}", str(tmp_path)))

    return start


@pytest.mark.parametrize("ranks, flags, said", REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_work_is_refused_in_words(launched, tmp_path, capsys, ranks, flags, said):
    words = launched(ranks, flags)
    with pytest.raises(ConfigError) as error:
        read_settings(None, None, words)
    for text in said:
        assert text.replace("{tmp}", str(tmp_path)) in str(error.value)
    assert len(error.value.problems) <= 2, "one mistake, or two that go together"
    if ranks == 1:
        with pytest.raises(SystemExit) as stop:
            pretrain(None, None, ModelType.encoder_or_decoder, lambda data, model: None, argv=words)
        assert stop.value.code == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"cannot start, {len(error.value.problems)} problem(s):\n  - ")
        assert all(problem in printed for problem in error.value.problems)


def test_a_line_without_mistakes_is_read(launched):
    assert read_settings(None, None, launched(1, MOCK)).tokenizer.vocab_size == 61


def test_problems_of_settings_and_of_files_come_together(launched, tmp_path):
    words = launched(4, REAL + "--data-path {tmp}/no --save {tmp}/file --global-batch-size 12 --tokenizer-type "
                     "GPT2BPETokenizer --vocab-file {tmp}/v --merge-file {tmp}/m")  # fmt: skip
    with pytest.raises(ConfigError) as error:
        read_settings(None, None, words)
    assert [problem.split()[0] for problem in error.value.problems] == [
        "--global-batch-size", "--data-path", "--save", "--vocab-file"
    ]  # fmt: skip


# Mistakes in several components: (ranks, flags, the beginnings of all problems).
TOGETHER = [
    (2, MOCK + "--weight-decay -1 --hidden-size 50 --save {tmp}/file", ["--hidden-size 50", "--weight-decay is", "--save {tmp}/file"]),
    (2, MOCK + "--hidden-size 50 --global-batch-size 3 --lr-warmup-iters 20", ["--hidden-size 50", "--global-batch-size (3)", "the warm-up (20"]),
    (2, MOCK + "--num-layer 3 --global-batch-size 3 --max-position-embeddings 3", ["unknown flag --num-layer;", "--max-position-embeddings (3)", "--global-batch-size (3)"]),
    (1, MOCK + "--lr fast --seed x --hidden-size 50", ["--lr: 'fast'", "--seed: 'x'", "--hidden-size 50"]),
    (3, MOCK + "--tensor-model-parallel-size 2 --max-position-embeddings 3 --save-interval 3", ["--max-position-embeddings (3)", "world size 3", "--save-interval needs"]),
    (2, REAL + "--data-path {tmp}/no --seed -1 --load {tmp}/file", ["--seed is -1", "--data-path {tmp}/no:", "--load {tmp}/file is"]),
    (2, REAL + "--data-path {tmp}/no --lr fast --device xpu", ["--lr: 'fast'", "--data-path {tmp}/no:", "--device xpu"]),
    (1, MOCK + "--normalization Batch --num-experts 8 --seed -1", ["--normalization: 'Batch'", "--num-experts:", "--seed is -1"]),
    # of the parts that could not be read nothing is said, nor of what may follow from them
    (6, MOCK + "--tensor-model-parallel-size x --pipeline-model-parallel-size 4 --global-batch-size 7", ["--tensor-model-parallel-size: 'x'"]),
    (1, MOCK + "--batch-size 4 --micro-batch-size 0", ["--batch-size: was renamed", "--micro-batch-size is 0"]),
]  # fmt: skip


@pytest.mark.parametrize("ranks, flags, problems", TOGETHER)
def test_mistakes_in_several_components_are_said_at_once(launched, tmp_path, ranks, flags, problems):
    words = launched(ranks, flags)
    with pytest.raises(ConfigError) as error:
        read_settings(None, None, words)
    expected = [problem.replace("{tmp}", str(tmp_path)) for problem in problems]
    assert len(error.value.problems) == len(expected), error.value.problems
    assert all(sum(p.startswith(begin) for p in error.value.problems) == 1 for begin in expected), error.value.problems


def test_a_folder_that_allows_no_files_is_named(launched, tmp_path, monkeypatch):
    """The user who runs the tests may be allowed everything."""
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError) as error:
        read_settings(None, None, launched(1, MOCK + "--save {tmp}/a/b"))
    assert str(error.value) == (
        f"--save {tmp_path}/a/b cannot be written: {tmp_path} allows this user no new files; choose another folder"
    )


def test_nothing_is_written_where_something_is_refused(launched, tmp_path):
    with pytest.raises(ConfigError):
        read_settings(None, None, launched(1, MOCK + "--save {tmp}/new --max-position-embeddings 3"))
    assert {path.name for path in Path(tmp_path).iterdir()} == {"file"}


def test_a_stage_split_with_two_mistakes_counts_as_two_problems(launched):
    flags = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 16 "
    flags += "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5 --global-batch-size 8"
    with pytest.raises(ConfigError) as error:
        read_settings(None, None, launched(4, MOCK + flags))
    assert [p.split(" (")[0] for p in error.value.problems][:2] == [
        "pipeline: --decoder-first-pipeline-num-layers", "pipeline: --decoder-last-pipeline-num-layers"
    ]  # fmt: skip
    assert all("\n" not in problem for problem in error.value.problems)
