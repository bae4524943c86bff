"""How many processes the flags of a trained model need."""

from itertools import product

import pytest

from megatron.core.datasets.data_config import DataConfig
from megatron.core.inference import SavedSettings
from megatron.core.tokenizers import TokenizerConfig
from megatron.core.transformer.model_config import ModelConfig
from tools import evaluate, generate
from tools.trained_model.flags import RefusedFlags, TrainedModelConfig


def fewest(tp: int, cp: int, pp: int, ep: int, etp: int) -> int:
    """The fewest processes of which each stage has whole grids of both kinds, by counting up."""
    return next(n for n in range(1, 1000) if n % (tp * cp * pp) == 0 and n // pp % (ep * etp) == 0)


def test_processes_are_the_fewest_that_both_grids_of_a_stage_divide():
    for tp, cp, pp, ep, etp in product((1, 2, 3), (1, 3), (1, 2), (1, 2, 4, 6), (1, 2)):
        config = TrainedModelConfig(
            "x", None, None, None, tp, pp, cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
        )
        assert config.replica_size * config.expert_replicas == fewest(tp, cp, pp, ep, etp), (tp, cp, pp, ep, etp)


@pytest.mark.parametrize("tool", [generate, evaluate])
def test_too_few_processes_are_told_of_the_experts_layout_that_needs_fewer(tool, capsys, monkeypatch):
    """--expert-tensor-parallel-size is by default --tensor-model-parallel-size, so that EP 2 beside TP 2 takes four."""
    monkeypatch.setattr(tool.parallel_state, "launched_world_size", lambda: 2)
    source = ["--prompt", "1"] if tool is generate else ["--data", "x.txt"]
    layout = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    with pytest.raises(ValueError) as refused:
        tool.read_settings(["--load", "x", "--device", "cpu", *source, *layout])
    said = str(refused.value)
    assert "start" in said and " 4" in said and "--expert-tensor-parallel-size 1, which takes 2" in said
    tool.read_settings(["--load", "x", "--device", "cpu", *source, *layout, "--expert-tensor-parallel-size", "1"])
    monkeypatch.setattr(tool.parallel_state, "launched_world_size", lambda: 3)
    with pytest.raises(ValueError) as refused:
        tool.read_settings(["--load", "x", "--device", "cpu", *source, *layout, "--expert-tensor-parallel-size", "1"])
    assert "--expert-tensor-parallel-size" not in str(refused.value)


def test_a_text_above_the_learned_positions_is_refused_as_a_flag():
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, position_embedding_type="learned_absolute")
    saved = SavedSettings(50, config, DataConfig(seq_length=16), TokenizerConfig())
    assert evaluate.longest_text(16, saved) == evaluate.longest_text(None, saved) == 16
    with pytest.raises(RefusedFlags, match=r"--max-length 17 .* 16"):
        evaluate.longest_text(17, saved)
