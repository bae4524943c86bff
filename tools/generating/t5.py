"""How tools/generate.py takes a prompt and ends a text; with a T5: what its encoder reads, and with what its decoder begins."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.convert.families.family import START_ID
from megatron.convert.hf_origin import Provenance
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference import SavedSettings
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.tokenizers import Tokenizer


def is_t5(state: dict[str, Any]) -> bool:
    """Whether a checkpoint's model has an encoder that reads the prompt, and a decoder that writes."""
    return state.get("model") == T5Model.__name__


def is_folder_of_others(state: dict[str, Any]) -> bool:
    """Whether the weights are those of a Hugging Face folder, with no training since."""
    return state["train"]["iteration"] == 0 and state.get("origin") is not None


def t5_problems(
    state: dict[str, Any], saved: SavedSettings, max_new_tokens: int, context_parallel_size: int
) -> list[str]:
    """Flags that a T5 cannot follow; none if the checkpoint has another model."""
    problems = []
    if not is_t5(state):
        return problems
    if context_parallel_size > 1:
        problems.append(
            f"--context-parallel-size {context_parallel_size} is not built for the prompts of a T5; leave it out, or "
            "use --tensor-model-parallel-size"
        )
    if saved.transformer.position_embedding_type == "learned_absolute" and max_new_tokens > saved.positions:
        problems.append(
            f"--max-new-tokens {max_new_tokens} is above the {saved.positions} positions that this T5 has learned; lower it"
        )
    return problems


@dataclass(frozen=True)
class Reading:
    """How a model takes a prompt, and ends a text."""

    ids_of: Callable[[str, Tokenizer, "IdsOf"], list[int]]
    stop_id: int | list[int] | None  # None: no text ends by itself
    longest: int | None  # tokens of a prompt; None: there is no longest
    start_id: int | None = None  # of a T5: what its decoder's text begins with

    def check(self, prompt: str, ids: list[int]) -> None:
        """Raises ConfigError for a prompt that is too long."""
        if self.longest is not None and len(ids) > self.longest:
            raise ConfigError(
                f"the prompt {prompt[:40]!r} has {len(ids)} tokens, above the model's --seq-length {self.longest}; shorten it"
            )


IdsOf = Callable[[str, Tokenizer], list[int]]


def reading_of(state: dict[str, Any], saved: SavedSettings, tokenizer: Tokenizer, start_id: int | None) -> Reading:
    """start_id: --decoder-start-token-id. Raises ConfigError, CheckpointError."""
    theirs = _their_end_ids(state, tokenizer)
    if is_t5(state):
        has_table = saved.transformer.position_embedding_type == "learned_absolute"
        start = start_of_decoder(start_id, state, tokenizer)
        eos = getattr(tokenizer, "eos", None)
        stop = theirs or (tokenizer.eod if eos is None else eos)
        return Reading(encoder_ids, stop, saved.positions if has_table else None, start)
    if start_id is not None:
        raise ConfigError(
            f"--decoder-start-token-id {start_id} is about a T5's decoder, and the checkpoint has another model; leave it out"
        )
    return Reading(
        lambda text, tokenizer, ids_of: ids_of(text, tokenizer), theirs or tokenizer.eod, saved.data.seq_length
    )


def _their_end_ids(state: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text by the folder that the model began as; with training since, also that which ended documents."""
    origin = Provenance.in_state(state, "the checkpoint")
    theirs = origin.end_ids() if origin is not None else []
    if not theirs or is_folder_of_others(state) or tokenizer.eod is None or tokenizer.eod in theirs:
        return theirs
    return [*theirs, tokenizer.eod]


def encoder_ids(prompt: str, tokenizer: Tokenizer, ids_of: IdsOf) -> list[int]:
    """The ids of a T5's prompt, in which the name of a sentinel, `<extra_id_0>`, means its id. ids_of: of text between them."""
    # A tokenizer.json of a T5 finds them by itself.
    named = {tokenizer.inv_vocab[i]: i for i in getattr(tokenizer, "additional_special_tokens_ids", ())}
    sentinels = {name: i for name, i in named.items() if i not in ids_of(name, tokenizer)}
    if not prompt.strip():
        raise ConfigError("a prompt is empty, and a T5 has nothing to read then; give a text")
    if not sentinels:
        return ids_of(prompt, tokenizer)
    longest_first = "|".join(map(re.escape, sorted(sentinels, key=len, reverse=True)))
    parts = re.split(f"({longest_first})", prompt)  # odd parts are sentinels
    ids = [ids_of(part, tokenizer) if part.strip() else [] for part in parts[::2]]
    return [*ids[0], *(i for name, rest in zip(parts[1::2], ids[1:]) for i in (sentinels[name], *rest))]


def start_of_decoder(given: int | None, state: dict[str, Any], tokenizer: Tokenizer) -> int:
    """The id that the text of a T5's decoder begins with. given: --decoder-start-token-id."""
    if given is not None:
        return given
    begin = getattr(tokenizer, "bos", None)
    has_none = begin is None or begin < 0
    # With training since, texts begin as those of the data did: with the tokenizer's own, if it has one.
    if (state.get("origin") or {}).get("model_type") == "t5" and (has_none or is_folder_of_others(state)):
        return state["origin"].get("kept", {}).get(START_ID, 0)  # 0: the padding token, as the published models have it
    if has_none:
        raise ConfigError(
            f"{tokenizer.name} has no token that begins a text; give the one that the decoder's texts began with: "
            "--decoder-start-token-id ID"
        )
    return begin
