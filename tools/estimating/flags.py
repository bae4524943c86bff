"""The flags of tools/estimate_memory.py itself. Without torch."""

import argparse


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Estimate")
    group.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of the job (default: 1)")
    model = "gpt, bert, t5, or the path of a script like pretrain_gpt.py: the model that the job trains (default: gpt)"
    group.add_argument("--model", default="gpt", metavar="NAME", help=model)
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    measured = "train one rank here with real tensors, and count them; other ranks are silent"
    group.add_argument("--measure", action="store_true", help=measured)
    group.add_argument("--rank", type=int, metavar="N", help="the rank that --measure trains (default: 0)")
