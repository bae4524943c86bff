"""The flags of low-rank adapters, and which linears, or parts of fused ones, they name. No torch."""

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
NAMES = ("linear_qkv", "linear_q", "linear_k", "linear_v", "linear_proj")
NAMES += ("linear_fc1", "linear_fc1_gate", "linear_fc1_up", "linear_fc2", "output_layer")


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
        "its own, as PEFT has them; q_proj and the other names of a Llama work too",
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
        unknown = [name for name in self.lora_target_modules if name not in known]
        if unknown:
            yield (
                f"--lora-target-modules {' '.join(unknown)}: there is no such linear; known are {ALL_LINEAR}, "
                f"{', '.join(NAMES)}"
            )
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
        for fused, parts in PARTS.items():
            if fused in names and names & set(parts):
                yield f"--lora-target-modules gives {fused} and parts of it; give the one or the others"

    @property
    def is_on(self) -> bool:
        """Whether the run has adapters."""
        return self.lora_rank is not None or self.lora_adapter is not None

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return scale_of(self.lora_alpha, self.lora_rank, self.use_rslora)


def scale_of(alpha: float, rank: int, use_rslora: bool) -> float:
    return alpha / (rank**0.5 if use_rslora else rank)


def canonical_name(name: str) -> str:
    """Return our name of a linear or part of one."""
    return _ALIASES.get(name, name)


def parts_of(linear: str, is_fused: bool, targets: Collection[str], whole: Collection[str]) -> tuple[str, ...]:
    """Return the parts of a linear that get an adapter each; (WHOLE,): one for all rows; (): none.

    linear: the last component of its name. is_fused: its rows are those of several linears. whole: fused linears that
    all-linear gives one adapter, since they are one tensor in the published model too.
    """
    names = set(map(canonical_name, targets))
    parts = PARTS.get(linear, ()) if is_fused else ()
    if linear in names:
        return (WHOLE,)
    if ALL_LINEAR in names and linear != "output_layer":
        return parts if parts and linear not in whole else (WHOLE,)
    if not is_fused and linear == "linear_fc1" and "linear_fc1_up" in names:  # up_proj of an MLP without a gate
        return (WHOLE,)
    return tuple(part for part in parts if part in names)


def check_targets_found(
    targets: Collection[str],
    found: Mapping[str, Collection[str]],
    *,
    elsewhere: Collection[str] = (),
    has_experts: bool = False,
) -> None:
    """Raise ConfigError for targets that the model does not have. found: linear -> its parts with an adapter.

    elsewhere: linears that another stage may have. has_experts: whether the model has experts' stacked weights.
    """
    missing = []
    for target in targets:
        name = canonical_name(target)
        is_found = (
            name == ALL_LINEAR or name in found or name in elsewhere or any(name in parts for parts in found.values())
        )
        if not is_found and not (name == "linear_fc1_up" and "linear_fc1" in found):
            missing.append(target)
    if missing and has_experts and canonical_name(missing[0]) in ("linear_fc1", *PARTS["linear_fc1"], "linear_fc2"):
        raise ConfigError(
            f"--lora-target-modules {' '.join(missing)}: the model's MLPs are experts, whose stacked weights have no adapters "
            "(not built); leave the name out, or give linear_qkv linear_proj"
        )
    if missing:
        raise ConfigError(
            f"--lora-target-modules {' '.join(missing)}: the model has no such linear (a tied output layer has none of its "
            "own, and an MLP without a gate is linear_fc1); leave the name out"
        )
