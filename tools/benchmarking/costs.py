"""FLOPs and parameters of a work: those of our model, built without values."""

import math
from functools import cache

import torch

from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.count_flops_by_module import stage_flops
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.training.arguments.command_line import parse_args
from tools.benchmarking.work import Costs, Work
from tools.configuring.sizes import words


@cache
def costs_of(work: Work) -> Costs:
    """Return the costs of a work, whose model is built on one rank: they are the same in every layout."""
    config = parse_args(words(work.flags))[0].transformer
    kind = BertModel if work.family == "bert" else GPTModel
    model = kind(
        config,
        vocab_size=work.vocab_size,
        positions=work.seq_length,
        layers=range(config.num_layers),
        context=LayerContext.from_mesh(single_rank_mesh(), torch.float32, device="meta"),
    )
    s = work.seq_length
    model_flops = stage_flops(model, s).model
    full_attention_flops = stage_flops(model, s, full_attention=True).model
    parameters = sum(math.prod(parameter.placement.shape) for parameter in model.parameters())
    return Costs(model_flops, full_attention_flops, parameters)
