"""A run from a folder's weights under another tokenizer: refused, or the rows of the tokens that both have."""

import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import read_record, weight, write_folder
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of
from whole_run import run

import pretrain_gpt
from megatron.convert.read_hf_token_to_id import read_vocabulary
from megatron.core.dist_checkpointing import open_checkpoint
from megatron.core.dist_checkpointing.save_load_state_dict import load_whole_tensors
from megatron.core.sharding.boxes import whole
from megatron.core.sharding.initial_values import normal_box
from megatron.core.tokenizers.vocabulary_changes_and_embedding_rows import (
    RowRun,
    changed_or_lost_tokens,
    rows_by_id,
    rows_by_token,
    rule_difference,
)
from tools import checkpoint_convert, generate

SCRIPT = SimpleNamespace(**vars(pretrain_gpt))
REST_TEXT = (
    "--mock-data --micro-batch-size 1 --global-batch-size 2 --lr 1e-30 --weight-decay 0 --eval-iters 0 "
    "--seq-length 8 --train-iters 1 --make-vocab-size-divisible-by 8 --device cpu"
)
REST = shlex.split(REST_TEXT)
THEIRS = ["</s>", "<unk>", *(f"word{i}" for i in range(29))]
TABLE, HEAD = "model/language_model.embedding.word_embeddings.weight", "model/language_model.output_layer.weight"


def write_tokenizer(root: Path, tokens: list[str]) -> Path:
    """A tokenizer.json of whole words, with these tokens at ids 0, 1, ..."""
    special = [
        {"id": i, "content": token, "special": True} for i, token in enumerate(tokens) if token in ("</s>", "<unk>")
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    held = {
        **{
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "normalizer": None,
            "post_processor": None,
            "decoder": None,
        },
        **{"added_tokens": [one | flags for one in special], "pre_tokenizer": {"type": "Whitespace"}},
        "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {token: i for i, token in enumerate(tokens)}},
    }
    root.mkdir(exist_ok=True)
    (root / "tokenizer.json").write_text(json.dumps(held))
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "llama", "llama")


def made(root: Path, case: str) -> Path:
    write_folder(root, read_record(case))
    return write_tokenizer(root, THEIRS)


def swapped(tokens: list[str], *pairs: tuple[int, int]) -> list[str]:
    tokens = list(tokens)
    for a, b in pairs:
        tokens[a], tokens[b] = tokens[b], tokens[a]
    return tokens


# ---------------------------------------------------------------- other tokenizers


OTHERS = {
    "two words in each other's place": swapped(THEIRS, (5, 9)),
    "another word": [*THEIRS[:7], "other", *THEIRS[8:]],
    "the end of a document elsewhere": swapped(THEIRS, (0, 30)),
}


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_folders_weights_under_another_tokenizer_are_refused(
    other: str, flag: str, folder: Path, tmp_path: Path, capsys
):
    mine = write_tokenizer(tmp_path / "mine", OTHERS[other])
    start = f"{flag} {folder} --tokenizer-model {mine}"
    with pytest.raises(SystemExit):
        run(start, tiny=REST)
    said = capsys.readouterr().err
    first = next(i for i, token in enumerate(OTHERS[other]) if token != THEIRS[i])
    assert tells(
        said, f"{first} {THEIRS[first]} {OTHERS[other][first]} --allow-tokenizer-change --resize-token-embeddings"
    )
    if flag == "--load":
        run(f"{start} --allow-tokenizer-change", tiny=REST)
        said = capsys.readouterr().out
        assert any("WARNING" in line and "another tokenizer" in line for line in said.splitlines())


def test_what_was_converted_is_compared_too_and_generation_asks_for_the_folders_tokenizer(
    folder: Path, tmp_path: Path, capsys
):
    mine = write_tokenizer(tmp_path / "mine", swapped(THEIRS, (5, 9)))
    assert checkpoint_convert.main(["--load", str(folder), "--save", str(tmp_path / "ours")]) == 0
    with pytest.raises(SystemExit):
        run(f"--use-checkpoint-args --pretrained-checkpoint {tmp_path / 'ours'} --tokenizer-model {mine}", tiny=REST)
    assert tells(capsys.readouterr().err, "word3 word7 --allow-tokenizer-change")
    words = ["--load", str(folder), "--prompt", "word1", "--max-new-tokens", "1", "--device", "cpu"]
    assert generate.main(words) == 0
    with pytest.raises(SystemExit) as stop:
        sys.exit(generate.main([*words, "--tokenizer-model", str(mine)]))
    assert stop.value.code == 1 and tells(capsys.readouterr().err, "word3 word7")


@pytest.mark.full
def test_a_copy_a_longer_one_and_one_that_nobody_can_compare_are_taken(folder: Path, tmp_path: Path, capsys):
    copy = write_tokenizer(tmp_path / "copy", THEIRS)
    run(f"--load {folder} --tokenizer-model {copy}", tiny=REST)
    assert "another tokenizer" not in capsys.readouterr().out
    run(f"--load {folder} --tokenizer-type NullTokenizer --vocab-size 30", tiny=REST)
    assert "another tokenizer" not in capsys.readouterr().out
    (folder / "tokenizer.json").write_text("no tokenizer")
    run(f"--load {folder} --tokenizer-model {copy}", tiny=REST)
    assert any("WARNING" in line and "not compared" in line for line in capsys.readouterr().out.splitlines())


RULES = {"pre_tokenizer": {"type": "WhitespaceSplit"}, "normalizer": {"type": "Lowercase"}}


@pytest.mark.parametrize("part", RULES)
def test_the_same_tokens_into_which_text_is_cut_otherwise_are_refused(part: str, folder: Path, tmp_path: Path, capsys):
    mine = write_tokenizer(tmp_path / "mine", THEIRS) / "tokenizer.json"
    mine.write_text(json.dumps(json.loads(mine.read_text()) | {part: RULES[part]}))
    with pytest.raises(SystemExit):
        run(f"--pretrained-checkpoint {folder} --tokenizer-model {mine}", tiny=REST)
    assert tells(capsys.readouterr().err, f"cut otherwise {part} --allow-tokenizer-change")
    if part == "normalizer":
        run(f"--pretrained-checkpoint {folder} --tokenizer-model {mine} --allow-tokenizer-change", tiny=REST)
        said = capsys.readouterr().out
        assert any("WARNING" in line and "another tokenizer" in line for line in said.splitlines())


def test_rules_in_words():
    theirs = {
        "normalizer": None,
        "pre_tokenizer": None,
        "model": {"type": "BPE", "merges": [["a", "b"]], "unk_token": None},
    }
    longer = theirs | {"model": theirs["model"] | {"merges": [["a", "b"], ["ab", "c"]]}}
    assert rule_difference(theirs, theirs) == rule_difference(theirs, longer) == ""
    assert "merges" in rule_difference(longer, theirs)
    assert "type of its model" in rule_difference(theirs, theirs | {"model": theirs["model"] | {"type": "Unigram"}})


def test_differences_in_words():
    theirs = {"a": 0, "b": 1, "c": 2}
    assert changed_or_lost_tokens(theirs, theirs) == changed_or_lost_tokens(theirs, theirs | {"d": 3}) == ""
    assert changed_or_lost_tokens(theirs, {"a": 0, "c": 1, "b": 2}).count("id ") == 2
    assert '"c"' in changed_or_lost_tokens(theirs, {"a": 0, "b": 1})
    assert changed_or_lost_tokens(theirs, {"a": 0, "b": 1, "x": 2}) == 'id 2 is "c" there and "x" here'


def test_rows_that_stay_as_a_table():
    theirs, mine = {"a": 0, "b": 1, "c": 2, "d": 3}, {"x": 0, "b": 1, "c": 2, "a": 3, "d": 4}
    assert rows_by_token(theirs, mine, 4, 5) == [RowRun(1, 1, 2), RowRun(3, 0, 1), RowRun(4, 3, 1)]
    assert rows_by_token(theirs, mine, 3, 4) == [RowRun(1, 1, 2), RowRun(3, 0, 1)]
    assert rows_by_id(4, 5) == rows_by_id(5, 4) == [RowRun(0, 0, 4)]


def test_each_kind_of_file_gives_its_tokens(tmp_path: Path):
    expected = {token: i for i, token in enumerate(THEIRS)}
    assert read_vocabulary(write_tokenizer(tmp_path, THEIRS)) == expected
    unigram = {"model": {"type": "Unigram", "vocab": [[token, -1.0] for token in THEIRS]}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert read_vocabulary(tmp_path) == expected
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(THEIRS[:30]) + "\n")
    (tmp_path / "added_tokens.json").write_text(json.dumps({THEIRS[30]: 30}))
    assert read_vocabulary(tmp_path) == expected
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(THEIRS[:30])}))
    assert read_vocabulary(tmp_path) == expected
    (tmp_path / "vocab.json").unlink()
    assert read_vocabulary(tmp_path) is None


# ---------------------------------------------------------------- another vocabulary

NEW = [
    "<unk>",
    "new0",
    "</s>",
    *THEIRS[20:],
    *THEIRS[4:15],
    *(f"new{i}" for i in range(1, 12)),
]  # 36, of which 24 are shared


def expected_table(case: str, theirs_name: str, ours_name: str, new: list[str]) -> torch.Tensor:
    """Row by row: the folder's row of the token, or the first value of the new table."""
    old = torch.tensor(weight(theirs_name, tuple(read_record(case)["shapes"][theirs_name])))
    shape = (len(new), old.shape[1])
    table = normal_box(shape, whole(shape), 0.02, 1234, ours_name.removeprefix("model/")).double()
    for i, token in enumerate(new):
        if token in THEIRS:
            table[i] = old[THEIRS.index(token)]
    return table


def of_rank(mesh, flags: str) -> None:
    with trainer_of(SCRIPT, mesh, f"{REST_TEXT} {flags}", predicts=False) as trainer:
        trainer.run()


LAYOUTS = {
    "tp 2 x pp 3": ({"tp": 2, "pp": 3}, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3"),
    "dp 2, ZeRO 3": ({"dp": 2}, "--zero-stage 3"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", ["llama", "llama-tied", "phi"])
def test_shared_tokens_keep_their_rows_and_the_rest_is_drawn_alike_in_any_layout(case: str, tmp_path: Path, capsys):
    folder, mine = made(tmp_path / "in", case), write_tokenizer(tmp_path / "mine", NEW)
    start = f"--pretrained-checkpoint {folder} --tokenizer-model {mine}"
    with pytest.raises(SystemExit):
        run(start, tiny=REST)
    assert tells(capsys.readouterr().err, "36 31 --resize-token-embeddings")
    start += " --resize-token-embeddings tokens"
    run(f"{start} --save {tmp_path / 'one'}", tiny=REST)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("--resize-token-embeddings"))
    assert re.findall(r"\d+", line.replace(str(folder), "")) == ["24", "36", "12", "7", "31"]
    one = load_whole_tensors(tmp_path / "one")
    assert torch.equal(one[TABLE].double(), expected_table(case, "model.embed_tokens.weight", TABLE, NEW))
    if case == "phi":
        bias = torch.tensor(weight("lm_head.bias", (31,)))
        expected = [bias[THEIRS.index(token)] if token in THEIRS else 0 for token in NEW]
        found = one[HEAD.replace("weight", "bias")].double()
        assert (found - torch.tensor(expected).double()).abs().max() < 1e-20  # a step of Adam is 1e-30
    if case != "llama-tied":
        assert torch.equal(one[HEAD].double(), expected_table(case, "lm_head.weight", HEAD, NEW))
    for name, (sizes, flags) in LAYOUTS.items():
        out = tmp_path / name.replace(" ", "")
        run_ranks(sizes, partial(of_rank, flags=f"{start} {flags} --save {out}"))
        other = load_whole_tensors(out)
        for key in (key for key in one if key.startswith("model/")):
            assert (one[key] - other[key]).abs().max() < 1e-20, (name, key)


def test_half_precision_masters_stay_with_their_rows(folder: Path, tmp_path: Path):
    """Also of masters that ZeRO divides: a master is the folder's own number, not one that was rounded."""
    mine = write_tokenizer(tmp_path / "mine", NEW)
    start = f"--load {folder} --tokenizer-model {mine} --resize-token-embeddings tokens --bf16 --allow-precision-change"
    run_ranks({"dp": 2}, partial(of_rank, flags=f"{start} --zero-stage 1 --save {tmp_path / 'out'}"))
    tensors = load_whole_tensors(tmp_path / "out")
    expected = expected_table("llama", "model.embed_tokens.weight", TABLE, NEW).float()
    master = tensors[TABLE.replace("model/", "optimizer/master/", 1)]
    shared = [i for i, token in enumerate(NEW) if token in THEIRS]
    assert torch.equal(master[shared], expected[shared])
    assert torch.equal(tensors[TABLE], master.bfloat16())


@pytest.mark.full
def test_the_same_command_resumes_and_what_is_exported_has_the_new_words(folder: Path, tmp_path: Path, capsys):
    mine, kept = write_tokenizer(tmp_path / "mine", NEW), tmp_path / "run"
    command = f"--pretrained-checkpoint {folder} --tokenizer-model {mine} --resize-token-embeddings tokens "
    command += f"--load {kept} --save {kept} --exit-interval 1 --override-opt_param-scheduler"
    rest = [*REST, "--train-iters", "2"]
    run(command, tiny=rest)
    capsys.readouterr()
    run(command, tiny=rest)
    said = capsys.readouterr().out
    assert "going on from iteration 1" in said and "get first values" not in said
    assert open_checkpoint(kept).state["vocab_size"] == len(NEW)
    words = ["--load", str(kept), "--save-hf", str(tmp_path / "out"), "--tokenizer", str(mine)]
    assert checkpoint_convert.main(words) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["vocab_size"] == len(NEW) and config["model_type"] == "llama" and config["eos_token_id"] is None
    assert read_vocabulary(tmp_path / "out") == {token: i for i, token in enumerate(NEW)}
    run(f"--load {tmp_path / 'out'}", tiny=REST)  # a folder like any other


@pytest.mark.full
def test_ids_keep_their_rows_and_another_run_of_ours_is_matched_by_its_tokenizer(folder: Path, tmp_path: Path, capsys):
    first, mine = tmp_path / "first", write_tokenizer(tmp_path / "mine", NEW)
    run(f"--load {folder} --save {first}", tiny=REST)
    old = load_whole_tensors(first)[TABLE]
    again = f"--use-checkpoint-args --pretrained-checkpoint {first} --tokenizer-model {mine} --resize-token-embeddings"
    run(f"{again} ids --save {tmp_path / 'ids'}", tiny=REST)
    table = load_whole_tensors(tmp_path / "ids")[TABLE]
    assert table.shape[0] == len(NEW) and torch.equal(table[:31], old)
    run(f"{again} tokens --save {tmp_path / 'tokens'}", tiny=REST)
    table = load_whole_tensors(tmp_path / "tokens")[TABLE]
    assert torch.equal(table.double(), expected_table("llama", "model.embed_tokens.weight", TABLE, NEW))
    fewer = f"--tokenizer-type NullTokenizer --vocab-size 20 --pretrained-checkpoint {first} --use-checkpoint-args"
    with pytest.raises(SystemExit):
        run(f"{fewer} --resize-token-embeddings tokens", tiny=REST)
    assert tells(capsys.readouterr().err, "--resize-token-embeddings ids")
    run(f"{fewer} --resize-token-embeddings ids --save {tmp_path / 'fewer'}", tiny=REST)
    assert torch.equal(load_whole_tensors(tmp_path / "fewer")[TABLE], old[:21])
    (folder / "tokenizer.json").write_text("gone")
    with pytest.raises(SystemExit):
        run(f"{again} tokens", tiny=REST)
    assert tells(capsys.readouterr().err, "--resize-token-embeddings ids")
