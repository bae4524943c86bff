"""Which Hugging Face folder or config.json a run's model began as: recorded at its start, kept over restarts and layouts."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.convert import described_by
from megatron.convert.hf_origin import Origin
from megatron.core.dist_checkpointing import Checkpoint
from megatron.core.parallel import collectives
from megatron.core.storage.file_layer import is_file, read_start, size_of_file
from megatron.training.checkpointing.non_persistent_checkpoint import OwnPart
from megatron.training.global_vars import Runtime, print_rank_0

_TOKENIZER = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # name tokens too


def origin_of_run(
    runtime: Runtime, checkpoint: Checkpoint | OwnPart, given: str, *, is_other_tokenizer: bool = False
) -> Origin | None:
    """The origin of a run that starts from a checkpoint, or from a folder of another project; None if it has none.

    given: the flag and folder. is_other_tokenizer: the run's is known to be another than the model's. Every rank must
    call: the
    first reads the folder's files for all. Raises ConfigError.
    """

    def read() -> Origin | None:
        origin = Origin.in_state(checkpoint.state, given)
        return None if origin is None else _as_of_now(runtime, checkpoint.state, origin, is_other=is_other_tokenizer)

    return _agreed(runtime, read)


def origin_of_new_run(runtime: Runtime) -> Origin | None:
    """The origin of a run that starts from initial weights: that of --hf-config, which gives a tokenizer if it is a
    folder; None
    without the flag. Every rank must call. Raises ConfigError."""
    path = runtime.config.checkpoint.hf_config
    return None if path is None else _agreed(runtime, lambda: _as_of_now(runtime, {}, described_by(Path(path)).origin))


def _agreed(runtime: Runtime, read: Callable[[], Origin | None]) -> Origin | None:
    world, device = runtime.mesh["world"], runtime.device.torch_device
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            origin = read()
            text = json.dumps(None if origin is None else origin.as_json())
    found = json.loads(collectives.broadcast_text(text, world, device))
    return None if found is None else Origin(**found)


def _as_of_now(runtime: Runtime, state: Mapping[str, Any], origin: Origin, *, is_other: bool = False) -> Origin:
    """With the files' hashes, or without the tokenizer if this run has another one."""
    if origin.files is None:
        origin = origin.with_files(lambda line: print_rank_0(f"WARNING: {line}"))
        is_other = is_other or _is_other_file(runtime, origin)
    else:
        theirs, mine = state.get("tokenizer_sha256"), runtime.tokenizer_sha256
        is_other = is_other or (None not in (theirs, mine) and theirs != mine)
    if not is_other or not origin.files:
        return origin
    print_rank_0(
        f"this run's tokenizer is not that of {origin.folder}: folders that are written of the model carry no tokenizer"
    )
    return origin.without_tokenizer()


def _is_other_file(runtime: Runtime, origin: Origin) -> bool:
    """Whether --tokenizer-model is a tokenizer.json with another content than that of the folder, or beside other tokens."""
    config = runtime.config.tokenizer
    if config.tokenizer_type != "HuggingFaceTokenizer" or config.tokenizer_model is None:
        return False
    path = Path(config.tokenizer_model)
    if not is_file(path) or _TOKENIZER not in origin.files:
        return False
    theirs = {path: _TOKENIZER} | {path.parent / name: name for name in _BESIDE if name in origin.files}
    return any(_sha256(mine) != origin.files[name] for mine, name in theirs.items() if is_file(mine))


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_start(path, size_of_file(path) or 0)).hexdigest()
