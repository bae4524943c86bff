"""A script with data of its own needs no tokenizer, no token files and no made-up data, and says what it does need."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from said import tells
from whole_run import run

import pretrain_gpt
from megatron.core.models.common.model_rules import NO_RULES
from megatron.core.optimizer.param_groups import ParamGroup

MODEL = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8"
BARE = shlex.split(
    f"{MODEL} --micro-batch-size 1 --lr 0.1 --log-interval 1 --eval-iters 0 --device cpu --train-iters 2"
)


class Numbers:
    """Sample i counts up from i."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        text, positions = np.arange(i, i + 9) % 11, np.arange(8)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": np.ones(8, np.float32), "position_ids": positions}


def own_data(sizes: list[int]) -> tuple:
    return Numbers(), None, None


@pytest.mark.full
def test_a_vocabulary_is_all_that_a_language_model_needs(capsys, tmp_path):
    """Of as many words as are said, by the user or by the script."""
    run(f"--vocab-size 11 --save {tmp_path}/user", own_data, tiny=BARE, rules=NO_RULES)
    run(f"--save {tmp_path}/script", own_data, tiny=BARE, rules=NO_RULES, args_defaults={"vocab_size": 11})
    assert capsys.readouterr().out.count("consumed samples") == 4
    for saved in ("user", "script"):
        state = json.loads((tmp_path / saved / "iter_0000002" / "manifest.json").read_text())["state"]
        assert (state["vocab_size"], state["tokenizer_sha256"], state["data_sha256"]) == (11, None, None)


def test_data_paths_may_name_what_the_script_understands(said, tmp_path):
    (tmp_path / "mine.csv").write_text("1,2,3")
    flags = f"--vocab-size 11 --data-path {tmp_path}/mine.csv --save {tmp_path}/saved"
    assert "saved checkpoint" in said(flags, datasets=own_data, tiny=BARE, rules=NO_RULES)


NEEDS = {
    "a size of the vocabulary": (own_data, "", "--vocab-size --tokenizer-type"),
    "a tokenizer": (pretrain_gpt.train_valid_test_datasets_provider, "--vocab-size 11 --mock-data", "--tokenizer-type"),
    "data": (
        pretrain_gpt.train_valid_test_datasets_provider,
        "--vocab-size 11 --tokenizer-type NullTokenizer",
        "--data-path --mock-data",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("what", NEEDS)
def test_what_is_truly_needed_is_said_where_it_is_asked_for(what, refused):
    datasets, flags, texts = NEEDS[what]
    message = refused(flags, datasets=datasets, tiny=BARE, rules=NO_RULES)
    assert tells(message, texts) and "1 problem(s)" in message


def weights_of(root: Path) -> dict[str, str]:
    tensors = json.loads((root / "iter_0000002" / "manifest.json").read_text())["tensors"]
    return {name: record["pieces"][0]["sha256"] for name, record in tensors.items() if name.startswith("model/")}


@pytest.mark.full
def test_group_of_says_how_each_parameter_is_updated(tmp_path):
    def mlp_stays(name: str, placement) -> ParamGroup:
        return ParamGroup(lr_multiplier=0.0 if ".mlp." in name else 1.0)

    def all_stay(name: str, placement) -> ParamGroup:
        return ParamGroup(lr_multiplier=0.0)

    for name, rule in (("some", mlp_stays), ("none", all_stay)):
        run(f"--vocab-size 11 --save {tmp_path}/{name}", own_data, tiny=BARE, rules=NO_RULES, group_of=rule)
    moved, still = weights_of(tmp_path / "some"), weights_of(tmp_path / "none")
    assert {name for name in moved if moved[name] == still[name]} == {name for name in moved if ".mlp." in name}
