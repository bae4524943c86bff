"""Import path of Megatron core: small functions of its scripts."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.utils import *  # noqa: F403
from megatron.training.batch_utils import *  # noqa: F403
from megatron.training.global_vars import *  # noqa: F403

__getattr__ = names_of_megatron(__name__)
