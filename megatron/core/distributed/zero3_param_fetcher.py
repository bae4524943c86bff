"""ZeRO stage 3: a unit's parameters are gathered before each use, forward and backward, and released after it.

A unit is a layer of a list of layers, an `nn.MultiheadAttention`, which uses its child's parameters itself, or, outside
of these, a module that holds parameters, itself or in an `nn.ParameterList` or another list without a forward. Hooks
report each use (`grad_count.py`):

    forward     pre-hook: gather this unit and wait for it, prefetch the next
                hook: release this unit; in a recomputation nothing is released here
    backward    hook on the gradient of a tensor that the unit returned, which fires before the backward of the unit: gather
                this unit and wait for it, prefetch the previous
                last gradient of a bucket written or deferred: release that bucket (`ParamFetcher.bucket_done`)

A unit's parameters are in one bucket or several; gathering and releasing go by bucket. To release is to free the whole
values: the rank's shard stays. Units are ordered by their first use, which prefetches nothing, since the next unit is not
known yet. With --overlap-param-gather (`ahead`) to prefetch is to start its all-gather; without, only to start
reading this rank's shard of it, if that is offloaded. A new forward or backward of a microbatch begins with everything
released.

An output that the unit was given and returns unchanged, as a layer does that returns (hidden states, context), is no
output of it: the context's gradient is complete only when the backward of the first layer that reads it is over.

In a backward, a unit's parameters stay resident until their gradients are complete or deferred (zero-bubble schedules);
where `grad_count.py` does not know yet how many gradients come, until the next forward or backward begins.
Frozen parameters get no gradient, but the gradient of the unit's input needs their values. They stay until the backward
of an earlier unit begins: a backward takes the modules in the reverse order of the forward, so the unit's own is over
then. Those of the first unit stay until the next forward or backward begins, or the step ends.
Recomputation runs a forward inside a backward: its pre-hook gathers what is not resident, and that backward releases.

Three things follow for modules. A unit must return a tensor of its own: its backward begins with the gradient of that
tensor. A layer with a backward of its own must compute the gradient of its input before it reports the last gradient of
its parameters: that report releases them (`bucket_done`). A parent must use its children's parameters through the
children, or pass them to a module (otherwise `released_params_and_grads_guards.py` raises an error).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_reduce_and_gather import Bucket, ParamBucket
from megatron.core.distributed.grad_count import GradCounter
from megatron.core.distributed.param_grad_state import place_in_bucket
from megatron.core.distributed.zero_stage_strategies import ParamGather
from megatron.core.ops.aux_loss_collector import aux_losses_in

_USES_ITS_CHILDREN = nn.MultiheadAttention  # passes their parameters to a function
# Lists: the module above uses the parameters in them.
_HAVE_NO_FORWARD = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict


def units_of(module: nn.Module) -> dict[str, str]:
    """Return the unit of every parameter: parameter name -> unit name."""
    unit_of_module = units_of_modules(module)
    units = {}
    for owner, submodule in module.named_modules():
        for name, _ in submodule.named_parameters(recurse=False):
            full_name = f"{owner}.{name}" if owner else name
            units[full_name] = unit_of_module[owner]
    return units


def units_of_modules(module: nn.Module) -> dict[str, str]:
    """Return the unit of every module: module name -> unit name.

    layers                   ""            a list, without a forward, belongs to the module above
    layers.0                 layers.0      a layer of a list is a unit ..
    layers.0.mlp.fc1         layers.0      .. with all below it
    embedding                embedding     any other module is its own
    """
    units = {"": ""}
    complete = set[str]()  # modules in a unit with all below them
    for name, parent in module.named_modules():  # a parent comes before its children
        is_list = isinstance(parent, nn.ModuleList | nn.ModuleDict)
        for child_name, child in parent.named_children():
            path = f"{name}.{child_name}" if name else child_name
            joins_parent = name in complete or isinstance(child, _HAVE_NO_FORWARD)
            units[path] = units[name] if joins_parent else path
            is_layer = is_list and not joins_parent
            if name in complete or is_layer or isinstance(child, _USES_ITS_CHILDREN):
                complete.add(path)
    return units


def _uses_its_parameters_itself(module: nn.Module) -> bool:
    """Return whether no module below it has parameters. It may have modules that hold buffers, such as scales."""
    return not any(True for child in module.children() for _ in child.parameters())


class _Use:
    """One forward of a unit. Times count the begins and ends of forwards."""

    def __init__(self, begin: int):
        self.begin = begin
        self.end = begin


class ParamFetcher(ParamGather):
    """Gathers and releases by hooks on the units of a chunk.

    frozen: the buckets of frozen parameters. ahead: the next unit's all-gather is in flight while one computes.

    What releases a bucket in a backward:

        of one unit                     `bucket_done`: its last gradient
        of several (a shared parameter) `bucket_done` too, after the last of these units' backwards; and between two of them,
                                        once no unit whose backward has begun needs it
        frozen                          no gradient tells; once no unit whose backward has begun needs it

    `_in_use` lists the buckets of the last two kinds by use; a use is one forward of one unit.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        frozen: Sequence[ParamBucket],
        counter: GradCounter,
        *,
        ahead: bool,
    ):
        super().__init__(module, (*buckets, *frozen), overlap=False)
        self._frozen = set(frozen)
        self._ahead = ahead
        self._counter = counter
        self._in_backward = False
        self._needs: dict[str, list[ParamBucket]] = {}  # the buckets of each unit's last forward
        self._versions: dict[str, dict[int, int]] = {}  # versions of the inputs of each unit's last use, by id
        self._last_use: dict[str, _Use] = {}  # of each unit
        self._time = 0  # of uses
        # shared and frozen buckets, by the use whose backward has begun
        self._in_use: dict[_Use, list[ParamBucket]] = {}
        self._order: list[str] = []  # units in the order of their first use; a second use prefetches, too
        self._has_backward: set[str] = set()  # units through which a gradient passes

        # the auxiliary losses that units add are outputs of theirs too
        self._aux_losses = aux_losses_in(module)
        self._claimed: set[int] = set()  # those that have a unit: the innermost whose forward adds them

        # the buckets of each unit
        unit_of_module = units_of_modules(module)
        buckets_of: dict[str, list[ParamBucket]] = {unit: [] for unit in units_of(module).values()}
        for name, submodule in module.named_modules():
            unit = unit_of_module[name]
            if _uses_its_parameters_itself(submodule):
                # perhaps without parameters of its own: it may be passed a tied embedding
                buckets_of.setdefault(unit, [])
            for parameter in submodule.parameters(recurse=False):  # two modules may hold one parameter
                place = place_in_bucket(parameter)
                if place is not None:
                    buckets_of[unit].append(place.bucket)
        # Buckets that several units own. A tied embedding that is passed as an input has one owner, so its bucket stays
        # resident from the output layer's backward to the embedding's.
        num_units = Counter(bucket for own in buckets_of.values() for bucket in set(own))
        self._shared = {bucket for bucket, count in num_units.items() if count > 1}

        for unit, own in buckets_of.items():
            submodule = module.get_submodule(unit)
            # with keyword arguments: a layer may be given the context by name
            submodule.register_forward_pre_hook(partial(self._before_forward, unit, own), with_kwargs=True)
            submodule.register_forward_hook(partial(self._after_forward, unit), with_kwargs=True)

    def begin_step(self) -> None:
        """Release parameters that a failed step left resident."""
        self.finish()

    def begin_microbatch(self, *, backward: bool) -> None:
        """Release what the last microbatch left resident, and note the direction."""
        self.finish()
        self._in_backward = backward

    def before_forward(self) -> None:
        """Prepare a forward of the chunk. Here each unit gathers its own parameters."""

    def bucket_done(self, bucket: Bucket) -> None:
        """Release the bucket: all gradients of this backward are written or deferred, so nothing reads the values."""
        bucket.release_params()

    def updated(self) -> None:
        """All-gather over the outer axis, so that each rank's shard is up to date when a forward gathers it."""
        for bucket in self._buckets:
            if bucket.buffer.axes.outer.size > 1:
                bucket.gather_updated()

    def finish(self) -> None:
        """Release all but this rank's shards, also what was prefetched and not used: a gather in flight is waited for."""
        self._in_use.clear()
        for bucket in self._buckets:
            bucket.release_params()

    def _before_forward(
        self, unit: str, own: list[ParamBucket], _: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any]
    ) -> None:
        """Forward pre-hook: gather the unit's own buckets, and those of parameters that it is passed as inputs.

        Such an input, a tied embedding, is an argument itself, not one inside a tuple or list.
        """
        passed = []
        for x in (*inputs, *named_inputs.values()):
            place = place_in_bucket(x)
            if place is not None:
                passed.append(place.bucket)
        if not any(aux_losses.collected for aux_losses in self._aux_losses):
            self._claimed.clear()  # a new forward of the chunk, whose layers have added none yet
        self._needs[unit] = list(dict.fromkeys((*own, *passed)))
        if self._needs[unit]:
            self._fetch(unit, +1)
        for bucket in self._needs[unit]:
            if bucket not in self._frozen:
                self._counter.enter(bucket)  # which ignores a recomputation
        self._time += 1
        self._last_use[unit] = _Use(self._time)
        # `_after_forward` tells by the version an input that was changed in place from one that is returned as it came.
        # Numbers, not tensors: a recomputation may stop in the middle of a forward, and would keep them alive.
        self._versions[unit] = {id(x): x._version for x in _tensors((inputs, named_inputs)) if x.requires_grad}

    def _after_forward(
        self, unit: str, submodule: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any], output: Any
    ) -> None:
        """Forward hook: set hooks on the unit's output that gather its buckets for its backward, and release them.

        Where nothing needs a gradient, as in validation, no hook is set. Raises RuntimeError if the output has tensors
        that need a gradient, and all of these came in as inputs unchanged, though the unit has parameters.
        """
        needs = self._needs[unit]
        shared = [bucket for bucket in needs if bucket in self._shared]
        without_end = [bucket for bucket in needs if bucket in self._shared or bucket in self._frozen]
        self._time += 1
        use = self._last_use[unit]
        use.end = self._time

        def begin_backward(_: Tensor) -> None:  # of several outputs the first to get its gradient gathers
            self._end_uses_after(use, needs)
            self._in_use[use] = without_end
            self._fetch(unit, -1)

        if needs:
            outputs = [x for x in _tensors(output) if x.requires_grad]
            # an input that was changed in place is the unit's own output
            versions = self._versions[unit]
            own_outputs = [x for x in outputs if versions.get(id(x)) != x._version]
            # so is an auxiliary loss that its forward added: its gradient may come first
            own_outputs += [x for x in self._new_aux_values() if x.requires_grad]
            # Without gradients, as in the forward of a reentrant checkpoint, an output of its own requires none.
            is_skipped = outputs and not own_outputs and torch.is_grad_enabled()
            if is_skipped and not self._frozen.issuperset(needs):
                raise RuntimeError(
                    f"{unit or 'the model'} ({type(submodule).__name__}) has parameters, but returned nothing but "
                    "tensors that it was given: ZeRO stage 3 gathers a module's parameters for its backward when the "
                    "gradient of its output arrives, so the output must be a tensor of its own; do not call a layer that "
                    "is skipped, return x.view_as(x) in place of x, or use --zero-stage 2"
                )
            for x in own_outputs:
                # A unit's backward begins with the gradient of its output; before it, nothing needs the parameters. They
                # may be resident already: prefetched, in use by another unit, or kept since a recomputation, which keeps
                # those of all units that it computes again.
                x.register_hook(begin_backward)
            if own_outputs:
                self._has_backward.add(unit)

        sources = [x for x in _tensors((inputs, named_inputs)) if x.grad_fn is not None]
        if shared and len(sources) == 1 and _uses_its_parameters_itself(submodule):
            # Gradients of a shared parameter are complete only with its last unit's. Released at the end of this unit's
            # backward already, when the gradient of its input is there, it takes no memory while other units compute.
            # Only for a module whose children have no parameters, with one input that autograd computed: of several
            # inputs nobody knows whose gradient is the last. Elsewhere the bucket waits for `bucket_done`. An input that is the
            # output of another unit releases it by that unit's hook, which was set earlier: then this one does nothing.
            sources[0].register_hook(lambda _: self._end_use(use, shared))

        # In a recomputation, the backward that follows needs them. In a forward, a shared bucket is released as well: the
        # unit that needs it next gathers it again.
        if not self._in_backward:
            for bucket in needs:
                bucket.release_params()

    def _new_aux_values(self) -> list[Tensor]:
        """Return the auxiliary losses [] that have been added since a unit last claimed some."""
        added = [loss.value for aux_losses in self._aux_losses for loss in aux_losses.collected]
        new = [value for value in added if id(value) not in self._claimed]
        self._claimed.update(map(id, new))
        return new

    def _end_use(self, use: _Use, shared: Sequence[ParamBucket]) -> None:
        """Release the shared buckets of a use whose backward has just ended."""
        if use in self._in_use:
            self._in_use[use] = [bucket for bucket in self._in_use[use] if bucket not in shared]
            self._release_unused(shared)

    def _end_uses_after(self, use: _Use, needs: Sequence[ParamBucket]) -> None:
        """Release what uses needed whose forward began after that of `use` ended, except `needs`.

        The backward of `use` begins, so theirs are over: autograd runs the nodes that are ready in the reverse order of
        their creation.
        """
        for later in [other for other in self._in_use if other.begin > use.end]:
            done = self._in_use.pop(later)
            self._release_unused([bucket for bucket in done if bucket not in needs])

    def _release_unused(self, buckets: Sequence[ParamBucket]) -> None:
        """Release those of the buckets that are not in `_in_use`.

        A use whose backward has not begun yet does not keep a bucket: it gathers it again. One whose end no hook reports
        keeps it, until a use before it begins its backward, or until `bucket_done`.
        """
        for bucket in buckets:
            if not any(bucket in others for others in self._in_use.values()):
                bucket.release_params()

    def _fetch(self, unit: str, direction: int) -> None:
        """Gather the unit's buckets and wait for them; then begin to bring the next unit's, without waiting.

        direction: +1 in a forward, -1 in a backward, where the next unit is the one before.

        ahead        all-gather of the next unit in flight     the one after it is read from its tier
        otherwise                                              the next unit is read from its tier

        Its tier is where the shard is offloaded; from the device's memory nothing has to be read.
        """
        for bucket in self._needs[unit]:
            bucket.start_gather()  # unless it is resident, or in flight since it was prefetched
        for bucket in self._needs[unit]:
            bucket.finish_gather()
        if unit not in self._order:
            self._order.append(unit)  # now the last one: it has no next unit until that is used

        # Recomputation runs forward inside a backward. After its last unit the backward needs the units before it, so
        # there is no prefetch; also not inside a recomputed group of layers, where the next unit would be right.
        if self._in_backward and direction > 0:
            return
        following = self._units_after(unit, direction)
        if self._ahead and following:
            for bucket in self._needs[following.pop(0)]:
                bucket.start_gather()  # waited for in that unit's own `_fetch`
        if following:
            for bucket in self._needs[following[0]]:
                bucket.read_ahead()

    def _units_after(self, unit: str, direction: int) -> list[str]:
        """Return the next two units, or fewer. In a backward, direction -1, those without a backward are left out."""
        place = self._order.index(unit)
        if direction > 0:
            return self._order[place + 1 : place + 3]
        found = (other for other in reversed(self._order[:place]) if other in self._has_backward)
        return list(islice(found, 2))


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and mappings."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _tensors(part)
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
