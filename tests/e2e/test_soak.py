"""A job that goes through many changes: what one worker holds, and what etcd holds of the job, stay flat."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil
import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import Keys
from tests.e2e.harness import Job
from tests.e2e.plain_loop import PlainSettings, run_plain_loop
from tests.e2e.test_plain_loop import assert_everyone_counted_the_same

NUM_CHANGES = 1000 if os.environ.get("DLROVER_ALL_FAULTS") else 24
SETTINGS = PlainSettings(num_steps=1_000_000)  # runs until the test ends it


class Vitals:
    """What a worker and etcd hold between two changes."""

    def __init__(self, job: Job, client: EtcdClient) -> None:
        process, keys = psutil.Process(job.workers[0].pid), Keys(job.run_id)
        self.threads = process.num_threads()
        self.files = process.num_fds()
        self.mib = process.memory_full_info().uss / 2**20
        self.keys = client.count(keys.root) - client.count(keys.events)  # lines of the history have a bound of their own

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.files} files, {self.mib:.1f} MiB, {self.keys} keys"


@pytest.mark.timeout(60 + 3 * NUM_CHANGES)
def test_worker_that_lives_through_many_changes_holds_no_more(make_job: Callable[..., Job], client: EtcdClient) -> None:
    """Every third worker that joins is killed, the others leave."""
    job = make_job(SETTINGS, script=run_plain_loop, min_workers=1, max_workers=2)
    job.start()
    job.wait_for_world(1)
    seen = []
    for number in range(NUM_CHANGES // 2):
        joiner = job.start()
        job.wait_for_world(2)
        if number % 3:
            joiner.terminate()
        else:
            joiner.kill()
        joiner.wait()
        job.wait_for_world(1)
        seen.append(Vitals(job, client))
        print(f"{2 * number + 2} changes: {seen[-1]}", flush=True)
    tenth = max(4, len(seen) // 10)
    first, last = seen[:tenth], seen[-tenth:]
    what = f"after the first tenth {first[-1]}, at the end {last[-1]}"
    # What grows never comes back to where it was. What a busy machine adds for a while does.
    for name in ("threads", "files", "keys", "mib") if len(seen) > 100 else ("threads", "files", "keys"):
        least, most = min(getattr(each, name) for each in last), max(getattr(each, name) for each in first)
        assert least <= 1.01 * most, what
    codes = job.end()
    assert codes[0] == 0
    assert_everyone_counted_the_same(job, job.step)
