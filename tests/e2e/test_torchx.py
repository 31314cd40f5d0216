"""`torchx run` with our component on this machine: a controller as TorchX's app, and real training."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_dlrover.components import elastic
from tests.e2e.test_dlrover_run import SCRIPT, wait_for_first_round, wait_for_workers
from tests.support.dlrover_process import Dlrover, Run

COMPONENT = Path(elastic.__file__)


def torchx(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "torchx.cli.main", *map(str, arguments)]


def local_job(dlrover: Dlrover, script: Path, *arguments: object, options: Sequence[object] = ()) -> Run:
    """Start a job called `job` of one to two workers."""
    train = (f"{COMPONENT}:train", "--script", script, "--workers", "1:2", "--rdzv_id", "job", *options)
    return dlrover.follow(torchx("run", "-s", "local_cwd", *train, "--", *arguments), "job")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_that_torchx_has_started_is_resized_and_finishes(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    # The same command must also work for a cluster.
    run = local_job(dlrover, SCRIPT, "--until", until, options=("--partition", "main", "--options=--objective fastest"))
    wait_for_first_round(run)
    assert "nodes run on this machine, where these are ignored: --partition" in run.output
    assert dlrover("scale", "job", 2).returncode == 0
    wait_for_workers(run, 2)
    run.finish(until)
    assert "finished: SUCCEEDED" in run.output
    assert {"round", "scale", "finished"} <= {event.kind for event in run.events}
    dlrover.assert_all_ended()


def test_an_app_has_failed_when_its_job_has(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nraise ValueError(f'bad: {sys.argv[1:]}')\n")
    run = local_job(dlrover, script, "--lr", "0.1", "a b", "${app_id}", "$$", options=("--env", "LEVEL=1"))
    assert run.wait_for_exit(60) == 1
    assert "finished: FAILED" in run.output
    assert "ValueError: bad: ['--lr', '0.1', 'a b', '${app_id}', '$$']" in run.output
    dlrover.assert_all_ended()


@pytest.mark.on_demand
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchx_ends_all_nodes_of_the_job(dlrover: Dlrover, number: signal.Signals) -> None:
    run = local_job(dlrover, SCRIPT)
    wait_for_first_round(run)
    run.process.send_signal(number)
    assert run.wait_for_exit(30) != 0
    # TorchX kills a controller that has not ended its nodes within 10 s. The nodes then end, and etcd's folder stays.
    dlrover.wait_for_end()
    assert run.events[-1].kind != "finished"
