"""Dropout with masks that are seeded by names and positions, never by ranks: the same in every layout.

A mask is a function of (seed, site, layer, sample, head, row, column), so recompute and the backward draw it again, and
no generator state is saved.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron.core.ops.dropout_masks import (
    MaskWords,
    column_words,
    dropped,
    keys_at,
    mixed,
    numbered_keys,
    pairs_of_words,
)
from megatron.core.ops.router_choices_kept_for_recompute import KeptChoices
from megatron.core.parallel.accelerator import to_device
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.sharding.initial_values import seed_of


class SampleDropoutKeys:
    """The dropout keys of one model chunk: its seed, and the samples of the running microbatch.

    `samples`: the number within the run of each sample of the microbatch. The pipeline sets them before each action.
    (): nobody has set them, as in a forward that no pipeline runs; then they are 0, 1, ...
    `choices`: what layers decide once, in a forward and not in its recomputation.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.samples = ()
        self.choices = KeptChoices()

    @property
    def samples(self) -> tuple[int, ...]:
        return self._samples

    @samples.setter
    def samples(self, samples: tuple[int, ...]) -> None:
        self._samples = samples
        self._words = {}

    @contextlib.contextmanager
    def naming(self, samples: tuple[int, ...]) -> Iterator[None]:
        """Set other samples inside the block: recompute sets those of its forward."""
        before = self.samples
        self.samples = samples
        try:
            yield
        finally:
            self.samples = before

    def words_on(self, device: torch.device, rows: int) -> Tensor:
        """Return the words of the first `rows` samples of the microbatch, for `keys_at`: int32 [rows, 2].

        They are made once a microbatch.
        """
        samples = self.samples or range(rows)
        assert rows <= len(samples), f"no row {rows - 1} in a microbatch of {len(samples)} samples"
        if (device, len(samples)) not in self._words:
            words = pairs_of_words(seed_of(self.seed, sample) for sample in samples)
            self._words[device, len(samples)] = to_device(words, device)
        return self._words[device, len(samples)][:rows]


def own_dropout_keys(module: nn.Module) -> SampleDropoutKeys | None:
    """Return the dropout keys of a module, ours or a script's; None: it has none.

    (A ModuleDict's `keys` are its names.)
    """
    keys = getattr(module, "keys", None)
    return keys if isinstance(keys, SampleDropoutKeys) else None


class KeyedDropout(nn.Module):
    """Dropout with masks by (seed, site, layer, sample, row and column within the sample).

    The masks are the same on any rank and device, and in any dtype.
    """

    def __init__(self, probability: float, keys: SampleDropoutKeys, site: str, layer: int):
        super().__init__()
        self.probability = probability
        self.keys = keys
        self.site = site
        self.layer = layer
        self._place: dict[torch.device, Tensor] = {}

    @property
    def is_active(self) -> bool:
        return self.training and self.probability > 0

    def place_on(self, device: torch.device) -> Tensor:
        """Return the words of site and layer, for `keys_at`: int32 [2]."""
        if device not in self._place:
            self._place[device] = pairs_of_words([seed_of(self.site, self.layer)])[0].to(device)
        return self._place[device]

    def keys_of_rows(self, rows: int, device: torch.device) -> Tensor:
        """Return the keys of the masks of the first `rows` samples of the microbatch: int32 [rows, 2]."""
        return keys_at(self.keys.words_on(device, rows), self.place_on(device))


class HiddenDropout(KeyedDropout):
    """Dropout of hidden states [s, b, h], the same in every layout: a rank draws the rows of each sample that it has.

    rows: which rows of a sample are on this rank.
    """

    def __init__(self, probability: float, keys: SampleDropoutKeys, site: str, layer: int, rows: SequenceShard):
        super().__init__(probability, keys, site, layer)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Return x with dropped elements 0 and the others divided by 1 - p: [s, b, h] -> [s, b, h].

        x itself if dropout is not active.
        """
        return dropped(x, self.words_for(x), self.probability) if self.is_active else x

    def words_for(self, x: Tensor) -> MaskWords:
        """Return the words of the mask of x [s, b, h]: lines [s, b, 2], columns [h]."""
        return self.words_of_rows(x, self.rows)

    def words_of_rows(self, x: Tensor, rows: SequenceShard) -> MaskWords:
        """Return the words of the mask of x, which has these rows of each sample: lines [s, b, 2], columns [h]."""
        keys = self.keys_of_rows(x.shape[1], x.device)  # [b, 2]
        parts = [numbered_keys(keys, start, stop - start) for start, stop in rows.ranges(x.shape[0])]
        lines = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # [b, s, 2]
        columns = column_words(x.shape[2], self.place_on(x.device))  # [h]
        return MaskWords(lines.transpose(0, 1), columns)


class KeyedJitter(HiddenDropout):
    """forward(x [s, b, h], rows) -> x times a draw from [1 - width, 1 + width] of each element: the same in every layout.

    rows: those of each sample that x has; a router without gradients may have all of them.
    """

    def __init__(self, width: float, keys: SampleDropoutKeys, site: str, layer: int, rows: SequenceShard):
        super().__init__(width, keys, site, layer, rows)
        self.width = width

    def forward(self, x: Tensor, rows: SequenceShard) -> Tensor:
        if not self.is_active:
            return x
        words = self.words_of_rows(x, rows)
        dtype = torch.promote_types(x.dtype, torch.float32)
        draws = mixed(words.columns, words.lines.unsqueeze(-2)).to(dtype)  # [-2^31, 2^31)
        return x * (1 + self.width * 2.0**-31 * draws).to(x.dtype)


class AttentionDropout(KeyedDropout):
    """Dropout of attention probabilities [b, heads, s, s]: one mask per sample and head, the same for every tp size.

    first_head: the number of this rank's first head in the model.
    """

    def __init__(self, probability: float, keys: SampleDropoutKeys, layer: int, first_head: int):
        super().__init__(probability, keys, "attention", layer)
        self.first_head = first_head

    def forward(self, probabilities: Tensor) -> Tensor:
        """Return the probabilities after dropout: [b, heads, s, keys] -> [b, heads, s, keys]; unchanged if inactive."""
        if not self.is_active:
            return probabilities
        return dropped(probabilities, self.words_for(probabilities.shape, probabilities.device), self.probability)

    def words_for(self, shape: tuple[int, ...], device: torch.device) -> MaskWords:
        """Return the words of the masks of scores of `shape` [b, heads, s, keys].

        lines: [b, heads, s, 2], columns: [keys].
        """
        return self.words_of_part(shape[:2], (0, shape[2]), (0, shape[3]), device)

    def words_of_part(
        self, shape: tuple[int, ...], rows: tuple[int, int], keys: tuple[int, int], device: torch.device
    ) -> MaskWords:
        """Return the words of a part of the masks: lines [b, heads, rows, 2], columns [keys].

        shape: [b, heads]. rows, keys: the first one's position in the sample, and their number.
        """
        head_keys = numbered_keys(self.keys_of_rows(shape[0], device), self.first_head, shape[1])  # [b, heads, 2]
        lines = numbered_keys(head_keys, *rows)  # [b, heads, rows, 2]
        first_key, key_count = keys
        columns = column_words(key_count, self.place_on(device), first_key)  # [keys]
        return MaskWords(lines, columns)
