"""Muon: the update of a matrix is its momentum, orthogonalized (K. Jordan and others, kellerjordan.github.io/posts/muon).

    m = mu m + (1 - mu) g                  momentum_buffer
    d = m, or mu m + (1 - mu) g            the latter with Nesterov's momentum
    w = w - lr (scale U V^T + decay w)     of d = U S V^T, approximately: Newton-Schulz steps instead of the decomposition

Matrices that lie fused in one parameter are orthogonalized one by one: gate and up, and query, key and value, each with all its
heads. The whole matrix is gathered over the tensor-parallel ranks, which repeat each other's computation.
"""

import torch
from torch import Tensor

from megatron.core.device import float32_products, multiplies_bfloat16
from megatron.core.optimizer.muon_config import MuonConfig, ns_coefficients
from megatron.core.optimizer.update import States, Tensors, UpdateStep
from megatron.core.optimizer.whole import WholeTensor


def muon_update(
    parameters: Tensors,
    gradients: Tensors,
    states: States,
    step: UpdateStep,
    wholes: list[WholeTensor],
    *,
    config: MuonConfig,
) -> None:
    """Muon's step for matrices [out, in] of which this rank holds parts. The ranks of tp must call together, with the
    parts of the same matrices."""
    mu, rate = config.muon_momentum, step.lr * config.muon_extra_scale_factor
    for parameter, gradient, momentum, whole in zip(parameters, gradients, states["momentum_buffer"], wholes):
        momentum.lerp_(gradient, 1 - mu)
        matrix = whole.gather(gradient.lerp(momentum, mu) if config.muon_nesterov else momentum)
        direction = torch.empty_like(matrix)
        parts, results = (whole.matrices(x, split_groups=config.muon_split_qkv) for x in (matrix, direction))
        for part, result in zip(parts, results):
            one = part.flatten(0, -2)
            found = orthogonalized(one, config).mul_(scale_factor(one.shape, config.muon_scale_mode))
            result.copy_(found.view_as(result))
        parameter.mul_(1 - step.lr * step.weight_decay).sub_(whole.part(direction), alpha=rate)


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

    Newton-Schulz steps X <- a X + (b A + c A^2) X, A = X X^T, begin with matrix / |matrix| and drive its singular values
    towards 1. A matrix of zeros stays one.
    """
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix  # A has the smaller side
    # Squares of small float32 gradients would underflow.
    norm = torch.linalg.vector_norm(x, dtype=torch.float64).clamp(min=torch.finfo(x.dtype).tiny)
    x = x / norm.to(x.dtype)
    precision = config.muon_fp32_matmul_prec
    if x.dtype == torch.float32 and precision == "medium" and multiplies_bfloat16(x.device):
        x = x.bfloat16()
    with float32_products(x.device, tf32=precision != "highest"):
        for a, b, c in ns_coefficients(config.muon_coefficient_type, config.muon_num_ns_steps):
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype, memory_format=torch.contiguous_format)
