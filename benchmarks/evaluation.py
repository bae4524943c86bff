"""Measure evaluation by log-likelihood against lm-evaluation-harness's Hugging Face backend, on the same weights and requests.

    harness/bin/python benchmarks/evaluation.py                       200 examples of 4 choices, 4 layers of 256
    harness/bin/python benchmarks/evaluation.py --choices 1 --rounds 3 --threads 2

The interpreter has lm_eval 0.4.13, torch and transformers (tests/compat/test_lm_eval.py says how). Both answer the same requests of
token ids, contexts of 8 to 256 tokens and continuations of 1 to 16, in one process, in turns; the Hugging Face backend with each of
its batch sizes, of which the fastest counts. The vocabulary takes the share of the work that GPT-2's takes. Prints medians of processor seconds and seconds by the clock, and the ratio of a round's
processor seconds. Exit code 1 if the answers differ by 1e-3, or if the median ratio is below 1.2.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from lm_eval.models.huggingface import HFLM
from lm_eval_compare import our_model, write_folder


def requests_of(examples: int, choices: int, vocab: int) -> list[tuple[tuple[str, str], list[int], list[int]]]:
    """Return requests as the harness makes them: the texts, and the ids of context and continuation."""
    rng = random.Random(5)
    requests = []
    for example in range(examples):
        context = [rng.randrange(1, vocab) for _ in range(round(8 * 32 ** rng.random()))]  # 8 to 256, by its logarithm
        for choice in range(choices):
            continuation = [rng.randrange(1, vocab) for _ in range(rng.randint(1, 16))]
            requests.append(((f"{example}", f"{choice}"), context, continuation))
    return requests


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for flag, default in (
        ("examples", 200),
        ("choices", 4),
        ("rounds", 5),
        ("hidden", 256),
        ("layers", 4),
        ("vocab", 5504),
        ("threads", 2),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    requests = requests_of(args.examples, args.choices, args.vocab)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), hidden=args.hidden, layers=args.layers, vocab=args.vocab, length=512)
        backends = {"ours": our_model(Path(folder), 512)}
        for size in args.batch_sizes:
            backends[f"hf, batches of {size}"] = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=size)

        # all take turns
        cpu: dict[str, list[float]] = {name: [] for name in backends}
        clock: dict[str, list[float]] = {name: [] for name in backends}
        answers = {}
        for number in range(args.rounds + 1):
            for name, backend in backends.items():
                start = time.perf_counter()
                cpu_start = time.process_time()
                answers[name] = backend._loglikelihood_tokens(requests, disable_tqdm=True)
                if number:  # the first round warms up
                    cpu[name].append(time.process_time() - cpu_start)
                    clock[name].append(time.perf_counter() - start)

    # compare
    differences = [
        abs(a - b) for name in backends for (a, _), (b, _) in zip(answers[name], answers["ours"], strict=True)
    ]
    for name in backends:
        print(
            f"{name:22} {statistics.median(cpu[name]):8.2f} s of the processor, {statistics.median(clock[name]):8.2f} s"
        )
    fastest = min((name for name in backends if name != "ours"), key=lambda name: statistics.median(cpu[name]))
    ratios = [a / b for a, b in zip(cpu[fastest], cpu["ours"], strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"{fastest} / ours: {ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f}); answers differ by {max(differences):.1e} at most"
    )
    return int(max(differences) > 1e-3 or ratio < 1.2)


if __name__ == "__main__":
    sys.exit(main())
