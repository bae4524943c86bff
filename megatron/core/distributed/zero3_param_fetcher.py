"""ZeRO stage 3: a unit's parameters are gathered before each use, forward and backward, and released after it.

A unit is a layer of a list of layers, an `nn.MultiheadAttention`, which uses its child's parameters itself, or, outside of
these, a module that holds parameters, itself or in an `nn.ParameterList` or another list without a forward. Hooks report
each use (`grad_count.py`). In a backward, a unit's parameters stay resident until their gradients are complete or deferred
(zero-bubble schedules). Recomputation during a backward gathers parameters; that backward releases them.

Two things follow for modules. A layer with a backward of its own must compute the gradient of its input before the
last gradient of its parameters. A parent must use its children's parameters through the children, or pass them to a
module (otherwise `released_tensors.py` raises an error).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.grad_count import Uses
from megatron.core.distributed.zero import ParamGather
from megatron.core.ops.main_grad_interface import slot_of

_USES_ITS_CHILDREN = nn.MultiheadAttention  # passes their parameters to a function
_HAVE_NO_FORWARD = (
    nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
)  # the module above uses what they hold


def units_of(module: nn.Module) -> dict[str, str]:
    """The unit of every parameter: parameter name -> unit name."""
    units = _units(module)
    return {
        f"{owner}.{name}" if owner else name: units[owner]
        for owner, holder in module.named_modules()
        for name, _ in holder.named_parameters(recurse=False)
    }


def _units(module: nn.Module) -> dict[str, str]:
    """The unit of every module: module name -> name of its outermost ancestor that is a unit with all below it, or its
    own; of a list, that of the module above."""
    units, complete = {"": ""}, set[str]()  # complete: modules in a unit with all below it
    for name, parent in module.named_modules():  # a parent comes before its children
        is_list = isinstance(parent, nn.ModuleList | nn.ModuleDict)
        for child, held in parent.named_children():
            path = f"{name}.{child}" if name else child
            joins = name in complete or isinstance(held, _HAVE_NO_FORWARD)
            units[path] = units[name] if joins else path
            if name in complete or (is_list and not joins) or isinstance(held, _USES_ITS_CHILDREN):
                complete.add(path)
    return units


class ParamFetcher(ParamGather):
    """Gathers and releases by hooks on the units of a chunk. `ahead`: the next unit's all-gather is in flight while one
    computes."""

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], uses: Uses, *, ahead: bool):
        super().__init__(module, buckets, overlap=False)
        self._ahead, self._uses = ahead, uses
        self._in_backward = False
        self._needs: dict[str, list[Bucket]] = {}  # the buckets of each unit's last use
        self._using: dict[object, list[Bucket]] = {}  # shared buckets, by the use whose backward has begun
        self._order: list[str] = []  # units in the order of the first forward
        units = _units(module)
        held: dict[str, list[Bucket]] = {unit: [] for unit in units_of(module).values()}
        for owner, used in module.named_modules():
            unit = units[owner]
            if not any(used.children()):
                held.setdefault(unit, [])  # it may be passed a tied table
            for parameter in used.parameters(recurse=False):  # two modules may hold one parameter
                if (slot := slot_of(parameter)) is not None:
                    held[unit].append(slot.bucket)
        holders = Counter(bucket for own in held.values() for bucket in set(own))
        self._shared = {bucket for bucket, units in holders.items() if units > 1}
        for unit, own in held.items():
            used = module.get_submodule(unit)
            used.register_forward_pre_hook(partial(self._before_forward, unit, own))
            used.register_forward_hook(partial(self._after_forward, unit))

    def begin_step(self) -> None:
        """Release parameters that a failed step left resident."""
        self.finish()

    def begin_microbatch(self, *, backward: bool) -> None:
        """Called before the forward or backward of a microbatch."""
        self.finish()
        self._in_backward = backward

    def before_forward(self) -> None:
        """Each unit gathers its own parameters."""

    def passed(self, bucket: Bucket) -> None:
        """Release: the backward no longer needs the values."""
        bucket.release_params()

    def updated(self) -> None:
        """All-gather over the outer axis, so that each rank's shard is up to date when a forward gathers it."""
        for bucket in self._buckets:
            if bucket.buffer.axes.outer.size > 1:
                bucket.gather_updated()

    def finish(self) -> None:
        """Release all but this rank's shards."""
        self._using.clear()
        for bucket in self._buckets:
            bucket.release_params()

    def _before_forward(self, unit: str, held: list[Bucket], _: nn.Module, inputs: tuple[Any, ...]) -> None:
        lent = [slot.bucket for x in inputs if (slot := slot_of(x)) is not None]  # a tied table of another unit
        self._needs[unit] = list(dict.fromkeys((*held, *lent)))
        if self._needs[unit]:
            self._fetch(unit, +1)
        for bucket in self._needs[unit] if not self._in_backward else ():
            self._uses.enter(bucket)

    def _after_forward(self, unit: str, used: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        use, shared = object(), [bucket for bucket in self._needs[unit] if bucket in self._shared]

        def begins(_: Tensor) -> None:
            self._using[use] = shared
            self._fetch(unit, -1)

        for x in _tensors(output) if self._needs[unit] else ():
            if x.requires_grad:
                # The gradient of its output is the last moment before a unit's backward needs parameters.
                x.register_hook(begins)
        sources = [x for x in _tensors(inputs) if x.grad_fn is not None]
        if shared and len(sources) == 1 and not any(used.children()):
            # Gradients of a shared parameter are complete with its last unit's, and until then other units compute.
            sources[0].register_hook(lambda _: self._release_unused(self._using.pop(use, ())))
        if not self._in_backward:
            for bucket in self._needs[unit]:
                bucket.release_params()

    def _release_unused(self, shared: Sequence[Bucket]) -> None:
        for bucket in shared:
            if not any(bucket in others for others in self._using.values()):
                bucket.release_params()

    def _fetch(self, unit: str, direction: int) -> None:
        for bucket in self._needs[unit]:
            bucket.start_gather()
        for bucket in self._needs[unit]:
            bucket.finish_gather()
        if unit not in self._order:
            self._order.append(unit)
        after = self._order.index(unit) + direction
        # Recomputation runs forward inside a backward: the next unit to be needed lies the other way, so none is prefetched.
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
    elif isinstance(output, tuple | list | Mapping):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)
