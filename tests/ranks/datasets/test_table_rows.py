"""A folder whose tokenizer has more ids than its word table has rows, or fewer: it trains on, is resumed and is exported."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import token_files
from cases import read_record, read_tensors, write_folder
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of
from whole_run import run

import pretrain_gpt
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, FimConfig
from megatron.core.datasets.token_ids_without_embedding_row import cap_vocab_size, embedding_rows_problem
from megatron.core.models.common.model_rules import GPT_RULES
from megatron.core.parallel.mesh import Mesh

tokenizers = pytest.importorskip("tokenizers")

ROWS = 31  # of the recorded models
SCRIPT = SimpleNamespace(**vars(pretrain_gpt), rules=GPT_RULES)
REST = (
    "--micro-batch-size 1 --global-batch-size 2 --eval-iters 0 --seq-length 8 --make-vocab-size-divisible-by 8 --lr 1e-30 "
    "--device cpu --split 1,0,0 --num-workers 0 --override-opt_param-scheduler"
)


def write_tokenizer(root: Path, words: int, *added: str) -> None:
    """A tokenizer.json of whole words, whose last ids are added tokens."""
    vocab = {"<unk>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<eos>", *added])
    made.save(str(root / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path: Path):
    """write(case, words, added tokens) -> (the folder, the flag of a token file of its words)."""

    def write(case: str, words: int, *added: str, last: int | None = None) -> tuple[Path, str]:
        write_folder(tmp_path / case, read_record(case))
        write_tokenizer(tmp_path / case, words, *added)
        draw = np.random.RandomState(0)
        documents = [[[*draw.randint(2, min(words, ROWS), 20).tolist(), 1]] for _ in range(6)]
        if last is not None:
            documents[3][0][7] = last
        return tmp_path / case, f"--data-path {token_files.write(tmp_path / 'text', documents)}"

    return write


def of_rank(mesh: Mesh, flags: str) -> None:
    with trainer_of(SCRIPT, mesh, flags, predicts=False) as trainer:
        trainer.run()


@pytest.mark.full
@pytest.mark.parametrize(
    "case, words, added",
    [
        ("gemma3", 31, ["<image_soft_token>"]),
        ("qwen2", 24, []),
        pytest.param("llama", 31, ["<image>", "<audio>"], marks=pytest.mark.full),
    ],
)
def test_a_folder_trains_on_is_resumed_and_leaves_with_its_own_rows(
    case: str, words: int, added: list[str], folder, tmp_path: Path, capsys
):
    """In one process, then at TP 2 x PP 3, where the padded table has rows for the ids that the model has none for."""
    root, data = folder(case, words, *added)
    flags = f"{data} --save {tmp_path / 'run'} --save-hf {tmp_path / 'hf'}"
    run(f"{flags} --load {root} --train-iters 1", tiny=REST.split())
    out = capsys.readouterr().out
    assert added == [] or tells(out, f"{ROWS} {ROWS + len(added)} {added[0]} ({ROWS})")
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --use-checkpoint-args"
    again = f"{REST} {flags} {sizes} --load {tmp_path / 'run'} --train-iters 2"
    run_ranks({"tp": 2, "pp": 3}, partial(of_rank, flags=again))
    for step in (1, 2):
        written = tmp_path / "hf" / f"iter_000000{step}"
        assert read_tensors(written) == read_tensors(root)
        assert json.loads((written / "config.json").read_text())["vocab_size"] == ROWS
        assert (written / "tokenizer.json").read_bytes() == (root / "tokenizer.json").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("script", ["one", "many"])
@pytest.mark.parametrize("case, added", [("gemma3", ["<image_soft_token>"]), ("llama", ["<image>", "<audio>"])])
def test_an_id_without_a_row_is_refused_where_it_occurs(case: str, added: list[str], script: str, folder, capsys):
    last = ROWS + len(added) - 1
    root, data = folder(case, 31, *added, last=last)
    flags = f"{data} --load {root} --train-iters 6"
    if script == "one":
        with pytest.raises(SystemExit):
            run(flags, tiny=REST.split())
        said = capsys.readouterr().err
    else:
        flags += " --use-checkpoint-args --tensor-model-parallel-size 2"
        with pytest.raises(RuntimeError) as error:
            run_ranks({"tp": 2}, partial(of_rank, flags=f"{REST} {flags}"))
        said = str(error.value)
    assert tells(said, f"{last} 3 7 {added[-1]} {ROWS}"), said


def test_a_tokenizer_with_words_beyond_the_table_is_anothers(folder, capsys):
    root, data = folder("llama", 40)
    with pytest.raises(SystemExit):
        run(f"{data} --load {root} --train-iters 1", tiny=REST.split())
    assert tells(capsys.readouterr().err, f"40 {ROWS} 'w31' (31)")


def tokenizer_of(**more: object) -> SimpleNamespace:
    names = {i: f"w{i}" for i in range(10)} | {10: "<image>", 11: "<s>"}
    vocab = {name: i for i, name in names.items()}
    given = {
        "vocab_size": 12,
        "eod": 1,
        "inv_vocab": names,
        "vocab": vocab,
        "added_tokens": ["<image>", "<s>"],
        "name": "T",
    }
    given |= {"tokenize": lambda text: [], "detokenize": lambda ids: ""}
    return SimpleNamespace(**given | more)


@pytest.mark.parametrize(
    "more, rows, told",
    [
        ({}, 10, None),
        ({}, 12, None),
        ({}, 40, None),
        ({}, 9, "12 9 'w9' (9)"),
        ({"eod": 11}, 10, "eod (11)"),
        ({"mask": 10}, 10, "mask (10)"),
        ({"additional_special_tokens_ids": [9, 11]}, 10, "sentinel 1 (11)"),
        ({"added_tokens": []}, 10, "'<image>' (10)"),
        ({"inv_vocab": {}}, 10, "12 10 --model-vocab-size"),
    ],
)
def test_only_added_tokens_that_no_sample_needs_may_lack_a_row(more: dict, rows: int, told: str | None):
    problem = embedding_rows_problem(tokenizer_of(**more), rows)
    assert problem is None if told is None else tells(problem, told)


def test_a_token_for_the_middle_needs_a_row():
    settings = {"fim_data": True} | {f"fim_{kind}_token": "w5" for kind in ("prefix", "middle", "suffix", "pad", "eod")}
    config = FimConfig(**settings | {"fim_suffix_token": "<image>"})
    with pytest.raises(ValueError, match=r"--fim-suffix-token <image> is token 10.* 10 rows"):
        FillInTheMiddle(config, cap_vocab_size(tokenizer_of(), 10), 1)
