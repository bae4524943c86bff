"""Flags of tools/estimate_memory.py itself, without those of the training script. Needs no torch."""

import argparse


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Add the tool's flags as a group of their own."""
    group = parser.add_argument_group("Estimate")
    world_help = "ranks of the job (default: as few as the layout needs)"
    group.add_argument("--world-size", type=int, metavar="N", help=world_help)
    model_help = (
        "gpt, bert, t5, or the path of a script like pretrain_gpt.py: the model that the job trains (default: gpt)"
    )
    group.add_argument("--model", default="gpt", metavar="NAME", help=model_help)
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    layer_help = "also list parameters, FLOPs and bytes by layer"
    group.add_argument("--by-layer", action="store_true", help=layer_help)
    measure_help = "train one rank here with real tensors, and count them; other ranks are silent"
    group.add_argument("--measure", action="store_true", help=measure_help)
    group.add_argument("--rank", type=int, metavar="N", help="the rank that --measure trains (default: 0)")
