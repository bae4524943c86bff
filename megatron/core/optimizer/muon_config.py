"""The settings of Muon, under Megatron's names. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import BelowOne, Count, FlagConfig, Positive, option

Coefficients = tuple[float, float, float]  # a, b, c of X <- a X + (b A + c A^2) X, with A = X X^T

# By Megatron's names, which are those of the package emerging-optimizers; each step takes the next triple.
NS_COEFFICIENTS: dict[str, list[Coefficients]] = {
    # K. Jordan, kellerjordan.github.io/posts/muon: the steepest start that leaves singular values in 0.7 .. 1.2
    "simple": [(3.4445, -4.7750, 2.0315)],
    # F. Cesista, leloykun.github.io/ponder/muon-opt-coeffs: optimized step by step
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    # N. Amsel and others, arXiv:2505.16932, algorithm 1, with its division by 1.01^degree
    "polar_express": [
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ],
    # T. Boissin and others, github.com/thib-s/flash-newton-schulz
    "aol": [(4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)],
}
# Kinds whose last triple may be repeated. Of the others, no further step brings the singular values closer to 1.
_LAST_REPEATS = ("simple", "polar_express")


@dataclass(frozen=True)
class MuonConfig(FlagConfig):
    """Muon."""

    muon_momentum: BelowOne = option(0.9, "muon: momentum, as in m = momentum * m + (1 - momentum) * gradient")
    muon_nesterov: bool = option(
        False,
        "muon: Nesterov momentum: orthogonalize momentum * m + (1 - momentum) * gradient instead of m",
        flags=("--muon-nesterov", "--muon-use-nesterov"),
    )
    muon_num_ns_steps: Count = option(5, "muon: Newton-Schulz steps")
    muon_coefficient_type: str = option(
        "quintic", "muon: coefficients of the Newton-Schulz steps", names=NS_COEFFICIENTS
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = option(
        "spectral",
        "muon: factor of the update of an [out, in] matrix: spectral: sqrt(max(out, in)); unit_rms_norm: sqrt(out / "
        "in); shape_scaling: sqrt(max(1, out / in))",
    )
    muon_extra_scale_factor: Positive = option(
        1.0,
        "muon: multiply the update by this as well; 0.2 with spectral scaling gives updates of AdamW's usual "
        "size, so that AdamW's --lr fits",
    )
    muon_split_qkv: bool = option(
        True,
        "muon: orthogonalize the fused query, key and value weights as one matrix instead of as three",
        flags=("--muon-no-split-qkv",),
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = option(
        "medium",
        "muon: precision of the products of float32 matrices: medium: bfloat16 (on a CPU without bfloat16 units: "
        "the same as high); high: TF32 where the device has it; highest: float32",
    )

    def problems(self) -> Iterator[str]:
        kind = self.muon_coefficient_type
        steps = self.muon_num_ns_steps
        if kind not in NS_COEFFICIENTS or kind in _LAST_REPEATS:
            return
        most = len(NS_COEFFICIENTS[kind])
        if steps > most:
            yield (
                f"--muon-num-ns-steps is {steps}, but --muon-coefficient-type {kind} has coefficients for only "
                f"{most} steps; give at most {most}, or one of the types {', '.join(_LAST_REPEATS)}"
            )


def ns_coefficients(kind: str, steps: int) -> list[Coefficients]:
    """Return the coefficients of each of `steps` Newton-Schulz steps; the last triple of the kind is repeated."""
    listed = NS_COEFFICIENTS[kind]
    return [listed[min(step, len(listed) - 1)] for step in range(steps)]
