"""A hash of the data that a run reads: moved files keep it, other files under the same name change it."""

import hashlib
import json
from functools import cache

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.index_cache import hash_spread

_BLOCK, _BLOCKS = 1 << 16, 4  # read of a long file: a blend of a thousand data sets takes seconds


def data_sha256(config: DataConfig) -> str | None:
    """SHA-256 of the data sets of each split, in order, with their weights; None where no token files are named.

    Each of the two files of a data set gives its size and its bytes; a long file gives blocks at its start, its end and
    between.
    """
    if config.mock_data:
        return None
    of_prefix = cache(lambda prefix: [_file_identity(f"{prefix}{ending}") for ending in (".idx", ".bin")])
    try:
        plan = [
            blend and [blend.weights, [of_prefix(prefix) for prefix in blend.prefixes]] for blend in config.blends()
        ]
    except (ConfigError, OSError):  # the script's own data, named by these flags
        return None
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest() if any(plan) else None


def _file_identity(path: str) -> tuple[int, str]:
    """(size, SHA-256 of what is read of it)."""
    digest = hashlib.sha256()
    return hash_spread(path, digest, _BLOCKS, _BLOCK), digest.hexdigest()
