"""Draw a pipeline schedule and print its bubble and its memory, by simulation: needs neither torch nor a device.

    python tools/plot_schedule.py --schedule zb-h1 --pipeline-model-parallel-size 4 --microbatches 8
    python tools/plot_schedule.py --all --microbatches 16 --transfer-cost 0.1 --svg plots/schedule.svg
    python tools/plot_schedule.py --schedule interleaved --chunks 3 --input-cost 1.2 --weight-cost 0.8 --trace out.json
    python tools/plot_schedule.py --schedule examples/minimal_fork/schedule.py:rounds --microbatches 6

Costs may be in any unit of time, such as measured milliseconds. --write-docs docs/schedules.md regenerates that page.
"""

import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, FlagConfig, option
from megatron.core.base.user_error_or_bug import is_user_error
from megatron.core.pipeline_parallel.schedule.actions import Op, Schedule
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule.plot import chrome_trace, plot_svg, plot_text
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

    schedule: str = option(
        "1f1b",
        f"one of {', '.join(SCHEDULES)}, or FILE.py:FUNCTION, a function (p, m, v) -> schedule of your own",
        flags=("--schedule", "--pipeline-schedule"),
    )
    all: bool = option(False, "plot every schedule that supports the sizes")
    pipeline_model_parallel_size: int = option(4, "pipeline ranks")
    microbatches: int = option(8, "microbatches per iteration")
    chunks: int | None = option(
        None, "model chunks per rank; default: 2 for interleaved, zb-interleaved and zb-v, else 1"
    )
    forward_cost: float = option(1.0, "time of a forward of one stage")
    backward_cost: float | None = option(
        None, "time of a backward; default: --input-cost + --weight-cost, or 2 forwards"
    )
    input_cost: float | None = option(None, "time of the input gradient; default: half a backward")
    weight_cost: float | None = option(None, "time of the weight gradient; default: the rest of a backward")
    transfer_cost: float = option(0.0, "time of a transfer to the next rank")
    svg: str | None = option(
        None, "SVG file to write; with --all one per schedule, with its name appended", metavar="FILE"
    )
    trace: str | None = option(
        None,
        "Chrome trace file to write (for chrome://tracing, ui.perfetto.dev); with --all one per schedule",
        metavar="FILE",
    )
    text: bool = option(False, "print the plot even with --svg or --trace")
    write_docs: str | None = option(
        None, "write the documentation page on schedules to this file, and nothing else", metavar="FILE"
    )

    def problems(self) -> Iterator[str]:
        if self.schedule not in SCHEDULES and ".py:" not in self.schedule:
            yield f"--schedule ({self.schedule}) must be one of {', '.join(SCHEDULES)}, or FILE.py:FUNCTION"
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

    def chunks_for(self, name: str) -> int:
        """Return the number of chunks with which to draw a schedule."""
        if self.chunks is None or (self.all and name not in _CHUNKS_DRAWN):
            return _chunks_drawn(name)[0]
        return self.chunks


def _chunks_drawn(name: str) -> tuple[int, ...]:
    """Return the numbers of chunks with which the page draws a schedule."""
    return _CHUNKS_DRAWN.get(name, (default_chunks(name),))


@contextmanager
def schedule_named(name: str) -> Iterator[str]:
    """Yield the name of --schedule in SCHEDULES. FILE.py:FUNCTION is registered there within the block."""
    if ".py:" not in name:
        yield name
        return
    function = name.rpartition(":")[2]
    SCHEDULES[function] = schedule_in_file(name)
    try:
        yield function
    finally:
        del SCHEDULES[function]


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


def report(config: PlotConfig, name: str) -> Iterator[str]:
    """Write the files of one schedule, and yield the lines to print. Raises ConfigError if the sizes do not fit it."""
    # make the schedule
    p = config.pipeline_model_parallel_size
    m = config.microbatches
    v = config.chunks_for(name)
    try:
        schedule = make_schedule(name, p, m, v)
    except ValueError as error:
        if not is_user_error(error):
            raise
        raise ConfigError(_with_own_flags(str(error)).splitlines()) from None

    # the sizes and the costs of the operations that occur
    cost = config.cost
    transfer = config.transfer_cost
    ops = {action.op for actions in schedule for action in actions}
    head = f"{name}: {_count(p, 'rank')}, {_count(m, 'microbatch')}, {_count(v, 'chunk')} per rank; "
    head += ", ".join(f"{op.name} takes {cost[op]:g}" for op in Op if op in ops)
    if transfer:
        head += f", a transfer {transfer:g}"
    yield head
    if config.text or not (config.svg or config.trace):
        yield plot_text(schedule, cost, transfer)

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
    yield f"time         {max(simulate(schedule, cost, transfer).end.values()):g}"
    yield f"bubble       {bubble(schedule, cost, transfer):.2%} of the compute (closed form: {bubble_form})"
    yield (
        f"activations  {_listed(peak_live(schedule))} alive at most, by rank (closed form: {live_form}){share_of_rank}"
    )

    # files
    if config.svg is not None:
        title = f"{name}: p = {p}, m = {m}, v = {v}"
        yield _write_file(config, config.svg, name, plot_svg(schedule, cost, transfer, title))
    if config.trace is not None:
        yield _write_file(config, config.trace, name, json.dumps(chrome_trace(schedule, cost, transfer)) + "\n")


def _write_file(config: PlotConfig, path: str, name: str, text: str) -> str:
    """Write a file of one schedule, with --all under a name that contains the schedule's; return the line to print."""
    file = Path(path)
    if config.all:
        file = file.with_stem(f"{file.stem}-{name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return f"wrote        {file}"


def schedules_page() -> str:
    """Return the text of docs/schedules.md."""
    p, m = 4, 8
    lines = [_PAGE_HEAD]
    for name, make in SCHEDULES.items():
        v = _chunks_drawn(name)[0]
        description = inspect.getdoc(make).split("\n\n")[0]
        sizes = f"p = {p}, m = {m}, v = {v}" if v > 1 else f"p = {p}, m = {m}"
        lines += [f"## {name}\n", f"{description}\n", f"{sizes}:\n"]
        lines += ["```", plot_text(make(p, m, v)), "```\n"]
    lines += [_TABLE_HEAD, *_table_rows(), _REFUSED]
    lowered = add_reduce(add_transfers(SCHEDULES["zb-h1"](2, 2, 1)))
    rows = [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(lowered)]
    lines += [_LOWERED_HEAD, "```", *rows, "```"]
    return "\n".join(lines) + "\n"


def _table_rows() -> Iterator[str]:
    """Yield the rows of the page's table of bubbles and memory."""
    for p, m in ((2, 4), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64)):
        for name, make in SCHEDULES.items():
            for v in _chunks_drawn(name):
                schedule = make(p, m, v)
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


_PAGE_HEAD = f"""\
# Pipeline schedules

This page draws every `--pipeline-schedule`, gives its bubble and memory, and says what it can be combined with. This command
draws a schedule at sizes of your own:

    python tools/plot_schedule.py --schedule zb-v --pipeline-model-parallel-size 4 --microbatches 8

`python tools/plot_schedule.py --write-docs docs/schedules.md` writes this page; a test compares it with the code.

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

With zb-v, rank 0 holds both the embedding and the output layer. `--account-for-embedding-in-pipeline-split` and
`--account-for-loss-in-pipeline-split` give it fewer layers.

These combinations are refused, with a message that says what to change:

| schedule | refused with | reason | use instead |
|---|---|---|---|
| interleaved, zb-interleaved | m not a multiple of p | microbatches pass through the chunks in groups of p | zb-v, zb-h1, 1f1b |
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
        Path(config.write_docs).write_text(schedules_page())
        print(f"wrote {config.write_docs}")
    elif config.all:
        _report_all(config)
    else:
        with schedule_named(config.schedule) as name:
            print("\n".join(report(config, name)))


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [PlotConfig], run, arguments)


def _with_own_flags(message: str) -> str:
    """Replace training's flags in a schedule's error message by those of this tool."""
    for training_text, own_text in _OWN_FLAG.items():
        message = message.replace(training_text, own_text)
    return message


def _report_all(config: PlotConfig) -> None:
    """Report every schedule that fits the sizes. Raises ConfigError with all reasons if none does."""
    reports = []
    reasons = []
    for name in SCHEDULES:
        try:
            reports.append("\n".join(report(config, name)))
        except ConfigError as error:
            reasons.append("; ".join(error.problems))
    if not reports:
        raise ConfigError(reasons)
    print("\n\n".join([*reports, *(f"left out     {reason}" for reason in reasons)]))


if __name__ == "__main__":
    sys.exit(main())
