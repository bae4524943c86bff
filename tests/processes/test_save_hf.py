"""--save-hf over real processes, from the command line: gloo carries the tensors, and a kill ends the writing process."""

import json
from pathlib import Path
from shlex import split

from processes import PRETRAIN_GPT, Layout, pretrain, start

from tools import checkpoint_convert

MODEL = split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --log-interval 1 --device cpu"
)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_processes_write_what_the_tool_writes_of_their_checkpoint(tmp_path: Path):
    """TP 2 x PP 2 in bfloat16; and a run that starts from the folder goes on with its loss."""
    own, hf = tmp_path / "own", tmp_path / "hf"
    flags = [*MODEL, "--bf16", "--train-iters", "2", "--save", str(own), "--save-hf", str(hf)]
    pretrain(flags, Layout(tp=2, pp=2))
    assert checkpoint_convert.main(["--load", str(own), "--save-hf", str(tmp_path / "expected")]) == 0
    found = files_of(hf / "iter_0000002")
    assert found == files_of(tmp_path / "expected")
    assert json.loads(found["config.json"])["dtype"] == "bfloat16"


def test_a_kill_while_a_folder_is_written_leaves_none_and_the_same_command_writes_it(tmp_path: Path):
    """One process of a ZeRO 3 pair is killed once a folder has begun; the folders before it are whole."""
    hf = tmp_path / "hf"
    flags = [*MODEL, "--zero-stage", "3", "--save", str(tmp_path / "own"), "--load", str(tmp_path / "own")]
    flags += ["--save-hf", str(hf), "--save-hf-interval", "1", "--save-hf-max-shard-size", "1KB"]
    with start([PRETRAIN_GPT, *flags, "--train-iters", "100000"], ranks=2) as job:
        job.wait_for(lambda: (hf / "iter_0000003").exists() and any(hf.glob("*.partial")))
        job.kill(0)
    for folder in hf.iterdir():
        named = folder.name.endswith((".partial", ".replaced"))
        assert named or (folder / "config.json").exists()
    last = pretrain([*flags, "--train-iters", "4"], Layout(dp=2))
    assert last.codes == (0, 0) and not any(hf.glob("*.partial"))
    assert (hf / "iter_0000004/config.json").exists()
