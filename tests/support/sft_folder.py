"""A tiny published model for fine-tuning: a Llama or GPT-2 with a byte-level tokenizer, a chat template and stop ids."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import finetune_gpt
from megatron.convert.families.read_and_write_hf_config import settings_of
from megatron.convert.families.registry import FAMILIES

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# the same text, with the assistant's parts in blocks
CHATML_BLOCKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_DTYPES = {"F32": np.dtype(np.float32), "F64": np.dtype(np.float64)}
VOCABULARY = 256 + len(SPECIAL)
_SIZES = {"vocab_size": VOCABULARY + 5, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_SIZES, "intermediate_size": 24},
        **{
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        **{"bos_token_id": None, "eos_token_id": VOCABULARY - 1, "torch_dtype": "float32"},
    },
    "gpt2": {
        **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCABULARY + 5, "n_embd": 16},
        **{"n_layer": 2, "n_head": 4, "n_positions": 256, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        **{"bos_token_id": 256, "eos_token_id": VOCABULARY - 1, "torch_dtype": "float32"},
    },
}


def write_tokenizer(root: Path, template: str = CHATML, *, one_id: bool = False) -> None:
    """one_id: end of text, end of turn and padding are one token."""
    root.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.save(str(root / "tokenizer.json"))
    end = "<|im_end|>"
    pad = end if one_id else "<|endoftext|>"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": pad,
        "chat_template": template,
    }
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCABULARY - 1], "pad_token_id": 256}))


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The Hugging Face tensors of a config, by name."""
    if config["model_type"] == "gpt2":
        h, layer = config["n_embd"], "transformer.h.{}."
        each = {"ln_1.weight": (h,), "ln_1.bias": (h,), "ln_2.weight": (h,), "ln_2.bias": (h,)}
        each |= {"attn.c_attn.weight": (h, 3 * h), "attn.c_attn.bias": (3 * h,), "attn.c_proj.weight": (h, h)}
        each |= {"attn.c_proj.bias": (h,), "mlp.c_fc.weight": (h, 4 * h), "mlp.c_fc.bias": (4 * h,)}
        each |= {"mlp.c_proj.weight": (4 * h, h), "mlp.c_proj.bias": (h,)}
        shapes = {
            "transformer.wte.weight": (config["vocab_size"], h),
            "transformer.wpe.weight": (config["n_positions"], h),
        }
        shapes |= {"transformer.ln_f.weight": (h,), "transformer.ln_f.bias": (h,)}
        layers = config["n_layer"]
    else:
        h, f, layer = config["hidden_size"], config["intermediate_size"], "model.layers.{}."
        kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
        each = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
        each |= {
            "self_attn.q_proj.weight": (h, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
        }
        each |= {"self_attn.o_proj.weight": (h, h), "mlp.gate_proj.weight": (f, h), "mlp.up_proj.weight": (f, h)}
        each |= {"mlp.down_proj.weight": (h, f)}
        vocabulary = config["vocab_size"]
        shapes = {
            "model.embed_tokens.weight": (vocabulary, h),
            "model.norm.weight": (h,),
            "lm_head.weight": (vocabulary, h),
        }
        layers = config["num_hidden_layers"]
    for i in range(layers):
        shapes |= {layer.format(i) + name: shape for name, shape in each.items()}
    return shapes


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, value in tensors.items():
        dtype = next(name for name, dtype in _DTYPES.items() if dtype == value.dtype)
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [offset, offset + value.nbytes]}
        offset += value.nbytes
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(value.tobytes() for value in tensors.values()))


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, tensors = json.loads(data[8 : 8 + size]), {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        values = np.frombuffer(data[8 + size :][start:stop], _DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def write_model(root: Path, kind: str = "llama", template: str = CHATML, seed: int = 0, **tokenizer: Any) -> Path:
    """Write the folder of a model with drawn weights, and return it."""
    write_tokenizer(root, template, **tokenizer)
    config = CONFIGS[kind]
    assert kind in FAMILIES and settings_of(config, "the tiny folder")
    (root / "config.json").write_text(json.dumps(config))
    draw = np.random.RandomState(seed)
    tensors = {}
    for name, shape in shapes_of(config).items():
        is_norm = len(shape) == 1 and name.endswith("weight")
        tensors[name] = (np.ones(shape) + 0.1 * draw.randn(*shape) if is_norm else 0.1 * draw.randn(*shape)).astype(
            np.float32
        )
    write_safetensors(root / "model.safetensors", tensors)
    return root


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations of one or two answers, of different lengths."""
    records = []
    for i in range(count):
        messages = [{"role": "system", "content": "Be short."}] if i % 3 == 0 else []
        for turn in range(1 + i % 2):
            messages.append({"role": "user", "content": f"{i} and {turn}?" + " please" * (i % 4)})
            messages.append({"role": "assistant", "content": f"It is {i + turn}."})
        records.append({"messages": messages})
    return records


def counting_chats(count: int) -> list[dict[str, Any]]:
    """Conversations of one short answer, which is a function of the question."""
    records = []
    for i in range(count):
        answer = f"{i} is {i % 7}" + "!" * (i % 3)
        question, answered = {"role": "user", "content": f"count {i}"}, {"role": "assistant", "content": answer}
        records.append({"messages": [question, answered]})
    return records


class FinetuneScript:
    """finetune_gpt.py with the defaults of a command line, for `trainer_of`."""

    train_valid_test_datasets_provider = staticmethod(finetune_gpt.train_valid_test_datasets_provider)
    model_provider = staticmethod(finetune_gpt.model_provider)
    forward_step = staticmethod(finetune_gpt.forward_step)
    extra_args_provider = staticmethod(finetune_gpt.add_own_flags)

    def __init__(self, flags: str):
        self.args_defaults = finetune_gpt.defaults_of(flags.split())
