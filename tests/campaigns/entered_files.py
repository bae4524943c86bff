"""The files of megatron/ whose functions are entered while something is done: how many one has to know to follow it.

    python tests/campaigns/entered_files.py           a table
    python tests/campaigns/entered_files.py --names   with the files

What is done, on the first rank of TP 2 x PP 2 x DP 2 with ZeRO stage 1, ranks as threads:

    a parameter is made                an MLP's matrices, from the run down
    a parameter is filled and placed   its first values, and its place in a buffer
    a rank's model is built            all of that for every parameter, and whether there is memory for it
    a batch is trained                 one step: forward, backward, update
    a gradient is summed               what the data-parallel wrapper does between the backward and the update
    a checkpoint's tensor is written   one save
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import torch
from local_ranks import run_ranks
from script_run import trainer_of

import pretrain_gpt
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.mlp import ParallelMLP
from megatron.training import build_model_optimizer_and_data, make_chunks_optimizer_and_pipeline, trainer
from megatron.training.checkpointing import save_and_load_run_state

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer --lr 1e-3 --mock-data --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 30 --device cpu --num-workers 0 --save "
)
MADE, PLACED, TRAINED = "a parameter is made", "a parameter is filled and placed", "a batch is trained"
SUMMED, WRITTEN = "a gradient is summed", "a checkpoint's tensor is written"
# What is done -> the functions that do it: of what, by which name.
DOERS = {
    "a rank's model is built": [(trainer, "build_chunks")],
    MADE: [(ParallelMLP, "__init__")],
    PLACED: [
        (build_model_optimizer_and_data, "initialize_parameters"),
        (make_chunks_optimizer_and_pipeline, "DistributedDataParallel"),
    ],
    TRAINED: [(trainer, "train_step")],
    SUMMED: [(DistributedDataParallel, name) for name in ("start_grad_reduce", "finish_grad_reduce")],
    WRITTEN: [(save_and_load_run_state, "save")],
}
PREFIX = f"{ROOT}/megatron/"


@contextmanager
def noting(files: set[str]) -> Iterator[None]:
    """Adds the files of megatron/ whose functions this thread is in or enters."""
    before = sys.getprofile()

    def note(frame: Any, event: str = "call", argument: Any = None) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PREFIX):
            files.add(frame.f_code.co_filename.removeprefix(PREFIX))
        if before is not None:
            before(frame, event, argument)

    frame = sys._getframe()
    while frame := frame.f_back:
        note(frame)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def entered() -> dict[str, list[str]]:
    """What is done -> the files, sorted. Raises AssertionError if a function that does it is never called."""
    files: dict[str, set[str]] = {what: set() for what in DOERS}
    training: list[bool] = []
    called: set[tuple[Any, str]] = set()
    originals = [(owner, name, getattr(owner, name)) for doers in DOERS.values() for owner, name in doers]

    def watched(what: str, doer: tuple[Any, str], function: Callable) -> Callable:
        @wraps(function)
        def inside(*given: Any, **options: Any) -> Any:
            called.add(doer)
            # A step that is run for its memory alone, before the first one, sums gradients too.
            with noting(files[what] if what != SUMMED or training else set()):
                return function(*given, **options)

        return inside

    def work(mesh: Mesh, folder: str) -> None:
        with trainer_of(pretrain_gpt, mesh, FLAGS + folder) as run:
            training.append(True)
            run._train()

    for what, doers in DOERS.items():
        for owner, name in doers:
            setattr(owner, name, watched(what, (owner, name), getattr(owner, name)))
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks({"tp": 2, "pp": 2, "dp": 2}, partial(work, folder=folder))
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
    never = [f"{owner.__name__}.{name}" for owner, name, _ in originals if (owner, name) not in called]
    assert not never, f"{never} were not called: where they are looked up, they are other objects"
    return {what: sorted(found) for what, found in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--names", action="store_true", help="with the files")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    for what, files in entered().items():
        print(f"{len(files):4} {what}", *(files if names else ()), sep="\n       ", file=sys.stderr)


if __name__ == "__main__":
    main()
