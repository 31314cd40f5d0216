"""Workers that lose etcd, but not each other, for less than two leases. Nobody is evicted, and no state is given up."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import pytest
from faulty_etcd import EtcdProxy
from harness import Job, Worker
from history import History, history_violations
from plain_loop import PlainSettings, run_plain_loop
from test_plain_loop import assert_everyone_counted_the_same

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd

LEASE_S, CUTS_S = (5, [0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0]) if os.environ.get("DLROVER_ALL_FAULTS") else (2, [1.2, 3.2])

SETTINGS = PlainSettings(num_steps=1_000_000)  # runs until the test ends it


class Cut:
    """A job of which each worker has a connection to etcd of its own."""

    def __init__(self, job: Job, connect: Callable[[], EtcdProxy]) -> None:
        self.job = job
        self._connect = connect
        self._proxies: dict[str, EtcdProxy] = {}

    def start(self) -> Worker:
        proxy = self._connect()
        worker = self.job.start(endpoint=proxy.endpoint)
        self._proxies[worker.name] = proxy
        return worker

    @contextlib.contextmanager
    def off(self, workers: list[Worker]) -> Iterator[None]:
        for worker in workers:
            self._proxies[worker.name].blackhole()
        try:
            yield
        finally:
            for worker in workers:
                self._proxies[worker.name].heal()


@pytest.fixture
def cut(make_job: Callable[..., Job], etcd: EmbeddedEtcd) -> Iterator[Cut]:
    with contextlib.ExitStack() as stack:
        job = make_job(SETTINGS, script=run_plain_loop, min_workers=1, max_workers=2, lease_ttl_s=LEASE_S)
        yield Cut(job, lambda: stack.enter_context(EtcdProxy(etcd.endpoint)))


def test_cut_for_less_than_two_leases_costs_no_worker_its_place(cut: Cut, etcd: EmbeddedEtcd) -> None:
    """A spare is there all the time, and never cut off."""
    job = cut.job
    history = History(etcd.endpoint, job.run_id)
    members = [cut.start(), cut.start()]
    job.wait_for_world(2)
    spare = cut.start()
    job.wait_until(lambda: job.num_registered == 3 or None, "a spare")
    number = job.round_number
    for seconds in CUTS_S:
        convening = job.convener
        conveners = [worker for worker in members if f"-{worker.pid}-" in convening]
        for who in (conveners, members) if LEASE_S < 5 else (members[:1], conveners, members):
            with cut.off(who):
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    job.wait_for_step(job.step + 5)
            job.wait_for_step(job.step + 5)
            job.wait_until(lambda: job.num_registered == 3 or None, "the return of those that were cut off")
            assert job.round_number == number, (seconds, [worker.name for worker in who], job.report())
    members[0].kill()  # the rounds go on as before
    job.wait_until(lambda: (len(job.members) == 2 and job.round_number > number) or None, "the spare's turn")
    job.wait_for_step(job.step + 20)
    assert sorted(job.end()) == [-9, 0, 0]
    assert not spare.killed
    assert_everyone_counted_the_same(job, job.step)
    assert history_violations(history.finish(), history.keys) == []
    history.close()
