"""A script of Megatron core that joins the job itself, and ends while the back end's threads still hold its tensors."""

import torch
import torch.distributed as dist

from megatron.core import parallel_state

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(dist.get_world_size())
for _ in range(50):
    dist.all_reduce(torch.ones(200_000), group=parallel_state.get_tensor_model_parallel_group(), async_op=True)
