"""A family of models that other libraries have, as a table: fields of config.json, and a row for each tensor."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.convert.families.config_fields import Field, Given, ModelSettings, only, unused


class Row(NamedTuple):
    """One tensor of ours, and the tensors of theirs that it is made of by an operation; {i} is a layer, {j} one of a decoder
    behind an encoder. gated: the row is about a gated MLP, or about another; None: about both."""

    ours: str
    operation: str
    theirs: tuple[str, ...]
    gated: bool | None = None


_BASES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining")  # ends of an `architecture`
# Ends of architectures of transformers that have the layers of a family, and no head that scores words.
NO_WORDS = (
    *("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "ForMultipleChoice",
)


class Head(NamedTuple):
    """A part of our model that some architectures of a family do not have."""

    ours: tuple[str, ...]  # what the names of its parameters begin with
    lacking: tuple[str, ...]  # the ends of the architectures without it

    def of(self, names: Iterable[str]) -> list[str]:
        """Those of its parameters."""
        return [name for name in names if name.startswith(self.ours)]


@dataclass(frozen=True)
class Family:
    """One family: how its models are described and stored.

    architecture: the class that transformers builds. settings: what all its models have, by names of `ModelConfig`. ignored:
    names of tensors, as regular expressions, that hold nothing to learn.
    vocab_size: the class's own, where a config.json says none. model: our class. untied: of a config.json that leaves it
    to the
    weights whether the head is the word table, the one that says that it is not; None: of any other. heads: parts of our
    model
    that some of its architectures lack.
    """

    architecture: str
    settings: Mapping[str, Any]
    fields: tuple[Field, ...]
    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()
    vocab_size: int | None = None
    model: str = "GPTModel"
    old_endings: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    untied: Callable[[Mapping[str, Any]], dict[str, Any] | None] = lambda config: None
    heads: tuple[Head, ...] = (Head(("language_model.output_layer.",), NO_WORDS),)

    @property
    def prefix(self) -> str:
        """What names begin with in a model with a head, and not in one of the base class, nor in some old files: "bert."."""
        _, table = self.head_and_table()
        return table.split(".")[0] + "." if table.count(".") > 1 else ""  # a T5 has shared.weight

    def head_and_table(self) -> tuple[str, str]:
        """The names of the head's weight and of the word table."""
        theirs = {row.ours: row.theirs[0] for row in self.rows}
        return theirs[f"{OUTPUT}.weight"], theirs[WORD_TABLE]

    def heads_lacking(self, architectures: Any) -> tuple[Head, ...]:
        """The heads that none of a config.json's architectures has. One that is unknown has all heads."""
        if not isinstance(architectures, list) or not architectures:
            return ()
        ends = [name.removeprefix(self._stem) if isinstance(name, str) else "" for name in architectures]
        return tuple(head for head in self.heads if all(end in head.lacking for end in ends))

    def architecture_without(self, heads: Collection[Head]) -> str:
        """The architecture with all but these heads."""
        ends = dict.fromkeys(end for head in self.heads for end in head.lacking)
        names = [self.architecture, *(self._stem + end for end in ends)]
        wanted = {*heads}
        return next((name for name in names if {*self.heads_lacking([name])} == wanted), self.architecture)

    @property
    def _stem(self) -> str:
        end = next((end for end in _BASES if self.architecture.endswith(end)), "")
        return self.architecture.removesuffix(end)


STAGE = "language_model."
LAYER = f"{STAGE}decoder.layers.{{i}}."
WORD_TABLE = f"{STAGE}embedding.word_embeddings.weight"
OUTPUT = f"{STAGE}output_layer"
START_ID = "decoder_start_token_id"  # with which the texts of a decoder begin


def both(ours: str, operation: str, *theirs: str) -> Iterator[Row]:
    """The rows of a weight and of a bias, which only some models of a family have."""
    plain = {"transpose": "copy", "qkv_transpose": "qkv_rows"}
    for part, how in (("weight", operation), ("bias", plain.get(operation, operation))):
        yield Row(f"{ours}.{part}", how, tuple(f"{name}.{part}" for name in theirs))


# What a config.json says of how a model was trained, stored or is used, but not of what it computes.
ABOUT = unused(
    *("model_type", "architectures", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "output_router_logits"),
    *("auto_map", "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict", "name_or_path"),
    *("chunk_size_feed_forward", "problem_type", "id2label", "label2id", "finetuning_task", "task_specific_params"),
    *(
        "transformers.js_config",
        "tokenizer_class",
        "prefix",
        "sep_token_id",
        "decoder_start_token_id",
        "tie_encoder_decoder",
        "torchscript",
    ),
    *("hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "classifier_dropout"),
)
NOT_ENCODERS = (
    *(only(name, False) for name in ("is_encoder_decoder", "add_cross_attention", "is_decoder", "use_bfloat16")),
    only("pruned_heads", {}),
)

_ACTIVATIONS = {
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu-tanh"),
    **{"gelu": "gelu", "relu": "relu", "relu2": "squared-relu", "quick_gelu": "quick-gelu"},
    **dict.fromkeys(("silu", "swish"), "silu"),
}
_THEIR_NAMES = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}


def activation(key: str, default: str, *, gated: bool) -> Field:
    """The activation of the MLP; default: the class's own."""

    def read(given: Given) -> ModelSettings:
        found = _ACTIVATIONS[given.choice(key, default, _ACTIVATIONS)]
        return {"swiglu": True} if gated and found == "silu" else {"gated": gated, "activation": found}

    return Field((key,), read, lambda model: {key: _THEIR_NAMES[model.activation_region.removeprefix("gated_")]})


def bias(key: str, *ours: str, default: bool = False) -> Field:
    """One switch for several biases of ours."""
    read = lambda given: dict.fromkeys(ours, given.choice(key, default, (False, True)))  # noqa: E731
    has = {"add_qkv_bias": "has_qkv_bias", "add_attention_output_bias": "has_proj_bias", "add_mlp_bias": "has_mlp_bias"}
    return Field((key,), read, lambda model: {key: getattr(model, has.get(ours[-1], ours[-1]))})


def multiplier(key: str, ours: str, default: float, *, inverse: bool = False) -> Field:
    """A factor, or its inverse."""
    turned = (lambda x: 1 / x) if inverse else (lambda x: x)

    def read(given: Given) -> ModelSettings:
        if not (value := given.number(key, default)) > 0:
            raise given.wrong(key, "it must be positive")
        return {ours: turned(value)}

    return Field((key,), read, lambda model: {key: turned(getattr(model, ours) or 1.0)})
