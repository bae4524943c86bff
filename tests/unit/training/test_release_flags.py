"""Every flag of each release's own parser has an answer: tests/megatron_flags.json has been read by running those parsers.

tests/campaigns/megatron_flag_facts.py has written the record from a clone.
"""

import json
from pathlib import Path

import pytest

from megatron.core.base.dataclass_flags import option_fields
from megatron.training.arguments.args_namespace import other_names_of, unsupported_flag_values
from megatron.training.arguments.command_line import make_parser, parse_args
from megatron.training.arguments.config import COMPONENTS
from megatron.training.arguments.ignored_and_refused_flags import NO_EFFECT, OTHERS, REFUSED, SHORTHAND, SILENT, WARNED

RELEASES, *ROWS = json.loads((Path(__file__).parents[2] / "megatron_flags.json").read_text())
FORMS = dict(
    ROWS
)  # flag -> [attribute, number of values, type, choices, default, value of a switch, first, last release]


def flags_of_release(release: str) -> dict[str, list]:
    """The flags of one release, each in its form there."""
    place = RELEASES.index(release)
    return {
        flag: form
        for flag, forms in FORMS.items()
        for form in forms
        if RELEASES.index(form[6]) <= place <= RELEASES.index(form[7])
    }


def test_the_record_has_the_releases_from_0_12_to_0_19():
    counts = {release: len(flags_of_release(release)) for release in RELEASES}
    assert (RELEASES[0], RELEASES[-1]) == ("0.12.0", "0.19.0")
    assert (counts["0.12.0"], counts["0.16.1"], counts["0.19.0"]) == (456, 680, 845)


@pytest.mark.parametrize("release", RELEASES)
def test_every_flag_of_a_release_has_an_answer(release: str):
    known = set(make_parser().known_flags())
    unknown = [flag for flag in flags_of_release(release) if flag not in known]
    assert not unknown, unknown


def test_an_answer_takes_as_many_values_as_the_flag_has_in_megatron():
    """A switch none, others one or any number; also where a release changed it."""
    actions = make_parser().actions_by_flag()
    wrong = []
    for flag, forms in FORMS.items():
        if flag not in actions:
            continue
        nargs = actions[flag].nargs
        counts = {0 if form[1] == 0 else "*" if form[1] in ("*", "+") else form[1] for form in forms}
        taken = {0} if nargs == 0 else {1} if nargs is None else {0, 1, 3, "*"} if nargs in ("*", "+") else {nargs}
        if not counts <= taken:
            wrong.append((flag, counts, taken))
    assert not wrong, wrong


def test_args_have_each_attribute_of_every_release():
    """By Megatron's name; of the flags that are no settings here with the default of the newest release that has them."""
    config = parse_args([]).config
    settings = {field.name for component in COMPONENTS.values() for field in option_fields(component)}
    others = unsupported_flag_values({})
    known = settings | others.keys() | other_names_of(config).keys()
    missing = {form[0] for flag, forms in FORMS.items() for form in forms} - known
    assert not missing, missing
    differing = {
        forms[-1][0]
        for flag, forms in FORMS.items()
        if flag in OTHERS and others.get(forms[-1][0], ...) != forms[-1][4]
    }
    assert differing <= DEFAULTS_OF_OLDER_RELEASES.keys(), differing - DEFAULTS_OF_OLDER_RELEASES.keys()


# Attributes whose default is another here than in the newest release -> why.
DEFAULTS_OF_OLDER_RELEASES = {
    "enable_one_logger": "nothing is sent to it",
    "enable_msc": "before 0.18 there was a switch against it alone",
    "inference_coordinator_port": "the number of 0.16",
    "inference_max_batch_size": "the number of 0.14",
    "mscale_all_dim": "the number of 0.13",
    "rl_parallel_generation_tasks": "the number of 0.16",
    "tokenizer_hf_include_special_tokens": "since 0.18 the opposite flag alone remains",
    "tokenizer_hf_use_fast": "since 0.18 the opposite flag alone remains",
    "transformer_impl": "layers are PyTorch's",
    "yarn_correction_range_round_to_int": "None in one of its two flags",
    "barrier_with_L1_time": "a setting",
    "log_loss_scale_to_tensorboard": "a setting",
    "log_learning_rate_to_tensorboard": "a setting",
}


def test_a_negative_form_sets_the_attribute_of_its_flag():
    given = unsupported_flag_values(
        {"--rl-profile": True, "--no-rl-use-sequence-packing": True, "--no-tp-comm-overlap-ag": True}
    )
    assert (given["rl_profile"], given["rl_use_sequence_packing"], given["tp_comm_overlap_ag"]) == (True, False, False)
    assert not unsupported_flag_values({"--no-ckpt-load-validate-sharding-integrity": True})[
        "ckpt_load_validate_sharding_integrity"
    ]


def test_a_default_is_no_request():
    """What a release does without the flag is not refused: of a refused flag with choices the harmless ones are among them."""
    for flag, other in REFUSED.items():
        for form in FORMS.get(flag, ()):
            if form[3] and other.harmless and form[4] is not None:
                assert other.is_harmless(str(form[4])) or form[4] in ("auto", "blockwise"), flag


def test_each_answer_is_of_one_kind():
    kinds = (NO_EFFECT, SILENT, WARNED, REFUSED, SHORTHAND)
    assert not [flag for flag in FORMS if sum(flag in kind for kind in kinds) > 1]
