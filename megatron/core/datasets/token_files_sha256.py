"""Hash the data that a run reads: moved files keep the hash, other files under the same name change it."""

import hashlib
import json
from functools import cache

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.index_cache import hash_spread

# Of a long file only so many blocks are hashed, so that a blend of a thousand data sets takes seconds.
_NUM_BLOCKS = 4
_BLOCK_BYTES = 1 << 16


def data_sha256(config: DataConfig) -> str | None:
    """Return the SHA-256 of the data sets of each split, in order, with their weights.

    None where no token files are named. Each of the two files of a data set gives its size and its bytes; a long
    file gives blocks at its start, its end and between. The hash is part of a checkpoint, so the form of what is
    hashed cannot change.
    """
    if config.mock_data:
        return None

    @cache  # several splits name the same prefix
    def files_of(prefix: str) -> list[tuple[int, str]]:
        return [_file_identity(f"{prefix}{ending}") for ending in (".idx", ".bin")]

    content = []
    try:
        for blend in config.blends():
            if blend is None:
                content.append(None)
            else:
                content.append([blend.weights, [files_of(prefix) for prefix in blend.prefixes]])
    except (ConfigError, OSError):  # the flags name data of the script's own format
        return None
    if not any(content):
        return None
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _file_identity(path: str) -> tuple[int, str]:
    """Return (size in bytes, SHA-256 of the blocks that are read)."""
    digest = hashlib.sha256()
    size = hash_spread(path, digest, _NUM_BLOCKS, _BLOCK_BYTES)
    return size, digest.hexdigest()
