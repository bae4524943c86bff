"""Experts of GPT-OSS in MXFP4 become the numbers of the specification, whole or box by box, and compute with them."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import read_record, read_tensors, weight, write_folder
from said import tells

from megatron.convert import open_any, open_foreign, write_hf_folder
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import CheckpointError, LocalTensor
from megatron.core.sharding.boxes import size_of, slices, whole

# OCP Microscaling Formats 1.0, table of E2M1: the number of each code
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
E, H, F = 3, 32, 64
LAYER = "model/language_model.decoder.layers.{}.mlp.experts."


def packed(name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks [E, rows, columns / 32, 16] and scales [E, rows, columns / 32] of a draw by the name."""
    draw = np.random.RandomState(len(name) + rows)
    blocks = draw.randint(0, 256, (E, rows, columns // 32, 16)).astype(np.uint8)
    return blocks, draw.randint(118, 130, (E, rows, columns // 32)).astype(np.uint8)


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, rows, columns] by the definition, a number at a time."""
    found = np.zeros((*scales.shape[:2], scales.shape[2] * 32))
    for e, row, block in np.ndindex(*scales.shape):
        for i, byte in enumerate(blocks[e, row, block]):
            for place, code in enumerate((byte & 15, byte >> 4)):
                found[e, row, 32 * block + 2 * i + place] = NUMBERS[code] * 2.0 ** (int(scales[e, row, block]) - 127)
    return found


def folder_of(root: Path, quantization: dict | None = None) -> dict[str, np.ndarray]:
    """A GPT-OSS of two layers as it is published; returns the experts' matrices in the shape of transformers' modules."""
    config = read_record("gpt_oss")["config"] | {"hidden_size": H, "intermediate_size": F, "num_local_experts": E}
    config |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "dtype": "bfloat16"}
    config |= {"head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 31}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]} | (
        quantization or {}
    )
    values, arrays = {}, {}
    shapes = {"model.embed_tokens.weight": (31, H), "model.norm.weight": (H,), "lm_head.weight": (31, H)}
    for i in range(2):
        at = f"model.layers.{i}."
        for name, rows in {"q": 64, "k": 16, "v": 16}.items():
            shapes |= {f"{at}self_attn.{name}_proj.weight": (rows, H), f"{at}self_attn.{name}_proj.bias": (rows,)}
        shapes |= {f"{at}self_attn.o_proj.weight": (H, 64), f"{at}self_attn.o_proj.bias": (H,)}
        shapes |= {f"{at}self_attn.sinks": (8,), f"{at}mlp.router.weight": (E, H), f"{at}mlp.router.bias": (E,)}
        shapes |= {f"{at}input_layernorm.weight": (H,), f"{at}post_attention_layernorm.weight": (H,)}
        shapes |= {f"{at}mlp.experts.gate_up_proj_bias": (E, 2 * F), f"{at}mlp.experts.down_proj_bias": (E, H)}
        for name, rows, columns in (("gate_up_proj", 2 * F, H), ("down_proj", H, F)):
            blocks, scales = packed(f"{at}{name}", rows, columns)
            arrays |= {f"{at}mlp.experts.{name}_blocks": blocks, f"{at}mlp.experts.{name}_scales": scales}
            values[f"{at}mlp.experts.{name}"] = unpacked(blocks, scales).transpose(0, 2, 1)
    header, data = {}, b""
    for name, shape in shapes.items():
        bits = (weight(name, shape).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [len(data), len(data) + len(bits)]}
        data += bits
    for name, array in arrays.items():
        bits = array.tobytes()
        header[name] = {"dtype": "U8", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(bits)]}
        data += bits
    text = json.dumps(header).encode()
    root.mkdir()
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (root / "config.json").write_text(json.dumps(config))
    return values


def read(root: Path, name: str, box: tuple | None = None) -> torch.Tensor:
    checkpoint = open_any(root)
    record = checkpoint.manifest.tensors[name]
    box = box or whole(record.shape)
    values = torch.empty(size_of(box), dtype=torch.bfloat16)
    checkpoint.read_into({name: LocalTensor(values, record.shape, [(box, whole(size_of(box)))], False)})
    return values


def test_each_number_is_that_of_the_specification(tmp_path: Path, monkeypatch):
    """In boxes that end within a block too, and where a file is read a few kilobytes at a time."""
    values = folder_of(tmp_path / "in")
    for most in (16 << 20, 1500):
        monkeypatch.setattr("megatron.convert.strided_reads_of_foreign_files._MOST_AT_ONCE", most)
        for i in range(2):
            gate_up = values[f"model.layers.{i}.mlp.experts.gate_up_proj"]  # [E, h, 2 f], gate and up in turn
            fc1 = torch.tensor(np.stack((gate_up[..., ::2], gate_up[..., 1::2]), 1).swapaxes(2, 3).copy())
            fc2 = torch.tensor(values[f"model.layers.{i}.mlp.experts.down_proj"].swapaxes(1, 2).copy())
            for module, expected in (("linear_fc1", fc1), ("linear_fc2", fc2)):
                name = f"{LAYER.format(i)}{module}.weight"
                assert torch.equal(read(tmp_path / "in", name).double(), expected), name
                inner = tuple((size // 3, size - size // 5) for size in expected.shape)
                assert torch.equal(read(tmp_path / "in", name, inner).double(), expected[slices(inner)]), name


def test_the_folder_is_written_in_bfloat16_and_reads_back_equal(tmp_path: Path):
    values = folder_of(tmp_path / "in")
    checkpoint = open_foreign(tmp_path / "in")
    assert tells(checkpoint.warning, "MXFP4 bfloat16")
    assert write_hf_folder(checkpoint, tmp_path / "out") == "gpt_oss"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    found = read_tensors(tmp_path / "out")
    for name, expected in values.items():
        dtype, shape, data = found[name]
        bits = np.frombuffer(data, "<u2").astype("<u4") << 16
        assert dtype == "BF16" and np.array_equal(bits.view("<f4").reshape(shape), expected), name
    for name in open_foreign(tmp_path / "in").manifest.tensors:
        assert torch.equal(read(tmp_path / "in", name), read(tmp_path / "out", name)), name


def test_other_packed_weights_and_torn_pairs_are_refused(tmp_path: Path):
    folder_of(tmp_path / "other", {"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="quantization_config"):
        open_foreign(tmp_path / "other")
    folder_of(tmp_path / "torn")
    file = tmp_path / "torn/model.safetensors"
    file.write_bytes(
        file.read_bytes().replace(
            b"model.layers.1.mlp.experts.down_proj_scales", b"model.layers.1.mlp.experts.down_proj_scalez"
        )
    )
    with pytest.raises(CheckpointError, match=r"without 'model\.layers\.1\.mlp\.experts\.down_proj_scales'"):
        open_foreign(tmp_path / "torn")
    write_folder(tmp_path / "mixtral", read_record("mixtral"))
    config = json.loads((tmp_path / "mixtral/config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "mixtral/config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantization_config"):
        open_foreign(tmp_path / "mixtral")
