"""What one layout has saved, another loads and saves again, and an independent reader compares the two: every pair of 15 layouts.

    python tests/campaigns/reshard_campaign.py results.jsonl --limit-minutes 30
    python tests/campaigns/reshard_campaign.py results.jsonl --write docs/reliability.md

Goes on where it stopped. Ranks are threads; independent_reader.py knows the files by docs/checkpoint_format.md alone.

    within a precision    every tensor bit for bit, weights, masters and optimizer state, in every ordered pair. Where
                          --reuse-fp32-param loads, a master that is a tie comes back one unit in the last place nearer to zero
    across precisions     refused without --allow-precision-change; with it the float32 masters (or weights) bit for bit
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from case_runs import campaign_parser, end_campaign, open_results, read_results
from checkpoint_campaign import silence
from independent_reader import Contents, Tensor, differing, latest, read
from local_ranks import run_ranks
from tiny_run import TINY_GPT2, Layout, TinyTrainer, runtime_for

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.optimizer.loss_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.training.checkpointing import save_and_load_run_state

MASTER, MODEL = "optimizer/master/", "model/"


def zero(stage: int, **more: Any) -> DataParallelConfig:
    return DataParallelConfig(zero_stage=stage, **more)


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1500}
HOST = OffloadConfig(optimizer_cpu_offload=True)
# name -> (layout, whether masters are split as with --reuse-fp32-param, where the precision is bf16)
LAYOUTS = {
    "one process": (Layout(), False),
    "one process, reuse": (Layout(), True),
    "DP 2": (Layout(dp=2), False),
    "DP 3, ZeRO 1": (Layout(dp=3, data_parallel=zero(1)), False),
    "DP 2, ZeRO 1, reuse": (Layout(dp=2, data_parallel=zero(1)), True),
    "DP 4, ZeRO 3": (Layout(dp=4, data_parallel=zero(3, **OVERLAP)), False),
    "DP 2, ZeRO 1, offload": (Layout(dp=2, data_parallel=zero(1), offload=HOST), False),
    "TP 2 with SP": (Layout(tp=2, sp=True), False),
    "TP 4": (Layout(tp=4), False),
    "PP 2, interleaved": (Layout(pp=2, v=2, m=2, schedule="interleaved"), False),
    "TP 2, PP 2": (Layout(tp=2, pp=2, m=2), False),
    "CP 2, ring": (Layout(cp=2), False),
    "CP 4, gathered, ZeRO 1": (Layout(cp=4, cp_types=("all_gather",), data_parallel=zero(1)), False),
    "CP 2, heads, DP 2, ZeRO 3": (Layout(cp=2, dp=2, cp_types=("a2a",), data_parallel=zero(3)), False),
    "PP 2, DP 2, ZeRO 3, files": (Layout(pp=2, dp=2, m=2, data_parallel=zero(3)), False),
}
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
CROSSED = [(a, b) for a in PRECISIONS[:3] for b in PRECISIONS[:3] if a != b]


class Wrong(AssertionError):
    """A pair that did not end as promised."""


def trainer_of(mesh: Any, name: str, precision: str, files: Path) -> TinyTrainer:
    layout, reuses = LAYOUTS[name]
    if name.endswith("files"):
        layout = replace(layout, offload=OffloadConfig(offload_dir=str(files)))
    model = replace(TINY_GPT2, **({"fp64": False} if precision == "fp32" else {"fp64": False, precision: True}))
    scaler = DynamicGradScaler(16.0, minimum=1.0, window=2, hysteresis=1) if precision == "fp16" else None
    optimizer = OptimizerConfig(reuse_fp32_param=reuses and precision == "bf16")
    return TinyTrainer(mesh, model, layout, global_batch=12, optimizer=optimizer, scaler=scaler)


def ranks_of(name: str, work: Any) -> list:
    layout, _ = LAYOUTS[name]
    with silence():
        return run_ranks(layout.sizes, work, stages=layout.stages if layout.pp > 1 else None)


def save_source(root: Path, name: str, precision: str, files: Path) -> None:
    """A checkpoint of two steps in one layout."""

    def work(mesh: Any) -> None:
        trainer = trainer_of(mesh, name, precision, files)
        for number in range(2):
            trainer.step(number)
        trainer.save(root, 2)
        trainer.close()

    ranks_of(name, work)


def loaded_and_saved(roots: dict[Path, Path], name: str, precision: str, files: Path, *, is_crossed: bool) -> list[str]:
    """Load each of the folders in one layout and save what was loaded; what each load without the flag was answered with."""

    def work(mesh: Any) -> list[str]:
        trainer, answers = trainer_of(mesh, name, precision, files), []
        for source, target in roots.items():
            answers.append(answer_without_flag(trainer, source) if is_crossed else "")
            trainer.load(source)
            trainer.save(target, 3)
        trainer.close()
        return answers

    return ranks_of(name, work)[0]


def answer_without_flag(trainer: TinyTrainer, source: Path) -> str:
    """The error of a load without --allow-precision-change."""
    runtime = runtime_for(trainer.mesh, trainer.config, source, trainer.global_batch)
    chosen = replace(runtime.config.checkpoint, allow_precision_change=False)
    runtime.config = replace(runtime.config, checkpoint=chosen)
    try:
        save_and_load_run_state.load(runtime, trainer.model, trainer.adam)
    except ConfigError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------- what must be equal


def ties_kept(master: Tensor) -> Tensor:
    """A master as a bf16 weight and 16 bits give it back: of a tie whose upper half is even, the float32 before it."""
    return Tensor(master.dtype, master.bits - (master.bits % 2**17 == 0x8000).astype(np.uint32))


def expected(saved: dict[str, Tensor], name: str, precision: str) -> dict[str, Tensor]:
    """What the layout saves of what it has loaded."""
    if not (LAYOUTS[name][1] and precision == "bf16"):
        return saved
    return {key: ties_kept(tensor) if key.startswith(MASTER) else tensor for key, tensor in saved.items()}


def masters(contents: Contents) -> dict[str, Tensor]:
    """The float32 masters of a checkpoint by parameter, which in full precision are the weights."""
    has_masters = any(name.startswith(MASTER) for name in contents.tensors)
    prefix = MASTER if has_masters else MODEL
    return {name.removeprefix(prefix): x for name, x in contents.tensors.items() if name.startswith(prefix)}


def check_pair(source: Contents, target: Contents, name: str, precision: str, *, is_crossed: bool) -> int:
    """The number of tensors compared. Raises Wrong for one that differs."""
    before, after = source.tensors, target.tensors
    if is_crossed:
        before, after = masters(source), masters(target)
        before |= {key: x for key, x in source.tensors.items() if "/exp_avg" in key}
        after |= {key: x for key, x in target.tensors.items() if "/exp_avg" in key}
        if LAYOUTS[name][1] and precision == "bf16":
            before = {key: x if "/exp_avg" in key else ties_kept(x) for key, x in before.items()}
    else:
        before = expected(before, name, precision)
    if wrong := differing(after, before):
        raise Wrong(f"{name}, {precision}: {len(wrong)} tensors differ, such as {wrong[:3]}")
    if (a := source.state["optimizer_steps"]) != (b := target.state["optimizer_steps"]):
        raise Wrong(f"{name}, {precision}: {a} steps of the optimizer, then {b}")
    return len(before)


# ---------------------------------------------------------------- all of them


def plan(every: int) -> Iterator[tuple[str, str, str, str]]:
    """(precision saved, layout saved, precision loaded, layout loaded), one in `every` of the pairs within a precision."""
    names = list(LAYOUTS)
    for precision in PRECISIONS:
        for i, source in enumerate(names):
            yield from (
                (precision, source, precision, target) for j, target in enumerate(names) if (i + j) % every == 0
            )
    for number, (before, after) in enumerate(CROSSED):
        for i in range(0, len(names), every):
            yield before, names[i], after, names[(i + 5 + number) % len(names)]


def name_of(case: tuple[str, str, str, str]) -> str:
    before, source, after, target = case
    return f"{before} {source} to {after} {target}"


def results_of(cases: list[tuple[str, str, str, str]], place: Path) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str, bool], list[tuple[str, str]]] = {}
    for before, source, after, target in cases:
        groups.setdefault((after, target, before != after), []).append((before, source))
    saved: dict[tuple[str, str], Contents] = {}
    for (after, target, is_crossed), sources in groups.items():
        roots = {}
        for before, source in sources:
            root = place / f"{before} {source}"
            if (before, source) not in saved:
                if not (root / "latest_checkpointed_iteration.txt").exists():  # by a run of this command before
                    save_source(root, source, before, place / "files")
                saved[before, source] = read(latest(root))
            roots[root] = place / name_of((before, source, after, target))
        answers = loaded_and_saved(roots, target, after, place / "files", is_crossed=is_crossed)
        for (before, source), root, answer in zip(sources, roots.values(), answers):
            if is_crossed and "--allow-precision-change" not in answer:
                raise Wrong(f"{before} was loaded in {after} without the flag: {answer}")
            count = check_pair(saved[before, source], read(latest(root)), target, after, is_crossed=is_crossed)
            name = name_of((before, source, after, target))
            yield {"case": name, "ok": True, "saved": [before, source], "loaded": [after, target], "tensors": count}


def table(results: list[dict[str, Any]]) -> str:
    pairs = Counter((result["saved"][0], result["loaded"][0]) for result in results)
    tensors = Counter()
    for result in results:
        tensors[result["saved"][0], result["loaded"][0]] += result["tensors"]
    lines = ["| saved in | loaded in | pairs of layouts | tensors compared, all equal |", "|---|---|--:|--:|"]
    lines += [
        f"| {before} | {after} | {count} | {tensors[before, after]:,} |" for (before, after), count in pairs.items()
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = campaign_parser(__doc__)
    parser.add_argument("--every", type=int, default=1, help="one in so many pairs")
    parser.add_argument(
        "--place", type=Path, metavar="DIR", help="keep the checkpoints of the sources here for the next run"
    )
    given = parser.parse_args(arguments)
    if given.write is None:
        done, end = read_results(given.results), time.monotonic() + 60 * given.limit_minutes
        cases = [case for case in plan(given.every) if name_of(case) not in done]
        with tempfile.TemporaryDirectory(prefix="reshard-") as place, open_results(given.results) as add:
            for number, result in enumerate(results_of(cases, given.place or Path(place)), 1):
                add(result)
                if number % 50 == 0:
                    print(f"{number} of {len(cases)} pairs", flush=True)
                if time.monotonic() > end:
                    break
    results = list(read_results(given.results).values())
    print(table(results))
    return end_campaign(results, given.write, "reshard", table)


if __name__ == "__main__":
    sys.exit(main())
