"""A product of bfloat16 matrices added to a float32 sum on a CPU, by the BLAS inside torch's library.

No function of torch offers it.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


def addmm_bf16_to_fp32(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    """Set total to beta total + grad^T x, exact products summed in float32.

    total: [out, in] float32, contiguous; grad: [tokens, out], x: [tokens, in], bfloat16.

    Raises RuntimeError where the library has no such product, or the CPU no AMX: without, it may be slower than
    float32 factors.
    """
    multiply = _gemm_of_bfloat16()
    if multiply is None:
        raise RuntimeError("the BLAS library or this CPU has no product of bfloat16 matrices with a float32 sum")
    # Meta tensors have no values. torch's operators allow for that by themselves; this is a call by address.
    if total.is_meta:
        return
    assert total.is_contiguous() and total.dtype == torch.float32, (total.stride(), total.dtype)
    grad = grad.contiguous()
    x = x.contiguous()
    tokens = len(x)
    out_features, in_features = total.shape
    multiply(
        *(_ROW_MAJOR, _TRANSPOSED, _NOT_TRANSPOSED),
        *(out_features, in_features, tokens),
        1.0,  # times the product
        *(grad.data_ptr(), out_features),  # a matrix, and the numbers in a row of it
        *(x.data_ptr(), in_features),
        float(beta),
        *(total.data_ptr(), in_features),
    )


_ROW_MAJOR, _NOT_TRANSPOSED, _TRANSPOSED = 101, 111, 112  # of the C interface to BLAS


@cache
def _gemm_of_bfloat16() -> Callable[..., None] | None:
    if not torch.cpu._is_amx_tile_supported():
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        gemm = library.cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    flag = ctypes.c_int
    size = ctypes.c_int64  # a library with sizes of 32 bits reads the lower half (x86-64)
    factor = ctypes.c_float
    matrix = (ctypes.c_void_p, size)
    gemm.argtypes = [flag, flag, flag, size, size, size, factor, *matrix, *matrix, factor, *matrix]
    gemm.restype = None
    return gemm
