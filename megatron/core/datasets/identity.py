"""Which data a run reads, by what the files hold: a folder that has moved is the same, other files under the same name are not."""

import hashlib
import json
import os
from functools import cache

from megatron.core.config import ConfigError
from megatron.core.datasets.data_config import DataConfig

_BLOCK, _BLOCKS = 1 << 16, 4  # what is read of a long file, so that a blend of a thousand data sets costs seconds


def data_sha256(config: DataConfig) -> str | None:
    """SHA-256 of the data sets of each split, in order, with their weights; None where no token files are named.

    Of a data set: the sizes of its two files, all bytes of a short one, of a longer one blocks at its start, its end and between.
    """
    if config.mock_data:
        return None
    of_prefix = cache(lambda prefix: [_file_identity(f"{prefix}{ending}") for ending in (".idx", ".bin")])
    try:
        blends = config.blends()
        plan = [
            None if blend is None else [blend.weights, [of_prefix(prefix) for prefix in blend.prefixes]]
            for blend in blends
        ]
    except (ConfigError, OSError):  # a script's own data, which these flags name
        return None
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest() if any(plan) else None


def _file_identity(path: str) -> tuple[int, str]:
    """(size, SHA-256 of what is read of it)."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _BLOCK * _BLOCKS:
            digest.update(file.read())
            return size, digest.hexdigest()
        for i in range(_BLOCKS):
            file.seek((size - _BLOCK) * i // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return size, digest.hexdigest()
