"""Jobs that share a GPU, with real processes and a driver that is played (`fake_nvml.py`)."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover import variables
from lightning_dlrover.colocate import devices, run_queue
from lightning_dlrover.colocate import queue as queue_module
from lightning_dlrover.colocate.dispatcher import Dispatcher, Rules
from lightning_dlrover.colocate.journal import Ended, JobSpec, Journal, Profiled, Started, read_records
from lightning_dlrover.colocate.report import summary_text
from tests.support.colocated_jobs import on_gpu, python, seated
from tests.support.fake_nvml import FakeNvml
from tests.support.waiting import eventually

MIB = 1 << 20
RULES = Rules(probe_s=0.2, grace_s=1.0)


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml(tmp_path / "gpu", (4096 * MIB,))
    (tmp_path / "gpu" / "0").mkdir(parents=True)
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    monkeypatch.setattr(queue_module, "load_nvml", lambda: made)
    return made


def ends(folder: Path, *jobs: JobSpec, **options: Any) -> dict[str, list[Ended]]:
    """Run jobs on the GPU, if there are any; return all ends of each job."""
    if jobs:
        run_queue(jobs, folder, **{"devices": ["gpu:0"], "rules": RULES, **options})
    found: dict[str, list[Ended]] = {}
    for record in read_records(folder):
        if isinstance(record, Ended):
            found.setdefault(record.job, []).append(record)
    return found


@pytest.mark.parametrize("knows_processes", [True, False])
def test_jobs_that_do_not_fit_on_the_gpu_together_train_one_after_the_other(
    knows_processes: bool, nvml: FakeNvml, tmp_path: Path
) -> None:
    nvml.knows_processes = knows_processes
    jobs = [on_gpu(seated(f"job-{number}", 50, 20, steps=60), nvml.folder, 2000, 1900) for number in range(3)]
    summary = run_queue(jobs, tmp_path / "out", policy="fifo", devices=["gpu:0"], rules=RULES)
    found = ends(tmp_path / "out")
    assert {name: [end.result for end in each] for name, each in found.items()} == {job.name: ["done"] for job in jobs}
    trained = sorted(
        (span for each in found.values() for span in each[-1].spans if span.phase == "running"), key=lambda span: span.began
    )
    # 90 % of 4 GiB are for jobs, and a job of a known peak is charged with 5 % more.
    assert all(late.began >= early.ended for early, late in itertools.pairwise(trained))
    assert [each[-1].gpu_peak_bytes for each in found.values()] == [1900 * MIB] * 3
    assert "GPU 1900" in summary_text(summary)


@pytest.mark.parametrize("used_mib", [2000, 2400])
def test_job_that_lies_about_its_gpu_memory_makes_no_other_wait(used_mib: int, nvml: FakeNvml, tmp_path: Path) -> None:
    honest = on_gpu(seated("honest", 50, 20, steps=150), nvml.folder, 1400, 1400)
    liar = on_gpu(seated("liar", 50, 20, steps=100), nvml.folder, 300, used_mib)
    found = ends(tmp_path / "out", honest, liar, policy="fifo")
    assert [end.result for end in found["honest"]] == ["done"]
    assert found["liar"][-1].result == "done"
    was_paused = any(span.phase == "paused" for end in found["liar"] for span in end.spans)
    assert was_paused or found["liar"][0].result == "evicted"
    assert not any(span.phase == "paused" for span in found["honest"][0].spans)


def test_job_of_unknown_peak_has_the_gpu_for_its_first_steps_and_then_its_peak(nvml: FakeNvml, tmp_path: Path) -> None:
    charges: list[tuple[int, int]] = []

    def see(dispatcher: Dispatcher) -> None:
        charges.extend((job.num_steps, job.charges["gpu"]) for job in dispatcher.running.values() if job.phase == "running")

    job = on_gpu(seated("job", 50, 20, steps=200), nvml.folder, 0, 1000)
    (end,) = ends(tmp_path / "out", job, policy="fifo", shown=see)["job"]
    assert (end.result, end.gpu_peak_bytes) == ("done", 1000 * MIB)
    assert {charge for steps, charge in charges if steps == 0} == {int(0.9 * 4096 * MIB)}
    assert {charge for steps, charge in charges if steps > 50} == {1250 * MIB}


def test_next_dispatcher_of_a_queue_has_the_gpu_memory_of_its_former_jobs(nvml: FakeNvml, tmp_path: Path) -> None:
    with Journal(tmp_path / "out") as journal:
        mark = journal.queue
    holds = "import os, sys, time; open(f'{sys.argv[1]}/{os.getpid()}', 'w').write(str(3900 << 20)); time.sleep(600)"
    environment = {**os.environ, variables.QUEUE: mark}
    with subprocess.Popen([sys.executable, "-c", holds, str(nvml.folder / "0")], env=environment) as former:
        try:
            eventually(lambda: nvml.nvmlDeviceGetMemoryInfo(0).used, "a former job's memory")
            found = ends(tmp_path / "out", on_gpu(seated("job", 50, 20), nvml.folder, 2000, 1900))
        finally:
            former.kill()
    assert [end.result for end in found["job"]] == ["done"]


def test_jobs_on_a_gpu_and_on_cores_share_a_queue_and_see_their_own_devices(nvml: FakeNvml, tmp_path: Path) -> None:
    shown = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], sorted(os.sched_getaffinity(0)))"
    jobs = [
        python("any", shown),
        JobSpec("cores", (sys.executable, "-c", shown), "/", device="cpu"),
        JobSpec("gpu", (sys.executable, "-c", shown), "/", device="gpu"),
    ]
    run_queue(jobs, tmp_path / "out", devices=["cpu", "gpu:0"], rules=RULES)
    output = {job.name: (tmp_path / "out/jobs" / job.name / "1/output.log").read_text().strip() for job in jobs}
    assert output["gpu"] == output["any"]
    assert output["gpu"].startswith("GPU-0abc [")
    assert output["cores"].startswith("[")
    assert not {*output["cores"].strip("[]").split(", ")} & {*output["gpu"].partition("[")[2].strip("]").split(", ")}


def test_jobs_of_any_device_run_on_the_gpu_and_on_cores(nvml: FakeNvml, tmp_path: Path) -> None:
    jobs = [seated(f"job-{number}", 50, 20, steps=50) for number in range(4)]
    found = ends(tmp_path / "out", *jobs, policy="fifo", devices=["gpu:0", "cpu"], max_parallel=1)
    records = read_records(tmp_path / "out")
    assert {record.device for record in records if isinstance(record, Started)} == {"cpu", "gpu:0"}
    assert {end.where for of_job in found.values() for end in of_job} == {"cpu", "gpu"}
    assert [of_job[-1].result for of_job in found.values()] == ["done"] * 4


def test_device_that_no_job_asks_for_takes_no_cores(nvml: FakeNvml, tmp_path: Path) -> None:
    job = replace(python("job", "import os; print(*sorted(os.sched_getaffinity(0)))"), device="gpu")
    run_queue([job], tmp_path / "out", devices=["cpu", "gpu:0"])
    output = (tmp_path / "out/jobs/job/1/output.log").read_text()
    assert {*map(int, output.split())} == os.sched_getaffinity(0)


@pytest.mark.parametrize(("busy", "result"), [(40, "done"), (0, "failed")])
def test_command_hangs_only_if_its_gpu_is_idle_too(busy: int, result: str, nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.busy = busy
    waits = f"import os, time; open({str(nvml.folder / '0')!r} + f'/{{os.getpid()}}', 'w').write('1000'); time.sleep(2.5)"
    (end,) = ends(tmp_path / "out", python("job", waits), rules=replace(RULES, hang_s=1.0))["job"]
    assert end.result == result
    assert ("it hangs" in end.reason) == (result == "failed")


def test_profile_of_a_kind_holds_the_time_in_which_the_gpu_was_busy(nvml: FakeNvml, tmp_path: Path) -> None:
    jobs = [on_gpu(seated("long", 50, 20, steps=500), nvml.folder, 500, 400)]
    run_queue(jobs, tmp_path / "out", devices=["gpu:0"], rules=RULES)
    profiles = [record for record in read_records(tmp_path / "out") if isinstance(record, Profiled)]
    assert profiles
    assert {record.device_kind for record in profiles} == {"Fake 4G"}
    assert profiles[-1].use["gpu"] == pytest.approx(0.4, abs=0.02)
    assert profiles[-1].use["cores"] < 0.5


def test_job_for_a_device_that_the_queue_lacks_is_refused(nvml: FakeNvml, tmp_path: Path) -> None:
    job = JobSpec("on-cores", ("true",), "/", device="cpu")
    with pytest.raises(ValueError, match="job 'on-cores' asks for device 'cpu'; --devices has only gpu:0"):
        run_queue([job], tmp_path / "out", devices=["gpu:0"])
