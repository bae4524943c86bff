"""Training schedules by name, and what follows from a name alone: the stage map, and the chunks per rank."""

import inspect
from collections.abc import Callable
from functools import cache

from megatron.core.pipeline_parallel.schedule import (
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    stages_in,
    zb_h1,
    zb_interleaved,
)
from megatron.core.pipeline_parallel.zero_bubble_v import zb_v
from megatron.core.stage_map import StageMap

# Name -> (p, m, v) -> Schedule, ValueError if the sizes do not fit. Scripts may add entries. The stage map is read from the
# lists for m = 2 p, before the number of microbatches is known, so it must be equal for all m. A schedule for one number of
# chunks per rank only has it as the default of its v.
SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-interleaved": zb_interleaved,
    "zb-v": zb_v,
}


def stage_map(name: str, p: int, v: int = 1) -> StageMap:
    """The stage map of SCHEDULES[name] for p * v stages. ValueError for an unknown name or sizes that do not fit."""
    if name not in SCHEDULES:
        raise ValueError(f"--pipeline-schedule is {name}; it must be one of {', '.join(SCHEDULES)}")
    return _stages_of(SCHEDULES[name], p, v)


@cache
def _stages_of(make: Callable[[int, int, int], Schedule], p: int, v: int) -> StageMap:
    return stages_in(make(p, 2 * p, v))


def default_chunks(name: str | None) -> int:
    """Chunks per rank where none are asked for: the default of v in SCHEDULES[name], else 1, also for an unknown name."""
    if name not in SCHEDULES:
        return 1
    v = inspect.signature(SCHEDULES[name]).parameters.get("v")
    return 1 if v is None or v.default is inspect.Parameter.empty else v.default
