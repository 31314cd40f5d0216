"""Garbage under a job's prefix, other releases and unresponsive endpoints cause a clear error and do not harm the job."""

from __future__ import annotations

import dataclasses
import json
import time

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import JobRecord, Keys, RoundRecord, decode, encode
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import violations
from tests.e2e.toy_job import ToySettings

LONG = ToySettings(max_epochs=8, step_s=0.02)

GARBAGE = {
    "not JSON": b"\xff\x00 surely not JSON",
    "not a record": b'["a", "list"]',
    "a field is missing": b'{"v":1}',
    "another format": b'{"v":99,"phase":"training"}',
}


def test_garbage_in_records_of_a_running_job_does_not_stop_it(make_job: MakeJob, client: EtcdClient) -> None:
    job = make_job(LONG)
    job.start_all(2)
    job.wait_for_world(2, since=0)
    for place in ("job", "round"):
        client.put(Keys(job.run_id).live + place, GARBAGE["not JSON"])
        job.wait_for_step(job.step + 20)
    assert job.finish() == [0, 0]
    assert violations(job, LONG) == []


def test_garbage_in_records_does_not_keep_a_job_from_changing(make_job: MakeJob, client: EtcdClient) -> None:
    settings = ToySettings(max_epochs=16, step_s=0.02)
    job = make_job(settings)
    oldest = [job.start()]
    job.wait_for_step(1)
    for place in ("plan", "convener", "workers/stranger", "agents/stranger", "drains/stranger"):
        client.put(Keys(job.run_id).live + place, GARBAGE["not JSON"])
        oldest.append(job.start())
        job.wait_for_world(2)
        oldest.pop(0).terminate()
        job.wait_for_world(1)
    assert job.finish() == [0] * 6
    assert violations(job, settings) == []


def test_job_with_an_unreadable_record_is_not_joined(make_job: MakeJob, client: EtcdClient) -> None:
    jobs = {kind: make_job(LONG) for kind in GARBAGE}
    for kind, job in jobs.items():
        client.put(Keys(job.run_id).job, GARBAGE[kind])
    workers = {kind: job.start() for kind, job in jobs.items()}
    for kind, job in jobs.items():
        assert workers[kind].wait() == 1
        assert f"run '{job.run_id}' cannot be joined" in workers[kind].output
        assert Keys(job.run_id).job in workers[kind].output
        entry = client.get(Keys(job.run_id).job)
        assert entry is not None
        assert entry.value == GARBAGE[kind]


def test_workers_and_records_of_another_release_are_refused_and_the_job_goes_on(make_job: MakeJob, client: EtcdClient) -> None:
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
    client.put(key, entry.value)

    # A newer format of the round neither stops the job nor is overwritten with an older one.
    key = Keys(job.run_id).round
    entry = client.get(key)
    assert entry is not None
    newer = json.dumps({**json.loads(encode(decode(RoundRecord, entry.value, key))), "v": 2}).encode()
    client.put(key, newer)
    stranger = job.start()
    assert stranger.wait() == 1
    assert "format version 2" in stranger.output
    entry = client.get(key)
    assert entry is not None
    assert entry.value == newer
    assert job.finish() == [0, 1, 1]
    assert violations(job, LONG) == []


def test_an_endpoint_that_does_not_answer_is_an_error_within_seconds(make_job: MakeJob) -> None:
    endpoints = ("127.0.0.1:1", "no-such-host.invalid:2379")
    began = time.monotonic()
    workers = [make_job(ToySettings(), endpoint=endpoint).start() for endpoint in endpoints]
    for endpoint, worker in zip(endpoints, workers, strict=True):
        assert worker.wait() == 1
        assert time.monotonic() - began < 20
        assert endpoint in worker.output
        assert worker.output.rstrip().splitlines()[-1].startswith("lightning_dlrover.rdzv.etcd.types.EtcdUnavailableError")


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
