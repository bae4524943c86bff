"""A model's rules about the settings of a run and its data, in addition to those of every run.

A model declares its own:

    class GPTModel(nn.Module):
        rules = GPT_RULES

Its script passes them to `pretrain(..., rules=GPTModel.rules)`, which checks them before a process group exists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.base.dataclass_flags import option_fields
from megatron.core.datasets.bert_dataset_builder import bert_problems
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.datasets.gpt_dataset_and_builder import end_problems
from megatron.core.datasets.t5_dataset_builder import t5_problems
from megatron.core.tokenizers.tokenizer_config_and_build import NO_TOKENIZER
from megatron.core.tokenizers.tokenizer_registry import Tokenizer


@dataclass(frozen=True)
class ModelRules:
    """The rules of one model.

    model: the name of the class, which --hf-config must describe; "": a script's own, which is not compared.
    unread: field -> reason why the model ignores it.
    problems: (all settings, the tokenizer or None) -> messages about settings that cannot work.
    reads_text: --data-path names token files; the run checks for them before ranks communicate.
    has_experts: parameters are sharded over expert-parallel ranks. A model with a name and without experts refuses
        --expert-model-parallel-size at once, any other when it is built.
    reads_num_experts: --num-experts gives its layers experts. A model with a name that does not read it refuses it.
    """

    model: str = ""
    unread: Mapping[str, str] = field(default_factory=dict)
    problems: Callable[[Any, Tokenizer | None], list[str]] = lambda config, tokenizer: []
    reads_text: bool = False
    has_experts: bool = False
    reads_num_experts: bool = False

    def expert_problems(self, config: Any) -> list[str]:
        """Return the problems of experts, or of expert-parallel ranks, for a model that is known to have no experts."""
        if not self.model:
            return []
        problems = []
        experts = config.transformer.has_experts
        if experts and not self.reads_num_experts:
            problems.append(
                f"--num-experts {config.transformer.num_experts}: the layers of a {self.model} have no experts; leave it out, "
                "or use pretrain_gpt.py"
            )
        size = config.parallel.expert_model_parallel_size
        if size > 1 and not self.has_experts and not (experts and self.reads_num_experts):
            problems.append(no_experts(size))
        return problems

    def without_effect(self, config: Any) -> dict[str, str]:
        """Return flag -> why it has no effect on this model, for flags of ranks that only experts use."""
        size = config.parallel.expert_tensor_parallel_size
        if size is None or not self.model or self.has_experts or config.transformer.has_experts:
            return {}
        return {"--expert-tensor-parallel-size": "the model has no experts without --num-experts"}


def no_experts(size: int) -> str:
    """Return the problem of a model without experts. size: --expert-model-parallel-size."""
    return (
        f"--expert-model-parallel-size is {size}, but no parameter of the model is sharded over expert-parallel ranks; use 1. "
        "--num-experts N gives a GPT experts; a script may have its own: docs/adding_a_model.md"
    )


def missing_text_settings(config: Any) -> list[str]:
    """Return which settings of a run on text data, real or mock, are missing."""
    problems = []
    trains = not config.training.skip_train
    if not config.data.source_problems(needed=False, trains=trains):  # those are reported for every model
        problems += config.data.source_problems(trains=trains)
    if config.tokenizer.tokenizer_type is None:
        problems.append(NO_TOKENIZER)
    return problems


def _problems_of_one_stack(config: Any) -> list[str]:
    """Return which settings are about an encoder and a decoder, for a model that has one stack of layers."""
    is_set = {
        "--decoder-num-layers": config.transformer.decoder_num_layers is not None,
        "--decoder-seq-length": config.data.decoder_seq_length is not None,
        "--pipeline-model-parallel-split-rank": config.parallel.pipeline_model_parallel_split_rank is not None,
        "--position-embedding-type relative": config.transformer.position_embedding_type == "relative",
        "--no-scale-decoder-outputs": not config.transformer.scale_decoder_outputs,
    }
    flags = [flag for flag, value in is_set.items() if value]
    return [f"{flag} is about an encoder and a decoder, as pretrain_t5.py has them; leave it out" for flag in flags]


def _problems_of_gpt(config: Any, tokenizer: Tokenizer | None) -> list[str]:
    problems = missing_text_settings(config) + _problems_of_one_stack(config)
    if tokenizer is not None:
        problems += end_problems(config.data, tokenizer)
    return problems


def _problems_of_bert(config: Any, tokenizer: Tokenizer | None) -> list[str]:
    problems = missing_text_settings(config) + bert_problems(config.data, config.masked_data, tokenizer)
    problems += _problems_of_one_stack(config)
    if config.fim.fim_data:
        problems.append("--fim-data rearranges documents for a GPT; a BERT has masked tokens instead: leave it out")
    model = config.transformer
    if model.logit_multiplier != 1 or model.final_logit_softcapping is not None:
        problems.append("--logit-multiplier and --final-logit-softcapping are not built for a BERT; leave them out")
    if model.tiled_loss > 1:
        problems.append("--tiled-loss is not built yet for a BERT; leave it out")
    if model.add_output_bias:
        problems.append("--add-output-bias: the logits of a BERT always have a bias; leave it out")
    if model.window_size is not None:
        problems.append("--window-size looks back alone, and a token of a BERT attends to both sides; leave it out")
    return problems


def _problems_of_t5(config: Any, tokenizer: Tokenizer | None) -> list[str]:
    problems = missing_text_settings(config) + t5_problems(config.data, config.masked_data, tokenizer)
    if config.fim.fim_data:
        problems.append("--fim-data rearranges documents for a GPT; a T5 has spans to fill in any case: leave it out")
    model = config.transformer
    tensor = config.parallel.tensor_model_parallel_size
    length = config.data.decoder_seq_length
    if model.decoder_num_layers is None:
        problems.append("a T5 has a decoder: give --decoder-num-layers N, or pretrain(ModelType.encoder_and_decoder)")
    if config.parallel.sequence_parallel_on and (length or 0) % tensor:
        problems.append(
            f"--sequence-parallel needs a --decoder-seq-length ({length}) that is a multiple of --tensor-model-parallel-size "
            f"({tensor}); change one"
        )
    has_groups = model.query_groups != model.num_attention_heads
    not_built = {
        "--position-embedding-type rope": model.position_embedding_type == "rope",
        f"--norm-placement {model.norm_placement}": model.norm_placement != "pre",
        "--apply-residual-connection-post-layernorm": model.apply_residual_connection_post_layernorm,
        "--group-query-attention, which attention to the encoder does not have": has_groups,
        "--qk-layernorm, which attention to the encoder does not have": model.qk_layernorm,
        "--window-size, which looks back alone": model.window_size is not None,
        "--clip-qkv": model.clip_qkv is not None,
        "--attn-logit-softcapping": model.attn_logit_softcapping is not None,
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
        "--scale-attn-by-inverse-layer-idx": model.scale_attn_by_inverse_layer_idx,
        f"--compile {model.compile}, which has no programs for a decoder's layer": model.compile != "off",
    }
    problems += [f"{flag} is not built for a T5; leave it out" for flag, is_set in not_built.items() if is_set]
    return problems


NO_RULES = ModelRules()  # for a script with data of its own
GPT_RULES = ModelRules(
    model="GPTModel",
    unread=dict.fromkeys(
        (f.name for f in option_fields(MaskedDataConfig)), "only masked words need it, as pretrain_bert.py has them"
    ),
    problems=_problems_of_gpt,
    reads_text=True,
    reads_num_experts=True,
)
BERT_RULES = ModelRules(model="BertModel", problems=_problems_of_bert, reads_text=True)
T5_RULES = ModelRules(
    model="T5Model",
    unread={"bert_binary_head": "only pretrain_bert.py has pairs of texts"},
    problems=_problems_of_t5,
    reads_text=True,
)
