"""The arguments in a checkpoint of Megatron-LM: each is read, known to leave the model as it is, refused, or named."""

import megatron_files
import pytest

from megatron.convert.formats.read_megatron_args import settings_of_args, unknown_args_note
from megatron.core.base.dataclass_flags import ConfigError

ARGS = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16}


def test_an_argument_that_is_not_known_is_named_if_it_is_on():
    assert (
        unknown_args_note(ARGS | {"lr": 1.0, "moe_router_topk": 2, "use_flash_attn": True, "rotary_percent": 0.5}) == ""
    )
    assert unknown_args_note(ARGS | {"values_residual": False, "another": None, "third": []}) == ""
    assert "values_residual (2), write_twice (True)" in unknown_args_note(
        ARGS | {"write_twice": True, "values_residual": 2}
    )
    assert "and 3 more" in unknown_args_note(ARGS | {f"x{i}": 1 for i in range(11)})


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_the_arguments_of_a_run_are_known(case: str):
    assert unknown_args_note(vars(megatron_files.args_of(case, data_path=["x"], use_distributed_optimizer=True))) == ""


def test_an_option_that_is_not_built_is_refused_and_an_old_spelling_is_read():
    with pytest.raises(ConfigError, match=r"enable_mhc_connections \(True\)"):
        settings_of_args(ARGS | {"enable_mhc_connections": True}, "args")
    assert settings_of_args(ARGS | {"disable_bias_linear": True}, "args")["add_bias_linear"] is False
    assert settings_of_args(ARGS, "args")["add_bias_linear"] is True
