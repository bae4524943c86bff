"""A schedule's timeline is plotted as text for a terminal, as SVG for a page, and as a Chrome trace to zoom into."""

import math
from collections.abc import Iterator, Mapping
from html import escape

from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule, dependencies, stages_in
from megatron.core.pipeline_parallel.schedule.simulate import DEFAULT_COST, bubble, locate, simulate

_FILL = {Op.F: "#86aed6", Op.B: "#7fbf7b", Op.I: "#76b7b2", Op.W: "#edc948"}
_LABEL = {Op.F: "forward", Op.B: "backward", Op.I: "backward, input", Op.W: "backward, weights"}
# SVG units, shown as pixels. Letter widths are upper bounds for a sans-serif face of size 12, for titles 15.
_ROW = 26
_MARGIN = 60
_SQUARE = 36
_MAX_WIDTH = 6000
_DIGIT = 7
_LETTER = 7
_TITLE_LETTER = 9


def plot_text(schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0) -> str:
    """Return the timeline as text, one row per rank, one cell per unit of time: the duration of the cheapest action.

    F0 is the forward of microbatch 0, B0 its backward; lower case for all chunks of a rank but the first; -- continues
    the action to its left; blank is idle. `actions.py` begins with an example.
    """
    start, end = simulate(schedule, cost, transfer)
    stages = stages_in(schedule)
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


def plot_svg(
    schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0, title: str = "pipeline schedule"
) -> str:
    """Return the timeline as a standalone SVG: one row per rank, one box per action with its microbatch.

    Chunks after a rank's first are lighter. A tooltip shows an action and its times.
    """
    start, end = simulate(schedule, cost, transfer)
    stages = stages_in(schedule)
    total = max(end.values())
    digits = max(len(str(action.microbatch)) for action in end)
    scale = min(_DIGIT * (digits + 1) / min(cost[action.op] for action in end), _MAX_WIDTH / total)
    num_chunks = stages.chunks
    ops = sorted({action.op for action in end}, key=list(Op).index)
    notes = [f"{op.name}: {_LABEL[op]}" for op in ops]
    if num_chunks > 1:
        notes.append("lighter: later chunks of a rank")
    title = f"{title}, bubble {bubble(schedule, cost, transfer):.1%}"
    width = max(total * scale, _width_of(notes), _TITLE_LETTER * len(title)) + 2 * _MARGIN
    height = _ROW * (len(schedule) + 2) + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for rank, actions in enumerate(schedule):
        y = 40 + _ROW * rank
        lines.append(f'<text x="{_MARGIN - 8}" y="{y + 16}" text-anchor="end">rank {rank}</text>')
        lines.append(f'<rect x="{_MARGIN}" y="{y}" width="{total * scale:.2f}" height="{_ROW - 4}" fill="#eee"/>')
        for action in actions:
            chunk = stages.chunk_of(action.stage)
            x = _MARGIN + start[action] * scale
            box_width = (end[action] - start[action]) * scale
            lines += _box(
                action, x, y, box_width, 1 - 0.6 * chunk / num_chunks, f"{start[action]:g} to {end[action]:g}"
            )
    lines += _legend(ops, notes, 40 + _ROW * len(schedule) + 10)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _box(action: Action, x: float, y: float, width: float, opacity: float, times: str) -> Iterator[str]:
    yield f"<g><title>{action}: {times}</title>"
    yield (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 4}" fill="{_FILL[action.op]}" '
        f'fill-opacity="{opacity:.2f}" stroke="white"/>'
    )
    if width >= _DIGIT * len(str(action.microbatch)):  # the number fits
        yield f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle" font-size="11">{action.microbatch}</text>'
    yield "</g>"


def _width_of(notes: list[str]) -> float:
    """Return the width of the legend: each note has a square before it and a gap behind."""
    return sum(_SQUARE + _LETTER * len(note) for note in notes)


def _legend(ops: list[Op], notes: list[str], y: float) -> Iterator[str]:
    """Yield a coloured square and a note for each op; further notes have no square."""
    for index, note in enumerate(notes):
        x = _MARGIN + _width_of(notes[:index])
        if index < len(ops):
            yield f'<rect x="{x:g}" y="{y}" width="14" height="14" fill="{_FILL[ops[index]]}"/>'
        yield f'<text x="{x + 20:g}" y="{y + 12}">{note}</text>'


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
