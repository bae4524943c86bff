"""Megatron's questions about multi-token prediction, for models without it."""

from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.transformer.transformer_config import TransformerConfig

_REFUSAL = "multi-token prediction is not built; leave out --mtp-num-layers"


def get_mtp_ranks(pp_ranks: list[int], config: Any) -> list[int]:
    """Return the ranks that predict several tokens: none. NotImplementedError if the config asks for it."""
    del pp_ranks
    _check(config.mtp_num_layers)
    return []


def mtp_on_this_rank(
    config: Any = None,
    layout: Any = None,
    mtp_num_layers: int | None = None,
    ignore_virtual: bool = True,
    vp_stage: int | None = None,
) -> bool:
    """Return False: this rank predicts one token. NotImplementedError if a config or a number asks for more.

    The first argument may be a layout of pipeline stages, too.
    """
    del layout, ignore_virtual, vp_stage
    _check(mtp_num_layers)
    if isinstance(config, TransformerConfig):
        _check(config.mtp_num_layers)
    return False


def _check(num_layers: int | None) -> None:
    if num_layers:
        raise NotImplementedError(_REFUSAL)


__getattr__ = names_of_megatron(__name__)
