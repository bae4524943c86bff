"""moto's server of S3's protocol, in a process of its own that ends with the one that started it.

    with store_server() as store:         the environment names it, so s3://bucket/... lies in it
        store.requests()                  what has been carried out since `empty`, in order
        store.objects()                   by bucket/key
        store.kill()                      it answers no more, and what it held is lost

It knows nothing of this project, as the double of `s3_server` knows none of moto: `pip install 'moto[s3]' flask flask-cors s3fs`.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from s3_server import in_the_environment

BUCKET, PATIENCE = "bucket", 60.0
_PORT = re.compile(r"Running on http://127\.0\.0\.1:(\d+)")
_LINE = re.compile(r'"(PUT|GET|HEAD|POST|DELETE) /bucket/?(\S*) HTTP/1\.1" (\d+)')


class Carried(NamedTuple):
    """A request that was answered."""

    kind: str
    name: str  # the key with its query
    status: int

    @property
    def changes_store(self) -> bool:
        return self.kind not in ("GET", "HEAD")


class StoreServer:
    def __init__(self, process: subprocess.Popen, log: Path, port: int):
        self.process, self.port = process, port
        self._log, self._since = log, 0

    def requests(self) -> list[Carried]:
        with self._log.open("rb") as file:
            file.seek(self._since)
            found = _LINE.findall(file.read().decode(errors="replace"))
        return [Carried(kind, name, int(status)) for kind, name, status in found]

    def empty(self) -> None:
        """Nothing but an empty bucket is there."""
        where = f"http://127.0.0.1:{self.port}"
        for path, kind in (("moto-api/reset", "POST"), (BUCKET, "PUT")):
            urllib.request.urlopen(urllib.request.Request(f"{where}/{path}", method=kind)).close()
        self._since = self._log.stat().st_size

    def objects(self) -> dict[str, bytes]:
        import fsspec

        client = fsspec.filesystem("s3", use_listings_cache=False)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return {name: client.cat_file(name) for name in client.find(BUCKET)}
            except FileNotFoundError:  # removed by what a process that was killed has asked for just before
                if time.monotonic() > deadline:
                    raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def store_server() -> Iterator[StoreServer]:
    """Waits until it answers. Its standard input is a pipe from this process, at whose end it ends."""
    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as out:
            process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + PATIENCE
            while (found := _PORT.search(log.read_text())) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"moto's server does not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            store = StoreServer(process, log, int(found[1]))
            with in_the_environment(store.port):
                store.empty()
                yield store
        finally:
            process.kill()
            process.wait()
            process.stdin.close()


def _end_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    from moto.server import main

    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    main(["-H", "127.0.0.1", "-p", "0"])
