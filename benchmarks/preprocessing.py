"""Measure how fast tools/preprocess_data.py is, against the tokenizer library alone and against a plain loop.

    python benchmarks/preprocessing.py --vocab-file vocab.json --merge-file merges.txt --input corpus.jsonl --workers 2

Three contenders turn the same JSON lines into GPT-2 tokens, in turns, `--rounds` times:

    ours        tools/preprocess_data.py with --workers N, from its start to the finished files
    library     `encode_batch` of the package tokenizers in a loop, with N threads; texts are in memory, ids are discarded
    loop        transformers' GPT2Tokenizer called for one document after the other, ids in a list

Prints MB of text a second of each round, the medians, and two ratios with the least and the largest of a round: ours / library,
ours / loop; then the same by seconds of CPU time, which tell more on a machine that has other work, but do not credit `ours`
with its workers. Since version 5 transformers has one GPT2Tokenizer, also under the name GPT2TokenizerFast, which runs on the
package tokenizers; versions before had a slower one in Python. The version is printed; without transformers the loop is left out.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BATCH = 1000  # texts of a call of the library

LIBRARY = """
import json, sys, time
import tokenizers
sys.path.insert(0, sys.argv[1])
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
tokenizer = build_tokenizer(TokenizerConfig("GPT2BPETokenizer", sys.argv[2], sys.argv[3]))._tokenizer
texts = [json.loads(line)["text"] for line in open(sys.argv[4], encoding="utf-8")]
started, cpu = time.perf_counter(), time.process_time()
for first in range(0, len(texts), BATCH):
    tokenizer.encode_batch(texts[first : first + BATCH])
print(time.perf_counter() - started, time.process_time() - cpu)
"""

LOOP = """
import json, sys, time
from transformers import GPT2Tokenizer
tokenizer = GPT2Tokenizer(vocab=sys.argv[2], merges=sys.argv[3], model_max_length=10**9)
started, cpu = time.perf_counter(), time.process_time()
ids = [tokenizer(json.loads(line)["text"]).input_ids for line in open(sys.argv[4], encoding="utf-8")]
print(time.perf_counter() - started, time.process_time() - cpu)
"""


def seconds_of(program: str, options: argparse.Namespace, **environment: str) -> tuple[float, float]:
    """Run `program`; return the (elapsed, CPU) seconds that it prints, which do not count its imports."""
    program = program.replace("BATCH", str(BATCH))
    command = [sys.executable, "-c", program, str(ROOT), options.vocab_file, options.merge_file, options.input]
    run = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    elapsed, cpu = map(float, run.stdout.split())
    return elapsed, cpu


def seconds_of_ours(options: argparse.Namespace) -> tuple[float, float]:
    """Return the (elapsed, CPU) seconds of the whole command, with the start of Python and of every worker."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        command = [sys.executable, ROOT / "tools/preprocess_data.py", "--input", options.input, "--append-eod"]
        command += ["--output-prefix", f"{folder}/o", "--workers", str(options.workers)]
        command += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", options.vocab_file]
        command += ["--merge-file", options.merge_file, "--log-interval", str(10**9)]
        start = time.perf_counter()
        cpu_start = cpu_of_children()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return time.perf_counter() - start, cpu_of_children() - cpu_start


def cpu_of_children() -> float:
    """Return the CPU seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--input", required=True, help='JSON lines with the key "text"')
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", help="folder for the output, which is deleted; default: the system's")
    options = parser.parse_args()
    with open(options.input, encoding="utf-8") as file:
        sizes = [len(json.loads(line)["text"].encode()) for line in file]
    megabytes = sum(sizes) / 1e6
    print(f"{len(sizes)} documents, {megabytes:.1f} MB of text, {options.workers} workers or threads")
    contenders = {
        "ours": lambda: seconds_of_ours(options),
        "library": lambda: seconds_of(
            LIBRARY, options, TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(options.workers)
        ),
    }
    print(f"tokenizers {importlib.metadata.version('tokenizers')}", end="")
    if importlib.util.find_spec("transformers"):
        print(f", transformers {importlib.metadata.version('transformers')}", end="")
        contenders["loop"] = lambda: seconds_of(LOOP, options)
    print(flush=True)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            elapsed, cpu = run()
            rates[name].append((megabytes / elapsed, megabytes / cpu))
        print("  ".join(f"{name} {rounds[-1][0]:.2f} MB/s" for name, rounds in rates.items()), flush=True)
    for kind, unit in enumerate(("MB/s", "MB per CPU second")):
        medians = {name: statistics.median(rate[kind] for rate in rounds) for name, rounds in rates.items()}
        print(f"medians, {unit}: " + ", ".join(f"{name} {rate:.2f}" for name, rate in medians.items()))
        for name in list(medians)[1:]:
            ratios = [ours[kind] / other[kind] for ours, other in zip(rates["ours"], rates[name])]
            print(f"  ours / {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


if __name__ == "__main__":
    main()
