"""Snapshots of a worker that was killed end with its job, though no worker of the job is left to remove them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.folders import name_of_job, remove_snapshots, short, users_folder
from lightning_dlrover.rdzv.job.records import Keys
from tests.e2e.test_dlrover_run import wait_for_first_round, wait_for_workers
from tests.support.dlrover_process import Dlrover

SCRIPT = Path(__file__).with_name("table_script.py")


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("has_own_etcd", [False, pytest.param(True, marks=pytest.mark.on_demand)])
def test_cancelling_a_job_removes_the_snapshots_of_its_killed_worker(
    dlrover: Dlrover, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path, has_own_etcd: bool
) -> None:
    disk = tmp_path / "disk"
    place = () if has_own_etcd else ("--endpoint", etcd.endpoint)

    def in_memory() -> list[Path]:
        return [*users_folder().glob(f"{short(name_of_job(Keys(run_id)))}-*/*-*-*")]

    try:
        run = dlrover.start("--workers", "1:1", *place, SCRIPT, disk, run_id=run_id)
        wait_for_first_round(run)
        [worker] = wait_for_workers(run, 1)
        run.wait_for(lambda: [*disk.glob("*/*/*-*-*")], "a snapshot on disk")
        os.kill(worker["pid"], signal.SIGKILL)
        run.wait_for_output(r"node1.*(failed|ended)|started node2")
        assert in_memory()  # no worker could remove them, and the job may still continue from them
        done = dlrover("cancel", run_id, *place)
        assert done.returncode == 0, done.stderr
        assert run.wait_for_exit(60) == 1, run.output
        assert not in_memory()
        assert not [*disk.iterdir()]
        dlrover.assert_all_ended()
    finally:
        remove_snapshots(Keys(run_id))
