"""Print the torchrun line of each node in a hostfile, as DeepSpeed's launcher and mpirun read it. Pure.

    python -m megatron.core.parallel.hostfile_to_torchrun hosts --include worker-1:0,2@worker-2 -- train.py --lr 1e-4

A hostfile has lines such as `worker-1 slots=4`. A filter names nodes, each alone or with slots; nodes are separated by
`@`. torchrun starts equally many processes on every node, so the slots that are left must be equally many.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.tolerate_broken_output import until_reader_ends
from megatron.core.parallel.launcher_environment import DEFAULT_PORT

Slots = dict[str, list[int]]


def read_hostfile(text: str) -> Slots:
    """Return the slots of each node. Raises ConfigError with every line of another form."""
    nodes = Slots()
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None or match[1] in nodes or match[2] == "0":
            problems.append(f"hostfile line {number} is {line!r}; it must be a new `name slots=N`, with N from 1 up")
        else:
            nodes[match[1]] = list(range(int(match[2])))
    if problems or not nodes:
        raise ConfigError(problems or "the hostfile names no node")
    return nodes


def filtered(nodes: Slots, include: str = "", exclude: str = "") -> Slots:
    """Return the nodes and slots that are left.

    Raises ConfigError for a node or slot that the hostfile does not have.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude cannot be combined; give only one of them")
    # read the filter
    named = Slots()
    for part in (include or exclude).split("@"):
        if not part:
            continue
        name, *slot_lists = part.strip().split(":")
        slots = nodes.get(name, [])
        if slot_lists:
            slots = [int(slot) if slot.isdecimal() else -1 for slot in slot_lists[0].split(",")]
        if name not in nodes or not set(slots) <= set(nodes[name]):
            raise ConfigError(f"{part!r}: the hostfile has no such node or slot; it has {nodes}")
        named[name] = sorted({*named.get(name, []), *slots})

    # keep what it names, or all else
    if include:
        return {name: named[name] for name in nodes if name in named}
    left = Slots()
    for name, slots in nodes.items():
        others = [slot for slot in slots if slot not in named.get(name, [])]
        if others:
            left[name] = others
    return left


def torchrun_lines(
    nodes: Slots, command: Sequence[str], address: str | None = None, port: int = DEFAULT_PORT
) -> dict[str, str]:
    """Return the line to run on each node. The first node is the meeting point, unless `address` names one."""
    counts = {len(slots) for slots in nodes.values()}
    if len(counts) != 1:
        raise ConfigError(
            "torchrun needs the same number of slots on every node, and at least one node; the selected nodes "
            f"are {nodes}"
        )
    lines = {}
    first = address or next(iter(nodes))
    size = counts.pop()
    for rank, (name, slots) in enumerate(nodes.items()):
        visible = ""
        if slots != list(range(size)):
            visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, slots))} "
        words = ["torchrun", f"--nnodes={len(nodes)}", f"--nproc-per-node={size}", f"--node-rank={rank}"]
        words += [f"--master-addr={first}", f"--master-port={port}", *command]
        lines[name] = visible + shlex.join(words)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each node: its name, and what to run there."""
    words = list(sys.argv[1:] if argv is None else argv)
    separator = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m megatron.core.parallel.hostfile_to_torchrun", description=__doc__.splitlines()[0]
    )
    parser.add_argument("hostfile", type=Path, help="lines of `name slots=N`")
    filter_form = "NODE[:SLOT,...][@...]"
    parser.add_argument("--include", default="", metavar=filter_form, help="use no others")
    parser.add_argument("--exclude", default="", metavar=filter_form, help="do not use these")
    parser.add_argument("--master_addr", metavar="HOST", help="where ranks meet (default: the first node)")
    parser.add_argument("--master_port", type=int, default=DEFAULT_PORT)
    args = parser.parse_args(words[:separator])
    try:
        nodes = filtered(read_hostfile(args.hostfile.read_text()), args.include, args.exclude)
        lines = torchrun_lines(nodes, words[separator + 1 :] or ["SCRIPT"], args.master_addr, args.master_port)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for name, line in lines.items():
        print(f"{name}: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(until_reader_ends(main))
