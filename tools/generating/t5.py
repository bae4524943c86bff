"""Rules by which tools/generate.py encodes a prompt, begins a T5 decoder's text, and ends a text."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.convert.families.hf_family_fields_and_param_mappings import START_ID
from megatron.convert.hf_provenance_and_tokenizer_files import Provenance
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference import SavedSettings
from megatron.core.models.T5.t5_stage import T5Model
from megatron.core.tokenizers import Tokenizer


def is_t5(state: dict[str, Any]) -> bool:
    """Whether a checkpoint's model, ours or a script's, has an encoder that reads the prompt, and a decoder that writes."""
    is_by_settings = state["config"]["transformer"].get("decoder_num_layers") is not None
    return state.get("model") == T5Model.__name__ or is_by_settings


def is_untrained_import(state: dict[str, Any]) -> bool:
    """Whether the weights are those of a Hugging Face folder, not trained further."""
    return state["train"]["iteration"] == 0 and state.get("origin") is not None


def t5_problems(
    state: dict[str, Any], saved: SavedSettings, max_new_tokens: int, context_parallel_size: int
) -> list[str]:
    """Return validation errors of flags that a T5 does not support; none if the checkpoint has another model."""
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
class PromptRules:
    """Rules of a model for prompts and for the end of a text."""

    encode: Callable[[str, Tokenizer, "Encode"], list[int]]
    stop_id: int | list[int] | None  # ids that end a text; None: only --max-new-tokens does
    max_length: int | None  # tokens of a prompt; None: unlimited
    start_id: int | None = None  # T5: the first id of the decoder's text

    def check_length(self, prompt: str, ids: list[int]) -> None:
        """Raise ConfigError for a prompt that is too long."""
        if self.max_length is not None and len(ids) > self.max_length:
            raise ConfigError(
                f"the prompt {prompt[:40]!r} has {len(ids)} tokens, above the model's --seq-length {self.max_length}; "
                "shorten it"
            )


Encode = Callable[[str, Tokenizer], list[int]]  # a text without special rules -> its ids


def prompt_rules_of(
    state: dict[str, Any], saved: SavedSettings, tokenizer: Tokenizer, start_id: int | None
) -> PromptRules:
    """Return the rules of a checkpoint's model.

    start_id: --decoder-start-token-id. Raises ConfigError, CheckpointError.
    """
    folder_end_ids = _folder_end_ids(state, tokenizer)
    if is_t5(state):
        has_learned_positions = saved.transformer.position_embedding_type == "learned_absolute"
        max_length = saved.positions if has_learned_positions else None
        start = start_of_decoder(start_id, state, tokenizer)
        eos = getattr(tokenizer, "eos", None)
        tokenizer_end_id = tokenizer.eod if eos is None else eos
        return PromptRules(encoder_ids, folder_end_ids or tokenizer_end_id, max_length, start)
    if start_id is not None:
        raise ConfigError(
            f"--decoder-start-token-id {start_id} is about a T5's decoder, and the checkpoint has another model; leave it out"
        )
    return PromptRules(
        encode=lambda text, tokenizer, encode: encode(text, tokenizer),
        stop_id=folder_end_ids or tokenizer.eod,
        max_length=saved.data.seq_length,
    )


def _folder_end_ids(state: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a text according to the Hugging Face folder that the model was imported from, if any.

    After further training the token that ended the documents of that training ends a text, too.
    """
    origin = Provenance.in_state(state, "the checkpoint")
    end_ids = origin.end_ids() if origin is not None else []
    if not end_ids or is_untrained_import(state):
        return end_ids
    if tokenizer.eod is None or tokenizer.eod in end_ids:
        return end_ids
    return [*end_ids, tokenizer.eod]


def encoder_ids(prompt: str, tokenizer: Tokenizer, ids_of: Encode) -> list[int]:
    """Return the ids of a T5's prompt, in which a sentinel's name such as `<extra_id_0>` stands for its id.

    ids_of: encodes the text between sentinels.
    """
    # Only the sentinels that the tokenizer does not recognize: a tokenizer.json of a T5 encodes them itself.
    id_of_name = {tokenizer.inv_vocab[i]: i for i in getattr(tokenizer, "additional_special_tokens_ids", ())}
    sentinels = {name: i for name, i in id_of_name.items() if i not in ids_of(name, tokenizer)}
    if not prompt.strip():
        raise ConfigError("a prompt is empty, and a T5 has nothing to read then; give a text")
    if not sentinels:
        return ids_of(prompt, tokenizer)

    # Longest names first, so that <extra_id_1> does not match the start of a longer name.
    longest_first = "|".join(map(re.escape, sorted(sentinels, key=len, reverse=True)))
    ids = []
    for number, part in enumerate(re.split(f"({longest_first})", prompt)):
        if number % 2 == 1:  # the odd parts are the sentinels
            ids.append(sentinels[part])
        elif part.strip():
            ids += ids_of(part, tokenizer)
    return ids


def start_of_decoder(requested_id: int | None, state: dict[str, Any], tokenizer: Tokenizer) -> int:
    """Return the first id of a T5 decoder's text. requested_id: --decoder-start-token-id."""
    if requested_id is not None:
        return requested_id
    bos = getattr(tokenizer, "bos", None)
    has_no_bos = bos is None or bos < 0
    is_hf_t5 = (state.get("origin") or {}).get("model_type") == "t5"
    # After further training, texts begin like those of the training data: with the tokenizer's bos, if it has one.
    if is_hf_t5 and (has_no_bos or is_untrained_import(state)):
        return state["origin"].get("kept", {}).get(START_ID, 0)  # 0: the padding token, as in the published models
    if has_no_bos:
        raise ConfigError(
            f"{tokenizer.name} has no token that begins a text; give the one that the decoder's texts began with: "
            "--decoder-start-token-id ID"
        )
    return bos
