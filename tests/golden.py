"""A golden record: every number that a change of structure must leave as it was, to the bit.

    python tests/golden.py record before.json       at the commit before the change
    python tests/golden.py record after.json        at the change, on the same machine
    python tests/golden.py compare before.json after.json

What is recorded, each under a name of its own:

    layout/...     the 190 triples of layout_space: losses, norms, gradients, weights, and what each rank sends in a step (the ledger)
    zero/...       the triples of zero_matrix: the same for stages, hybrids, overlap, accumulation, recompute and offload
    schedule/...   the lowered lists of every schedule over a grid of sizes
    initial/...    names, shapes and values of the parameters that a run starts with
    manifest/...   what a checkpoint's manifest says
    help/...       what --help prints

Bits depend on the machine, its number of threads (one here) and the release of torch: a record is compared with one of the same
machine, and none is kept in the repository. A change that is meant to change numbers names the entries that it changes.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import layout_space
import parity_cases
import zero_matrix
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, Layout, Outcome, TinyTrainer, run

from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"gpt2": GPT2, "llama": LLAMA}
SAVED = {"one": Layout(), "tp2-pp2": Layout(tp=2, pp=2, m=2), "zero3": Layout(dp=2)}
SCRIPTS = ("pretrain_gpt.py", "pretrain_bert.py", "examples/minimal_fork/pretrain.py")


def entries() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what makes its value, plain JSON) of the whole record."""
    for case in layout_space.covering_cases(3):
        yield f"layout/{case}", partial(of_layout, case)
    for case in zero_matrix.covering_cases(3):
        yield f"zero/{case}", partial(of_zero, case)
    for name in SCHEDULES:
        yield f"schedule/{name}", partial(of_schedule, name)
    for name in MODELS:
        yield f"initial/{name}", partial(of_initial, name)
        for layout in SAVED:
            yield f"manifest/{name}-{layout}", partial(of_manifest, name, layout)
    for script in [*SCRIPTS, *(f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.py")))]:
        if "__main__" in (ROOT / script).read_text() or script in SCRIPTS:
            yield f"help/{script}", partial(of_help, script)


# ---------------------------------------------------------------- values


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and bits."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return sha.hexdigest()


def of_outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "losses": [loss.hex() for loss in outcome.losses],
        "norms": [norm.hex() for norm in outcome.norms],
        "gradients": [digest(grads) for grads in outcome.grads],
        "weights": digest(outcome.weights),
        "ledger": [
            [rank, *sorted(f"{op} {axis} {size} x{times}" for (op, axis, size), times in calls.items())]
            for rank, calls in outcome.calls
        ],
    }


def of_layout(case: layout_space.Case) -> dict[str, Any]:
    layout, texts = parity_cases.layout_of(case), parity_cases.texts_of(case)
    return of_outcome(run(parity_cases.model_of(case), layout, global_batch=case.global_batch, texts=texts))


def of_zero(case: zero_matrix.ZeroCase) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, zero_matrix.several_slices():
        return of_outcome(run(case.model, replace(case.run_layout, offload=case.offload_to(folder))))


def of_schedule(name: str) -> dict[str, str]:
    """The lists of every rank, in short where they are long."""
    lists = {}
    for p, m, v in ((1, 3, 1), (2, 4, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (4, 12, 3), (8, 16, 1)):
        try:
            made = SCHEDULES[name](p, m, v)
        except ValueError as refusal:
            lists[f"{p} {m} {v}"] = str(refusal)
            continue
        rows = "\n".join(" ".join(map(str, row)) for row in add_reduce(add_transfers(made)))
        lists[f"{p} {m} {v}"] = rows if p < 4 else hashlib.sha256(rows.encode()).hexdigest()
    return lists


def of_initial(name: str) -> dict[str, list]:
    """Of each parameter its shape and the SHA-256 of its first values."""

    def values(mesh) -> dict[str, list]:
        chunk = TinyTrainer(mesh, MODELS[name], Layout()).model[0]
        return {n: [list(p.shape), digest({n: p.data})] for n, p in chunk.module.named_parameters()}

    return run_ranks(Layout().sizes, values)[0]


def of_manifest(name: str, layout: str) -> dict[str, Any]:
    chosen = SAVED[layout]
    if layout == "zero3":
        chosen = replace(chosen, data_parallel=replace(chosen.data_parallel, zero_stage=3))
    with tempfile.TemporaryDirectory() as folder:

        def save(mesh) -> None:
            tiny = TinyTrainer(mesh, MODELS[name], chosen)
            tiny.step(0)
            tiny.save(Path(folder), 1)

        run_ranks(chosen.sizes, save)
        (path,) = Path(folder).glob("iter_*/manifest.json")
        manifest = json.loads(path.read_text().replace(folder, "FOLDER"))
        del manifest["sha256"]  # of a text that names the folder
        return manifest


def of_help(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, str(ROOT / script), "--help"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------- the command


def _value_of(name: str) -> tuple[str, Any]:
    torch.set_num_threads(1)
    return name, _MAKERS[name]()


_MAKERS: dict[str, Callable[[], Any]] = {}


def record(names: Iterable[str], processes: int) -> dict[str, Any]:
    """The values of these entries."""
    _MAKERS.update(entries())
    chosen, made = [name for name in _MAKERS if name in set(names)], {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for number, (name, value) in enumerate(pool.imap_unordered(_value_of, chosen), 1):
            made[name] = value
            if number % 25 == 0:
                print(f"{number} of {len(chosen)} entries", file=sys.stderr, flush=True)
    return {name: made[name] for name in chosen}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The entries that are not equal, with the parts of each that differ."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            found.append(f"{name}: only {'before' if name in before else 'after'}")
        elif before[name] != after[name]:
            found.append(f"{name}: {', '.join(_parts_that_differ(before[name], after[name])) or 'the text'}")
    return found


def _parts_that_differ(before: Any, after: Any, at: str = "") -> list[str]:
    """The keys, to two levels, under which two values differ."""
    if not (isinstance(before, dict) and isinstance(after, dict)) or at.count("/") >= 2:
        return [at.strip("/")] if before != after and at else []
    keys = [*before, *(key for key in after if key not in before)]
    return [
        part
        for key in keys
        if before.get(key) != after.get(key)
        for part in _parts_that_differ(before.get(key), after.get(key), f"{at}/{key}")
    ]


def main(arguments: list[str] | None = None) -> int:
    """0 if a record was made or two are equal, 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write the record of this code")
    recording.add_argument("output", type=Path)
    recording.add_argument("--only", default="", help="entries whose name begins so")
    recording.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    comparing = commands.add_parser("compare", help="say which entries of two records differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "record":
        names = [name for name, _ in entries() if name.startswith(given.only)]
        given.output.write_text(json.dumps(record(names, given.processes), indent=1) + "\n")
        print(f"wrote {given.output}: {len(names)} entries")
        return 0
    before, after = (json.loads(path.read_text()) for path in (given.before, given.after))
    found = differences(before, after)
    print("\n".join([*found, f"{len(found)} of {len(before.keys() | after.keys())} entries differ"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
