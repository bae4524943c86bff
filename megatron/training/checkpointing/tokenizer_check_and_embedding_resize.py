"""The tokenizer of the weights that a run starts from, compared with the run's own.

Also embedding rows for another vocabulary.

compared   a folder's tokenizer.json, vocab.json, vocab.txt or sentencepiece model, token by token: another tokenizer is
           refused unless --allow-tokenizer-change is given. (Our checkpoints hold a hash instead:
           check_same_model_and_optimizer.py.)
resized    --resize-token-embeddings tokens: rows of equal tokens are reused; ids: rows of equal ids, as transformers'
           resize_token_embeddings does. All other rows keep their initial values, the same in every layout.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megatron.convert.families.hf_family_fields_and_param_mappings import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.convert.hf_provenance_and_tokenizer_files import Provenance
from megatron.convert.read_hf_token_to_id import read_vocabulary
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing import Checkpoint, LocalTensor
from megatron.core.parallel import collectives
from megatron.core.sharding.boxes import Box, size_of
from megatron.core.storage.file_layer import is_file
from megatron.core.storage.path_or_url import is_url, path_of
from megatron.core.tokenizers.huggingface_bpe_wordpiece_tiktoken import FastTokenizer
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.tokenizer_sha256 import tokenizer_sha256
from megatron.core.tokenizers.vocabulary_changes_and_embedding_rows import (
    RowRun,
    Vocabulary,
    changed_or_lost_tokens,
    rows_by_id,
    rows_by_token,
    rule_difference,
    vocabulary_of,
)
from megatron.training.global_vars import Runtime, print_rank_0

_FLAG = "--resize-token-embeddings"
# Parameters with a row for each token, by their names in the model.
_BY_TOKEN = (WORD_EMBEDDINGS, f"{OUTPUT_LAYER}.weight", f"{OUTPUT_LAYER}.bias", "word_bias.bias")


def is_allowed_tokenizer_change(runtime: Runtime, state: Mapping[str, Any], source: str) -> bool:
    """Refuse a folder's weights under another tokenizer than the folder's; return True if it is another but allowed.

    Every rank must call: the first reads the folder's files for all. A run whose tokenizer has no tokens by name, such
    as NullTokenizer, cannot be compared. Raises ConfigError.
    """
    own_vocabulary = None if runtime.tokenizer is None else vocabulary_of(runtime.tokenizer)
    if own_vocabulary is None or state.get("origin") is None or state.get("tokenizer_sha256") is not None:
        return False
    difference, unreadable = _on_first(runtime, lambda: _compare(runtime, state, source, own_vocabulary))
    if unreadable:
        print_rank_0(f"WARNING: the run's tokenizer is not compared with that of {source}: {unreadable}")
    if not difference:
        return False
    config = runtime.config.checkpoint
    problem = f"{source} holds a model of another tokenizer than this run's ({runtime.tokenizer.name}): {difference}"
    if config.resize_token_embeddings is None and not config.allow_tokenizer_change:
        raise ConfigError(
            f"{problem}; leave out the tokenizer's flags to use the folder's tokenizer, or give {_FLAG} tokens to "
            "keep the rows of tokens that both have. If each id stands for the same token in both "
            "tokenizers, or the run is to learn the meaning of the ids anew, give --allow-tokenizer-change"
        )
    print_rank_0(f"WARNING: {problem}")
    return True


def _on_first(runtime: Runtime, work: Any) -> Any:
    """Return what `work` returns on the first rank, as JSON has it.

    Every rank must call; its errors are raised on all.
    """
    world = runtime.mesh["world"]
    device = runtime.device.torch_device
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            text = json.dumps(work())
    return json.loads(collectives.broadcast_text(text, world, device))


def _compare(runtime: Runtime, state: Mapping[str, Any], source: str, own_vocabulary: Vocabulary) -> tuple[str, str]:
    """Return, in words, (how this run's ids or cutting differ; why the folder's tokenizer cannot be read)."""
    try:
        folder_vocabulary = _vocabulary_of_folder(state, source)
        if folder_vocabulary is None:
            return "", ""
        difference = changed_or_lost_tokens(folder_vocabulary, own_vocabulary)
        if not difference:
            difference = _cutting_difference(runtime, state, source)
        return difference, ""
    except (ValueError, OSError, ImportError) as error:
        return "", str(error)


def _cutting_difference(runtime: Runtime, state: Mapping[str, Any], source: str) -> str:
    """Return how this run's tokenizer.json, with the folder's tokens, cuts text into tokens otherwise.

    "" if it does not. Other types of tokenizers are not compared.
    """
    config = runtime.config.tokenizer
    provenance = Provenance.in_state(state, source)
    if provenance is None or is_url(provenance.folder) or not isinstance(runtime.tokenizer, FastTokenizer):
        return ""
    folder_file = path_of(provenance.folder) / "tokenizer.json"
    if runtime.tokenizer.name != "HuggingFaceTokenizer" or not is_file(folder_file):
        return ""
    if _is_read_from(config, folder_file):
        return ""
    folder_tokenizer = build_tokenizer(replace(config, tokenizer_model=str(folder_file)))
    return rule_difference(folder_tokenizer.rules, runtime.tokenizer.rules)


def _is_read_from(config: TokenizerConfig, path: Path) -> bool:
    """Return whether the run's tokenizer is read from this file."""
    return Path(str(config.tokenizer_model)).resolve() in (path.resolve(), path.parent.resolve())


def _vocabulary_of_folder(state: Mapping[str, Any], source: str) -> Vocabulary | None:
    """Return the tokens of the folder from which the model was made; None if they are not known."""
    provenance = Provenance.in_state(state, source)
    if provenance is None:
        return None
    return read_vocabulary(path_of(provenance.folder))


# ---------------------------------------------------------------- another vocabulary


def reused_rows(runtime: Runtime, checkpoint: Checkpoint, source: str) -> list[RowRun]:
    """Return the rows of the checkpoint's embedding table that become rows of this run's. Every rank must call.

    Raises ConfigError.
    """
    state = checkpoint.state
    mode = runtime.config.checkpoint.resize_token_embeddings
    saved_size = state["vocab_size"]
    own_size = runtime.vocab_size

    def choose_rows() -> list[RowRun]:
        if mode == "ids":
            return rows_by_id(saved_size, own_size)
        own_vocabulary = None if runtime.tokenizer is None else vocabulary_of(runtime.tokenizer)
        if own_vocabulary is None:
            raise ConfigError(f"{_FLAG} tokens: the tokenizer of this run does not name its tokens; give {_FLAG} ids")
        return rows_by_token(_vocabulary_of_run(state, source), own_vocabulary, saved_size, own_size)

    runs = [RowRun(*run) for run in _on_first(runtime, choose_rows)]
    reused = sum(run.count for run in runs)
    print_rank_0(
        f"{_FLAG} {mode}: {reused} of this run's {own_size} words have their rows of {source}, {own_size - reused} get first "
        f"values; {saved_size - reused} of its {saved_size} rows are left out"
    )
    return runs


def _vocabulary_of_run(state: Mapping[str, Any], source: str) -> Vocabulary:
    """Return the tokens of the tokenizer that a model was trained with. Raises ConfigError if they are not known."""
    otherwise = f"{_FLAG} ids keeps the rows of equal ids"
    sha256 = state.get("tokenizer_sha256")
    try:
        if sha256 is None:
            vocabulary = _vocabulary_of_folder(state, source)
        else:
            config = build(TokenizerConfig, dict(state["config"].get("tokenizer", {})))
            tokenizer = build_tokenizer(config)
            if tokenizer_sha256(config, tokenizer) != sha256:
                raise ValueError(
                    f"the files of its {tokenizer.name} have changed since the checkpoint was written; restore the old "
                    "ones"
                )
            vocabulary = vocabulary_of(tokenizer)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"{_FLAG} tokens: the tokenizer of {source} cannot be read: {error}; {otherwise}") from error
    if vocabulary is None:
        raise ConfigError(f"{_FLAG} tokens: {source} does not name the tokens of its tokenizer; {otherwise}")
    return vocabulary


def with_reused_rows_only(
    tensors: Mapping[str, LocalTensor], runs: Sequence[RowRun], checkpoint: Checkpoint, prefix: str = "model/"
) -> dict[str, LocalTensor]:
    """Return the tensors as they are to be read: of those with a row for each token, only the reused rows.

    tensors: name -> this rank's part; those with rows are [rows, ..], of the word embeddings and the output layer.
    Their boxes are those of the checkpoint's tensors. Names: `prefix` and the parameter's. Rows that are not read
    keep their values.
    """
    result = dict(tensors)
    for name, local in tensors.items():
        parameter = name.removeprefix(prefix)
        saved = checkpoint.manifest.tensors.get(f"model/{parameter}")
        if saved is None or parameter not in _BY_TOKEN:
            continue
        shape = (saved.shape[0], *local.shape[1:])
        pieces = [part for pair in local.pieces for part in _saved_rows(pair, runs)]
        copies = tuple(part for pair in local.copies for part in _saved_rows(pair, runs))
        result[name] = replace(local, shape=shape, pieces=pieces, copies=copies)
    return result


def _saved_rows(pair: tuple[Box, Box], runs: Sequence[RowRun]) -> list[tuple[Box, Box]]:
    """Return the reused rows of a piece: (their box in the checkpoint's tensor, their box in the local one)."""
    global_box, local_box = pair
    first, last = global_box[0]  # rows of this run's table
    # A local box has the rows of the global one, or is a flat run of its elements.
    row_length = prod(size_of(global_box[1:])) if len(local_box) == 1 else 1
    local_start = local_box[0][0]
    rows = []
    first_run = max(bisect_right(runs, first, key=lambda run: run.new) - 1, 0)
    for run in runs[first_run:]:
        if run.new >= last:
            break
        start = max(run.new, first)
        stop = min(run.new + run.count, last)
        if start < stop:
            saved_start = run.old + start - run.new
            saved_box = ((saved_start, saved_start + stop - start), *global_box[1:])
            span = (local_start + (start - first) * row_length, local_start + (stop - first) * row_length)
            rows.append((saved_box, (span, *local_box[1:])))
    return rows
