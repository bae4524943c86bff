"""Import path of Megatron core: small functions of its scripts."""

from megatron.core.classic.utils import *  # noqa: F403
from megatron.training.batch_utils import *  # noqa: F403
from megatron.training.global_vars import *  # noqa: F403
