"""What a token costs: the model's FLOPs, from its sizes. Pure integers.

Model FLOPs of a token, those of the mathematics and not of an implementation (nothing recomputed, no padded words):

    6 N + 6 L s a      6 = 2 for multiply and add, x 3 for the forward and the backward's two products
        N              elements of the matrices that activations are multiplied with: per layer queries h x a, keys and values
                       h x 2k, out a x h, MLP 2 h f (3 h f when gated), and once the output layer h x V. Not tables that are
                       looked up, biases, norms
        6 L s a        scores and their sum over values, in L layers of width a = heads x head width, sequences of s: full
                       attention would be 12 L s a; a causal query sees half of the keys (exactly (s + 1) / 2, we say s / 2)

nanoGPT, llm.c and PaLM count 6 N + 12 L s a, that is full attention, and so does Megatron's own log line for most of
its releases; `full_attention=True` gives that for comparison.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The sizes that a token's FLOPs follow from."""

    num_layers: int  # L
    hidden_size: int  # h
    attention_width: int  # a: query heads x head width
    kv_width: int  # k: key/value heads x head width
    ffn_size: int  # f
    vocab_size: int  # V, without padding
    seq_length: int  # s
    gated: bool = False

    @classmethod
    def of(cls, transformer: Any, vocab_size: int, seq_length: int) -> "ModelShape":
        """The shape of a `TransformerConfig`."""
        return cls(
            transformer.num_layers,
            transformer.hidden_size,
            transformer.num_attention_heads * transformer.head_width,
            transformer.query_groups * transformer.head_width,
            transformer.ffn_size,
            vocab_size,
            seq_length,
            transformer.swiglu,
        )

    @property
    def multiplied_parameters(self) -> int:
        """N above."""
        attention = self.hidden_size * (2 * self.attention_width + 2 * self.kv_width)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_size
        return self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size

    def flops_per_token(self, *, full_attention: bool = False) -> int:
        attention = (12 if full_attention else 6) * self.num_layers * self.seq_length * self.attention_width
        return 6 * self.multiplied_parameters + attention

    @property
    def flops_per_sample(self) -> int:
        """Of a whole sequence, with causal attention."""
        return self.flops_per_token() * self.seq_length
