"""Whole runs of pretrain_gpt.py whose ranks are threads, which are stopped, and go on by the same command; and what they end in.

said = job(flags, dp=2)                     from the command line to the end; what it printed
ended(root) == ended(other)                 the last checkpoints: state, tensors and files, to the bit
"""

import contextlib
import io
import json
import re
from pathlib import Path

from local_ranks import run_ranks
from script_run import trainer_of
from thread_writers import thread_writers

import pretrain_gpt
from megatron.core.dist_checkpointing.manifest_format import LATEST
from megatron.core.parallel.mesh import Mesh

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --make-vocab-size-divisible-by 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 31 --micro-batch-size 1 --lr 0.1 --lr-decay-iters 50 --log-interval 1 --eval-iters 0 --device cpu "
)
_LINE = re.compile(r"iteration +(\d+)/.*?\| (consumed samples.*?) elapsed.*?(\| learning rate.*\|)")
_SAVED = re.compile(r"(?:saved checkpoint at|copy of) iteration (\d+)(?: for restarts| to )")


def job(flags: str, *, tiny: str = TINY, **sizes: int) -> str:
    """Run to the end; what was printed. RuntimeError from the error of the first rank that failed, with `said`."""

    def work(mesh: Mesh) -> None:
        with trainer_of(pretrain_gpt, mesh, tiny + flags, predicts=False) as trainer:
            trainer.run()

    out = io.StringIO()
    with contextlib.redirect_stdout(out), thread_writers():
        try:
            run_ranks(sizes, work)
        except RuntimeError as error:
            error.said = out.getvalue()
            raise
    return out.getvalue()


def lines(said: str) -> dict[str, str]:
    """The training line of each iteration, without its times."""
    return {found[1]: f"{found[2]} {found[3]}" for found in _LINE.finditer(said)}


def differing(got: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The first iterations whose lines differ, with both lines."""
    names = [name for name in got | expected if got.get(name) != expected.get(name)]
    return [f"{name}: {got.get(name)} instead of {expected.get(name)}" for name in names[:3]]


def announced(said: str) -> int:
    """The newest iteration that was said to be saved, as a checkpoint or a copy for restarts; 0 for none."""
    return max(map(int, _SAVED.findall(said)), default=0)


def ended(root: Path) -> dict[str, object]:
    """The names in the folder, and all that the newest checkpoint holds, but for what a run was told about folders, stops and saves."""
    last = root / f"iter_{int((root / LATEST).read_text().split()[0]):07d}"
    manifest = json.loads((last / "manifest.json").read_text())
    config = manifest["state"]["config"]
    del manifest["sha256"], config["checkpoint"], config["training"]["exit_interval"]
    manifest["state"].pop("checkpoints", None)  # which it has saved; a removal that failed leaves more
    names = sorted(path.name for path in root.iterdir())
    return {"manifest": manifest, "names": names} | {name: (last / name).read_bytes() for name in manifest["files"]}


def differs_in(got: dict[str, object], expected: dict[str, object], *, may_keep_more: bool = False) -> str:
    """What of `ended` is not as expected; empty if nothing. may_keep_more: older checkpoints, whose removal did not come to its end."""
    wrong = [name for name in expected if name != "names" and got.get(name) != expected[name]]
    more = [name for name in got["names"] if name not in expected["names"]]
    if may_keep_more and all(re.fullmatch("iter_[0-9]{7}", name) for name in more):
        more = []
    return " ".join([*wrong, *more, *(f"no {name}" for name in expected["names"] if name not in got["names"])])
