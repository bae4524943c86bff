"""The provenance of a run: the Hugging Face folder or config.json from which its model was made.

It is recorded at the start of the run and kept over restarts and layouts, in the manifest under "origin".
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.convert import model_from_hf_config
from megatron.convert.hf_provenance_and_tokenizer_files import Provenance
from megatron.core.dist_checkpointing import Checkpoint
from megatron.core.parallel import collectives
from megatron.core.storage.file_layer import is_file, read_start, size_of_file
from megatron.training.checkpointing.non_persistent_checkpoint import RankCheckpoint
from megatron.training.global_vars import Runtime, print_rank_0

_TOKENIZER = "tokenizer.json"
_TOKEN_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)  # beside it; they name tokens too


def provenance_of_run(
    runtime: Runtime, checkpoint: Checkpoint | RankCheckpoint, source: str, *, is_other_tokenizer: bool = False
) -> Provenance | None:
    """Return the provenance of a run that starts from a checkpoint or from another project's folder.

    None if it has none.

    source: the flag and folder, for errors. is_other_tokenizer: the run's tokenizer is known not to be the model's.
    Every rank must call: the first reads the folder's files for all. Raises ConfigError.
    """

    def read() -> Provenance | None:
        provenance = Provenance.in_state(checkpoint.state, source)
        if provenance is None:
            return None
        return _updated(runtime, checkpoint.state, provenance, is_other_tokenizer=is_other_tokenizer)

    return _read_on_first(runtime, read)


def provenance_of_new_run(runtime: Runtime) -> Provenance | None:
    """Return the provenance of a run that starts from initial weights: that of --hf-config; None without the flag.

    A folder gives a tokenizer too. Every rank must call. Raises ConfigError.
    """
    path = runtime.config.checkpoint.hf_config
    if path is None:
        return None
    return _read_on_first(runtime, lambda: _updated(runtime, {}, model_from_hf_config(Path(path)).origin))


def _read_on_first(runtime: Runtime, read: Callable[[], Provenance | None]) -> Provenance | None:
    """Return what `read` returns on the first rank, on every rank. Its errors are raised on all."""
    world = runtime.mesh["world"]
    device = runtime.device.torch_device
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            provenance = read()
            text = json.dumps(None if provenance is None else provenance.as_json())
    fields = json.loads(collectives.broadcast_text(text, world, device))
    return None if fields is None else Provenance(**fields)


def _updated(
    runtime: Runtime, state: Mapping[str, Any], provenance: Provenance, *, is_other_tokenizer: bool = False
) -> Provenance:
    """Return the provenance with the hashes of its files, without the tokenizer if this run has another one."""
    if provenance.files is None:  # first use: hash the folder's files
        provenance = provenance.with_files(lambda line: print_rank_0(f"WARNING: {line}"))
        is_other_tokenizer = is_other_tokenizer or _is_other_file(runtime, provenance)
    else:
        saved_sha256 = state.get("tokenizer_sha256")
        own_sha256 = runtime.tokenizer_sha256
        if saved_sha256 is not None and own_sha256 is not None and saved_sha256 != own_sha256:
            is_other_tokenizer = True
    if not is_other_tokenizer or not provenance.files:
        return provenance
    print_rank_0(
        f"this run's tokenizer is not that of {provenance.folder}: folders that are written of the model carry this run's, "
        "where transformers has one with its ids"
    )
    return provenance.without_tokenizer()


def _is_other_file(runtime: Runtime, provenance: Provenance) -> bool:
    """Return whether --tokenizer-model is another file than the folder has.

    That is a tokenizer.json of other content, or other token files.
    """
    config = runtime.config.tokenizer
    if config.tokenizer_type != "HuggingFaceTokenizer" or config.tokenizer_model is None:
        return False
    path = Path(config.tokenizer_model)
    if not is_file(path) or _TOKENIZER not in provenance.files:
        return False
    folder_names = {path: _TOKENIZER}  # this run's file -> the name of the folder's file
    for name in _TOKEN_FILES:
        if name in provenance.files:
            folder_names[path.parent / name] = name
    return any(_sha256(own) != provenance.files[name] for own, name in folder_names.items() if is_file(own))


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_start(path, size_of_file(path) or 0)).hexdigest()
