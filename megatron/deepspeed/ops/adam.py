"""Import path of DeepSpeed's Adam."""

from megatron.deepspeed.optimizer import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
