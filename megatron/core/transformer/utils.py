"""Import path of Megatron core."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.dist_checkpointing.mapping import make_sharded_tensors_for_checkpoint  # noqa: F401

__getattr__ = names_of_megatron(__name__)
