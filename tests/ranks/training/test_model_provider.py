"""What a model provider is told."""

from collections.abc import Callable

import pytest

from megatron.training.make_chunks_optimizer_and_pipeline import should_pass_vp_stage


@pytest.mark.parametrize(
    ("provider", "of_one", "of_two"),
    [
        (lambda pre_process=True, post_process=True: None, False, False),
        (lambda pre_process, post_process, vp_stage=None: None, True, True),
        (lambda *given, **options: None, False, True),
    ],
)
def test_a_provider_is_told_its_chunk_if_it_takes_it(provider: Callable, of_one: bool, of_two: bool):
    assert [should_pass_vp_stage(provider, chunks) for chunks in (1, 2)] == [of_one, of_two]
