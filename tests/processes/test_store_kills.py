"""Processes that save to an object store are killed between its requests, and go on; tests/campaigns/store_campaign.py has many more kills."""

import pytest

pytest.importorskip("s3fs", reason="the extra [s3] is not installed")
from kill_campaign import lives
from s3_server import Request, S3Server, s3_server
from store_campaign import Case, run_case, whole
from store_server import store_server


class Double:
    """The double of S3's protocol, as the campaign sees a store."""

    def __init__(self, store: S3Server):
        self._store = store

    def empty(self) -> None:
        self._store.objects.clear()
        self._store.made.clear()

    def requests(self) -> list[Request]:
        return list(self._store.made)

    def objects(self) -> dict[str, bytes]:
        return dict(self._store.objects)


CASES = [
    Case("requests", 0, "ZeRO 1, async", False, "rank 1", 0.4, 0.01),
    Case("requests", 1, "one process, async, two kept", True, "all", 0.7, 0.0),
]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.scenario)
def test_a_run_that_is_killed_between_requests_goes_on_to_the_same_bits(case: Case):
    with s3_server(attempts=3) as server:
        store = Double(server)
        expected = whole(case.scenario, store)
        assert run_case(case, expected, 0.0, store)["killed"]


@pytest.mark.full
def test_motos_server_is_gone_with_the_block_and_answers_within():
    pytest.importorskip("moto", reason="moto's server is not installed")
    with store_server() as store:
        import fsspec

        fsspec.filesystem("s3", use_listings_cache=False).pipe_file("s3://bucket/a", b"1")
        assert store.objects() == {"bucket/a": b"1"} and store.requests()[-1].kind in ("GET", "PUT")
    assert not lives(store.process.pid)
