"""Folders of a base class, as of an encoder of sentences: the names lack what a model with a head puts before them."""

import json
import struct
from pathlib import Path

import pytest
import torch
from cases import read_record, read_tensors, write_folder

from megatron.convert import open_foreign, settings_of_foreign_folder
from megatron.core.dist_checkpointing import LocalTensor
from megatron.core.sharding.boxes import whole

HEADS = ("cls.", "lm_head.", "embed_out.")
PREFIXES = {"bert": "bert.", "llama-tied": "model.", "qwen3": "model.", "gpt2": "transformer.", "gpt_neox": "gpt_neox."}


def write_base(case: str, root: Path) -> None:
    """What transformers' BertModel, Qwen3Model or their kin would write of the recorded model."""
    write_folder(root, read_record(case))
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, values) in read_tensors(root).items():
        if name.startswith(HEADS):
            continue
        header[name.removeprefix(PREFIXES[case])] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(values)],
        }
        data += values
    for path in root.glob("*.safetensors*"):
        path.unlink()
    text = json.dumps(header).encode()
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def tensors_of(root: Path) -> dict[str, torch.Tensor]:
    """All tensors, by our names."""
    checkpoint, found, wanted = open_foreign(root), {}, {}
    for name, record in checkpoint.manifest.tensors.items():
        found[name] = torch.empty(record.shape, dtype=torch.float64)
        box = whole(record.shape)
        wanted[name] = LocalTensor(found[name], record.shape, [(box, box)], False)
    checkpoint.read_into(wanted, convert=True)
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", PREFIXES)
def test_a_base_folder_holds_the_same_layers(case: str, tmp_path: Path):
    write_folder(tmp_path / "whole", read_record(case))
    write_base(case, tmp_path / "base")
    expected, found = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "base")
    heads = ("model/lm_head.", "model/word_bias.", "model/binary_head.", "model/language_model.output_layer.")
    assert found.keys() == {name for name in expected if not name.startswith(heads)}
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("case", ["bert", "gpt2"])
def test_a_name_that_no_model_has_is_told_as_it_stands(case: str, tmp_path: Path):
    write_base(case, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["stray.weight"] = header.pop(next(name for name in header if name != "__metadata__"))
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(ValueError, match=r"'stray\.weight', for which the model has no place"):
        open_foreign(tmp_path)


@pytest.mark.parametrize(
    "config, kind", [(None, "BertWordPieceLowerCase"), (True, "BertWordPieceLowerCase"), (False, "BertWordPieceCase")]
)
def test_a_vocab_txt_is_the_tokenizer_of_a_folder_without_a_tokenizer_json(
    config: bool | None, kind: str, tmp_path: Path
):
    write_base("bert", tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": config}))
    expected = {"model_vocab_size": 31, "tokenizer_type": kind, "vocab_file": str(tmp_path / "vocab.txt")}
    assert settings_of_foreign_folder(tmp_path)["tokenizer"] == expected
    (tmp_path / "tokenizer.json").write_text("{}")
    assert settings_of_foreign_folder(tmp_path)["tokenizer"]["tokenizer_type"] == "HuggingFaceTokenizer"
