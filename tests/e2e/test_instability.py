"""Jobs with workers that hang or are slow: the reports that they cause, and the delays that cause none."""

from __future__ import annotations

import re
from typing import Any

from lightning_dlrover.cli.main import main
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import EventRecord
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, Worker
from tests.e2e.unstable_jobs import UnstableSettings, train_unstable


def train(job: Job, num_workers: int) -> None:
    """Wait until `num_workers` workers have made more than the first few steps of their round, which have a longer limit."""
    job.wait_for_step(job.wait_for_world(num_workers) + 8)


def trouble(job: Job, worker: Worker, what: str) -> None:
    unfinished = job.folder / f"{worker.name}.unfinished"
    unfinished.write_text(what)
    unfinished.rename(job.folder / f"{worker.name}.trouble")
    job.wait_until(lambda: worker.records("trouble"), f"{what} in {worker.name}")


def told(job: Job, kind: str) -> EventRecord:
    return job.wait_until(lambda: next(iter(job.events(kind)), None), f"an event of kind {kind}")


def by_pid(event: EventRecord) -> dict[int, dict[str, Any]]:
    return {worker["pid"]: worker for worker in event.data["workers"]}


def test_endless_loop_in_user_code_is_reported_with_all_stacks(make_job: MakeJob) -> None:
    job = make_job(UnstableSettings(), script=train_unstable)
    workers = [job.start() for _ in range(3)]
    train(job, 3)
    trouble(job, workers[1], "spin")
    event = told(job, "hang")
    found = by_pid(event)
    assert set(found) == {worker.pid for worker in workers}
    assert event.data["missing"] == []
    spinning = found.pop(workers[1].pid)
    assert re.search(r"unstable_jobs\.py:\d+ in spin$", spinning["place"])
    assert f"rank {spinning['global_rank']} (" in event.text
    assert "in spin" in event.text
    assert (spinning["in_collective"], spinning["phase"]) == (False, "step")
    assert "in training_step" in event.data["stacks"][spinning["stack"]]
    assert [worker["in_collective"] for worker in found.values()] == [True, True]
    for worker in found.values():
        assert "backward" in event.data["stacks"][worker["stack"]]
    # One report in all: not one from every worker, and no repetition.
    assert len(job.events("hang")) == 1


def test_collective_of_one_worker_ends_all_before_it_is_a_hang(make_job: MakeJob) -> None:
    # The first steps finish before the watchdog first checks.
    job = make_job(UnstableSettings(num_steps=3000, step_s=0.001), script=train_unstable)
    workers = [job.start() for _ in range(2)]
    train(job, 2)
    trouble(job, workers[0], "wait_alone")
    assert job.finish() == [1, 1], job.report()
    for worker in workers:
        assert "MismatchError" in worker.output
        assert "in wait_alone" in worker.output


def test_a_worker_that_holds_pythons_lock_is_lost_and_writes_its_stack(make_job: MakeJob) -> None:
    job = make_job(UnstableSettings(num_steps=400, unsafe_stacks=True), script=train_unstable, lease_ttl_s=3)
    workers = [job.start() for _ in range(3)]
    train(job, 3)
    workers[2].doomed = True
    trouble(job, workers[2], "spin_in_c")
    job.wait_for_world(2)
    job.wait_until(lambda: "in spin_in_c" in workers[2].output, "the stack on standard error")
    # The first lines name the writer and the way to disable it.
    assert "DLROVER_UNSAFE_STACKS is set" in workers[2].output.partition("Timeout")[0]
    workers[2].kill()


def test_slow_validation_checkpoints_and_first_steps_are_no_hangs(make_job: MakeJob) -> None:
    settings = UnstableSettings(num_steps=60, hang_after_s=1.0, num_val_rows=24, val_every=30, slow_s=2.0)
    job = make_job(settings, script=train_unstable)
    job.start_all(2)
    job.wait_for_step(5)
    job.start()  # joins while the others train: a joiner waits, and the round changes
    job.wait_for_world(3)
    assert job.finish() == [0, 0, 0]
    assert job.events("hang") == []


def test_a_worker_in_a_debugger_holds_the_job_up_but_that_is_no_hang(make_job: MakeJob) -> None:
    job = make_job(UnstableSettings(num_steps=100, hang_after_s=1.0), script=train_unstable)
    workers = [job.start() for _ in range(2)]
    train(job, 2)
    trouble(job, workers[1], "debug")
    fifo = job.folder / f"{workers[1].name}.commands"
    with job.wait_until(lambda: fifo if fifo.exists() else None, "the debugger").open("w") as keyboard:
        job.wait_until(lambda: "no hang" in "".join(w.output for w in workers) or _was_asked(job), "the others to ask")
        assert job.events("hang") == []
        keyboard.write("c\n")
    assert job.finish() == [0, 0]
    assert job.events("hang") == []


def _was_asked(job: Job) -> bool:
    return any(answer.phase == "debugger" for answer in job.stacks().values())


def test_dlrover_stacks_shows_the_stack_of_every_worker(make_job: MakeJob, etcd: EmbeddedEtcd, capsys: Any) -> None:
    job = make_job(UnstableSettings(num_steps=3000), script=train_unstable)
    workers = [job.start() for _ in range(2)]
    train(job, 2)
    assert main(["stacks", "--endpoint", etcd.endpoint, job.run_id]) == 0
    output = capsys.readouterr().out
    for worker in workers:
        assert re.search(rf"rank \d, .*:{worker.pid}, in (step|between|checkpoint)", output)
    assert output.count("thread MainThread:") == 2
    assert job.events("hang") == []


def test_straggler_is_only_recommended_for_replacement_without_controller(make_job: MakeJob) -> None:
    job = make_job(UnstableSettings(num_steps=3000, stragglers=("w1",)), script=train_unstable)
    workers = [job.start() for _ in range(3)]
    job.wait_for_world(3)
    event = told(job, "straggler")
    assert str(workers[1].pid) in event.text
    assert (event.data["act"], event.data["part"]) == ("recommend", "compute")
    assert 2.0 < event.data["ratio"] < 4.0
    members = job.members
    job.wait_for_step(job.step + 40)
    assert len(job.events("straggler")) == 1
    assert job.members == members
