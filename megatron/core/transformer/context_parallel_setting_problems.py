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
        yield f"--cp-comm-type is {' '.join(unknown)}; it must be one of {', '.join(METHODS)}"
        return
    if len(types) not in (1, model.all_layers):
        layers = "--num-layers" if model.decoder_num_layers is None else "--num-layers + --decoder-num-layers"
        yield (
            f"--cp-comm-type has {len(types)} entries, but {layers} is {model.all_layers}; give one entry for all "
            "layers, or one for each layer"
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
                f"{flag} ({length}) must be a multiple of {2 * ranks}, 2 chunks for each of the "
                f"--context-parallel-size ({ranks}) ranks; change one of them"
            )
        if parallel.sequence_parallel_on and length // ranks % tensor:
            yield (
                f"--sequence-parallel divides the {length // ranks} tokens of a context-parallel rank by "
                f"--tensor-model-parallel-size ({tensor}), which leaves a remainder; change {flag} ({length}) or one "
                "of the sizes"
            )

    # heads that Ulysses deals out
    hierarchical_sizes = parallel.hierarchical_context_parallel_sizes
    if "a2a+p2p" in types and hierarchical_sizes is None:
        yield (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A B: the number of ranks that "
            f"exchange heads and the number of ranks of a ring, with the product {ranks}"
        )
    heads = model.num_attention_heads // tensor
    head_ranks = {"a2a": ranks, "a2a+p2p": (hierarchical_sizes or [1])[0]}
    for name in sorted(head_ranks.keys() & {*types}):
        if heads % head_ranks[name]:
            yield (
                f"--cp-comm-type {name} distributes the {heads} attention heads of a tensor-parallel rank over "
                f"{head_ranks[name]} ranks of --context-parallel-size ({ranks}), which leaves a remainder; change a "
                "size, or use p2p or all_gather"
            )
