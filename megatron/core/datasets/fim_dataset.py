"""Megatron's data set of samples that are filled in the middle, and its config."""

from dataclasses import dataclass
from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.fill_in_the_middle import FimConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig


@dataclass(kw_only=True)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Megatron's settings of samples of token files with fill-in-the-middle.

    fim_extra_tokens: the tokens "prefix", "middle", "suffix", "pad" and "eod", by these names.
    """

    fim_rate: float | None = None
    fim_spm_rate: float | None = None
    fim_extra_tokens: dict[str, str | None] | None = None
    fim_split_sample: str | None = None
    fim_fragment_rate: float | None = None
    fim_no_prefix: str | None = None

    @property
    def fim(self) -> FimConfig:
        """The same settings as a `FimConfig`."""
        settings: dict[str, Any] = {"fim_data": True}
        for name in ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix"):
            if getattr(self, name) is not None:
                settings[name] = getattr(self, name)
        for token, text in (self.fim_extra_tokens or {}).items():
            if text is not None:
                settings[f"fim_{token}_token"] = text
        return FimConfig(**settings)


class GPTFIMDataset:
    """Names the kind for `BlendedMegatronDatasetBuilder`: samples of token files, some filled in the middle.

    Its config must be a `GPTFIMDatasetConfig`.
    """


__getattr__ = names_of_megatron(__name__)
