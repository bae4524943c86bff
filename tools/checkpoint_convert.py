"""Write a model as a Hugging Face folder, one tensor at a time.

    python tools/checkpoint_convert.py --load checkpoints/books --save-hf books-hf
    python tools/checkpoint_convert.py --load Llama-3.2-1B --save-hf Llama-3.2-1B-float32 --dtype float32 --max-shard-size 1GB

--load is a folder of checkpoints, or another folder that the trainer reads as it lies. Needs memory for two tensors.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import FlagConfig, knob
from megatron.core.interchange import open_any, write_hf_folder
from tools.errors import missing, run_tool

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_of(text: str) -> int:
    """ "5GB" -> 5,000,000,000. Raises ArgumentTypeError."""
    found = re.fullmatch(r"([1-9][0-9]{0,8}) ?(B|KB|MB|GB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return int(found[1]) * _UNITS[found[2]]


def _read_size(text: str) -> str:
    bytes_of(text)
    return text


@dataclass(frozen=True)
class ConvertConfig(FlagConfig):
    """A model to write."""

    load: str | None = knob(None, "folder with the model", metavar="DIR")
    iteration: int | None = knob(None, "iteration to take; default: the latest")
    save_hf: str | None = knob(None, "folder to write, which must not exist", metavar="DIR")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = knob(
        None, "dtype of the tensors; default: as they are"
    )
    model_type: str | None = knob(
        None, "model_type to write, such as llama; default: the one it was read from, or the first that fits"
    )
    max_shard_size: str = knob("5GB", "bytes of one file, as 500MB", read=_read_size)
    tokenizer: str | None = knob(
        None, "folder with the tokenizer's files, which are copied; default: the one it was read from", metavar="DIR"
    )

    def problems(self) -> list[str]:
        return missing(self, "load", "save_hf")


def convert(config: ConvertConfig) -> None:
    checkpoint = open_any(config.load, config.iteration)
    kind = write_hf_folder(
        checkpoint,
        Path(config.save_hf),
        kind=config.model_type,
        dtype=config.dtype,
        most_bytes=bytes_of(config.max_shard_size),
        along=Path(config.tokenizer) if config.tokenizer else None,
    )
    print(f"{config.load}: written to {config.save_hf} as a {kind}")


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [ConvertConfig], convert, arguments, "what was written is incomplete: remove it")


if __name__ == "__main__":
    sys.exit(main())
