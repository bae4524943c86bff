"""Rules of context parallelism, which are checked before a process group exists."""

from collections.abc import Iterator, Mapping

from megatron.core.context_parallel.cp_attention import METHODS
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.transformer.model_config import ModelConfig


def context_parallel_problems(
    parallel: ParallelConfig, model: ModelConfig, lengths: Mapping[str, int | None]
) -> Iterator[str]:
    """Yield one line for each violated rule. lengths: tokens of a sample by flag; None: not given."""
    ranks = parallel.context_parallel_size
    types = parallel.cp_comm_type

    # --cp-comm-type
    if unknown := sorted({*types} - {*METHODS}):
        yield f"--cp-comm-type {' '.join(unknown)} is none of {', '.join(METHODS)}; change it"
        return
    if len(types) not in (1, model.all_layers):
        layers = "--num-layers" if model.decoder_num_layers is None else "--num-layers + --decoder-num-layers"
        yield (
            f"--cp-comm-type has {len(types)} entries and {layers} is {model.all_layers}; give one for all layers, or one for "
            "each"
        )
    if ranks == 1:
        return

    # lengths
    tensor = parallel.tensor_model_parallel_size
    for flag, length in lengths.items():
        if length is None:
            continue
        if length % (2 * ranks):
            yield (
                f"{flag} ({length}) must be a multiple of {2 * ranks}, 2 chunks for each of the --context-parallel-size "
                f"({ranks}) ranks; change one"
            )
        if parallel.sequence_parallel_on and length // ranks % tensor:
            yield (
                f"--sequence-parallel divides {length // ranks} tokens of a context-parallel rank by "
                f"--tensor-model-parallel-size ({tensor}); change {flag} ({length}) or one of the sizes"
            )

    # heads that Ulysses deals out
    hierarchical_sizes = parallel.hierarchical_context_parallel_sizes
    if "a2a+p2p" in types and hierarchical_sizes is None:
        yield (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes: two numbers whose product is "
            f"{ranks}, the ranks that exchange heads and the ranks of a ring"
        )
    heads = model.num_attention_heads // tensor
    head_ranks = {"a2a": ranks, "a2a+p2p": (hierarchical_sizes or [1])[0]}
    for name in sorted(head_ranks.keys() & {*types}):
        if heads % head_ranks[name]:
            yield (
                f"--cp-comm-type {name} deals {heads} attention heads of a tensor-parallel rank out to {head_ranks[name]} ranks "
                f"of --context-parallel-size ({ranks}); change a size, or use p2p or all_gather"
            )
