"""Megatron's configs: every field is declared with a type that its default fits, and what is marked NOT_BUILT is refused."""

import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.from_megatron_config import problems_of_not_built, settings_from
from megatron.core.datasets import blended_megatron_dataset_config
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.distributed import distributed_data_parallel_config
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import optimizer_config, optimizer_flags_and_registry
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer import transformer_config
from megatron.core.transformer.transformer_config import TransformerConfig, model_config

SHAPE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
DATA = {"random_seed": 1, "sequence_length": 4}
# Class -> how many fields it has, and a use of a config of this class, which refuses what is not built.
CONFIGS: dict[type, tuple[int, dict[str, int], Callable[[Any], Any]]] = {
    TransformerConfig: (243, SHAPE, model_config),
    OptimizerConfig: (
        50,
        {},
        lambda config: settings_from(
            config, OptimizerConfig, optimizer_flags_and_registry.OptimizerConfig, optimizer_config.NOT_BUILT
        ),
    ),
    DistributedDataParallelConfig: (
        27,
        {},
        lambda config: settings_from(
            config,
            DistributedDataParallelConfig,
            DataParallelConfig,
            distributed_data_parallel_config.NOT_BUILT,
            data_parallel_sharding_strategy=None,
        ),
    ),
    GPTDatasetConfig: (34, DATA, lambda config: config.data),
    BERTMaskedWordPieceDatasetConfig: (26, DATA, lambda config: config.data),
}
NOT_BUILT: dict[type, dict[str, Any]] = {
    TransformerConfig: transformer_config.NOT_BUILT,
    OptimizerConfig: optimizer_config.NOT_BUILT,
    DistributedDataParallelConfig: distributed_data_parallel_config.NOT_BUILT,
    GPTDatasetConfig: blended_megatron_dataset_config.NOT_BUILT,
    BERTMaskedWordPieceDatasetConfig: blended_megatron_dataset_config.NOT_BUILT,
}


def fits(value: Any, kind: Any) -> bool:
    """Whether a checker of types takes this value for one of this type. Of a container, its class alone."""
    if kind is Any:
        return True
    if get_origin(kind) in (Union, types.UnionType):
        return any(fits(value, one) for one in get_args(kind))
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(kind) is Callable:
        return callable(value)
    return isinstance(value, get_origin(kind) or kind)


def test_a_fit_is_told_from_a_misfit():
    assert fits(None, int | None) and fits(1, float) and fits([], list[str] | None) and fits(torch.float32, torch.dtype)
    assert not fits(True, int) and not fits(None, str) and not fits("a", list[str])
    assert not fits(0, bool) and not fits("auto", Enum) and not fits(3, Callable[..., Any])


@pytest.mark.parametrize("config", [ModelParallelConfig, BlendedMegatronDatasetConfig, *CONFIGS])
def test_every_field_is_declared_in_its_class_with_a_type_that_its_default_fits(config):
    hints = get_type_hints(config)
    declared = {name for kind in config.__mro__ for name in vars(kind).get("__annotations__", {})}
    for one in fields(config):
        assert one.name in declared
        assert hints[one.name] is not Any or one.name in ("quant_recipe", "tokenizer"), f"{one.name} says no type"
        default = one.default if one.default_factory is MISSING else one.default_factory()
        assert default is MISSING or fits(default, hints[one.name]), f"{one.name}: {default!r}, {hints[one.name]}"


@pytest.mark.parametrize("config", CONFIGS)
def test_a_field_that_is_not_built_is_refused_with_any_other_value(config):
    number, given, used = CONFIGS[config]
    assert len(fields(config)) == number
    used(config(**given))
    marked = [one for one in fields(config) if one.name in NOT_BUILT[config]]
    assert marked
    for one in marked:
        assert NOT_BUILT[config][one.name] == one.default
        other = not one.default if isinstance(one.default, bool) else 7
        with pytest.raises(ConfigError, match=rf"{config.__name__}: {one.name}={other!r} is not built yet"):
            used(config(**{**given, one.name: other}))


def test_a_default_of_a_subclass_is_refused_like_a_value():
    """Another default asks for that value."""

    @dataclass
    class Ahead(TransformerConfig):
        mtp_num_layers: int | None = 8

    @dataclass(kw_only=True)
    class Masked(BlendedMegatronDatasetConfig):
        masking_max_ngram: int = 5

    with pytest.raises(ConfigError, match="Ahead: mtp_num_layers=8 is not built"):
        model_config(Ahead(**SHAPE))
    with pytest.raises(ConfigError, match="Masked: masking_max_ngram=5 is not built"):
        _ = Masked(**DATA).data


def test_a_config_that_lacks_a_field_asks_for_nothing_by_it():
    assert not problems_of_not_built(types.SimpleNamespace(num_layers=2), transformer_config.NOT_BUILT)
    assert problems_of_not_built(types.SimpleNamespace(mtp_num_layers=2), transformer_config.NOT_BUILT)
