"""Model FLOPs in closed form, from the sizes of a GPT, BERT or T5. Pure integers, for layouts that are compared unbuilt.

A run, and whoever has built a model, asks its layers instead (`core/ops/count_flops_by_module.py`), with the
same numbers for these models.
Model FLOPs are those of the mathematics, whatever the implementation: no recompute, no vocabulary padding.

    6 N + 6 L s a      6 = 2 for multiply and add, x 3 for the forward and the backward's two products
        N              elements of all weight matrices: per layer queries h x a, keys and values h x 2k, output a x h,
                       MLP 2 h f (3 h f if gated), and once the output layer h x V. Embeddings, biases and norms do not
                       count
        experts        a layer with E experts has of K experts of width f' and of shared ones of width f'' their matrices,
                       3 h (K f' + f'') if gated, and the router's, h E: those that a token visits
        6 L s a        attention scores, and their product with the values, in L layers of width a = heads x head width
                       and sequences of s tokens. Full attention is 12 L s a; a causal query sees half the keys:
                       (s + 1) / 2, counted as s / 2
        windows        a layer where a query sees w keys, its own among them: w s - w^2 / 2 keys a sequence instead of
                       s^2 / 2; full attention would count w s
        BERT           a token sees all keys, 12 L s a, and a dense layer of h x h precedes the output layer; its
                       pooler, which reads one token, is not counted
        two stacks     an encoder of s tokens, where a query sees all keys, and a decoder of t tokens, whose queries see
                       the keys of both; its attention to the encoder multiplies s tokens with the matrices of keys and
                       values

nanoGPT, llm.c, PaLM (Chowdhery et al. 2022, appendix B) and most releases of Megatron count full attention,
6 N + 12 L s a: `full_attention=True`.
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
    expert_layers: int = 0  # of the L layers, those with experts
    expert_parameters: int = 0  # elements of the weight matrices of such a layer's MLP that a token visits

    @classmethod
    def of(cls, transformer: Any, vocab_size: int, seq_length: int) -> "ModelShape":
        """Return the shape of a `ModelConfig`."""
        # the windows shorter than the sequence; a query sees itself and the `window_left` keys before it
        windows = []
        for layer in range(transformer.num_layers):
            left = transformer.window_left(layer)
            if left is not None and left + 1 < seq_length:
                windows.append(left + 1)
        return cls(
            transformer.num_layers,
            transformer.hidden_size,
            transformer.num_attention_heads * transformer.head_width,
            transformer.query_groups * transformer.head_width,
            transformer.ffn_size,
            vocab_size,
            seq_length,
            transformer.is_gated,
            tuple(windows),
            expert_layers=sum(transformer.is_moe_layer(layer) for layer in range(transformer.num_layers)),
            expert_parameters=transformer.active_expert_parameters,
        )

    @property
    def multiplied_parameters(self) -> int:
        """The elements of all weight matrices: N above."""
        attention = self.hidden_size * (2 * self.attention_width + 2 * self.kv_width)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_size
        head = self.hidden_size * self.vocab_size
        if self.is_bert:
            head += self.hidden_size * self.hidden_size  # the dense layer before the output layer
        mlps = (self.num_layers - self.expert_layers) * mlp + self.expert_layers * self.expert_parameters
        return self.num_layers * attention + mlps + head

    def count_flops(self, *, full_attention: bool = False) -> int:
        """Return the FLOPs of forward and backward for one sample. full_attention: count the keys after a query too."""
        s = self.seq_length
        layers_without_window = self.num_layers - len(self.windows)
        windows = [*self.windows, *[s] * layers_without_window]  # of all layers
        twice_the_scores = 0  # twice, since w s - w^2 / 2 may be no integer
        for w in windows:
            twice_the_scores += w * (2 * s if full_attention else 2 * s - w)
        return 6 * self.multiplied_parameters * s + 6 * self.attention_width * twice_the_scores

    def flops_per_token(self, *, full_attention: bool = False) -> int:
        """Return the mean of a sample's tokens, rounded down."""
        return self.count_flops(full_attention=full_attention) // self.seq_length

    @property
    def flops_per_sample(self) -> int:
        """FLOPs of one sequence: with causal attention, except for BERT."""
        return self.count_flops(full_attention=self.is_bert)


@dataclass(frozen=True)
class TwoStackShape:
    """The sizes that determine the FLOPs of a sample of a model with an encoder and a decoder."""

    encoder: ModelShape  # its seq_length: the encoder's tokens
    decoder_layers: int
    decoder_length: int

    @property
    def flops_per_sample(self) -> int:
        return self.count_flops()

    def count_flops(self, *, full_attention: bool = False) -> int:
        """Return the FLOPs of one sample. full_attention: count the keys after a query in the decoder too."""
        encoder = self.encoder
        h = encoder.hidden_size
        a = encoder.attention_width
        s = encoder.seq_length
        t = self.decoder_length

        # multiplications of tokens with weight matrices
        projection = h * a  # one of queries, keys, values, output
        mlp = (3 if encoder.gated else 2) * h * encoder.ffn_size
        layer = 4 * projection + mlp
        encoder_products = encoder.num_layers * s * layer
        cross_attention = t * 2 * projection + s * 2 * projection  # queries and output; keys and values
        decoder_products = self.decoder_layers * (t * layer + cross_attention)
        output_products = t * h * encoder.vocab_size
        products = encoder_products + decoder_products + output_products

        # attention scores: of the encoder, of the decoder to itself (half the keys if causal), of the decoder to the encoder
        twice_the_scores = 2 * encoder.num_layers * s * s
        decoder_to_itself = t * t * (2 if full_attention else 1)
        twice_the_scores += self.decoder_layers * (decoder_to_itself + 2 * s * t)
        return 6 * products + 6 * a * twice_the_scores
