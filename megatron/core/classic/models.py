"""`GPTModel` and `BertModel` of Megatron core, built from a `TransformerConfig`, a layer spec and the current mesh."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.classic.specs import OurLayer, get_module
from megatron.core.classic.transformer_config import model_config
from megatron.core.config import ConfigError
from megatron.core.current_mesh import current
from megatron.core.job.processes import join_alone
from megatron.core.models import bert_model, gpt_model
from megatron.core.pipeline_parallel.stage import split_layers
from megatron.core.random import DropoutKeys
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.context import LayerContext


def of_stage(
    config: Any, spec: Any, vocab_size: int, max_sequence_length: int, options: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of our models for the stage that is being built. options: Megatron's further arguments of a model.

    Inside a run the vocabulary is the run's if `vocab_size` is its padded size: padding takes no part in the softmax.
    """
    here, chunk = current(), options.pop("vp_stage", None)
    run, mesh = here.run, here.mesh
    join_alone()
    if get_module(spec) is not OurLayer:
        raise ConfigError(
            "transformer_layer_spec: only the specs of megatron.core.models.gpt.gpt_layer_specs are built yet"
        )
    is_padded = run is not None and vocab_size == run.args.padded_vocab_size
    options["make_vocab_size_divisible_by"] = run.config.transformer.make_vocab_size_divisible_by if is_padded else 1
    ours = model_config(config, None if run is None else run.config.transformer, **options)
    stages = mesh.stages
    layers = split_layers(
        ours.num_layers,
        len(stages.ranks),
        stages=stages,
        first=getattr(config, "num_layers_in_first_pipeline_stage", None),
        last=getattr(config, "num_layers_in_last_pipeline_stage", None),
        embedding_as_layer=getattr(config, "account_for_embedding_in_pipeline_split", False),
        loss_as_layer=getattr(config, "account_for_loss_in_pipeline_split", False),
    )
    stage = stages.of_rank(mesh["pp"].rank)[chunk if chunk is not None else here.virtual_rank or 0]
    return {
        "config": ours,
        "vocab_size": run.vocab_size if is_padded else vocab_size,
        "positions": max_sequence_length,
        "layers": layers[stage],
        "context": run.layer_context if run is not None else _context(ours),
    }


def _context(config: Any) -> LayerContext:
    """The context of layers outside of a run."""
    here = current()
    keys = DropoutKeys(here.seed or torch.initial_seed() % 2**31)
    of_tensors = {"device": here.device, "products": here.products, "fills": not here.fills_by_name}
    divided = here.sequence_parallel and here.mesh["tp"].size > 1
    return LayerContext.on(here.mesh, config.params_dtype, keys, sequence_parallel=divided, **of_tensors)


def _named(tied: bool, positions: str, **more: Any) -> dict[str, Any]:
    """Options of Megatron's models by our names."""
    return {"untie_embeddings_and_output_weights": not tied, "position_embedding_type": positions, **more}


class GPTModel(gpt_model.GPTModel):
    """One stage of a GPT; `pre_process` and `post_process` say whether it is the first and the last.

    forward(input_ids, position_ids, attention_mask, labels=None) as `megatron.model.GPTModel`'s.
    """

    def __init__(
        self,
        config: Any,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        *,
        vp_stage: int | None = None,
    ):
        del fp16_lm_cross_entropy  # the loss is taken in float32
        rotary = {"rotary_percent": rotary_percent, "rotary_base": float(rotary_base)}
        options = _named(share_embeddings_and_output_weights, position_embedding_type, **rotary, vp_stage=vp_stage)
        parts = of_stage(config, transformer_layer_spec, vocab_size, max_sequence_length, options)
        super().__init__(**parts, pre_process=pre_process, post_process=post_process)
        self.config = config
        self.pre_process, self.post_process = pre_process, post_process
        self.parallel_output = parallel_output

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        if decoder_input is not None:
            raise NotImplementedError(
                "decoder_input: hidden states in place of tokens are not built yet; pass input_ids"
            )
        result = super().forward(input_ids, position_ids, attention_mask, labels)
        is_whole = not self.post_process or labels is not None or self.parallel_output
        return (
            result if is_whole else mappings.gather_last(result, self.axis)
        ).contiguous()  # scripts flatten it by a view


class BertModel(bert_model.BertModel):
    """One stage of a BERT.

    forward(input_ids, attention_mask, tokentype_ids=None, lm_labels=None) as `megatron.model.BertModel`'s.
    """

    def __init__(
        self,
        config: Any,
        num_tokentypes: int,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        *,
        vp_stage: int | None = None,
    ):
        del fp16_lm_cross_entropy
        if return_embeddings:
            raise NotImplementedError("return_embeddings: a BERT as an encoder of texts is not built yet; leave it out")
        rotary = {"rotary_percent": rotary_percent}
        options = _named(share_embeddings_and_output_weights, position_embedding_type, **rotary, vp_stage=vp_stage)
        parts = of_stage(config, transformer_layer_spec, vocab_size, max_sequence_length, options)
        heads = {"num_tokentypes": num_tokentypes, "add_binary_head": add_binary_head}
        super().__init__(**parts, **heads, pre_process=pre_process, post_process=post_process)
        self.config = config
        self.pre_process, self.post_process = pre_process, post_process
        self.parallel_output = parallel_output

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Any:
        result = super().forward(input_ids, attention_mask, tokentype_ids, lm_labels)
        if not self.post_process:
            return result
        words, order = result
        is_whole = lm_labels is not None or self.parallel_output
        return (words if is_whole else mappings.gather_last(words, self.axis)).contiguous(), order
