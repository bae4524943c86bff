"""The optimizer that `initialize` returns: the update of flat buffers, with torch's `param_groups`.

Rates and decays are read from the groups at every update, so that schedules of DeepSpeed and of torch may write them.
Masters, moments and shards are `FlatOptimizer`'s.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config import ConfigError
from megatron.core.optimizer import FlatOptimizer, ParamGroup
from megatron.core.optimizer.settings import OPTIMIZERS, OptimizerConfig, UpdateRule
from megatron.core.optimizer.update import UpdateStep, adam_update

Groups = list[dict[str, Any]]
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_SGD = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}
# Arguments with the one value that is supported, and those that choose an implementation of the same numbers.
_FIXED = {"amsgrad": False, "maximize": False, "differentiable": False, "nesterov": False, "dampening": 0}
_FIXED |= {"bias_correction": True}
_FREE = {"foreach", "fused", "capturable", "torch_adam", "adam_w_mode", "decoupled_weight_decay", "set_grad_none"}


@dataclass(frozen=True)
class NumberedGroup(ParamGroup):
    """The parameters of one of torch's groups."""

    number: int = 0


def _added_decay(
    parameters: list[Tensor], gradients: list[Tensor], states: Any, step: UpdateStep, **rates: float
) -> None:
    """Adam whose decay is added to the gradient (L2), not to the weights."""
    if step.weight_decay:
        torch._foreach_add_(gradients, parameters, alpha=step.weight_decay)
    adam_update(parameters, gradients, states, step._replace(weight_decay=0.0, factor=1.0), **rates)


def _adam_l2(config: OptimizerConfig) -> Any:
    return partial(_added_decay, beta1=config.adam_beta1, beta2=config.adam_beta2, eps=config.adam_eps)


def make_groups(asked: Mapping[str, Any], parameters: Iterable[Any]) -> tuple[str, Groups]:
    """(name in OPTIMIZERS, groups) of a file's `optimizer` section. parameters: tensors, or groups of them as torch has."""
    kind, params = str(asked["type"]), dict(asked["params"])
    if kind.lower() not in ("adam", "adamw", "sgd"):
        raise ConfigError(
            f"ds_config: optimizer {kind!r} is not supported; use Adam, AdamW or SGD, or pass one of torch's to initialize()"
        )
    name, defaults = ("sgd", _SGD) if kind.lower() == "sgd" else ("adam", dict(_ADAM))
    if kind.lower() == "adam" and params.get("adam_w_mode", True) is False:
        name = "adam-l2"
    elif kind.lower() == "adamw" and params.get("torch_adam"):
        defaults |= {"weight_decay": 1e-2}  # torch's own
    check_arguments(kind, params, defaults)
    listed = list(parameters)
    groups = [dict(group) for group in listed] if listed and isinstance(listed[0], Mapping) else [{"params": listed}]
    for group in groups:
        held = group["params"]
        group["params"] = [held] if isinstance(held, Tensor) else list(held)
        check_arguments(kind, {key: value for key, value in group.items() if key not in ("params", "name")}, defaults)
    chosen = {key: params.get(key, value) for key, value in defaults.items()}
    return name, [chosen | group for group in groups]


def check_arguments(kind: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ConfigError for arguments of the optimizer that are unknown, or have an unsupported value."""
    problems = [
        f"optimizer {kind}: {key} = {value!r} is not supported"
        + (f"; leave it out ({_FIXED[key]!r})" if key in _FIXED else f"; known are {', '.join(known)}")
        for key, value in given.items()
        if key not in known and key not in _FREE and _FIXED.get(key, ...) != value
    ]
    if problems:
        raise ConfigError(problems)


def groups_of_torch(optimizer: torch.optim.Optimizer) -> tuple[str, Groups]:
    """(name in OPTIMIZERS, its own groups) of one of torch's optimizers, which keeps no state of its own."""
    kind = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) or optimizer.state:
        raise ConfigError(
            f"initialize(optimizer={kind}): it must be torch's Adam, AdamW or SGD, and must not have updated anything yet"
        )
    defaults = _SGD if isinstance(optimizer, torch.optim.SGD) else _ADAM
    for group in optimizer.param_groups:
        given = {key: value for key, value in group.items() if key not in ("params", "initial_lr", "name")}
        check_arguments(kind, given, defaults)
    optimizer._opt_called = True  # torch's schedules ask whether it has updated; here the engine does
    is_l2 = type(optimizer) is torch.optim.Adam
    return {"SGD": "sgd"}.get(kind, "adam-l2" if is_l2 else "adam"), optimizer.param_groups


def optimizer_config(name: str, groups: Groups, clipping: float) -> OptimizerConfig:
    """What all groups have in common. Raises ConfigError if betas, eps or momentum differ between them."""
    if name == "adam-l2":
        OPTIMIZERS.setdefault(name, UpdateRule(_adam_l2, lambda config: ("exp_avg", "exp_avg_sq")))
    alike = {key: groups[0][key] for key in ("betas", "eps", "momentum") if key in groups[0]}
    for key, value in alike.items():
        if any(group[key] != value for group in groups):
            raise ConfigError(f"optimizer: groups have different {key}; rates and decays may differ, {key} may not")
    if name == "sgd":
        return OptimizerConfig(optimizer=name, clip_grad=clipping, sgd_momentum=alike["momentum"])
    beta1, beta2 = alike["betas"]
    return OptimizerConfig(
        optimizer=name, clip_grad=clipping, adam_beta1=beta1, adam_beta2=beta2, adam_eps=alike["eps"]
    )


def numbers_of(model: nn.Module, groups: Groups) -> dict[str, int]:
    """Parameter name -> number of its group. A parameter of no group is frozen: nothing would update it."""
    number_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
    named = dict(model.named_parameters())
    if strangers := number_of.keys() - {id(p) for p in named.values()}:
        raise ConfigError(f"{len(strangers)} of the optimizer's parameters are not of the model; pass the model's own")
    for p in named.values():
        if id(p) not in number_of:
            p.requires_grad_(False)
    return {name: number_of[id(p)] for name, p in named.items() if id(p) in number_of}


class ZeroOptimizer:
    """`step()` is the engine's to call. param_groups: as torch has them."""

    def __init__(self, flat: FlatOptimizer, groups: Groups):
        self.flat, self.param_groups = flat, groups
        self.overflow = False  # of the last step
        self.norm: float | None = None  # of the whole gradient before clipping, None before the first step

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.flat.scaler is None else self.flat.scaler.scale

    cur_scale = loss_scale

    def update(self, divisor: float, *, restores_hysteresis: bool = False) -> bool:
        """Update once with the gradient / `divisor`. Returns False if the scaled gradient overflowed: nothing changed.

        Every rank must call. Raises FloatingPointError for a norm that is not finite, unless the loss scale can fall.
        """
        scaler = self.flat.scaler
        self.norm, factor = self.flat.clip_factor(divisor * self.loss_scale)
        self.overflow = not math.isfinite(self.norm)
        if self.overflow and (scaler is None or not scaler.can_fall):
            raise FloatingPointError(
                f"the gradient's norm is {self.norm}; nothing was updated. Lower the rate, check the data"
                + ("" if scaler is None else f", or lower fp16.min_loss_scale (the scale is {scaler.scale:g})")
            )
        if scaler is not None:
            scaler.update(self.overflow)
            if restores_hysteresis and not self.overflow:
                scaler.patience = scaler.hysteresis
        if not self.overflow:
            self.flat.update(partial(self._step_of, factor))
        return not self.overflow

    def _step_of(self, factor: float, group: NumberedGroup) -> UpdateStep:
        values = self.param_groups[group.number]
        return UpdateStep(float(values["lr"]), float(values["weight_decay"]), self.flat.step_count, factor)

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    def step(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("optimizer.step() is part of engine.step(), which reduces the gradients first; call that")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: engine.step() forgets the gradients of its step."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("a rank has only its shard of the state; engine.save_checkpoint(folder) writes all of it")


def as_groups(given: Any, model: nn.Module) -> Sequence[Any]:
    """`model_parameters` of initialize(), by default all that are trained."""
    return [p for p in model.parameters() if p.requires_grad] if given is None else list(given)
