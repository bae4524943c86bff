"""Adapters of experts' stacked weights as PEFT has them: `target_parameters` of transformers 5's modules of experts.

    mlp.experts.lora_A.weight [E rank, in], .lora_B.weight [out, rank E]              of down_proj, or of gate_up_proj alone
    mlp.experts.base_layer.lora_A.weight, .lora_B.weight                              of gate_up_proj beside it

Row e rank + j of A, and column j E + e of B, are those of expert e. Ours are [E, rank, in] and [E, .., rank].
"""

import re
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.convert.families.hf_family_fields_and_param_mappings import Family
from megatron.convert.families.strided_views_of_hf_weights import OPERATIONS, HeadCounts
from megatron.convert.open_hf_safetensors_folder import param_mappings
from megatron.convert.plan_hf_folder import to_hf_tensors
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.peft.lora_config import PARTS
from megatron.core.transformer.model_config import ModelConfig

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_IN_TURN = "stacked_gate_up_in_turn"  # rows of gate and up, one of each in turn
# The block around a layer's experts, which is mlp in other architectures.
_BLOCKS = dict.fromkeys(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), "block_sparse_moe")


class Pair(NamedTuple):
    """A [rank, in] and B [out, rank]; of experts [E, rank, in] and [E, .., rank]."""

    a: Tensor
    b: Tensor


class ExpertsInHF(NamedTuple):
    """One stacked linear of ours, and the parameter of transformers 5 with its matrices."""

    linear: str  # its name in our model
    operation: str  # of `weight_layout`, from the tensors of their files to ours
    module: str  # theirs
    parameter: str  # of the module
    tensors: tuple[str, ...]  # of their files
    shape: tuple[int, int, int]  # experts, rows and columns of a matrix

    @property
    def name(self) -> str:
        """The parameter's whole name."""
        return f"{self.module}.{self.parameter}"

    @property
    def target(self) -> str:
        """The parameter's name in every layer, as a target parameter of PEFT."""
        return re.sub(r"^model\.layers\.\d+\.", "", self.name)

    @property
    def parts(self) -> tuple[str, ...]:
        """Our names of its parts."""
        return PARTS["linear_fc1"] if self.parameter == GATE_UP else ()

    def shapes(self, heads: HeadCounts) -> list[tuple[int, ...]]:
        """Return the shapes of `tensors`."""
        experts, rows, columns = self.shape
        ours = (experts, 2, rows // 2, columns) if self.parameter == GATE_UP else self.shape
        return OPERATIONS[self.operation].shapes(heads, ours)

    def prefix(self, parameters: Collection[str]) -> str:
        """Return what the names of the factors begin with. parameters: those of the module that have an adapter.

        PEFT wraps a module once for each of them, in the order of the module.
        """
        return f"{self.module}.base_layer" if self.parameter == GATE_UP and DOWN in parameters else self.module

    def from_peft(self, a: Tensor, b: Tensor) -> Pair:
        """Return the pair as ours. Raises ConfigError for other shapes than the model's."""
        experts, rows, columns = self.shape
        rank = a.shape[0] // experts
        if a.shape != (experts * rank, columns) or b.shape != (rows, rank * experts):
            raise ConfigError(
                f"the adapter of {self.name} has shapes {list(a.shape)} and {list(b.shape)}, and the model's "
                f"{experts} experts have {rows} x {columns} each; is it an adapter of this base?"
            )
        b = b.reshape(rows, rank, experts).permute(2, 0, 1)  # [E, out, rank]
        if self.operation == _IN_TURN:
            b = b.unflatten(1, (-1, 2)).transpose(1, 2)
        elif self.parameter == GATE_UP:
            b = b.unflatten(1, (2, -1))
        return Pair(a.reshape(experts, rank, columns), b.contiguous())

    def to_peft(self, pair: Pair) -> Pair:
        """Return a pair of ours, for all rows, as PEFT's."""
        b = pair.b.transpose(1, 2) if self.operation == _IN_TURN else pair.b
        experts, *_, rank = b.shape
        rows = b.reshape(experts, -1, rank).permute(1, 2, 0)  # [out, rank, E]
        return Pair(pair.a.flatten(0, 1), rows.flatten(1).contiguous())

    def delta(self, pair: Pair, number: int, heads: HeadCounts) -> Tensor:
        """Return B A of a pair of ours, as the tensor `tensors[number]` of their files has its elements."""
        if len(self.tensors) == 1:  # a stack
            product = pair.b.flatten(1, -2) @ pair.a
            (delta,) = to_hf_tensors(self.operation, heads, product.view(*pair.b.shape[:-1], -1))
            return delta
        per_expert = len(self.tensors) // len(pair.a)
        expert, part = divmod(number, per_expert)
        return pair.b[expert].view(per_expert, -1, pair.b.shape[-1])[part] @ pair.a[expert]


def experts_in_hf(family: Family, model: ModelConfig) -> Iterator[ExpertsInHF]:
    """Yield the stacked linears of a model's experts."""
    for mapping in param_mappings(family, model):
        linear, _, name = mapping.param.rpartition(".")
        found = re.search(r"\.layers\.(\d+)\.mlp\.experts\.(linear_fc[12])$", linear)
        if found is None or name != "weight":
            continue
        layer, last = found.groups()
        h, f = model.hidden_size, model.expert_ffn_size
        parameter, rows, columns = (GATE_UP, 2 * f, h) if last == "linear_fc1" else (DOWN, h, f)
        # by transformers' own name, also where files have another one
        module = f"model.layers.{layer}.{_BLOCKS.get(family.architecture, 'mlp')}.experts"
        shape = (model.num_experts, rows, columns)
        yield ExpertsInHF(linear, mapping.operation, module, parameter, mapping.hf_params, shape)


def one_by_one(experts: ExpertsInHF, take: Callable[[str], Pair | None]) -> Iterator[tuple[int, Pair]]:
    """Yield (number of a part, pair of ours) of experts that had a module each, as in transformers 4.

    take: module -> its pair (A [rank, in], B [out, rank]), or None; it is asked for all modules.
    """
    parts = len(experts.tensors) // experts.shape[0]
    if not parts:  # a stack in the files, too
        return
    for part in range(parts):
        pairs = [take(name.removesuffix(".weight")) for name in experts.tensors[part::parts]]
        present = [pair for pair in pairs if pair is not None]
        if len({tuple(factor.shape for factor in pair) for pair in present}) > 1 or len(present) not in (0, len(pairs)):
            raise ConfigError(
                f"the adapters of {experts.module} are of {len(present)} of {len(pairs)} experts, or of several ranks; only the "
                "same of all can be read: merge it with PEFT first"
            )
        if present:
            yield part, Pair(torch.stack([pair.a for pair in present]), torch.stack([pair.b for pair in present]))


def joined(experts: ExpertsInHF, own: dict[str, Pair]) -> Pair:
    """Return one pair for all rows from pairs of parts: ranks one behind another, [A; A] and B in blocks.

    own: part -> pair (A [E, rank, in], B [E, f, rank]).
    """
    first = next(iter(own.values()))
    total = sum(pair.a.shape[1] for pair in own.values())
    b = first.b.new_zeros(len(first.b), len(experts.parts), first.b.shape[1], total)
    column = 0
    for number, part in enumerate(experts.parts):
        if part in own:
            rank = own[part].a.shape[1]
            b[:, number, :, column : column + rank] = own[part].b
            column += rank
    return Pair(torch.cat([own[part].a for part in experts.parts if part in own], dim=1), b)
