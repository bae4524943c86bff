"""Megatron's `BlendedDataset` over our blend."""

from collections.abc import Sequence
from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets import blend


class BlendedDataset(blend.BlendedDataset):
    """Samples of several data sets by their weights: `size` of them, or each once, if that is None."""

    def __init__(self, datasets: list[Any], weights: Sequence[float], size: int | None, config: Any):
        sizes = [int(weight) for weight in weights]
        shares = blend.normalized(list(weights))
        order = blend.exhaustive_indices(sizes) if size is None else blend.weighted_indices(shares, size)
        super().__init__(datasets, order, [str(getattr(one, "dataset_path", one)) for one in datasets])
        self.config = config


__getattr__ = names_of_megatron(__name__)
