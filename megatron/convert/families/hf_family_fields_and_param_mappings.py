"""Describe a family of Hugging Face models as a table: fields of config.json, and a mapping for each parameter."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.convert.families.config_fields import ConfigReader, Field, ModelSettings, fixed_not_written, ignored_keys
from megatron.convert.families.keys_without_effect import KEYS_WITHOUT_EFFECT


class ParamMapping(NamedTuple):
    """One parameter of ours, and the Hugging Face tensors that an operation makes it of.

    Megatron Bridge has such mappings too.

    In names, {i} is a layer, {j} a layer of a decoder behind an encoder, {e} an expert. Hugging Face names with {e} are
    repeated for every expert: those of expert 0 first.
    """

    param: str
    operation: str  # a key of `weight_layout.OPERATIONS`
    hf_params: tuple[str, ...]
    gated: bool | None = None  # True: for models with a gated MLP; False: for all others; None: for both
    experts: bool | None = None  # True: in layers with experts; False: in all others; None: in both

    def of_layer(self, layer: int, num_experts: int) -> "ParamMapping":
        """Return the mapping with the names of this layer, and of all of its experts."""
        names = self.hf_params
        if any("{e}" in name for name in names):
            names = tuple(name.replace("{e}", str(e)) for e in range(num_experts) for name in names)
        return self._replace(
            param=self.param.format(i=layer, j=layer), hf_params=tuple(name.format(i=layer, j=layer) for name in names)
        )


_BASES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining")  # suffixes of an `architecture`
# Suffixes of transformers' architectures that have the layers of a family, and no language modeling head.
NO_LM_HEAD = (
    *("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "ForMultipleChoice",
)
# Heads of other tasks, as regular expressions of their tensors' names -> the suffixes of the architectures that have them.
HEADS_OF_OTHER_TASKS = {
    r"(score|classifier)\..+": ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"),
    r"qa_outputs\..+": ("ForQuestionAnswering",),
    r"multiple_choice_head\..+": ("DoubleHeadsModel",),
}


class Head(NamedTuple):
    """A part of our model that some architectures of a family do not have."""

    prefixes: tuple[str, ...]  # of its parameters' names
    absent_in: tuple[str, ...]  # the suffixes of the architectures without it

    def of(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are parameters of this head."""
        return [name for name in names if name.startswith(self.prefixes)]


def _has_no_untied_config(config: Mapping[str, Any]) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """One family: how its models are described and stored.

    architecture     the class that transformers builds
    settings         what all models of the family have in common, by names of `ModelConfig`
    fields           the keys of its config.json
    mappings         its parameters, as its published files have them
    stacked_mappings parameters that transformers 5 has under other names, or as one tensor of all experts: files that
                     `save_pretrained(save_original_format=False)` writes. They are read, and never written
    ignored_tensors  names, as regular expressions, of tensors that are no parameters
    vocab_size       the class's own, for a config.json without one
    model            our class
    old_suffixes     (suffix in old files, suffix today) of tensors' names
    tied_copies      (name, name) of tensors that must be equal
    untied_config    for a config.json that leaves it to the weights whether the output layer is tied to the word
                     embeddings: returns the config.json that says it is not; None for any other config.json
    heads            parts of our model that some of its architectures lack
    """

    architecture: str
    settings: Mapping[str, Any]
    fields: tuple[Field, ...]
    mappings: tuple[ParamMapping, ...]
    ignored_tensors: tuple[str, ...] = ()
    stacked_mappings: tuple[ParamMapping, ...] = ()
    vocab_size: int | None = None
    model: str = "GPTModel"
    old_suffixes: tuple[tuple[str, str], ...] = ()
    tied_copies: tuple[tuple[str, str], ...] = ()
    untied_config: Callable[[Mapping[str, Any]], dict[str, Any] | None] = _has_no_untied_config
    heads: tuple[Head, ...] = (Head(("language_model.output_layer.",), NO_LM_HEAD),)

    @property
    def prefix(self) -> str:
        """The prefix, such as "bert.", of names in a model with a head. The base class and some old files lack it."""
        _, embedding = self.output_and_embedding_weights()
        if embedding.count(".") == 1:  # shared.weight of a T5
            return ""
        return embedding.split(".")[0] + "."

    def output_and_embedding_weights(self) -> tuple[str, str]:
        """Return the Hugging Face names of the output layer's weight and of the word embeddings."""
        hf_names = {mapping.param: mapping.hf_params[0] for mapping in self.mappings}
        return hf_names[f"{OUTPUT_LAYER}.weight"], hf_names[WORD_EMBEDDINGS]

    def absent_heads(self, architectures: Any) -> tuple[Head, ...]:
        """Return the heads that none of a config.json's architectures has. An unknown architecture has all heads."""
        if not isinstance(architectures, list) or not architectures:
            return ()
        suffixes = [name.removeprefix(self._stem) if isinstance(name, str) else "" for name in architectures]
        return tuple(head for head in self.heads if all(suffix in head.absent_in for suffix in suffixes))

    def architecture_lacking(self, heads: Collection[Head]) -> str:
        """Return the architecture that has all heads but these; the family's own if there is none."""
        suffixes = dict.fromkeys(suffix for head in self.heads for suffix in head.absent_in)
        names = [self.architecture, *(self._stem + suffix for suffix in suffixes)]
        for name in names:
            if {*self.absent_heads([name])} == {*heads}:
                return name
        return self.architecture

    @property
    def _stem(self) -> str:
        """The architecture without its suffix, such as Llama of LlamaForCausalLM."""
        for suffix in _BASES:
            if self.architecture.endswith(suffix):
                return self.architecture.removesuffix(suffix)
        return self.architecture


# names of our parameters
LANGUAGE_MODEL = "language_model."
LAYER = f"{LANGUAGE_MODEL}decoder.layers.{{i}}."
WORD_EMBEDDINGS = f"{LANGUAGE_MODEL}embedding.word_embeddings.weight"
OUTPUT_LAYER = f"{LANGUAGE_MODEL}output_layer"
START_ID = "decoder_start_token_id"  # the first id of a decoder's input


def weight_and_bias(module: str, operation: str, *hf_modules: str) -> Iterator[ParamMapping]:
    """Yield the mappings of a module's weight and of its bias, which only some models of a family have."""
    bias_operations = {"transpose": "copy", "qkv_transpose": "qkv_rows"}  # a bias has no second dimension
    for suffix, part_operation in (("weight", operation), ("bias", bias_operations.get(operation, operation))):
        hf_params = tuple(f"{name}.{suffix}" for name in hf_modules)
        yield ParamMapping(f"{module}.{suffix}", part_operation, hf_params)


# What a config.json says of how a model was trained, stored or is used, but not of what it computes.
UNUSED_KEYS = ignored_keys(*KEYS_WITHOUT_EFFECT)
# One stack of layers, without cross attention: what models of all families but T5 are.
NOT_ENCODER_DECODER = (
    fixed_not_written("is_encoder_decoder", False),
    fixed_not_written("add_cross_attention", False),
    fixed_not_written("is_decoder", False),
    fixed_not_written("use_bfloat16", False),
    fixed_not_written("pruned_heads", {}),
    fixed_not_written("per_layer_config", {}),
)

_ACTIVATIONS = {
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu-tanh"),
    **{"gelu": "gelu", "relu": "relu", "relu2": "squared-relu", "quick_gelu": "quick-gelu"},
    **dict.fromkeys(("silu", "swish"), "silu"),
}
# reversed, so that the first of several names is the one that is written
_HF_ACTIVATIONS = {ours: hf_name for hf_name, ours in reversed(_ACTIVATIONS.items())}


def activation(key: str, default: str, *, gated: bool) -> Field:
    """The activation of the MLP. default: the class's own."""

    def read(reader: ConfigReader) -> ModelSettings:
        kind = _ACTIVATIONS[reader.choice(key, default, _ACTIVATIONS)]
        if gated and kind == "silu":
            return {"swiglu": True}
        return {"gated": gated, "activation": kind}

    return Field((key,), read, lambda model: {key: _HF_ACTIVATIONS[model.activation_region.removeprefix("gated_")]})


def bias(key: str, *settings: str, default: bool = False) -> Field:
    """A key that switches several biases of ours. The value that is written is the effective one of the last."""
    effective = {
        "add_qkv_bias": "has_qkv_bias",
        "add_attention_output_bias": "has_proj_bias",
        "add_mlp_bias": "has_mlp_bias",
    }
    last = effective.get(settings[-1], settings[-1])

    def read(reader: ConfigReader) -> ModelSettings:
        return dict.fromkeys(settings, reader.choice(key, default, (False, True)))

    return Field((key,), read, lambda model: {key: getattr(model, last)})


def multiplier(key: str, setting: str, default: float, *, inverse: bool = False) -> Field:
    """A positive factor; inverse: the key is its inverse."""

    def convert(x: float) -> float:
        return 1 / x if inverse else x

    def read(reader: ConfigReader) -> ModelSettings:
        value = reader.number(key, default)
        if not value > 0:
            raise reader.error(key, "it must be positive")
        return {setting: convert(value)}

    return Field((key,), read, lambda model: {key: convert(getattr(model, setting) or 1.0)})
