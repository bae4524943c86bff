"""Initial weights by Xavier's rule and of tables: the same in every layout, and of the rule's size."""

from dataclasses import replace

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT2, Layout, build_chunks, my_pieces, put_together

from megatron.core.optimizer.param_groups import default_group, without_embedding_decay
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.placement import Constant, Placement

CONFIG = replace(GPT2, hidden_size=64, init_method_xavier_uniform=True, embedding_init_method_std=1.5)


def weights(tp: int) -> dict[str, torch.Tensor]:
    def work(mesh: Mesh) -> list[tuple]:
        chunks = build_chunks(mesh, CONFIG, Layout(tp=tp))[0]
        return my_pieces(chunks[0].module, mesh, lambda p: p.data)

    return put_together(run_ranks({"tp": tp}, work))


def test_matrices_are_uniform_within_the_bound_of_the_whole_matrix_and_tables_normal():
    whole, shared = weights(1), weights(2)
    for name, value in whole.items():
        assert torch.equal(value, shared[name]), name
        if "linear" in name and name.endswith("weight"):
            bound = (6 / sum(value.shape)) ** 0.5
            assert 0.98 * bound < value.abs().max() <= bound
            assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        if name.endswith("embeddings.weight"):
            assert value.std().item() == pytest.approx(1.5, rel=0.1)


def test_tables_with_a_size_of_their_own_do_not_decay():
    group_of, matrix = without_embedding_decay(default_group), Placement((4, 4), Constant(0.0))
    for name, decay in {
        "embedding.word_embeddings.weight": 0,
        "position_embeddings.weight": 0,
        "linear_qkv.weight": 1,
    }.items():
        assert group_of(name, matrix).weight_decay_multiplier == decay
