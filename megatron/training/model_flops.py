"""Model FLOPs per token, from the model's sizes. Pure integers.

Model FLOPs are those of the mathematics, whatever the implementation: no recompute, no vocabulary padding.

    6 N + 6 L s a      6 = 2 for multiply and add, x 3 for the forward and the backward's two products
        N              elements of all weight matrices: per layer queries h x a, keys and values h x 2k, output a x h,
                       MLP 2 h f
                       (3 h f if gated), and once the output layer h x V. Lookup tables, biases and norms do not count
        6 L s a        attention scores, and their product with the values, in L layers of width a = heads x head width and
                       sequences of s tokens. Full attention is 12 L s a; a causal query sees half the keys: (s + 1) / 2,
                       counted as s / 2
        windows        a layer where a query sees w keys, its own among them: w s - w^2 / 2 keys a sequence instead of
                       s^2 / 2;
                       full attention would count w s
        BERT           a token sees all keys, 12 L s a, and a dense layer of h x h precedes the output layer; its pooler, which
                       reads one token, is not counted
        two stacks     an encoder of s tokens, where a query sees all keys, and a decoder of t tokens, whose queries see
        the keys
                       of both; its attention to the encoder multiplies s tokens with the matrices of keys and values

nanoGPT, llm.c, PaLM (Chowdhery et al. 2022, appendix B) and most releases of Megatron count full attention, 6 N + 12 L s a:
`full_attention=True`.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The sizes that determine the FLOPs of a token."""

    num_layers: int  # L
    hidden_size: int  # h
    attention_width: int  # a: query heads x head width
    kv_width: int  # k: key/value heads x head width
    ffn_size: int  # f
    vocab_size: int  # V, without padding
    seq_length: int  # s
    gated: bool = False
    windows: tuple[int, ...] = ()  # w of the layers that have a window shorter than s
    is_bert: bool = False

    @classmethod
    def of(cls, transformer: Any, vocab_size: int, seq_length: int) -> "ModelShape":
        """The shape of a `ModelConfig`."""
        befores = [transformer.window_left(layer) for layer in range(transformer.num_layers)]
        return cls(
            transformer.num_layers,
            transformer.hidden_size,
            transformer.num_attention_heads * transformer.head_width,
            transformer.query_groups * transformer.head_width,
            transformer.ffn_size,
            vocab_size,
            seq_length,
            transformer.is_gated,
            tuple(before + 1 for before in befores if before is not None and before + 1 < seq_length),
        )

    @property
    def multiplied_parameters(self) -> int:
        """N above."""
        attention = self.hidden_size * (2 * self.attention_width + 2 * self.kv_width)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_size
        head = self.hidden_size * (self.vocab_size + (self.hidden_size if self.is_bert else 0))
        return self.num_layers * (attention + mlp) + head

    def flops_per_token(self, *, full_attention: bool = False) -> int:
        s = self.seq_length
        seen = (*self.windows, *[s] * (self.num_layers - len(self.windows)))
        twice_the_scores = sum(w * (2 * s if full_attention else 2 * s - w) for w in seen)
        return 6 * self.multiplied_parameters + 6 * self.attention_width * twice_the_scores // s

    @property
    def flops_per_sample(self) -> int:
        """FLOPs of one sequence, with causal attention, but for a BERT."""
        return self.flops_per_token(full_attention=self.is_bert) * self.seq_length


@dataclass(frozen=True)
class TwoStackShape:
    """The sizes that determine the FLOPs of a sample of an encoder and a decoder."""

    encoder: ModelShape  # and its tokens
    decoder_layers: int
    decoder_length: int

    @property
    def flops_per_sample(self) -> int:
        return self.count_flops()

    def count_flops(self, *, full_attention: bool = False) -> int:
        """FLOPs of one sample. full_attention: of the decoder's to itself too."""
        one, t = self.encoder, self.decoder_length
        h, a = one.hidden_size, one.attention_width
        s, heads = one.seq_length, h * a
        layer = 4 * heads + (3 if one.gated else 2) * h * one.ffn_size
        products = one.num_layers * s * layer + t * h * one.vocab_size
        products += self.decoder_layers * (t * (layer + 2 * heads) + 2 * s * heads)
        twice_the_scores = 2 * one.num_layers * s * s + self.decoder_layers * (t * t * (1 + full_attention) + 2 * s * t)
        return 6 * products + 6 * a * twice_the_scores
