"""Settings of a mixture of experts. Pure: --help reads them without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.base.dataclass_flags import BelowOne, Count, NotNegative, Positive, WholeNumber, option, out_of_range
from megatron.core.transformer.layer_freq_pattern import layer_pattern, read_pattern
from megatron.core.transformer.softmax_scale_softcap_sink_config import AttentionConfig

# --moe-router-load-balancing-type -> the name of its auxiliary loss in the log, as Megatron's; sinkhorn and none have no loss.
BALANCING_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "sinkhorn": None,
    "none": None,
}
Z_LOSS = "z_loss"

_NOT_BUILT = {"quantile_balancing": "is not built"}


@dataclass(frozen=True)
class MoEConfig(AttentionConfig):
    """Mixtures of experts in the place of MLPs."""

    num_experts: WholeNumber | None = option(
        None, "experts in the MLP of a layer, of which each token visits --moe-router-topk; 0, 1: a dense MLP"
    )
    moe_layer_freq: str = option(
        "1",
        "which layers have experts: N: layers 0, N, 2 N, ...; or a list with 1 for those layers and 0 for layers with a "
        "dense MLP, such as [0]*1+[1]*23",
        metavar="N|LIST",
        read=read_pattern,
    )
    moe_ffn_hidden_size: Count | None = option(None, "hidden size of each expert; default: that of a dense MLP")
    moe_shared_expert_intermediate_size: Count | None = option(
        None, "total hidden size of the shared experts, which every token visits; default: there are none"
    )
    moe_shared_expert_gate: bool = option(False, "multiply the result of the shared experts by a sigmoid gate")
    moe_shared_expert_overlap: bool = option(
        False,
        "compute the shared experts while tokens travel to the other experts; needs --moe-token-dispatcher-type alltoall",
    )
    moe_router_topk: Count = option(2, "experts of each token")
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = option(
        "softmax", "scores of the experts of a token: softmax over experts, or sigmoid or sqrt(softplus) of each logit"
    )
    moe_router_pre_softmax: bool = option(
        False,
        "softmax over all experts before the choice, instead of over the chosen experts after it; no effect with other "
        "score functions, as in Megatron",
    )
    moe_router_topk_scaling_factor: Positive | None = option(None, "multiply the weights of a token's experts by this")
    moe_router_num_groups: Count | None = option(
        None, "groups of consecutive experts; a token's experts are in its best --moe-router-group-topk groups"
    )
    moe_router_group_topk: Count | None = option(None, "groups from which the experts of a token are chosen")
    moe_router_bias: bool = option(False, "bias of the router's logits, as GPT-OSS has")
    moe_router_enable_expert_bias: bool = option(
        False,
        "balance experts without a loss: the choice, but not the weight, adds a bias that grows for experts with few "
        "tokens; needs --moe-router-score-function sigmoid or sqrtsoftplus",
    )
    moe_router_bias_update_rate: NotNegative = option(1e-3, "change of an expert's bias in a step")
    moe_router_dtype: Literal["fp32", "fp64"] | None = option(
        None, "dtype of logits and weights of the router; default: that of the model, and fp32 with --bf16 or --fp16"
    )
    moe_router_load_balancing_type: list[str] = option(
        ["aux_loss"],
        "losses that balance the experts, each with a --moe-aux-loss-coeff: aux_loss (over a microbatch), seq_aux_loss (over "
        "a sample), global_aux_loss (over all samples of the step so far), none; or sinkhorn, a choice in training that "
        "divides the tokens of a microbatch evenly",
        metavar="TYPE",
    )
    moe_aux_loss_coeff: list[float] = option([0.0], "coefficient of each balancing loss; 1e-2 is usual", metavar="X")
    moe_z_loss_coeff: NotNegative | None = option(None, "coefficient of the router's z-loss; 1e-3 is usual")
    moe_input_jitter_eps: BelowOne | None = option(
        None, "in training, multiply each input of the router by a draw from [1 - EPS, 1 + EPS]"
    )
    moe_router_force_load_balancing: bool = option(
        False, "choose experts in turn instead of by their scores, to measure speed and memory"
    )
    moe_enable_routing_replay: bool = option(
        False,
        "let a script record the choices of the routers and replay them: core/transformer/moe/in_memory_route_replay.py",
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "each expert takes at most FACTOR x topk / experts of a sample's tokens and drops the others; default, and if "
        "negative: no token is dropped",
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        "accepted for scripts that have it: experts compute the rows that they have, and padding changes no number",
    )
    moe_token_drop_policy: Literal["probs", "position"] = option(
        "probs", "tokens that an expert keeps with --moe-expert-capacity-factor: those of largest weight, or the first"
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "alltoall_seq", "flex"] = option(
        "allgather",
        "how tokens reach experts on other ranks: alltoall: each token is sent to its experts; alltoall_seq: the same, by its "
        "name in older scripts; allgather: every rank receives all tokens, which is less to send only if a token "
        "visits more experts than there are ranks",
    )
    moe_grouped_gemm: bool = option(
        False, "multiply all experts of a rank by one call where the device and dtype have it, else one by one"
    )
    moe_apply_probs_on_input: bool = option(
        False, "with --moe-router-topk 1: multiply inputs of experts by the weights"
    )

    moe_layer_recompute: bool = option(
        False, "deprecated: as --recompute-granularity selective --recompute-modules moe"
    )
    moe_enable_deepep: bool = option(False, "refused with --num-experts: dispatch by the kernels of DeepEP")
    moe_router_topk_limited_devices: Count | None = option(
        None, "refused with --num-experts: a choice by the number of ranks; Megatron has groups of experts instead"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if any(out_of_range(self)):
            return
        kinds = self.moe_router_load_balancing_type
        for kind in kinds:
            if kind in _NOT_BUILT:
                yield f"--moe-router-load-balancing-type {kind} {_NOT_BUILT[kind]}; give one of {', '.join(BALANCING_LOSSES)}"
            elif kind not in BALANCING_LOSSES:
                yield f"--moe-router-load-balancing-type {kind} is not one of {', '.join(BALANCING_LOSSES)}"
        if any(not 0 <= coefficient < float("inf") for coefficient in self.moe_aux_loss_coeff):
            yield f"--moe-aux-loss-coeff is {_spaced(self.moe_aux_loss_coeff)}; it must not be negative"
        if not self.has_experts:
            yield from self._problems_of_one_expert()
            return
        yield from self._problems_of_choice()
        yield from self._problems_of_sinkhorn()
        yield from self._problems_of_layers()
        if len(kinds) != len(self.moe_aux_loss_coeff):
            yield (
                f"--moe-router-load-balancing-type {_spaced(kinds)} needs as many --moe-aux-loss-coeff, not "
                f"{_spaced(self.moe_aux_loss_coeff)}; give {len(kinds)}"
            )
        if len(set(kinds)) < len(kinds):
            yield f"--moe-router-load-balancing-type {_spaced(kinds)} has a type twice; give each once"
        for flag, is_set in {
            "--moe-token-dispatcher-type flex": self.moe_token_dispatcher_type == "flex",
            "--moe-enable-deepep": self.moe_enable_deepep,
        }.items():
            if is_set:
                yield (
                    f"{flag} needs kernels of DeepEP, HybridEP or NCCL, which are not used here; give "
                    "--moe-token-dispatcher-type alltoall"
                )
        if (devices := self.moe_router_topk_limited_devices) is not None:
            yield (
                f"--moe-router-topk-limited-devices {devices} would choose by the number of expert-parallel ranks, and is no "
                f"flag of Megatron's scripts; give --moe-router-group-topk {devices}, and --moe-router-num-groups with "
                "that number"
            )

    def _problems_of_one_expert(self) -> Iterator[str]:
        """Yield a problem if --num-experts 1 asks for a layer of one expert, as Megatron makes it, and not for a dense MLP."""
        of_experts = {
            "--moe-ffn-hidden-size": self.moe_ffn_hidden_size,
            "--moe-shared-expert-intermediate-size": self.moe_shared_expert_intermediate_size,
            "--moe-router-topk": self.moe_router_topk if self.moe_router_topk == 1 else None,
        }
        given = [f"{flag} {value}" for flag, value in of_experts.items() if value is not None]
        if self.num_experts == 1 and given:
            yield (
                f"--num-experts 1 is a dense MLP here, of --ffn-hidden-size, and {', '.join(given)} would have no effect; leave "
                "these out, or give --num-experts 2 or more"
            )

    def _problems_of_choice(self) -> Iterator[str]:
        """Yield problems of the choice of experts."""
        experts = self.num_experts
        k = self.moe_router_topk
        groups = self.moe_router_num_groups
        kept = self.moe_router_group_topk
        if k > experts:
            yield f"--moe-router-topk {k} is more than the experts of a layer (--num-experts {experts}); change one"
        elif k == 1 and self.router_weights == ("softmax", False):
            yield (
                "--moe-router-topk 1 with a softmax over the chosen expert gives the weight 1, and the router learns nothing; "
                "give --moe-router-pre-softmax, or --moe-router-score-function sigmoid"
            )
        if kept is not None:  # alone, --moe-router-num-groups has no effect
            if groups is None:
                yield f"--moe-router-group-topk {kept} needs --moe-router-num-groups; give both"
            elif experts % groups:
                yield f"--num-experts {experts} must be a multiple of --moe-router-num-groups {groups}; change one"
            elif kept > groups:
                yield f"--moe-router-group-topk {kept} is more than --moe-router-num-groups {groups}; change one"
            elif k > kept * (experts // groups):
                yield (
                    f"--moe-router-topk {k} is more than the {kept * (experts // groups)} experts of "
                    f"--moe-router-group-topk {kept} groups; change one"
                )
            elif k < kept:
                yield f"--moe-router-topk {k} must be at least --moe-router-group-topk {kept}; change one"
        if self.moe_router_enable_expert_bias and self.moe_router_score_function == "softmax":
            yield (
                "--moe-router-enable-expert-bias needs scores of which each is of one expert; give "
                "--moe-router-score-function sigmoid"
            )

    def _problems_of_sinkhorn(self) -> Iterator[str]:
        """Yield what contradicts a choice by Sinkhorn's iteration."""
        kinds = self.moe_router_load_balancing_type
        if "sinkhorn" not in kinds:
            return
        flag = "--moe-router-load-balancing-type sinkhorn"
        if len(set(kinds)) > 1:
            yield f"--moe-router-load-balancing-type {_spaced(kinds)}: sinkhorn balances without a loss; give it alone"
        elif any(self.moe_aux_loss_coeff):
            yield f"{flag} has no loss, but --moe-aux-loss-coeff is {_spaced(self.moe_aux_loss_coeff)}; leave it out"
        if self.capacity_factor is not None:
            yield f"{flag} cannot be combined with --moe-expert-capacity-factor, as in Megatron; leave one of them out"
        for other, is_set in {
            f"--moe-router-score-function {self.moe_router_score_function}": self.moe_router_score_function
            != "softmax",
            "--moe-router-pre-softmax": self.moe_router_pre_softmax and self.moe_router_topk == 1,
            "--moe-router-topk-scaling-factor": self.moe_router_topk_scaling_factor is not None,
            "--moe-router-group-topk": self.moe_router_group_topk is not None,
            "--moe-router-enable-expert-bias": self.moe_router_enable_expert_bias,
        }.items():
            if is_set:
                yield (
                    f"{flag} takes no {other}: its weights are the sigmoid of the logit with --moe-router-topk 1, else a "
                    "softmax over all experts; leave one of them out"
                )

    def _problems_of_layers(self) -> Iterator[str]:
        """Yield problems of which layers have experts, and of what an expert is."""
        pattern = layer_pattern(self.moe_layer_freq)
        if isinstance(pattern, list) and len(pattern) != self.num_layers:
            yield (
                f"--moe-layer-freq has {len(pattern)} entries, but --num-layers is {self.num_layers}; give one entry for each "
                "layer"
            )
        elif not any(self.is_moe_layer(layer) for layer in range(self.num_layers)):
            yield f"--moe-layer-freq {self.moe_layer_freq} gives no layer experts; leave out --num-experts"
        overlaps = self.moe_shared_expert_overlap and self.moe_shared_expert_intermediate_size is not None
        if overlaps and self.moe_token_dispatcher_type == "allgather":
            yield (
                "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall, which starts to send before the "
                "shared experts compute"
            )
        if self.moe_apply_probs_on_input and self.moe_router_topk != 1:
            yield (
                f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {self.moe_router_topk}: with more, an input has "
                "several weights"
            )
        if self.capacity_factor == 0:
            yield (
                "--moe-expert-capacity-factor 0 drops every token, and the experts learn nothing; give a positive one, or "
                "leave it out to drop none"
            )
        if self.moe_pad_expert_input_to_capacity and self.capacity_factor is None:
            yield (
                "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; without one there is no capacity to "
                "pad to"
            )

    def idle_settings_of_experts(self) -> Iterator[tuple[Sequence[str], str]]:
        """Yield (settings that nothing reads under the others, why): all of them for a model without experts."""
        if not self.has_experts:
            yield (
                [name for name in OF_EXPERTS if name != "num_experts"],
                "--num-experts 1 is a dense MLP"
                if self.num_experts == 1
                else "the model has no experts without --num-experts",
            )
            return

        # the choice of experts
        if self.balances_by_sinkhorn:
            yield ("moe_router_pre_softmax",), "Sinkhorn routing takes a softmax over all experts in any case"
        elif self.moe_router_score_function != "softmax":
            why = f"--moe-router-score-function {self.moe_router_score_function} takes no softmax"
            yield ("moe_router_pre_softmax",), why
        if not self.moe_router_enable_expert_bias:
            yield ("moe_router_bias_update_rate",), "experts have no bias without --moe-router-enable-expert-bias"
        of_groups = ("moe_router_num_groups", "moe_router_group_topk")
        if self.moe_router_force_load_balancing:
            of_bias = ("moe_router_enable_expert_bias", "moe_router_bias_update_rate")
            yield (*of_groups, *of_bias), "--moe-router-force-load-balancing chooses experts in turn"
        elif self.moe_router_group_topk is None:
            yield ("moe_router_num_groups",), "all experts are chosen from without --moe-router-group-topk"
        elif self.moe_router_num_groups == self.moe_router_group_topk:
            yield of_groups, f"a token's experts may be in any of the {self.moe_router_num_groups} groups"

        # shared experts
        if self.moe_shared_expert_intermediate_size is None:
            of_shared = ("moe_shared_expert_gate", "moe_shared_expert_overlap")
            yield of_shared, "there are no shared experts without --moe-shared-expert-intermediate-size"

        # capacity
        if self.capacity_factor is not None:
            why = "experts compute the rows that they have, and padding changes no number"
            yield ("moe_pad_expert_input_to_capacity",), why
        else:
            negative = "no token is dropped if --moe-expert-capacity-factor is negative"
            is_given = self.moe_expert_capacity_factor is not None
            yield ("moe_expert_capacity_factor",), negative
            why = negative if is_given else "no token is dropped without --moe-expert-capacity-factor"
            yield ("moe_token_drop_policy",), why

        # balancing losses
        kinds = self.moe_router_load_balancing_type
        if not self.balancing_losses and any(map(BALANCING_LOSSES.get, kinds)):
            yield ("moe_router_load_balancing_type",), "no loss is computed without a --moe-aux-loss-coeff"
        elif not self.balancing_losses:
            yield ("moe_aux_loss_coeff",), f"--moe-router-load-balancing-type {_spaced(kinds)} has no loss"

    @property
    def parsed_patterns(self) -> dict[str, Any]:
        """The settings in the types of Megatron's parser: of layers N or a list, of losses one value or a list."""
        of_losses = {"moe_router_load_balancing_type": self.moe_router_load_balancing_type}
        of_losses["moe_aux_loss_coeff"] = self.moe_aux_loss_coeff
        one_or_list = {name: values[0] if len(values) == 1 else values for name, values in of_losses.items()}
        return {**super().parsed_patterns, "moe_layer_freq": layer_pattern(self.moe_layer_freq), **one_or_list}

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts."""
        return (self.num_experts or 0) > 1

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a layer has experts. layer: from 0, over the whole model."""
        if not self.has_experts:
            return False
        pattern = layer_pattern(self.moe_layer_freq)
        return layer % pattern == 0 if isinstance(pattern, int) else pattern[layer] == 1

    @property
    def has_dense_mlp(self) -> bool:
        """Whether some layers have a dense MLP."""
        return not all(self.is_moe_layer(layer) for layer in range(self.all_layers))

    @property
    def expert_ffn_size(self) -> int:
        """The width inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def active_expert_parameters(self) -> int:
        """The elements of the weight matrices of one layer's router, experts and shared experts that a token visits."""
        if not self.has_experts:
            return 0
        h = self.hidden_size
        shared = self.moe_shared_expert_intermediate_size or 0
        width = self.moe_router_topk * self.expert_ffn_size + shared
        gate = h if shared and self.moe_shared_expert_gate else 0
        return (3 if self.is_gated else 2) * h * width + h * self.num_experts + gate

    @property
    def capacity_factor(self) -> float | None:
        """The capacity of an expert, as a multiple of an equal share; None: no token is dropped."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None or factor < 0 else factor

    @property
    def balances_by_sinkhorn(self) -> bool:
        """Whether Sinkhorn's iteration chooses the experts in training."""
        return self.moe_router_load_balancing_type == ["sinkhorn"]

    @property
    def router_weights(self) -> tuple[str, bool]:
        """(the function of logits that the weights of a token's experts are, whether its softmax is over all experts)."""
        if self.balances_by_sinkhorn:  # as Megatron: whatever the settings of scores say
            return ("sigmoid", False) if self.moe_router_topk == 1 else ("softmax", True)
        function = self.moe_router_score_function
        return function, self.moe_router_pre_softmax and function == "softmax"

    @property
    def balancing_losses(self) -> dict[str, float]:
        """The balancing losses that have a coefficient: type -> coefficient."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff)
        return {kind: coefficient for kind, coefficient in pairs if coefficient and BALANCING_LOSSES.get(kind)}

    @property
    def aux_loss_names(self) -> tuple[str, ...]:
        """The auxiliary losses of the model's layers, by their names in the log."""
        if not self.has_experts:
            return ()
        names = [BALANCING_LOSSES[kind] for kind in self.balancing_losses]
        return (*names, Z_LOSS) if self.moe_z_loss_coeff else tuple(names)


OF_EXPERTS = tuple(vars(MoEConfig)["__annotations__"])  # the settings of experts


def _spaced(values: list) -> str:
    return " ".join(map(str, values))
