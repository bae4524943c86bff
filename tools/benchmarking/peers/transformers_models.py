"""transformers' GPT-2, Llama and BERT at the sizes of a work, with torch's fused attention. Needs transformers.

GPT-2 and Llama start from our weights. Its BERT has norms after the blocks instead of before, so its losses
differ from ours.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tools.benchmarking.peers.loop import Plain, Scores
from tools.benchmarking.peers.plain import EPSILON
from tools.benchmarking.peers.weights import as_plain, our_weights
from tools.benchmarking.work import Work


def make_model(work: Work) -> nn.Module:
    """Build the model of transformers with the sizes of a work."""
    import transformers

    transformers.logging.set_verbosity_error()
    common = {"vocab_size": work.padded_vocab_size, "attn_implementation": "sdpa", "use_cache": False}
    if work.family == "gpt":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **_sizes_of_gpt2(work)))
    sizes = {
        "num_hidden_layers": work.num_layers,
        "hidden_size": work.hidden_size,
        "num_attention_heads": work.num_attention_heads,
        "intermediate_size": work.shape.ffn_size,
        "max_position_embeddings": work.seq_length,
        "attention_probs_dropout_prob": work.attention_dropout,
        "hidden_dropout_prob": work.hidden_dropout,
    }
    if work.family == "bert":
        return transformers.BertForPreTraining(
            transformers.BertConfig(**common, **sizes, hidden_act="gelu_pytorch_tanh", layer_norm_eps=EPSILON)
        )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **common,
            **{name: size for name, size in sizes.items() if "dropout" not in name},
            attention_dropout=work.attention_dropout,  # Llama has no other dropout
            num_key_value_heads=work.kv_heads,
            rms_norm_eps=EPSILON,
        )
    )


def _sizes_of_gpt2(work: Work) -> dict[str, Any]:
    return {
        "n_layer": work.num_layers,
        "n_embd": work.hidden_size,
        "n_head": work.num_attention_heads,
        "n_positions": work.seq_length,
        "resid_pdrop": work.hidden_dropout,
        "embd_pdrop": work.hidden_dropout,
        "attn_pdrop": work.attention_dropout,
        "activation_function": "gelu_pytorch_tanh",
    }


_GPT2 = {
    "attention_norm": "ln_1",
    "attention.qkv.fused": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up.fused": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "words": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
}
_LLAMA = {
    "attention_norm": "input_layernorm",
    "attention.qkv.0": "self_attn.q_proj",
    "attention.qkv.1": "self_attn.k_proj",
    "attention.qkv.2": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up.0": "mlp.gate_proj",
    "mlp.up.1": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "words": "model.embed_tokens",
    "norm": "model.norm",
    "scores": "lm_head",
}


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, Tensor], work: Work) -> None:
    """Copy `as_plain` weights, by name, into transformers' GPT-2 or Llama.

    Each is [out, in] or [out]; GPT-2 stores its matrices transposed. Raises AssertionError if a parameter gets no
    value.
    """
    names, layers = {"gpt": (_GPT2, "transformer.h"), "llama": (_LLAMA, "model.layers")}[work.family]
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        module, kind = name.rsplit(".", 1)  # kind: weight or bias
        prefix = ""
        is_in_layer = module.startswith("blocks.")
        if is_in_layer:
            _, number, module = module.split(".", 2)
            prefix = f"{layers}.{number}."
        if module not in names:
            continue
        is_transposed = work.family == "gpt" and is_in_layer and value.dim() > 1
        parameters.pop(f"{prefix}{names[module]}.{kind}").copy_(value.t() if is_transposed else value)
    assert not parameters, f"without a value: {list(parameters)}"


class Transformers(Plain):
    """Trainer of a model of transformers, by the same loop."""

    def make_model(self) -> nn.Module:
        model = make_model(self.work)
        if self.work.family != "bert":
            load(model, as_plain(our_weights(self.work), self.work), self.work)
        return model

    def scores(self, model: nn.Module, batch: dict[str, Tensor]) -> Scores:
        """Return the logits of a batch, as `Plain.scores`."""
        if "tokens" in batch:
            return model(input_ids=batch["tokens"]).logits
        out = model(batch["text"], attention_mask=batch["padding_mask"], token_type_ids=batch["types"])
        return out.prediction_logits, out.seq_relationship_logits
