"""`dlrover data`, and what `dlrover status` shows of streams."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_dlrover.data import parquet, stream
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.events import Event, FitFinished, StreamOpened, record_of
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, ProgressRecord, encode
from tests.support.history_rows import window
from tests.support.run_cli import RunCli, left_folder

BEGAN = time.time() - 100


@pytest.fixture
def opened(tmp_path: Path, dlrover: RunCli, monkeypatch: pytest.MonkeyPatch) -> StreamOpened:
    """A stream of 30 and 70 rows in batches of 8, with an update after every second batch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("train").mkdir()
    for name, length in (("a", 30), ("b", 70)):
        pq.write_table(pa.table({"id": list(range(length))}), f"train/{name}.parquet")
    data = stream(parquet("train"))
    return StreamOpened(
        *(1, 0, "parquet('train')", str(tmp_path), 2, 100, data.fingerprint, 13, 13, False), *(0, 0, 0, 2, 8, 4, 12, 4096)
    )


def line(event: Event, at: float = BEGAN) -> EventRecord:
    return record_of(event, "a sentence", at)


@dataclass
class Streams:
    """The streams of a job in etcd, and the commands that show them."""

    dlrover: RunCli
    endpoint: str
    client: EtcdClient
    job: Keys
    opened: StreamOpened

    def put(self, *events: EventRecord) -> None:
        for number, event in enumerate(events):
            self.client.put(f"{self.job.events}{number + 2:020d}-x", encode(event))

    def put_window(self, name: str = "w-b", **changes: Any) -> None:
        measured = {"global_rank": 0, "first_step": 10, "num_steps": 10, "step_time_s": 10.0, **changes}
        self.client.put(self.job.profiles + name, encode(replace(window(time.time() - 1), **measured)))

    def text(self, *options: object) -> str:
        return self.dlrover.output("data", "--endpoint", self.endpoint, self.job.run_id, *options)

    def read(self, *options: object) -> Any:
        return json.loads(self.text("--json", *options))["streams"]


@pytest.fixture
def streams(dlrover: RunCli, etcd: EmbeddedEtcd, client: EtcdClient, job: Keys, opened: StreamOpened) -> Streams:
    return Streams(dlrover, etcd.endpoint, client, job, opened)


def test_progress_is_shown_for_people_and_for_programs(streams: Streams) -> None:
    streams.put(line(streams.opened))
    text = streams.text()
    assert "parquet('train'), 2 files, 100 rows: each row exactly once\n  position: not measured yet" in text
    streams.put_window()
    text = streams.text()
    assert "epoch 1: 56 of 100 rows (56 %), files: 0 done, 2 in progress, 0 left" in text
    assert "1 rows/s, 60 s left of the epoch" in text
    (answer,) = streams.read()
    assert (answer["guarantee"], answer["epoch"], answer["rows_done"]) == ("each row exactly once", 1, 56)
    assert (answer["batches_done"], answer["num_batches"], answer["files_in_work"]) == (7, 13, 2)


def test_worker_that_waits_longest_for_data_is_named(streams: Streams) -> None:
    streams.put(line(streams.opened))
    streams.put_window(data_wait_s=0.002)
    assert streams.read()[0]["wait_skew"] is None  # one worker
    waits = {"w-c": (1, 0.003), "w-d": (1, 0.040), "w-old": (0, 9.0)}  # the last one was in an earlier round
    for number, (name, (round_number, wait_s)) in enumerate(waits.items(), 1):
        streams.put_window(name, worker_id=name, global_rank=number, round_number=round_number, data_wait_s=wait_s)
    skew = streams.read()[0]["wait_skew"]
    assert skew == {"longest_s": 0.040, "worker_id": "w-d", "median_s": 0.003, "num_workers": 3}
    text = streams.text()
    assert "a step waits 40.0 ms for data on worker w-d, and 3.0 ms in the median of 3 workers" in text


def test_training_job_is_taken_to_have_gone_on_at_its_pace(streams: Streams) -> None:
    streams.put(line(streams.opened))
    streams.put_window(at=time.time() - 45.0)
    (answer,) = streams.read()
    assert (answer["epoch"], answer["batches_done"]) == (1, 11)
    for entry in streams.client.get_prefix(streams.job.workers)[1]:
        streams.client.delete(entry.key)
    assert streams.read()[0]["batches_done"] == 7  # nothing trains any more


def test_rows_of_a_step_are_listed_with_all_accumulated_batches(streams: Streams) -> None:
    streams.put(line(streams.opened))
    rows: dict[str, list[int]] = {}
    for step in range(1, 8):
        (answer,) = streams.read("--step", step)
        assert (answer["epoch"], answer["counts"]) == (0, "updates")
        for each in answer["rows"]:
            rows.setdefault(Path(each["file"]).name, []).extend(n for a, b in each["ranges"] for n in range(a, b + 1))
    for name, length in (("a.parquet", 30), ("b.parquet", 70)):
        assert sorted(rows.pop(name)) == list(range(length))
    assert rows == {}
    text = streams.text("--step", 7)
    assert text.startswith("step 7: epoch 0, global batch 12, to come: 4 rows of parquet('train')\n")
    text = streams.text("--step", 8)
    assert text.startswith("step 8: epoch 1, global batches 0 to 1, to come: 16 rows of parquet('train')\n")


def test_row_is_shown_in_each_epoch(streams: Streams) -> None:
    streams.put(line(streams.opened))
    streams.put_window()
    (answer,) = streams.read("--row", "b.parquet:69")
    assert [place["epoch"] for place in answer["places"]] == [0, 1]
    for place in answer["places"]:
        (step,) = streams.read("--step", place["step"])
        ends = [last for each in step["rows"] if each["file"].endswith("b.parquet") for _, last in each["ranges"]]
        assert 69 in ends
        assert place["is_done"] == (13 * place["epoch"] + place["batch"] < 20)
    text = streams.text("--row", "b.parquet:69")
    assert "b.parquet:69 of parquet('train')\n  epoch 0: global batch" in text


def test_finished_job_is_read_from_its_run_folder(dlrover: RunCli, opened: StreamOpened) -> None:
    left_folder(line(opened), line(FitFinished(14), BEGAN + 50))
    text = dlrover.output("data", "job")
    assert "epoch 1: 100 of 100 rows (100 %), files: 2 done, 0 in progress, 0 left\n  training has finished" in text
    assert "step 3: epoch 0, global batches 4 to 5, done: 16 rows" in dlrover("data", "job", "--step", 3)[1]
    assert "job 'job' has finished with step 14: there is no step 15" in dlrover.refused("data", "job", "--step", 15)


def test_newest_fit_counts(streams: Streams) -> None:
    second = replace(streams.opened, fit=2, epoch_batches=5)
    streams.put(
        line(streams.opened),
        line(replace(streams.opened, number=1)),
        line(FitFinished(20), BEGAN + 10),
        line(second, BEGAN + 20),
    )
    streams.put_window(at=BEGAN + 15)  # a window of the first fit
    (answer,) = streams.read()
    assert answer["epoch"] is None
    assert answer["guarantee"] == "each row at most once, 60 left out of each epoch"


def test_step_after_the_last_epoch_is_refused(streams: Streams) -> None:
    streams.put(line(streams.opened))
    streams.client.put(streams.job.progress, encode(ProgressRecord(1, 0, 3, 1, 100.0, max_epochs=2, num_batches=13)))
    ask = ("data", "--endpoint", streams.endpoint, streams.job.run_id, "--step")
    assert streams.dlrover(*ask, 14)[0] == 0
    assert f"job {streams.job.run_id!r} trains 2 epochs, and step 999999 would be in number" in streams.dlrover.refused(
        *ask, 999999
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--step", "0"], "'0' is not a step: give a whole number from 1"),
        (["--row", "c.parquet:0"], "parquet('train') has no file c.parquet, but for example"),
        (["--row", "a.parquet:30"], "has 30 rows, numbered from 0: there is no row 30"),
        (["--row", "a.parquet"], "'a.parquet' is not FILE:ROW"),
        (["--step", "1", "--files", "none"], "none has no files"),
        (["--step", "1", "--row", "a:1"], "not allowed with argument"),
    ],
)
def test_wrong_question_is_refused_with_the_reason(streams: Streams, arguments: list[str], message: str) -> None:
    streams.put(line(streams.opened))
    assert message in streams.dlrover.refused("data", "--endpoint", streams.endpoint, streams.job.run_id, *arguments)


def test_job_without_streams_and_unknown_job_are_refused(
    dlrover: RunCli, etcd: EmbeddedEtcd, at: tuple[str, ...], job: Keys
) -> None:
    assert f"job {job.run_id!r} reads no stream" in dlrover.refused("data", *at)
    errors = dlrover.refused("data", "--endpoint", etcd.endpoint, "other")
    assert "etcd holds no job 'other'" in errors
    assert "events.jsonl does not exist: neither etcd nor the run folder has this job" in dlrover.refused("data", "other")


def test_progress_without_the_files_shows_rows_and_the_reason(streams: Streams) -> None:
    streams.put(line(replace(streams.opened, source="Own()")))
    streams.put_window()
    text = streams.text()
    assert "epoch 1: 56 of 100 rows (56 %)\n" in text
    assert "files are not shown: Own() is the script's own source" in text


def test_status_shows_the_guarantee(streams: Streams) -> None:
    streams.put(line(streams.opened))
    text = streams.dlrover("status", "--endpoint", streams.endpoint, streams.job.run_id)[1]
    assert "reads parquet('train'), 2 files, 100 rows: each row exactly once\n" in text
