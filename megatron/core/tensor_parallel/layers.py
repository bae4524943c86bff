"""Tensor-parallel layers with Megatron's arguments, over ours in `linear_layers`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.init import xavier_normal_

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.ops.cpu_half_precision_matmul import NATIVE
from megatron.core.parallel.global_state import get_global_state, get_mesh
from megatron.core.process_groups_config import check_group
from megatron.core.sharding.placement import Constant, InitialValue, Normal
from megatron.core.tensor_parallel import autograd_collectives, linear_layers
from megatron.core.tensor_parallel.linear_layers import TensorParallel

# Megatron's arguments that are accepted where they are False, None or empty. They have no effect: weights are always
# drawn for the full tensor, and gradients accumulate in place.
_WITHOUT_EFFECT = {
    "keep_master_weight_for_test",
    "skip_weight_param_allocation",
    "is_expert",
    "embedding_activation_buffer",
    "grad_output_buffer",
    "disable_grad_reduce",
    "use_cpu_initialization",
    "gradient_accumulation_fusion",
}


def tensor_parallel_of(config: Any = None) -> TensorParallel:
    """Return the `TensorParallel` of the current mesh for a model's config."""
    process = get_global_state()
    mesh = get_mesh()
    sequence_parallel = getattr(config, "sequence_parallel", process.sequence_parallel)
    return TensorParallel(
        mesh["tp"],
        sequence_parallel and mesh["tp"].size > 1,
        getattr(config, "params_dtype", torch.get_default_dtype()),
        process.device,
        kv=mesh["kv"],
        matmul_modes=process.matmul_modes or NATIVE,
        fills=not process.defers_initialization,
    )


def _check_arguments(layer: str, init_method: Any, stride: int, others: dict[str, Any]) -> InitialValue:
    """Return the initial value. TypeError for unsupported arguments."""
    unsupported = []
    for name, value in others.items():
        if name == "tp_group":
            check_group(value, "tp", f"{layer}: tp_group")
            continue
        if name == "tp_comm_buffer_name" or (name in _WITHOUT_EFFECT and not value):
            continue
        unsupported.append(name)
    if stride != 1:
        unsupported.append(f"stride={stride} (fused parts are `blocks` of megatron.core.tensor_parallel.linear_layers)")
    if unsupported:
        raise TypeError(f"{layer}: not built: {', '.join(unsupported)}")
    init_method = init_method or xavier_normal_
    if not isinstance(init_method, Normal | Constant) and not callable(init_method):
        raise TypeError(
            f"{layer}: init_method must be init_method_normal(std), scaled_init_method_normal(std, layers) or a "
            "function of the unsharded tensor, such as torch.nn.init.xavier_normal_, not "
            f"{type(init_method).__name__}"
        )
    return init_method


class ColumnParallelLinear(linear_layers.ColumnParallelLinear):
    """Y = X A + b with A sharded by columns. forward(x [s, b, in] or [s/t, b, in]) -> (y [s, b, out/t], bias or None)

    bias: [out/t]. gather_output: y is [s, b, out]; default True without `config`, as in early Megatron, and False with it,
    as in Megatron core. Every rank of the axis must call.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool | None = None,
        init_method: Any = xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        config: Any = None,
        tp: TensorParallel | None = None,
        **others: Any,
    ):
        others = others | {"keep_master_weight_for_test": keep_master_weight_for_test}
        init = _check_arguments("ColumnParallelLinear", init_method, stride, others)
        if gather_output is None:
            gather_output = config is None and tp is None
        super().__init__(
            input_size,
            output_size,
            tp=tp or tensor_parallel_of(config),
            init=init,
            bias=bias,
            gather_output=gather_output,
            skip_bias_add=skip_bias_add,
        )


class RowParallelLinear(linear_layers.RowParallelLinear):
    """Z = Y B + b with B sharded by rows. forward(y) -> (z [s, b, out] or [s/t, b, out], bias or None)

    input_is_parallel: y is [s, b, in/t]; else it is [s, b, in], replicated, and each rank takes its part. bias: [out].
    Every rank of the axis must call.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Any = xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        config: Any = None,
        tp: TensorParallel | None = None,
        **others: Any,
    ):
        others = others | {"keep_master_weight_for_test": keep_master_weight_for_test}
        init = _check_arguments("RowParallelLinear", init_method, stride, others)
        tp = tp or tensor_parallel_of(config)
        super().__init__(input_size, output_size, tp=tp, init=init, bias=bias, skip_bias_add=skip_bias_add)
        self.input_is_parallel = input_is_parallel

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel:
            y = autograd_collectives.scatter_last(y, self.tp.axis)  # [s, b, in/t]
        return super().forward(y)


class VocabParallelEmbedding(linear_layers.VocabParallelEmbedding):
    """An embedding sharded by rows. forward(ids [s, b]) -> [s, b, h]

    With `reduce_scatter_embeddings` the result is [s/t, b, h]. Every rank of the axis must call.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Any = xavier_normal_,
        reduce_scatter_embeddings: bool = False,
        *,
        config: Any = None,
        tp: TensorParallel | None = None,
        **others: Any,
    ):
        init = _check_arguments("VocabParallelEmbedding", init_method, 1, others)
        tp = tp or tensor_parallel_of(config)
        super().__init__(num_embeddings, embedding_dim, tp=tp, init=init)
        self.sequence_parallel = reduce_scatter_embeddings and tp.axis.size > 1


if TYPE_CHECKING:
    from megatron.core.tensor_parallel.linear_layers import TensorParallel as TensorParallel

__getattr__, __dir__ = lazy_names(__name__, {"megatron.core.tensor_parallel.linear_layers": "TensorParallel"})
