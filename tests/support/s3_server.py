"""Double of an object store that speaks S3's protocol on 127.0.0.1, with every request counted, and one of them failed or died at.

    with s3_server() as server:                       the environment names it, so s3://bucket/... lies in it
        save(); server.made                           (kind, name) of each request, in the order of arrival
        server.arm(7, "before"); save()               request 7 is not carried out, and the store answers none after it
        server.arm(7, "after")                        the same, but request 7 is carried out
        server.arm(7, "error")                        request 7 is answered with an error of the server; later ones work
        server.arm(7, "lost")                         request 7 is carried out, and its answer does not arrive
        server.revive()

A store that answers no more is to its contents as if all clients had died there, whatever they do afterwards. At a real kill, `on_hit`
is called instead. Kinds: PUT, GET, HEAD, DELETE, LIST, DELETE_MANY, COPY, BEGIN, PART, COMPLETE, ABORT (the last four: an object sent in parts).
"""

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from megatron.core.storage import file_layer

CHANGES = ("PUT", "DELETE", "DELETE_MANY", "COPY", "BEGIN", "PART", "COMPLETE", "ABORT")
HOWS = ("before", "after", "error", "lost")


class Request(NamedTuple):
    kind: str
    name: str  # the key without its bucket; of a listing the prefix

    @property
    def changes_store(self) -> bool:
        return self.kind in CHANGES


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


def _error(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>{code}, said by the double</Message></Error>".encode())


def _tag(data: bytes) -> tuple[tuple[str, str], ...]:
    return (("ETag", f'"{hashlib.md5(data).hexdigest()}"'),)


class S3Server:
    """The store. Buckets are there without being made; "nobody" is not."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}  # by bucket/key
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}  # those that are not complete
        self.made: list[Request] = []
        self.bytes_read = 0
        self.on_hit: Callable[[], None] | None = None
        self.lock = threading.Lock()
        self.arm(0, "")

    def arm(self, at: int, how: str, only: Callable[[Request], bool] | None = None) -> None:
        """Request number `at`, from 1, of those that `only` chooses, is to go wrong."""
        self.at, self.how, self.only = at, how, only
        self.seen, self.hit, self.is_dead = 0, None, False

    def revive(self) -> None:
        self.is_dead, self.at = False, 0

    def answer(self, request: Request, carry_out: Callable[[], Answer]) -> Answer | None:
        """None: the answer does not arrive."""
        with self.lock:
            if self.is_dead:
                return _error(403, "AccessDenied")
            self.made.append(request)
            self.seen += self.only is None or self.only(request)
            if self.hit is not None or not self.at or self.seen != self.at:
                return carry_out()
            self.hit = request
            if self.how == "error":
                return _error(500, "InternalError")
            done = carry_out() if self.how in ("after", "lost") else None
            if self.how != "lost":
                self.is_dead = True
                if self.on_hit is not None:
                    self.on_hit()
            return None if self.how == "lost" else _error(403, "AccessDenied") if done is None or self.is_dead else done

    # ------------------------------------------------------------ what requests do

    def listing(self, bucket: str, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if bucket == "nobody":
            return _error(404, "NoSuchBucket")
        keys, folders = [], []
        for name in sorted(self.objects):
            if not name.startswith(f"{bucket}/{prefix}"):
                continue
            key = name.removeprefix(f"{bucket}/")
            inner, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.append(prefix + inner + delimiter)
            else:
                keys.append(key)
        entries = [*((key, True) for key in keys), *((name, False) for name in dict.fromkeys(folders))]
        start, most = int(query.get("continuation-token", 0)), int(query.get("max-keys", 3))
        text = []
        for name, is_key in entries[start : start + most]:
            size = len(self.objects[f"{bucket}/{name}"]) if is_key else 0
            at = f"<Key>{escape(name)}</Key><Size>{size}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            text.append(
                f"<Contents>{at}</Contents>"
                if is_key
                else f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            )
        more = start + most < len(entries)
        rest = f"<NextContinuationToken>{start + most}</NextContinuationToken>" if more else ""
        told = f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(text)}</KeyCount>{rest}{''.join(text)}"
        return Answer(200, f"<ListBucketResult>{told}</ListBucketResult>".encode())

    def get(self, name: str, span: str | None, *, head: bool) -> Answer:
        if (data := self.objects.get(name)) is None:
            return _error(404, "NoSuchKey")
        tag = _tag(data)
        if span is None:
            self.bytes_read += 0 if head else len(data)
            return Answer(200, data, tag)
        first, last = re.fullmatch("bytes=([0-9]+)-([0-9]*)", span).groups()
        if int(first) >= len(data):
            return _error(416, "InvalidRange")
        some = data[int(first) : int(last) + 1 if last else None]
        self.bytes_read += len(some)
        place = ("Content-Range", f"bytes {first}-{int(first) + len(some) - 1}/{len(data)}")
        return Answer(206, some, (*tag, place))

    def put(self, name: str, data: bytes) -> Answer:
        if name.startswith("nobody/"):
            return _error(404, "NoSuchBucket")
        self.objects[name] = data
        return Answer(200, b"", _tag(data))

    def delete(self, name: str) -> Answer:
        self.objects.pop(name, None)
        return Answer(204)

    def delete_many(self, bucket: str, body: bytes) -> Answer:
        for key in re.findall("<Key>(.*?)</Key>", body.decode()):
            self.objects.pop(f"{bucket}/{key}", None)
        return Answer(200, b"<DeleteResult></DeleteResult>")

    def begin(self, name: str) -> Answer:
        number = f"upload{len(self.made)}"
        self.uploads[number] = (name, {})
        told = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        return Answer(200, told.encode())

    def part(self, query: dict[str, str], data: bytes) -> Answer:
        if query["uploadId"] not in self.uploads:
            return _error(404, "NoSuchUpload")
        self.uploads[query["uploadId"]][1][int(query["partNumber"])] = data
        return Answer(200, b"", _tag(data))

    def complete(self, query: dict[str, str], body: bytes) -> Answer:
        if query["uploadId"] not in self.uploads:
            return _error(404, "NoSuchUpload")
        numbers = list(map(int, re.findall("<PartNumber>([0-9]+)</PartNumber>", body.decode())))
        name, parts = self.uploads.pop(query["uploadId"])
        if sorted(parts) != numbers or any(len(parts[number]) < 5 << 20 for number in numbers[:-1]):
            return _error(400, "EntityTooSmall")
        self.objects[name] = b"".join(parts[number] for number in numbers)
        return Answer(200, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")

    def abort(self, query: dict[str, str]) -> Answer:
        self.uploads.pop(query["uploadId"], None)
        return Answer(204)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: S3Server
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return data
        chunks, at = [], 0  # "SIZE in hex;signature CRLF bytes CRLF", up to one of no bytes
        while size := int(data[at : data.index(b"\r\n", at)].split(b";")[0], 16):
            at = data.index(b"\r\n", at) + 2
            chunks.append(data[at : at + size])
            at += size + 2
        return b"".join(chunks)

    def _handle(self) -> None:
        url, store = urlsplit(self.path), self.store
        query = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        name, body = unquote(url.path).lstrip("/"), self._body()
        bucket, _, key = name.partition("/")
        kind, carry_out = {
            "GET": ("GET", lambda: store.get(name, self.headers.get("Range"), head=False)),
            "HEAD": ("HEAD", lambda: store.get(name, None, head=True)),
            "PUT": ("PUT", lambda: store.put(name, body)),
            "DELETE": ("DELETE", lambda: store.delete(name)),
            "POST": ("BEGIN", lambda: store.begin(name)),
        }[self.command]
        if self.command == "GET" and not key:
            kind, carry_out, key = "LIST", lambda: store.listing(bucket, query), query.get("prefix", "")
        elif self.command == "HEAD" and not key:
            carry_out = lambda: _error(404, "NoSuchBucket") if bucket == "nobody" else Answer(200)  # noqa: E731
        elif "delete" in query:
            kind, carry_out = "DELETE_MANY", lambda: store.delete_many(bucket, body)
            key = ",".join(sorted(re.findall("<Key>(.*?)</Key>", body.decode())))
        elif "uploadId" in query:
            kind, carry_out = {
                "PUT": ("PART", lambda: store.part(query, body)),
                "POST": ("COMPLETE", lambda: store.complete(query, body)),
                "DELETE": ("ABORT", lambda: store.abort(query)),
            }[self.command]
        self._send(store.answer(Request(kind, key), carry_out))

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _handle

    def _send(self, answer: Answer | None) -> None:
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


@contextlib.contextmanager
def s3_server(attempts: int = 1) -> Iterator[S3Server]:
    """A store that this process and those that it starts find in the environment. attempts: of a client, for each request."""
    import s3fs

    store = S3Server()
    handler = type("Handler", (_Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    before = s3fs.S3FileSystem.retries
    try:
        with in_the_environment(server.server_port, AWS_MAX_ATTEMPTS=str(attempts)):
            s3fs.S3FileSystem.retries = attempts
            yield store
    finally:
        s3fs.S3FileSystem.retries = before
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def in_the_environment(port: int, **more: str) -> Iterator[None]:
    """Clients of S3, in this process and those that it starts, ask the server on this port."""
    import s3fs

    where = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        with mock.patch.dict(os.environ, where | more):
            s3fs.S3FileSystem.clear_instance_cache()
            file_layer.stores.pop("s3", None)
            yield
    finally:
        file_layer.stores.pop("s3", None)
