"""What a hash of a tensor's bits sees: any change of one word, any two flipped bits of a block, and the sum of its parts' hashes."""

import random

import pytest
import torch

from megatron.core.ops.tensor_hash import BLOCK_WORDS, _weights, block_hashes, tensor_hash

WIDTH = BLOCK_WORDS * 4  # bytes of a block


def flipped(x: torch.Tensor, *bits: int) -> torch.Tensor:
    raw = x.clone().view(torch.uint8).view(-1)
    for bit in bits:
        raw[bit // 8] ^= 1 << bit % 8
    return raw.view(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8])
def test_any_flipped_bit_changes_the_hash_of_its_block_alone(dtype):
    draw = random.Random(1)
    x = torch.randint(0, 256, (2 * WIDTH + 10 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    before, whole = block_hashes(x), tensor_hash(x)
    assert before.shape == (3,)
    bits = [draw.randrange(8 * x.nbytes) for _ in range(20)] + [0, 8 * x.nbytes - 1, 8 * WIDTH - 1, 8 * WIDTH]
    for bit in bits:
        changed = flipped(x, bit)
        assert (block_hashes(changed) != before).nonzero().tolist() == [[bit // (8 * WIDTH)]]
        assert tensor_hash(changed) != whole


def test_no_two_flipped_bits_cancel_in_a_block():
    """+-2^j a +-2^k b = 0 modulo 2^64 needs j = k, since weights are odd, and a = +-b modulo 2^33, since words have 32 bits."""
    weights = _weights(torch.device("cpu"))
    assert bool((weights % 2 == 1).all())
    rest, mirrored = (weights % 2**33).tolist(), (-weights % 2**33).tolist()
    assert len(set(rest)) == BLOCK_WORDS and not set(rest) & set(mirrored)


def test_signs_of_two_elements_and_exchanged_elements_are_seen():
    x = torch.randn(BLOCK_WORDS, generator=torch.Generator().manual_seed(1))
    assert block_hashes(flipped(x, 31, 95)) != block_hashes(x)
    assert block_hashes(x.flip(0)) != block_hashes(x)
    assert block_hashes(torch.tensor([0.0])) != block_hashes(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hashes_of_parts_add_up(dtype):
    x = torch.randn(3 * BLOCK_WORDS + 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = tensor_hash(x)
    for at in (8, 4096, 2 * BLOCK_WORDS, 3 * BLOCK_WORDS + 32):
        assert tensor_hash(x[:at]) + tensor_hash(x[at:], at) == whole
    assert tensor_hash(x[:0]) == 0 and tensor_hash(x.view(-1, 8)) == whole


def test_odd_sizes_and_views_are_read_as_they_are():
    x = torch.randn(41, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert tensor_hash(x[1:]) == tensor_hash(x[1:].clone()) != tensor_hash(x[:-1])
    square = torch.arange(9.0).view(3, 3)
    assert tensor_hash(square.t()) == tensor_hash(square.t().contiguous()) != tensor_hash(square)


def test_a_part_that_begins_inside_a_word_is_refused():
    with pytest.raises(AssertionError, match="inside a word"):
        tensor_hash(torch.zeros(4, dtype=torch.bfloat16), 1)
