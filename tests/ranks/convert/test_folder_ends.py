"""The ids that end a text by a folder's files hold after training too, without the folder; and in what is exported."""

import json
import shutil
from pathlib import Path

import pretrain_t5
import pytest
from cases import prompts, read_record, write_folder
from whole_run import run

import pretrain_gpt
from megatron.convert.hf_provenance_and_tokenizer_files import Provenance
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import open_checkpoint
from tools import checkpoint_convert
from tools.generate import main as generate

REST = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --micro-batch-size 1 --global-batch-size 1 --eval-iters 0 "
    "--seq-length 14 --make-vocab-size-divisible-by 8 --device cpu --lr 1e-30 --train-iters 1"
)
SCRIPTS = {
    "llama": (pretrain_gpt, {}),
    "gemma": (pretrain_gpt, {}),
    "t5-gated": (pretrain_t5, {"args_defaults": pretrain_t5.DEFAULTS}),
}


def written_by(root: Path, case: str, capsys) -> list[int]:
    capsys.readouterr()
    words = " ".join(map(str, prompts(case)[0][2]))
    flags = ["--load", root, "--prompt", words, "--greedy", "--max-new-tokens", 6, "--device", "cpu"]
    if (root / "config.json").exists():
        flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", 30]
    assert generate(list(map(str, flags))) == 0, capsys.readouterr().err
    return [int(word) for word in capsys.readouterr().out.split()]


@pytest.mark.full
@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("case", ["llama", "t5-gated", pytest.param("gemma", marks=pytest.mark.full)])
def test_a_text_ends_where_transformers_ends_it_after_a_step_too(case: str, where: str, tmp_path: Path, capsys):
    """The learning rate is next to nothing, so the ids are those that transformers says to the prompt (record.py)."""
    record, (script, more) = read_record(case), SCRIPTS[case]
    said, prompt = record["greedy"][2], prompts(case)[0][2]
    ends = [29, said[2]]
    expected = [*([] if script is pretrain_t5 else prompt), *said[:2]]
    source, of_run = tmp_path / "source", tmp_path / "run"
    config = record["config"] | {"eos_token_id": ends if where == "config.json" else None}
    write_folder(source, record | {"config": config})
    if where == "generation_config.json":
        (source / where).write_text(json.dumps({"eos_token_id": ends}))
    flags = f"--load {source} --save {of_run} --save-hf {tmp_path / 'hf'}"
    run(flags + " --decoder-seq-length 6" * bool(more), tiny=REST.split(), script=script, **more)
    assert written_by(tmp_path / "hf" / "iter_0000001", case, capsys) == expected
    shutil.rmtree(source)
    assert written_by(of_run, case, capsys) == expected
    assert checkpoint_convert.main(["--load", str(of_run), "--save-hf", str(tmp_path / "out")]) == 0
    if where == "generation_config.json":
        assert where in capsys.readouterr().out  # told that it is not there
        assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == ends
    assert written_by(tmp_path / "out", case, capsys) == expected


def test_ends_of_a_generation_config_stay_where_another_tokenizer_folder_has_none(tmp_path: Path, capsys):
    source, files, out = tmp_path / "source", tmp_path / "files", tmp_path / "out"
    write_folder(source, read_record("llama"))
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    files.mkdir()
    (files / "vocab.json").write_text('{"a": 0}')
    flags = ["--load", str(source), "--save-hf", str(out), "--tokenizer", str(files)]
    assert checkpoint_convert.main(flags) == 0, capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 7


def test_ends_that_cannot_be_read_are_told_and_do_not_end_the_run(tmp_path: Path, capsys):
    record = read_record("llama")
    write_folder(tmp_path / "hf", record | {"config": record["config"] | {"eos_token_id": 5}})
    (tmp_path / "hf" / "generation_config.json").write_text("{")
    run(f"--load {tmp_path / 'hf'} --save {tmp_path / 'run'}", tiny=REST.split())
    assert "the ids that end a text are those of config.json" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "run").state["origin"]["ends"] == [5]


@pytest.mark.parametrize("ends", ["5", 5, [2, "7"], [1 << 40], {}])
def test_ends_that_no_run_has_written_are_refused(ends: object):
    state = {"origin": {"model_type": "llama", "folder": "/x", "kept": {}, "files": {}, "ends": ends}}
    with pytest.raises(ConfigError, match="origin/ends"):
        Provenance.in_state(state, "x")


def test_a_run_with_another_tokenizer_has_no_ends_of_the_first(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    origin = Provenance.of({"model_type": "llama", "eos_token_id": 7}, tmp_path).with_files(print)
    assert origin.end_ids() == [7, 9] and origin.without_tokenizer().end_ids() == []
