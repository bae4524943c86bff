"""Linear layers and the embedding, split over the tensor-parallel axis.

Column-parallel followed by row-parallel needs one collective each way:

    Y = GeLU(X A),  Z = Y B          A = [A_1 A_2]      B = [B_1]       rank i:  Y_i = GeLU(X A_i),  Z = sum_i Y_i B_i
                                                            [B_2]
                        forward                           backward
    tensor parallel     all-reduce of Z                   all-reduce of dX
    with sequence       all-gather of X,                  all-gather of dZ (and of X once more),
    parallelism         reduce-scatter of Z               reduce-scatter of dX
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.core.ops.cpu_half_precision_matmul import NATIVE, Products
from megatron.core.ops.deferred_wgrad import WeightGradStore
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.sharding.initial_values import initialize_parameter, seed_of_next_parameter
from megatron.core.sharding.placement import Constant, InitialValue, Placement, Rows
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.embedding_grad_accumulation import lookup
from megatron.core.tensor_parallel.linear_autograd import LinearFunction, linear
from megatron.core.tensor_parallel.token_id_check import check_word_ids


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share a layer, and the properties of the tensors that it makes."""

    axis: Axis
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    weight_grads: WeightGradStore = field(default_factory=WeightGradStore)
    kv: Axis | None = None  # neighbours on `axis` that share one key/value head, if there are more ranks than heads
    products: Products = NATIVE  # how a CPU multiplies in half precision
    # Initialize parameters when they are made; False if `initialize_parameters` or a checkpoint does it later, by name.
    fills: bool = True

    @property
    def sequence_axis(self) -> Axis | None:
        """The axis that shards the sequence between layers, None if none does."""
        return self.axis if self.sequence_parallel else None

    def column_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x A_i, for this rank's columns. x: [s, b, in], or [s/t, b, in] under sequence parallelism; weight: [out/t, in]
        -> [s, b, out/t]. Every rank of the axis must call."""
        divided = self.sequence_parallel and self.axis.size > 1
        return LinearFunction.apply(x, weight, self.axis, divided, self.weight_grads, self.products)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [.., in] times weight [out, in] transposed -> [.., out], without communication."""
        return linear(x, weight, store=self.weight_grads, products=self.products)

    def parameter(self, local_shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
        """A parameter with its placement and this rank's part of its initial value, the same values in every layout.

        The seed comes from torch's generator, so every rank must make the same parameters in the same order.
        """
        parameter = nn.Parameter(torch.empty(local_shape, dtype=self.dtype, device=self.device))
        parameter.placement = placement
        if self.fills:
            seed = 0 if isinstance(placement.init, Constant | None) else seed_of_next_parameter()
            initialize_parameter(parameter, seed, "", {self.axis.name: self.axis})
        return parameter

    def replicated(self, shape: tuple[int, ...], init: InitialValue, *, partial: bool | None = None) -> nn.Parameter:
        """A parameter that every tensor-parallel rank holds whole.

        Under sequence parallelism each rank applies it to a part of the sequence and has a partial gradient; `partial`
        overrides that.
        """
        parts = (self.axis.name,) if (self.sequence_parallel if partial is None else partial) else ()
        return self.parameter(shape, Placement(shape, init, replicated_over=(self.axis.name,), partial_grad=parts))


def size_per_rank(what: str, size: int, axis: Axis) -> int:
    """`size` / ranks of the axis. Raises ValueError, which names `what`, if it does not divide."""
    if size % axis.size:
        raise ValueError(f"{what} ({size}) must be a multiple of the tensor-parallel size ({axis.size})")
    return size // axis.size


class ColumnParallelLinear(nn.Module):
    """Y = X A + b with A split by columns: each rank computes `output_size / t` of the features.

    forward(x): x [s, b, in], or [s/t, b, in] under sequence parallelism -> (y [s, b, out/t], None). With
    `gather_output` y is [s, b, out]. With `skip_bias_add` the bias is returned instead of added: (y, bias).
    blocks: sizes of fused parts of the output (gate|up); each is sharded by itself. rows: this rank's features, if they
    are not an equal share. interleaved: sizes of the fused parts of a group of features (q|k|v), if such groups repeat.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: TensorParallel,
        init: InitialValue,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        blocks: tuple[int, ...] = (),
        rows: tuple[Rows, ...] = (),
        interleaved: tuple[int, ...] = (),
    ):
        super().__init__()
        self.tp, self.blocks = tp, blocks
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        if rows:
            local, division = sum(run.stop - run.start for run in rows), {"rows": rows}
        else:
            parts = [
                size_per_rank("output size of a column-parallel layer", part, tp.axis)
                for part in blocks or (output_size,)
            ]
            local, division = sum(parts), {"shard": {tp.axis.name: 0}, "blocks": blocks}
        placement = Placement((output_size, input_size), init, interleaved=interleaved, **division)
        self.weight = tp.parameter((local, input_size), placement)
        self.bias = tp.parameter((local,), Placement((output_size,), Constant(0.0), **division)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.tp.column_linear(x, self.weight)
        if self.bias is not None and not self.skip_bias_add:
            y = y.add_(self.bias)  # no backward needs the product without its bias
        if self.gather_output:
            y = _whole_blocks(autograd_collectives.gather_last(y, self.tp.axis), self.blocks, self.tp.axis.size)
        return y, self.bias if self.skip_bias_add else None


def _whole_blocks(y: Tensor, blocks: tuple[int, ...], ranks: int) -> Tensor:
    """Reorder gathered parts of fused blocks, [g0 u0 | g1 u1], to [g0 g1 | u0 u1]."""
    if len(blocks) < 2 or ranks == 1:
        return y
    by_rank = [part.split([block // ranks for block in blocks], dim=-1) for part in y.chunk(ranks, dim=-1)]
    return torch.cat([part for by_block in zip(*by_rank) for part in by_block], dim=-1)


class RowParallelLinear(nn.Module):
    """Z = Y B + b with B split by rows; the ranks' products are summed. The second half of a column-parallel layer.

    forward(y): y [s, b, in/t] -> (z, None) with z [s, b, out], or [s/t, b, out] under sequence parallelism. The bias is
    added once, after the sum; with `skip_bias_add` it is returned instead: (z, bias).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: TensorParallel,
        init: InitialValue,
        bias: bool = True,
        skip_bias_add: bool = False,
    ):
        super().__init__()
        self.tp, self.skip_bias_add = tp, skip_bias_add
        self.leave = (
            autograd_collectives.reduce_scatter_sequence if tp.sequence_parallel else autograd_collectives.reduce
        )
        columns = size_per_rank("input size of a row-parallel layer", input_size, tp.axis)
        self.weight = tp.parameter(
            (output_size, columns), Placement((output_size, input_size), init, shard={tp.axis.name: 1})
        )
        self.bias = tp.replicated((output_size,), Constant(0.0)) if bias else None

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        z = self.leave(self.tp.linear(y, self.weight), self.tp.axis)
        if self.skip_bias_add:
            return z, self.bias
        return z if self.bias is None else z.add_(self.bias), None


class VocabParallelEmbedding(nn.Module):
    """A table of `num_embeddings` rows split by rows: each rank looks up its own words, and the results are summed.

    forward(ids): [s, b] -> [s, b, h], or [s/t, b, h] under sequence parallelism. The local table has `padded_size / t`
    rows; rows beyond `num_embeddings` are zero, never looked up and never trained.
    ends: the axis of the stage that holds the same table (tied output layer) and makes it at the same time.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: TensorParallel,
        init: InitialValue,
        padded_size: int | None = None,
        ends: Axis | None = None,
    ):
        super().__init__()
        self.axis, self.sequence_parallel = tp.axis, tp.sequence_parallel
        self.num_embeddings = num_embeddings
        rows = size_per_rank("padded vocabulary", padded_size or num_embeddings, tp.axis)
        self.first = tp.axis.rank * rows
        self.last = min(self.first + rows, num_embeddings)  # exclusive; the rows beyond it are padding
        tied = (ends.name,) if ends is not None and ends.size > 1 else ()
        self.weight = tp.parameter(
            (rows, embedding_dim),
            Placement(
                (num_embeddings, embedding_dim), init, shard={tp.axis.name: 0}, replicated_over=tied, partial_grad=tied
            ),
        )
        self.weight.shared_embedding = ends is not None  # Megatron's name
        if tied and tp.fills and not self.weight.is_meta:  # made on the meta device it has no values
            collectives.broadcast(self.weight.data, ends)  # stages with different seeds draw different values

    def forward(self, ids: Tensor) -> Tensor:
        check_word_ids(ids, self.num_embeddings, "the tokens")
        if self.axis.size == 1:
            return lookup(ids, self.weight)  # [s, b, h]
        elsewhere = (ids < self.first) | (ids >= self.last)
        found = lookup((ids - self.first).masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        leave = autograd_collectives.reduce_scatter_sequence if self.sequence_parallel else autograd_collectives.reduce
        return leave(found, self.axis)  # [s, b, h] or [s/t, b, h]


def my_sequence_part(length: int, tp: TensorParallel) -> slice:
    """The positions of the sequence that this rank holds between layers."""
    return collectives.my_part(length, tp.axis) if tp.sequence_parallel else slice(0, length)
