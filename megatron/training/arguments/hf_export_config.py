"""The settings of --save-hf, which writes a run's model as Hugging Face folders."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Count, FlagConfig, option

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
DEFAULT_SHARD_SIZE = "5GB"


def bytes_of(text: str) -> int:
    """Return the bytes of a size: 5,000,000,000 for "5GB". Raises ArgumentTypeError."""
    match = re.fullmatch(r"([1-9][0-9]{0,8}) ?(B|KB|MB|GB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    number, unit = match.groups()
    return int(number) * _UNITS[unit]


def read_size(text: str) -> str:
    """Return the text of a size, checked. Raises ArgumentTypeError."""
    bytes_of(text)
    return text


@dataclass(frozen=True)
class HFConfig(FlagConfig):
    """Hugging Face folders of the model."""

    save_hf: str | None = option(
        None,
        "write the model as a Hugging Face folder, DIR/iter_0000100, after the last checkpoint of the run; training "
        "waits for it, even with --async-save",
        metavar="DIR",
    )
    save_hf_interval: Count | None = option(None, "write the Hugging Face folder also every N iterations")
    save_hf_dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "dtype of the tensors of --save-hf; default: that of the parameters"
    )
    save_hf_max_shard_size: str | None = option(
        None, f"largest size of one file of --save-hf, such as 500MB; default: {DEFAULT_SHARD_SIZE}", read=read_size
    )

    def problems(self) -> Iterator[str]:
        if self.save_hf is not None:
            return
        flags = {
            "--save-hf-interval": self.save_hf_interval,
            "--save-hf-dtype": self.save_hf_dtype,
            "--save-hf-max-shard-size": self.save_hf_max_shard_size,
        }
        for flag, value in flags.items():
            if value is not None:
                yield f"{flag} needs --save-hf, the folder to write to"

    @property
    def most_bytes(self) -> int:
        """The maximal bytes of one file."""
        return bytes_of(self.save_hf_max_shard_size or DEFAULT_SHARD_SIZE)

    def is_due(self, iteration: int, *, last: bool) -> bool:
        """Whether a folder is written after this iteration. last: the run ends there."""
        if self.save_hf is None:
            return False
        interval = self.save_hf_interval
        return last or (interval is not None and iteration % interval == 0)
