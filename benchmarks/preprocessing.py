"""How fast tools/preprocess_data.py is, against the tokenizer library alone and against a plain loop.

    python benchmarks/preprocessing.py --vocab-file vocab.json --merge-file merges.txt --input corpus.jsonl --workers 2

Three contenders turn the same JSON lines into GPT-2 tokens, in turns, `--rounds` times:

    ours        tools/preprocess_data.py with --workers N, from its start to the finished files
    library     `encode_batch` of the package tokenizers in a loop, with N threads, texts already in memory, ids thrown away
    loop        transformers' GPT-2 tokenizer called for one document after the other, ids kept

Prints MB of text a second of each round, the medians, and two ratios: ours / library, ours / loop. Without
transformers the loop is left out.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BATCH = 1000  # texts that the library gets at once

LIBRARY = """
import json, sys, time
import tokenizers
sys.path.insert(0, sys.argv[1])
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
tokenizer = build_tokenizer(TokenizerConfig("GPT2BPETokenizer", sys.argv[2], sys.argv[3]))._tokenizer
texts = [json.loads(line)["text"] for line in open(sys.argv[4], encoding="utf-8")]
started = time.perf_counter()
for first in range(0, len(texts), BATCH):
    tokenizer.encode_batch(texts[first : first + BATCH])
print(time.perf_counter() - started)
"""

LOOP = """
import json, sys, time
from transformers import GPT2Tokenizer
tokenizer = GPT2Tokenizer(vocab=sys.argv[2], merges=sys.argv[3], model_max_length=10**9)
started = time.perf_counter()
ids = [tokenizer(json.loads(line)["text"]).input_ids for line in open(sys.argv[4], encoding="utf-8")]
print(time.perf_counter() - started)
"""


def seconds_of(program: str, options: argparse.Namespace, **environment: str) -> float:
    """The seconds that `program` says it took, not counting its imports."""
    program = program.replace("BATCH", str(BATCH))
    command = [sys.executable, "-c", program, str(ROOT), options.vocab_file, options.merge_file, options.input]
    run = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    return float(run.stdout)


def seconds_of_ours(options: argparse.Namespace) -> float:
    """Seconds of the whole command, with the start of Python and of every worker."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        command = [sys.executable, ROOT / "tools/preprocess_data.py", "--input", options.input, "--append-eod"]
        command += ["--output-prefix", f"{folder}/o", "--workers", str(options.workers)]
        command += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", options.vocab_file]
        command += ["--merge-file", options.merge_file, "--log-interval", str(10**9)]
        started = time.perf_counter()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return time.perf_counter() - started


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
    if importlib.util.find_spec("transformers"):
        contenders["loop"] = lambda: seconds_of(LOOP, options)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            rates[name].append(megabytes / run())
        print("  ".join(f"{name} {found[-1]:.2f} MB/s" for name, found in rates.items()), flush=True)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print("medians: " + ", ".join(f"{name} {rate:.2f} MB/s" for name, rate in medians.items()))
    for name in list(medians)[1:]:
        print(f"ours / {name}: {medians['ours'] / medians[name]:.2f}")


if __name__ == "__main__":
    main()
