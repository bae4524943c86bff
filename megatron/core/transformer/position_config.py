"""Positions: learned, rotary or none; which layers rotate queries and keys, and by which frequencies. Pure."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from math import log, sqrt
from typing import Annotated, Any, Literal, NamedTuple

from megatron.core.base.dataclass_flags import Count, Positive, knob, out_of_range
from megatron.core.transformer.layer_freq_pattern import is_exception, layer_pattern, read_pattern
from megatron.core.transformer.shape_config import ShapeConfig


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are scaled for texts longer than those of pretraining; the keys are those of Hugging Face's
    config.json.

    linear (position interpolation, arXiv:2306.15595), dynamic (NTK), llama3, yarn (arXiv:2309.00071), longrope
    (arXiv:2402.13753).
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # yarn, longrope: of cosines and sines
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()  # longrope: a divisor for each pair of features
    long_factor: tuple[float, ...] = ()

    @property
    def amplitude(self) -> float:
        """Times cosines and sines, so its square is times the scores of rotated features."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            return sqrt(1 + log(self.factor) / log(self.original_max_position_embeddings)) if self.factor > 1 else 1.0
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._yarn_amplitude(self.mscale) / self._yarn_amplitude(self.mscale_all_dim)
        return self._yarn_amplitude(1.0)

    @property
    def changes_after(self) -> int | None:
        """The length of text after which other frequencies hold; None if there is no such length."""
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None

    @property
    def as_computed(self) -> "RopeScaling":
        """Equal for scalings that compute the same: the factor of longrope is used for the amplitude alone."""
        return replace(self, factor=1.0, attention_factor=self.amplitude) if self.rope_type == "longrope" else self

    def _yarn_amplitude(self, scale: float) -> float:
        return 0.1 * scale * log(self.factor) + 1 if self.factor > 1 else 1.0


_OLD, _LISTS = "original_max_position_embeddings", ("short_factor", "long_factor")
# Keys of each type: needed, allowed.
ROPE_SCALINGS = {
    "linear": (("factor",), ()),
    "dynamic": (("factor", _OLD), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _OLD), ()),
    "yarn": (("factor", _OLD), ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")),
    "longrope": (("factor", _OLD, *_LISTS), ("attention_factor",)),
}


def rope_scaling_of(text: str) -> RopeScaling:
    """A scaling from JSON. Raises ValueError: what is missing, unknown or out of range."""
    given = json.loads(text)
    if not isinstance(given, dict) or given.get("rope_type") not in ROPE_SCALINGS:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_SCALINGS)}")
    kind = given["rope_type"]
    needed, allowed = ROPE_SCALINGS[kind]
    if missing := [key for key in needed if given.get(key) is None]:
        raise ValueError(f"{kind} needs {', '.join(missing)} too")
    if unknown := [key for key in given if key not in ("rope_type", *needed, *allowed)]:
        raise ValueError(f"{kind} has no {', '.join(unknown)}; it has {', '.join((*needed, *allowed))}")
    for key, value in given.items():
        if key != "rope_type" and not _fits(key, value):
            raise ValueError(f"{key} is {value!r}; {_KINDS.get(key, 'it must be a positive number')}")
    values = {key: tuple(map(float, value)) if key in _LISTS else value for key, value in given.items()}
    scaling = RopeScaling(**{key: value for key, value in values.items() if value is not None})
    if kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError("low_freq_factor must be less than high_freq_factor")
    if len(scaling.short_factor) != len(scaling.long_factor):
        raise ValueError("short_factor and long_factor must be of one length, the pairs of features that are rotated")
    return scaling


_KINDS = {
    "truncate": "it must be true or false",
    _OLD: "it must be a whole number from 2 on",
    **dict.fromkeys(_LISTS, "it must be a list of positive numbers"),
    **dict.fromkeys(("mscale", "mscale_all_dim"), "it must be a number"),
}


def _fits(key: str, value: Any) -> bool:
    if value is None:
        return key not in ("truncate", _OLD)
    if key == "truncate":
        return isinstance(value, bool)
    if key in _LISTS:
        return isinstance(value, list) and bool(value) and all(_is_positive(one) for one in value)
    if key == _OLD:
        return type(value) is int and value > 1
    return type(value) in (int, float) and value == value if key.startswith("mscale") else _is_positive(value)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def read_rope_scaling(text: str) -> str:
    """The JSON in one spelling."""
    try:
        scaling = rope_scaling_of(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a scaling of frequencies, such as {{"rope_type": "linear", "factor": 4}}: {error}'
        ) from None
    defaults = {f.name: f.default for f in fields(RopeScaling)}
    values = {key: getattr(scaling, key) for key in defaults}
    needed, _ = ROPE_SCALINGS[scaling.rope_type]
    return json.dumps({key: value for key, value in values.items() if value != defaults[key] or key in needed})


class Rope(NamedTuple):
    """How a layer rotates."""

    base: float
    scaling: RopeScaling | None = None

    @property
    def amplitude(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.amplitude

    @property
    def as_computed(self) -> "Rope":
        """Equal for ropes that compute the same."""
        return self._replace(scaling=self.scaling and self.scaling.as_computed)


@dataclass(frozen=True)
class PositionConfig(ShapeConfig):
    """Positions of tokens."""

    position_embedding_type: Literal["learned_absolute", "rope", "relative", "none"] = knob(
        "learned_absolute", "position embedding; relative: T5's, by buckets of distances"
    )
    relative_attention_num_buckets: Count = knob(32, "relative positions: buckets that distances fall into")
    relative_attention_max_distance: Count = knob(
        128, "relative positions: distance from which on all share the last bucket"
    )
    rotary_base: Positive = knob(10000.0, "base of the rotary frequencies")
    rotary_percent: Annotated[float, "(0, 1]"] = knob(1.0, "share of each head that is rotated")
    rotary_interleaved: bool = knob(False, "rotate features 2j and 2j + 1 of a head, instead of its halves' features j")
    rotary_base_of_windows: Positive | None = knob(
        None, "base in layers with a window, whose frequencies are not scaled; default: all layers rotate alike"
    )
    no_rope_freq: str | None = knob(
        None,
        "N: each Nth layer does not rotate; or a list with 1 for each layer that does not, 0 for others, such as [0,0,0,1]*4",
        metavar="N|LIST",
        read=read_pattern,
    )
    rotary_seq_len_interpolation_factor: Positive | None = knob(None, "divide the rotary frequencies by this")
    use_rope_scaling: bool = knob(
        False, "scale the rotary frequencies as Llama 3.1 does, by --rope-scaling-factor, for a context of 8192 before"
    )
    rope_scaling_factor: Positive = knob(8.0, "factor of --use-rope-scaling")
    rope_scaling: str | None = knob(
        None,
        "scale the rotary frequencies as config.json says: rope_type linear, dynamic, llama3, yarn or longrope, and its numbers",
        metavar="JSON",
        read=read_rope_scaling,
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if any(out_of_range(self)):
            return
        if self.position_embedding_type == "rope":
            yield from self._rotary_problems()
        else:
            for flag in (flag for flag, given in self._rotary_options().items() if given):
                yield f"{flag} needs --position-embedding-type rope; give that too, or leave it out"
        yield from self._relative_problems()

    def _relative_problems(self) -> Iterator[str]:
        buckets, far = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if self.position_embedding_type != "relative":
            given = {"--relative-attention-num-buckets": buckets != 32, "--relative-attention-max-distance": far != 128}
            for flag in (flag for flag, differs in given.items() if differs):
                yield f"{flag} needs --position-embedding-type relative; give that too, or leave it out"
            return
        if buckets < 4 or buckets % 4:
            yield f"--relative-attention-num-buckets ({buckets}) must be a multiple of 4: two directions, each near and far"
        if far <= buckets // 2:
            yield (
                f"--relative-attention-max-distance ({far}) must be above {buckets // 2}, half of "
                "--relative-attention-num-buckets: so many distances have buckets of their own; raise it"
            )

    def _rotary_options(self) -> dict[str, bool]:
        return {
            "--rotary-interleaved": self.rotary_interleaved,
            "--rotary-base-of-windows": self.rotary_base_of_windows is not None,
            "--no-rope-freq": self.no_rope_freq is not None,
            **self._scalings(),
        }

    def _scalings(self) -> dict[str, bool]:
        return {
            "--rotary-seq-len-interpolation-factor": self.rotary_seq_len_interpolation_factor not in (None, 1),
            "--use-rope-scaling": self.use_rope_scaling,
            "--rope-scaling": self.rope_scaling is not None,
        }

    def _rotary_problems(self) -> Iterator[str]:
        width, scalings = self.rotary_width, [flag for flag, given in self._scalings().items() if given]
        if width < 2 or width % 2:
            yield f"rotary positions need an even width; heads of {self.head_width} x --rotary-percent give {width}"
        if len(scalings) > 1:
            yield f"{' and '.join(scalings)} exclude each other; give one"
        if self.rope_scaling_factor != 8 and not self.use_rope_scaling:
            yield f"--rope-scaling-factor {self.rope_scaling_factor} needs --use-rope-scaling; give that too"
        if self.rotary_base_of_windows is not None and self.window_size is None:
            yield "--rotary-base-of-windows needs --window-size L,0; give that too, or leave it out"
        pattern = None if self.no_rope_freq is None else layer_pattern(self.no_rope_freq)
        if isinstance(pattern, list) and len(pattern) != self.num_layers:
            yield f"--no-rope-freq has {len(pattern)} entries and --num-layers is {self.num_layers}; give one for each layer"
        if self._scaling and self._scaling.rope_type == "dynamic" and width == 2:
            yield "--rope-scaling dynamic needs more than two rotated features; raise --rotary-percent or --kv-channels"
        divisors = len(self._scaling.short_factor) if self._scaling else 0
        if divisors and 2 * divisors != width:
            yield f"--rope-scaling has {divisors} numbers in its lists, and {width} features are rotated: give {width // 2}"

    @property
    def parsed_patterns(self) -> dict[str, Any]:
        no_rope = None if self.no_rope_freq is None else layer_pattern(self.no_rope_freq)
        return {**super().parsed_patterns, "no_rope_freq": no_rope}

    @property
    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_percent)

    @property
    def _scaling(self) -> RopeScaling | None:
        """Of layers that rotate by --rotary-base."""
        if self.use_rope_scaling:
            return RopeScaling("llama3", self.rope_scaling_factor, 8192)
        if self.rotary_seq_len_interpolation_factor is not None:
            return RopeScaling("linear", self.rotary_seq_len_interpolation_factor)
        return None if self.rope_scaling is None else _parsed(self.rope_scaling)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The ways in which the model's layers rotate, each once; none without rotary positions."""
        if self.position_embedding_type != "rope":
            return ()
        return tuple(dict.fromkeys(rope for layer in range(self.num_layers) if (rope := self._rope_of(layer))))

    def rope_of(self, layer: int) -> int | None:
        """Which of `ropes` a layer, from 0 over the whole model, rotates by; None: it does not rotate."""
        rope = self._rope_of(layer) if self.position_embedding_type == "rope" else None
        return None if rope is None else self.ropes.index(rope)

    def _rope_of(self, layer: int) -> Rope | None:
        if is_exception(self.no_rope_freq, layer, marked=1):
            return None
        if self.rotary_base_of_windows is not None and self.keys_before(layer) is not None:
            return Rope(self.rotary_base_of_windows)
        return Rope(self.rotary_base, self._scaling)


_parsed = cache(rope_scaling_of)
