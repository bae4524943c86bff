"""Turn a dense model into a mixture of experts that computes the same (upcycling, arXiv:2212.05055, arXiv:2410.07524).

    --moe-upcycling-granularity 1    each expert is a copy of the dense MLP, and the K weights of a token add up to 1
    --moe-upcycling-granularity G    an expert has a Gth of the hidden features f; experts c G .. c G + G - 1 are the
                                     parts of copy c, whose rows of the router are equal, so that a token visits whole copies

With G parts the weights of a copy add up to 1 / K of what its parts need, so linear_fc2 is multiplied by G. Megatron-LM
spreads this factor over both linears, which changes what a gated MLP computes.

Reads any checkpoint that `open_any` opens, a tensor at a time, and writes a checkpoint of ours.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.convert.families.read_and_write_hf_config import kind_of
from megatron.convert.missing_params_and_absent_heads import check_complete
from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing import Checkpoint, LocalTensor, save_checkpoint
from megatron.core.offload.tensor_in_memory_or_file import StoredTensor
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.sharding.boxes import whole
from megatron.core.storage.file_layer import exists
from megatron.core.storage.path_or_url import path_of
from megatron.core.transformer.model_config import ModelConfig

_PREFIX = "model/"


@dataclass(frozen=True)
class Upcycling:
    """The experts to make.

    settings: of the choice, by names of `ModelConfig`, with num_experts. granularity: parts of an MLP, each an expert.
    seed: of the routers' weights.
    """

    settings: dict[str, Any]
    granularity: int = 1
    seed: int = 1234

    def config_of(self, dense: ModelConfig) -> ModelConfig:
        """Return the model with experts. Raises ConfigError for settings that do not divide or do not fit together."""
        parts = self.granularity
        if dense.has_experts:
            raise ConfigError("the model has experts already; give a dense one")
        if dense.ffn_size % parts:
            raise ConfigError(
                f"--moe-upcycling-granularity {parts} does not divide the {dense.ffn_size} hidden features of the MLP; "
                "give a divisor of it"
            )
        experts = self.settings["num_experts"]
        if experts < 2:
            raise ConfigError(f"--num-experts {experts} is no mixture; give at least 2")
        if self.settings.get("moe_router_topk") == 1 and parts == 1:
            raise ConfigError(
                "--moe-router-topk 1 gives the chosen expert the weight 1, and the router learns nothing, or another weight, and "
                "the model would not begin as the dense one; give 2 or more"
            )
        config = replace(dense, **self.settings, moe_ffn_hidden_size=dense.ffn_size // parts)
        problems = list(config.problems())
        for flag, value in (("--num-experts", config.num_experts), ("--moe-router-topk", config.moe_router_topk)):
            if value % parts:
                problems.append(f"{flag} {value} must be a multiple of --moe-upcycling-granularity {parts}; change one")
        _, pre_softmax = config.router_weights
        if pre_softmax:
            problems.append(
                "the weights of a token's experts do not add up to 1 with --moe-router-pre-softmax, so the model would not begin "
                "as the dense one; leave it out"
            )
        if problems:
            raise ConfigError(problems)
        return config


def upcycle(
    checkpoint: Checkpoint,
    root: Path | str,
    upcycling: Upcycling,
    dtype: str | None = None,
    *,
    allow_missing: bool = False,
    note: Callable[[str], object] = lambda line: None,
) -> Path:
    """Write the model of a checkpoint, with experts, below `root`, which must not exist; return its folder.

    One process calls. The other arguments are those of `copy_checkpoint`. Raises ConfigError, CheckpointError.
    """
    if exists(path_of(root)):
        raise ConfigError(f"{root} exists already; give a folder that does not exist")
    state = checkpoint.state
    if state.get("model", "GPTModel") != "GPTModel":
        raise ConfigError(f"{checkpoint.folder} holds a {state['model']}; only a GPTModel can be given experts")
    records = checkpoint.manifest.tensors
    check_complete(state, records, str(checkpoint.folder), allow=allow_missing, note=note)
    known = {f.name for f in fields(ModelConfig)}
    saved = state["config"]["transformer"]
    unknown = sorted(saved.keys() - known)
    if unknown:
        raise ConfigError(f"{checkpoint.folder} has unknown model settings: {', '.join(unknown)}")
    dense = build(ModelConfig, saved)
    config = upcycling.config_of(dense)

    source = _Source(checkpoint)
    tensors = {}
    for name, record in records.items():
        if not name.startswith(_PREFIX):
            continue
        result = getattr(torch, dtype or record.dtype)
        layer = _layer_of(name)
        stem, _, param = name.partition(".mlp.")
        if layer is None or not param or not config.is_moe_layer(layer):
            tensors[name] = _Computed(
                record.shape, result, lambda first, last, name=name: source.flat(name)[first:last]
            )
            continue
        tensors[f"{stem}.mlp.experts.{param}"] = _expert_tensor(source, name, param, config, upcycling, result)
        if param == "linear_fc1.weight":
            router = _router_weight(config, upcycling, layer)
            tensors[f"{stem}.mlp.router.weight"] = _Computed(
                tuple(router.shape), result, lambda first, last, router=router: router.flatten()[first:last]
            )
    written = {}
    for name, values in tensors.items():
        box = whole(values.shape)
        written[name] = LocalTensor(values, values.shape, [(box, box)], True)
    return save_checkpoint(root, 0, written, _state_with(state, upcycling, config), ALONE)


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else None


def _router_weight(config: ModelConfig, upcycling: Upcycling, layer: int) -> Tensor:
    """Return the weight [experts, h] of a layer's router: drawn rows, each for the parts of one copy of the MLP."""
    generator = torch.Generator().manual_seed(upcycling.seed * 1_000_003 + layer)
    copies = config.num_experts // upcycling.granularity
    rows = torch.randn(copies, config.hidden_size, generator=generator, dtype=torch.float64) * config.init_method_std
    return rows.repeat_interleave(upcycling.granularity, 0)


def _expert_tensor(
    source: "_Source", name: str, param: str, config: ModelConfig, upcycling: Upcycling, dtype: torch.dtype
) -> "_Computed":
    """Return a tensor of the experts, made of the dense MLP's `name`: param, such as linear_fc1.weight."""
    experts = config.num_experts
    parts = upcycling.granularity
    h = config.hidden_size
    f = config.expert_ffn_size
    scale = 1 / (config.moe_router_topk_scaling_factor or 1.0)

    def scaled(x: Tensor, factor: float) -> Tensor:
        """Return x times a factor, in the wider of its dtype and the result's, so that it is rounded once."""
        return x.to(torch.promote_types(x.dtype, dtype)) * factor

    if param.startswith("linear_fc1."):
        halves = 2 if config.is_gated else 1
        columns = (h,) if param.endswith("weight") else ()
        shape = (experts, halves, f, *columns)

        def expert(e: int) -> Tensor:
            x = source.whole(name).view(halves, parts, f, *columns)
            return x[:, e % parts]

    elif param == "linear_fc2.weight":
        shape = (experts, h, f)

        def expert(e: int) -> Tensor:
            return scaled(source.whole(name).view(h, parts, f)[:, e % parts], scale * parts)

    else:  # linear_fc2.bias: each expert adds it, times a weight, and all weights add up to 1
        shape = (experts, h)

        def expert(e: int) -> Tensor:
            return scaled(source.whole(name), scale)

    numel = prod(shape[1:])

    def flat(first: int, last: int) -> Tensor:
        values = []
        for e in range(first // numel, -(-last // numel)):
            start = max(first - e * numel, 0)
            values.append(expert(e).reshape(-1)[start : last - e * numel])
        return torch.cat(values)

    return _Computed(shape, dtype, flat)


def _state_with(state: dict[str, Any], upcycling: Upcycling, config: ModelConfig) -> dict[str, Any]:
    """Return the state of the checkpoint: weights of a model, without an optimizer."""
    of_run = state["config"]
    transformer = of_run["transformer"] | upcycling.settings | {"moe_ffn_hidden_size": config.moe_ffn_hidden_size}
    result = {
        "train": {"iteration": 0, "consumed_train_samples": 0},
        "log": None,
        "optimizer_steps": 0,
        "model": "GPTModel",
        "vocab_size": state["vocab_size"],
        "config": {
            **{name: of_run[name] for name in ("tokenizer", "data") if name in of_run},
            "transformer": transformer,
            "optimizer": {},
            "checkpoint": {"save_optim": False},
        },
    }
    origin = state.get("origin")
    if isinstance(origin, dict):  # the tokenizer's files; the folder is written as a family with experts
        with suppress(ConfigError):  # where no family has such experts it cannot be written as a folder
            result["origin"] = origin | {"model_type": kind_of("GPTModel", config, state["vocab_size"])}
    return result


class _Source:
    """The tensors of the dense checkpoint, in their dtype: the last one that was read is kept."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.name = ""
        self.values = torch.empty(0)

    def whole(self, name: str) -> Tensor:
        if name != self.name:
            record = self.checkpoint.manifest.tensors[name]
            self.values = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
            self.name = name
            box = whole(record.shape)
            target = LocalTensor(self.values, record.shape, [(box, box)], False)
            self.checkpoint.read_into({name: target})
        return self.values

    def flat(self, name: str) -> Tensor:
        return self.whole(name).view(-1)


class _Computed(StoredTensor):
    """A contiguous part of a tensor that is computed when its values are requested."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, values: Callable[[int, int], Tensor], start: int = 0
    ):
        """values(first, last): elements of the full tensor, row-major. start: the first element of this part."""
        self.shape = shape
        self.dtype = dtype
        self.values = values
        self.start = start

    def view(self, shape: tuple[int, ...]) -> "_Computed":
        return _Computed(shape, self.dtype, self.values, self.start)

    def __getitem__(self, rows: slice) -> "_Computed":
        start, stop = rows.indices(self.shape[0])[:2]
        shape = (stop - start, *self.shape[1:])
        return _Computed(shape, self.dtype, self.values, self.start + start * prod(self.shape[1:]))

    def parts(self, nbytes: int = 16 << 20) -> Iterator[StoredTensor]:
        return super().parts(nbytes)

    def start_reading(self) -> AsyncHandle[Tensor]:
        values = self.values(self.start, self.start + self.numel()).to(self.dtype)
        return done(values.view(self.shape))

    def start_writing(self, values: Tensor) -> AsyncHandle[Any]:
        """Raise TypeError: the values are computed."""
        raise TypeError("a computed tensor is read-only")
