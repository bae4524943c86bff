"""`ProcessGroupCollection`: Megatron's constructors take this job's groups, and refuse others by name, in one line."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_ranks import run_ranks
from said import tells

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.global_state import get_global_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ModelCommProcessGroups, ProcessGroupCollection, check_groups
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.gpt_and_bert_local_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_utils import (
    get_moe_layer_wise_logging_tracker,
    save_to_aux_losses_tracker,
    track_moe_metrics,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

CONFIG = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "params_dtype": torch.float64}


def makers() -> dict[str, Any]:
    """Megatron's constructors of layers and models -> what calls them with further arguments."""
    config = TransformerConfig(**CONFIG)
    layer = get_gpt_layer_local_spec()
    attention = layer.submodules.self_attention
    linear = {"config": config, "init_method": config.init_method}
    model = {"vocab_size": 16, "max_sequence_length": 4}
    return {
        "TransformerLayer": partial(TransformerLayer, config, layer.submodules),
        "TransformerBlock": partial(TransformerBlock, config, layer),
        "SelfAttention": partial(attention.module, config, attention.submodules, 1, **attention.params),
        "DotProductAttention": partial(
            attention.submodules.core_attention, config, 1, attention.params["attn_mask_type"], "self"
        ),
        "GPTModel": partial(GPTModel, config, layer, **model),
        "BertModel": partial(BertModel, config, 0, bert_layer_local_spec, **model),
        "tp_group of MLP": partial(MLP, config, layer.submodules.mlp.submodules),
        "tp_group of ColumnParallelLinear": partial(ColumnParallelLinear, 8, 8, **linear),
        "tp_group of RowParallelLinear": partial(RowParallelLinear, 8, 8, **linear),
    }


def test_constructors_take_the_groups_of_the_job_and_refuse_others():
    def work(mesh: Any) -> None:
        own = ProcessGroupCollection.use_mpu_process_groups()
        assert own.tp is parallel_state.get_tensor_model_parallel_group()
        assert own.dp is parallel_state.get_data_parallel_group()
        assert not hasattr(own, "tp_dp_cp")
        other = ProcessGroupCollection(tp=own.tp, pp=own.dp)
        for name, make in makers().items():
            if name.startswith("tp_group"):
                calls = [({"tp_group": own.tp}, {"tp_group": own.dp})]
            else:
                calls = [({key: own}, {key: other}) for key in ("pg_collection", "model_comm_pgs")]
            for good, bad in calls:
                make(**good)
                with pytest.raises(NotImplementedError) as error:
                    make(**bad)
                said = str(error.value)
                assert tells(said, "tp_group" if "tp_group" in bad else f"{next(iter(bad))}.pp"), said
                assert tells(said, name.split()[-1]) and "\n" not in said

    run_ranks({"tp": 2, "dp": 2, "pp": 1}, work)


def test_a_loop_takes_the_groups_of_the_job_and_refuses_others():
    def work(mesh: Any) -> None:
        own = ProcessGroupCollection.use_mpu_process_groups(["tp", "dp_cp", "hcp"])
        other = ProcessGroupCollection(tp=own.dp_cp)
        get_global_state().device = "cpu"
        module = torch.nn.Linear(2, 2)
        module.config = SimpleNamespace()
        settings = DistributedDataParallelConfig()
        wrap = partial(DistributedDataParallel, module.config, settings)
        chunk = wrap(module, pg_collection=own)
        calls = {
            "DistributedDataParallel": lambda groups: wrap(torch.nn.Linear(2, 2), pg_collection=groups),
            "get_megatron_optimizer": lambda groups: get_megatron_optimizer(
                OptimizerConfig(), [chunk], pg_collection=groups
            ),
            "finalize_model_grads": lambda groups: finalize_model_grads([chunk], pg_collection=groups),
            "get_forward_backward_func": lambda groups: get_forward_backward_func()(
                forward_step_func=lambda data, model: (
                    model(torch.ones(1, 2)).sum(),
                    lambda loss: (loss, {"loss": loss.detach()}),
                ),
                data_iterator=None,
                model=chunk,
                num_microbatches=1,
                seq_length=1,
                micro_batch_size=1,
                pg_collection=groups,
            ),
        }
        module.set_input_tensor = lambda x: None
        for name, call in calls.items():
            with pytest.raises(NotImplementedError) as error:
                call(other)
            assert tells(error.value, f"{name} pg_collection.tp")
        for call in calls.values():
            chunk.zero_grad_buffer()
            call(own)

    run_ranks({"dp": 2}, work)


def test_a_group_that_a_tracked_loss_is_reduced_over_is_found_by_its_ranks():
    def work(mesh: Any) -> list[float]:
        group = parallel_state.get_tensor_model_parallel_group()
        rank = mesh["world"].rank
        save_to_aux_losses_tracker("sums", torch.tensor(1.0 + rank), 1, 2, reduce_group=group)
        save_to_aux_losses_tracker("means", torch.tensor(1.0 + rank), 2, 2, avg_group=group)
        totals: dict[str, Any] = {}
        track_moe_metrics(2.0, 0, total_loss_dict=totals, num_layers=2, moe_layer_freq=[1, 0])
        assert set(get_moe_layer_wise_logging_tracker()) == {"sums", "means"}
        return [float(totals["sums"]), float(totals["means"])]

    # over tp the sums are 1 + 2 and 3 + 4, and their mean over dp is 5; twice, of one layer
    assert run_ranks({"tp": 2, "dp": 2}, work) == [[10.0, 5.0]] * 4


def test_what_is_no_group_of_the_job_is_refused():
    def work(mesh: Any) -> None:
        for groups, facts in (
            (7, "where 7 ProcessGroupCollection"),
            (ModelCommProcessGroups(tp_dp_cp=object()), "where.tp_dp_cp"),
            (SimpleNamespace(cp=object()), "where.cp"),
        ):
            with pytest.raises(NotImplementedError) as error:
                check_groups(groups, "where")
            assert tells(error.value, facts)
        with pytest.raises(ValueError) as error:
            ProcessGroupCollection(unknown=None)
        assert tells(error.value, "unknown tp_ep_pp")
        with pytest.raises(NotImplementedError) as error:
            ProcessGroupCollection.use_mpu_process_groups(["inter_dist_opt"])
        assert tells(error.value, "inter_dist_opt intra_dp_cp")
        assert repr(ProcessGroupCollection(tp=None)) == "ProcessGroupCollection(tp)"

    run_ranks({}, work)
