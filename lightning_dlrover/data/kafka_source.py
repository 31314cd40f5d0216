"""Kafka topics as a source: a shard is a range of one partition's offsets, and a row is a message.

An offset without a message is skipped like a row that cannot be read: compaction leaves such gaps, and so do the ends of
transactions. Each process has one consumer. It reads from many places of few partitions, some messages at a time: a consumer
for each place would cost threads and buffers.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

from lightning_dlrover.data.lane_plan import BLOCK_ROWS, rows_of_block
from lightning_dlrover.data.locations import patiently
from lightning_dlrover.data.source import DataError, Ranges, Shard, Skipped

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_S = 10.0
"""Seconds after which a request without an answer is repeated by another consumer."""

MAX_MESSAGES, MAX_BYTES = 1024, 2**20
"""Messages, and approximately their bytes, that are handed out at once."""

DEFAULTS = {
    "group.id": "lightning-dlrover",  # required by librdkafka. No group is joined and nothing is committed
    "log_level": 0,  # it would log each failed connection; `patiently` logs what failed
    "queued.min.messages": 10_000,
    "queued.max.messages.kbytes": 16_384,  # read ahead, and dropped when the consumer moves to another place
    "fetch.wait.max.ms": 20,  # default 500: a broker holds a request at a partition's end for so long, which delays the next
    "fetch.queue.backoff.ms": 5,  # default 1,000: pause after a full buffer
}
"""Settings of librdkafka that a user's `config` may change."""

OWN_SETTINGS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # any other value would skip messages silently
    "enable.partition.eof": True,
}
"""Settings that no `config` may change, because reading each row exactly once depends on them."""

PERMANENT = frozenset(
    {
        *("TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED", "SASL_AUTHENTICATION_FAILED", "_AUTHENTICATION"),
        *("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNSUPPORTED_SASL_MECHANISM", "_INVALID_ARG"),
    }
)
"""Errors that another attempt would meet, too."""

OF_GROUPS = frozenset({"GROUP_AUTHORIZATION_FAILED", "_NO_OFFSET"})
"""Errors of consumer groups, which are not used."""

_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()  # this process's own, and those of its parents
_has_registered: list[bool] = []  # whether forked processes keep these connections
_inherited: list[_Connection] = []  # never freed: ending a parent's consumer would touch threads that were not forked


def name_of(topic: str, partition: int) -> str:
    """Return a partition's name in errors and records."""
    return f"{topic}/{partition}"


@dataclass(frozen=True)
class Fetched:
    """Messages in the order of their offsets, below `upto`. The other offsets below it have no message."""

    messages: list[Any]
    upto: int


class KafkaConsumer:
    """The consumer of this process. It connects with its first request, and again in each forked process."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {**DEFAULTS, **config, **OWN_SETTINGS}
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"_config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._connection: _Connection | None = None
        self._pid = os.getpid()
        self._place: tuple[str, int, int] | None = None  # topic, partition and offset of the consumer's next message
        self._bytes_per_message = 0.0

    @property
    def servers(self) -> str:
        return str(self._config["bootstrap.servers"])

    # --- offsets --------------------------------------------------------------------------------------------------------------

    def partitions(self, topic: str) -> list[int]:
        """Return the numbers of a topic's partitions. Requests raise `DataError` if the brokers refuse or fail."""

        def ask() -> list[int]:
            found = self._connected().list_topics(topic, timeout=ATTEMPT_S).topics[topic]
            if found.error is not None:
                self._raise(found.error, topic)
            return sorted(found.partitions)

        return self._patiently(ask, topic)

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first offset of a partition, and the offset after the last that consumers may read."""
        from confluent_kafka import TopicPartition

        where = TopicPartition(topic, partition)
        low, high = self._patiently(
            lambda: self._connected().get_watermark_offsets(where, timeout=ATTEMPT_S, cached=False), name_of(topic, partition)
        )
        return int(low), int(high)

    def at_time(self, topic: str, partitions: Iterable[int], time_ms: int) -> dict[int, int | None]:
        """Return the first offset of each partition whose message is not older than a time; None: there is none."""
        from confluent_kafka import TopicPartition

        wanted = [TopicPartition(topic, partition, time_ms) for partition in partitions]
        found = self._patiently(lambda: self._connected().offsets_for_times(wanted, timeout=ATTEMPT_S), topic)
        for each in found:
            if each.error is not None:
                self._raise(each.error, name_of(topic, each.partition))
        return {each.partition: each.offset if each.offset >= 0 else None for each in found}

    # --- messages -------------------------------------------------------------------------------------------------------------

    def fetch(self, topic: str, partition: int, offset: int, stop: int) -> Fetched:
        """Return some messages from an offset on, at least one unless no message is left before `stop`.

        Raises `DataError` if the broker has deleted messages from there on, refuses, or fails for too long.
        """
        return self._patiently(lambda: self._fetch_once(topic, partition, offset, stop), name_of(topic, partition))

    def _fetch_once(self, topic: str, partition: int, offset: int, stop: int) -> Fetched:
        from confluent_kafka import TopicPartition

        consumer, name = self._connected(), name_of(topic, partition)
        if self._place != (topic, partition, offset):
            self._place = None
            consumer.assign([TopicPartition(topic, partition, offset)])
        wanted = max(1, min(MAX_MESSAGES, int(MAX_BYTES / max(1.0, self._bytes_per_message)), stop - offset))
        first = consumer.poll(ATTEMPT_S)
        if first is None:
            raise TimeoutError(f"no answer within {ATTEMPT_S:.0f} s to a request for offset {offset} from {self._who()}")
        self._place = None  # unless all goes well
        messages: list[Any] = []
        upto = offset
        for each in [first, *(consumer.consume(wanted - 1, 0) if wanted > 1 else ())]:
            error = each.error()
            if error is not None and error.name() == "_PARTITION_EOF":
                upto = max(upto, each.offset())
                continue
            if error is not None:
                if error.name() in OF_GROUPS:
                    continue
                self._check_is_there(topic, partition, offset)
                self._raise(error, name)
            upto = each.offset() + 1
            if each.offset() < stop:
                messages.append(each)
        if not messages and upto < stop:
            # A new leader may not know yet that its last messages are committed.
            raise ConnectionError(f"it ends at offset {upto} now, and rows up to offset {stop} were there before")
        if messages:
            self._bytes_per_message = sum(map(len, messages)) / len(messages)
        if upto < stop:
            self._place = (topic, partition, upto)
        else:
            consumer.unassign()  # ends the requests for more
        return Fetched(messages, min(upto, stop))

    def _check_is_there(self, topic: str, partition: int, offset: int) -> None:
        """Raise `DataError` if a partition's messages from an offset on are gone."""
        low, _ = self.bounds(topic, partition)
        if offset < low:
            raise DataError(
                f"{name_of(topic, partition)}: the messages from offset {offset} to {low - 1} are gone from {self.servers}: "
                "the topic's retention has deleted them before they were trained, and they are never skipped silently. "
                "Raise the retention (retention.ms, retention.bytes), and start a new job that begins where messages are left"
            )

    # --- the connection -------------------------------------------------------------------------------------------------------

    def _connected(self) -> Any:
        if self._pid != os.getpid():
            self._forget()
        if self._connection is None:
            self._connection = _Connection(self._config)
        return self._connection.consumer

    def _who(self) -> str:
        last_error = self._connection.errors if self._connection is not None else ()
        return self.servers + "".join(f" ({error})" for error in last_error)

    def _patiently(self, ask: Callable[[], T], name: str) -> T:
        def asked() -> T:
            from confluent_kafka import KafkaException

            try:
                return ask()
            except KafkaException as error:
                self._raise(error.args[0], name)

        return patiently(asked, f"Kafka's {name}", self._drop)

    def _raise(self, error: Any, name: str) -> NoReturn:
        """Raise the exception for an error of librdkafka: `DataError`, or `ConnectionError` if another attempt may succeed."""
        text = f"{error.str()} (at {self._who()})"
        if error.fatal() or error.name() in PERMANENT:
            raise DataError(
                f"Kafka's {name} cannot be read: {text}. Check the topic's name, the servers, and the security settings in "
                "kafka(..., config={...})"
            )
        raise ConnectionError(text)

    def _drop(self) -> None:
        """Use another consumer from now on: this one's connection may be half-open."""
        self._connection = self._place = None


class _Connection:
    """A consumer of librdkafka, and the last error of its connection, if any."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from confluent_kafka import Consumer

        self.errors = errors = deque[str](maxlen=1)
        # No reference to this object: it must be freed with its owner, not by a garbage collection, perhaps in another process.
        self.consumer = Consumer({**config, "error_cb": lambda error: errors.append(error.str())})
        if not _has_registered:
            os.register_at_fork(after_in_child=lambda: _inherited.extend(_connections))
            _has_registered.append(True)
        _connections.add(self)


MESSAGES_WEIGHED, PARTITIONS_WEIGHED, TOPICS_WEIGHED = 8, 2, 8
"""Messages that are weighed at one place of a partition; the largest partitions of a topic and the largest topics."""

NO_MESSAGE = "these offsets have no message: the topic is compacted, or they ended or aborted a transaction"

TopicPosition = str | datetime | Mapping[int, int] | Mapping[str, int]
"""Where reading starts or stops: "earliest", "latest", a time, or offsets by partition."""


@dataclass(frozen=True)
class Partition(Shard):
    """A range of a partition's offsets."""

    first: int = 0  # offset of row 0

    @property
    def number_of_first_row(self) -> int:
        return self.first

    @property
    def identity(self) -> str:
        return f"{self.key} from {self.first}"


class Kafka:
    """Kafka topics as a source of a stream, see `WindowedSource`. Rows are messages.

    Args:
        topics: name of a topic, or several.
        servers: bootstrap servers, such as ``"host:9092,other:9092"``.
        start: ``"earliest"``, ``"latest"``, a time with its time zone, or offsets by partition: ``{0: 1000}``, with several
            topics ``{"topic/0": 1000}``. Partitions that are not named are read from their beginning.
        stop: the same; the row at this place is not read. Partitions that are not named are read to their end, which a job
            looks up once. None: each epoch is a window of the messages since the epoch before.
        config: further settings of librdkafka, such as ``{"security.protocol": "SASL_SSL", ...}``.
        value: makes a row of a message's value, such as `json.loads`. None: a row is a dictionary with ``value`` and ``key``
            as bytes, ``timestamp`` in milliseconds, ``topic``, ``partition`` and ``offset``.
        on_error: treatment of a message for which `value` raises an exception: ``"raise"``, or ``"skip"`` it and count it.
        window_rows: with ``stop=None``, maximum number of offsets in one epoch.
        dry_s: with ``stop=None``, seconds to wait for a new message before training ends.

    Raises:
        TypeError: `topics`, `servers`, `start` or `stop` is of another kind.
        ValueError: an argument is out of range, or `config` sets what this source needs otherwise.
        ModuleNotFoundError: confluent-kafka is missing.

    Example:
        >>> import json
        >>> clicks = kafka("clicks", servers="broker:9092", value=json.loads)  # connects when a job first reads it
    """

    def __init__(
        self,
        topics: str | Sequence[str],
        servers: str,
        start: TopicPosition = "earliest",
        stop: TopicPosition | None = "latest",
        config: Mapping[str, Any] | None = None,
        value: Callable[[bytes], Any] | None = None,
        on_error: str = "raise",
        window_rows: int = 1_000_000,
        dry_s: float = 60.0,
    ) -> None:
        if find_spec("confluent_kafka") is None:
            raise ModuleNotFoundError(
                "streams of Kafka topics need confluent-kafka: pip install 'lightning-dlrover[kafka]'", name="confluent_kafka"
            )
        names = [topics] if isinstance(topics, str) else list(topics)
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise ValueError(f"topics={topics!r}: give the name of a topic, or a list of different ones")
        if not isinstance(servers, str) or not servers:
            raise TypeError(f"servers={servers!r}: give Kafka's bootstrap servers, such as 'host:9092'")
        _check_place("start", start, len(names))
        if stop is not None:
            _check_place("stop", stop, len(names))
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: give 'raise' or 'skip'")
        if isinstance(window_rows, bool) or not isinstance(window_rows, int) or window_rows < 1:
            raise ValueError(f"window_rows={window_rows!r} is not a positive number of rows")
        if not 0 <= dry_s < float("inf"):
            raise ValueError(f"dry_s={dry_s!r}: give the seconds to wait for new messages, 0 or more")
        config = dict(config or {})
        fixed = [key for key in config if key in OWN_SETTINGS and config[key] != OWN_SETTINGS[key]]
        if fixed:
            raise ValueError(
                f"config sets {fixed[0]}={config[fixed[0]]!r}, and each message is read exactly once only with "
                f"{OWN_SETTINGS[fixed[0]]!r}: leave it out. Offsets are kept in the job's own records and checkpoints"
            )
        self.grows = stop is None
        self.dry_s = dry_s
        self.topics = names
        self._start, self._stop = start, stop
        self._value = value
        self._on_error = on_error
        self._window_rows = window_rows
        self._servers = servers
        self._consumer = KafkaConsumer({**config, "bootstrap.servers": servers})
        self._newest: Ranges = {}  # the last window whose shards were requested
        self._block_rows: int | None = None  # once messages were weighed

    def __repr__(self) -> str:
        return self._text(lambda time: time.isoformat())

    @property
    def text_without_times(self) -> str:
        """The same on workers that begin one after another, if a time depends on now."""
        return self._text(lambda _: "a time")

    def _text(self, of_time: Callable[[datetime], str]) -> str:
        def said(place: TopicPosition | None) -> str:
            return repr(of_time(place) if isinstance(place, datetime) else dict(place) if isinstance(place, Mapping) else place)

        # Without `config`, which may hold passwords: this text is recorded.
        return f"kafka({self.topics!r}, {self._servers!r}, start={said(self._start)}, stop={said(self._stop)})"

    # --- shards ---------------------------------------------------------------------------------------------------------------

    def shards(self) -> Sequence[Shard]:
        return self.shards_in(self.window(None))

    def shards_in(self, ranges: Ranges) -> Sequence[Shard]:
        self._newest = ranges
        return [Partition(key, stop - first, first=first) for key, (first, stop) in ranges.items()]

    @property
    def block_rows(self) -> int:
        """Rows of a lane to keep in memory, by the size of some messages of the first window that has any."""
        # With fewer, the lanes of a partition would take turns more often, and lose what was read ahead.
        if self._block_rows is None and (weights := self._bytes_by_topic()):
            self._block_rows = rows_of_block(1, int(max(weights)))
        return BLOCK_ROWS if self._block_rows is None else self._block_rows

    def _bytes_by_topic(self) -> list[float]:
        """Return the mean size of a few messages, the same in each process, for each of the largest topics."""
        by_topic: dict[str, list[tuple[int, int, int]]] = {}  # rows, partition, first offset
        for key, (first, stop) in self._newest.items():
            topic, _, number = key.rpartition("/")
            if stop > first:
                by_topic.setdefault(topic, []).append((stop - first, int(number), first))
        largest = sorted(by_topic, key=lambda topic: (-sum(rows for rows, _, _ in by_topic[topic]), topic))
        weights = []
        for topic in largest[:TOPICS_WEIGHED]:
            sizes: list[int] = []
            for rows, partition, first in sorted(by_topic[topic], key=lambda each: (-each[0], each[1]))[:PARTITIONS_WEIGHED]:
                for offset in {first, first + rows // 2}:
                    stop = min(offset + MESSAGES_WEIGHED, first + rows)
                    try:
                        sizes += [len(message) for message in self._consumer.fetch(topic, partition, offset, stop).messages]
                    except DataError as error:  # they may be gone by now; reading them raises it again
                        log.debug("some messages could not be weighed: %s", error)
            if sizes:
                weights.append(sum(sizes) / len(sizes))
        return weights

    def window(self, after: Mapping[str, int] | None) -> Ranges:
        """Return the present ranges of offsets by partition; at most `window_rows` offsets if the source grows.

        Args:
            after: offset at which each partition continues; None: where the source starts.

        Raises:
            DataError: a topic or offset does not exist, or the brokers fail for too long.
        """
        found: Ranges = {}
        for topic in self.topics:
            partitions = self._consumer.partitions(topic)
            bounds = {partition: self._consumer.bounds(topic, partition) for partition in partitions}
            for partition, (first, stop) in self._chosen(topic, bounds, after).items():
                found[name_of(topic, partition)] = (first, max(first, stop))
        return _at_most(found, self._window_rows) if self.grows else found

    def _chosen(
        self, topic: str, bounds: Mapping[int, tuple[int, int]], after: Mapping[str, int] | None
    ) -> dict[int, tuple[int, int]]:
        lows = {partition: low for partition, (low, _) in bounds.items()}
        highs = {partition: high for partition, (_, high) in bounds.items()}
        stops = highs if self._stop is None else self._placed(topic, self._stop, "stop", lows, highs)
        if after is None:
            starts = self._placed(topic, self._start, "start", lows, highs)
        else:  # a new partition is read from its beginning
            starts = {partition: after.get(name_of(topic, partition), low) for partition, low in lows.items()}
        for partition, start in starts.items():
            if start < lows[partition] and stops[partition] > start:
                raise DataError(
                    f"{name_of(topic, partition)} is to be read from offset {start}, and its messages begin at "
                    f"{lows[partition]} now: the topic's retention has deleted those before. Raise it (retention.ms, "
                    "retention.bytes), or start a new job with start='earliest'"
                )
        return {partition: (starts[partition], stops[partition]) for partition in bounds}

    def _placed(
        self, topic: str, place: TopicPosition, name: str, lows: Mapping[int, int], highs: Mapping[int, int]
    ) -> dict[int, int]:
        """Return the offset of each partition at which reading starts or stops."""
        if isinstance(place, str):
            return dict(lows if place == "earliest" else highs)
        if isinstance(place, datetime):
            at = self._consumer.at_time(topic, lows, int(place.timestamp() * 1000))
            return {partition: highs[partition] if offset is None else offset for partition, offset in at.items()}
        others, found = dict(lows if name == "start" else highs), {}
        for key, offset in place.items():
            of_topic, _, number = str(key).rpartition("/")
            if of_topic in ("", topic):
                found[int(number)] = offset
        unknown = [partition for partition in found if partition not in lows]
        if unknown:
            raise DataError(f"{name}= names partition {unknown[0]} of {topic}, which has the partitions {sorted(lows)}")
        for partition, offset in found.items():
            if offset > highs[partition]:
                raise DataError(
                    f"{name_of(topic, partition)} is to {name} at offset {offset}, and it ends at {highs[partition]} now: "
                    f"give {name}= an offset that is there, or 'latest'"
                )
        return others | found

    # --- rows -----------------------------------------------------------------------------------------------------------------

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        """Yield the messages from a row on. Raises `DataError` if some are deleted or malformed, or the brokers fail."""
        assert isinstance(shard, Partition)
        topic, _, number = shard.key.rpartition("/")
        offset, stop = shard.first + row, shard.first + shard.rows
        while offset < stop:
            fetched = self._consumer.fetch(topic, int(number), offset, stop)
            for message in fetched.messages:
                if message.offset() > offset:
                    yield Skipped(message.offset() - offset, NO_MESSAGE, are_rows=False)
                offset = message.offset() + 1
                yield self._row(message)
            if fetched.upto > offset:
                yield Skipped(fetched.upto - offset, NO_MESSAGE, are_rows=False)
                offset = fetched.upto

    def _row(self, message: Any) -> Any:
        if self._value is None:
            _, timestamp = message.timestamp()
            return {
                "value": message.value(),
                "key": message.key(),
                "timestamp": timestamp,
                "topic": message.topic(),
                "partition": message.partition(),
                "offset": message.offset(),
            }
        try:
            return self._value(message.value())
        except Exception as error:  # the user's decoder may raise anything
            if self._on_error == "skip":
                return Skipped(1, f"value= cannot decode such messages: {type(error).__name__}: {error}")
            where = f"the message at offset {message.offset()} of {name_of(message.topic(), message.partition())}"
            kind = "has no value (a tombstone)" if message.value() is None else "cannot be decoded"
            raise DataError(
                f"{where} {kind}: {type(error).__name__}: {error}. Skip such messages with kafka(..., on_error='skip'), "
                "which counts them, or let value= return a row that gets weight 0 in the loss"
            ) from error


kafka = Kafka
"""Name of `Kafka` in scripts."""


def _check_place(name: str, place: object, num_topics: int) -> None:
    ways = "give 'earliest', 'latest', a time, or offsets by partition such as {0: 1000}"
    if isinstance(place, str):
        if place not in ("earliest", "latest"):
            raise ValueError(f"{name}={place!r}: {ways}")
    elif isinstance(place, datetime):
        if place.tzinfo is None:
            raise ValueError(
                f"{name}={place!r} has no time zone, and hosts may have different ones: give for example "
                "datetime(2026, 11, 23, tzinfo=timezone.utc)"
            )
    elif isinstance(place, Mapping):
        for key, offset in place.items():
            _check_offset(name, key, offset, num_topics)
    else:
        raise TypeError(f"{name}={place!r}: {ways}")


def _check_offset(name: str, key: object, offset: object, num_topics: int) -> None:
    topic, _, partition = str(key).rpartition("/")
    is_number = isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0
    if not partition.isdigit() or (isinstance(key, str) and not topic) or not is_number:
        raise ValueError(
            f"{name}={{{key!r}: {offset!r}}}: give offsets by partition, such as {{0: 1000}} or {{'topic/0': 1000}}"
        )
    if num_topics > 1 and not topic:
        raise ValueError(
            f"{name}={{{key!r}: ...}} names a partition of any of {num_topics} topics: write {{'topic/{key}': ...}}"
        )


def _at_most(ranges: Ranges, num_rows: int) -> Ranges:
    """Return the beginnings of ranges, with at most `num_rows` rows in all, in proportion to their lengths."""
    lengths = {key: stop - first for key, (first, stop) in ranges.items()}
    total = sum(lengths.values())
    if total <= num_rows:
        return ranges
    taken = {key: length * num_rows // total for key, length in lengths.items()}
    for key in sorted(taken, key=lambda key: taken[key] - lengths[key]):  # the longest remainders first
        more = min(num_rows - sum(taken.values()), 1, lengths[key] - taken[key])
        taken[key] += max(0, more)
    return {key: (first, first + taken[key]) for key, (first, _) in ranges.items()}
