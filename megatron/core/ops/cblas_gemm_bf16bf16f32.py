"""A float32 sum of products of bfloat16 matrices on a CPU, by the BLAS inside torch's library: no function of torch
offers it."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


def add_in_library(total: Tensor, grad: Tensor, x: Tensor, beta: int) -> None:
    """total = beta total + grad^T x, exact products summed in float32. total: [out, in] float32, contiguous; grad:
    [tokens, out],
    x: [tokens, in], bfloat16.

    RuntimeError where the library has none, or the CPU no AMX: without, it may be slower than float32 factors.
    """
    multiply = _gemm_of_bfloat16()
    if multiply is None:
        raise RuntimeError("there is no product of bfloat16 matrices with a float32 sum")
    if total.is_meta:  # as torch's operators do, which this is none of: there are no values, and no memory is allocated
        return
    assert total.is_contiguous() and total.dtype == torch.float32, (total.stride(), total.dtype)
    grad, x = grad.contiguous(), x.contiguous()
    features, width = total.shape
    factors = 1.0, grad.data_ptr(), features, x.data_ptr(), width
    multiply(*_FIRST_TRANSPOSED, features, width, len(x), *factors, float(beta), total.data_ptr(), width)


_FIRST_TRANSPOSED = 101, 112, 111  # of the C interface to BLAS: matrices lie row by row, the first is transposed


@cache
def _gemm_of_bfloat16() -> Callable[..., None] | None:
    if not torch.cpu._is_amx_tile_supported():
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = library.cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    size = ctypes.c_int64  # a library with sizes of 32 bits reads the lower half (x86-64)
    matrix = (ctypes.c_void_p, size)
    found.argtypes = [*[ctypes.c_int] * 3, *[size] * 3, ctypes.c_float, *matrix, *matrix, ctypes.c_float, *matrix]
    found.restype = None
    return found
