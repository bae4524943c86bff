"""Each wait that `tests/campaigns/mutations.py` takes out is still written as it says: else it could show nothing of it."""

import mutations


def test_every_mutation_has_its_place_in_the_source():
    places = {
        one.what: (mutations.ROOT / mutations.PACKAGE / one.file).read_text().count(one.old)
        for one in mutations.MUTATIONS
    }
    assert {what: count for what, count in places.items() if count != 1} == {}
    assert len(places) == len(mutations.MUTATIONS) > 25, "two have one name"
