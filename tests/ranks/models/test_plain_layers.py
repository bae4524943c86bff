"""Torch's own layers in a model: taken in where they start alike in every layout, and refused where they do not."""

from dataclasses import replace

import pytest
import torch
from said import tells
from tiny_run import GPT, GPT2, SEQ, Layout, assert_equal, run
from torch import nn

from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.training.make_chunks_optimizer_and_pipeline import model_problems, place_constant_parameters


def with_plain_norms(config, **parts):
    """A GPT whose layers have torch's norm at one place, as a fork's would."""
    model, divided = GPTModel(config, positions=SEQ, **parts), parts["context"].tp.sequence_parallel
    for layer in model.language_model.decoder.layers.values():
        norm = layer.input_layernorm = nn.LayerNorm(config.hidden_size)
        for p in norm.parameters():
            p.sequence_parallel = divided
    place_constant_parameters(model, torch.float64, divided)
    return model


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, m=2), Layout(tp=2, sp=True, dp=2)], ids=str)
def test_a_plain_norm_trains_in_any_layout_as_in_one_process(layout: Layout):
    subject = replace(GPT, make=with_plain_norms)
    assert_equal(run(GPT2, layout, subject=subject), run(GPT2, Layout(), subject=subject), 1e-10)


@pytest.mark.parametrize("layer", [nn.LayerNorm(4, bias=False), nn.Linear(4, 4, bias=False)], ids=str)
def test_what_says_nothing_of_the_sequence_or_is_random_has_no_placement(layer: nn.Module):
    place_constant_parameters(layer, torch.float32, sequence_parallel=True)
    (problem,) = model_problems(layer, in_pipeline=False)
    assert tells(problem, "placement weight") and "parameter.sequence_parallel = True" in problem
