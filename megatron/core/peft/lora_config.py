"""The flags of low-rank adapters, and which linears, or parts of fused ones, they name. No torch."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megatron.core.base.dataclass_flags import BelowOne, ConfigError, Count, FlagConfig, Positive, option

WHOLE = ""  # the part that is all rows of a linear
ALL_LINEAR = "all-linear"  # PEFT's name
# fused linear -> its parts, by the names of Megatron Bridge's CanonicalLoRA
PARTS = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_gate", "linear_fc1_up")}
# Names of the same linears in published models of the Llama kind, as PEFT's target_modules give them
_ALIASES = {
    **{"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "o_proj": "linear_proj"},
    **{
        "gate_proj": "linear_fc1_gate",
        "up_proj": "linear_fc1_up",
        "down_proj": "linear_fc2",
        "lm_head": "output_layer",
    },
}
EXPERTS = "experts."  # before the names of the linears of a mixture's experts, and their parts
# PEFT's target_parameters, and the modules that transformers 4 had
_ALIASES |= {f"{EXPERTS}gate_up_proj": f"{EXPERTS}linear_fc1"}
_ALIASES |= {f"{EXPERTS}{name}": f"{EXPERTS}{_ALIASES[name]}" for name in ("gate_proj", "up_proj", "down_proj")}
_MLP = ("linear_fc1", *PARTS["linear_fc1"], "linear_fc2")
NAMES = ("linear_qkv", "linear_q", "linear_k", "linear_v", "linear_proj")
NAMES += (*_MLP, "output_layer", *(EXPERTS + name for name in _MLP))
ROUTER = ("router", "gate", "gate.weight")  # in Megatron, and in transformers


@dataclass(frozen=True)
class LoRAConfig(FlagConfig):
    """Low-rank adapters."""

    lora_rank: Count | None = option(
        None, "train adapters of this rank and keep all other weights frozen (LoRA, arXiv:2106.09685)", of_model=True
    )
    lora_alpha: Positive = option(32.0, "adapters are multiplied by alpha / rank", of_model=True)
    lora_dropout: BelowOne = option(0.0, "dropout of the adapters' inputs")
    lora_target_modules: list[str] = option(
        [ALL_LINEAR],
        "linears with an adapter: all-linear (those of the layers), or of linear_qkv linear_proj linear_fc1 linear_fc2 "
        "output_layer; linear_q linear_k linear_v linear_fc1_gate linear_fc1_up give a part of a fused linear an adapter of "
        "its own, as PEFT has them; experts.linear_fc1 experts.linear_fc2 are those of a mixture's experts; q_proj and the "
        "other names of a Llama work too; NAME=N: of rank N, with the factor of the others",
        metavar="NAME",
        of_model=True,
    )
    use_rslora: bool = option(
        False, "multiply adapters by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)", of_model=True
    )
    lora_adapter: str | None = option(
        None,
        "folder of PEFT (adapter_config.json, adapter_model.safetensors) whose adapters the run begins with; its rank, alpha "
        "and targets are taken",
        metavar="DIR",
    )

    def problems(self) -> Iterator[str]:
        known = {*NAMES, *_ALIASES, ALL_LINEAR}
        given = [target.partition("=")[0] for target in self.lora_target_modules]
        routers = [name for name in given if name in ROUTER]
        if routers:
            yield (
                f"--lora-target-modules {' '.join(routers)}: a router has no adapter, which is not built; leave it out, and give "
                f"{EXPERTS}linear_fc1 {EXPERTS}linear_fc2 for the experts behind it"
            )
        unknown = [name for name in given if name not in known and name not in ROUTER]
        if unknown:
            yield (
                f"--lora-target-modules {' '.join(unknown)}: there is no such linear; known are {ALL_LINEAR}, "
                f"{', '.join(NAMES)}"
            )
        for target in self.lora_target_modules:
            name, has_rank, rank = target.partition("=")
            if has_rank and (not re.fullmatch("[1-9][0-9]{0,5}", rank) or name == ALL_LINEAR):
                yield f"--lora-target-modules {target}: give NAME=N, the name of a linear and a rank of at least 1"
        if not self.lora_target_modules:
            yield f"--lora-target-modules names nothing; give {ALL_LINEAR}, or names of linears"
        if not self.is_on:
            of_adapters = {
                "--lora-alpha": self.lora_alpha != 32.0,
                "--lora-dropout": self.lora_dropout > 0,
                "--lora-target-modules": self.lora_target_modules != [ALL_LINEAR],
                "--use-rslora": self.use_rslora,
            }
            for flag in (flag for flag, is_given in of_adapters.items() if is_given):
                yield f"{flag} needs --lora-rank: without it all weights are trained; give a rank, or leave {flag} out"
        names = set(map(canonical_name, self.lora_target_modules))
        of_experts = {f"{EXPERTS}linear_fc1": [EXPERTS + part for part in PARTS["linear_fc1"]]}
        for fused, parts in (PARTS | of_experts).items():
            if fused in names and names & set(parts):
                yield f"--lora-target-modules gives {fused} and parts of it; give the one or the others"

    @property
    def is_on(self) -> bool:
        """Whether the run has adapters."""
        return self.lora_rank is not None or self.lora_adapter is not None

    @property
    def scale(self) -> float:
        """The factor of an adapter's product, also of one that has a rank of its own."""
        return scale_of(self.lora_alpha, self.lora_rank, self.use_rslora)

    def rank_of(self, target: str) -> int:
        """Return the rank of the adapters of a linear or part, by its target."""
        ranks = [int(x.partition("=")[2]) for x in self.lora_target_modules if "=" in x and canonical_name(x) == target]
        return ranks[-1] if ranks else self.lora_rank


def scale_of(alpha: float, rank: int, use_rslora: bool) -> float:
    return alpha / (rank**0.5 if use_rslora else rank)


def canonical_name(name: str) -> str:
    """Return our name of a linear or part of one, which a target names, without its rank."""
    name = name.partition("=")[0]
    return _ALIASES.get(name, name)


def target_of(linear: str) -> str:
    """Return the target that names a linear: the last component of its name, behind `EXPERTS` for those of experts."""
    path, _, last = linear.rpartition(".")
    return f"{EXPERTS}{last}" if path.rpartition(".")[2] == EXPERTS.rstrip(".") else last


def target_of_part(target: str, part: str) -> str:
    """Return the target that names a part of a linear, or the linear itself for `WHOLE`."""
    if part == WHOLE:
        return target
    return f"{EXPERTS}{part}" if target.startswith(EXPERTS) else part


def parts_of(target: str, is_fused: bool, targets: Collection[str], whole: Collection[str]) -> tuple[str, ...]:
    """Return the parts of a linear that get an adapter each; (WHOLE,): one for all rows; (): none.

    target: of the linear. is_fused: its rows are those of several linears. whole: fused linears that all-linear gives one
    adapter, since they are one tensor in the published model too, as experts' gate|up always is.
    """
    names = set(map(canonical_name, targets))
    is_of_experts = target.startswith(EXPERTS)
    parts = PARTS.get(target.removeprefix(EXPERTS), ()) if is_fused else ()
    if target in names:
        return (WHOLE,)
    if ALL_LINEAR in names and target != "output_layer":
        return parts if parts and target not in whole and not is_of_experts else (WHOLE,)
    up = target_of_part(target, "linear_fc1_up")
    if not is_fused and target.endswith("linear_fc1") and up in names:  # up_proj of an MLP without a gate
        return (WHOLE,)
    return tuple(part for part in parts if target_of_part(target, part) in names)


def check_targets_found(
    targets: Collection[str],
    found: Mapping[str, Collection[str]],
    *,
    elsewhere: Collection[str] = (),
    linears: Collection[str] = (),
) -> None:
    """Raise ConfigError for targets that the model does not have. found: linear -> the targets of its adapters.

    elsewhere: linears that another stage may have. linears: all that the model has, with an adapter or without.
    """
    missing = []
    for target in targets:
        name = canonical_name(target)
        is_found = (
            name == ALL_LINEAR or name in found or name in elsewhere or any(name in parts for parts in found.values())
        )
        if not is_found and not (name.endswith("linear_fc1_up") and name.removesuffix("_up") in found):
            missing.append(target)
    if missing and f"{EXPERTS}linear_fc1" in linears and canonical_name(missing[0]) in _MLP:
        raise ConfigError(
            f"--lora-target-modules {' '.join(missing)}: the model's MLPs are experts; give {EXPERTS}linear_fc1 "
            f"{EXPERTS}linear_fc2 for theirs, or leave the name out"
        )
    if missing:
        raise ConfigError(
            f"--lora-target-modules {' '.join(missing)}: the model has no such linear (a tied output layer has none of its "
            "own, and an MLP without a gate is linear_fc1); leave the name out"
        )
