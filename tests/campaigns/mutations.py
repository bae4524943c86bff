"""Takes out every wait of the product, one at a time, or changes one rule of it, and shows which test finds out.

    python tests/campaigns/mutations.py                               prints the table; exit code 1 if a mutation survives
    python tests/campaigns/mutations.py --write docs/testing.md       and puts it between the two marks of that file

Each mutation is made in a temporary copy of the repository. The tests named must fail there, and pass where nothing is changed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from documents import write_part

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron/"
TRAINS = "tests/ranks/models/test_parity.py::test_no_wait_is_missing"
CALLS = "tests/ranks/parallel/test_local_ranks.py::test_a_collective_has_its_result_when_it_returns"
IN_PARTS = "tests/ranks/models/test_parity.py::test_no_wait_is_missing_where_copies_travel_in_parts"
ZERO = "tests/ranks/distributed/test_zero_reduce_and_gather.py::test_shards_equal_one_process"
RING = "tests/ranks/context_parallel/test_context_parallel.py::test_no_wait_of_the_ring_is_missing"
_AWAY = "tests/ranks/offload/test_offload.py::test_offload_equals_one_process"
OWN_CLASS = (
    "tests/ranks/distributed/test_odd_models.py::test_a_model_of_plain_modules_is_trained_as_torch_does[of a class-1]"
)
BESIDE = "tests/ranks/distributed/test_odd_models.py::test_parameters_that_are_used_beside_their_module_are_waited_for"
OUTER = f"{_AWAY}[outer-params-tp1-pp1-dp4-m2-delayed-overlap-tied]"
HYBRID = f"{_AWAY}[hybrid-host-tp1-pp1-dp4-m2-delayed-overlap-tied]"
AGAIN = "tests/ranks/offload/test_offload.py::test_what_was_read_ahead_is_forgotten_before_an_update"
INTO_FILE = "tests/unit/offload/test_tiers.py::test_what_other_groups_have_updated_is_in_the_file_when_the_call_is_over"
WRITES = "tests/unit/offload/test_tiers.py::test_an_update_ends_when_its_last_write_does"
OWNERS = "tests/ranks/optimizer/test_muon_matrix_update.py::test_owners_send_the_bits_that_every_rank_would_find_and_in_bfloat16_if_all_ranks_have_it"
_GENERATES = "tests/ranks/inference/test_cache.py::test_cached_scores_equal_the_plain_forward"
LATE = "tests/ranks/offload/test_activations_elsewhere.py::test_numbers_and_calls_are_those_without[late-tp1-pp1-dp1-m2-cpu_offloading_num_layers-min_offloaded_tensor_size]"
BESIDE_TRAINING = "tests/ranks/dist_checkpointing/test_background_saves.py::test_a_save_beside_training_writes_the_files_of_one_in_its_way"
FAILED_SAVE = "tests/ranks/dist_checkpointing/test_background_saves.py::test_a_failed_save_is_told_on_every_rank_and_loses_nothing"
KILLED_WRITER = "tests/ranks/dist_checkpointing/test_background_saves.py::test_a_writer_that_is_killed_is_told_of"
_SCORES = "tests/ranks/convert/test_interchange.py::test_a_folder_gives_the_scores_and_gradients_of_transformers"


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str
    test: str
    old: str
    new: str


_MERGED = "core/context_parallel/ring_and_allgather_attention.py"
_OWN = "self.transfers.pop(action.with_op(BEGIN_OF[action.op]))"
# What, in which file, the test that finds it, the text, and the text without the wait.
MUTATIONS = [
    Mutation(*row)
    for row in [
        (
            "a call's wait",
            "core/parallel/collectives.py",
            CALLS,
            "work.wait()\n        rank_status",
            "None\n        rank_status",
        ),
        (
            "all-reduce",
            "core/parallel/collectives.py",
            CALLS,
            "start_all_reduce(x, axis, op).wait()",
            "start_all_reduce(x, axis, op)._keep[0]",
        ),
        (
            "all-gather",
            "core/parallel/collectives.py",
            CALLS,
            "start_all_gather(x, axis).wait()",
            "start_all_gather(x, axis)._keep[0]",
        ),
        (
            "all-gather of another dimension",
            "core/parallel/collectives.py",
            CALLS,
            "start_all_gather(x.movedim(dim, 0), axis).wait()",
            "start_all_gather(x.movedim(dim, 0), axis)._keep[0]",
        ),
        (
            "reduce-scatter",
            "core/parallel/collectives.py",
            CALLS,
            "start_reduce_scatter(x, axis).wait()",
            "start_reduce_scatter(x, axis)._keep[0]",
        ),
        (
            "parts that are summed wide",
            "core/parallel/collectives.py",
            CALLS,
            "exchange.wait().chunk",
            "exchange._keep[0].chunk",
        ),
        (
            "broadcast",
            "core/parallel/collectives.py",
            CALLS,
            "start_broadcast(x, axis, source).wait()",
            "start_broadcast(x, axis, source)._keep[0]",
        ),
        (
            "input gathered again for a weight gradient",
            "core/tensor_parallel/linear_autograd.py",
            TRAINS,
            "gathering.wait() if gathering",
            "gathering._keep[0] if gathering",
        ),
        (
            "input gradient summed beside the weight gradient",
            "core/tensor_parallel/linear_autograd.py",
            TRAINS,
            "summing.wait()",
            "summing._keep[0]",
        ),
        (
            "a bucket's sum",
            "core/distributed/bucket_reduce_and_gather.py",
            TRAINS,
            "total = self._reducing.wait()",
            "total = self._reducing._keep[0]",
        ),
        (
            "all buckets at the end of the step",
            "core/distributed/zero_stage_strategies.py",
            TRAINS,
            "bucket.finish_reduce()\n\n\nclass",
            "pass\n\n\nclass",
        ),
        (
            "a bucket's parameters",
            "core/distributed/bucket_reduce_and_gather.py",
            ZERO,
            "            self._gathering.wait()\n",
            "",
        ),
        (
            "a bucket whose memory is written again",
            "core/distributed/bucket_reduce_and_gather.py",
            ZERO,
            "bucket's sum, in the same backward, and without overlap at once.\n            self.finish_reduce()\n",
            "bucket's sum, in the same backward, and without overlap at once.\n            pass\n",
        ),
        (
            "the parameters of a unit",
            "core/distributed/zero3_param_fetcher.py",
            ZERO,
            "bucket.finish_gather()\n",
            "pass\n",
        ),
        (
            "a module's parameters after the update",
            "core/distributed/zero_stage_strategies.py",
            OWN_CLASS,
            "for bucket in buckets:\n            bucket.finish_gather()\n",
            "pass\n",
        ),
        (
            "updated parameters, used beside their module",
            "core/distributed/bucket_reduce_and_gather.py",
            BESIDE,
            "            set_residency_class(AllGatherPendingParameter, self._parameters)\n",
            "",
        ),
        (
            "the sum over groups of shards",
            "core/distributed/bucket_reduce_and_gather.py",
            HYBRID,
            "collectives.all_reduce(self.grad_shard, self.buffer.axes.replica)\n",
            "collectives.start_all_reduce(self.grad_shard, self.buffer.axes.replica)\n",
        ),
        (
            "the same where each group gets its part",
            "core/distributed/bucket_reduce_and_gather.py",
            ZERO,
            "collectives.reduce_scatter(self.grad_shard, outer)",
            "collectives.start_reduce_scatter(self.grad_shard, outer)._keep[0]",
        ),
        (
            "what the groups have updated",
            "core/distributed/bucket_reduce_and_gather.py",
            ZERO,
            "out=self.param_shard).wait()",
            "out=self.param_shard)",
        ),
        (
            "the same, on its way to a file",
            "core/distributed/bucket_reduce_and_gather.py",
            OUTER,
            "collectives.all_gather(owned, outer)",
            "collectives.start_all_gather(mine, outer)._keep[0]",
        ),
        (
            "the write of it",
            "core/distributed/bucket_reduce_and_gather.py",
            INTO_FILE,
            "start_writing(self.param_shard, collectives.all_gather(owned, outer)).wait()",
            "start_writing(self.param_shard, collectives.all_gather(owned, outer))",
        ),
        (
            "a read from a file",
            "core/offload/host_and_file_stores.py",
            OUTER,
            "AsyncHandle(lambda: reading.result()",
            "AsyncHandle(lambda: (reading.result() if reading.done() else torch.full((self.nbytes,), 127, dtype=torch.uint8))",
        ),
        (
            "a read begun before the update is still used after it",
            "core/distributed/bucket_reduce_and_gather.py",
            AGAIN,
            "self.finish_gather()\n        self._reading = None\n",
            "self.finish_gather()\n",
        ),
        (
            "the writes of one slice, while others are updated",
            "core/optimizer/cpu_offloading/sliced_update.py",
            WRITES,
            "            writing.wait()\n",
            "",
        ),
        (
            "the last slice's writes",
            "core/optimizer/cpu_offloading/sliced_update.py",
            WRITES,
            "here)\n        writing.wait()\n",
            "here)\n",
        ),
        (
            "tensors of a transfer",
            "core/base/async_handle.py",
            TRAINS,
            "tuple(handle.wait() for handle in handles)",
            "tuple(handle._keep[0] for handle in handles)",
        ),
        (
            "the parts of a transfer, put together unwaited",
            "core/pipeline_parallel/stage_transport.py",
            IN_PARTS,
            "collectives.all_gather(shard, axis)",
            "collectives.start_all_gather(shard, axis)._keep[0]",
        ),
        ("SENT", "core/pipeline_parallel/executor.py", TRAINS, f"        {_OWN}.wait()\n\n", f"        {_OWN}\n\n"),
        (
            "RECV",
            "core/pipeline_parallel/executor.py",
            TRAINS,
            f"tensors = {_OWN}.wait()",
            f"tensors = tuple(one._keep[0] for one in {_OWN}._keep)",
        ),
        (
            "keys and values on their way round the ring",
            _MERGED,
            RING,
            "here = coming.wait()\n        return kv",
            "here = coming._keep[0]\n        return kv",
        ),
        (
            "the same in the backward",
            _MERGED,
            RING,
            "here = coming.wait()\n        return leaving",
            "here = coming._keep[0]\n        return leaving",
        ),
        (
            "gradients that travel behind them",
            "core/context_parallel/block_attention.py",
            RING,
            "self._arriving.wait(), None",
            "self._arriving._keep[0], None",
        ),
        ("gradients on their last hop", _MERGED, RING, "return leaving.wait()", "return leaving._keep[0]"),
        (
            "gradients of gathered keys in half precision",
            _MERGED,
            RING,
            "grad.to(saved.dtype), self.axis).wait()",
            "grad.to(saved.dtype), self.axis)._keep[0][: len(grad) // self.axis.size]",
        ),
        (
            "a send's memory used again before SENT",
            "core/pipeline_parallel/executor.py",
            TRAINS,
            "_peer(action), tensors)\n",
            "_peer(action), tensors)\n        _ = [x.zero_() for x in tensors]\n",
        ),
        (
            "a result of Muon's owner, used while the next are found",
            "core/optimizer/gather_full_matrices_over_tp.py",
            OWNERS,
            "use(first, sending.wait())",
            "use(first, sending._keep[0])",
        ),
        (
            "the last results of Muon's owners",
            "core/optimizer/gather_full_matrices_over_tp.py",
            OWNERS,
            "use(i, sending.wait())",
            "use(i, sending._keep[0])",
        ),
        (
            "a stage's input in generation",
            "core/inference/generate.py",
            f"{_GENERATES}[gpt2-1-4-True]",
            'received = transport.post("forward", stages.ranks[self.stage - 1]).wait()',
            'received = [one._keep[0] for one in transport.post("forward", stages.ranks[self.stage - 1])._keep]',
        ),
        (
            "a stage's output in generation",
            "core/inference/generate.py",
            f"{_GENERATES}[gpt2-1-4-True]",
            "outputs).wait()\n",
            "outputs)\n",
        ),
        (
            "a saved activation on its way out",
            "core/offload/activation_offload.py",
            LATE,
            "        transfer.wait()\n",
            "",
        ),
        (
            "a saved activation on its way back",
            "core/offload/activation_offload.py",
            LATE,
            "values = self._loading.wait()",
            "values = self._loading._keep[0]",
        ),
        (
            "an asynchronous save, waited for on every rank",
            "core/dist_checkpointing/async_snapshot_to_writer_process.py",
            BESIDE_TRAINING,
            "with collectives.raise_together(self._world, self._device):\n            return self.finish_own_part()",
            "with collectives.raise_together(self._world, self._device):\n            return self._in_flight",
        ),
        (
            "what the writer of an asynchronous save answers",
            "core/dist_checkpointing/async_snapshot_to_writer_process.py",
            KILLED_WRITER,
            'warnings = self._answer()["warnings"]',
            "warnings = []",
        ),
        (
            "the disk, which must have a part before it is published",
            "core/dist_checkpointing/write_and_publish.py",
            FAILED_SAVE,
            "nbytes = file.tell()\n        file_layer.backend_of(path).sync(file)\n",
            "nbytes = file.tell()\n",
        ),
        (
            "a matrix that a Hugging Face folder has transposed",
            "convert/families/strided_views_of_hf_weights.py",
            f"{_SCORES}[gpt2]",
            "shape=self.shape[::-1], strides=self.strides[::-1]",
            "shape=self.shape[::-1], strides=self.strides[::-1] if len(self.shape) < 2 else (self.shape[0], 1)",
        ),
        (
            "queries, keys and values of a Hugging Face folder, group by group",
            "convert/families/strided_views_of_hf_weights.py",
            f"{_SCORES}[llama]",
            "for group in zip(*parts) for x in group",
            "for part in parts for x in part",
        ),
        (
            "gate over up",
            "convert/families/strided_views_of_hf_weights.py",
            f"{_SCORES}[llama]",
            '"gate_up": Operation(_stacked,',
            '"gate_up": Operation(lambda heads, theirs: _stacked(heads, theirs[::-1]),',
        ),
        (
            "rows of a part of a tensor",
            "convert/families/strided_views_of_hf_weights.py",
            f"{_SCORES}[gpt2]",
            "start=self.start + start * self.strides[0]",
            "start=start * self.strides[0]",
        ),
    ]
]


def copy_of_repository(folder: Path) -> Path:
    copy = folder / "copy"
    for name in ("megatron", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def failing_test(copy: Path, test: str) -> tuple[str, str] | None:
    """(the first of the tests that fails, why); None if all pass."""
    command = [sys.executable, "-m", "pytest", test, "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode == 0:
        return None
    if result.returncode < 0:  # memory that is not there was used
        return test.split("::")[-1], f"the process is ended by signal {-result.returncode}"
    found = re.search(r"^FAILED (?:[^ ]*::)?(.+?)(?: - (.*))?$", result.stdout, re.MULTILINE)
    if result.returncode != 1 or found is None:
        raise RuntimeError(f"{test} could not be run:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    why = re.findall(r"^.*?(?:Error|Failed): (.*)$", result.stdout, re.MULTILINE)
    if "NameError" in result.stdout:
        raise RuntimeError(f"{test} fails by the words of the mutation, not by the wait that it lacks: {why}")
    return found[1], (why[0] if why else found[2] or "")[:110]


def try_mutation(copy: Path, mutation: Mutation) -> tuple[str, str] | None:
    path = copy / PACKAGE / mutation.file
    original = path.read_text()
    assert original.count(mutation.old) == 1, (
        f"{mutation.file} has {mutation.old!r} {original.count(mutation.old)} times"
    )
    path.write_text(original.replace(mutation.old, mutation.new))
    try:
        return failing_test(copy, mutation.test)
    finally:
        path.write_text(original)


def table(found: list[tuple[Mutation, tuple[str, str] | None]]) -> str:
    lines = ["| wait taken out, or rule changed | file | found by | which says |", "|---|---|---|---|"]
    for mutation, result in found:
        test, why = result or ("**nothing**", "")
        lines.append(f"| {mutation.what} | `{mutation.file}` | `{test}` | {why.replace('|', '/')} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="put the table into this file")
    parser.add_argument("--only", default="", help="mutations whose name or file has this text")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy, found = copy_of_repository(Path(folder)), []
        chosen = [one for one in MUTATIONS if given.only in one.what or given.only in one.file]
        for test in sorted({mutation.test for mutation in chosen}):
            if failing_test(copy, test) is not None:
                raise SystemExit(f"{test} fails without any mutation")
        for mutation in chosen:
            found.append((mutation, try_mutation(copy, mutation)))
            print(mutation.what, "->", found[-1][1] or "SURVIVES", flush=True)
    survived = [mutation for mutation, result in found if result is None]
    if given.write is not None:
        write_part(given.write, "mutations", table(found))
    print(f"{len(found) - len(survived)} of {len(found)} mutations are found")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
