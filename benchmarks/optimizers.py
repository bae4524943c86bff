"""Validation loss of the quickstart's model under AdamW and under Muon, at equal steps: a grid of learning rates, three seeds.

    python benchmarks/optimizers.py benchmarks/optimizers.jsonl --limit-minutes 30      about a minute of one core a run; goes on where it stopped
    python benchmarks/optimizers.py benchmarks/optimizers.jsonl --report docs/optimizers.md

All runs share the model, data, batch, schedule (a tenth warm-up, cosine to a tenth), weight decay and clipping; Muon's tables and norms
have AdamW's settings. Data and tokenizer are the quickstart's, made in --folder if they are not there. The first seed runs at every
rate, the others at the rates that were best with it, the best first. A line of the results is one finished run. The report needs
matplotlib for its picture.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.plot_run import read_metrics

ROOT = Path(__file__).resolve().parent.parent
# From the middle of each grid outwards.
RATES = {"adam": (2e-3, 4e-3, 1e-3, 8e-3, 5e-4), "muon": (16e-3, 32e-3, 8e-3, 64e-3, 4e-3)}
SEEDS = (1, 2, 3)
FLAGS = {
    "adam": "--optimizer adam",
    "muon": "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2",
}
NAMES = {"adam": "AdamW", "muon": "Muon"}
MODEL = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"""
TRAINING = """--micro-batch-size 16 --global-batch-size 16 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --split 95,5,0 --eval-iters 10 --log-interval 20 --device cpu"""
STEPS, VALIDATIONS = 100, 4


def prepare(folder: Path) -> str:
    """The flags of the quickstart's data, which are made if they are not in the folder."""
    corpus, tokenizer, tokens = (
        folder / name for name in ("stdlib-32mb.jsonl", "tokenizer-32mb-2048.json", "stdlib-32mb-2048")
    )
    read = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    commands = {
        corpus: f"tools/stdlib_corpus.py --output {corpus} --max-mb 32",
        tokenizer: f"tools/train_tokenizer.py --input {corpus} --vocab-size 2048 --output {tokenizer}",
        Path(
            f"{tokens}_text_document.idx"
        ): f"tools/preprocess_data.py --input {corpus} --output-prefix {tokens} --append-eod {read}",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for made, command in commands.items():
        if not made.exists():
            subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)
    return f"--data-path {tokens}_text_document {read}"


def next_case(results: list[dict], optimizer: str) -> tuple[float, int] | None:
    """(rate, seed) of the next run: all rates of the first seed, then all seeds of its best rate, of its second best, ..."""
    lasts = {(r["lr"], r["seed"]): _last(r["validation"]) for r in results if r["optimizer"] == optimizer}
    by_loss = sorted(RATES[optimizer], key=lambda rate: lasts.get((rate, SEEDS[0]), math.inf))
    wanted = [*product(RATES[optimizer], SEEDS[:1]), *product(by_loss, SEEDS[1:])]
    return next((case for case in wanted if case not in lasts), None)


def _last(losses: dict) -> float:
    """The loss after the last step; infinite if the run has diverged, which leaves it out."""
    return {int(step): loss for step, loss in losses.items()}.get(STEPS, math.inf)


def train(optimizer: str, rate: float, seed: int, data: str) -> dict:
    """One run, as a line of results: validation losses by step, and seconds of processor time."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        schedule = f"--train-iters {STEPS} --lr-warmup-iters {STEPS // 10} --eval-interval {STEPS // VALIDATIONS}"
        flags = (
            f"{MODEL} {TRAINING} {schedule} {FLAGS[optimizer]} --lr {rate} --min-lr {rate / 10} --seed {seed} {data}"
        )
        began, spent = time.time(), _seconds_of_children()
        command = [sys.executable, "pretrain_gpt.py", *flags.split(), "--metrics-file", str(metrics)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1", **os.environ}
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        losses = read_metrics(metrics.read_text()).of["validation"]
    return {
        "optimizer": optimizer,
        "lr": rate,
        "seed": seed,
        "validation": losses,
        "seconds": round(time.time() - began),
        "processor seconds": round(_seconds_of_children() - spent),
    }


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---------------------------------------------------------------- report


def curves(results: list[dict]) -> dict[tuple[str, float], list[dict[int, float]]]:
    """(optimizer, rate) -> of each seed: step -> validation loss."""
    found: dict[tuple[str, float], list[dict[int, float]]] = {}
    for result in sorted(results, key=lambda result: (result["optimizer"], result["lr"], result["seed"])):
        losses = {int(step): loss for step, loss in result["validation"].items()} | {STEPS: _last(result["validation"])}
        found.setdefault((result["optimizer"], result["lr"]), []).append(losses)
    return found


def means(found: dict[tuple[str, float], list[dict[int, float]]], optimizer: str) -> dict[float, float]:
    """Rate -> mean of the seeds' last losses."""
    return {lr: statistics.mean(run[STEPS] for run in runs) for (name, lr), runs in found.items() if name == optimizer}


def report(results: list[dict], picture: str) -> str:
    found = curves(results)
    lines = [
        "# AdamW and Muon on the quickstart's model",
        "",
        "This page compares the validation loss of AdamW and [Muon](muon.md) on a small model, for those who choose between the two.",
        "These commands train, and then write the page:",
        "",
        "    python benchmarks/optimizers.py benchmarks/optimizers.jsonl --limit-minutes 30",
        "    python benchmarks/optimizers.py benchmarks/optimizers.jsonl --report docs/optimizers.md",
        "",
        f"The model is the GPT of [the quickstart](../README.md#two-commands) with 1.0 M parameters. It is trained in one process for {STEPS}",
        "steps of 16 x 128 tokens. Each optimizer has a grid of learning rates. Schedule (the first tenth is warm-up, then a cosine down to",
        "a tenth of the rate), weight decay (0.1), clipping (1.0) and seeds are the same for both. AdamW has betas 0.9 and 0.95. Muon runs with",
        f"`{FLAGS['muon'].partition(' --')[2].join(['--', ''])}`;",
        "what Muon leaves to AdamW (embeddings, norms) has AdamW's settings.",
        "",
        "One learning rate applies to all parameters. So in the runs with Muon the embeddings are updated by AdamW at a rate that is best for",
        "Muon. AdamW with another rate for the embeddings (`--decoupled-lr`) was not tried. A run this short does not predict a long one.",
        "",
        f"Validation loss after {STEPS} steps, mean of the seeds (each seed):",
        "",
        "| learning rate | AdamW | Muon |",
        "|--:|---|---|",
    ]
    best = {name: min(rates, key=rates.get) for name in RATES if (rates := means(found, name))}
    for rate in sorted({rate for _, rate in found}):
        cells = [_cell(found.get((name, rate)), is_best=best.get(name) == rate) for name in RATES]
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    steps = sorted(found["adam", best["adam"]][0])
    lines += ["", "Validation loss over the steps, each optimizer at its best rate, mean of the seeds:", ""]
    lines += [f"| step | {' | '.join(map(str, steps))} |", "|---|" + "--:|" * len(steps)]
    for name, rate in best.items():
        values = (statistics.mean(run[step] for run in found[name, rate]) for step in steps)
        lines.append(f"| {NAMES[name]}, {rate:g} | {' | '.join(f'{value:.3f}' for value in values)} |")
    gain = means(found, "adam")[best["adam"]] - means(found, "muon")[best["muon"]]
    lines += [
        "",
        f"Muon's loss is {'lower' if gain > 0 else 'higher'} by {abs(gain):.3f}. {_seeds_apart(found, best)}",
        "",
    ]
    lines += [f"![validation loss of AdamW and Muon]({picture})", "", *_ends(found, best)]
    return "\n".join(lines).rstrip() + "\n"


def _cell(runs: list[dict[int, float]] | None, *, is_best: bool) -> str:
    if not runs:
        return ""
    text = f"{statistics.mean(run[STEPS] for run in runs):.3f} ({', '.join(f'{run[STEPS]:.3f}' for run in runs)})"
    return f"**{text}**" if is_best else text


def _seeds_apart(found: dict, best: dict[str, float]) -> str:
    adam, muon = ([run[STEPS] for run in found[name, best[name]]] for name in ("adam", "muon"))
    if max(muon) < min(adam):
        return f"Its worst of {len(muon)} seeds is below AdamW's best of {len(adam)}."
    return "The seeds' ranges overlap."


def _ends(found: dict, best: dict[str, float]) -> Iterator[str]:
    """What is missing from the comparison."""
    for name, rate in best.items():
        tried = sorted(means(found, name))
        if rate in (tried[0], tried[-1]):
            yield f"{NAMES[name]}'s best rate, {rate:g}, is at the end of its grid."


def draw(results: list[dict], path: Path) -> None:
    """Left: the last loss over the rate; right: the curve at the best rate. Each seed is a thin line or a dot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = curves(results)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for color, name in enumerate(RATES):
        over_rates = dict(sorted(means(found, name).items()))
        left.plot(list(over_rates), list(over_rates.values()), "o-", color=f"C{color}", label=NAMES[name])
        for (of, rate), runs in found.items():
            if of == name:
                left.plot([rate] * len(runs), [run[STEPS] for run in runs], ".", color=f"C{color}", alpha=0.4)
        rate = min(over_rates, key=over_rates.get)
        runs = found[name, rate]
        for run in runs:
            right.plot(list(run), list(run.values()), color=f"C{color}", alpha=0.3)
        mean = {step: statistics.mean(run[step] for run in runs) for step in sorted(runs[0])}
        right.plot(list(mean), list(mean.values()), "o-", color=f"C{color}", label=f"{NAMES[name]}, {rate:g}")
    left.set(xscale="log", xlabel="learning rate", ylabel=f"validation loss after {STEPS} steps")
    right.set(xlabel="step", ylabel="validation loss")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON lines, one per finished run; added to")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "quickstart", help="of the data (runs/quickstart)"
    )
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument(
        "--report", type=Path, help="write this page, and a picture beside it, of the results; train nothing"
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=RATES, default=list(RATES), help="to run, one after the other"
    )
    given = parser.parse_args()
    results = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    if given.report is not None:
        picture = given.report.with_suffix(".png")
        draw(results, picture)
        given.report.write_text(report(results, picture.name))
        return
    data, began = prepare(given.folder.absolute()), time.monotonic()
    for optimizer in given.optimizers:
        while (case := next_case(results, optimizer)) and time.monotonic() - began < 60 * given.limit_minutes:
            results.append(train(optimizer, *case, data))
            with given.results.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
            print(json.dumps(results[-1]), flush=True)


if __name__ == "__main__":
    main()
