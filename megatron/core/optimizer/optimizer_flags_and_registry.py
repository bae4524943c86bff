"""The settings of the optimizer, and OPTIMIZERS, the registry of optimizers. Pure."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from megatron.core import optimizer
from megatron.core.base.dataclass_flags import BelowOne, ConfigError, NotNegative, Positive, one_of, option
from megatron.core.base.registry_with_checked_entries import Registry
from megatron.core.optimizer.lr_wd_schedule_by_samples import IncreaseStyle, WeightDecaySchedule
from megatron.core.optimizer.muon_config import MuonConfig
from megatron.core.optimizer.param_groups import GroupRule, non_matrices_to
from megatron.core.sharding.placement import Placement


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer: an entry of OPTIMIZERS.

    It reads its settings from OptimizerConfig, or from the script that adds it.

    update: config -> `update_rules.Update`, which changes parameters in place.
    states: config -> names of the states per element, zeros at first; checkpoints use these names.
    needs_full_matrix: the update needs whole tensors. It is passed a `gather_full_matrices.ShardedMatrix` per parameter,
        and requires ZeRO stage 0 or 1.
    scales: the update multiplies gradients by the step's factor, as a fused kernel can; otherwise they are multiplied
        first.
    others: for an update of layers' matrices alone: config -> the optimizer of the other parameters.
    computes: a name of the update's formula, equal for rules that update alike; a resume compares it.
    """

    update: Callable[["OptimizerConfig"], Callable[..., None]]
    states: Callable[["OptimizerConfig"], tuple[str, ...]]
    needs_full_matrix: bool = False
    scales: bool = False
    others: Callable[["OptimizerConfig"], str] | None = None
    computes: str | None = None


def _adam(config: "OptimizerConfig") -> Callable[..., None]:
    return partial(optimizer.adam_update, beta1=config.adam_beta1, beta2=config.adam_beta2, eps=config.adam_eps)


def _adam_l2(config: "OptimizerConfig") -> Callable[..., None]:
    return partial(optimizer.adam_l2_update, **_adam(config).keywords)


def _sgd(config: "OptimizerConfig") -> Callable[..., None]:
    return partial(optimizer.sgd_update, momentum=config.sgd_momentum)


def _muon(config: "OptimizerConfig") -> Callable[..., None]:
    return partial(optimizer.muon_update, config=config)


# A script adds an entry before it calls pretrain(); --optimizer then takes its name. The states have torch's names.
_OURS = {
    "adam": UpdateRule(_adam, lambda config: ("exp_avg", "exp_avg_sq"), scales=True, computes="AdamW"),
    "adam-l2": UpdateRule(_adam_l2, lambda config: ("exp_avg", "exp_avg_sq"), computes="Adam with L2"),
    "sgd": UpdateRule(_sgd, lambda config: ("momentum_buffer",) if config.sgd_momentum else (), computes="SGD"),
    "muon": UpdateRule(
        _muon,
        lambda config: ("momentum_buffer",),
        needs_full_matrix=True,
        others=lambda config: config.muon_scalar_optimizer,
        computes="Muon",
    ),
}
OPTIMIZERS: Registry[UpdateRule] = Registry("OPTIMIZERS", UpdateRule, _OURS)


def _read_optimizer(name: str) -> str:
    if name == "dist_muon":  # of Megatron-LM
        raise argparse.ArgumentTypeError(
            f"{name!r} is spelled --optimizer muon --use-distributed-optimizer (ZeRO stage 1) here"
        )
    return one_of(OPTIMIZERS)(name)


@dataclass(frozen=True)
class OptimizerConfig(MuonConfig):
    """Optimizer."""

    optimizer: str = option(
        "adam",
        "adam: AdamW; adam-l2: Adam with L2 decay; sgd: SGD with momentum; muon: Muon for the layers' matrices, and "
        "--muon-scalar-optimizer for the other parameters",
        names=OPTIMIZERS,
        read=_read_optimizer,
    )
    muon_scalar_optimizer: str = option(
        "adam", "muon: optimizer of embeddings, norms, biases and the output layer", names=OPTIMIZERS
    )
    weight_decay: NotNegative = option(
        0.01, "weight decay: decoupled (adam, muon) or added to the gradient (adam-l2, sgd); none for biases and norms"
    )
    start_weight_decay: float | None = option(None, "initial weight decay, with --weight-decay-incr-style")
    end_weight_decay: float | None = option(None, "final weight decay, instead of --weight-decay")
    weight_decay_incr_style: IncreaseStyle = option(
        "constant",
        "growth of weight decay over the run, from --start-weight-decay to --end-weight-decay; constant: none",
    )
    adam_beta1: BelowOne = option(0.9, "decay rate of Adam's first moment")
    adam_beta2: BelowOne = option(0.999, "decay rate of Adam's second moment")
    adam_eps: Positive = option(1e-8, "Adam's epsilon, added to the square root of the second moment")
    sgd_momentum: BelowOne = option(0.9, "momentum of sgd")
    clip_grad: NotNegative = option(1.0, "clip the global gradient norm to this; 0: no clipping")
    reuse_fp32_param: bool = option(
        False,
        "with --bf16: store an fp32 master weight as the bf16 weight plus 16 more bits; this saves 2 bytes per "
        "parameter. 1 master in 131,072 loses one unit in its last place: one that is exactly halfway between two bf16 "
        "values and is rounded towards zero",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        scalar_optimizer = self.muon_scalar_optimizer
        if scalar_optimizer in OPTIMIZERS and OPTIMIZERS[scalar_optimizer].others is not None:
            yield f"--muon-scalar-optimizer {scalar_optimizer} updates only matrices; use adam or sgd"
        start = self.start_weight_decay
        end = self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            for flag, value in {"--start-weight-decay": start, "--end-weight-decay": end}.items():
                if value is not None:
                    yield (
                        f"{flag} needs --weight-decay-incr-style linear or cosine; for a constant weight decay "
                        "give --weight-decay"
                    )
        elif start is None or end is None:
            style = self.weight_decay_incr_style
            yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
        elif not 0 <= start <= end < math.inf:
            yield f"--start-weight-decay ({start}) must be between 0 and --end-weight-decay ({end})"

    def weight_decay_schedule(self, samples: int) -> WeightDecaySchedule:
        """Return the weight decay over a run of `samples` samples."""
        if self.weight_decay_incr_style == "constant":
            return WeightDecaySchedule(self.weight_decay, self.weight_decay, "constant", samples)
        return WeightDecaySchedule(
            self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style, samples
        )

    def rule(self, name: str | None = None) -> UpdateRule:
        """Return the rule of the optimizer `name`; None: --optimizer.

        Raises ConfigError for a name missing from OPTIMIZERS, or states without names.
        """
        name = name or self.optimizer
        if name not in OPTIMIZERS:
            raise ConfigError(f"the optimizer {name} is not one of OPTIMIZERS: {', '.join(OPTIMIZERS)}")
        states = OPTIMIZERS[name].states(self)
        if not isinstance(states, tuple) or not all(isinstance(state, str) for state in states):
            raise ConfigError(
                f"OPTIMIZERS[{name!r}]: `states` is {states!r}; it must be a tuple of names, or () for no states"
            )
        return OPTIMIZERS[name]

    @property
    def functions(self) -> dict[str, str]:
        """The optimizers of this run: setting -> what the optimizer that it names computes."""
        functions = {"optimizer": OPTIMIZERS.function_of(self.optimizer)}
        others = self.rule().others
        if others is not None:
            functions["muon_scalar_optimizer"] = OPTIMIZERS.function_of(others(self))
        return functions

    def grouping(self, group_of: GroupRule) -> GroupRule:
        """Return `group_of` with the optimizer of the parameters that --optimizer does not update."""
        others = self.rule().others
        if others is None:
            return group_of
        return non_matrices_to(others(self), group_of)

    def full_matrix_params(self, placements: Mapping[str, Placement], group_of: GroupRule) -> set[str]:
        """Return the names of the parameters whose optimizer needs whole tensors."""
        group_of = self.grouping(group_of)
        names = set()
        for name, placement in placements.items():
            if self.rule(group_of(name, placement).optimizer).needs_full_matrix:
                names.add(name)
        return names

    @property
    def moments(self) -> tuple[str, ...]:
        """The states of --optimizer, and of the optimizer of the other parameters, by their names in checkpoints."""
        of_matrices, of_others = self.moments_by_part
        return tuple(dict.fromkeys((*of_matrices, *of_others)))

    @property
    def moments_by_part(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The `moments` of the parameters that --optimizer updates, and of the others, of which there may be none."""
        rule = self.rule()
        of_others: tuple[str, ...] = ()
        if rule.others is not None:
            of_others = self.rule(rule.others(self)).states(self)
        return rule.states(self), of_others
