"""Linear layers and the embedding, split over the tensor-parallel axis.

Column-parallel followed by row-parallel needs one collective each way:

    Y = GeLU(X A),  Z = Y B          A = [A_1 A_2]      B = [B_1]       rank i:  Y_i = GeLU(X A_i),  Z = sum_i Y_i B_i
                                                            [B_2]
                        forward                           backward
    tensor parallel     all-reduce of Z                   all-reduce of dX
    with sequence       all-gather of X,                  all-gather of dZ (and of X once more),
    parallelism         reduce-scatter of Z               reduce-scatter of dX
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.init import xavier_normal_

from megatron.core.ops.count_flops_by_module import Flops, LayerInput, weight_flops
from megatron.core.ops.cpu_half_precision_matmul import NATIVE, MatmulModes
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_global_state
from megatron.core.parallel.rank_grid import Axis
from megatron.core.process_groups_config import check_group
from megatron.core.sharding.initial_values import draw_parameter_seed, initialize_parameter
from megatron.core.sharding.placement import Constant, InitialValue, Normal, Placement, Rows
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.autograd_collectives import AutogradCollective
from megatron.core.tensor_parallel.embedding_grad_in_buffer_dtype import lookup
from megatron.core.tensor_parallel.linear_autograd import LinearFunction, TorchMatmul, linear
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend
from megatron.core.tensor_parallel.token_id_check import check_token_ids


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that split a layer's weights, and the dtype, device and matmul modes of its tensors.

    Layers take it as `tp`; `sequence_parallel`: hidden states between layers are [s/t, b, h] instead of [s, b, h].
    """

    axis: Axis
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    weight_grads: WeightGradStore = field(default_factory=WeightGradStore)  # takes deferred weight gradients
    kv: Axis | None = None  # neighbours on `axis` that share one key/value head, if there are more ranks than heads
    matmul_modes: MatmulModes = NATIVE  # how a CPU multiplies in half precision
    # Initialize parameters when they are made; False if `initialize_parameters` or a checkpoint does it later, by name.
    fills: bool = True
    # The products of all linears and of the output layer; None: torch's, as matmul_modes says. Attention is not among them.
    matmul_backend: MatmulBackend | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.matmul_backend, MatmulBackend | None):
            raise TypeError(
                f"matmul_backend={self.matmul_backend!r} is no MatmulBackend; give an object of a class that inherits "
                "megatron.core.tensor_parallel.matmul_backend_interface.MatmulBackend, or None for torch's products"
            )

    @cached_property
    def matmul(self) -> MatmulBackend:
        """The backend of this model's products."""
        return self.matmul_backend or TorchMatmul(self.matmul_modes)

    def matmul_state(self, placement: Placement, local_shape: tuple[int, ...] | None = None) -> nn.Module | None:
        """Return the backend's state of a weight with this placement. A layer holds it, and passes it with the weight.

        local_shape: of this rank's part, with padding; default: that of the placement.
        """
        return self.matmul.state_of_part(placement, local_shape or placement.shape, self.dtype, self.device)

    @property
    def sequence_axis(self) -> Axis | None:
        """The axis that shards the sequence between layers; None under no sequence parallelism."""
        return self.axis if self.sequence_parallel else None

    def column_linear(self, x: Tensor, weight: Tensor, state: nn.Module | None = None) -> Tensor:
        """Return x A_i, for this rank's columns: weight [out/t, in] -> [s, b, out/t].

        x: [s, b, in], or [s/t, b, in] under sequence parallelism. state: of `matmul_state` for the weight. Every
        rank of the axis must call.
        """
        is_sharded = self.sequence_parallel and self.axis.size > 1
        return LinearFunction.apply(x, weight, self.axis, is_sharded, self.weight_grads, self.matmul, state)

    def linear(self, x: Tensor, weight: Tensor, state: nn.Module | None = None) -> Tensor:
        """Return x W^T, without communication. x: [.., in], weight: [out, in] -> [.., out]

        state: of `matmul_state` for the weight.
        """
        return linear(x, weight, store=self.weight_grads, matmul=self.matmul, state=state)

    def parameter(self, local_shape: tuple[int, ...], placement: Placement, axes: Sequence[Axis] = ()) -> nn.Parameter:
        """Make a parameter of `local_shape` with its placement and this rank's part of its initial value.

        The whole tensor has the same values in every layout. local_shape: of this rank's shard; the placement
        has the full shape. The seed comes from torch's generator, so every rank must make the same parameters in
        the same order. axes: those besides `axis` that shard it, as of experts.
        """
        parameter = nn.Parameter(torch.empty(local_shape, dtype=self.dtype, device=self.device))
        parameter.placement = placement
        if self.fills:
            needs_seed = not isinstance(placement.init, Constant | None)
            seed = draw_parameter_seed() if needs_seed else 0
            initialize_parameter(parameter, seed, "", {axis.name: axis for axis in (self.axis, *axes)})
        return parameter

    def replicated(self, shape: tuple[int, ...], init: InitialValue, *, partial: bool | None = None) -> nn.Parameter:
        """Make a parameter of `shape` that every tensor-parallel rank has a full copy of.

        partial: each rank's gradient is a partial sum, to be all-reduced over the axis. Default: under sequence
        parallelism, where each rank applies the parameter to its part of the sequence.
        """
        return self.parameter(shape, self.replicated_placement(shape, init, partial=partial))

    def replicated_placement(
        self, shape: tuple[int, ...], init: InitialValue | None = None, *, partial: bool | None = None
    ) -> Placement:
        """Return the placement of a tensor of `shape` that every tensor-parallel rank has a full copy of.

        partial: a rank's gradient, or its value of a buffer in a step, is a part. Default: under sequence parallelism.
        """
        if partial is None:
            partial = self.sequence_parallel
        partial_grad = (self.axis.name,) if partial else ()
        return Placement(shape, init, replicated_over=(self.axis.name,), partial_grad=partial_grad)


def size_per_rank(what: str, size: int, axis: Axis) -> int:
    """Return `size` / ranks of the axis. Raises ValueError, which names `what`, if it does not divide."""
    if size % axis.size:
        raise ValueError(f"{what} ({size}) must be a multiple of the tensor-parallel size ({axis.size})")
    return size // axis.size


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
    sequence_parallel = getattr(config, "sequence_parallel", process.sequence_parallel)
    return TensorParallel(
        process.mesh["tp"],
        sequence_parallel and process.mesh["tp"].size > 1,
        getattr(config, "params_dtype", torch.get_default_dtype()),
        process.device,
        kv=process.mesh["kv"],
        matmul_modes=process.matmul_modes or NATIVE,
        fills=not process.defers_initialization,
    )


def _initial_value(layer: str, init: InitialValue | None, init_method: Any, stride: int, others: Any) -> InitialValue:
    """Return the initial value, ours or Megatron's. TypeError for arguments of Megatron's that are not built."""
    unsupported = []
    for name, value in others.items():
        if name == "tp_group":
            check_group(value, "tp", f"{layer}: tp_group")
        elif name != "tp_comm_buffer_name" and (name not in _WITHOUT_EFFECT or value):
            unsupported.append(name)
    if stride != 1:
        unsupported.append(f"stride={stride} (fused parts are `blocks`)")
    if unsupported:
        raise TypeError(f"{layer}: not built: {', '.join(unsupported)}")
    if init is not None:
        return init
    init_method = init_method or xavier_normal_
    if not isinstance(init_method, Normal | Constant) and not callable(init_method):
        raise TypeError(
            f"{layer}: init_method must be init_method_normal(std), scaled_init_method_normal(std, layers) or a "
            "function of the unsharded tensor, such as torch.nn.init.xavier_normal_, not "
            f"{type(init_method).__name__}"
        )
    return init_method


class ColumnParallelLinear(nn.Module):
    """Y = X A + b with A split by columns: each rank computes `output_size / t` of the features.

    forward(x): x [s, b, in], or [s/t, b, in] under sequence parallelism -> (y [s, b, out/t], None). With
    `gather_output` y is [s, b, out]. With `skip_bias_add` the bias [out/t] is returned instead of added: (y, bias).
    Every rank of the axis must call. Raises ValueError if the ranks do not divide the output.

    Megatron's arguments, and ours by name. tp: the ranks; default: those of the process for Megatron's `config`, asked
    once, here. init: the initial value, in the place of `init_method`. gather_output: default False; without `config`
    and `tp` True, as in early Megatron.
    blocks: sizes of fused parts of the output (gate|up); each is sharded by itself. rows: this rank's features, if they
    are not an equal share. interleaved: sizes of the fused parts of a group of features (q|k|v), if such groups repeat.
    init_per_matrix: each fused part has the initial value of a weight of its own, by its own fans.
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
        init: InitialValue | None = None,
        blocks: tuple[int, ...] = (),
        rows: tuple[Rows, ...] = (),
        interleaved: tuple[int, ...] = (),
        init_per_matrix: bool = False,
        **others: Any,
    ):
        super().__init__()
        others["keep_master_weight_for_test"] = keep_master_weight_for_test
        init = _initial_value("ColumnParallelLinear", init, init_method, stride, others)
        if gather_output is None:
            gather_output = config is None and tp is None
        tp = tp or tensor_parallel_of(config)
        self.tp = tp
        self.blocks = blocks
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        if rows:
            local_size = sum(run.stop - run.start for run in rows)
            sharding = {"rows": rows}
        else:
            local_size = 0
            for block in blocks or (output_size,):
                local_size += size_per_rank("output size of a column-parallel layer", block, tp.axis)
            sharding = {"shard": {tp.axis.name: 0}, "blocks": blocks}
        sizes = (output_size, input_size)
        weight_placement = Placement(sizes, init, interleaved=interleaved, init_per_matrix=init_per_matrix, **sharding)
        self.weight = tp.parameter((local_size, input_size), weight_placement)
        self.matmul_state = tp.matmul_state(weight_placement, tuple(self.weight.shape))
        self.bias = None
        if bias:
            self.bias = tp.parameter((local_size,), Placement((output_size,), Constant(0.0), **sharding))

    @classmethod
    def of_weight(
        cls, weight: nn.Parameter, *, tp: TensorParallel, matmul_state: nn.Module | None = None
    ) -> "ColumnParallelLinear":
        """Return the linear of a weight [out/t, in] that exists, such as the output layer's, without a bias."""
        linear = cls.__new__(cls)
        nn.Module.__init__(linear)
        linear.tp = tp
        linear.blocks = ()
        linear.gather_output = False
        linear.skip_bias_add = False
        linear.weight = weight
        linear.matmul_state = matmul_state
        linear.bias = None
        return linear

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.tp.column_linear(x, self.weight, self.matmul_state)  # [s, b, out/t]
        if self.bias is not None and not self.skip_bias_add:
            y = y.add_(self.bias)  # in place: no backward needs the product without its bias
        if self.gather_output:
            y = autograd_collectives.gather_last(y, self.tp.axis)  # [s, b, out]
            y = _reorder_gathered_blocks(y, self.blocks, self.tp.axis.size)
        return y, self.bias if self.skip_bias_add else None

    def count_flops(self, x: LayerInput) -> Flops:
        return weight_flops(x, self.weight)


def _reorder_gathered_blocks(y: Tensor, blocks: tuple[int, ...], ranks: int) -> Tensor:
    """Reorder gathered parts of fused blocks, last dimension [g0 u0 | g1 u1], to [g0 g1 | u0 u1]."""
    if len(blocks) < 2 or ranks == 1:
        return y
    local_blocks = [block // ranks for block in blocks]
    by_rank = [shard.split(local_blocks, dim=-1) for shard in y.chunk(ranks, dim=-1)]  # [rank][block]
    parts = []
    for parts_of_block in zip(*by_rank):  # of one block, by rank
        parts.extend(parts_of_block)
    return torch.cat(parts, dim=-1)


class RowParallelLinear(nn.Module):
    """Z = Y B + b with B split by rows; the ranks' products are summed. The second half of a column-parallel layer.

    forward(y): y [s, b, in/t] -> (z, None) with z [s, b, out], or [s/t, b, out] under sequence parallelism. The bias is
    added once, after the sum; with `skip_bias_add` it is returned instead: (z, bias [out]). Every rank of the axis must
    call. Raises ValueError if the ranks do not divide the input.

    Megatron's arguments, and ours by name. tp, init: as of a `ColumnParallelLinear`. input_is_parallel False: y is
    [s, b, in], equal on all ranks, and each takes its part; default: False, as in Megatron, and True with `init`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool | None = None,
        init_method: Any = xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        config: Any = None,
        tp: TensorParallel | None = None,
        init: InitialValue | None = None,
        **others: Any,
    ):
        super().__init__()
        self.input_is_parallel = init is not None if input_is_parallel is None else input_is_parallel
        others["keep_master_weight_for_test"] = keep_master_weight_for_test
        init = _initial_value("RowParallelLinear", init, init_method, stride, others)
        tp = tp or tensor_parallel_of(config)
        self.tp = tp
        self.skip_bias_add = skip_bias_add
        self.sum_over_ranks = _sum_over_ranks(tp.sequence_parallel)
        local_size = size_per_rank("input size of a row-parallel layer", input_size, tp.axis)
        weight_placement = Placement((output_size, input_size), init, shard={tp.axis.name: 1})
        self.weight = tp.parameter((output_size, local_size), weight_placement)
        self.matmul_state = tp.matmul_state(weight_placement, tuple(self.weight.shape))
        self.bias = tp.replicated((output_size,), Constant(0.0)) if bias else None

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel:
            y = autograd_collectives.scatter_last(y, self.tp.axis)  # [s, b, in/t]
        z = self.tp.linear(y, self.weight, self.matmul_state)  # [s, b, out], this rank's term of the sum
        z = self.sum_over_ranks(z, self.tp.axis)  # [s, b, out] or [s/t, b, out]
        if self.skip_bias_add:
            return z, self.bias
        if self.bias is not None:
            z = z.add_(self.bias)
        return z, None

    def count_flops(self, x: LayerInput) -> Flops:
        return weight_flops(x, self.weight)


def _sum_over_ranks(sequence_parallel: bool) -> AutogradCollective:
    """Return the collective that ends a tensor-parallel block."""
    if sequence_parallel:
        return autograd_collectives.reduce_scatter_sequence  # [s, b, h] -> [s/t, b, h]
    return autograd_collectives.reduce  # [s, b, h] -> [s, b, h]


class VocabParallelEmbedding(nn.Module):
    """An embedding split over the vocabulary: each rank looks up its own tokens, and the results are summed.

    forward(ids): [s, b] -> [s, b, h], or [s/t, b, h] under sequence parallelism. Every rank of the axis must call.
    Raises ConfigError for an id outside the vocabulary (`check_token_ids`). The local weight has `padded_size / t`
    rows; rows beyond `num_embeddings` are zero, never looked up and never trained.

    Megatron's arguments, and ours by name. tp, init: as of a `ColumnParallelLinear`. reduce_scatter_embeddings: whether
    the result is [s/t, b, h]; default: False, as in Megatron, and with `init` under sequence parallelism.
    ends: the axis of the first and the last stage, where the last one ties its output layer to this weight and makes it
    at the same time.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Any = xavier_normal_,
        reduce_scatter_embeddings: bool | None = None,
        *,
        config: Any = None,
        tp: TensorParallel | None = None,
        init: InitialValue | None = None,
        padded_size: int | None = None,
        ends: Axis | None = None,
        **others: Any,
    ):
        super().__init__()
        if reduce_scatter_embeddings is None:
            reduce_scatter_embeddings = init is not None and tp is not None and tp.sequence_parallel
        init = _initial_value("VocabParallelEmbedding", init, init_method, 1, others)
        tp = tp or tensor_parallel_of(config)
        self.axis = tp.axis
        self.sequence_parallel = reduce_scatter_embeddings and tp.axis.size > 1
        self.num_embeddings = num_embeddings
        rows = size_per_rank("padded vocabulary", padded_size or num_embeddings, tp.axis)
        self.first = tp.axis.rank * rows
        self.last = min(self.first + rows, num_embeddings)  # exclusive; the rows beyond it are padding

        # A tied weight is replicated on two stages; each has a partial gradient, of the embedding or the output layer.
        tied_over = (ends.name,) if ends is not None and ends.size > 1 else ()
        placement = Placement(
            (num_embeddings, embedding_dim),
            init,
            shard={tp.axis.name: 0},
            replicated_over=tied_over,
            partial_grad=tied_over,
        )
        self.weight = tp.parameter((rows, embedding_dim), placement)
        self.weight.shared_embedding = ends is not None  # Megatron's name
        if tied_over and tp.fills and not self.weight.is_meta:  # made on the meta device it has no values
            collectives.broadcast(self.weight.data, ends)  # stages with different seeds draw different values

    def forward(self, ids: Tensor) -> Tensor:
        check_token_ids(ids, self.num_embeddings, "the tokens")
        if self.axis.size == 1:
            return lookup(ids, self.weight)  # [s, b, h]
        # Tokens of other ranks' rows give zeros here, so the sum over the ranks has each token's row once.
        is_elsewhere = (ids < self.first) | (ids >= self.last)  # [s, b]
        local_ids = (ids - self.first).masked_fill(is_elsewhere, 0)
        embedded = lookup(local_ids, self.weight)  # [s, b, h]
        embedded = embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return _sum_over_ranks(self.sequence_parallel)(embedded, self.axis)  # [s, b, h] or [s/t, b, h]

    def count_flops(self, x: LayerInput) -> Flops:
        return Flops()  # a lookup is no product


def local_sequence_slice(length: int, tp: TensorParallel) -> slice:
    """Return the positions of a sequence of `length` tokens that this rank has between layers."""
    return collectives.local_slice(length, tp.axis) if tp.sequence_parallel else slice(0, length)
