"""Timers of the parts of a step, under Megatron's names, and their table over all ranks.

    timers = get_timers()
    with timers("batch-generator", log_level=2):        # or .start() ... .stop()
        ...

level 1    forward-backward, all-grads-sync, optimizer-clip-main-grad, optimizer, params-all-gather
level 2    also batch-generator, forward-compute, backward-compute,
           forward-send, forward-recv, backward-send, backward-recv

A timer above --timing-log-level does nothing. An active timer synchronizes the device before it reads the clock.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.rank_grid import Axis

Option = Literal["max", "minmax", "all"]


class Timer:
    """A timer sums the time between `start` and `stop`, which must not nest.

    barrier: `with` waits for all ranks at both ends.
    """

    def __init__(self, name: str, owner: "Timers", barrier: bool):
        self.name = name
        self._owner = owner
        self._barrier = barrier
        self._total = 0.0
        self._began: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start. barrier: wait for all ranks first; every rank must call."""
        assert self._began is None, f"timer {self.name} has been started already"
        if barrier:
            self._owner.wait_for_all()
        self._began = self._owner.now()

    def stop(self, barrier: bool = False) -> None:
        assert self._began is not None, f"timer {self.name} is not started"
        if barrier:
            self._owner.wait_for_all()
        self._total += self._owner.now() - self._began
        self._began = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the seconds so far, up to now if the timer is running. reset: start again from 0."""
        running = self._began is not None
        if running:
            self.stop(barrier)
        total = self._total
        if reset:
            self._total = 0.0
        if running:
            self.start(barrier)
        return total

    def __enter__(self) -> "Timer":
        self.start(self._barrier)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(self._barrier)


class _DisabledTimer(Timer):
    """A timer above --timing-log-level does nothing."""

    def start(self, barrier: bool = False) -> None: ...
    def stop(self, barrier: bool = False) -> None: ...


class Timers:
    """This rank's timers by name.

    barrier: level-1 timers in a `with` wait for all ranks of `world` at both ends; every rank must enter them.
    say(text): called on every rank, prints a table on one.
    """

    def __init__(
        self,
        level: int = 0,
        option: Option = "minmax",
        *,
        device: Device | None = None,
        world: Axis | None = None,
        barrier: bool = False,
        say: Callable[[str], None] = print,
    ):
        self.level = level
        self.option = option
        self._barrier = barrier
        self._device = device
        self._world = world
        self._torch_device = "cpu" if device is None else device.torch_device
        self._say = say
        self._timers: dict[str, Timer] = {}
        self._disabled = _DisabledTimer("off", self, barrier=False)

    def __call__(self, name: str, log_level: int = 1) -> Any:
        """Return the timer `name`; one that does nothing if `log_level` is above --timing-log-level."""
        if log_level > self.level:
            return self._disabled
        if name not in self._timers:
            self._timers[name] = Timer(name, self, self._barrier and log_level == 1)
        return self._timers[name]

    def now(self) -> float:
        if self._device is not None:
            self._device.synchronize()
        return time.perf_counter()

    def wait_for_all(self) -> None:
        if self._world is not None:
            collectives.barrier(self._world, self._torch_device)

    def seconds_of_ranks(
        self, names: Iterable[str] | None = None, *, reset: bool = True
    ) -> dict[str, dict[int, float]]:
        """Return {timer: {rank: seconds}}, with the ranks that have the timer. Every rank must call."""
        requested = self._timers.keys() if names is None else names
        local = {name: self._timers[name].elapsed(reset) for name in requested if name in self._timers}
        if self._world is None:
            return {name: {0: seconds} for name, seconds in local.items()}
        texts = collectives.all_gather_texts(json.dumps(local), self._world, self._torch_device)
        table: dict[str, dict[int, float]] = {}
        for rank, text in enumerate(texts):
            for name, seconds in json.loads(text).items():
                table.setdefault(name, {})[rank] = seconds
        return table

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> dict[str, dict[int, float]]:
        """Print the timer table once, in ms divided by `normalizer`, and reset the timers. Every rank must call.

        Returns {timer: {rank: seconds}}.
        """
        del rank  # the last rank always prints
        if self.level == 0:
            return {}
        if barrier:
            self.wait_for_all()
        table = self.seconds_of_ranks(names, reset=reset)
        if table:
            self._say(time_table(table, self.option, normalizer))
        return table


def time_table(seconds: Mapping[str, Mapping[int, float]], option: Option, normalizer: float = 1.0) -> str:
    """Return Megatron's table: ms per step, over the ranks that have the timer. seconds: {timer: {rank: seconds}}."""
    ms: dict[str, dict[int, float]] = {}
    for name, by_rank in seconds.items():
        ms[name] = {rank: 1000 * s / normalizer for rank, s in by_rank.items()}

    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, by_rank in ms.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in by_rank.items()]
        return "\n".join(lines)

    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for name, by_rank in ms.items():
        low = min(by_rank.values())
        high = max(by_rank.values())
        text = f"{high:.2f}" if option == "max" else f"({low:.2f}, {high:.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {text}")
    return "\n".join(lines)


__getattr__ = names_of_megatron(__name__)
