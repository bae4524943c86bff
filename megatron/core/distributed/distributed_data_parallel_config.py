"""Import path of Megatron core."""

from megatron.core.classic.data_parallel import DistributedDataParallelConfig as DistributedDataParallelConfig
