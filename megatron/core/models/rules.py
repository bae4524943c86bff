"""A model's rules about the settings of a run and its data, beside the rules of every run. A model declares its own:

    class GPTModel(nn.Module):
        rules = GPT_RULES

Its script passes them to `pretrain(..., rules=GPTModel.rules)`, which checks them before a process group exists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config import knobs
from megatron.core.datasets.bert import bert_problems
from megatron.core.datasets.masking import MaskedDataConfig
from megatron.core.tokenizers.tokenizer_config import NO_TOKENIZER
from megatron.core.tokenizers.tokenizers import Tokenizer


@dataclass(frozen=True)
class ModelRules:
    """unread: field -> reason why the model ignores it.

    problems: (all settings, the tokenizer or None) -> messages about settings that cannot work.
    reads_text: --data-path names token files; the run checks for them before ranks communicate.
    """

    unread: Mapping[str, str] = field(default_factory=dict)
    problems: Callable[[Any, Tokenizer | None], list[str]] = lambda config, tokenizer: []
    reads_text: bool = False


def text_problems(config: Any) -> list[str]:
    """Missing settings of a run on text data, real or mock."""
    problems = [] if config.data.source_problems(needed=False) else config.data.source_problems()
    return problems + ([NO_TOKENIZER] if config.tokenizer.tokenizer_type is None else [])


def _problems_of_bert(config: Any, tokenizer: Tokenizer | None) -> list[str]:
    problems = text_problems(config) + bert_problems(config.data, config.masked_data, tokenizer)
    if config.fim.fim_data:
        problems.append("--fim-data rearranges documents for a GPT; a BERT has masked words instead: leave it out")
    model = config.transformer
    if model.logit_multiplier != 1 or model.final_logit_softcapping is not None:
        problems.append("--logit-multiplier and --final-logit-softcapping are not built for a BERT; leave them out")
    if config.transformer.add_output_bias:
        problems.append("--add-output-bias: the scores of a BERT have a bias in any case; leave it out")
    if config.transformer.window_size is not None:
        problems.append("--window-size looks back alone, and a word of a BERT sees both sides; leave it out")
    if config.parallel.context_parallel_size > 1:
        problems.append("--context-parallel-size above 1 is not built yet for a BERT; use 1")
    return problems


NO_RULES = ModelRules()  # for a script with data of its own
GPT_RULES = ModelRules(
    unread=dict.fromkeys(
        (f.name for f in knobs(MaskedDataConfig)), "only masked words need it, as pretrain_bert.py has them"
    ),
    problems=lambda config, tokenizer: text_problems(config),
    reads_text=True,
)
BERT_RULES = ModelRules(problems=_problems_of_bert, reads_text=True)
