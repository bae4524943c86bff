"""Buffers of modules as state: which are saved, how each is sharded, and how its data-parallel copies agree.

A module's persistent buffers (running statistics, moving averages, router biases) are part of a checkpoint, as they are
part of `state_dict`. They are found by (module, name) whenever they are needed, not by tensor: an assignment such as
`self.average = 0.9 * self.average + ...` replaces the tensor.

A module says in `buffer_placements` what the default is wrong for:

    self.register_buffer("expert_bias", torch.zeros(experts))
    self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64))
    self.buffer_placements = {"tokens_per_expert": BufferPlacement("sum")}
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.sharding.placement import Placement

Sync = Literal["copy", "sum", "mean", "max", "own"]


@dataclass(frozen=True)
class BufferPlacement:
    """How the data-parallel copies of a buffer agree at the end of each step, and how the buffer is sharded.

    sync: "copy"  the first data-parallel rank's value, as torch's DistributedDataParallel does
          "sum"   the changes of all ranks since the step began are added
          "mean"  the mean of all ranks' values; floating-point buffers only
          "max"   the largest value of all ranks
          "own"   each rank keeps its own value, and saves it by its rank; with a placement, each data-parallel rank
    placement: None: the whole buffer is on every rank. With `shard` it reshards as a parameter does. Values of axes in
    `partial_grad` are combined as those of data-parallel ranks are; such an axis is in `replicated_over` too, since
    afterwards its ranks have equal values. Over tp, a "copy" is the first rank's if tp is in `replicated_over`.
    restarts: the buffer has its initial value between steps, so that a checkpoint without it lacks nothing.
    """

    sync: Sync = "copy"
    placement: Placement | None = None
    restarts: bool = False

    def __post_init__(self) -> None:
        if self.sync not in get_args(Sync):
            raise ConfigError(f"BufferPlacement(sync={self.sync!r}); sync is one of {', '.join(get_args(Sync))}")
        placement = self.placement
        if placement is not None and (unequal := {*placement.partial_grad} - {*placement.replicated_over}):
            raise ConfigError(
                f"BufferPlacement: {', '.join(sorted(unequal))} is in partial_grad and not in replicated_over, but ranks whose "
                "values are combined have equal ones afterwards; name it in both"
            )


@dataclass(frozen=True, eq=False)
class PersistentBuffer:
    """The place of a persistent buffer in a model."""

    name: str  # in `state_dict`
    module: nn.Module
    key: str  # in the module
    declared: BufferPlacement

    @property
    def tensor(self) -> Tensor:
        """The present value, of any shape."""
        value = self.module._buffers[self.key]
        assert value is not None
        return value

    @property
    def has_elements(self) -> bool:
        """Whether there is something to save: a buffer may be None until a forward makes it."""
        value = self.module._buffers[self.key]
        return value is not None and value.numel() > 0

    @property
    def placement(self) -> Placement:
        return self.declared.placement or Placement(tuple(self.tensor.shape), init=None, replicated_over=("tp",))

    def assign(self, value: Tensor) -> None:
        """Replace the tensor, whose value may have any shape."""
        self.module._buffers[self.key] = value


def persistent_buffers(module: nn.Module) -> Iterator[PersistentBuffer]:
    """Yield the places of the module's persistent buffers; a tensor with two names once, by its first.

    Raises ConfigError if `buffer_placements` of a module names no persistent buffer of it.
    """
    seen: set[int] = set()
    for prefix, submodule in module.named_modules():
        placements: Mapping[str, BufferPlacement] = getattr(submodule, "buffer_placements", {})
        persistent = submodule._buffers.keys() - submodule._non_persistent_buffers_set
        if unknown := sorted(placements.keys() - persistent):
            raise ConfigError(
                f"buffer_placements of {prefix or 'the model'} ({type(submodule).__name__}) names {', '.join(unknown)}; "
                f"its persistent buffers are {', '.join(sorted(persistent)) or 'none'}"
            )
        for key, value in submodule._buffers.items():
            if key not in persistent or (value is not None and id(value) in seen):
                continue
            if value is not None:
                seen.add(id(value))
            name = f"{prefix}.{key}" if prefix else key
            yield PersistentBuffer(name, submodule, key, placements.get(key, BufferPlacement()))


Values = list[tuple[nn.Module, str, Tensor]]


def buffer_values(buffers: Iterable[PersistentBuffer]) -> Values:
    """Return copies of the buffers' values, for `set_buffer_values`."""
    return [(buffer.module, buffer.key, buffer.tensor.detach().clone()) for buffer in buffers if buffer.has_elements]


def set_buffer_values(values: Values) -> None:
    """Give the buffers the values of `buffer_values`, which stay as they are."""
    for module, key, value in values:
        module._buffers[key] = value.clone()


@contextmanager
def with_buffer_values(buffers: Sequence[PersistentBuffer], values: Values) -> Iterator[None]:
    """Inside, the buffers have copies of `values`; afterwards they are the tensors that they were."""
    now = [(buffer, buffer.module._buffers[buffer.key]) for buffer in buffers]
    set_buffer_values(values)
    try:
        yield
    finally:
        for buffer, value in now:
            buffer.module._buffers[buffer.key] = value
