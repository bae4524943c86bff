"""The update of flat buffers under torch's `param_groups`, for loops and schedules that write rates into an optimizer.

    name, groups = groups_of_torch(torch.optim.AdamW(model.parameters()))       or groups of one's own
    numbers = group_numbers_freezing_others(model, groups)                                      before the model is wrapped
    flat = FlatOptimizer(wrapped.buffers, common_config_of_groups(name, groups, clip), mesh, group_of=by_number(numbers))
    optimizer = FlatOptimizerWithParamGroups(flat, groups)
    optimizer.update(divisor)

Masters, moments and shards are `FlatOptimizer`'s; each update reads rates, decays and Adam's betas from the groups.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.offload.tensor_in_memory_or_file import copy_stored
from megatron.core.optimizer.adam_and_sgd import UpdateStep
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupRule, ParamGroup

Groups = list[dict[str, Any]]
TORCHS = {  # the options of a group beside its parameters, and torch's defaults
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
}
# Arguments of which one value is supported.
_FIXED = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "nesterov": False,
    "dampening": 0,
    "bias_correction": True,
}
# Arguments that choose an implementation of the same numbers.
_FREE = {"foreach", "fused", "capturable", "torch_adam", "adam_w_mode", "decoupled_weight_decay", "set_grad_none"}
_IN_COMMON = ("eps", "momentum")  # the same in all groups and in every update


@dataclass(frozen=True)
class NumberedGroup(ParamGroup):
    """The parameters of one of torch's groups."""

    number: int = 0


def by_number(numbers: Mapping[str, int]) -> GroupRule:
    """Return the rule of parameters whose groups have these numbers: parameter name -> number of its group."""
    return lambda name, placement: NumberedGroup(number=numbers[name])


def check_arguments(kind: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of the optimizer that are unknown, or have an unsupported value."""
    problems = []
    for key, value in given.items():
        if key in known or key in _FREE:
            continue
        if key in _FIXED:
            if value != _FIXED[key]:
                problems.append(f"optimizer {kind}: {key} = {value!r} is not supported; leave it out ({_FIXED[key]!r})")
        else:
            problems.append(f"optimizer {kind}: {key} = {value!r} is not supported; known are {', '.join(known)}")

    for key in known.keys() & given.keys():
        value = given[key]
        values = list(value) if key == "betas" and isinstance(value, list | tuple) else [value]
        count = 2 if key == "betas" else 1
        if len(values) != count or not all(_is_rate(number) for number in values):
            wanted = "two numbers from 0 up" if key == "betas" else "a number from 0 up"
            problems.append(f"optimizer {kind}: {key} is {value!r}; it must be {wanted}")
    if problems:
        raise ConfigError(problems)


def _is_rate(value: Any) -> bool:
    """Whether it is a number, or a tensor of one number, that is finite and not negative."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def as_torch_optimizer(groups: Groups) -> torch.optim.Optimizer:
    """Return a torch optimizer with these very groups, for schedules that ask for torch's type. It updates nothing."""
    defaults = {name: value for name, value in groups[0].items() if name != "params"}
    optimizer = torch.optim.Optimizer([torch.zeros(1)], defaults)
    optimizer.param_groups = groups
    optimizer._opt_called = True  # torch's schedules ask whether it has updated
    return optimizer


def groups_of_torch(optimizer: torch.optim.Optimizer) -> tuple[str, Groups]:
    """Return (name in OPTIMIZERS, its own groups) of one of torch's optimizers, which must have no state yet."""
    kind = type(optimizer).__name__
    names = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam-l2", torch.optim.AdamW: "adam"}
    if type(optimizer) not in names or optimizer.state:
        raise ConfigError(
            f"optimizer {kind}: it must be torch's Adam, AdamW or SGD, and must not have made an update yet"
        )
    name = names[type(optimizer)]
    for group in optimizer.param_groups:
        # Schedules of torch's keep notes of their own in the groups.
        given = {key: value for key, value in group.items() if key in optimizer.defaults}
        check_arguments(kind, given, TORCHS[name.removesuffix("-l2")])
    optimizer._opt_called = True  # torch's schedules ask whether it has updated; here the flat optimizer does
    return name, optimizer.param_groups


def common_config_of_groups(name: str, groups: Groups, clip_grad: float) -> OptimizerConfig:
    """Return the settings that all groups have in common. Raises ConfigError if eps or momentum differ between them."""
    common = {key: groups[0][key] for key in _IN_COMMON if key in groups[0]}
    for key, value in common.items():
        if any(group[key] != value for group in groups):
            raise ConfigError(
                f"optimizer: groups have different {key}; only learning rates, weight decays and betas may differ, "
                f"not {key}"
            )
    if name == "sgd":
        return OptimizerConfig(optimizer=name, clip_grad=clip_grad, sgd_momentum=common["momentum"])
    beta1, beta2 = groups[0]["betas"]
    return OptimizerConfig(
        optimizer=name, clip_grad=clip_grad, adam_beta1=beta1, adam_beta2=beta2, adam_eps=common["eps"]
    )


def group_numbers_freezing_others(model: nn.Module, groups: Groups) -> dict[str, int]:
    """Return parameter name -> number of its group. A parameter of no group is frozen: nothing would update it."""
    number_of: dict[int, int] = {}  # by the parameter's id
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if number_of.setdefault(id(parameter), number) != number:
                raise ConfigError("optimizer: a parameter is in more than one group; keep it in one")

    named = dict(model.named_parameters())
    strangers = number_of.keys() - {id(parameter) for parameter in named.values()}
    if strangers:
        raise ConfigError(
            f"{len(strangers)} of the optimizer's parameters do not belong to the model; give only the model's "
            "parameters"
        )

    numbers = {}
    for name, parameter in named.items():
        if id(parameter) in number_of:
            numbers[name] = number_of[id(parameter)]
        else:
            parameter.requires_grad_(False)
    return numbers


class FlatOptimizerWithParamGroups:
    """`FlatOptimizer` with `param_groups` as torch has them. Its parameters' groups must be `by_number`."""

    def __init__(self, flat: FlatOptimizer, groups: Groups):
        self.flat = flat
        self.param_groups = groups
        self._fixed = [{key: group[key] for key in _IN_COMMON if key in group} for group in groups]
        self.overflow = False  # of the last step
        self.norm: float | None = None  # of the whole gradient before clipping, None before the first step

    @property
    def loss_scale(self) -> float:
        """The factor of the loss, and so of the gradients in the buffers."""
        return 1.0 if self.flat.scaler is None else self.flat.scaler.scale

    def update(self, divisor: float) -> bool:
        """Update once with the gradient / `divisor`. Returns False if the scaled gradient overflowed: nothing changed.

        Every rank must call. divisor: of the gradients in the buffers, which contain the loss scale
        (`GradientStep.divisor`). Raises FloatingPointError for a norm that is not finite, unless the loss scale can fall.
        """
        scaler = self.flat.scaler
        self.norm, factor = self.flat.clip_factor(divisor)
        self.overflow = not math.isfinite(self.norm)
        if self.overflow and (scaler is None or not scaler.can_fall):
            advice = "Lower the rate, check the data"
            if scaler is not None:
                advice += f", or lower the smallest loss scale (the scale is {scaler.scale:g})"
            raise FloatingPointError(f"the gradient norm is {self.norm}; no parameter was updated. {advice}")
        if scaler is not None:
            scaler.update(self.overflow)
        if not self.overflow:
            self.flat.update(partial(self._step_of, factor))
        return not self.overflow

    def _step_of(self, factor: float, group: NumberedGroup) -> UpdateStep:
        """Return the numbers of one group's update, as its `param_group` now has them."""
        options = self.param_groups[group.number]
        for key, value in self._fixed[group.number].items():
            if options[key] != value:
                raise ConfigError(
                    f"optimizer: {key} was changed to {options[key]}; only learning rates, weight decays and betas "
                    "may be changed"
                )
        return UpdateStep(
            float(options["lr"]), float(options["weight_decay"]), self.flat.step_count, factor, options.get("betas")
        )

    def changed_fixed(self, groups: Groups) -> tuple[str, Any, Any] | None:
        """Return (key, value in `groups`, own value) of the first fixed number that differs; None: none does."""
        for fixed, other in zip(self._fixed, groups):
            for key, value in fixed.items():
                if key in other and other[key] != value:
                    return key, other[key], value
        return None

    def rates(self) -> list[float]:
        """Return the learning rate of each group in the next update."""
        return [float(group["lr"]) for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, for the same layout: moments and masters, and the groups' numbers.

        "state" is as of `FlatOptimizer.tensors`.
        """
        groups = []
        for group in self.param_groups:
            groups.append({name: value for name, value in group.items() if name != "params"})
        return {
            "state": self.flat.tensors(),
            "step": self.flat.step_count,
            "param_groups": groups,
            "scaler": {} if self.flat.scaler is None else self.flat.scaler.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the same layout: its tensors have the shapes of `state_dict`'s."""
        for kind, tensors in self.flat.tensors().items():
            for name, tensor in tensors.items():
                copy_stored(tensor, state_dict["state"][kind][name])
        self.flat.step_count = state_dict["step"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        if self.flat.scaler is not None:
            self.flat.scaler.load_state(state_dict["scaler"])
