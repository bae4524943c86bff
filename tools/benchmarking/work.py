"""The work of a benchmark: sizes of a model and a batch. Pure integers. `megatron/training/watch/flops.py` defines its FLOPs."""

from dataclasses import asdict, dataclass

from megatron.core.config import flag_of
from megatron.training.watch.flops import ModelShape


@dataclass(frozen=True)
class Work:
    """One training step of a GPT-2 shaped model: learned positions, GELU, biases, tied tables, no dropout, AdamW, clipping."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int = 50257
    seq_length: int = 512
    micro_batch_size: int = 4
    global_batch_size: int = 4
    bf16: bool = False
    fp16: bool = False
    cpu_half_products: str = "auto"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word table, also for peers: a multiple of 128 is faster for all."""
        return -(-self.vocab_size // 128) * 128

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    @property
    def shape(self) -> ModelShape:
        h = self.hidden_size
        return ModelShape(self.num_layers, h, h, h, 4 * h, self.vocab_size, self.seq_length)

    @property
    def parameters(self) -> int:
        """All parameters without padding: matrices (the tied table once), positions, biases and norms."""
        h, layers = self.hidden_size, self.num_layers
        return self.shape.multiplied_parameters + self.seq_length * h + layers * 13 * h + 2 * h

    def problems(self) -> list[str]:
        """Invalid sizes, by flag."""
        sizes = [name for name, value in asdict(self).items() if type(value) is int and value < 1]
        if sizes:
            return [f"{flag_of(name)} must be at least 1" for name in sizes]
        problems = []
        if self.vocab_size < 2:
            problems.append("--vocab-size must be at least 2: a word and the end of a document")
        for whole, part in (("hidden_size", "num_attention_heads"), ("global_batch_size", "micro_batch_size")):
            if getattr(self, whole) % getattr(self, part):
                given = [f"{flag_of(name)} ({getattr(self, name)})" for name in (whole, part)]
                problems.append(" must be a multiple of ".join(given))
        return problems


MODELS = {
    "tiny": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 255},
    "small-4l": {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 16383},
    "gpt2-small": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "gpt2-medium": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    "gpt2-large": {"num_layers": 36, "hidden_size": 1280, "num_attention_heads": 20},
    "gpt2-xl": {"num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25},
}
