"""What a model and its data make of the settings, beside the rules for every run: each top-level script hands its own to `pretrain`.

    pretrain(..., rules=GPT_RULES)

They are asked before a process group exists, with the rules of `rules.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron.core.config import knobs
from megatron.core.datasets.bert import bert_problems
from megatron.core.datasets.masked import MaskedDataConfig
from megatron.core.tokenizers.tokenizers import Tokenizer
from megatron.training.config import Config


@dataclass(frozen=True)
class ModelRules:
    """unread: field -> why giving it has no effect. problems: (config, the tokenizer if it could be built) -> what cannot work."""

    unread: Mapping[str, str] = field(default_factory=dict)
    problems: Callable[[Config, Tokenizer | None], list[str]] = lambda config, tokenizer: []


def _problems_of_bert(config: Config, tokenizer: Tokenizer | None) -> list[str]:
    problems = bert_problems(config.data, config.masked_data, tokenizer)
    if config.fim.fim_data:
        problems.append("--fim-data rearranges documents for a GPT, and a BERT has masked words instead; leave it out")
    return problems


NO_RULES = ModelRules()
GPT_RULES = ModelRules(
    unread=dict.fromkeys(
        (f.name for f in knobs(MaskedDataConfig)), "only masked words need it, as pretrain_bert.py has them"
    )
)
BERT_RULES = ModelRules(problems=_problems_of_bert)
