"""Metrics of real commands, scraped over HTTP while they work."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `metrics`")

from prometheus_client.parser import text_string_to_metric_families

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.support.colocated_jobs import SEATED
from tests.support.dlrover_process import Dlrover, Run
from tests.support.waiting import eventually

SCRIPT = Path(__file__).with_name("tiny_loop.py")


def scraped(run: Run) -> dict[str, float]:
    """Return the page's values by metric, with the last label's value where there are several."""
    url = run.wait_for_output(r"metrics at (http://127\.0\.0\.1:\d+/metrics)")[1]
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            others = [value for label, value in sorted(sample.labels.items()) if label not in ("job", "pool")]
            values[" ".join([sample.name, *others])] = sample.value
    return values


def wait_for(run: Run, holds: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
    def look() -> dict[str, float] | None:
        found = scraped(run)
        return found if holds(found) else None

    return run.wait_for(look, what, 90.0)


def test_run_shows_the_loss_of_a_worker(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--metrics", 0, "--workers", "2:2", SCRIPT, "--until", until)
    first = wait_for(run, lambda found: found.get("dlrover_workers") == 2, "two workers")
    assert first["dlrover_workers_max"] == first["dlrover_workers_wanted"] == 2
    assert first["dlrover_job_phase training"] == first["dlrover_up"] == 1
    assert first["dlrover_workers_lost_total"] == 0
    victim = next(worker for worker in run.status()["workers"] if worker["rank"] == 1)
    os.kill(victim["pid"], signal.SIGKILL)
    after = wait_for(run, lambda found: found["dlrover_workers_lost_total"] == 1, "the loss of a worker")
    assert after["dlrover_rounds_total loss"] + after["dlrover_rounds_total replace"] >= 1
    run.finish(until)
    dlrover.assert_all_ended()


def test_port_in_use_is_refused_before_anything_starts(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--metrics", 0, "--workers", "1:1", SCRIPT, "--until", until)
    port = run.wait_for_output(r"metrics at http://127\.0\.0\.1:(\d+)")[1]
    refused = dlrover("run", "--rdzv-id", "other", "--metrics", port, SCRIPT)
    assert refused.returncode == 2
    assert "choose another port" in refused.stderr
    assert not (tmp_path / "runs" / "other").exists()
    run.finish(until)


def test_brain_shows_its_pool(dlrover: Dlrover, etcd: EmbeddedEtcd) -> None:
    command = [sys.executable, "-m", "lightning_dlrover.cli", "pool", "run", "--endpoint", etcd.endpoint]
    brain = dlrover.follow([*command, "--pool", "metered", "--budget", "cores=4,memory=8G", "--metrics", "0"], "brain")
    eventually(lambda: "dlrover_pool_budget cores" in scraped(brain), "the record of the process that decides", 20.0)
    found = scraped(brain)
    assert found["dlrover_pool_budget cores"] == 4
    assert found["dlrover_pool_budget memory_mb"] == 8192
    assert "dlrover_pool_budget gpus" not in found  # not limited
    assert found["dlrover_pool_jobs waiting"] == 0
    brain.process.send_signal(signal.SIGINT)
    brain.wait_for_exit()


def test_queue_shows_its_jobs(dlrover: Dlrover, tmp_path: Path) -> None:
    job = {"name": "a", "command": [sys.executable, "-c", SEATED, 30, 10, 300, 0.02]}
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": [job]}))
    command = [sys.executable, "-m", "lightning_dlrover.cli", "colocate", "jobs.yaml", "--metrics", "0"]
    queue = dlrover.follow(command, "queue")
    found = wait_for(queue, lambda found: found.get("dlrover_colocate_jobs running") == 1, "the start of the job")
    assert found["dlrover_colocate_device_jobs cpu"] == 1
    assert found["dlrover_colocate_memory_limit_bytes cpu"] >= found["dlrover_colocate_memory_charged_bytes cpu"]
    assert queue.wait_for_exit(60) == 0
