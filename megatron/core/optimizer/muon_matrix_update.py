"""Muon: the update of a matrix is its momentum, orthogonalized.

Source: K. Jordan and others, kellerjordan.github.io/posts/muon

    m = mu m + (1 - mu) g                  momentum_buffer
    d = m, or mu m + (1 - mu) g            the latter with Nesterov's momentum
    w = w - lr (scale U V^T + decay w)     of d = U S V^T, by Newton-Schulz steps instead of the decomposition

Matrices that are fused in one parameter are orthogonalized one by one: gate and up, and query, key and value, each with
all its heads. So are the matrices that experts stack, [E, .., out, in]. The full matrix is gathered over the
tensor-parallel ranks, which repeat each other's computation. Of ranks that have the same part of it (data-parallel ones
at ZeRO stage 0), one takes the steps and sends its part of U V^T to the others: in bfloat16 if the steps were taken in
it, which is exact.
"""

import math

import torch
from torch import Tensor

from megatron.core.optimizer.adam_and_sgd import States, Tensors, UpdateStep
from megatron.core.optimizer.gather_full_matrices_over_tp import MatrixOwners, ShardedMatrix
from megatron.core.optimizer.muon_config import MuonConfig, ns_coefficients
from megatron.core.parallel.accelerator import float32_products, multiplies_bfloat16

# Megatron-LM's. A smaller matrix gets a smaller step: values that are zero but for rounding differ between layouts, and
# must not become a whole step.
SMALLEST_NORM = 1e-7

_ELEMENTS_AT_ONCE = 2**24  # of stacked matrices: small ones share products, and large ones no memory


def muon_update(
    parameters: Tensors,
    gradients: Tensors,
    states: States,
    step: UpdateStep,
    matrices: list[ShardedMatrix],
    *,
    config: MuonConfig,
) -> None:
    """Take Muon's step for matrices [out, in], or stacks [.., out, in], of which this rank has parts, in place.

    parameters, gradients, states['momentum_buffer']: the parts, [local shape] of `matrices[i]` each. The ranks of tp,
    and those that have the same parts, must call together, with the parts of the same matrices.
    """
    momenta = states["momentum_buffer"]
    for gradient, momentum in zip(gradients, momenta):
        momentum.lerp_(gradient, 1 - config.muon_momentum)
    # matrices whose parts the same ranks have share the work
    for owners in dict.fromkeys(matrix.owners for matrix in matrices):
        numbers = [i for i, matrix in enumerate(matrices) if matrix.owners is owners]
        _update_shared(
            owners,
            [parameters[i] for i in numbers],
            [gradients[i] for i in numbers],
            [momenta[i] for i in numbers],
            [matrices[i] for i in numbers],
            step=step,
            config=config,
        )


def _update_shared(
    owners: MatrixOwners,
    parameters: Tensors,
    gradients: Tensors,
    momenta: Tensors,
    matrices: list[ShardedMatrix],
    *,
    step: UpdateStep,
    config: MuonConfig,
) -> None:
    """Take the weights' step, from momenta of this step. Each owner computes U V^T of its matrices for all."""
    momentum = config.muon_momentum
    rate = step.lr * config.muon_extra_scale_factor
    split_qkv = config.muon_split_qkv

    # the dtype in which the parts of U V^T are sent
    dtype = parameters[0].dtype
    device = parameters[0].device
    if _is_rounded(dtype, config) and owners.all_agree(multiplies_bfloat16(device), device):
        dtype = torch.bfloat16

    def direction(i: int) -> Tensor:
        """This rank's part of U V^T of matrix i."""
        ahead = gradients[i].lerp(momenta[i], momentum) if config.muon_nesterov else momenta[i]
        full = matrices[i].gather(ahead)
        return matrices[i].part(_orthogonalize_fused(full, matrices[i], dtype, config))

    def update(i: int, part: Tensor) -> None:
        scaled = part.to(parameters[i].dtype).mul_(_row_scales(matrices[i], parameters[i], config))
        parameters[i].mul_(1 - step.lr * step.weight_decay).sub_(scaled, alpha=rate)

    work = []
    for matrix in matrices:
        *stack, _, columns = matrix.shape
        of_one = sum(_work(rows, columns) for rows in matrix.rows_of_matrices(split_groups=split_qkv))
        work.append(math.prod(stack) * of_one)
    owners.share(work, direction, lambda i: torch.empty_like(parameters[i], dtype=dtype), update)


def _orthogonalize_fused(full: Tensor, matrix: ShardedMatrix, dtype: torch.dtype, config: MuonConfig) -> Tensor:
    """Return about U V^T of each matrix that is fused or stacked in `full`, [.., out, in], in new memory of its shape."""
    result = torch.empty_like(full, dtype=dtype)
    inputs = matrix.matrices(full, split_groups=config.muon_split_qkv)
    outputs = matrix.matrices(result, split_groups=config.muon_split_qkv)
    for x, out in zip(inputs, outputs):
        if matrix.is_stack:
            stack = x.flatten(0, -3)  # [matrices, rows, in]
            at_once = max(1, _ELEMENTS_AT_ONCE // stack[0].numel())
            parts = [orthogonalized(part, config) for part in stack.split(at_once)]
            out.copy_(torch.cat(parts).view(out.shape))
            continue
        flat = x.flatten(0, -2)  # [rows, in]: the groups of an interleaved matrix one after the other
        out.copy_(orthogonalized(flat, config).view_as(out))
    return result


def _row_scales(matrix: ShardedMatrix, like: Tensor, config: MuonConfig) -> float | Tensor:
    """Return the factor of each row of this rank's part, [rows, in]; a number if it is the same in all."""
    rows = matrix.rows_of_matrices(split_groups=config.muon_split_qkv)
    factors = [scale_factor((n, matrix.shape[-1]), config.muon_scale_mode) for n in rows]
    if len(set(factors)) == 1:
        return factors[0]
    column = like.new_empty(*matrix.shape[:-1], 1)
    for part, factor in zip(matrix.matrices(column, split_groups=config.muon_split_qkv), factors):
        part.fill_(factor)
    return matrix.part(column.expand(matrix.shape))


def _work(rows: int, columns: int) -> int:
    """Return a number in proportion to the operations of a Newton-Schulz step.

    It is 2 r^2 (2 c + r) for r rows and c >= r columns.
    """
    r, c = sorted((rows, columns))
    return r * r * (2 * c + r)


def scale_factor(shape: tuple[int, ...], mode: str) -> float:
    """Return the factor of an orthogonalized matrix [out, in].

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
    """Return about U V^T of the matrix U S V^T: [rows, columns] -> [rows, columns], in its dtype, in new memory.

    Of a stack [n, rows, columns] that of each matrix.

    Newton-Schulz steps X <- a X + (b A + c A^2) X, A = X X^T, begin with matrix / max(|matrix|, 1e-7) and drive its
    singular values towards 1.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    add_product = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    x = matrix.mT if is_tall else matrix  # [smaller side, larger side], so that A is [smaller, smaller]
    # in float32 its squares could underflow
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    x = x / norm.clamp(min=SMALLEST_NORM).to(x.dtype)
    if _is_rounded(x.dtype, config) and multiplies_bfloat16(x.device):
        x = x.bfloat16()
    with float32_products(x.device, tf32=config.muon_fp32_matmul_prec != "highest"):
        for a, b, c in ns_coefficients(config.muon_coefficient_type, config.muon_num_ns_steps):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result = x.mT if is_tall else x
    return result.to(matrix.dtype, memory_format=torch.contiguous_format)


def _is_rounded(dtype: torch.dtype, config: MuonConfig) -> bool:
    """Whether the steps are taken in bfloat16 where the device has units for it."""
    return dtype == torch.float32 and config.muon_fp32_matmul_prec == "medium"
