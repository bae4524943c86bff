"""Work of a benchmark (sizes of a model and a batch), and its contenders. Pure integers.

Its FLOPs and parameters are what the layers of our model say (`costs.py`).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import flag_of
from megatron.training.model_flops_of_unbuilt_layouts import ModelShape

# Flags of a family beside the sizes. The defaults are GPT-2's: learned positions, GELU, biases and tied embeddings.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "bert": {},
    "llama": {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
    },
}

# Our flags on several ranks, and the part of torch that the peer uses for the same.
PARALLEL: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, ""),
    "dp": ({"overlap_grad_reduce": True}, "DistributedDataParallel"),
    "zero3": ({"zero_stage": 3, "overlap_grad_reduce": True, "overlap_param_gather": True}, "fully_shard"),
    "tp": ({}, "DTensor"),
    "pp": ({}, "pipelining"),
}


class Costs(NamedTuple):
    """What a sample of a work costs, whatever its layout."""

    model_flops: int
    full_attention_flops: int  # with the keys after a query
    parameters: int  # without padding


@dataclass(frozen=True)
class Work:
    """One training step, with AdamW and clipping. The fields up to `cpu_half_products` are flags of training."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int = 50257
    seq_length: int = 512
    micro_batch_size: int = 4
    global_batch_size: int = 4
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    num_query_groups: int | None = None  # llama
    ffn_hidden_size: int | None = None
    bf16: bool = False
    fp16: bool = False
    cpu_half_products: str = "auto"
    family: str = "gpt"
    parallel: str = "none"
    ranks: int = 1

    @property
    def flags(self) -> dict[str, Any]:
        """The settings of training for this work, by name, without the vocabulary size."""
        not_settings = ("family", "parallel", "ranks", "vocab_size")
        flags = {name: value for name, value in asdict(self).items() if name not in not_settings and value is not None}
        flags |= FAMILIES[self.family]
        flags |= PARALLEL[self.parallel][0]
        flags["tensor_model_parallel_size"] = self.split_over("tp")
        flags["pipeline_model_parallel_size"] = self.split_over("pp")
        return flags

    def split_over(self, kind: str) -> int:
        """Return the ranks of an axis: all of them for the parallelism of this work, else 1."""
        return self.ranks if self.parallel == kind else 1

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, also for peers: a multiple of 128 is faster for all."""
        multiple = 128 * self.split_over("tp")
        return -(-self.vocab_size // multiple) * multiple

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return self.split_over("dp") * self.split_over("zero3")

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each replica in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.replicas)

    @property
    def has_dropout(self) -> bool:
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_length * self.global_batch_size

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def shape(self) -> ModelShape:
        h = self.hidden_size
        kv_width = h // self.num_attention_heads * self.kv_heads
        ffn_size = self.ffn_hidden_size or 4 * h
        return ModelShape(
            self.num_layers,
            h,
            h,
            kv_width,
            ffn_size,
            self.vocab_size,
            self.seq_length,
            gated=self.family == "llama",
            is_bert=self.family == "bert",
        )

    @property
    def flops_per_token(self) -> int:
        """Those of our model's layers, by which all contenders are told; of their mean token, rounded down."""
        return self._costs().model_flops // self.seq_length

    @property
    def flops_per_token_full_attention(self) -> int:
        """The same with the keys after a query, which causal attention does not see."""
        return self._costs().full_attention_flops // self.seq_length

    @property
    def parameters(self) -> int:
        """All parameters of our model without padding; a tied embedding once."""
        return self._costs().parameters

    def _costs(self) -> Costs:
        return import_module("tools.benchmarking.costs").costs_of(self)  # not imported above: it needs torch

    def problems(self) -> Iterator[str]:
        """Yield validation errors, by flag."""
        too_small = [name for name, value in asdict(self).items() if type(value) is int and value < 1]
        for name in too_small:
            yield f"{flag_of(name)} must be at least 1"
        if too_small:
            return
        if self.vocab_size < 2:
            yield "--vocab-size must be at least 2: a word and the end of a document"
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            yield f"--hidden-size ({self.hidden_size}) must be a multiple of --num-attention-heads ({heads})"
        if self.global_batch_size % (self.micro_batch_size * self.replicas):
            ranks = f" x {self.replicas} ranks" if self.replicas > 1 else ""
            yield (
                f"--global-batch-size ({self.global_batch_size}) must be a multiple of "
                f"--micro-batch-size ({self.micro_batch_size}){ranks}"
            )
        if self.parallel in ("tp", "pp") and self.family == "bert":
            yield f"--parallel {self.parallel} has no peer for BERT; measure a GPT or Llama shape, or --parallel dp or zero3"
        if self.parallel == "pp" and self.num_layers % self.ranks:
            yield f"--parallel pp: --num-layers ({self.num_layers}) must be a multiple of --ranks ({self.ranks})"
        if self.parallel == "tp" and self.kv_heads % self.ranks:
            yield f"--parallel tp: {self.kv_heads} key/value heads must be a multiple of --ranks ({self.ranks})"


MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 255},
    # nanoGPT's smallest example, whose step is mostly the work of the framework
    "framework": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "seq_length": 64,
        "micro_batch_size": 12,
    },
    "gpt-28m": {
        "num_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 4096,
        "micro_batch_size": 2,
    },
    "small-4l": {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 16383},
    "gpt2-small": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "gpt2-medium": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "gpt2-large": {"num_layers": 36, "hidden_size": 1280, "num_attention_heads": 20},
    "gpt2-xl": {"num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25},
    "llama-small": {
        "family": "llama",
        "num_layers": 8,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_query_groups": 4,
        "ffn_hidden_size": 2048,
        "vocab_size": 32000,
    },
    "bert-small": {
        "family": "bert",
        "num_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 30592,
    },
}


@dataclass(frozen=True)
class Contender:
    """Code that trains a work, in one process or one for each rank."""

    library: str  # ours, plain or transformers
    compile: str = "off"  # ours: off, regions or layers; others: off or whole
    bf16: bool | None = None  # None: the work's precision
    same_allocator: bool = False  # a peer that keeps freed memory in the process, as ours does

    @property
    def is_ours(self) -> bool:
        return self.library == "ours"

    def title(self, parallel: str = "none") -> str:
        """Return the name in tables, such as "plain PyTorch bf16 autocast with DTensor, compiled"."""
        if self.is_ours:
            return "ours" if self.compile == "off" else f"ours, --compile {self.compile}"
        name = "plain PyTorch" if self.library == "plain" else self.library
        if self.bf16 is not None:
            name += " bf16 autocast" if self.bf16 else " fp32"
        torch_part = PARALLEL[parallel][1]
        if torch_part:
            name += f" with {torch_part}"
        if self.compile != "off":
            name += ", compiled"
        return name


# The names of --peers. The last three have a precision of their own, whatever the work's is.
PEERS = {
    "plain": Contender("plain"),
    "plain-compiled": Contender("plain", "whole"),
    "transformers": Contender("transformers"),
    "transformers-compiled": Contender("transformers", "whole"),
    "fp32": Contender("transformers", bf16=False),
    "bf16": Contender("transformers", bf16=True),
    "compiled": Contender("transformers", "whole", bf16=True),
}
OURS = Contender("ours")
