"""Low-rank adapters (LoRA, arXiv:2106.09685) on the parallel linears of a model, which stays as it is.

    y = W x + scale B (A dropout(x))        A [rank, in] drawn, B [out, rank] zero at first; W and everything else frozen

A fused weight (q|k|v by groups, gate|up) has one pair (A, B) for each of its row ranges, as PEFT has them, or one for all its
rows. Each pair is split over tensor-parallel ranks as its linear is: of a column-parallel linear B by rows, of a row-parallel
one A by columns. So a rank's W x and B (A x) have the same layout, and only rank-wide tensors are communicated besides.
"""

from collections.abc import Callable, Collection

from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, weight_flops
from megatron.core.ops.dropout_masks import MaskWords, column_words
from megatron.core.ops.layout_invariant_dropout import HiddenDropout, SampleDropoutKeys
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.peft.adapter_products import AdapterProducts, FusedRows, add_up_products, down_products
from megatron.core.peft.adapters import Adapted, Adapter, GivenValues, kaiming_uniform
from megatron.core.peft.lora_config import (
    PARTS,
    WHOLE,
    LoRAConfig,
    canonical_name,
    check_targets_found,
    parts_of,
    target_of,
    target_of_part,
)
from megatron.core.peft.lora_of_experts import GivenStackedLoRA, StackedLoRA
from megatron.core.sharding.placement import Constant, Placement, Rows
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.exchange_parallel_linears_for_adapters import (
    ParallelLinear,
    input_parameter,
    output_parameter,
    replace_linears,
)
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.stacked_linear import StackedLinear


class AdapterDropout(HiddenDropout):
    """Dropout of an adapter's input, the same in every layout. first_column: of the features that this rank has."""

    def __init__(self, probability: float, keys: SampleDropoutKeys, site: str, rows: SequenceShard, first_column: int):
        super().__init__(probability, keys, site, 0, rows)
        self.first_column = first_column

    def words_for(self, x: Tensor) -> MaskWords:
        """Return the words of the mask of x [s, b, features]: lines [s, b, 2], columns [features]."""
        words = super().words_for(x)
        return MaskWords(words.lines, column_words(x.shape[2], self.place_on(x.device), self.first_column))


class LoRA(Adapted):
    """A parallel linear with adapters."""

    def __init__(self, linear: ParallelLinear, adapters: dict[str, Adapter], dropout: nn.Module | None = None):
        axes = {axis.name: axis for axis in (linear.tp.axis, linear.tp.kv) if axis is not None}
        super().__init__(linear, adapters, axes)
        self.matmul_state = linear.matmul_state  # of a MatmulBackend
        self.lora_dropout = dropout
        self.rows = fused_rows(linear)
        ranks = {part: adapter.rank for part, adapter in adapters.items()}
        scale = next(iter(adapters.values())).scale  # of all parts
        self.products = AdapterProducts(self.rows, ranks, scale, linear.tp.matmul, linear.tp.weight_grads)
        for part, adapter in adapters.items():
            a = input_parameter(linear, adapter.rank, init=kaiming_uniform)
            self.add_pair(part, a, _output_parameter_of_part(linear, self.rows, part, adapter.rank))

    def inputs(self, x: Tensor) -> Tensor:
        """Return what the adapters read of x, of its shape."""
        return x if self.lora_dropout is None else self.lora_dropout(x)

    def down(self, x: Tensor) -> Tensor:
        """Return A x of all adapters, one behind another: [.., in] -> [.., sum of ranks]. Nothing is communicated."""
        return down_products(self.inputs(x), [self.pair(part)[0] for part in self.adapters], self.products)

    def with_deltas(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the linear's result for x, with scale B h added to the rows of each part.

        h: [.., sum of ranks], for the tokens of the result -> ([.., out/t], bias)
        """
        y, bias = self.linear(x)
        return add_up_products(y, h, [self.pair(part)[1] for part in self.adapters], self.products), bias

    def count_flops(self, x: LayerInput) -> Flops:
        """A frozen weight has no gradient, and the first layer's frozen input needs none."""
        flops = weight_flops(x, self.weight)
        for _, _, a, b in self.pairs():
            flops = flops + weight_flops(x, a) + weight_flops(x.after(a), b)
        return flops


class ColumnLoRA(LoRA):
    """x [s, b, in] ([s/t, b, in] under sequence parallelism) -> [s, b, out/t]"""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.down(x)  # [s, b, ranks], or [s/t, b, ranks]
        if self.tp.sequence_parallel:
            h = autograd_collectives.gather_sequence(h, self.tp.axis)  # [s, b, ranks]
        else:
            h = autograd_collectives.copy(h, self.tp.axis)  # each rank's gradient is that of its rows of B
        return self.with_deltas(x, h)


class RowLoRA(LoRA):
    """y [s, b, in/t] -> [s, b, out], or [s/t, b, out] under sequence parallelism"""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.down(x)  # [s, b, rank], this rank's term of a sum
        if self.tp.sequence_parallel:
            h = autograd_collectives.reduce_scatter_sequence(h, self.tp.axis)  # [s/t, b, rank]
        else:
            h = autograd_collectives.reduce(h, self.tp.axis)
        return self.with_deltas(x, h)


class GivenColumnLoRA(GivenValues, ColumnLoRA):
    """A `ColumnLoRA` that begins with given values."""


class GivenRowLoRA(GivenValues, RowLoRA):
    """A `RowLoRA` that begins with given values."""


# ---------------------------------------------------------------- parts of fused linears


def fused_rows(linear: ParallelLinear) -> FusedRows:
    """Return the parts of a linear's rows on this rank, for q|k|v by groups and gate|up."""
    placement = linear.weight.placement
    local = linear.weight.shape[0]
    qkv, gated = PARTS["linear_qkv"], PARTS["linear_fc1"]
    if len(placement.interleaved) == len(qkv):
        sizes = dict(zip(qkv, placement.interleaved))
        if placement.rows:  # more ranks than key/value heads: some of a group's queries, its key and its value
            queries = placement.rows[0]
            sizes[qkv[0]] = queries.stop - queries.start
        return FusedRows(sizes, local // sum(sizes.values()))
    if isinstance(linear, ColumnParallelLinear) and len(linear.blocks) == len(gated):
        ranks = linear.tp.axis.size
        return FusedRows({part: block // ranks for part, block in zip(gated, linear.blocks)}, 1)
    return FusedRows({WHOLE: local}, 1)


def _output_parameter_of_part(linear: ParallelLinear, rows: FusedRows, part: str, rank: int) -> nn.Parameter:
    """Make B of a part: [rows of the part, rank], of which this rank has those that it has of the linear's rows."""
    init = Constant(0.0)
    if part == WHOLE:
        return output_parameter(linear, rank, init=init)
    fused = linear.weight.placement
    if fused.interleaved:
        width = dict(zip(rows.sizes, fused.interleaved))[part]  # rows in a whole group
        groups = fused.shape[0] // sum(fused.interleaved)
    else:
        width, groups = linear.blocks[list(rows.sizes).index(part)], 1
    shape = (groups * width, rank)
    local = (rows.groups * rows.sizes[part], rank)
    if not fused.rows:
        return linear.tp.parameter(local, Placement(shape, init, shard={linear.tp.axis.name: 0}))
    queries, keys_and_values = fused.rows
    group, first = divmod(queries.start, sum(fused.interleaved))
    if part == PARTS["linear_qkv"][0]:
        start = group * width + first
        own = Rows(start, start + local[0])
    else:
        own = Rows(group * width, (group + 1) * width, shared_over=keys_and_values.shared_over)
    return linear.tp.parameter(local, Placement(shape, init, rows=(own,)))


# ---------------------------------------------------------------- a model


def add_lora(
    chunk: nn.Module,
    config: LoRAConfig,
    *,
    whole: Collection[str] = (),
    values: Callable[[str, str], tuple[Tensor, Tensor]] | None = None,
    keys: SampleDropoutKeys | None = None,
    rows_of_sample: SequenceShard = SequenceShard(),  # noqa: B008  (frozen)
    elsewhere: Collection[str] = (),
) -> list[str]:
    """Freeze a model chunk and give its linears adapters; return the names of those with one.

    whole: fused linears that all-linear gives one adapter for all rows, as it does experts' gate|up. values(name, part): the
    (A, B) with which the adapter of a linear begins, where no checkpoint has it. keys, rows_of_sample: of the chunk's
    `LayerContext`, for dropout. elsewhere: linears that the model has in other chunks, perhaps. Raises ConfigError for targets
    that the chunk's layers lack, and for dropout of experts' inputs.
    """
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    found: dict[str, set[str]] = {}
    linears: set[str] = set()  # of the chunk, by their targets

    def make(name: str, linear: ParallelLinear | StackedLinear) -> nn.Module | None:
        is_stacked = isinstance(linear, StackedLinear)
        target = target_of(name)
        linears.add(target)
        rows = StackedLoRA.rows_of(linear) if is_stacked else fused_rows(linear)
        parts = parts_of(target, len(rows.sizes) > 1, config.lora_target_modules, whole)
        if not parts:
            return None
        adapters = {}
        for part in parts:
            begins_with = None if values is None else values(name, part)
            adapters[part] = Adapter(config.rank_of(target_of_part(target, part)), config.scale, begins_with)
        found.setdefault(target, set()).update(target_of_part(target, part) for part in adapters)
        if is_stacked:
            if config.lora_dropout > 0:
                raise ConfigError(
                    f"--lora-dropout {config.lora_dropout}: adapters of experts ({target}) have no dropout of their inputs, as "
                    "in PEFT; leave the flag out, or give --lora-target-modules without the experts, such as linear_qkv "
                    "linear_proj"
                )
            return (StackedLoRA if values is None else GivenStackedLoRA)(linear, adapters)
        is_column = isinstance(linear, ColumnParallelLinear)
        dropout = None
        if config.lora_dropout > 0:
            dropout = _dropout(name, linear, config.lora_dropout, keys, rows_of_sample)
        if values is None:
            return (ColumnLoRA if is_column else RowLoRA)(linear, adapters, dropout)
        return (GivenColumnLoRA if is_column else GivenRowLoRA)(linear, adapters, dropout)

    names = replace_linears(chunk, make, output_layer=True, experts=True)
    if linears - {"output_layer"}:
        own = [name for name in config.lora_target_modules if canonical_name(name) != "output_layer"]
        check_targets_found(own, found, elsewhere=elsewhere, linears=linears)
    return names


def adapter_names(chunk: nn.Module) -> set[str]:
    """Return the names of the parameters of a model chunk that adapters have added."""
    names = set()
    for path, module in chunk.named_modules():
        if isinstance(module, Adapted):
            names |= {
                f"{path}.{name}" for name, _ in module.named_parameters(recurse=False) if name.startswith("lora_")
            }
    return names


def _dropout(
    name: str, linear: ParallelLinear, probability: float, keys: SampleDropoutKeys, rows: SequenceShard
) -> AdapterDropout:
    """Return the dropout of an adapter's input. rows: those of a sample that this rank has between layers."""
    if isinstance(linear, RowParallelLinear):
        first_column = linear.tp.axis.rank * linear.weight.shape[1]
        return AdapterDropout(probability, keys, f"lora {name}", rows.within_layers, first_column)
    return AdapterDropout(probability, keys, f"lora {name}", rows, 0)
