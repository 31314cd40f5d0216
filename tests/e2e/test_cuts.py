"""Workers that lose etcd, but not each other: for less than two leases nobody is evicted; after that nobody does harm."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from faulty_etcd import EtcdProxy
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy, variables
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import CheckpointRecord, Keys
from tests.e2e.harness import Job, Worker
from tests.e2e.history import History, history_violations
from tests.e2e.plain_loop import PlainSettings, run_plain_loop
from tests.e2e.test_plain_loop import assert_everyone_counted_the_same
from tests.e2e.toy_job import Recorder, Rows

LEASE_S, CUTS_S = (5, [0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0]) if os.environ.get("DLROVER_ALL_FAULTS") else (2, [1.2, 3.2])

LONG_CUTS = (
    list(itertools.product((0, 1), (10.0, 12.0, 25.0), (False, True)))
    if LEASE_S == 5
    else [(0, 7.0, False), (0, 4.8, True), (1, 4.8, False), (1, 10.0, True)]
)
"""Number of spares, seconds of a cut for more than two leases, and whether it is of all members.

After four leases nothing but the wait for missing members keeps a spare from starting the job again.
"""

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
        elected = job.coordinator
        coordinators = [worker for worker in members if f"-{worker.pid}-" in elected]
        for who in (coordinators, members) if LEASE_S < 5 else (members[:1], coordinators, members):
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


@pytest.mark.timeout(420)
def test_longer_cut_may_cost_a_worker_its_place_but_never_the_jobs_state(
    make_job: Callable[..., Job], etcd: EmbeddedEtcd, client: EtcdClient
) -> None:
    """First without a spare, then with one that is never cut off."""
    job = make_job(None, script=train_and_save, min_workers=1, max_workers=2, lease_ttl_s=LEASE_S)
    history = History(etcd.endpoint, job.run_id)
    saved = job.folder / "saved" / "last.ckpt"
    with contextlib.ExitStack() as stack:
        cut = Cut(job, lambda: stack.enter_context(EtcdProxy(etcd.endpoint)))
        for num_spares, seconds, is_of_all in LONG_CUTS:
            while len(of_job(job)) < 2 + num_spares:
                cut.start()
                job.wait_until(lambda: job.num_registered == len(of_job(job)), "a worker")
            job.wait_for_world(2)
            members = [worker for worker in of_job(job) if any(f"-{worker.pid}-" in member for member in job.members)]
            # The coordinator has to find that it was cut off itself; anyone else is the one that is missed.
            off = members if is_of_all else [next(w for w in members if f"-{w.pid}-" not in job.coordinator)]
            step = job.step
            with cut.off(off):
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    job.wait_for_step(job.step + 5)
            job.wait_until(lambda: job.num_registered == len(of_job(job)), "each that was cut off to return or to end")
            healed = job.step
            job.wait_for_step(healed + 20)
            assert step < healed
            job.wait_until(lambda: pid_in(saved) in {worker.pid for worker in of_job(job)}, "a checkpoint of a member")
            assert list(saved.parent.glob("last*")) == [saved]
        starts = [event.text for event in job.events("round") if event.data["kind"] == "start"]
        assert len(starts) == 1, job.report()
        assert_steps_were_made_once(job)
        assert history_violations(history.finish(), history.keys) == []
        history.close()


def of_job(job: Job) -> list[Worker]:
    return [worker for worker in job.workers if worker.exit_code is None]


def assert_steps_were_made_once(job: Job) -> None:
    """No worker has made a step that others had made before it: the state was at the newest one all the time."""
    for worker in job.workers:
        steps = [record["step"] for record in worker.records("done")]
        assert steps == sorted(set(steps)), worker.name
    assert {record["step"] for record in job.records("done")} == set(range(1, job.step + 1))


def train_and_save(recorder: Recorder, start_timeout: str | None) -> None:
    """Save every fifth step under one name; the file names the process that wrote it."""
    if start_timeout is not None:
        os.environ[variables.timeout("start_timeout")] = start_timeout

    class Saving(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any) -> Any:
            recorder.pace(0.02)
            return self.layer(batch[0]).mean()

        def on_train_batch_end(self, *_: Any) -> None:
            recorder.write("done", step=self.global_step, world=self.trainer.world_size)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["pid"] = os.getpid()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    folder = Path(recorder.place.folder)
    saving = ModelCheckpoint(folder / "saved", "last", every_n_train_steps=5, save_top_k=1, enable_version_counter=False)
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),
        callbacks=[saving],
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Saving(), DataLoader(Rows(64), batch_size=8))


def pid_in(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["pid"])


def test_worker_that_trains_on_after_others_took_the_job_over_replaces_no_checkpoint(
    make_job: Callable[..., Job], etcd: EmbeddedEtcd, client: EtcdClient
) -> None:
    job = make_job("1", script=train_and_save, min_workers=1, max_workers=1, lease_ttl_s=2)  # two leases are the least
    with EtcdProxy(etcd.endpoint) as proxy:
        ghost = job.start(endpoint=proxy.endpoint)
        saved = job.folder / "saved" / "last.ckpt"
        job.wait_until(saved.exists, "a checkpoint")
        heir = job.start()
        job.wait_until(lambda: job.num_registered == 2, "a spare")
        proxy.blackhole()
        job.wait_until(lambda: heir.step and pid_in(saved) == heir.pid, "the spare to go on from the checkpoint, and to save")
        step, writers = ghost.step, set()
        while ghost.step < step + 20:
            writers.add(pid_in(saved))
        assert writers == {heir.pid}
        (aside,) = saved.parent.glob("cut-off-*-last.ckpt")
        assert pid_in(aside) == ghost.pid
        assert list(saved.parent.glob("last*")) == [saved]  # ckpt_path="last" takes the newest of these
        proxy.heal()
        assert ghost.wait() == 1
    assert "is not replaced before it answers; until then it is" in ghost.output
    assert "no longer part of the job" in ghost.output
    record = Journal(client, Keys(job.run_id)).get(CheckpointRecord, Keys(job.run_id).checkpoint).record
    assert record is not None
    assert record.path == str(saved)
    assert pid_in(saved) == heir.pid
