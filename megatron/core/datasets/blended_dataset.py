"""Megatron's `BlendedDataset` over our blend."""

from collections.abc import Sequence
from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets import blending_indices_and_dataset


class BlendedDataset(blending_indices_and_dataset.BlendedDataset):
    """Samples of several data sets, drawn by their weights.

    size: the number of samples; None takes every sample once, and then weights are the numbers of samples.
    """

    def __init__(self, datasets: list[Any], weights: Sequence[float], size: int | None, config: Any):
        if size is None:
            indices = blending_indices_and_dataset.exhaustive_indices([int(weight) for weight in weights])
        else:
            indices = blending_indices_and_dataset.weighted_indices(
                blending_indices_and_dataset.normalized(list(weights)), size
            )
        names = [str(getattr(dataset, "dataset_path", dataset)) for dataset in datasets]
        super().__init__(datasets, indices, names)
        self.config = config


__getattr__ = names_of_megatron(__name__)
