"""The knobs of the training data."""

from dataclasses import dataclass

from megatron.core.config import ConfigError, knob
from megatron.core.datasets.index_map import parse_split

DEFAULT_SPLIT = "969,30,1"
MOCK_SPLIT = "1,1,1"


@dataclass(frozen=True)
class DataConfig:
    """Training data."""

    data_path: list[str] | None = knob(
        None, "prefix of PREFIX.bin and PREFIX.idx, as tools/preprocess_data.py writes", metavar="PREFIX"
    )
    split: str | None = knob(
        None, f"shares of train, validation and test; unset: {DEFAULT_SPLIT}, with mock data {MOCK_SPLIT}",
        metavar="X,X,X",
    )  # fmt: skip
    seq_length: int | None = knob(
        None, "tokens in one sample", flags=("--seq-length", "--encoder-seq-length"), required=True
    )
    data_cache_path: str | None = knob(
        None, "folder for index files; unset: PREFIX/cache/GPTDataset_indices", metavar="DIR"
    )
    mock_data: bool = knob(False, "train on made-up, learnable token sequences instead of files")
    eod_mask_loss: bool = knob(False, "no loss where the input is the end-of-document token")
    reset_position_ids: bool = knob(False, "restart positions after each end-of-document token (not built yet)")
    reset_attention_mask: bool = knob(False, "attend only within a document (not built yet)")

    def __post_init__(self) -> None:
        problems = []
        if self.data_path is not None and len(self.data_path) != 1:
            given = " ".join(self.data_path) or "nothing"
            problems.append(
                f"--data-path takes one prefix, given {given}: blends are not built yet; merge the data first"
            )
        if self.seq_length is not None and self.seq_length < 1:
            problems.append(f"--seq-length ({self.seq_length}) must be at least 1")
        if self.mock_data and self.split is not None:
            problems.append(f"--split {self.split} has no meaning with --mock-data; leave one of them out")
        if self.split is not None:
            try:
                parse_split(self.split)
            except ValueError as error:
                problems.append(str(error))
        if self.reset_position_ids:
            problems.append("--reset-position-ids is not built yet; leave it out")
        if self.reset_attention_mask:
            problems.append("--reset-attention-mask is not built yet; leave it out")
        if problems:
            raise ConfigError(problems)

    @property
    def split_shares(self) -> str:
        """The split string in force."""
        return self.split or (MOCK_SPLIT if self.mock_data else DEFAULT_SPLIT)
