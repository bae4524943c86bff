"""A run of one rank within this process, from the command line to the last line printed."""

import shlex

import pretrain_t5

import pretrain_bert
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.models.common.model_rules import BERT_RULES, GPT_RULES, T5_RULES
from megatron.training import pretrain

TINY = shlex.split(
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 31 --micro-batch-size 1 --lr 0.1 --log-interval 1 --eval-iters 0 --device cpu"
)


RULES = {pretrain_bert: BERT_RULES, pretrain_t5: T5_RULES}


def run(flags: str | list[str], datasets=None, script=pretrain_gpt, tiny=TINY, forward_step=None, **more) -> None:
    """script: pretrain_gpt, pretrain_bert or pretrain_t5. datasets, forward_step: in place of its own. more: what else `pretrain` is given."""
    pretrain(
        datasets or script.train_valid_test_datasets_provider,
        script.model_provider,
        ModelType.encoder_and_decoder if script is pretrain_t5 else ModelType.encoder_or_decoder,
        forward_step or script.forward_step,
        argv=[*tiny, *(shlex.split(flags) if isinstance(flags, str) else flags)],
        **{"rules": RULES.get(script, GPT_RULES)} | more,
    )
