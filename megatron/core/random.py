"""Initial weights and dropout masks, seeded by names and positions, never by ranks: the same in every layout.

A weight is cut into fixed tiles. Each tile is drawn on the CPU from a generator seeded by (seed, name, tile), and a rank draws
only the tiles that overlap its shard. A dropout mask is a function of (seed, site, layer, sample, head, row, column), so
recompute and the backward draw it again, and no generator state is saved.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.boxes import Box, intersect, relative_to, size_of, slices, whole
from megatron.core.device import to_device
from megatron.core.dropout_masks import MaskWords, column_words, dropped, keys_at, numbered_keys, pairs_of_words
from megatron.core.grid import Axis
from megatron.core.placement import Constant, Normal, XavierUniform, pieces
from megatron.core.sequence_rows import SequenceRows

TILE = 256  # rows and columns; 65,536 draws take about 0.2 ms, their seeding 2 us


def seed_of(*key: int | str) -> int:
    """A 63-bit generator seed: a hash of the key."""
    return comm.fingerprint("\0".join(str(part) for part in key))


# ---------------------------------------------------------------- initial weights


def initialize_parameters(model: nn.Module, seed: int, mesh: Mapping[str, Axis]) -> None:
    """Fills each parameter of a model chunk with its shard of the global initial value. Padding becomes zero.

    Parameter names seed the draws, so they must be global: layers numbered over the whole model.
    """
    for name, parameter in model.named_parameters():
        initialize_parameter(parameter, seed, name, mesh)


@torch.no_grad()
def initialize_parameter(parameter: nn.Parameter, seed: int, name: str, mesh: Mapping[str, Axis]) -> None:
    """`initialize_parameters` for one parameter. mesh: the axes that shard it."""
    placement, init = parameter.placement, parameter.placement.init
    if init is None or parameter.is_meta:
        return
    parameter.zero_()
    drawn = None if isinstance(init, Normal | XavierUniform | Constant) else _made_by(init, placement.shape, seed, name)
    for box, local in pieces(placement, tuple(parameter.shape), mesh):
        if isinstance(init, Constant):
            parameter[slices(local)].fill_(init.value)
        elif isinstance(init, Normal):
            parameter[slices(local)].copy_(normal_box(placement.shape, box, init.std, seed, name))
        elif isinstance(init, XavierUniform):
            parameter[slices(local)].copy_(xavier_box(placement.shape, box, seed, name))
        else:
            parameter[slices(local)].copy_(drawn[slices(box)])


def seed_of_next_parameter() -> int:
    """One draw from torch's generator, whose seed must be equal on all ranks of a model."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _made_by(init: Callable[[Tensor], Any], shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """The global float32 tensor filled by `init`: in place, like `torch.nn.init.xavier_normal_`, or returned.

    Every rank makes the whole tensor on the CPU, since a function need not work on a shard: t ranks take t times the time and
    memory. The function draws from torch's generator, which is seeded for the call and restored.
    """
    values, generator = torch.full(shape, torch.nan, dtype=torch.float32, device="cpu"), torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed_of(seed, name))
    try:
        with torch.device("cpu"):
            returned = init(values)
    finally:
        generator.set_state(state)
    if isinstance(returned, Tensor) and returned.shape == values.shape and bool(values.isnan().all()):
        values = returned.detach().cpu()
    if bool(values.isnan().any()):
        raise ValueError(
            f"init_method {getattr(init, '__name__', init)!r} leaves {int(values.isnan().sum())} of {values.numel()} elements "
            f"of a tensor of shape {shape} unset; it must set them all in place, like torch.nn.init.xavier_normal_, or return "
            "a tensor of that shape"
        )
    return values


def normal_box(shape: tuple[int, ...], box: Box, std: float, seed: int, name: str) -> Tensor:
    """The box of the global tensor `name`, of `shape`, drawn from N(0, std^2): float32, on the CPU."""
    return _drawn_box(torch.randn, shape, box, seed, name).mul_(std)


def xavier_box(shape: tuple[int, ...], box: Box, seed: int, name: str) -> Tensor:
    """As `normal_box`, by Xavier's rule for the whole matrix."""
    bound = (6 / sum(shape)) ** 0.5
    return _drawn_box(torch.rand, shape, box, seed, name).mul_(2 * bound).sub_(bound)


def _drawn_box(draw: Callable[..., Tensor], shape: tuple[int, ...], box: Box, seed: int, name: str) -> Tensor:
    out = torch.empty(size_of(box), dtype=torch.float32)
    generator = torch.Generator()
    for tile in _tiles_overlapping(shape, box):
        generator.manual_seed(seed_of(seed, name, *(start for start, _ in tile)))
        values = draw(size_of(tile), generator=generator, dtype=torch.float32)
        shared = intersect(tile, box)
        out[slices(relative_to(shared, box))] = values[slices(relative_to(shared, tile))]
    return out


def _tiles_overlapping(shape: tuple[int, ...], box: Box) -> list[Box]:
    """The tiles of `shape` that share an element with `box`."""
    starts = [range(start - start % TILE, stop, TILE) for start, stop in box]
    whole_tensor = whole(shape)
    return [intersect(tuple((s, s + TILE) for s in corner), whole_tensor) for corner in product(*starts)]


# ---------------------------------------------------------------- dropout


class DropoutKeys:
    """The dropout keys of one model chunk: its seed, and the samples of the running microbatch.

    `samples`: the number of each row's sample within the whole run. The pipeline sets them before each action. (): nobody has
    named them, as in a forward that no pipeline runs; rows then are samples 0, 1, ...
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.samples = ()

    @property
    def samples(self) -> tuple[int, ...]:
        return self._samples

    @samples.setter
    def samples(self, samples: tuple[int, ...]) -> None:
        self._samples, self._words = samples, {}

    @contextlib.contextmanager
    def naming(self, samples: tuple[int, ...]) -> Iterator[None]:
        """Other samples inside the block: recompute sets those of its forward."""
        before, self.samples = self.samples, samples
        try:
            yield
        finally:
            self.samples = before

    def words_on(self, device: torch.device, rows: int) -> Tensor:
        """[rows, 2] for `keys_at`, of the samples in the first rows, made once a microbatch."""
        samples = self.samples or range(rows)
        assert rows <= len(samples), f"no row {rows - 1} in a microbatch of {len(samples)} samples"
        if (device, len(samples)) not in self._words:
            words = pairs_of_words(seed_of(self.seed, sample) for sample in samples)
            self._words[device, len(samples)] = to_device(words, device)
        return self._words[device, len(samples)][:rows]


def keys_of(module: nn.Module) -> DropoutKeys | None:
    """The keys that a module, ours or a script's, draws its masks by. (A ModuleDict's `keys` are its names.)"""
    keys = getattr(module, "keys", None)
    return keys if isinstance(keys, DropoutKeys) else None


class KeyedDropout(nn.Module):
    """Dropout with masks by (seed, site, layer, sample, row and column within the sample), whatever the rank, device or dtype."""

    def __init__(self, probability: float, keys: DropoutKeys, site: str, layer: int):
        super().__init__()
        self.probability, self.keys = probability, keys
        self.site, self.layer = site, layer
        self._place: dict[torch.device, Tensor] = {}

    @property
    def is_active(self) -> bool:
        return self.training and self.probability > 0

    def place_on(self, device: torch.device) -> Tensor:
        """[2] for `keys_at`."""
        if device not in self._place:
            self._place[device] = pairs_of_words([seed_of(self.site, self.layer)])[0].to(device)
        return self._place[device]

    def keys_of_rows(self, rows: int, device: torch.device) -> Tensor:
        """[rows, 2], of the samples in the first rows of the microbatch."""
        return keys_at(self.keys.words_on(device, rows), self.place_on(device))


class HiddenDropout(KeyedDropout):
    """Dropout of hidden states [s, b, h], the same in every layout.

    A rank draws the rows that it holds of each sample.
    """

    def __init__(self, probability: float, keys: DropoutKeys, site: str, layer: int, rows: SequenceRows):
        super().__init__(probability, keys, site, layer)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.words_for(x), self.probability) if self.is_active else x

    def words_for(self, x: Tensor) -> MaskWords:
        """Of the mask of x [s, b, h]."""
        samples = self.keys_of_rows(x.shape[1], x.device)
        parts = [numbered_keys(samples, start, stop - start) for start, stop in self.rows.ranges(x.shape[0])]
        lines = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return MaskWords(lines.transpose(0, 1), column_words(x.shape[2], self.place_on(x.device)))


class AttentionDropout(KeyedDropout):
    """Dropout of attention probabilities [b, heads, s, s], with one mask per sample and head: the same for every tp size."""

    def __init__(self, probability: float, keys: DropoutKeys, layer: int, first_head: int):
        super().__init__(probability, keys, "attention", layer)
        self.first_head = first_head

    def forward(self, probabilities: Tensor) -> Tensor:
        if not self.is_active:
            return probabilities
        return dropped(probabilities, self.words_for(probabilities.shape, probabilities.device), self.probability)

    def words_for(self, shape: tuple[int, ...], device: torch.device) -> MaskWords:
        """Of the masks of scores of `shape` [b, heads, s, s]."""
        return self.words_of_part(shape[:2], (0, shape[2]), (0, shape[3]), device)

    def words_of_part(
        self, shape: tuple[int, ...], rows: tuple[int, int], keys: tuple[int, int], device: torch.device
    ) -> MaskWords:
        """Of a part of the masks. shape: [b, heads]. rows, keys: the first one's number in the sample, and how many."""
        of_heads = numbered_keys(self.keys_of_rows(shape[0], device), self.first_head, shape[1])
        return MaskWords(numbered_keys(of_heads, *rows), column_words(keys[1], self.place_on(device), keys[0]))
