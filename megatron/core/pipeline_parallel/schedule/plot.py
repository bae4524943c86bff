"""A schedule's timeline is plotted as text for a terminal, as SVG for a page, and as a Chrome trace to zoom into."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule, dependencies, stages_in
from megatron.core.pipeline_parallel.schedule.simulate import DEFAULT_COST, bubble, locate, simulate

_FILL = {Op.F: "#86aed6", Op.B: "#7fbf7b", Op.I: "#b39bc8", Op.W: "#edc948"}
_LABEL = {Op.F: "forward", Op.B: "backward", Op.I: "backward, input", Op.W: "backward, weights"}
_IDLE = "#eee"
# SVG units, shown as pixels. Letter widths are upper bounds for a sans-serif face of size 12, for titles 15.
_ROW = 26
_MARGIN = 60
_SQUARE = 36
_MAX_WIDTH = 6000
_DIGIT = 7
_LETTER = 7
_TITLE_LETTER = 9


def plot_text(
    schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0, *, unit: float | None = None
) -> str:
    """Return the timeline as text, one row per rank, one cell per unit of time: the duration of the cheapest action.

    F0 is the forward of microbatch 0, B0 its backward; lower case for all chunks of a rank but the first; -- continues
    the action to its left; blank is idle. `actions.py` begins with an example. unit: the time of a cell, to compare
    several plots; none of its actions may take less.
    """
    start, end = simulate(schedule, cost, transfer)
    stages = stages_in(schedule)
    if unit is None:
        unit = min(cost[action.op] for action in end)
    width = 1 + max(len(str(action.microbatch)) for action in end)
    num_cells = _round_half_up(max(end.values()) / unit)
    rows = []
    for rank, actions in enumerate(schedule):
        cells = [" " * width] * num_cells
        for action in actions:
            begin = _round_half_up(start[action] / unit)
            stop = _round_half_up(end[action] / unit)
            name = action.op.name.lower() if stages.chunk_of(action.stage) else action.op.name
            cells[begin:stop] = [f"{name}{action.microbatch}".ljust(width, "-")] + ["-" * width] * (stop - begin - 1)
        rows.append(f"rank {rank:<{len(str(len(schedule) - 1))}} |{''.join(cells)}|")
    return "\n".join(rows)


class Timeline(NamedTuple):
    """A schedule to plot: its title, its actions, and the time of each operation on one of its stages."""

    title: str
    schedule: Schedule
    cost: Mapping[Op, float] = DEFAULT_COST


def plot_svg(
    schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0, title: str = "pipeline schedule"
) -> str:
    """Return the timeline as a standalone SVG: one row per rank, one box per action with its microbatch."""
    return plot_svg_of_several([Timeline(title, schedule, cost)], transfer)


def plot_svg_of_several(timelines: Sequence[Timeline], transfer: float = 0.0) -> str:
    """Return the timelines as a standalone SVG, under one another on one axis of time.

    A rank has a row, an action a box with its microbatch. Chunks after a rank's first are lighter. A tooltip shows an
    action and its times.
    """
    # the scale: the axis is as long as the longest timeline, and the number of a microbatch fits into every box
    simulated = [simulate(timeline.schedule, timeline.cost, transfer) for timeline in timelines]
    total = max(max(end.values()) for _, end in simulated)
    actions = [
        (action, timeline.cost[action.op]) for timeline in timelines for row in timeline.schedule for action in row
    ]
    digits = max(len(str(action.microbatch)) for action, _ in actions)
    scale = min(_DIGIT * (digits + 1) / min(time for _, time in actions), _MAX_WIDTH / total)

    # the legend
    num_chunks = max(stages_in(timeline.schedule).chunks for timeline in timelines)
    ops = sorted({action.op for action, _ in actions}, key=list(Op).index)
    notes = [f"{op.name}: {_LABEL[op]}" for op in ops] + ["idle"]
    fills = [*(_FILL[op] for op in ops), _IDLE]
    if num_chunks > 1:
        notes.append("lighter: later chunks of a rank")
    titles = [
        f"{timeline.title}, bubble {bubble(timeline.schedule, timeline.cost, transfer):.1%}" for timeline in timelines
    ]
    width = max(total * scale, _width_of(notes), *(_TITLE_LETTER * len(title) for title in titles)) + 2 * _MARGIN

    # the rows of each timeline, then the axis and the legend
    lines: list[str] = []
    top = 0.0
    for timeline, title, (start, end) in zip(timelines, titles, simulated):
        stages = stages_in(timeline.schedule)
        lines.append(f'<text x="{_MARGIN}" y="{top + 24:g}" font-size="15">{escape(title)}</text>')
        for rank, row in enumerate(timeline.schedule):
            y = top + 40 + _ROW * rank
            lines.append(f'<text x="{_MARGIN - 8}" y="{y + 16:g}" text-anchor="end">rank {rank}</text>')
            row_width = max(end.values()) * scale
            lines.append(f'<rect x="{_MARGIN}" y="{y:g}" width="{row_width:.2f}" height="{_ROW - 4}" fill="{_IDLE}"/>')
            for action in row:
                opacity = 1 - 0.6 * stages.chunk_of(action.stage) / stages.chunks
                x = _MARGIN + start[action] * scale
                box_width = (end[action] - start[action]) * scale
                lines += _box(action, x, y, box_width, opacity, f"{start[action]:g} to {end[action]:g}")
        top += 40 + _ROW * len(timeline.schedule)
    forwards = {f"{forward_of_rank(timeline.schedule, timeline.cost):g}" for timeline in timelines}
    unit = f"time; the forward of one rank's layers takes {forwards.pop()}" if len(forwards) == 1 else "time"
    lines += _time_axis(total, scale, top + 4, unit)
    lines += _legend(fills, notes, top + 54)
    height = top + 84
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def forward_of_rank(schedule: Schedule, cost: Mapping[Op, float]) -> float:
    """Return the time of the forward of all chunks of a rank, by which schedules of other numbers of chunks compare."""
    return cost[Op.F] * stages_in(schedule).chunks


def _time_axis(total: float, scale: float, y: float, label: str) -> Iterator[str]:
    """Yield the axis below the rows: about ten marks at round times."""
    tenth = 10.0 ** math.floor(math.log10(total)) / 10
    step = next(tenth * factor for factor in (1, 2, 5, 10) if total <= 12 * tenth * factor)
    yield f'<line x1="{_MARGIN}" y1="{y:g}" x2="{_MARGIN + total * scale:.2f}" y2="{y:g}" stroke="black"/>'
    for mark in range(math.floor(total / step + 1e-9) + 1):
        x = _MARGIN + mark * step * scale
        yield f'<line x1="{x:.2f}" y1="{y:g}" x2="{x:.2f}" y2="{y + 5:g}" stroke="black"/>'
        yield f'<text x="{x:.2f}" y="{y + 18:g}" text-anchor="middle">{mark * step:g}</text>'
    yield f'<text x="{_MARGIN + total * scale / 2:.2f}" y="{y + 36:g}" text-anchor="middle">{label}</text>'


def _box(action: Action, x: float, y: float, width: float, opacity: float, times: str) -> Iterator[str]:
    yield f"<g><title>{action}: {times}</title>"
    yield (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_ROW - 4}" fill="{_FILL[action.op]}" '
        f'fill-opacity="{opacity:.2f}" stroke="white"/>'
    )
    if width >= _DIGIT * len(str(action.microbatch)):  # the number fits
        yield f'<text x="{x + width / 2:.2f}" y="{y + 15:g}" text-anchor="middle" font-size="11">{action.microbatch}</text>'
    yield "</g>"


def _width_of(notes: Sequence[str]) -> float:
    """Return the width of the legend: each note has a square before it and a gap behind."""
    return sum(_SQUARE + _LETTER * len(note) for note in notes)


def _legend(fills: Sequence[str], notes: Sequence[str], y: float) -> Iterator[str]:
    """Yield a note after a square of each fill; further notes have no square."""
    for index, note in enumerate(notes):
        x = _MARGIN + _width_of(notes[:index])
        if index < len(fills):
            yield f'<rect x="{x:g}" y="{y:g}" width="14" height="14" fill="{fills[index]}"/>'
        yield f'<text x="{x + 20:g}" y="{y + 12:g}">{note}</text>'


def chrome_trace(
    schedule: Schedule,
    cost: Mapping[Op, float] = DEFAULT_COST,
    transfer: float = 0.0,
    *,
    microseconds_per_unit: float = 1000.0,
) -> dict:
    """Return the timeline in the Trace Event Format: `json.dump` it to a file for chrome://tracing or ui.perfetto.dev.

    One thread per rank; an arrow leads from each result to the action on another rank that needs it.
    """
    start, end = simulate(schedule, cost, transfer)
    position = locate(schedule)  # action -> (rank, index)
    num_stages = len(stages_in(schedule).ranks)
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(len(schedule))
    ]

    def event(phase: str, action: Action, time: float, **more) -> None:
        events.append({"ph": phase, "pid": 0, "tid": position[action][0], "ts": time * microseconds_per_unit, **more})

    for action in start:
        duration = (end[action] - start[action]) * microseconds_per_unit
        details = {"stage": action.stage, "microbatch": action.microbatch}
        event("X", action, start[action], name=str(action), cat=_LABEL[action.op], dur=duration, args=details)
        for need in dependencies(action, num_stages):
            if position[need][0] != position[action][0]:
                arrow = {"name": "transfer", "cat": "transfer", "id": f"{need}-{action}"}
                event("s", need, end[need], **arrow)
                event("f", action, start[action], bp="e", **arrow)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _round_half_up(x: float) -> int:
    return math.floor(x + 0.5)
