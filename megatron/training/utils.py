"""Import path of Megatron core: small functions of its scripts."""

from megatron.core.classic.utils import *  # noqa: F403
from megatron.training.batches import *  # noqa: F403
from megatron.training.runtime import *  # noqa: F403
