"""Small models trained with offloaded state."""

from tiny_run import TINY_GPT2, TINY_LLAMA, Layout, TinyTrainer
from torch import Tensor

from megatron.core.distributed.params_norm_and_zeros import params_norm
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.offload.tensor_in_memory_or_file import start_reading
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.checkpointing import save_and_load_run_state

MODELS = {"tied": TINY_GPT2, "untied": TINY_LLAMA}


STAGES = {
    "0": {},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "hybrid": {"zero_stage": 3, "num_distributed_optimizer_instances": 2},
    "outer": {"zero_stage": 3, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
}


def offload(kind: str, folder) -> OffloadConfig:
    return {
        "none": OffloadConfig(),
        "host": OffloadConfig(optimizer_cpu_offload=True),
        "file": OffloadConfig(offload_dir=str(folder)),
        "half": OffloadConfig(offload_dir=str(folder), optimizer_offload_fraction=0.5),
        "params": OffloadConfig(offload_dir=str(folder), offload_params=True),
    }[kind]


# ---------------------------------------------------------------- what else a step does
def tiny_trainer(mesh: Mesh, model: ModelConfig, layout: Layout, **options) -> TinyTrainer:
    return TinyTrainer(mesh, model, layout, global_batch=8, **options)


def state_of(tiny: TinyTrainer) -> list[Tensor]:
    """Every bit of what is kept, in an order of its own."""
    tiny.finish_param_gather()
    kept = save_and_load_run_state.sharded_model_state(
        tiny.model, tiny.mesh
    ) | save_and_load_run_state.sharded_optimizer_state(tiny.adam, tiny.mesh)
    whole = [local.tensor for _, local in sorted(kept.items())]
    return [start_reading(x).wait().detach().flatten().clone() for x in whole]


def trained(
    mesh: Mesh, model: ModelConfig, layout: Layout, steps: int = 3, of_step: dict | None = None, **options
) -> tuple[list[Tensor], list[float], float]:
    tiny = tiny_trainer(mesh, model, layout, **options)
    norms = [tiny.step(number, **(of_step or {})).grad_norm for number in range(steps)]
    state = state_of(tiny), norms, params_norm(tiny.model, mesh, "cpu")
    tiny.close()
    return state
