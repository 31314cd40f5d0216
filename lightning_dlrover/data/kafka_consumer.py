"""Messages of Kafka partitions from any offset on: one consumer per process, shared by all that it reads.

A process reads many places of few partitions side by side, and a consumer for each of them would cost threads and buffers for
each. So the one consumer goes from place to place, and hands out some messages at a time.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from lightning_dlrover.data.locations import patiently
from lightning_dlrover.data.source import DataError

__all__ = ["ATTEMPT_S", "OWN_SETTINGS", "Fetched", "KafkaConsumer", "name_of"]

T = TypeVar("T")

ATTEMPT_S = 10.0
"""Seconds after which a request without an answer is made anew, by another consumer."""

MAX_MESSAGES, MAX_BYTES = 1024, 2**20
"""Messages, and about how many bytes of them, that are handed out at once."""

DEFAULTS = {
    "group.id": "lightning-dlrover",  # librdkafka wants a name. No group is joined and nothing is committed
    "log_level": 0,  # one line for each connection that fails; `patiently` logs what failed
    "queued.min.messages": 10_000,
    "queued.max.messages.kbytes": 16_384,  # read ahead, and dropped when the consumer goes to another place
    "fetch.wait.max.ms": 20,  # default 500: so long a broker holds a request at a partition's end, which delays the next place
    "fetch.queue.backoff.ms": 5,  # default 1,000: so long a full buffer would rest
}
"""Settings of librdkafka that a user's `config` may change."""

OWN_SETTINGS = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # any other value would leave messages out without a word
    "enable.partition.eof": True,
}
"""Settings that no `config` may change: each row is read exactly once because of them."""

PERMANENT = frozenset(
    {
        *("TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED", "SASL_AUTHENTICATION_FAILED", "_AUTHENTICATION"),
        *("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNSUPPORTED_SASL_MECHANISM", "_INVALID_ARG"),
    }
)
"""Errors that another attempt would get as well."""

OF_GROUPS = frozenset({"GROUP_AUTHORIZATION_FAILED", "_NO_OFFSET"})
"""Errors that concern groups alone, which are not used."""

_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()  # this process's own, and those of its parents
_has_registered: list[bool] = []  # whether forked processes keep these connections
_inherited: list[_Connection] = []  # never freed: ending a parent's consumer would touch threads that were not forked


def name_of(topic: str, partition: int) -> str:
    """Return a partition's name in errors and records."""
    return f"{topic}/{partition}"


@dataclass(frozen=True)
class Fetched:
    """Messages in the order of their offsets, which are below `upto`. Offsets below it that are left out have no message."""

    messages: list[Any]
    upto: int


class KafkaConsumer:
    """The consumer of this process. It connects with its first request, and once more in each forked process.

    Args:
        config: librdkafka's settings.
    """

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
        """Return the numbers of a topic's partitions.

        Raises:
            DataError: there is no such topic, or the brokers are away for too long.
        """

        def ask() -> list[int]:
            found = self._connected().list_topics(topic, timeout=ATTEMPT_S).topics[topic]
            if found.error is not None:
                self._raise(found.error, topic)
            return sorted(found.partitions)

        return self._patiently(ask, topic)

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first offset of a partition, and the one after the last that consumers may read."""
        from confluent_kafka import TopicPartition

        where = TopicPartition(topic, partition)
        low, high = self._patiently(
            lambda: self._connected().get_watermark_offsets(where, timeout=ATTEMPT_S, cached=False), name_of(topic, partition)
        )
        return int(low), int(high)

    def at_time(self, topic: str, partitions: Iterable[int], time_ms: int) -> dict[int, int | None]:
        """Return the first offset of each partition whose message is not older; None: there is none."""
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

        Raises:
            DataError: the broker has deleted messages from there on, refuses, or is away for too long.
        """
        return self._patiently(lambda: self._fetch_once(topic, partition, offset, stop), name_of(topic, partition))

    def _fetch_once(self, topic: str, partition: int, offset: int, stop: int) -> Fetched:
        from confluent_kafka import TopicPartition

        consumer, name = self._connected(), name_of(topic, partition)
        if self._place != (topic, partition, offset):
            self._place = None
            consumer.assign([TopicPartition(topic, partition, offset)])
        wanted = min(self._num_at_once, stop - offset)
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
        self._remember_size(messages)
        if upto < stop:
            self._place = (topic, partition, upto)
        else:
            consumer.unassign()  # the broker need not be asked for more
        return Fetched(messages, min(upto, stop))

    @property
    def _num_at_once(self) -> int:
        return max(1, min(MAX_MESSAGES, int(MAX_BYTES / max(1.0, self._bytes_per_message))))

    def _remember_size(self, messages: list[Any]) -> None:
        sizes = [len(message) for message in messages]
        self._bytes_per_message = sum(sizes) / len(sizes) if sizes else self._bytes_per_message

    def _check_is_there(self, topic: str, partition: int, offset: int) -> None:
        """Raise `DataError` if a partition's first messages, up to an offset that is to be read, are gone."""
        low, _ = self.bounds(topic, partition)
        if offset < low:
            raise DataError(
                f"{name_of(topic, partition)}: the messages from offset {offset} to {low - 1} are gone from {self.servers}: "
                "the topic's retention has deleted them before they were trained, and they are not left out without a word. "
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
        """Raise the exception for an error of librdkafka: one that ends the job, or one that another attempt may not get."""
        text = f"{error.str()} (at {self._who()})"
        if error.fatal() or error.name() in PERMANENT:
            raise DataError(
                f"Kafka's {name} cannot be read: {text}. Check the topic's name, the servers, and the security settings in "
                "kafka(..., config={...})"
            )
        raise ConnectionError(text)

    def _drop(self) -> None:
        """Use another consumer from here on: this one's connection may be half-open."""
        self._connection = self._place = None


class _Connection:
    """A consumer of librdkafka.

    Attributes:
        errors: the last one of the connection, if any.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        from confluent_kafka import Consumer

        self.errors = errors = deque[str](maxlen=1)
        # No reference to this object: it must be freed with its owner, not by a garbage collection, maybe of another process.
        self.consumer = Consumer({**config, "error_cb": lambda error: errors.append(error.str())})
        if not _has_registered:
            os.register_at_fork(after_in_child=lambda: _inherited.extend(_connections))
            _has_registered.append(True)
        _connections.add(self)
