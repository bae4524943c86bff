"""ZeRO stage 3: a unit's parameters are fetched before it is used, forward and backward, and given up after.

A unit is what is used together: a layer of a list of layers, or, outside of lists, a module that holds parameters
itself. Hooks say when it is used, and how often (`uses.py`). In a backward a unit's parameters stay until their
gradients are complete, or put off (zero-bubble schedules); recomputation inside a backward fetches, and leaves giving
up to that. So a layer with a backward of its own must compute its input's gradient before the last one of its
parameters, as ours do; and a parent must leave its children's parameters to them, or hand them to a module that uses
them (`released.py` says so where it does not).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.uses import Uses
from megatron.core.distributed.zero import ParamGather


def units_of(module: nn.Module) -> dict[str, str]:
    """The unit of every parameter, by the names of both."""
    units = _units(module)
    return {
        f"{owner}.{name}" if owner else name: units[owner]
        for owner, holder in module.named_modules()
        for name, _ in holder.named_parameters(recurse=False)
    }


def _units(module: nn.Module) -> dict[str, str]:
    """The unit of every module, by the names of both: its outermost ancestor that stands in a list, or the module."""
    listed: dict[str, str] = {"": ""}  # the outermost ancestor, or the module itself, that stands in a list
    for name, parent in module.named_modules():  # a parent comes before its children
        is_list = isinstance(parent, nn.ModuleList | nn.ModuleDict)
        for child, _ in parent.named_children():
            path = f"{name}.{child}" if name else child
            listed[path] = listed[name] or (path if is_list else "")
    return {name: above or name for name, above in listed.items()}


class ParamFetcher(ParamGather):
    """Hooks on the units of a model chunk. With `ahead` the next unit's parameters travel while one computes."""

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], uses: Uses, *, ahead: bool):
        super().__init__(module, buckets, overlap=False)
        self._ahead, self._uses = ahead, uses
        self._in_backward = False
        self._needs: dict[str, list[Bucket]] = {}  # of each unit, when last used
        self._order: list[str] = []  # units as the first forward used them
        units = _units(module)
        held: dict[str, list[Bucket]] = {unit: [] for unit in units_of(module).values()}
        for owner, used in module.named_modules():
            unit = units[owner]
            if not any(used.children()):
                held.setdefault(unit, [])  # perhaps with a table of others
            for parameter in used.parameters(recurse=False):  # one that two modules hold is needed by both
                held[unit] += [parameter.slot.bucket] if hasattr(parameter, "slot") else []
        for unit, own in held.items():
            used = module.get_submodule(unit)
            used.register_forward_pre_hook(partial(self._before_forward, unit, own))
            used.register_forward_hook(partial(self._after_forward, unit))

    def begin_step(self) -> None:
        """Give up what an error may have left."""
        self.finish()

    def begin_microbatch(self, *, backward: bool) -> None:
        """Before the forward or the backward of a microbatch."""
        self.finish()
        self._in_backward = backward

    def before_forward(self) -> None:
        """Each unit fetches its own."""

    def passed(self, bucket: Bucket) -> None:
        """A backward no longer needs the values."""
        bucket.release_params()

    def updated(self) -> None:
        """Forwards fetch from ranks that hold a shard up to date, for which those that divide it tell one another."""
        for bucket in self._buckets:
            if bucket.buffer.axes.outer.size > 1:
                bucket.gather_updated()

    def finish(self) -> None:
        """Keep what this rank owns only."""
        for bucket in self._buckets:
            bucket.release_params()

    def _before_forward(self, unit: str, held: list[Bucket], _: nn.Module, inputs: tuple[Any, ...]) -> None:
        lent = [x.slot.bucket for x in inputs if hasattr(x, "slot")]  # a tied table, held by another unit
        self._needs[unit] = list(dict.fromkeys((*held, *lent)))
        if self._needs[unit]:
            self._fetch(unit, +1)
        for bucket in self._needs[unit] if not self._in_backward else ():
            self._uses.enter(bucket)

    def _after_forward(self, unit: str, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for x in _tensors(output) if self._needs[unit] else ():
            if x.requires_grad:
                x.register_hook(lambda _: self._fetch(unit, -1))
        if not self._in_backward:
            for bucket in self._needs[unit]:
                bucket.release_params()

    def _fetch(self, unit: str, direction: int) -> None:
        for bucket in self._needs[unit]:
            bucket.start_gather()
        for bucket in self._needs[unit]:
            bucket.finish_gather()
        if unit not in self._order:
            self._order.append(unit)
        after = self._order.index(unit) + direction
        recomputes = self._in_backward and direction > 0
        if self._ahead and not recomputes and 0 <= after < len(self._order):
            for bucket in self._needs[self._order[after]]:
                bucket.start_gather()
            after += direction
        if not recomputes and 0 <= after < len(self._order):
            for bucket in self._needs[self._order[after]]:
                bucket.read_ahead()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
