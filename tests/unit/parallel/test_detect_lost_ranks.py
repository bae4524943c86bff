"""The ranks' lines to the first one, within one process: who has not come, who has died, who is not of the job."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest
from processes import free_port
from said import tells

from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import init_and_destroy_distributed as job
from megatron.core.parallel.detect_lost_ranks_by_tcp import (
    LivenessClient,
    LivenessServer,
    UnreachableError,
    ranks_as_text,
)


@pytest.fixture
def ended():
    """What the lines that gave up say, in their order."""
    return []


@pytest.fixture
def join(ended):
    """exchange, rank -> a line of that rank; all say goodbye at the end."""
    lines = []

    def join(exchange: LivenessServer, rank: int, ranks: int = 3) -> LivenessClient:
        lines.append(LivenessClient(exchange.address, rank, ranks, ["127.0.0.1"], end=ended.append, grace=0.05))
        return lines[-1]

    yield join
    for line in reversed(lines):
        line.leave()


def soon() -> float:
    return time.monotonic() + 5


def wait_for(is_so) -> None:
    deadline = soon()
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


RANKS_AND_WORDS = [
    ([4], "rank 4"),
    ([2, 1], "ranks 1, 2"),
    ([1, 3, 4, 5], "ranks 1, 3 to 5"),
    (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 more"),
]


@pytest.mark.parametrize("ranks, words", RANKS_AND_WORDS)
def test_ranks_in_words(ranks, words):
    assert ranks_as_text(ranks) == words


def test_a_waiting_rank_says_every_so_often_who_has_not_come(join, capfd):
    exchange = LivenessServer(3)
    first = join(exchange, 0)
    assert not first.wait_for_all_ranks(time.monotonic() + 0.4, report_seconds=0.04)
    second = join(exchange, 2)
    assert second.missing() == "rank 1"
    join(exchange, 1)
    assert first.wait_for_all_ranks(soon(), 60) and second.wait_for_all_ranks(soon(), 60)
    said = capfd.readouterr().err.splitlines()
    assert len(said) >= 2 and all(line.startswith("rank 0 of 3 ") and "ranks 1, 2" in line for line in said)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_line_that_closes_without_a_goodbye_is_a_death_all_hear_of(dead, complete, join, ended):
    ranks = 2 if complete else 3
    exchange = LivenessServer(ranks)
    lines = [join(exchange, rank, ranks) for rank in range(2)]
    end = lines[1]._socket if dead else exchange._peers[1].socket
    end.shutdown(socket.SHUT_RDWR)  # as the system does when a process has ended
    other = lines[1 - dead]
    assert other.lost_rank(seconds=5).startswith(f"rank {dead} (on ")
    assert not other.wait_for_all_ranks(soon(), 60)
    wait_for(lambda: ended)
    assert all("has ended without a word" in why for why in ended)


@pytest.mark.parametrize("garbage", [b"lost\n", b"[1]\n", b"7\n", b"\xff\n"])
@pytest.mark.parametrize("sender", [0, 1])
def test_a_message_that_cannot_be_read_is_said_to_be_one(sender, garbage, join, ended):
    exchange = LivenessServer(2)
    lines = [join(exchange, rank, 2) for rank in range(2)]
    end = lines[1]._socket if sender else exchange._peers[1].socket
    end.sendall(garbage)
    assert re.match(rf"rank {sender} \(on .* what it cannot read \(.+\)", lines[1 - sender].lost_rank(seconds=5))


def test_half_a_message_is_the_end_of_its_sender(join, ended):
    exchange = LivenessServer(2)
    lines = [join(exchange, rank, 2) for rank in range(2)]
    end = exchange._peers[1].socket
    end.sendall(b'{"lost": "ra')
    end.shutdown(socket.SHUT_RDWR)
    assert lines[1].lost_rank(seconds=5).endswith("has ended without a word")


def test_another_program_at_the_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        address = json.dumps({"hosts": [], "port": other.getsockname()[1], "token": "1"})
        with pytest.raises(UnreachableError, match=r"is not rank 0 of this job: it says b'HTTP/1\.1 400"):
            LivenessClient(address, 1, 2, ["127.0.0.1"])
        thread.join()


def test_a_rank_that_leaves_in_order_is_no_news(join, ended):
    exchange = LivenessServer(3)
    lines = [join(exchange, rank) for rank in range(3)]
    assert all(line.wait_for_all_ranks(soon(), 60) for line in lines)
    lines[1].leave()
    lines[0].leave()  # which closes all lines
    exchange.join(5)
    lines[2]._thread.join(5)
    assert lines[2].lost_rank() is None and ended == []


def test_a_rank_that_leaves_before_all_have_come_gives_its_reason(join):
    exchange = LivenessServer(3)
    first, second = join(exchange, 0), join(exchange, 1)
    second.leave("it has no patience")
    assert first.lost_rank(5).endswith(": it has no patience")
    assert join(exchange, 2).lost_rank(5) == first.lost


def test_the_first_rank_stays_to_tell_late_comers_of_a_death(join, ended):
    exchange = LivenessServer(3)
    first, second = join(exchange, 0), join(exchange, 1)
    first.begin_leaving()
    second._socket.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: exchange._lost)
    telling = threading.Thread(target=exchange.tell_late_ranks, args=(5.0,))
    telling.start()
    late = join(exchange, 2)
    telling.join(1)
    assert not telling.is_alive() and late.lost_rank(5).startswith("rank 1 (on ")
    wait_for(lambda: ended)
    assert not [why for why in ended if why.startswith("rank 0:")]


def test_who_is_not_of_the_job_is_refused_and_the_job_goes_on(join, ended):
    """Two jobs may have been given one port, or two processes one rank."""
    exchange = LivenessServer(3)
    lines = [join(exchange, rank) for rank in range(2)]
    with pytest.raises(UnreachableError, match="rank 1"):
        join(exchange, 1)
    with pytest.raises(UnreachableError, match=r"(?s)4.*0.*3.*WORLD_SIZE"):
        join(exchange, 2, ranks=4)
    told = json.loads(exchange.address)
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token": "?", "rank": 2, "ranks": 3, "name": ""}\n',
        b"\n",
        b"[]\n",
        b"[" * 60000 + b"\n",
        b'{"token": "%s", "rank": 1e999, "ranks": 3, "name": ""}\n' % told["token"].encode(),
        b"a" * 70000,
    ):
        with socket.create_connection(("127.0.0.1", told["port"])) as stranger:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    lines.append(join(exchange, 2))
    assert all(line.wait_for_all_ranks(soon(), 60) for line in lines) and ended == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_does_not_come_together_names_the_ranks_that_are_missing(rank, monkeypatch, capfd):
    """Rank 1 finds nothing where the first rank should be."""
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(job, "REPORT_SECONDS", 0.1)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as error:
        parallel_state.start_distributed("gloo", 0.25 / 60)
    missing = "ranks 1 to 3" if rank == 0 else "rank 0"
    assert tells(error.value, f"{rank} 4 127.0.0.1")
    assert tells(error.value, f"{missing}")
    assert tells(capfd.readouterr().err, f"{rank} 4 0 {missing}")
    wait_for(lambda: set(threading.enumerate()) <= before)
