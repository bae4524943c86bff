"""The tokenizer of the weights that a run starts from, beside the run's own: the same tokens, or rows of the table that
stay.

compared    a folder's tokenizer.json, vocab.json, vocab.txt or sentencepiece model, token by token: another is refused,
            unless
            --allow-tokenizer-change is given. (Checkpoints of ours hold a hash: compatibility.py.)
resized     --resize-token-embeddings tokens: rows of equal tokens stay; ids: rows of equal ids, as transformers'
            resize_token_embeddings keeps them. All other rows keep their first values, the same in every layout.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megatron.convert.families.family import OUTPUT, WORD_TABLE
from megatron.convert.hf_origin import Origin
from megatron.convert.hf_tokenizer_vocab import vocabulary_in
from megatron.core.base.dataclass_flags import ConfigError, build
from megatron.core.dist_checkpointing import Checkpoint, LocalTensor
from megatron.core.parallel import collectives
from megatron.core.sharding.boxes import Box, size_of
from megatron.core.storage.file_layer import is_file
from megatron.core.storage.paths import is_url, path_of
from megatron.core.tokenizers.bpe_wordpiece_tiktoken import LibraryTokenizer
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.tokenizer_fingerprint import tokenizer_sha256
from megatron.core.tokenizers.vocabulary_diff import (
    RowRun,
    Vocabulary,
    rows_by_id,
    rows_by_token,
    rule_difference,
    token_difference,
    vocabulary_of,
)
from megatron.training.global_vars import Runtime, print_rank_0

_FLAG = "--resize-token-embeddings"
# Parameters with a row for each word; the names end so in a checkpoint of the weights and of their masters.
_BY_WORD = (WORD_TABLE, f"{OUTPUT}.weight", f"{OUTPUT}.bias", "word_bias.bias")


def check_same_tokens(runtime: Runtime, state: Mapping[str, Any], given: str) -> bool:
    """Refuse a folder's weights under another tokenizer than the folder's; returns whether it is another, which then is
    allowed.

    Every rank must call: the first reads the folder's files for all. A run without tokens, as one with NullTokenizer,
    cannot be
    compared. Raises ConfigError.
    """
    mine = None if runtime.tokenizer is None else vocabulary_of(runtime.tokenizer)
    if mine is None or state.get("origin") is None or state.get("tokenizer_sha256") is not None:
        return False
    differing, unread = _on_first(runtime, lambda: _compared(runtime, state, given, mine))
    if unread:
        print_rank_0(f"WARNING: the run's tokenizer is not compared with that of {given}: {unread}")
    if not differing:
        return False
    config = runtime.config.checkpoint
    told = f"{given} holds a model of another tokenizer than this run's ({runtime.tokenizer.name}): {differing}"
    if config.resize_token_embeddings is None and not config.allow_tokenizer_change:
        raise ConfigError(
            f"{told}; leave the flags of the tokenizer out to take the folder's, or give {_FLAG} tokens, which keeps the rows of "
            "the tokens that both have, or --allow-tokenizer-change if its ids mean the same or will be learned anew"
        )
    print_rank_0(f"WARNING: {told}")
    return True


def _on_first(runtime: Runtime, work: Any) -> Any:
    """What `work` returns on the first rank, as JSON has it. Every rank must call; its errors are raised on all."""
    world, device = runtime.mesh["world"], runtime.device.torch_device
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            text = json.dumps(work())
    return json.loads(collectives.broadcast_text(text, world, device))


def _compared(runtime: Runtime, state: Mapping[str, Any], given: str, mine: Vocabulary) -> tuple[str, str]:
    """(what my ids mean otherwise or how text is cut otherwise, in words; why the folder's tokenizer cannot be read)"""
    try:
        theirs = _vocabulary_of_origin(state, given)
        if theirs is None or (differing := token_difference(theirs, mine)):
            return ("" if theirs is None else differing), ""
        return _cut_otherwise(runtime, state, given), ""
    except (ValueError, OSError, ImportError) as error:
        return "", str(error)


def _cut_otherwise(runtime: Runtime, state: Mapping[str, Any], given: str) -> str:
    """How another tokenizer.json with the folder's tokens cuts text, in words; "" as the folder's does, or for
    another type."""
    origin, config = Origin.in_state(state, given), runtime.config.tokenizer
    if origin is None or is_url(origin.folder) or not isinstance(runtime.tokenizer, LibraryTokenizer):
        return ""
    theirs = path_of(origin.folder) / "tokenizer.json"
    if runtime.tokenizer.name != "HuggingFaceTokenizer" or not is_file(theirs) or _is_file_of(config, theirs):
        return ""
    folder = build_tokenizer(replace(config, tokenizer_model=str(theirs)))
    return rule_difference(folder.rules, runtime.tokenizer.rules)


def _is_file_of(config: TokenizerConfig, path: Path) -> bool:
    """Whether the run's tokenizer is read from this file."""
    return Path(str(config.tokenizer_model)).resolve() in (path.resolve(), path.parent.resolve())


def _vocabulary_of_origin(state: Mapping[str, Any], given: str) -> Vocabulary | None:
    origin = Origin.in_state(state, given)
    return None if origin is None else vocabulary_in(path_of(origin.folder))


# ---------------------------------------------------------------- another vocabulary


def rows_that_stay(runtime: Runtime, checkpoint: Checkpoint, given: str) -> list[RowRun]:
    """The rows of the checkpoint's word table that are rows of this run's. Every rank must call. Raises ConfigError."""
    state, how = checkpoint.state, runtime.config.checkpoint.resize_token_embeddings
    sizes = state["vocab_size"], runtime.vocab_size

    def chosen() -> list[RowRun]:
        if how == "ids":
            return rows_by_id(*sizes)
        mine = None if runtime.tokenizer is None else vocabulary_of(runtime.tokenizer)
        if mine is None:
            raise ConfigError(f"{_FLAG} tokens: this run's tokenizer has no tokens by name; give {_FLAG} ids")
        return rows_by_token(_vocabulary_of_run(state, given), mine, *sizes)

    runs = [RowRun(*run) for run in _on_first(runtime, chosen)]
    kept = sum(run.count for run in runs)
    print_rank_0(
        f"{_FLAG} {how}: {kept} of this run's {sizes[1]} words have their rows of {given}, {sizes[1] - kept} get first values; "
        f"{sizes[0] - kept} of its {sizes[0]} rows are left out"
    )
    return runs


def _vocabulary_of_run(state: Mapping[str, Any], given: str) -> Vocabulary:
    """The tokens of the tokenizer that a model was trained with. Raises ConfigError, with what to do where they are
    not known."""
    otherwise = f"{_FLAG} ids keeps the rows of equal ids"
    try:
        if (sha256 := state.get("tokenizer_sha256")) is None:
            found = _vocabulary_of_origin(state, given)
        else:
            config = build(TokenizerConfig, dict(state["config"].get("tokenizer", {})))
            tokenizer = build_tokenizer(config)
            if tokenizer_sha256(config, tokenizer) != sha256:
                raise ValueError(f"the files of its {tokenizer.name} have changed since; put the old ones back")
            found = vocabulary_of(tokenizer)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"{_FLAG} tokens: the tokenizer of {given} cannot be read: {error}; {otherwise}") from error
    if found is None:
        raise ConfigError(f"{_FLAG} tokens: no tokens by name are known of {given}; {otherwise}")
    return found


def with_rows(
    tensors: Mapping[str, LocalTensor], runs: Sequence[RowRun], checkpoint: Checkpoint, prefix: str = "model/"
) -> dict[str, LocalTensor]:
    """The tensors as they are read: of those with a row for each word, the rows that stay, at their places in the
    checkpoint.

    Names: `prefix` and that of the parameter. Rows that are not read keep their values.
    """
    found = dict(tensors)
    for name, local in tensors.items():
        saved = checkpoint.manifest.tensors.get("model/" + name.removeprefix(prefix))
        if saved is not None and name.removeprefix(prefix) in _BY_WORD:
            shape = (saved.shape[0], *local.shape[1:])
            pieces = [part for pair in local.pieces for part in _moved(pair, runs)]
            copies = tuple(part for pair in local.copies for part in _moved(pair, runs))
            found[name] = replace(local, shape=shape, pieces=pieces, copies=copies)
    return found


def _moved(pair: tuple[Box, Box], runs: Sequence[RowRun]) -> list[tuple[Box, Box]]:
    """The rows of a piece that stay: (their box in the checkpoint's tensor, their box in the local one)."""
    box, local = pair
    first, last = box[0]
    # A local box has the rows of the global one, or is a flat run of its elements.
    width = prod(size_of(box[1:])) if len(local) == 1 else 1
    begin = local[0][0]
    found = []
    at = max(bisect_right(runs, first, key=lambda run: run.new) - 1, 0)
    for run in runs[at:]:
        start, stop = max(run.new, first), min(run.new + run.count, last)
        if run.new >= last:
            break
        if start < stop:
            old = run.old + start - run.new
            rows = (begin + (start - first) * width, begin + (stop - first) * width)
            found.append((((old, old + stop - start), *box[1:]), (rows, *local[1:])))
    return found
