"""The update of flat buffers under torch's `param_groups`, for loops and schedules that write rates into an optimizer.

    name, groups = groups_of_torch(torch.optim.AdamW(model.parameters()))       or groups of one's own
    numbers = numbers_of(model, groups)                                         before the model is wrapped
    flat = FlatOptimizer(wrapped.buffers, config_of_groups(name, groups, clip), mesh, group_of=by_number(numbers))
    optimizer = GroupedOptimizer(flat, groups)
    optimizer.update(divisor)

Masters, moments and shards are `FlatOptimizer`'s; rates, decays and Adam's betas are read from the groups at every update.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.offload.stored_tensor import copy_stored
from megatron.core.optimizer.adam_and_sgd import UpdateStep
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupRule, ParamGroup

Groups = list[dict[str, Any]]
TORCHS = {  # what a group may say beside its parameters, and torch's values
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
}
# Arguments with the one value that is supported, and those that choose an implementation of the same numbers.
_FIXED = {"amsgrad": False, "maximize": False, "differentiable": False, "nesterov": False, "dampening": 0}
_FIXED |= {"bias_correction": True}
_IN_COMMON = ("eps", "momentum")  # of all groups, in every update
_FREE = {"foreach", "fused", "capturable", "torch_adam", "adam_w_mode", "decoupled_weight_decay", "set_grad_none"}


@dataclass(frozen=True)
class NumberedGroup(ParamGroup):
    """The parameters of one of torch's groups."""

    number: int = 0


def by_number(numbers: Mapping[str, int]) -> GroupRule:
    """The rule of parameters whose groups have these numbers."""
    return lambda name, placement: NumberedGroup(number=numbers[name])


def check_arguments(kind: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ConfigError for arguments of the optimizer that are unknown, or have an unsupported value."""
    problems = [
        f"optimizer {kind}: {key} = {value!r} is not supported"
        + (f"; leave it out ({_FIXED[key]!r})" if key in _FIXED else f"; known are {', '.join(known)}")
        for key, value in given.items()
        if key not in known and key not in _FREE and _FIXED.get(key, ...) != value
    ]
    for key in known.keys() & given.keys():
        values = list(given[key]) if key == "betas" and isinstance(given[key], list | tuple) else [given[key]]
        if len(values) != 1 + (key == "betas") or not all(map(_is_rate, values)):
            wanted = "two numbers from 0 up" if key == "betas" else "a number from 0 up"
            problems.append(f"optimizer {kind}: {key} is {given[key]!r}; it must be {wanted}")
    if problems:
        raise ConfigError(problems)


def _is_rate(value: Any) -> bool:
    """Whether it is a number, or one of torch's, that is finite and not negative."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < math.inf


def shown_to_torch(groups: Groups) -> torch.optim.Optimizer:
    """These very groups under torch's type, for schedules that ask for it. It updates nothing."""
    shown = torch.optim.Optimizer([torch.zeros(1)], {name: groups[0][name] for name in groups[0] if name != "params"})
    shown.param_groups, shown._opt_called = groups, True
    return shown


def groups_of_torch(optimizer: torch.optim.Optimizer) -> tuple[str, Groups]:
    """(name in OPTIMIZERS, its own groups) of one of torch's optimizers, which keeps no state of its own."""
    kind = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) or optimizer.state:
        raise ConfigError(
            f"optimizer {kind}: it must be torch's Adam, AdamW or SGD, and must not have updated anything yet"
        )
    name = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam-l2"}.get(type(optimizer), "adam")
    for group in optimizer.param_groups:
        # Schedules of torch's keep notes of their own in the groups.
        given = {key: value for key, value in group.items() if key in optimizer.defaults}
        check_arguments(kind, given, TORCHS[name.removesuffix("-l2")])
    optimizer._opt_called = True  # torch's schedules ask whether it has updated; here the flat optimizer does
    return name, optimizer.param_groups


def config_of_groups(name: str, groups: Groups, clip_grad: float) -> OptimizerConfig:
    """What all groups have in common. Raises ConfigError if eps or momentum differ between them."""
    alike = {key: groups[0][key] for key in _IN_COMMON if key in groups[0]}
    for key, value in alike.items():
        if any(group[key] != value for group in groups):
            raise ConfigError(
                f"optimizer: groups have different {key}; rates, decays and betas may differ, {key} may not"
            )
    if name == "sgd":
        return OptimizerConfig(optimizer=name, clip_grad=clip_grad, sgd_momentum=alike["momentum"])
    beta1, beta2 = groups[0]["betas"]
    return OptimizerConfig(
        optimizer=name, clip_grad=clip_grad, adam_beta1=beta1, adam_beta2=beta2, adam_eps=alike["eps"]
    )


def numbers_of(model: nn.Module, groups: Groups) -> dict[str, int]:
    """Parameter name -> number of its group. A parameter of no group is frozen: nothing would update it."""
    number_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    named = dict(model.named_parameters())
    if len(number_of) < len({(id(p), number) for number, group in enumerate(groups) for p in group["params"]}):
        raise ConfigError("optimizer: a parameter is in more than one group; leave it in one")
    if strangers := number_of.keys() - {id(p) for p in named.values()}:
        raise ConfigError(f"{len(strangers)} of the optimizer's parameters are not of the model; pass the model's own")
    for p in named.values():
        if id(p) not in number_of:
            p.requires_grad_(False)
    return {name: number_of[id(p)] for name, p in named.items() if id(p) in number_of}


class GroupedOptimizer:
    """`FlatOptimizer` with `param_groups` as torch has them. Its parameters' groups must be `by_number`."""

    def __init__(self, flat: FlatOptimizer, groups: Groups):
        self.flat, self.param_groups = flat, groups
        self._fixed = [{key: group[key] for key in _IN_COMMON if key in group} for group in groups]
        self.overflow = False  # of the last step
        self.norm: float | None = None  # of the whole gradient before clipping, None before the first step

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.flat.scaler is None else self.flat.scaler.scale

    def update(self, divisor: float) -> bool:
        """Update once with the gradient / `divisor`. Returns False if the scaled gradient overflowed: nothing changed.

        Every rank must call. Raises FloatingPointError for a norm that is not finite, unless the loss scale can fall.
        """
        scaler = self.flat.scaler
        self.norm, factor = self.flat.clip_factor(divisor * self.loss_scale)
        self.overflow = not math.isfinite(self.norm)
        if self.overflow and (scaler is None or not scaler.can_fall):
            raise FloatingPointError(
                f"the gradient's norm is {self.norm}; nothing was updated. Lower the rate, check the data"
                + ("" if scaler is None else f", or lower the smallest loss scale (the scale is {scaler.scale:g})")
            )
        if scaler is not None:
            scaler.update(self.overflow)
        if not self.overflow:
            self.flat.update(partial(self._step_of, factor))
        return not self.overflow

    def _step_of(self, factor: float, group: NumberedGroup) -> UpdateStep:
        values = self.param_groups[group.number]
        if changed := [key for key, value in self._fixed[group.number].items() if values[key] != value]:
            raise ConfigError(
                f"optimizer: {changed[0]} was changed to {values[changed[0]]}; only rates, decays and betas may be"
            )
        lr, decay = float(values["lr"]), float(values["weight_decay"])
        return UpdateStep(lr, decay, self.flat.step_count, factor, values.get("betas"))

    def changed_fixed(self, groups: Groups) -> tuple[str, Any, Any] | None:
        """(key, value in `groups`, own value) of the first number that may not change and differs."""
        for fixed, other in zip(self._fixed, groups):
            for key, value in fixed.items():
                if key in other and other[key] != value:
                    return key, other[key], value
        return None

    def rates(self) -> list[float]:
        """The learning rate of each group in the next update."""
        return [float(group["lr"]) for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for the same layout: moments and masters, and the groups' numbers."""
        groups = [{name: value for name, value in one.items() if name != "params"} for one in self.param_groups]
        scale = {} if self.flat.scaler is None else self.flat.scaler.state()
        return {"state": self.flat.tensors(), "step": self.flat.step_count, "param_groups": groups, "scaler": scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of the same layout."""
        for kind, tensors in self.flat.tensors().items():
            for name, tensor in tensors.items():
                copy_stored(tensor, state_dict["state"][kind][name])
        self.flat.step_count = state_dict["step"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        if self.flat.scaler is not None:
            self.flat.scaler.load_state(state_dict["scaler"])
