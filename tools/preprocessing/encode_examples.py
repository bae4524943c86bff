"""Encode JSON lines of conversations, or of prompts with answers, to tokens and masks of their losses, for --sft."""

from dataclasses import dataclass

import numpy as np

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.encode_sft_records import Example, SFTEncoder, UnusableRecord, read_json_line
from megatron.core.datasets.mmap_indexed_dataset import token_dtype
from tools.preprocessing.encode import Column, Encoded
from tools.preprocessing.sources import Chunk

KEYS = ("sft", "sft_loss_mask")  # part of the names of the output's files


@dataclass(frozen=True)
class ExampleEncoder:
    """Encodes examples: each is a document of both keys. Its interface is that of `Encoder`."""

    sft: SFTEncoder

    @property
    def tokenizer(self) -> object:
        """The tokenizer of the tokens."""
        return self.sft.tokenizer

    def encode(self, chunks: list[Chunk]) -> Encoded:
        """Encode the examples of consecutive chunks. Lines that cannot be used are recorded with their reason."""
        result = Encoded(size=sum(len(chunk.text) for chunk in chunks))
        examples: list[Example] = []
        for chunk in chunks:
            for number, line in enumerate(chunk.text.split(b"\n"), chunk.first):
                if not line or line.isspace():
                    continue
                self.sft.form = None  # each line decides for itself, so that a piece does not depend on the one before
                try:
                    examples += self.sft.encode(read_json_line(line))
                except (UnusableRecord, ConfigError) as error:
                    result.note_bad(chunk.path, number, error)
        result.documents = len(examples)
        dtype = np.dtype(token_dtype(self.sft.tokenizer.vocab_size)).newbyteorder("<")
        lengths = np.array([len(example.tokens) for example in examples], "<i4")
        counts = np.ones(len(examples), "<i8")
        for key, values in zip(KEYS, zip(*examples) if examples else ((), ())):
            joined = np.concatenate(values) if values else np.zeros(0)
            result.columns[key] = Column(joined.astype(dtype), lengths, counts)
        return result
