"""Predict the memory of every rank of a job, in one process and without allocating the model.

    python tools/estimate_memory.py --world-size 1024 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 \\
        --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 \\
        --global-batch-size 1536 --bf16 --sequence-parallel --use-distributed-optimizer --vocab-size 51200
    python tools/estimate_memory.py --measure --rank 2 --world-size 8 ...    train rank 2 here, alone; print both numbers
    python tools/estimate_memory.py --model mine/pretrain.py ...             the model of a script

Further flags are those of the training script: `python pretrain_gpt.py --help`, or docs/flags.md, lists them (--model bert
or t5: those of pretrain_bert.py or pretrain_t5.py). Flags of data and of steps may be left out, and --vocab-size N replaces
a tokenizer. docs/memory.md says what is counted.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.tolerate_broken_output import until_reader_ends
from megatron.core.base.version import version_text
from tools.estimating.flags import add_own_flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return the exit status: 0 is success, 2 an error in the flags."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    asked = {"-h", "--help", "--version"} & set(words)
    if asked:
        parser = argparse.ArgumentParser(
            usage="%(prog)s [flags]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--version", action="version", version=version_text(), help="print the version")
        add_own_flags(parser)
        parser.parse_args(sorted(asked)[:1])  # prints the help or the version, and exits
    return import_module("tools.estimating.estimate").run(words)  # not imported above, since --help needs no torch


if __name__ == "__main__":
    sys.exit(until_reader_ends(main))
