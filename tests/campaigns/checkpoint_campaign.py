"""Damages checkpoints, each case drawn by its number, and loads them as a run does: flipped bits, mutated manifests, hostile folders.

    python tests/campaigns/checkpoint_campaign.py results.jsonl --flips 1000 --manifests 10000 --folders 2000
    python tests/campaigns/checkpoint_campaign.py results.jsonl --write docs/reliability.md

Goes on where it stopped. A case that ends in anything but what is promised is raised with its number.

    a flipped bit       found and named, and the checkpoint before is loaded; of the pointer, the newest; or no load reads it
    a mutated manifest  one error that names the folder, or the tensors that were saved; nothing changes on the disk
    a hostile folder    the same, in five seconds; nothing outside the folder changes
"""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from case_runs import campaign_parser, end_campaign, open_results, read_results
from local_ranks import run_ranks
from spoiled_folders import hostile, mutated, tree_of
from tiny_run import TINY_GPT2, Layout, TinyTrainer, runtime_for

from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import CheckpointError, manifest_format as disk
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.optimizer.sharded_model_and_optimizer_state import sharded_model_state, sharded_optimizer_state
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import build_mesh
from megatron.core.parallel.rank_grid import AxisSizes
from megatron.core.storage import file_layer
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpointing import check_and_lock_save_folder, load_with_fallback, save_and_load_run_state

MODEL = replace(TINY_GPT2, num_layers=1, hidden_size=20, kv_channels=5)  # some tensors end within a line of 64 bytes
SAVED = (2, 4, 6)
ZERO1 = DataParallelConfig(use_distributed_optimizer=True)
TARGETS = {
    "one process": (Layout(), True),
    "one process, weights and masters alone": (Layout(), False),
    "DP 2, ZeRO 1": (Layout(dp=2, data_parallel=ZERO1), True),
    "TP 2": (Layout(tp=2), True),
}
_SECONDS = 5


class Wrong(AssertionError):
    """A case that did not end as promised."""


# ---------------------------------------------------------------- checkpoints, and loading them


def save_some(root: Path) -> None:
    """Three checkpoints of one run of two ranks."""

    def train(mesh) -> None:
        trainer = TinyTrainer(mesh, MODEL, Layout(dp=2, data_parallel=ZERO1), global_batch=2)
        for iteration in SAVED:
            trainer.step(iteration)
            trainer.save(root, iteration)

    with silence():
        run_ranks({"dp": 2}, train)


class Loader:
    """One rank's part of a small model, loaded again and again."""

    def __init__(self, mesh, layout: Layout, *, optim: bool = True):
        self.mesh, self.optim = mesh, optim
        self.trainer = TinyTrainer(mesh, MODEL, layout, global_batch=2)
        self.said: list[str] = []

    def load(self, root: Path, *, saves: bool = False) -> str:
        """A digest of what this rank holds after a load."""
        runtime = runtime_for(self.mesh, MODEL, root, 2)
        chosen = replace(runtime.config.checkpoint, save=str(root) if saves else None, load_optim=self.optim)
        runtime.config = replace(runtime.config, checkpoint=chosen)
        tensors = sharded_model_state(self.trainer.model, self.mesh) | sharded_optimizer_state(
            self.trainer.adam, self.mesh
        )
        for local in tensors.values():
            local.tensor.detach().fill_(float("nan"))  # of what is not loaded, nothing may come from the load before
        with contextlib.ExitStack() as held:
            if saves:
                check_and_lock_save_folder.prepare_folder(
                    CheckpointConfig(save=str(root)), self.mesh["world"], torch.device("cpu"), held
                )
            save_and_load_run_state.load(runtime, self.trainer.model, self.trainer.adam)
        digest = hashlib.sha256()
        for name, local in sorted(tensors.items()):
            digest.update(
                name.encode() + local.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()


@contextlib.contextmanager
def silence() -> Iterator[list[str]]:
    """What the first rank would print; the block prints nothing."""
    lines: list[str] = []
    modules = (
        save_and_load_run_state,
        load_with_fallback,
        check_and_lock_save_folder,
        save_and_load_run_state.check_same_model_and_optimizer,
    )
    before = [module.print_rank_0 for module in modules]
    for module in modules:
        module.print_rank_0 = lines.append
    try:
        yield lines
    finally:
        for module, function in zip(modules, before):
            module.print_rank_0 = function


class Traced(file_layer.LocalFiles):
    """Notes which bytes are read."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, file, buffer) -> int:
        start = file.tell()
        count = super().read_into(file, buffer)
        self.reads.append((str(file.name), start, start + count))
        return count

    def has_read(self, path: Path, at: int) -> bool:
        return any(name == str(path) and start <= at < stop for name, start, stop in self.reads)


# ---------------------------------------------------------------- flipped bits


def drawn_flip(root: Path, number: int, seed: int) -> dict[str, Any]:
    """Where a bit flips: in a tensor, between tensors, in the manifest or in the pointer."""
    draw = random.Random(f"{seed} flip {number}")
    folder = root / disk.folder_name(SAVED[-1])
    where = draw.choices(("tensor", "padding", "manifest", "pointer"), (5, 2, 3, 2))[0]
    if where in ("manifest", "pointer"):
        path = folder / disk.MANIFEST if where == "manifest" else root / disk.LATEST
        at = draw.randrange(path.stat().st_size)
    else:
        manifest = disk.parse_manifest((folder / disk.MANIFEST).read_text(), folder)
        gaps = [(file, at, gap) for (file, at), gap in disk.byte_gaps_in_files(manifest).items() if gap]
        pieces = [piece for record in manifest.tensors.values() for piece in record.pieces if piece.nbytes]
        if where == "tensor":
            piece = draw.choice(pieces)
            path, at = folder / piece.file, piece.offset + draw.randrange(piece.nbytes)
        else:
            file, end, gap = draw.choice(gaps)
            path, at = folder / file, end - 1 - draw.randrange(gap)
    target = list(TARGETS)[number % len(TARGETS)]
    return {
        "part": "flip",
        "number": number,
        "where": where,
        "path": path,
        "at": at,
        "bit": draw.randrange(8),
        "target": target,
    }


def flip(case: dict[str, Any]) -> None:
    with open(case["path"], "r+b") as file:
        file.seek(case["at"])
        value = file.read(1)[0] ^ 1 << case["bit"]
        file.seek(case["at"])
        file.write(bytes([value]))


def flips(root: Path, target: str, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The outcome of each case, all of one target."""
    layout, optim = TARGETS[target]
    traced, lines = Traced(), []

    def work(mesh) -> list[tuple[str, list[str], bool]]:
        loader, world, outcomes = Loader(mesh, layout, optim=optim), mesh["world"], []
        digests = []
        for only in SAVED[1:]:
            digests.append(loader.load(root.parent / f"only {only}"))
        for case in cases:
            collectives.barrier(world)
            if world.is_first:
                flip(case)
                traced.reads.clear()
                lines.clear()
            collectives.barrier(world)
            digest = loader.load(root)
            collectives.barrier(world)
            outcomes.append((SAVED[1 + digests.index(digest)] if digest in digests else None, [*lines]))
            if world.is_first:
                case["read"] = traced.has_read(case["path"], case["at"])
                flip(case)
        return outcomes

    file_layer.local, before = traced, file_layer.local
    try:
        with silence() as lines:
            ranks = run_ranks(layout.sizes, work)
    finally:
        file_layer.local = before
    for case, *results in zip(cases, *ranks):
        loaded = {iteration for iteration, _ in results}
        warned = [line for line in results[0][1] if line.startswith("WARNING")]
        expected = SAVED[-1] if case["where"] == "pointer" or not case["read"] else SAVED[-2]
        is_named = any(case["path"].name in line for line in warned)
        if loaded != {expected} or is_named != case["read"]:
            raise Wrong(f"{case}: {loaded} was loaded, with {warned}")
        outcome = "not read" if not case["read"] else "newest used" if expected == SAVED[-1] else "older used"
        yield {key: str(value) if key == "path" else value for key, value in case.items()} | {"outcome": outcome}


# ---------------------------------------------------------------- manifests and folders


@contextlib.contextmanager
def in_time(case: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Wrong(f"{case}: still reading after {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(case: str, loader: Loader, root: Path, right: list[str], *, saves: bool) -> str:
    """ "refused" or "right"; anything else is raised."""
    try:
        with in_time(case), silence():
            digest = loader.load(root, saves=saves)
    except (CheckpointError, ConfigError) as error:
        if str(root) not in str(error) or len(str(error)) > 20_000:
            raise Wrong(f"{case}: the error does not name the folder: {error!s:.500}") from error
        return "refused"
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"{case}: {type(error).__name__} {error}") from error
    if digest not in right:
        raise Wrong(f"{case}: taken, with other tensors")
    return "right"


def manifests(base: Path, numbers: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """Mutated manifests of a folder of one iteration."""
    root = base.parent / f"only {SAVED[-1]}"
    path = root / disk.folder_name(SAVED[-1]) / disk.MANIFEST
    text = path.read_bytes()

    def work(mesh) -> Iterator[dict[str, Any]]:
        loader = Loader(mesh, Layout())
        with silence():
            right = [loader.load(root)]
        for number in numbers:
            kind, content = mutated(text, random.Random(f"{seed} manifest {number}"))
            path.write_bytes(content)
            before = tree_of(root)
            outcome = outcome_of(f"manifest {number} of seed {seed}, {kind}", loader, root, right, saves=False)
            if tree_of(root) != before:
                raise Wrong(f"manifest {number}: the folder has changed")
            yield {"part": "manifest", "number": number, "kind": kind, "outcome": outcome}

    try:
        with alone() as mesh:
            yield from work(mesh)
    finally:
        path.write_bytes(text)


def folders(base: Path, numbers: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """Hostile folders, every other one that of a run that also saves there."""
    with alone() as mesh:
        loader = Loader(mesh, Layout())
        with silence():
            right = [loader.load(base.parent / f"only {number}") for number in SAVED]
        for number in numbers:
            draw, saves = random.Random(f"{seed} folder {number}"), number % 2 == 1
            with tempfile.TemporaryDirectory(dir=base.parent) as place:
                root, outside = Path(place) / "root", Path(place) / "outside"
                shutil.copytree(base, root)
                shutil.copytree(base, outside)
                kinds = hostile(root, outside, draw)
                case, before = f"folder {number} of seed {seed}, {kinds}", tree_of(outside)
                mine = tree_of(root)
                outcome = outcome_of(case, loader, root, right, saves=saves)
                if tree_of(outside) != before or (not saves and tree_of(root) != mine):
                    raise Wrong(f"{case}: files have changed")
            yield {"part": "folder", "number": number, "kind": ", ".join(kinds), "outcome": outcome}


@contextlib.contextmanager
def alone() -> Iterator[Any]:
    """The mesh of one rank, in this thread, where a signal may end what hangs."""
    mesh = build_mesh(AxisSizes(), 0, lambda name, ranks: None)
    parallel_state.set_thread_mesh(mesh)
    try:
        yield mesh
    finally:
        parallel_state.set_thread_mesh(None)


# ---------------------------------------------------------------- all of them


def prepared(base: Path) -> Path:
    """The folder with the three checkpoints; beside it one of each alone."""
    save_some(base)
    for number in SAVED:
        only = base.parent / f"only {number}"
        only.mkdir()
        shutil.copytree(base / disk.folder_name(number), only / disk.folder_name(number))
        (only / disk.LATEST).write_text(str(number))
    return base


def name_of(part: str, number: int, seed: int) -> str:
    return f"{part} {number} of seed {seed}"


def results_of(base: Path, counts: dict[str, int], done: Container[str], seed: int) -> Iterator[dict[str, Any]]:
    """The outcomes of the cases whose names are not in `done`."""
    for result in _outcomes_of(base, counts, done, seed):
        yield {"case": name_of(result["part"], result["number"], seed), "ok": True} | result


def _outcomes_of(base: Path, counts: dict[str, int], done: Container[str], seed: int) -> Iterator[dict[str, Any]]:
    left = {part: [n for n in range(count) if name_of(part, n, seed) not in done] for part, count in counts.items()}
    cases = [drawn_flip(base, number, seed) for number in left["flip"]]
    for start in range(0, len(cases), 100):
        for target in TARGETS:
            yield from flips(base, target, [case for case in cases[start : start + 100] if case["target"] == target])
    yield from manifests(base, left["manifest"], seed)
    yield from folders(base, left["folder"], seed)


def table(results: list[dict[str, Any]]) -> str:
    flipped = [result for result in results if result["part"] == "flip"]
    found = Counter((result["where"], result["outcome"]) for result in flipped)
    lines = [
        "| a bit flipped in | cases | older checkpoint used | newest used, with a warning | in bytes that the load does not read |"
    ]
    lines += ["|---|--:|--:|--:|--:|"]
    for where in ("tensor", "padding", "manifest", "pointer"):
        counts = [found[where, outcome] for outcome in ("older used", "newest used", "not read")]
        lines.append(f"| {where} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    lines += ["", "| spoiled | cases | refused by name | loaded, every bit right |", "|---|--:|--:|--:|"]
    for part, name in (("manifest", "a manifest"), ("folder", "a folder")):
        counts = Counter(result["outcome"] for result in results if result["part"] == part)
        lines.append(f"| {name} | {sum(counts.values()):,} | {counts['refused']:,} | {counts['right']:,} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = campaign_parser(__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--manifests", type=int, default=10_000)
    parser.add_argument("--folders", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.write is None:
        counts = {"flip": given.flips, "manifest": given.manifests, "folder": given.folders}
        done, end = read_results(given.results), time.monotonic() + 60 * given.limit_minutes
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryDirectory(prefix="damage-", dir=memory) as place, open_results(given.results) as add:
            for number, result in enumerate(results_of(prepared(Path(place) / "base"), counts, done, given.seed), 1):
                add(result)
                if number % 500 == 0:
                    print(f"{number} cases", flush=True)
                if time.monotonic() > end:
                    break
    results = list(read_results(given.results).values())
    print(table(results))
    return end_campaign(results, given.write, "damage", table)


if __name__ == "__main__":
    sys.exit(main())
