"""Read weights in MXFP4 as bfloat16, which holds each of their numbers: experts of GPT-OSS as they are published.

    NAME_blocks   uint8 [experts, rows, columns / 32, 16]    two numbers of 4 bits in a byte, that of the low bits first
    NAME_scales   uint8 [experts, rows, columns / 32]        s: the 32 numbers of a block are multiplied by 2^(s - 127)

The number of 4 bits has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their
negatives. Source: OCP Microscaling Formats (MX) Specification 1.0. A rank dequantizes the boxes that it needs while it
reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.convert.families.strided_views_of_hf_weights import View
from megatron.convert.formats.safetensors_header import TensorInFile
from megatron.convert.strided_reads_of_foreign_files import StridedPiece, piece_of
from megatron.core.dist_checkpointing.manifest_format import TensorRecord
from megatron.core.sharding.boxes import Box, whole

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two tensors
BLOCK = 32  # numbers that share a scale
_NUMBERS = [sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_BIAS = 127  # of a scale


@dataclass(frozen=True)
class Mxfp4Piece(StridedPiece):
    """A full tensor of ours whose last dimension consists of blocks.

    blocks: the bytes, of ours' shape with the last dimension as [columns / 32, 16]. scales: [.., columns / 32].
    """

    blocks: StridedPiece | None = None
    scales: StridedPiece | None = None

    def read(self, folder: Path, box: Box, name: str) -> Iterator[tuple[Box, Tensor]]:
        """Read and dequantize, as `StridedPiece.read` reads: values are bfloat16."""
        start, stop = box[-1]
        first_block = start // BLOCK
        last_block = -(-stop // BLOCK)
        numbers = torch.tensor(_NUMBERS)
        for part, codes in self.blocks.read(folder, (*box[:-1], (first_block, last_block), (0, BLOCK // 2)), name):
            outer = part[:-1]  # without the bytes of a block, which are never split
            in_file = tuple((a + shift, b + shift) for (a, b), (shift, _) in zip(outer, (*box[:-1], (first_block, 0))))
            exponents = torch.empty([b - a for a, b in outer], dtype=torch.int32)
            for inner, values in self.scales.read(folder, in_file, name):
                exponents[tuple(slice(a, b) for a, b in inner)] = values.to(torch.int32) - _BIAS
            codes = codes.to(torch.int64)
            pairs = torch.stack((numbers[codes & 15], numbers[codes >> 4]), dim=-1)  # [.., blocks, 16, 2]
            wide = torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(-2)  # [.., columns of the blocks]

            # the columns that are asked for
            begin = (first_block + outer[-1][0]) * BLOCK
            columns = (max(start, begin), min(stop, begin + wide.shape[-1]))
            yield (
                (*outer[:-1], (columns[0] - start, columns[1] - start)),
                wide[..., columns[0] - begin : columns[1] - begin].to(torch.bfloat16),
            )


def mxfp4_record(operation: str, blocks: TensorInFile, scales: TensorInFile) -> TensorRecord:
    """Return the tensor of ours in a pair of tensors of GPT-OSS. Raises ValueError if shapes do not fit.

    operation: that of the tensor in bfloat16: "stacked_gate_up_in_turn" or "stacked_transpose".
    """
    *rows, count, half = blocks.shape
    if half != BLOCK // 2 or len(rows) != 2 or tuple(scales.shape) != (*rows, count):
        raise ValueError(f"blocks {list(blocks.shape)} and scales {list(scales.shape)} are not of one tensor")
    if (blocks.dtype, scales.dtype) != ("uint8", "uint8"):
        raise ValueError(f"blocks of {blocks.dtype} and scales of {scales.dtype} are not packed numbers")
    experts, lines = rows
    if operation == "stacked_gate_up_in_turn":
        if lines % 2:
            raise ValueError(f"{lines} rows are not gates and ups")
        shape = (experts, 2, lines // 2)  # the file has gate 0, up 0, gate 1, ...
        strides = (lines, 1, 2)  # in rows
    else:
        shape = (experts, lines)
        strides = (lines, 1)
    outer = tuple(stride * count for stride in strides)
    of_scales = View(0, (*shape, count), (*outer, 1))
    of_blocks = View(0, (*shape, count, half), (*(stride * half for stride in outer), half, 1))
    ours = (*shape, count * BLOCK)
    piece = Mxfp4Piece(
        whole(ours),
        blocks.file,
        blocks.start,
        blocks.nbytes,
        "",
        "bfloat16",
        tuple(range(len(ours))),  # no order of elements in a file: read in full where the order matters
        blocks=piece_of(whole(of_blocks.shape), of_blocks, blocks),
        scales=piece_of(whole(of_scales.shape), of_scales, scales),
    )
    return TensorRecord("bfloat16", ours, (piece,))
