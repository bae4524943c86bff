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
from megatron.core.base.error_reporting import is_user_error
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

# A flag of training named in a schedule's error -> the flag of this tool.
_FLAG_INSTEAD = {
    "--global-batch-size": "--microbatches",
    "lower --num-layers-per-virtual-pipeline-stage to at most num_layers / pipeline size": "raise --chunks",
    " and --num-virtual-stages-per-pipeline-rank": "",
    "--num-layers-per-virtual-pipeline-stage": "--chunks",
}
_DRAWN_WITH = {"interleaved": (2, 4), "zb-interleaved": (2, 4)}  # numbers of chunks, where a schedule takes any
_COST_OF = {Op.F: "forward", Op.B: "backward", Op.I: "input", Op.W: "weight"}


@dataclass(frozen=True)
class PlotConfig(FlagConfig):
    """Schedule to draw."""

    schedule: str = option(
        "1f1b",
        f"one of {', '.join(SCHEDULES)}, or FILE.py:FUNCTION, a function (p, m, v) -> schedule of your own",
        flags=("--schedule", "--pipeline-schedule"),
    )
    all: bool = option(False, "every schedule that fits the sizes")
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
    svg: str | None = option(None, "SVG file; with --all one per schedule, its name appended", metavar="FILE")
    trace: str | None = option(
        None, "Chrome trace file (chrome://tracing, ui.perfetto.dev); with --all one per schedule", metavar="FILE"
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
                yield f"--{_COST_OF[op]}-cost ({value:g}) must be positive; raise it, or change the other backward costs"

    @property
    def cost(self) -> dict[Op, float]:
        whole = self.backward_cost
        of_input, of_weights = self.input_cost, self.weight_cost
        if whole is None:
            halves = of_input is not None and of_weights is not None
            whole = of_input + of_weights if halves else 2 * self.forward_cost
        if of_input is None:
            of_input = whole / 2 if of_weights is None else whole - of_weights
        if of_weights is None:
            of_weights = whole - of_input
        return {Op.F: self.forward_cost, Op.B: whole, Op.I: of_input, Op.W: of_weights}

    def chunks_for(self, name: str) -> int:
        if self.chunks is None or (self.all and name not in _DRAWN_WITH):
            return _DRAWN_WITH.get(name, (default_chunks(name),))[0]
        return self.chunks


@contextmanager
def schedule_named(name: str) -> Iterator[str]:
    """The name of --schedule in SCHEDULES. The function of FILE.py:FUNCTION is in SCHEDULES only within the block."""
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
    """The function FILE.py:FUNCTION. Raises ConfigError if there is none."""
    path, function = name.rsplit(":", 1)
    if not Path(path).is_file():
        raise ConfigError(f"--schedule {name}: there is no file {path}")
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)  # the file may import its neighbours
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
    """The lines to print about one schedule; writes its files. Raises ConfigError if the sizes do not fit it."""
    p, m = config.pipeline_model_parallel_size, config.microbatches
    v = config.chunks_for(name)
    try:
        schedule = make_schedule(name, p, m, v)
    except ValueError as error:
        if not is_user_error(error):
            raise
        raise ConfigError(_in_flags_of_the_tool(str(error)).splitlines()) from None
    cost, transfer = config.cost, config.transfer_cost
    used = {action.op for actions in schedule for action in actions}
    yield (
        f"{name}: {_count(p, 'rank')}, {_count(m, 'microbatch')}, {_count(v, 'chunk')} per rank; "
        + ", ".join(f"{op.name} takes {cost[op]:g}" for op in Op if op in used)
        + (f", a transfer {transfer:g}" if transfer else "")
    )
    if config.text or not (config.svg or config.trace):
        yield plot_text(schedule, cost, transfer)
    expected, live = bubble_in_theory(name, p, m, v, cost, transfer), peak_live_in_theory(name, p, m, v)
    reason = "none with transfers" if transfer and live is not None else "none known"
    in_theory = reason if expected is None else f"{expected:.2%}"
    yield f"time         {max(simulate(schedule, cost, transfer).end.values()):g}"
    yield f"bubble       {bubble(schedule, cost, transfer):.2%} of the compute (closed form: {in_theory})"
    yield (
        f"activations  {_listed(peak_live(schedule))} alive at most, by rank "
        f"(closed form: {'none known' if live is None else _listed(live)})"
        + (f", each 1/{v} of a rank's" if v > 1 else "")
    )
    yield from _write_files(config, name, schedule)


def _write_files(config: PlotConfig, name: str, schedule: Schedule) -> Iterator[str]:
    p, v = config.pipeline_model_parallel_size, config.chunks_for(name)
    title, costs = f"{name}: p = {p}, m = {config.microbatches}, v = {v}", (config.cost, config.transfer_cost)
    texts = {
        config.svg: lambda: plot_svg(schedule, *costs, title),
        config.trace: lambda: json.dumps(chrome_trace(schedule, *costs)) + "\n",
    }
    for path, make_text in texts.items():
        if path is not None:
            file = Path(path)
            file = file.with_stem(f"{file.stem}-{name}") if config.all else file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(make_text())
            yield f"wrote        {file}"


def schedules_page() -> str:
    """The text of docs/schedules.md."""
    p, m = 4, 8
    lines = [_PAGE_HEAD]
    for name, make in SCHEDULES.items():
        v = _DRAWN_WITH.get(name, (default_chunks(name),))[0]
        said = inspect.getdoc(make).split("\n\n")[0]
        lines += [f"## {name}\n", f"{said}\n", f"p = {p}, m = {m}" + (f", v = {v}" if v > 1 else "") + ":\n"]
        lines += ["```", plot_text(make(p, m, v)), "```\n"]
    lines += [_TABLE_HEAD, *_table_rows(), _REFUSED]
    lowered = add_reduce(add_transfers(SCHEDULES["zb-h1"](2, 2, 1)))
    rows = [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(lowered)]
    lines += [_LOWERED_HEAD, "```", *rows, "```"]
    return "\n".join(lines) + "\n"


def _table_rows() -> Iterator[str]:
    for p, m in ((2, 4), (4, 4), (4, 8), (4, 32), (8, 8), (8, 64)):
        for name, make in SCHEDULES.items():
            for v in _DRAWN_WITH.get(name, (default_chunks(name),)):
                schedule = make(p, m, v)
                share, live = bubble(schedule), peak_live(schedule)
                theory, live_in_theory = bubble_in_theory(name, p, m, v), peak_live_in_theory(name, p, m, v)
                cells = [p, m, name, v, f"{share:.2%}", f"{theory:.2%}", _listed(live), _listed(live_in_theory)]
                yield f"| {' | '.join(map(str, [*cells, f'{max(live) / v:g}']))} |"


def _listed(numbers: list[int]) -> str:
    """`4 3 2 1`, or `64 x 8` if all eight are equal."""
    equal = len(numbers) > 1 and len(set(numbers)) == 1
    return f"{numbers[0]} x {len(numbers)}" if equal else " ".join(map(str, numbers))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


_PAGE_HEAD = f"""\
# Pipeline schedules

Made by `python tools/plot_schedule.py --write-docs docs/schedules.md`; a test holds it to the code.

p is the number of pipeline ranks, m of microbatches in a step, v of chunks (stages) per rank. In the plots a forward (F)
takes {DEFAULT_COST[Op.F]} unit of time, a backward (B) {DEFAULT_COST[Op.B]}, its two halves, for the input (I) and for \
the weights (W), {DEFAULT_COST[Op.I]} each, and a
transfer none. The number is the microbatch, -- goes on with what stands to its left, blank is idle, and lower case is
a chunk of a rank after its first.
"""
_TABLE_HEAD = """\
## Bubble and memory

Bubble: idle time over compute time. Alive: microbatches of one stage between their forward and the end of their backward,
at most, by rank; the last column counts in activations of a whole rank. Both are measured on the simulated time line
and stand beside their closed forms: (p - 1) / (v m), for zb-h1 and zb-interleaved (p - 1)(tF + tI - tW) over
v m (tF + tI + tW) if m >= p and W is the cheapest, and for zb-v (p - 1) / (6 m) if m >= p and F, I and W take equally long.

| p | m | schedule | v | bubble | closed form | alive | closed form | worst rank |
|---|---|---|---|---|---|---|---|---|"""
_REFUSED = """\

The plots have F, I and W of equal time, which no model has. `--input-cost` and `--weight-cost` of tools/plot_schedule.py
draw others: with I = 1.3 and W = 0.8 the bubble for p = 4, m = 8 is 7.9% by zb-v and 18.1% by zb-h1.

## What stands together

Every schedule runs with tensor and sequence parallelism, ZeRO 0 to 3, tied or untied tables, recompute, offloading, and fewer
microbatches than pipeline ranks where the table does not say otherwise. A checkpoint of one schedule resumes under any other.
Rank 0 of zb-v holds the embedding and the output layer: `--account-for-embedding-in-pipeline-split` and
`--account-for-loss-in-pipeline-split` give it fewer layers. These pairs are refused, with a line that says what to change:

| schedule | refused with | since | instead |
|---|---|---|---|
| interleaved, zb-interleaved | m not a multiple of p | microbatches pass the chunks in groups of p | zb-v, zb-h1, 1f1b |
| gpipe, 1f1b, zb-h1 | several chunks per rank | they have one | interleaved, zb-interleaved, zb-v |
| zb-v | other than two chunks per rank | a V has two; they need no flag | interleaved, zb-interleaved |
| zb-v, or several chunks | one pipeline rank | there is no bubble | no schedule |
| zb-v | layers that do not divide by 2p | each stage has as many | the flags of uneven stages |
| zb-v | both `--decoder-first-...` and `--decoder-last-pipeline-num-layers` | both mean rank 0 | one of them |
| zb-v, tied table | `--zero-stage 3` | two chunks use one parameter | stage 2, or `--untie-embeddings-and-output-weights` |
| zb-v, tied table | `--fixed-order-grad-reduce` | the same | `--untie-embeddings-and-output-weights` |
"""
_LOWERED_HEAD = """\
## What a rank runs

`lower.add_transfers` and `lower.add_reduce` turn the above into the lists that the executor runs. SEND and POST begin a
transfer, SENT and RECV wait for its end, and in each direction all ranks begin transfers in one global order. REDUCE
starts the reduction of a stage's gradients over the data-parallel ranks. zb-h1 with p = 2, m = 2:
"""


def run(config: PlotConfig) -> None:
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


def _in_flags_of_the_tool(message: str) -> str:
    """A schedule's error message, with the flags of this tool in place of training's."""
    for of_training, here in _FLAG_INSTEAD.items():
        message = message.replace(of_training, here)
    return message


def _report_all(config: PlotConfig) -> None:
    """Report every schedule that fits the sizes. Raises ConfigError with all reasons if none does."""
    reports, reasons = [], []
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
