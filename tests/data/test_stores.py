"""Rows of files on an HTTP server that fails on purpose, and on a server with the interface of S3 where one is installed."""

from __future__ import annotations

import io
import pickle
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from lightning_dlrover.data import DataError, file_source, files, locations, parquet, parquet_source, stream

pytest.importorskip("aiohttp")

ROWS = 4000


def table_bytes(first: int, num_rows: int = ROWS) -> bytes:
    sink = pa.BufferOutputStream()
    values = list(range(first, first + num_rows))
    pq.write_table(pa.table({"number": values}), sink, row_group_size=500, compression="none", use_dictionary=False)
    return bytes(sink.getvalue())


class FaultyStore:
    """An HTTP server with files in memory. `faults` are met by the next requests for a file's bytes, one each."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.requests: Counter[tuple[str, str]] = Counter()  # counts by method and path
        self.at_once, self.max_at_once, self.delay_s = 0, 0, 0.0
        self.gives_etags, self.obeys_ranges, self.hang_s = True, True, 30.0
        self.lock = threading.Lock()
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                store.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Print nothing when a client is gone."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def etag(self, path: str) -> str:
        return f'"{hash(self.files[path])}"'

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path
        with self.lock:
            self.requests[request.command, path] += 1
            self.at_once += 1
            self.max_at_once = max(self.max_at_once, self.at_once)
            kind = f"{request.command} {path}"
            fault = self.faults[kind].pop(0) if self.faults[kind] else ""
        try:
            time.sleep(self.delay_s)
            self._answer(request, path, fault)
        finally:
            with self.lock:
                self.at_once -= 1

    def _answer(self, request: BaseHTTPRequestHandler, path: str, fault: str) -> None:
        if fault == "hang":
            time.sleep(self.hang_s)
            request.close_connection = True
            return
        if fault == "drop":
            request.close_connection = True
            return
        if fault.isdigit():
            self._send(request, int(fault), b"no")
        elif path.endswith("/"):
            names = {name[len(path) :].partition("/") for name in self.files if name.startswith(path)}
            links = "".join(f'<a href="{first}{slash}">{first}</a>' for first, slash, _ in sorted(names))
            self._send(request, 200 if names else 404, links.encode(), {"Content-Type": "text/html"})
        elif path not in self.files:
            self._send(request, 404, b"no")
        elif request.headers.get("If-Match", self.etag(path)) != self.etag(path):
            self._send(request, 412, b"no")
        else:
            self._send_file(request, path, fault)

    def _send_file(self, request: BaseHTTPRequestHandler, path: str, fault: str) -> None:
        data, status = self.files[path], 200
        headers = {"ETag": self.etag(path)} if self.gives_etags else {}
        asked = request.headers.get("Range")
        if asked and self.obeys_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[int(first) : int(last) + 1], 206
        if fault == "short":  # an honest answer with fewer bytes than asked for
            data = data[: len(data) // 2]
        elif fault == "garbled":
            self._send(request, status, data, headers, len(data) // 2)
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
            request.connection.shutdown(socket.SHUT_RD)
            request.close_connection = True
            return
        self._send(request, status, data, headers, len(data) // 2 if fault == "truncate" else None)
        request.close_connection = fault == "truncate"

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        stop: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data[:stop])
            request.wfile.flush()


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    store = FaultyStore()
    yield store
    store.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the first pauses, and make requests small so that a file takes several."""
    monkeypatch.setattr(locations, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(locations, "GIVE_UP_S", 60.0)
    monkeypatch.setattr(locations, "READ_AHEAD_BYTES", 8192)
    monkeypatch.setattr(locations, "MAX_REQUEST_BYTES", 8192)


def read(source: Any, first: int = 0) -> list[int]:
    (shard,) = source.shards()
    return [value for batch in source.read(shard, first) for value in batch.column("number").to_pylist()]


def served(store: FaultyStore, content: bytes | None = None, **options: Any) -> tuple[Any, Any]:
    """Return a source with one Parquet file at the store, and the file as its shard."""
    store.files["/a.parquet"] = table_bytes(0) if content is None else content
    source = parquet(f"{store.url}/a.parquet", **options)
    (shard,) = source.shards()
    return source, shard


FAULTS = ["500", "503", "429", "408", "drop", "truncate", "garbled", "short"]


@pytest.mark.parametrize("fault", FAULTS)
def test_failures_that_pass_change_no_row(store: FaultyStore, fault: str) -> None:
    store.files["/a.parquet"] = table_bytes(0)
    store.faults["GET /a.parquet"] = ["", fault, "", fault, fault, "", fault, fault, fault]
    assert read(parquet(f"{store.url}/a.parquet"), 1234) == list(range(1234, ROWS))
    assert store.faults["GET /a.parquet"] == []


@pytest.mark.parametrize("fault", ["503", "429", "drop"])
def test_failures_that_pass_while_files_are_listed_are_waited_for(store: FaultyStore, fault: str) -> None:
    store.files["/a.parquet"] = table_bytes(0)
    for kind in ("HEAD /a.parquet", "GET /a.parquet"):
        store.faults[kind] = [fault, fault]
    assert read(parquet(f"{store.url}/a.parquet")) == list(range(ROWS))


def test_hanging_request_is_repeated(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "REQUEST_TIMEOUT_S", 0.6)
    store.files["/a.parquet"] = table_bytes(0)
    store.faults["GET /a.parquet"] = ["", "hang"]
    began = time.monotonic()
    assert read(parquet(f"{store.url}/a.parquet")) == list(range(ROWS))
    assert time.monotonic() - began < store.hang_s


def test_attempt_that_was_given_up_shares_no_file_with_a_later_one(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "REQUEST_TIMEOUT_S", 0.6)
    source, shard = served(store)
    opened = locations._PatientFile._opened
    made: list[Any] = []
    may_go_on = threading.Event()

    def slow_at_first(file: Any) -> Any:
        is_first = not made
        made.append(file)
        if is_first:
            may_go_on.wait(30.0)
        return opened(file)

    monkeypatch.setattr(locations._PatientFile, "_opened", slow_at_first)
    rows = iter(source.read(shard, 0))
    found = next(rows).column("number").to_pylist()
    (file,) = set(made)
    current = file._file
    may_go_on.set()
    time.sleep(0.1)
    assert file._file is current
    assert [*found, *(value for batch in rows for value in batch.column("number").to_pylist())] == list(range(ROWS))


def test_store_that_stays_away_ends_the_read_after_the_deadline(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source, shard = served(store)
    monkeypatch.setattr(locations, "GIVE_UP_S", 0.5)
    store.faults["GET /a.parquet"] = ["503"] * 1000
    with pytest.raises(DataError, match=r"/a.parquet could not be read for \d s, the last time because of: 503"):
        next(iter(source.read(shard, 0)))


def remove(store: FaultyStore) -> None:
    del store.files["/a.parquet"]


def forbid(store: FaultyStore) -> None:
    store.faults["HEAD /a.parquet"] = store.faults["GET /a.parquet"] = ["403"] * 9


def replace(store: FaultyStore) -> None:
    store.files["/a.parquet"] = table_bytes(7)


@pytest.mark.parametrize(
    "change, message",
    [
        (remove, "/a.parquet is gone or cannot be read: .*It was there when the job began"),
        (forbid, "/a.parquet is gone or cannot be read: .*403"),
        (replace, "/a.parquet has changed"),
    ],
)
@pytest.mark.parametrize("while_read", [False, True])
def test_refusal_comes_at_once_with_the_name_of_the_file(
    store: FaultyStore, change: Callable[[FaultyStore], None], message: str, while_read: bool
) -> None:
    source, shard = served(store, on_error="skip")  # skips corrupt row groups, not absent files
    rows = iter(source.read(shard, 0))
    if while_read:
        next(rows)
    change(store)
    began = time.monotonic()
    with pytest.raises(DataError, match=message):
        list(rows)
    assert time.monotonic() - began < 30.0  # instead of `GIVE_UP_S`


def test_other_file_after_an_outage_is_refused_without_etags_in_requests(store: FaultyStore) -> None:
    store.files["/a.txt"] = b"".join(b"%d\n" % number for number in range(20_000))
    store.gives_etags = False
    source = files(f"{store.url}/a.txt")
    (shard,) = source.shards()
    rows = iter(source.read(shard, 0))
    assert next(rows) == "0"
    store.files["/a.txt"] += b"20000\n"
    store.faults["GET /a.txt"] = ["503"] * 2
    with pytest.raises(DataError, match=r"/a.txt has changed"):
        list(source.read(shard, 0))


@pytest.mark.parametrize(
    "path, message",
    [
        ("/none.parquet", "/none.parquet is gone or cannot be read: 404.*Check the address"),
        ("/nothing/*.parquet", r"/nothing/\*.parquet (has no files|is gone or cannot be read)"),
    ],
)
def test_address_without_files_is_named_at_once(store: FaultyStore, path: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match=message):
        parquet(store.url + path).shards()
    assert time.monotonic() - began < 30.0  # instead of `GIVE_UP_S`


def test_server_without_ranges_is_refused(store: FaultyStore) -> None:
    store.files["/a.parquet"] = table_bytes(0)
    store.obeys_ranges = False
    with pytest.raises(DataError, match=r"a.parquet is gone or cannot be read: .*range requests"):
        parquet(f"{store.url}/a.parquet").shards()


@pytest.mark.parametrize("path", ["/data/", "/data/*.parquet"])
def test_footers_of_many_files_are_read_in_parallel_with_one_request_each(store: FaultyStore, path: str) -> None:
    content = {number: table_bytes(number * 10, 10) for number in range(64)}
    store.files = {f"/data/{number:03}.parquet": data for number, data in content.items()}
    store.delay_s = 0.1
    shards = parquet(store.url + path).shards()
    assert [shard.rows for shard in shards] == [10] * 64
    assert store.max_at_once > file_source.NUM_THREADS / 4
    assert {store.requests["GET", name] for name in store.files} == {1}
    assert {store.requests["HEAD", name] for name in store.files} == {1}


@pytest.mark.parametrize(("columns", "is_heavy"), [(None, True), (["small"], False)])
def test_large_row_groups_in_a_store_are_named_once(
    store: FaultyStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    columns: Any,
    is_heavy: bool,
) -> None:
    monkeypatch.setattr(parquet_source, "HEAVY_BYTES", 40_000)
    table = pa.table({"large": list(range(10_000)), "small": [0] * 10_000})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=["small"])
    store.files["/a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    for source in (parquet(str(tmp_path / "a.parquet"), columns), parquet(f"{store.url}/a.parquet", columns)):
        (shard,) = source.shards()
        for row in (0, 5_000):
            assert next(source.read(shard, row)).num_rows
    said = [text for record in caplog.records if "row groups of" in (text := record.getMessage())]
    assert len(said) == is_heavy
    assert all(f"row groups of {store.url}/a.parquet have up to 0 MB as stored" in text for text in said)


def test_large_row_group_in_a_store_is_read_in_pieces(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_source, "BUFFER_BYTES", 10_000)
    monkeypatch.setattr(parquet_source, "PIECES_BYTES", 20_000)
    monkeypatch.setattr(locations, "READ_AHEAD_BYTES", 2**20)
    monkeypatch.setattr(locations, "MAX_REQUEST_BYTES", 2**20)
    sink = io.BytesIO()
    numbers = list(range(50_000))
    pq.write_table(pa.table({"a": numbers, "b": numbers}), sink, compression="none", use_dictionary=False, data_page_size=5_000)
    source, shard = served(store, sink.getvalue())
    asked: list[int] = []
    for heavy_bytes in (100_000, 10_000_000):
        monkeypatch.setattr(parquet_source, "HEAVY_BYTES", heavy_bytes)
        next(source.read(shard, 0))  # reads the footer, which is kept
        store.requests.clear()
        assert [x for batch in source.read(shard, 7) for x in batch.column("b").to_pylist()] == numbers[7:]
        asked.append(store.requests["GET", "/a.parquet"])
    assert asked[0] > len(sink.getvalue()) / 20_000 > 5 * asked[1]


def test_file_is_read_ahead(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "READ_AHEAD_BYTES", 2**20)
    monkeypatch.setattr(locations, "MAX_REQUEST_BYTES", 2**20)
    source, shard = served(store, table_bytes(0, 400_000))
    store.requests.clear()
    assert sum(batch.num_rows for batch in source.read(shard, 0)) == 400_000
    size = len(store.files["/a.parquet"])
    assert store.requests["GET", "/a.parquet"] <= 2 + -(-size // 2**20)
    assert store.requests["HEAD", "/a.parquet"] == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_forked_loader_workers_read_from_the_store_their_parent_has_read_from(store: FaultyStore, num_workers: int) -> None:
    store.files = {f"/{number}.parquet": table_bytes(number * 100, 100) for number in range(4)}
    data = stream(parquet([store.url + name for name in store.files]), shuffle_rows=200)
    alone = [batch["number"].tolist() for batch in DataLoader(data, batch_size=64)]
    loader = DataLoader(data, batch_size=64, num_workers=num_workers, multiprocessing_context="fork")
    assert [batch["number"].tolist() for batch in loader] == alone
    assert sorted(chain.from_iterable(alone)) == list(range(400))


def test_pickled_source_reads_the_same_rows(store: FaultyStore) -> None:
    source, shard = served(store)
    copy = pickle.loads(pickle.dumps(source))
    assert [batch.to_pydict() for batch in copy.read(shard, 70)] == [batch.to_pydict() for batch in source.read(shard, 70)]


def test_address_may_have_a_query(store: FaultyStore) -> None:
    store.files["/a.parquet"] = table_bytes(0)
    assert read(parquet(f"{store.url}/a.parquet?signature=x")) == list(range(ROWS))


def test_counts_of_other_files_are_remembered_when_one_cannot_be_read(store: FaultyStore) -> None:
    store.files = {"/1.parquet": table_bytes(0, 10), "/2.parquet": b"no parquet"}
    addresses = [store.url + name for name in store.files]
    for _ in range(2):
        with pytest.raises(DataError, match=r"/2.parquet is not a Parquet file"):
            parquet(addresses).shards()
    assert store.requests["GET", "/1.parquet"] == 1


def test_protocol_that_is_not_installed_is_named() -> None:
    with pytest.raises(DataError, match=r"nonsense://x cannot be read: .*nonsense"):
        parquet("nonsense://x").shards()


# --- the interface of S3: pip install "moto[server]" s3fs ---------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a file system whose bucket `data` is on a server of moto's."""
    pytest.importorskip("s3fs", exc_type=ImportError)
    moto = pytest.importorskip("moto.server", exc_type=ImportError)
    import fsspec

    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    filesystem.makedirs("data", exist_ok=True)
    try:
        yield filesystem
    finally:
        type(filesystem).clear_instance_cache()  # the next server has another address
        server.stop()


def test_pattern_of_s3_is_one_stream_in_all_loader_workers(bucket: Any) -> None:
    for number in range(6):
        bucket.pipe_file(f"data/day={number // 2}/{number}.parquet", table_bytes(number * 100, 100))
    data = stream(parquet("s3://data/day=*/*.parquet"), shuffle_rows=200)
    assert [shard.key for shard in data.shards][:2] == ["s3://data/day=0/0.parquet", "s3://data/day=0/1.parquet"]
    alone = [batch["number"].tolist() for batch in DataLoader(data, batch_size=64)]
    assert sorted(chain.from_iterable(alone)) == list(range(600))
    loader = DataLoader(data, batch_size=64, num_workers=2, multiprocessing_context="fork")
    assert [batch["number"].tolist() for batch in loader] == alone
    assert len(parquet("s3://data/day=1").shards()) == 2


def test_file_of_s3_that_changes_or_goes_is_refused_at_once(bucket: Any) -> None:
    bucket.pipe_file("data/a.parquet", table_bytes(0))
    source = parquet("s3://data/a.parquet")
    (shard,) = source.shards()
    rows = iter(source.read(shard, 0))
    next(rows)
    bucket.pipe_file("data/a.parquet", table_bytes(7))
    with pytest.raises(DataError, match=r"s3://data/a.parquet has changed"):
        list(rows)
    with pytest.raises(DataError, match=r"s3://data/a.parquet has changed"):
        next(iter(source.read(shard, 0)))
    bucket.rm("data/a.parquet")
    with pytest.raises(DataError, match=r"s3://data/a.parquet is gone"):
        next(iter(source.read(shard, 0)))
    with pytest.raises(DataError, match=r"s3://data/none/\*.parquet has no files"):
        parquet("s3://data/none/*.parquet").shards()
    with pytest.raises(DataError, match=r"s3://nothing/a.parquet is gone or cannot be read"):
        parquet("s3://nothing/a.parquet").shards()
