"""Validation loss of the quickstart's model with 8 experts, top 2, and with a dense MLP of equal active parameters: three seeds.

    python benchmarks/experts_loss.py results.jsonl --limit-minutes 30      some minutes of one core a run; goes on where it stopped
    python benchmarks/experts_loss.py results.jsonl --report                prints the tables of docs/experts.md

    dense             the quickstart's MLP, of width 320
    experts           8 experts of width 160, of which a token visits 2, with a balancing loss (coefficient 0.01)
    no balancing      the same without that loss

All runs share data, batch, schedule and rates, which are the quickstart's. One process trains; data and tokenizer are made in --folder
if they are not there. A line of the results is one finished run: validation losses, and the loads of the experts, as multiples of an
equal share.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from optimizers import MODEL, ROOT, prepare

STEPS, VALIDATIONS = 300, 4
SEEDS = (1, 2, 3)
WIDTH, TOPK = 320, 2
EXPERTS = (
    f"--num-experts 8 --moe-router-topk {TOPK} --moe-ffn-hidden-size {WIDTH // TOPK} --moe-token-dispatcher-type alltoall "
    "--moe-per-layer-logging"
)
FLAGS = {
    "dense": "",
    "experts": f"{EXPERTS} --moe-aux-loss-coeff 0.01",
    "no balancing": f"{EXPERTS} --moe-aux-loss-coeff 0",
}
TRAINING = f"""--ffn-hidden-size {WIDTH} --micro-batch-size 16 --global-batch-size 16 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine
    --weight-decay 0.1 --adam-beta2 0.95 --split 95,5,0 --eval-iters 10 --log-interval 10 --device cpu --train-iters {STEPS}
    --lr-warmup-iters {STEPS // 20} --eval-interval {STEPS // VALIDATIONS}"""
# What decides first: both models of a seed, then the next seed.
CASES = [*((kind, seed) for seed in SEEDS for kind in ("dense", "experts")), ("no balancing", SEEDS[0])]


def train(kind: str, seed: int, data: str, keep: Path | None = None) -> dict:
    """Train once; return a line of results. keep: a folder that gets the run's metrics file."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(keep or folder).absolute() / f"{kind.replace(' ', '_')}_{seed}.jsonl"
        metrics.parent.mkdir(parents=True, exist_ok=True)
        flags = f"{MODEL} {TRAINING} {FLAGS[kind]} --seed {seed} {data} --metrics-file {metrics}"
        command = [sys.executable, "pretrain_gpt.py", *flags.split()]
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        began = time.time()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    validation = {e["iteration"]: e["lm loss validation"] for e in entries if e["kind"] == "validation"}
    loads = {e["iteration"]: loads_of(e) for e in entries if e["kind"] == "interval"}
    seconds = round(time.time() - began)
    return {"kind": kind, "seed": seed, "validation": validation, "loads": loads, "seconds": seconds}


def loads_of(entry: dict) -> dict[str, float]:
    return {name.removeprefix("moe/"): value for name, value in entry.items() if name.startswith("moe/")}


# ---------------------------------------------------------------- report


def report(results: list[dict]) -> str:
    """Return the table of losses after the last step, and of loads over the last third of a run."""
    lines = [
        "| model | seeds | validation loss after 300 steps, mean | of each seed | largest load | smallest load |",
        "|---|--:|--:|---|--:|--:|",
    ]
    for kind in FLAGS:
        of_kind = sorted((result for result in results if result["kind"] == kind), key=lambda result: result["seed"])
        if not of_kind:
            continue
        lasts = [{int(step): loss for step, loss in result["validation"].items()}[STEPS] for result in of_kind]
        each = ", ".join(f"{loss:.3f}" for loss in lasts)
        largest, smallest = (mean_load(of_kind, name) for name in ("max_load", "min_load"))
        lines.append(f"| {kind} | {len(lasts)} | {statistics.mean(lasts):.3f} | {each} | {largest} | {smallest} |")
    return "\n".join(lines)


def mean_load(results: list[dict], name: str) -> str:
    """Return the mean over seeds, layers and the logged steps of the last third; empty if there are no experts."""
    values = [
        value
        for result in results
        for step, loads in result["loads"].items()
        for curve, value in loads.items()
        if int(step) > STEPS * 2 // 3 and curve.startswith(name)
    ]
    return f"{statistics.mean(values):.2f}" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON lines, one per finished run; added to")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "quickstart", help="of the data")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS))
    parser.add_argument(
        "--metrics", type=Path, help="a folder for the metrics files of the runs, for tools/plot_run.py"
    )
    parser.add_argument("--report", action="store_true", help="print the table of the results; train nothing")
    given = parser.parse_args()
    results = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    if given.report:
        print(report(results))
        return
    data, began = prepare(given.folder.absolute()), time.monotonic()
    done = {(result["kind"], result["seed"]) for result in results}
    for kind, seed in CASES:
        if (kind, seed) in done or seed not in given.seeds or time.monotonic() - began > 60 * given.limit_minutes:
            continue
        result = train(kind, seed, data, given.metrics)
        with given.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(kind, seed, result["validation"], f"{result['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
