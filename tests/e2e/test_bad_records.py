"""Garbage under a job's prefix, other releases and unresponsive endpoints cause a clear error and do not harm the job."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable

import pytest
from harness import Job, violations
from toy_job import ToySettings

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import (
    JobRecord,
    Keys,
    RoundRecord,
    decode,
    encode,
)

MakeJob = Callable[..., Job]

LONG = ToySettings(max_epochs=8, step_s=0.02)

GARBAGE = {
    "not JSON": b"\xff\x00 surely not JSON",
    "not a record": b'["a", "list"]',
    "a field is missing": b'{"v":1}',
    "another format": b'{"v":99,"phase":"training"}',
}


@pytest.mark.parametrize("place", ["job", "round"])
def test_garbage_in_a_record_of_a_running_job_does_not_stop_it(place: str, make_job: MakeJob, client: EtcdClient) -> None:
    job = make_job(LONG)
    job.start()
    job.start()
    job.wait_for_world(2, since=0)
    client.put(Keys(job.run_id).live + place, GARBAGE["not JSON"])
    job.wait_for_step(job.step + 20)
    assert job.finish() == [0, 0]
    assert violations(job, LONG) == []


@pytest.mark.parametrize("place", ["plan", "convener", "workers/stranger", "agents/stranger", "drains/stranger"])
def test_garbage_in_a_record_does_not_keep_a_job_from_changing(place: str, make_job: MakeJob, client: EtcdClient) -> None:
    job = make_job(LONG)
    first = job.start()
    job.wait_for_step(1)
    client.put(Keys(job.run_id).live + place, GARBAGE["not JSON"])
    job.start()
    job.wait_for_world(2)
    first.terminate()
    job.wait_for_world(1)
    assert job.finish() == [0, 0]
    assert violations(job, LONG) == []


@pytest.mark.parametrize("kind", list(GARBAGE))
def test_job_with_an_unreadable_record_is_not_joined(kind: str, make_job: MakeJob, client: EtcdClient) -> None:
    job = make_job(LONG)
    client.put(Keys(job.run_id).job, GARBAGE[kind])
    worker = job.start()
    assert worker.wait() == 1
    assert f"run '{job.run_id}' cannot be joined" in worker.output
    assert Keys(job.run_id).job in worker.output
    entry = client.get(Keys(job.run_id).job)
    assert entry is not None
    assert entry.value == GARBAGE[kind]


def test_a_worker_of_another_release_is_refused_and_the_job_goes_on(make_job: MakeJob, client: EtcdClient) -> None:
    job = make_job(LONG)
    job.start()
    job.wait_for_step(1)
    key = Keys(job.run_id).job
    entry = client.get(key)
    assert entry is not None
    client.put(key, encode(dataclasses.replace(decode(JobRecord, entry.value, key), version="9.9.9")))
    stranger = job.start()
    assert stranger.wait() == 1
    assert "is run by lightning-dlrover 9.9.9, this worker has" in stranger.output
    assert "install the same release on every node" in stranger.output
    assert job.finish() == [0, 1]


def test_a_round_written_by_another_release_is_left_alone(make_job: MakeJob, client: EtcdClient) -> None:
    """A newer format neither stops the job nor is overwritten with an older one."""
    job = make_job(LONG)
    job.start()
    job.wait_for_step(1)
    key = Keys(job.run_id).round
    entry = client.get(key)
    assert entry is not None
    newer = {**json.loads(encode(decode(RoundRecord, entry.value, key))), "v": 2}
    client.put(key, json.dumps(newer).encode())
    stranger = job.start()
    assert stranger.wait() == 1
    assert "format version 2" in stranger.output
    assert job.finish() == [0, 1]
    assert violations(job, LONG) == []


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "no-such-host.invalid:2379"])
def test_an_endpoint_that_does_not_answer_is_an_error_within_seconds(endpoint: str, make_job: MakeJob) -> None:
    job = make_job(ToySettings(), endpoint=endpoint)
    began = time.monotonic()
    worker = job.start()
    assert worker.wait() == 1
    assert time.monotonic() - began < 20
    assert endpoint in worker.output
    assert worker.output.rstrip().splitlines()[-1].startswith("lightning_dlrover.rdzv.etcd.errors.EtcdUnavailableError")


def test_jobs_whose_names_share_a_prefix_do_not_meet(make_job: MakeJob, client: EtcdClient) -> None:
    """Growth and loss in one job do not affect the other."""
    one, other = make_job(LONG), make_job(LONG)
    other.run_id = one.run_id + "1"
    one.start(), other.start()
    one.wait_for_step(1)
    other.wait_for_step(1)
    joiner = one.start()
    one.wait_until(lambda: joiner.records("done"), "a step of the joiner")
    joiner.kill()
    one.wait_for_world(1)
    assert one.finish() == [0, -9]
    assert other.finish() == [0]
    assert violations(one, LONG) == []
    assert violations(other, LONG) == []
    assert {record["world"] for record in other.records("done")} == {1}
    mine, theirs = (Keys(job.run_id).root for job in (one, other))
    owners = {r["pid"]: job.run_id for job in (one, other) for r in job.records("done")}
    assert len(owners) == 3
    assert all(entry.key.startswith(mine) != entry.key.startswith(theirs) for entry in client.get_prefix(mine.rstrip("/"))[1])
