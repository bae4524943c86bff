"""Low-rank adapters as PEFT's folders: read, written, and merged into a Hugging Face folder.

    adapter_config.json           rank, alpha, target modules
    adapter_model.safetensors     base_model.model.<module of transformers>.lora_A.weight [rank, in], .lora_B.weight [out, rank]

The table of a family says which of our linears a module of theirs is, or which rows of one:

    ours                                      theirs
    one pair for each part of linear_qkv      q_proj, k_proj, v_proj            copied
    one pair for all rows                     one fused module (GPT-2's c_attn) rows of B reordered
    one pair for all rows                     q_proj, k_proj, v_proj            A three times, rows of B divided
    pairs for parts                           one fused module                  ranks one behind another: [A; A], B in blocks

For the stacked weights of experts see `peft_of_experts`.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.convert.families.hf_family_fields_and_param_mappings import Family
from megatron.convert.families.read_and_write_hf_config import family_of, kind_of, model_config_of, settings_of
from megatron.convert.families.registry import FAMILIES
from megatron.convert.families.strided_views_of_hf_weights import OPERATIONS, HeadCounts, View
from megatron.convert.formats.hf_config_and_safetensors_headers import CONFIG, INDEX, WEIGHTS, read_json
from megatron.convert.formats.safetensors_header import TensorInFile, header_of, read_header
from megatron.convert.open_hf_safetensors_folder import head_counts_of, param_mappings
from megatron.convert.peft_of_experts import DOWN, GATE_UP, ExpertsInHF, Pair, experts_in_hf, joined, one_by_one
from megatron.convert.plan_hf_folder import bytes_of_tensor, to_hf_tensors
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.peft.lora_config import PARTS, WHOLE, LoRAConfig, scale_of, target_of, target_of_part
from megatron.core.sharding.boxes import slices
from megatron.core.transformer.model_config import ModelConfig

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTIAL = ".partial"
# Keys of an adapter_config.json that change what is computed, with the values under which they do not.
_PLAIN = {
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None, [], {}),
}


class LinearInHF(NamedTuple):
    """One linear of ours, and the modules of transformers with its rows."""

    linear: str  # its name in our model
    operation: str  # of `strided_views_of_hf_weights`, from their weights to ours
    modules: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """Our names of the parts, in the order of their modules; (): the linear has none."""
        if self.operation in ("qkv", "qkv_rows", "qkv_transpose", "gate_up"):
            return PARTS["linear_fc1" if self.operation == "gate_up" else "linear_qkv"]
        return PARTS.get(self.linear.rsplit(".", 1)[-1], ())


def linears_in_hf(family: Family, model: ModelConfig) -> Iterator[LinearInHF]:
    """Yield the linears of a model that adapters may be on: those of the layers without experts' stacked weights, and the
    output layer's."""
    for mapping in param_mappings(family, model):
        module, _, name = mapping.param.rpartition(".")
        last = module.rsplit(".", 1)[-1]
        if ".experts." in module:
            continue
        if name == "weight" and (last.startswith("linear_") or last == "output_layer"):
            modules = tuple(name.removesuffix(".weight") for name in mapping.hf_params)
            yield LinearInHF(module, mapping.operation, modules)


def has_conv1d(family: Family, model: ModelConfig) -> bool:
    """Whether linears are transformers' Conv1D, as GPT-2's. Stacked experts that are stored transposed are none."""
    return any(linear.operation in _FORWARD for linear in linears_in_hf(family, model))


def fused_in_hf(model_class: str, model: ModelConfig, vocab_size: int) -> set[str]:
    """Return our fused linears that are one module in transformers too, such as linear_qkv of a GPT-2.

    Empty for a model that no family describes.
    """
    try:
        family = FAMILIES[kind_of(model_class, model, vocab_size)]
    except ConfigError:
        return set()
    linears = [(x.linear.rsplit(".", 1)[-1], x) for x in linears_in_hf(family, model)]
    return {name for name, x in linears if name in PARTS and len(x.modules) == 1}


# ---------------------------------------------------------------- read


@dataclass
class PeftFolder:
    """The adapters of a folder: (our linear, part) -> pair."""

    folder: Path
    lora: LoRAConfig
    pairs: dict[tuple[str, str], Pair]


def read_adapter_config(folder: Path) -> LoRAConfig:
    """Return rank, alpha and rsLoRA of a PEFT folder. Raises ConfigError for adapters that are computed otherwise.

    `rank_pattern` and `alpha_pattern`, of single modules, are for the caller.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder} has no {ADAPTER_CONFIG}; give a folder that PEFT or tools/lora.py has written")
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {config.get('peft_type')!r:.40}; only LORA can be read")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise ConfigError(
                f"{path}: {key} is {config[key]!r:.60}, which is not built; merge the adapter with PEFT first"
            )
    targets = config.get("target_modules") or []
    if not isinstance(targets, str | list) or any(not isinstance(target, str) for target in targets):
        raise ConfigError(f"{path}: target_modules is {targets!r:.60}; it must be a name or a list of names")
    _parameters_of_experts(config, path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not isinstance(alpha, int | float):
        raise ConfigError(f"{path}: r is {rank!r:.40} and lora_alpha {alpha!r:.40}; they must be numbers")
    return LoRAConfig(lora_rank=rank, lora_alpha=float(alpha), use_rslora=bool(config.get("use_rslora")))


@dataclass(frozen=True)
class _Factors:
    """Rank and factor of each module or parameter of a PEFT folder, of which patterns may say others than the folder's."""

    lora: LoRAConfig
    config: Mapping[str, Any]  # an adapter_config.json
    path: Path

    def rank(self, name: str) -> int:
        return self._of("rank_pattern", name, self.lora.lora_rank)

    def scale(self, name: str) -> float:
        return scale_of(self._of("alpha_pattern", name, self.lora.lora_alpha), self.rank(name), self.lora.use_rslora)

    def _of(self, key: str, name: str, default: Any) -> Any:
        """Return the value of the first pattern that matches a name, or its end, as PEFT does."""
        patterns = self.config.get(key) or {}
        try:
            for pattern, value in patterns.items():
                if re.fullmatch(rf"(.*\.)?({pattern})", name):
                    return type(default)(value)
        except (re.error, AttributeError, TypeError, ValueError):
            raise ConfigError(
                f"{self.path}: {key} is {patterns!r:.60}; it must have patterns of names, and numbers"
            ) from None
        return default


def _parameters_of_experts(config: Mapping[str, Any], path: Path) -> set[str]:
    """Return which of `GATE_UP` and `DOWN` have an adapter. Raises ConfigError for other parameters, such as a router's."""
    parameters = config.get("target_parameters") or []
    known = isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)
    found = {name.rpartition(".")[2] for name in parameters} if known else set()
    if not known or not found <= {GATE_UP, DOWN}:
        raise ConfigError(
            f"{path}: target_parameters is {parameters!r:.100}; only experts' {GATE_UP} and {DOWN} can be read, no router's: "
            "merge the adapter with PEFT first"
        )
    return found


def read_peft_folder(folder: Path, family: Family, model: ModelConfig) -> PeftFolder:
    """Read a folder's adapters as those of our linears; float32 or as they are stored.

    Raises ConfigError for tensors of no linear, of shapes that do not fit, or on some layers alone.
    """
    lora = read_adapter_config(folder)
    path = folder / ADAPTER
    if not path.is_file():
        raise ConfigError(f"{folder} has no {ADAPTER}; PEFT's older adapter_model.bin is not read, save it again")
    header = read_header(path)
    left = set(header)

    def take(module: str) -> Pair | None:
        names = [f"{_PREFIX}{module}.lora_{factor}.weight" for factor in "AB"]
        if not all(name in header for name in names):
            return None
        left.difference_update(names)
        left.discard(f"{_PREFIX}{module}.base_layer.weight")  # PEFT adds the frozen weight of an output layer
        return Pair(*(_read(path, header[name]) for name in names))

    heads = head_counts_of(model)
    config = read_json(folder / ADAPTER_CONFIG)
    factors = _Factors(lora, config, folder / ADAPTER_CONFIG)
    pairs: dict[tuple[str, str], Pair] = {}
    ranks: dict[str, int] = {}  # by their names
    for linear in linears_in_hf(family, model):
        for k, module in enumerate(linear.modules):
            pair = take(module)
            if pair is None:
                continue
            part = linear.parts[k] if len(linear.modules) > 1 else WHOLE
            if len(linear.modules) == 1:
                pair = Pair(pair.a, _fuse(linear.operation, heads, pair.b))
            pairs[linear.linear, part] = pair
            ranks[module] = pair.a.shape[0]
    parameters = _parameters_of_experts(config, folder / ADAPTER_CONFIG)
    for experts in experts_in_hf(family, model):
        if experts.parameter in parameters and (pair := take(experts.prefix(parameters))) is not None:
            pairs[experts.linear, WHOLE] = experts.from_peft(*pair)
            ranks[experts.name] = pairs[experts.linear, WHOLE].a.shape[1]
        for number, pair in one_by_one(experts, take):
            pairs[experts.linear, experts.parts[number] if experts.parts else WHOLE] = pair
            ranks[experts.tensors[number].removesuffix(".weight")] = pair.a.shape[1]
    if of_experts := sorted(name for name in left if ".experts." in name):
        raise ConfigError(
            f"{path} adapts experts that the model does not have, or that target_parameters does not name, such as "
            f"{of_experts[0]}; is it an adapter of this base?"
        )
    if left or not pairs:
        shown = ", ".join(sorted(left)[:3])
        raise ConfigError(
            f"{path} has tensors that belong to no linear of the model: {shown or 'none at all'}; is it an adapter of this base?"
        )
    for name, rank in ranks.items():
        if rank != factors.rank(name):
            raise ConfigError(
                f"{path} has an adapter of rank {rank} on {name}, and {ADAPTER_CONFIG} says {factors.rank(name)}"
            )
        if not math.isclose(factors.scale(name), lora.scale, rel_tol=1e-12):
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG}: the factor of {name} is {factors.scale(name):.6g} and that of others "
                f"{lora.scale:.6g}, which is not built; merge the adapter with PEFT first"
            )
    return PeftFolder(folder, lora, pairs)


def targets_of(folder: PeftFolder, family: Family, model: ModelConfig) -> list[str]:
    """Return the --lora-target-modules of a folder. Raises ConfigError where some layers have other adapters than others."""
    counts: dict[str, int] = {}
    all_linears = [linear.linear for linear in linears_in_hf(family, model)]
    all_linears += [experts.linear for experts in experts_in_hf(family, model)]
    numbers: dict[str, int] = {}  # target -> how many linears it names, with an adapter or without
    for linear in all_linears:
        numbers[target_of(linear)] = numbers.get(target_of(linear), 0) + 1
    number_of: dict[str, int] = {}
    ranks: dict[str, set[int]] = {}
    for (linear, part), pair in folder.pairs.items():
        name = target_of_part(target_of(linear), part)
        ranks.setdefault(name, set()).add(pair.a.shape[-2])
        number_of[name] = numbers[target_of(linear)]
        counts[name] = counts.get(name, 0) + 1
    uneven = [name for name, count in counts.items() if count != number_of[name]]
    if uneven:
        raise ConfigError(
            f"{folder.folder} has adapters of {', '.join(uneven)} on some layers alone, which is not built; merge it with "
            "PEFT first"
        )
    several = [name for name, found in ranks.items() if len(found) > 1]
    if several:
        raise ConfigError(
            f"{folder.folder} has adapters of {', '.join(several)} whose rank depends on the layer, which is not built; merge it "
            "with PEFT first"
        )
    return [name if ranks[name] == {folder.lora.lora_rank} else f"{name}={min(ranks[name])}" for name in counts]


def _read(path: Path, tensor: TensorInFile) -> Tensor:
    with open(path, "rb") as file:
        file.seek(tensor.start)
        data = bytearray(file.read(tensor.nbytes))
    return torch.frombuffer(data, dtype=getattr(torch, tensor.dtype)).view(tensor.shape)


_FORWARD = {"transpose": "copy", "qkv_transpose": "qkv_rows"}  # B is [out, rank] also of a Conv1D


def _fuse(operation: str, heads: HeadCounts, theirs: Tensor) -> Tensor:
    """Return rows [out, rank] of theirs in our order."""
    operation = _FORWARD.get(operation, operation)
    ours = torch.empty_like(theirs)
    for box, view in OPERATIONS[operation].places(heads, [View.of(0, tuple(theirs.shape))]):
        ours[slices(box)] = theirs.as_strided(view.shape, view.strides, view.start)
    return ours


# ---------------------------------------------------------------- write


def write_peft_folder(
    out: Path,
    pairs: Mapping[tuple[str, str], Pair],
    lora: LoRAConfig,
    family: Family,
    model: ModelConfig,
    *,
    base: str | None = None,
) -> list[str]:
    """Write adapters, (our linear, part) -> pair, as a folder that must not exist.

    Returns the adapted modules whose last name component is also that of experts' matrices: they are targets by their whole
    names. Source: PEFT 0.21 with transformers 5 takes even these for the experts' in families such as qwen3_moe.
    base: the folder or name of the base, which PEFT's AutoPeftModel loads. Raises ConfigError for adapters on linears that
    transformers' model does not have.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; give a folder that does not exist")
    heads = head_counts_of(model)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    ranks_of_stacks: dict[str, int] = {}
    left = dict(pairs)
    for linear in linears_in_hf(family, model):
        own = {part: left.pop((linear.linear, part)) for part in ("", *linear.parts) if (linear.linear, part) in left}
        for module, pair in _pairs_in_hf(linear, own, heads):
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = pair.a
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = pair.b
            ranks[module] = pair.a.shape[0]
    parameters: set[str] = set()
    of_stacks = {}
    for experts in experts_in_hf(family, model):
        own = {
            part: left.pop((experts.linear, part)) for part in ("", *experts.parts) if (experts.linear, part) in left
        }
        if own:
            of_stacks[experts] = own.get(WHOLE) or joined(experts, own)
            parameters.add(experts.parameter)
    for experts, pair in of_stacks.items():
        theirs = experts.to_peft(pair)
        prefix = f"{_PREFIX}{experts.prefix(parameters)}"
        tensors |= {f"{prefix}.lora_A.weight": theirs.a, f"{prefix}.lora_B.weight": theirs.b}
        ranks_of_stacks[experts.name] = pair.a.shape[1]
    if left:
        raise ConfigError(f"adapters of {', '.join(name for name, _ in list(left)[:3])} have no place in this family")
    of_experts = {
        name.removesuffix(".weight").rsplit(".", 1)[-1]
        for mapping in param_mappings(family, model)
        if ".experts." in mapping.param
        for name in mapping.hf_params
    }
    ambiguous = [module for module in ranks if module.rsplit(".", 1)[-1] in of_experts]
    targets = {module if module in ambiguous else module.rsplit(".", 1)[-1] for module in ranks}
    other_ranks = {name: rank for name, rank in (ranks | ranks_of_stacks).items() if rank != lora.lora_rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.lora_rank,
        "lora_alpha": int(lora.lora_alpha) if lora.lora_alpha.is_integer() else lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": has_conv1d(family, model),
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted(targets),
        "target_parameters": sorted({experts.target for experts in of_stacks}) or None,
        "use_rslora": lora.use_rslora,
        "modules_to_save": None,
        "rank_pattern": other_ranks,
        # the factor of each stays scale: alpha grows with the rank, or with its root
        "alpha_pattern": {
            module: lora.scale * (rank**0.5 if lora.use_rslora else rank) for module, rank in other_ranks.items()
        },
    }
    partial = out.with_name(out.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    _write_tensors(partial / ADAPTER, tensors)
    os.rename(partial, out)
    return ambiguous


def _pairs_in_hf(linear: LinearInHF, own: Mapping[str, Pair], heads: HeadCounts) -> Iterator[tuple[str, Pair]]:
    """Yield (module of transformers, pair) for the adapters of one linear of ours."""
    if not own:
        return
    operation = _FORWARD.get(linear.operation, linear.operation)
    if len(linear.modules) > 1:
        if WHOLE in own:
            rows = to_hf_tensors(operation, heads, own[WHOLE].b)
            yield from ((module, Pair(own[WHOLE].a, b.contiguous())) for module, b in zip(linear.modules, rows))
            return
        yield from ((module, own[part]) for module, part in zip(linear.modules, linear.parts) if part in own)
        return
    (module,) = linear.modules
    if WHOLE in own:
        (b,) = to_hf_tensors(operation, heads, own[WHOLE].b)
        yield module, Pair(own[WHOLE].a, b.contiguous())
        return
    # Their fused rows are those of the parts, one behind another: a block for each.
    if linear.parts == PARTS["linear_qkv"]:
        sizes = dict(zip(linear.parts, heads.rows))
        if operation == "copy":  # GPT-NeoX keeps our order, head by head
            raise ConfigError(
                f"{module} of this family has its rows by heads, so that adapters of parts have no place; train with "
                "--lora-target-modules linear_qkv ..."
            )
    else:
        half = next(iter(own.values())).b.shape[0]
        sizes = dict.fromkeys(linear.parts, half)
    total = sum(pair.a.shape[0] for pair in own.values())
    b = next(iter(own.values())).b.new_zeros(sum(sizes.values()), total)
    row = column = 0
    for part, size in sizes.items():
        if part in own:
            rank = own[part].a.shape[0]
            b[row : row + size, column : column + rank] = own[part].b
            column += rank
        row += size
    yield module, Pair(torch.cat([own[part].a for part in sizes if part in own]), b)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    shapes = {name: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()}
    with open(path, "wb") as file:
        file.write(header_of(shapes))
        for x in tensors.values():
            file.write(bytes_of_tensor(x.contiguous()))
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- merge


def merge_adapter(base: Path, adapter: Path, out: Path, *, sign: int = 1) -> int:
    """Write `base`, a Hugging Face folder, with an adapter added to its weights; return the number of weights changed.

    Products and sums are float32 or wider and rounded once. sign -1: subtracted. The other files are copied. A tensor at a
    time is in memory. Raises ConfigError for an adapter of another base, before anything is written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; give a folder that does not exist")
    read_adapter_config(adapter)
    if not (adapter / ADAPTER).is_file():
        raise ConfigError(f"{adapter} has no {ADAPTER}")
    files = [WEIGHTS]
    if (base / INDEX).is_file():
        files = sorted(set(read_json(base / INDEX)["weight_map"].values()))
    if not (base / CONFIG).is_file() or not all((base / file).is_file() for file in files):
        raise ConfigError(f"{base} is not a Hugging Face folder with {CONFIG} and safetensors; give the adapter's base")
    headers = {file: read_header(base / file) for file in files}
    shapes = {name: tensor.shape for in_file in headers.values() for name, tensor in in_file.items()}
    deltas = {delta.weight: delta for delta in deltas_of(adapter, base, shapes)}

    partial = out.with_name(out.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for entry in sorted(base.iterdir()):
        if entry.name not in files:
            (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, partial / entry.name)
    for file, tensors in headers.items():
        with open(partial / file, "wb") as target:
            target.write(header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}))
            for name, tensor in tensors.items():
                weight = _read(base / file, tensor)
                if name in deltas:
                    wide = torch.promote_types(weight.dtype, torch.float32)
                    delta = deltas[name].of(wide).mul_(sign * deltas[name].scale)
                    weight = (weight.to(wide) + delta).to(weight.dtype)
                target.write(bytes_of_tensor(weight.contiguous()))
            target.flush()
            os.fsync(target.fileno())
    os.rename(partial, out)
    return len(deltas)


class Delta(NamedTuple):
    """What an adapter adds to one weight of a folder."""

    weight: str  # its name
    scale: float
    of: Callable[[torch.dtype], Tensor]  # dtype -> B A in it, without the scale, of the weight's shape


def deltas_of(adapter: Path, base: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Delta]:
    """Yield what a PEFT folder adds to the weights of `base`, whose shapes are given by name.

    Raises ConfigError for an adapter of another base.
    """
    lora = read_adapter_config(adapter)
    config = read_json(adapter / ADAPTER_CONFIG)
    is_transposed = bool(config.get("fan_in_fan_out"))
    path = adapter / ADAPTER
    header = read_header(path)
    left = {
        name.removeprefix(_PREFIX).removesuffix(".lora_A.weight") for name in header if name.endswith("lora_A.weight")
    }

    def read_pair(module: str) -> Pair:
        return Pair(*(_read(path, header[f"{_PREFIX}{module}.lora_{factor}.weight"]) for factor in "AB"))

    factors = _Factors(lora, config, adapter / ADAPTER_CONFIG)

    def check(name: str | None, module: str, expected: tuple[int, ...]) -> None:
        if name not in shapes or shapes[name] != expected:
            found = f"has it of shape {list(shapes[name])}" if name in shapes else "has no such weight"
            raise ConfigError(
                f"{adapter} adapts {module}, of shape {list(expected)}, and {base} {found}; give the adapter's base"
            )

    parameters = _parameters_of_experts(config, adapter / ADAPTER_CONFIG)
    if parameters:
        of_base = read_json(base / CONFIG)
        family = family_of(of_base, str(base / CONFIG))
        settings, _ = settings_of(of_base, str(base / CONFIG))
        model = model_config_of(settings, str(base / CONFIG))
        heads = head_counts_of(model)

        @lru_cache(maxsize=4)  # the weights of a layer's experts follow one another
        def pair_of_ours(experts: ExpertsInHF, dtype: torch.dtype) -> Pair:
            a, b = experts.from_peft(*read_pair(experts.prefix(parameters)))
            return Pair(a.to(dtype), b.to(dtype))

        for experts in experts_in_hf(family, model):
            module = experts.prefix(parameters)
            if experts.parameter not in parameters or module not in left:
                continue
            left.remove(module)
            for number, (weight, shape) in enumerate(zip(experts.tensors, experts.shapes(heads))):
                check(weight, experts.name, shape)

                def product_of_expert(
                    dtype: torch.dtype, experts: ExpertsInHF = experts, number: int = number
                ) -> Tensor:
                    return experts.delta(pair_of_ours(experts, dtype), number, heads)

                yield Delta(weight, factors.scale(experts.name), product_of_expert)

    for module in sorted(left):
        # old files of GPT-2 lack the first component
        names = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
        weight = next((name for name in names if name in shapes), None)
        a, b = (header[f"{_PREFIX}{module}.lora_{factor}.weight"].shape for factor in "AB")
        check(weight, module, (a[1], b[0]) if is_transposed else (b[0], a[1]))

        def product(dtype: torch.dtype, module: str = module) -> Tensor:
            a, b = read_pair(module)
            delta = b.to(dtype) @ a.to(dtype)  # [out, in]
            return delta.T if is_transposed else delta

        yield Delta(weight, factors.scale(module), product)


def base_of_state(state: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return (model_type, folder) of the published model that a checkpoint's run began from; None where it has none."""
    origin = state.get("origin") or {}
    return origin.get("model_type"), origin.get("folder")
