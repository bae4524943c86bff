"""Muon: the update of a matrix is its momentum, orthogonalized (K. Jordan and others, kellerjordan.github.io/posts/muon).

    m = mu m + (1 - mu) g                  momentum_buffer
    d = m, or mu m + (1 - mu) g            the latter with Nesterov's momentum
    w = w - lr (scale U V^T + decay w)     of d = U S V^T, approximately: Newton-Schulz steps instead of the decomposition

Matrices that lie fused in one parameter are orthogonalized one by one: gate and up, and query, key and value, each with all
its heads. The whole matrix is gathered over the tensor-parallel ranks, which repeat each other's computation. Of ranks
that hold
the same part of it (data-parallel ones at ZeRO stage 0), one takes the steps and sends its part of U V^T to the others: in
bfloat16 if the steps were taken in it, which is exact.
"""

import torch
from torch import Tensor

from megatron.core.optimizer.adam_and_sgd import States, Tensors, UpdateStep
from megatron.core.optimizer.full_matrix import Owners, WholeTensor
from megatron.core.optimizer.muon_config import MuonConfig, ns_coefficients
from megatron.core.parallel.accelerator import float32_products, multiplies_bfloat16

# Megatron-LM's. A smaller matrix fades: what is zero but for rounding differs between layouts, and must not become a
# whole step.
SMALLEST_NORM = 1e-7


def muon_update(
    parameters: Tensors,
    gradients: Tensors,
    states: States,
    step: UpdateStep,
    wholes: list[WholeTensor],
    *,
    config: MuonConfig,
) -> None:
    """Muon's step for matrices [out, in] of which this rank holds parts. The ranks of tp, and those that hold the same
    parts, must call together, with the parts of the same matrices."""
    momenta = states["momentum_buffer"]
    for gradient, momentum in zip(gradients, momenta):
        momentum.lerp_(gradient, 1 - config.muon_momentum)
    for owners in dict.fromkeys(whole.owners for whole in wholes):
        theirs = [i for i, whole in enumerate(wholes) if whole.owners is owners]
        held = ([tensors[i] for i in theirs] for tensors in (parameters, gradients, momenta, wholes))
        _update_shared(owners, *held, step=step, config=config)


def _update_shared(
    owners: Owners,
    parameters: Tensors,
    gradients: Tensors,
    momenta: Tensors,
    wholes: list[WholeTensor],
    *,
    step: UpdateStep,
    config: MuonConfig,
) -> None:
    """The weights' step, from momenta of this step."""
    mu, rate = config.muon_momentum, step.lr * config.muon_extra_scale_factor
    kind = parameters[0].dtype
    if _is_rounded(kind, config) and owners.all_say(multiplies_bfloat16(parameters[0].device), parameters[0].device):
        kind = torch.bfloat16

    def direction(i: int) -> Tensor:
        ahead = gradients[i].lerp(momenta[i], mu) if config.muon_nesterov else momenta[i]
        return wholes[i].part(_orthogonalized_parts(wholes[i].gather(ahead), wholes[i], kind, config))

    def update(i: int, found: Tensor) -> None:
        scaled = found.to(parameters[i].dtype).mul_(_scales(wholes[i], parameters[i], config))
        parameters[i].mul_(1 - step.lr * step.weight_decay).sub_(scaled, alpha=rate)

    work = [
        sum(_work(rows, whole.shape[1]) for rows in whole.rows_of_matrices(split_groups=config.muon_split_qkv))
        for whole in wholes
    ]
    owners.share(work, direction, lambda i: torch.empty_like(parameters[i], dtype=kind), update)


def _orthogonalized_parts(matrix: Tensor, whole: WholeTensor, kind: torch.dtype, config: MuonConfig) -> Tensor:
    """About U V^T of each matrix that lies in this one, in new memory."""
    result = torch.empty_like(matrix, dtype=kind)
    pairs = zip(*(whole.matrices(x, split_groups=config.muon_split_qkv) for x in (matrix, result)))
    for part, found in pairs:
        found.copy_(orthogonalized(part.flatten(0, -2), config).view_as(found))
    return result


def _scales(whole: WholeTensor, like: Tensor, config: MuonConfig) -> float | Tensor:
    """The factor of each row of this rank's part; a number if it is the same in all."""
    rows = whole.rows_of_matrices(split_groups=config.muon_split_qkv)
    factors = [scale_factor((n, whole.shape[1]), config.muon_scale_mode) for n in rows]
    if len(set(factors)) == 1:
        return factors[0]
    column = like.new_empty(whole.shape[0], 1)
    for part, factor in zip(whole.matrices(column, split_groups=config.muon_split_qkv), factors):
        part.fill_(factor)
    return whole.part(column.expand(whole.shape))


def _work(rows: int, columns: int) -> int:
    """In proportion to the products of a step: of r rows and c >= r columns 2 r^2 (2 c + r) operations."""
    r, c = sorted((rows, columns))
    return r * r * (2 * c + r)


def scale_factor(shape: tuple[int, ...], mode: str) -> float:
    """The factor of an orthogonalized [out, in].

    spectral: sqrt(max(out, in)), which makes the root mean square of an update 1 in every shape (J. Liu and others,
    arXiv:2502.16982, section 2.2, with 0.2 as --muon-extra-scale-factor).
    unit_rms_norm: sqrt(out / in), which bounds the root mean square of an output's change by that of the input
    (J. Bernstein, jeremybernste.in/writing/deriving-muon; T. Pethick and others, arXiv:2502.07529).
    shape_scaling: sqrt(max(1, out / in)) (K. Jordan's).
    """
    rows, columns = shape
    squares = {"spectral": max(rows, columns), "unit_rms_norm": rows / columns, "shape_scaling": max(1, rows / columns)}
    return squares[mode] ** 0.5


def orthogonalized(matrix: Tensor, config: MuonConfig) -> Tensor:
    """About U V^T of the matrix U S V^T, in new memory.

    Newton-Schulz steps X <- a X + (b A + c A^2) X, A = X X^T, begin with matrix / max(|matrix|, 1e-7) and drive its singular
    values towards 1.
    """
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix  # A has the smaller side
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)  # in float32 its squares could underflow
    x = x / norm.clamp(min=SMALLEST_NORM).to(x.dtype)
    if _is_rounded(x.dtype, config) and multiplies_bfloat16(x.device):
        x = x.bfloat16()
    with float32_products(x.device, tf32=config.muon_fp32_matmul_prec != "highest"):
        for a, b, c in ns_coefficients(config.muon_coefficient_type, config.muon_num_ns_steps):
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype, memory_format=torch.contiguous_format)


def _is_rounded(dtype: torch.dtype, config: MuonConfig) -> bool:
    """Whether the steps are taken in bfloat16 where the device has units for it."""
    return dtype == torch.float32 and config.muon_fp32_matmul_prec == "medium"
