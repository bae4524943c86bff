"""Draw pipeline schedules and print their bubble and their memory, by simulation: needs neither torch nor a device.

    python tools/plot_schedule.py --schedule zb-h1 --pipeline-model-parallel-size 4 --microbatches 8
    python tools/plot_schedule.py --schedule 1f1b zb-v --svg plots/two.png
    python tools/plot_schedule.py --all --microbatches 16 --transfer-cost 0.1 --svg plots/schedules.svg
    python tools/plot_schedule.py --schedule interleaved --chunks 3 --input-cost 1.2 --weight-cost 0.8 --trace out.json
    python tools/plot_schedule.py --schedule examples/minimal_fork/schedule.py:rounds --microbatches 6

Several schedules are drawn under one another on one axis of time. Their costs are those of one rank's layers, of which each of
v chunks takes 1/v; the costs of a single schedule are those of one of its stages. Costs may be in any unit of time, such as
measured milliseconds. --write-docs docs/schedules.md regenerates that page and its picture.
"""

import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, FlagConfig, option
from megatron.core.base.user_error_and_torchrun_error_file import is_user_error
from megatron.core.pipeline_parallel.schedule.actions import Op, Schedule
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule.plot import (
    Timeline,
    chrome_trace,
    forward_of_rank,
    plot_svg_of_several,
    plot_text,
)
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES, default_chunks
from megatron.core.pipeline_parallel.schedule.simulate import (
    DEFAULT_COST,
    bubble,
    bubble_in_theory,
    make_schedule,
    peak_live,
    peak_live_in_theory,
    simulate,
)
from tools.drawing.files import kind_problems, write_drawing
from tools.errors import run_tool

# Text about a flag of training in a schedule's error -> text about the flag of this tool.
_OWN_FLAG = {
    "--global-batch-size": "--microbatches",
    "lower --num-layers-per-virtual-pipeline-stage to at most num_layers / pipeline size": "raise --chunks",
    " and --num-virtual-stages-per-pipeline-rank": "",
    "--num-layers-per-virtual-pipeline-stage": "--chunks",
}
_CHUNKS_DRAWN = {"interleaved": (2, 4), "zb-interleaved": (2, 4)}  # of schedules for any number of chunks
_COST_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input", Op.W: "weight"}


@dataclass(frozen=True)
class PlotConfig(FlagConfig):
    """Schedule to draw."""

    schedule: list[str] = option(
        ["1f1b"],
        f"one or several of {', '.join(SCHEDULES)}, or FILE.py:FUNCTION, a function (p, m, v) -> schedule of your own",
        flags=("--schedule", "--pipeline-schedule"),
        metavar="NAME",
    )
    all: bool = option(False, "plot every schedule that supports the sizes")
    pipeline_model_parallel_size: int = option(4, "pipeline ranks")
    microbatches: int = option(8, "microbatches per iteration")
    chunks: int | None = option(
        None, "model chunks per rank; default: 2 for interleaved, zb-interleaved and zb-v, else 1"
    )
    forward_cost: float = option(1.0, "time of a forward of one stage; of several schedules, of one rank")
    backward_cost: float | None = option(
        None, "time of a backward; default: --input-cost + --weight-cost, or 2 forwards"
    )
    input_cost: float | None = option(None, "time of the input gradient; default: half a backward")
    weight_cost: float | None = option(None, "time of the weight gradient; default: the rest of a backward")
    transfer_cost: float = option(0.0, "time of a transfer to the next rank")
    svg: str | None = option(
        None,
        "picture to write, as its ending says: .svg or .png; several schedules have one axis of time",
        metavar="FILE",
    )
    trace: str | None = option(
        None,
        "Chrome trace file to write (for chrome://tracing, ui.perfetto.dev); of several schedules one each, with its name",
        metavar="FILE",
    )
    text: bool = option(False, "print the plot even with --svg or --trace")
    write_docs: str | None = option(
        None, "write the documentation page on schedules to this file, and nothing else", metavar="FILE"
    )

    def problems(self) -> Iterator[str]:
        for name in self.schedule:
            if name not in SCHEDULES and ".py:" not in name:
                yield f"--schedule ({name}) must be one of {', '.join(SCHEDULES)}, or FILE.py:FUNCTION"
        yield from kind_problems("svg", self.svg)
        if self.svg is not None and self.svg == self.trace:
            yield f"--svg and --trace ({self.svg}) must be two files"
        if not 0 <= self.transfer_cost < math.inf:
            yield f"--transfer-cost ({self.transfer_cost:g}) must be finite and not negative"
        for op, value in self.cost.items():
            if not 0 < value < math.inf:
                yield f"--{_COST_NAMES[op]}-cost ({value:g}) must be positive; raise it, or change the other backward costs"

    @property
    def cost(self) -> dict[Op, float]:
        """The time of each operation. A backward B is made of the input gradient I and the weight gradient W."""
        backward = self.backward_cost
        input_grad = self.input_cost
        weight_grad = self.weight_cost
        if backward is None:
            if input_grad is not None and weight_grad is not None:
                backward = input_grad + weight_grad
            else:
                backward = 2 * self.forward_cost
        if input_grad is None:
            input_grad = backward / 2 if weight_grad is None else backward - weight_grad
        if weight_grad is None:
            weight_grad = backward - input_grad
        return {Op.F: self.forward_cost, Op.B: backward, Op.I: input_grad, Op.W: weight_grad}

    @property
    def is_comparison(self) -> bool:
        """Whether several schedules are drawn: their costs are then those of a rank."""
        return self.all or len(self.schedule) > 1

    def chunks_for(self, name: str) -> int:
        """Return the number of chunks with which to draw a schedule."""
        if self.chunks is None or (self.is_comparison and name not in _CHUNKS_DRAWN):
            return _chunks_drawn(name)[0]
        return self.chunks

    def cost_of_stage(self, chunks: int) -> dict[Op, float]:
        """Return the time of each operation on one stage, of which a rank has `chunks`."""
        stages_per_cost = chunks if self.is_comparison else 1
        return {op: time / stages_per_cost for op, time in self.cost.items()}


def _chunks_drawn(name: str) -> tuple[int, ...]:
    """Return the numbers of chunks with which the page draws a schedule."""
    return _CHUNKS_DRAWN.get(name, (default_chunks(name),))


@contextmanager
def schedules_named(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the names of --schedule in SCHEDULES. FILE.py:FUNCTION is registered there within the block."""
    before = dict(SCHEDULES)
    registered = []
    try:
        for name in names:
            if ".py:" in name:
                function = schedule_in_file(name)
                name = name.rpartition(":")[2]
                SCHEDULES[name] = function
            registered.append(name)
        yield list(dict.fromkeys(registered))
    finally:
        SCHEDULES.clear()
        SCHEDULES.update(before)


def schedule_in_file(name: str) -> Callable[[int, int, int], Schedule]:
    """Import the function FILE.py:FUNCTION. Raises ConfigError if there is none."""
    path, function = name.rsplit(":", 1)
    if not Path(path).is_file():
        raise ConfigError(f"--schedule {name}: there is no file {path}")
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)  # the file may import others of its folder
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        raise ConfigError(f"--schedule {name}: importing {path} ends in {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    make = getattr(module, function, None)
    if not callable(make):
        raise ConfigError(f"--schedule {name}: {path} has no function {function}(p, m, v)")
    return make


class Drawn(NamedTuple):
    """A schedule at the sizes of the flags."""

    name: str
    schedule: Schedule
    chunks: int  # of a rank
    cost: dict[Op, float]  # of one stage


def make(config: PlotConfig, name: str) -> Drawn:
    """Make a schedule of SCHEDULES. Raises ConfigError if the sizes do not fit it."""
    v = config.chunks_for(name)
    try:
        schedule = make_schedule(name, config.pipeline_model_parallel_size, config.microbatches, v)
    except ValueError as error:
        if not is_user_error(error):
            raise
        raise ConfigError(_with_own_flags(str(error)).splitlines()) from None
    return Drawn(name, schedule, v, config.cost_of_stage(v))


def cell_of(drawn: Sequence[Drawn]) -> float:
    """Return the time of a cell in the texts of all schedules: their cheapest action."""
    return min(each.cost[action.op] for each in drawn for row in each.schedule for action in row)


def report(config: PlotConfig, drawn: Drawn, cell: float) -> Iterator[str]:
    """Write the trace of one schedule, and yield the lines to print. cell: the time of a cell of the plot."""
    # the sizes and the costs of the operations that occur
    name, schedule, v, cost = drawn
    p = config.pipeline_model_parallel_size
    m = config.microbatches
    transfer = config.transfer_cost
    ops = {action.op for actions in schedule for action in actions}
    head = f"{name}: {_count(p, 'rank')}, {_count(m, 'microbatch')}, {_count(v, 'chunk')} per rank; "
    head += ", ".join(f"{op.name} takes {cost[op]:g}" for op in Op if op in ops)
    if transfer:
        head += f", a transfer {transfer:g}"
    yield head
    if config.text or not (config.svg or config.trace):
        yield plot_text(schedule, cost, transfer, unit=cell)

    # time, bubble and memory, beside the closed forms
    theoretical_bubble = bubble_in_theory(name, p, m, v, cost, transfer)
    theoretical_live = peak_live_in_theory(name, p, m, v)
    if theoretical_bubble is not None:
        bubble_form = f"{theoretical_bubble:.2%}"
    elif transfer and theoretical_live is not None:
        bubble_form = "none with transfers"
    else:
        bubble_form = "none known"
    live_form = "none known" if theoretical_live is None else _listed(theoretical_live)
    share_of_rank = f", each 1/{v} of a rank's" if v > 1 else ""
    time = max(simulate(schedule, cost, transfer).end.values())
    forward = forward_of_rank(schedule, cost)
    yield f"time         {time:g} ({time / forward:g} forwards of a rank's layers)"
    yield f"bubble       {bubble(schedule, cost, transfer):.2%} of the compute (closed form: {bubble_form})"
    yield (
        f"activations  {_listed(peak_live(schedule))} alive at most, by rank (closed form: {live_form}){share_of_rank}"
    )
    if config.trace is not None:
        file = Path(config.trace)
        if config.is_comparison:
            file = file.with_stem(f"{file.stem}-{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(chrome_trace(schedule, cost, transfer)) + "\n")
        yield f"wrote        {file}"


def picture_of(config: PlotConfig, drawn: Sequence[Drawn]) -> str:
    """Return the SVG of the schedules, under one another on one axis of time."""
    p = config.pipeline_model_parallel_size
    timelines = [
        Timeline(f"{name}: p = {p}, m = {config.microbatches}, v = {v}", schedule, cost)
        for name, schedule, v, cost in drawn
    ]
    return plot_svg_of_several(timelines, config.transfer_cost)


def picture_of_page() -> str:
    """Return the SVG that docs/schedules.md shows."""
    config = PlotConfig(schedule=["1f1b", "interleaved", "zb-h1", "zb-v"])
    return picture_of(config, [make(config, name) for name in config.schedule])


def schedules_page() -> str:
    """Return the text of docs/schedules.md."""
    p, m = 4, 8
    lines = [_PAGE_HEAD]
    for name, function in SCHEDULES.items():
        v = _chunks_drawn(name)[0]
        description = inspect.getdoc(function).split("\n\n")[0]
        sizes = f"p = {p}, m = {m}, v = {v}" if v > 1 else f"p = {p}, m = {m}"
        lines += [f"## {name}\n", f"{description}\n", f"{sizes}:\n"]
        lines += ["```", plot_text(function(p, m, v)), "```\n"]
    lines += [_TABLE_HEAD, *_table_rows(), _REFUSED]
    lowered = add_reduce(add_transfers(SCHEDULES["zb-h1"](2, 2, 1)))
    rows = [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(lowered)]
    lines += [_LOWERED_HEAD, "```", *rows, "```"]
    return "\n".join(lines) + "\n"


def _table_rows() -> Iterator[str]:
    """Yield the rows of the page's table of bubbles and memory."""
    for p, m in ((2, 4), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64)):
        for name, function in SCHEDULES.items():
            for v in _chunks_drawn(name):
                schedule = function(p, m, v)
                live = peak_live(schedule)
                cells = [
                    p,
                    m,
                    name,
                    v,
                    f"{bubble(schedule):.2%}",
                    f"{bubble_in_theory(name, p, m, v):.2%}",
                    _listed(live),
                    _listed(peak_live_in_theory(name, p, m, v)),
                    f"{max(live) / v:g}",
                ]
                yield f"| {' | '.join(map(str, cells))} |"


def _listed(numbers: list[int]) -> str:
    """Return numbers as `4 3 2 1`, or as `64 x 8` if all eight are equal."""
    all_equal = len(numbers) > 1 and len(set(numbers)) == 1
    return f"{numbers[0]} x {len(numbers)}" if all_equal else " ".join(map(str, numbers))


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, as `1 rank` or `2 microbatches`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"


PICTURE = "schedules.svg"  # beside the page
_PAGE_HEAD = f"""\
# Pipeline schedules

This page draws every `--pipeline-schedule`, gives its bubble and memory, and says what it can be combined with. This command
draws a schedule at sizes of your own:

    python tools/plot_schedule.py --schedule zb-v --pipeline-model-parallel-size 4 --microbatches 8

Several schedules are drawn under one another on one axis of time, in which all ranks have the same layers: a chunk of v takes
1/v of a rank's time. Drawn alone, and below, a schedule has a unit of its own, in which the forward of one chunk takes 1; the
line `time` gives it in forwards of a rank's layers too, and these compare. The ending of `--svg` says whether an SVG or a PNG
is written.

    python tools/plot_schedule.py --schedule 1f1b interleaved zb-h1 zb-v --svg schedules.svg

![the time lines of four schedules with 4 ranks and 8 microbatches]({PICTURE})

`python tools/plot_schedule.py --write-docs docs/schedules.md` writes this page and its picture; a test compares them with the
code.

How to read the plots: each row is a pipeline rank, and time runs to the right.

- p is the number of pipeline ranks, m the number of microbatches in a step, v the number of chunks (stages) per rank.
- F is a forward and takes {DEFAULT_COST[Op.F]} unit of time. B is a backward and takes {DEFAULT_COST[Op.B]}.
  Some schedules split it into two halves of {DEFAULT_COST[Op.I]} unit each: I, the gradient of the input,
  and W, the gradient of the weights. Transfers take no time.
- The number is the microbatch. `--` continues the action to its left. A blank is idle time.
- A capital letter is a rank's first chunk, a lower-case letter a later chunk.
"""
_TABLE_HEAD = """\
## Bubble and memory

- **bubble** is idle time divided by compute time.
- **alive** is the largest number of microbatches of one stage that are between their forward and the end of their backward,
  for each rank in turn.
- **worst rank** is the largest of these numbers, counted in activations of a whole rank.

Bubble and alive are measured on the simulated time line, and the column to the right of each has its closed form.
The bubble's is:

- gpipe, 1f1b and interleaved: (p - 1) / (v m)
- zb-h1 and zb-interleaved, if m >= p and W is the cheapest: (p - 1)(tF + tI - tW) / (v m (tF + tI + tW))
- zb-v, if m >= p and F, I and W take equally long: (p - 1) / (6 m)

| p | m | schedule | v | bubble | closed form | alive | closed form | worst rank |
|---|---|---|---|---|---|---|---|---|"""
_REFUSED = """\

In the plots F, I and W take equal time, which is not true of any model. `--input-cost` and `--weight-cost` of
tools/plot_schedule.py set other costs. With I = 1.3 and W = 0.8 the bubble for p = 4, m = 8 is 7.9% with zb-v and
18.1% with zb-h1.

## What works together

Every schedule works with tensor and sequence parallelism, ZeRO 0 to 3, tied or untied embeddings, recompute, offloading, and
fewer microbatches than pipeline ranks, except for the rows of the table below.
A checkpoint of one schedule resumes under any other.

`--microbatch-group-size-per-virtual-pipeline-stage` G lets G microbatches instead of p pass a chunk before the next
chunk's turn. m must be a multiple of G or leave a last group of at least p. Of interleaved, rank r has
2 (p - r - 1) + (v - 1) G + 1 microbatches of a chunk in flight.

`--pipeline-model-parallel-layout` gives the parts of each stage, in the order of the model, in Megatron's letters:
`'Et*3|(tt|)*6L'` is an embedding with three layers, then six stages of two, then the output layer with the loss. A
stage may be without layers. With v times as many stages as ranks each rank has v chunks. It goes with every schedule
and axis, and a checkpoint goes on in another layout.

With zb-v, rank 0 holds both the embedding and the output layer. `--account-for-embedding-in-pipeline-split` and
`--account-for-loss-in-pipeline-split` give it fewer layers.

These combinations are refused, with a message that says what to change:

| schedule | refused with | reason | use instead |
|---|---|---|---|
| interleaved, zb-interleaved | m not a multiple of p | chunks take groups of p microbatches | other groups, zb-v, zb-h1, 1f1b |
| gpipe, 1f1b, zb-h1 | several chunks per rank | a rank has one chunk in these schedules | interleaved, zb-interleaved, zb-v |
| zb-v | a number of chunks per rank other than two | the V has two per rank, without a flag | interleaved, zb-interleaved |
| zb-v, or several chunks | one pipeline rank | there is no bubble | no schedule |
| zb-v | a number of layers that 2p does not divide | all stages have equally many | the flags of uneven stages |
| zb-v | both `--decoder-first-...` and `--decoder-last-pipeline-num-layers` | both are about rank 0 | one of them |
| zb-v, tied embeddings | `--zero-stage 3` | two chunks use one parameter | stage 2, or `--untie-embeddings-and-output-weights` |
| zb-v, tied embeddings | `--fixed-order-grad-reduce` | two chunks use one parameter | `--untie-embeddings-and-output-weights` |
"""
_LOWERED_HEAD = """\
## What a rank runs

`lower.add_transfers` and `lower.add_reduce` turn a schedule into the lists of actions that the executor runs, one list per rank:

- SEND starts to send, and SENT waits until the send has ended.
- POST starts to receive, and RECV waits until the data have arrived.
- REDUCE starts the reduction of a stage's gradients over the data-parallel ranks.

In each direction, all ranks start their transfers in one global order. The lists of zb-h1 with p = 2, m = 2:
"""


def run(config: PlotConfig) -> None:
    """Print and write what the flags ask for."""
    if config.write_docs:
        page = Path(config.write_docs)
        page.write_text(schedules_page())
        page.with_name(PICTURE).write_text(picture_of_page())
        print(f"wrote {page} and {page.with_name(PICTURE)}")
        return
    with schedules_named(list(SCHEDULES) if config.all else config.schedule) as names:
        drawn = []
        left_out = []
        for name in names:
            try:
                drawn.append(make(config, name))
            except ConfigError as error:
                if not config.all:
                    raise
                left_out.append("; ".join(error.problems))
        if not drawn:
            raise ConfigError(left_out)
        cell = cell_of(drawn)
        reports = ["\n".join(report(config, each, cell)) for each in drawn]
    print("\n\n".join([*reports, *(f"left out     {reason}" for reason in left_out)]))
    if config.svg is not None:
        write_drawing("--svg", config.svg, picture_of(config, drawn))
        print(f"wrote        {config.svg}")


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [PlotConfig], run, arguments)


def _with_own_flags(message: str) -> str:
    """Replace training's flags in a schedule's error message by those of this tool."""
    for training_text, own_text in _OWN_FLAG.items():
        message = message.replace(training_text, own_text)
    return message


if __name__ == "__main__":
    sys.exit(main())
