"""What the tool writes by torch's distributed-checkpoint writer is what torch reads back, to the bit."""

from pathlib import Path

import pytest
import torch
from cases import read_record, write_folder
from torch.distributed import checkpoint as dcp

from megatron.convert import open_foreign
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import placed_tensor, save_checkpoint
from megatron.core.inference.load_model import load_gpt, single_rank_mesh
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.transformer.model_config import ModelConfig
from tools import checkpoint_convert


def read_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """All that a folder holds, with shapes and dtypes from its own metadata."""
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in described.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_every_parameter_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """From a Hugging Face folder and from a checkpoint of ours; as they are, and in another dtype."""
    write_folder(tmp_path / "hf", read_record("llama"))
    theirs = open_foreign(tmp_path / "hf")
    config = ModelConfig(**theirs.state["config"]["transformer"] | {"make_vocab_size_divisible_by": 1})
    words, positions = theirs.state["vocab_size"], config.max_position_embeddings
    model, mesh = load_gpt(theirs, config, vocab_size=words, positions=positions), single_rank_mesh()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tensors = {f"model/{name}": placed_tensor(p.data, p.placement, mesh) for name, p in model.named_parameters()}
    optimizer = {f"optimizer/exp_avg/{name}": x for (name, _), x in zip(parameters.items(), tensors.values())}
    save_checkpoint(tmp_path / "ours", 3, tensors | optimizer, theirs.state, ALONE)
    for source, dtype in (("hf", None), ("ours", None), ("ours", "bfloat16")):
        out = tmp_path / f"{source}-{dtype}"
        more = ["--dtype", dtype] if dtype else []
        assert checkpoint_convert.main(["--load", str(tmp_path / source), "--save-dcp", str(out), *more]) == 0
        assert ".metadata is a pickle" in capsys.readouterr().out
        found = read_by_torch(out)
        assert found.keys() == parameters.keys()
        for name, mine in parameters.items():
            expected = mine.to(getattr(torch, dtype)) if dtype else mine
            assert found[name].dtype == expected.dtype and torch.equal(found[name], expected), name
        assert checkpoint_convert.main(["--load", str(tmp_path / source), "--save-dcp", str(out)]) == 2  # it is there


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give one of --save-hf, --save and --save-dcp"),
        ({"save_hf": "a", "save_dcp": "b"}, "give one of --save-hf, --save and --save-dcp"),
        ({"save_dcp": "b", "tokenizer": "c"}, "--tokenizer is for --save-hf"),
        ({"save": "b", "tokenizer": "c"}, "--tokenizer is for --save-hf"),
        ({"save_dcp": "b", "max_shard_size": "1GB"}, "--max-shard-size is for --save-hf"),
    ],
)
def test_flags_that_do_not_fit_are_refused(given: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        checkpoint_convert.ConvertConfig(load="x", **given)
