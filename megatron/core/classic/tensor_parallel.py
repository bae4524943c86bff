"""The divided layers with Megatron's arguments, for the model of a fork.

    ColumnParallelLinear(hidden, 4 * hidden, config=config, init_method=init_method_normal(0.02), gather_output=False)

What our own models hand to a layer, these find in the current mesh: the axis, sequence parallelism, the device. `config` gives
`params_dtype`, and `sequence_parallel` where it has one. `tp=TensorParallel(...)` takes the place of both. Weights have their
initial values at once, drawn as the state of torch's generator has it, or, in a model that `get_model` builds, by their names.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.current_mesh import current, get_mesh
from megatron.core.device import to_device
from megatron.core.placement import Constant, InitialValue, Normal
from megatron.core.tensor_parallel import linear_layers, mappings
from megatron.core.tensor_parallel.broadcast import broadcast_batch
from megatron.core.tensor_parallel.cross_entropy import sharded_cross_entropy
from megatron.core.tensor_parallel.linear_layers import TensorParallel

INIT_STD = 0.02

# Arguments of Megatron's that change nothing here: all weights are drawn for the whole tensor, and gradients accumulate in place.
_WITHOUT_EFFECT = {"keep_master_weight_for_test", "skip_weight_param_allocation", "is_expert", "tp_comm_buffer_name"}


def tensor_parallel_of(config: Any = None) -> TensorParallel:
    """What a layer needs to know, from the current mesh."""
    here, mesh = current(), get_mesh()
    divided = getattr(config, "sequence_parallel", here.sequence_parallel) and mesh["tp"].size > 1
    dtype = getattr(config, "params_dtype", torch.get_default_dtype())
    options = {"kv": mesh["kv"], "products": here.products, "fills": not here.fills_by_name}
    return TensorParallel(mesh["tp"], divided, dtype, here.device, **options)


def _checked(layer: str, init_method: Any, stride: int, others: dict[str, Any]) -> InitialValue:
    """The initial values. Raises TypeError for what has no meaning here."""
    strange = [name for name, value in others.items() if name not in _WITHOUT_EFFECT or value]
    if stride != 1:
        strange.append(f"stride={stride} (fused parts are `blocks` of megatron.core.tensor_parallel.linear_layers)")
    if strange:
        raise TypeError(f"{layer}: not built: {', '.join(strange)}")
    if init_method is not None and not isinstance(init_method, Normal | Constant) and not callable(init_method):
        raise TypeError(
            f"{layer}: init_method must be init_method_normal(std) or scaled_init_method_normal(std, layers) of "
            "megatron.core.utils, or a function of the whole tensor, such as torch.nn.init.xavier_normal_, not "
            f"{type(init_method).__name__}"
        )
    return Normal(INIT_STD) if init_method is None else init_method


class ColumnParallelLinear(linear_layers.ColumnParallelLinear):
    """Y = X A + b with A split by columns -> (y, bias or None). `gather_output` when left out: as in Megatron 2, which has no
    `config`, yes; as in its core, no."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool | None = None,
        init_method: Any = None,
        stride: int = 1,
        skip_bias_add: bool = False,
        *,
        config: Any = None,
        tp: TensorParallel | None = None,
        **others: Any,
    ):
        init = _checked("ColumnParallelLinear", init_method, stride, others)
        if gather_output is None:
            gather_output = config is None and tp is None
        options = {"bias": bias, "gather_output": gather_output, "skip_bias_add": skip_bias_add}
        super().__init__(input_size, output_size, tp=tp or tensor_parallel_of(config), init=init, **options)


class RowParallelLinear(linear_layers.RowParallelLinear):
    """Z = Y B + b with B split by rows -> (z, bias or None). `input_is_parallel`: each rank has its part of y, else the whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Any = None,
        stride: int = 1,
        skip_bias_add: bool = False,
        *,
        config: Any = None,
        tp: TensorParallel | None = None,
        **others: Any,
    ):
        init = _checked("RowParallelLinear", init_method, stride, others)
        tp = tp or tensor_parallel_of(config)
        super().__init__(input_size, output_size, tp=tp, init=init, bias=bias, skip_bias_add=skip_bias_add)
        self.input_is_parallel = input_is_parallel

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().forward(y if self.input_is_parallel else mappings.scatter_last(y, self.tp.axis))


class VocabParallelEmbedding(linear_layers.VocabParallelEmbedding):
    """A table split by rows: ids [s, b] -> [s, b, h] ([s/t, b, h] with `reduce_scatter_embeddings`)."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Any = None,
        reduce_scatter_embeddings: bool = False,
        *,
        config: Any = None,
        tp: TensorParallel | None = None,
        **others: Any,
    ):
        init = _checked("VocabParallelEmbedding", init_method, 1, others)
        tp = tp or tensor_parallel_of(config)
        super().__init__(num_embeddings, embedding_dim, tp=tp, init=init)
        self.sequence_parallel = reduce_scatter_embeddings and tp.axis.size > 1


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each token. vocab_parallel_logits: [s, b, v/t]; target: [s, b] -> [s, b]."""
    return sharded_cross_entropy(vocab_parallel_logits, target, get_mesh()["tp"], label_smoothing=label_smoothing)


def _region(move: mappings.Move) -> Callable[[Tensor], Tensor]:
    """One of the moves of `mappings`, over the tensor-parallel axis of the mesh."""

    def region(x: Tensor) -> Tensor:
        return move(x, get_mesh()["tp"])

    return region


copy_to_tensor_model_parallel_region = _region(mappings.copy)
reduce_from_tensor_model_parallel_region = _region(mappings.reduce)
scatter_to_tensor_model_parallel_region = _region(mappings.scatter_last)
gather_from_tensor_model_parallel_region = _region(mappings.gather_last)
scatter_to_sequence_parallel_region = _region(mappings.scatter_sequence)
reduce_scatter_to_sequence_parallel_region = _region(mappings.reduce_scatter_sequence)


def gather_from_sequence_parallel_region(x: Tensor, tensor_parallel_output_grad: bool = True) -> Tensor:
    """`tensor_parallel_output_grad`: each rank has a part of the result's gradient, to be summed; else all have the same."""
    move = mappings.gather_sequence if tensor_parallel_output_grad else mappings.whole_sequence
    return move(x, get_mesh()["tp"])


_MOST_DIMENSIONS = 5


def broadcast_data(keys: list[str], data: dict[str, Tensor] | None, datatype: torch.dtype) -> dict[str, Tensor]:
    """The tensors `keys` of the first tensor-parallel rank's `data`, on every rank. Their shapes, which may differ, go before."""
    axis, device = get_mesh()["tp"], current().device
    shapes = torch.full((len(keys), _MOST_DIMENSIONS), -1, dtype=torch.int64)
    if axis.is_first:
        wrong = {key: data[key].dtype for key in keys if data[key].dtype != datatype}
        if wrong:
            raise TypeError(f"broadcast_data: the batch holds {wrong}, but {datatype} was asked for; convert it")
        for row, key in zip(shapes, keys):
            row[: data[key].dim()] = torch.tensor(data[key].shape)
    if axis.size > 1:
        shapes = comm.broadcast(shapes.to(device), axis)
    sizes = [tuple(n for n in row if n >= 0) for row in shapes.tolist()]
    numels = [torch.Size(size).numel() for size in sizes]
    flat = None
    if axis.is_first:
        flat = {"all": torch.cat([to_device(data[key].reshape(-1), device) for key in keys])}
    (flat,) = broadcast_batch(["all"], flat, datatype, (sum(numels),), axis, device)
    return {key: part.view(size) for key, part, size in zip(keys, flat.split(numels), sizes)}
