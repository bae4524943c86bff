"""Settings of positions: learned, rotary, relative or none; which layers rotate, and by which frequencies. Pure."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from math import log, sqrt
from typing import Annotated, Any, Literal, NamedTuple

from megatron.core.base.dataclass_flags import Count, Positive, option, out_of_range
from megatron.core.transformer.layer_freq_pattern import is_exception, layer_pattern, read_pattern
from megatron.core.transformer.shape_norm_dropout_init_config import ShapeConfig


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of rotary frequencies, for texts longer than those of pretraining.

    The fields are the keys of Hugging Face's config.json. rope_type: linear (position interpolation, arXiv:2306.15595),
    dynamic (NTK), llama3, yarn (arXiv:2309.00071), longrope (arXiv:2402.13753).
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # yarn, longrope: multiplies cosines and sines
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()  # longrope: a divisor for each pair of features
    long_factor: tuple[float, ...] = ()

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines; scores of rotated features are multiplied by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            if self.factor <= 1:
                return 1.0
            return sqrt(1 + log(self.factor) / log(self.original_max_position_embeddings))
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._yarn_amplitude(self.mscale) / self._yarn_amplitude(self.mscale_all_dim)
        return self._yarn_amplitude(1.0)

    @property
    def changes_after(self) -> int | None:
        """The length of text above which a model has other frequencies; None if there is no such length."""
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None

    @property
    def as_computed(self) -> "RopeScaling":
        """A form that is equal for scalings that compute the same: longrope uses `factor` for the amplitude alone."""
        if self.rope_type != "longrope":
            return self
        return replace(self, factor=1.0, attention_factor=self.amplitude)

    def _yarn_amplitude(self, scale: float) -> float:
        return 0.1 * scale * log(self.factor) + 1 if self.factor > 1 else 1.0


_ORIGINAL_LENGTH = "original_max_position_embeddings"
_LISTS = ("short_factor", "long_factor")
# rope_type -> (needed keys, allowed keys)
ROPE_SCALINGS = {
    "linear": (("factor",), ()),
    "dynamic": (("factor", _ORIGINAL_LENGTH), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_LENGTH), ()),
    "yarn": (
        ("factor", _ORIGINAL_LENGTH),
        ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": (("factor", _ORIGINAL_LENGTH, *_LISTS), ("attention_factor",)),
}


def rope_scaling_of(text: str) -> RopeScaling:
    """Return a scaling from JSON. Raises ValueError for missing or unknown keys and values out of range."""
    values = json.loads(text)
    if not isinstance(values, dict) or values.get("rope_type") not in ROPE_SCALINGS:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_SCALINGS)}")
    kind = values["rope_type"]
    needed, allowed = ROPE_SCALINGS[kind]
    if missing := [key for key in needed if values.get(key) is None]:
        raise ValueError(f"{kind} needs {', '.join(missing)} too")
    if unknown := [key for key in values if key not in ("rope_type", *needed, *allowed)]:
        raise ValueError(f"{kind} has no parameter {', '.join(unknown)}; it has {', '.join((*needed, *allowed))}")
    for key, value in values.items():
        if key != "rope_type" and not _is_valid(key, value):
            raise ValueError(f"{key} is {value!r}; {_REQUIREMENTS.get(key, 'it must be a positive number')}")
    fields_of_scaling = {}
    for key, value in values.items():
        if value is not None:  # null is the default
            fields_of_scaling[key] = tuple(map(float, value)) if key in _LISTS else value
    scaling = RopeScaling(**fields_of_scaling)
    if kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError("low_freq_factor must be less than high_freq_factor")
    if len(scaling.short_factor) != len(scaling.long_factor):
        raise ValueError(
            "short_factor and long_factor must have the same length, the number of rotated pairs of features"
        )
    return scaling


_REQUIREMENTS = {
    "truncate": "it must be true or false",
    _ORIGINAL_LENGTH: "it must be a whole number from 2 on",
    **dict.fromkeys(_LISTS, "it must be a list of positive numbers"),
    **dict.fromkeys(("mscale", "mscale_all_dim"), "it must be a number"),
}


def _is_valid(key: str, value: Any) -> bool:
    if value is None:
        return key not in ("truncate", _ORIGINAL_LENGTH)
    if key == "truncate":
        return isinstance(value, bool)
    if key in _LISTS:
        return isinstance(value, list) and bool(value) and all(_is_positive(factor) for factor in value)
    if key == _ORIGINAL_LENGTH:
        return type(value) is int and value > 1
    if key.startswith("mscale"):
        return type(value) in (int, float) and value == value  # not NaN
    return _is_positive(value)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def read_rope_scaling(text: str) -> str:
    """Return the JSON of a scaling in one spelling: defaults are left out."""
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
    """The rotary frequencies of a layer."""

    base: float
    scaling: RopeScaling | None = None

    @property
    def amplitude(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.amplitude

    @property
    def as_computed(self) -> "Rope":
        """A form that is equal for ropes that compute the same."""
        if self.scaling is None:
            return self
        return self._replace(scaling=self.scaling.as_computed)


@dataclass(frozen=True)
class PositionConfig(ShapeConfig):
    """Positions of tokens."""

    position_embedding_type: Literal["learned_absolute", "rope", "relative", "none"] = option(
        "learned_absolute",
        "position embedding; relative: T5's bias of the attention scores, one for each bucket of distances",
    )
    relative_attention_num_buckets: Count = option(32, "relative positions: number of buckets of distances")
    relative_attention_max_distance: Count = option(
        128, "relative positions: all distances from this one on share the last bucket"
    )
    rotary_base: Positive = option(10000.0, "base of the rotary frequencies")
    rotary_percent: Annotated[float, "(0, 1]"] = option(
        1.0, "share of a head's features to which rotary positions apply"
    )
    rotary_interleaved: bool = option(
        False, "rotate features 2j and 2j + 1 of a head as a pair, instead of features j and j + half of the width"
    )
    rotary_base_of_windows: Positive | None = option(
        None,
        "base of the rotary frequencies in layers with a sliding window; frequency scaling is then not applied in "
        "these layers; default: --rotary-base for all layers",
    )
    no_rope_freq: str | None = option(
        None,
        "which layers have no rotary positions: N: every Nth layer; or a list with 1 for those layers and 0 for the "
        "others, such as [0,0,0,1]*4",
        metavar="N|LIST",
        read=read_pattern,
    )
    rotary_seq_len_interpolation_factor: Positive | None = option(None, "divide the rotary frequencies by this number")
    use_rope_scaling: bool = option(
        False,
        "scale the rotary frequencies as Llama 3.1 does, by --rope-scaling-factor, for an original context "
        "of 8192 tokens",
    )
    rope_scaling_factor: Positive = option(8.0, "factor of --use-rope-scaling")
    rope_scaling: str | None = option(
        None,
        "scale the rotary frequencies by the rope_scaling object of a Hugging Face config.json, in JSON: rope_type "
        "(linear, dynamic, llama3, yarn or longrope) and its parameters",
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
            for flag, is_set in self._rotary_options().items():
                if is_set:
                    yield f"{flag} needs --position-embedding-type rope; give both, or leave it out"
        yield from self._relative_problems()

    def _relative_problems(self) -> Iterator[str]:
        buckets = self.relative_attention_num_buckets
        far = self.relative_attention_max_distance
        if self.position_embedding_type != "relative":
            options = {
                "--relative-attention-num-buckets": buckets != 32,
                "--relative-attention-max-distance": far != 128,
            }
            for flag, is_set in options.items():
                if is_set:
                    yield f"{flag} needs --position-embedding-type relative; give both, or leave it out"
            return
        if buckets < 4 or buckets % 4:
            yield (
                f"--relative-attention-num-buckets ({buckets}) must be a multiple of 4: it is divided into two "
                "directions, and each into near and far distances"
            )
        if far <= buckets // 2:
            yield (
                f"--relative-attention-max-distance ({far}) must be above {buckets // 2} (half of "
                "--relative-attention-num-buckets), because each distance up to that number has a bucket of its own; "
                "raise --relative-attention-max-distance"
            )

    def _rotary_options(self) -> dict[str, bool]:
        """Return flag -> whether it is set, for all that are about rotary positions."""
        return {
            "--rotary-interleaved": self.rotary_interleaved,
            "--rotary-base-of-windows": self.rotary_base_of_windows is not None,
            "--no-rope-freq": self.no_rope_freq is not None,
            **self._scalings(),
        }

    def _scalings(self) -> dict[str, bool]:
        """Return flag -> whether it is set, for those that scale the frequencies."""
        return {
            "--rotary-seq-len-interpolation-factor": self.rotary_seq_len_interpolation_factor not in (None, 1),
            "--use-rope-scaling": self.use_rope_scaling,
            "--rope-scaling": self.rope_scaling is not None,
        }

    def _rotary_problems(self) -> Iterator[str]:
        width = self.rotary_width
        scalings = [flag for flag, is_set in self._scalings().items() if is_set]
        if width < 2 or width % 2:
            yield (
                f"rotary positions need an even number of rotated features; heads of {self.head_width} x "
                f"--rotary-percent give {width}"
            )
        if len(scalings) > 1:
            yield f"{' and '.join(scalings)} exclude each other; give only one of them"
        if self.rope_scaling_factor != 8 and not self.use_rope_scaling:
            yield f"--rope-scaling-factor {self.rope_scaling_factor} needs --use-rope-scaling; give both"
        if self.rotary_base_of_windows is not None and self.window_size is None:
            yield "--rotary-base-of-windows needs --window-size L,0; give both, or leave out --rotary-base-of-windows"
        pattern = None if self.no_rope_freq is None else layer_pattern(self.no_rope_freq)
        if isinstance(pattern, list) and len(pattern) != self.num_layers:
            yield (
                f"--no-rope-freq has {len(pattern)} entries, but --num-layers is {self.num_layers}; give one "
                "entry for each layer"
            )
        if self._scaling and self._scaling.rope_type == "dynamic" and width == 2:
            yield (
                "--rope-scaling dynamic needs more than two rotated features per head; raise --rotary-percent or "
                "--kv-channels"
            )
        divisors = len(self._scaling.short_factor) if self._scaling else 0
        if divisors and 2 * divisors != width:
            yield (
                f"--rope-scaling has lists of {divisors} numbers, but {width} features of a head are rotated; "
                f"give lists of {width // 2} numbers"
            )

    @property
    def parsed_patterns(self) -> dict[str, Any]:
        no_rope = None if self.no_rope_freq is None else layer_pattern(self.no_rope_freq)
        return {**super().parsed_patterns, "no_rope_freq": no_rope}

    @property
    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_percent)

    @property
    def _scaling(self) -> RopeScaling | None:
        """The scaling of layers that rotate by --rotary-base."""
        if self.use_rope_scaling:
            return RopeScaling("llama3", self.rope_scaling_factor, 8192)
        if self.rotary_seq_len_interpolation_factor is not None:
            return RopeScaling("linear", self.rotary_seq_len_interpolation_factor)
        return None if self.rope_scaling is None else _parsed(self.rope_scaling)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ropes of the model's layers, each once; none without rotary positions."""
        if self.position_embedding_type != "rope":
            return ()
        ropes = [self._rope_of(layer) for layer in range(self.num_layers)]
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    def rope_of(self, layer: int) -> int | None:
        """Return the index in `ropes` of a layer's rope; None: it does not rotate.

        layer: from 0, over the whole model.
        """
        if self.position_embedding_type != "rope":
            return None
        rope = self._rope_of(layer)
        return None if rope is None else self.ropes.index(rope)

    def _rope_of(self, layer: int) -> Rope | None:
        if is_exception(self.no_rope_freq, layer, marked=1):
            return None
        if self.rotary_base_of_windows is not None and self.window_left(layer) is not None:
            return Rope(self.rotary_base_of_windows)
        return Rope(self.rotary_base, self._scaling)


_parsed = cache(rope_scaling_of)
