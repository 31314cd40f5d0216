"""Detection of workers that are certainly gone."""

from __future__ import annotations

import functools
import os
import random
import resource
import socket
import time
from contextlib import ExitStack

import pytest

from lightning_dlrover.rdzv.job.records import WorkerRecord
from lightning_dlrover.rdzv.membership.rounds import Answer, answers, dead_beside, dead_workers, silent_workers


def test_only_a_port_that_refuses_proves_a_death() -> None:
    def record(name: str, address: str, port: int) -> WorkerRecord:
        return WorkerRecord(name, "agent", "host", 1, 0, address, port, "active")

    with ExitStack() as stack:
        alive = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # a full queue: it answers no connection, like a lost host
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(silent.getsockname())
        with socket.create_server(("127.0.0.1", 0)) as closing:
            gone = closing.getsockname()[1]
        records = [
            record("alive", "127.0.0.1", alive.getsockname()[1]),
            record("dead", "127.0.0.1", gone),
            record("silent", "127.0.0.1", silent.getsockname()[1]),
            record("unknown", "no-such-host.invalid", 9),
        ]
        began = time.monotonic()
        assert dead_workers(records) == ["dead"]
        assert silent_workers(records) == ["silent", "unknown"]
        assert time.monotonic() - began < 5.0


def test_process_without_room_for_open_files_says_nothing_of_workers_that_it_cannot_ask() -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = silent.getsockname()[1]
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(silent.getsockname())
        records = [WorkerRecord(f"w{i}", "agent", "host", 1, 0, "127.0.0.1", port, "active") for i in range(90)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(silent.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 10, limits[1]))
        try:
            found = answers(records, 0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert set(found.values()) == {"silent"}
    assert len(found) < len(records)


def ring(size: int) -> list[str]:
    return [f"w{number}" for number in range(size)]


@pytest.mark.parametrize("size", [2, 3, 17, 200])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
def test_living_workers_find_all_dead_ones_together(size: int, share: float) -> None:
    dice = random.Random(size)
    for _ in range(20):
        workers = ring(size)
        dead = {w for w in workers[1:] if dice.random() < share}
        found: set[str] = set()
        for living in set(workers) - dead:
            found.update(dead_beside(living, workers, workers, functools.partial(answers_of, dead=dead)))
        assert found == dead


def test_last_living_worker_finds_all_others_dead() -> None:
    workers = ring(200)
    assert set(dead_beside("w7", workers, workers, lambda asked: answers_of(asked, set(workers)))) == {*workers} - {"w7"}


@pytest.mark.parametrize("size", [20, 200, 2000])
def test_number_of_probes_does_not_grow_with_the_ring(size: int) -> None:
    probed: list[str] = []

    def knock(asked: list[str]) -> dict[str, Answer]:
        probed.extend(asked)
        return answers_of(asked, {"w6"})

    assert dead_beside("w5", ring(size), ring(size), knock) == ["w6"]
    assert probed == ["w6", "w7", "w8"]


def test_answer_of_a_worker_that_does_not_probe_is_not_enough() -> None:
    workers = [*ring(3), "leaver"]
    assert dead_beside("w2", workers, ring(3), lambda asked: answers_of(asked, {"w0"})) == ["w0"]


def test_worker_whose_answer_proves_nothing_is_passed_over() -> None:
    def knock(asked: list[str]) -> dict[str, Answer]:
        return {w: answer for w, answer in answers_of(asked, {"w1", "w2"}).items() if w != "w1"}

    assert dead_beside("w0", ring(4), ring(4), knock) == ["w2"]


def answers_of(workers: list[str], dead: set[str]) -> dict[str, Answer]:
    return {w: "refuses" if w in dead else "accepts" for w in workers}
