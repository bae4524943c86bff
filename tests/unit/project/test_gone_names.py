"""Identifiers that were renamed, and that nobody writes by chance, are in no file any more: docs/renamed.md has what they became."""

import re
from pathlib import Path

from documents import ROOT

GONE = {
    *re.findall(
        r"\w+",
        """
    made_again mark_made kept_for ask_maker whereabouts Whereabouts be_starved held_rows of_my_rows
    sequence_rows SequenceRows held_of held_tensors answered_keys AnsweredKeys
    times_transposed is_lent heads_of of_heads BesideEncoder keys_before HeadsNorm _side_by_side in_tiles
    declare_tiles deals_over AwayTensor ArrivingParameter LateGradient MakingInShards OwnShard made_in_shards
    whole_parameters ParamSlots passes_grads passes_params put_off _travelling UseOrder turns_of own_loop
    open_table knob knobs acting_on SilentGroup lay_out inert_pickle found_cache known_ids document_ends
    share_tables kept_batches oom_report
    """,
    )
}
FOLDERS = ("megatron", "tools", "tests", "docs", "examples", "benchmarks")
# The last one reads help texts of an earlier commit.
BESIDE = ("docs/renamed.md", "tests/unit/project/test_gone_names.py", "tests/campaigns/blind_prose.py")


def files() -> list[Path]:
    inside = [path for folder in FOLDERS for ending in ("py", "md") for path in (ROOT / folder).rglob(f"*.{ending}")]
    paths = [*inside, *ROOT.glob("*.py"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [path for path in paths if str(path.relative_to(ROOT)) not in BESIDE]


def test_no_file_has_a_gone_name():
    word = re.compile(r"\b[A-Za-z_]\w*\b")
    found = {
        (str(path.relative_to(ROOT)), name) for path in files() for name in GONE & set(word.findall(path.read_text()))
    }
    assert not found, "docs/renamed.md says what the name became"


def test_the_files_of_the_page_of_renames_exist():
    text = (ROOT / "docs" / "renamed.md").read_text()
    files_of_today = re.findall(r"^\| `megatron\.\S+`.* \| `(megatron/\S+\.py)` \|$", text, re.MULTILINE)
    assert len(files_of_today) > 90 and all((ROOT / name).is_file() for name in files_of_today)
