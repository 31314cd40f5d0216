"""Real jobs of a queue: those that crash, hang, lie about their memory or are killed harm no other."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover import variables
from lightning_dlrover.colocate import dispatcher as dispatcher_module
from lightning_dlrover.colocate.admission_client import Answer, write_answer
from lightning_dlrover.colocate.devices import families, is_program, marked
from lightning_dlrover.colocate.dispatcher import Rules
from lightning_dlrover.colocate.journal import FILE_NAME, Ended, JobSpec, Journal, Profiled, read_records
from lightning_dlrover.colocate.running import OUTPUT
from tests.support.colocated_jobs import SEATED, dispatcher, place, python, seated
from tests.support.waiting import eventually, run_until

TIMEOUT_S = 60.0

HOARDER = "x = bytearray({mib} << 20)\nx[::4096] = b'x' * len(x[::4096])\nimport time\ntime.sleep({seconds})"


def results(folder: Path) -> dict[str, list[str]]:
    """Return the results of each job's attempts, from the journal."""
    found: dict[str, list[str]] = {}
    for record in read_records(folder):
        if isinstance(record, Ended):
            found.setdefault(record.job, []).append(record.result)
    return found


def run(folder: Path, *jobs: JobSpec, **options: Any) -> dict[str, list[str]]:
    """Run jobs to their ends; return the results of each job's attempts."""
    with Journal(folder) as journal:
        dispatcher(folder, journal, jobs, **options).run()
    return results(folder)


def reason(folder: Path, job: str) -> str:
    return next(record.reason for record in reversed(read_records(folder)) if isinstance(record, Ended) and record.job == job)


def test_jobs_that_crash_or_do_not_start_harm_no_other(tmp_path: Path) -> None:
    jobs = [
        seated("good", 50, 20),
        python("crash", "raise RuntimeError('boom')"),
        python("killed", "import os; os.kill(os.getpid(), 9)"),
        seated("other", 50, 20),
    ]
    assert run(tmp_path, *jobs) == {"good": ["done"], "other": ["done"], "crash": ["failed"], "killed": ["failed"]}
    assert reason(tmp_path, "crash").endswith("RuntimeError: boom")
    assert reason(tmp_path, "killed") == "killed by SIGKILL"


def test_job_without_progress_fails_as_hanging(tmp_path: Path) -> None:
    jobs = [python("hangs", "import time; time.sleep(1000)"), seated("good", 50, 20)]
    assert run(tmp_path, *jobs, rules=Rules(probe_s=0.2, grace_s=1.0, hang_s=4.0)) == {"good": ["done"], "hangs": ["failed"]}
    assert "no step and no use of a core for 4 s" in reason(tmp_path, "hangs")


def test_jobs_whose_steps_take_half_a_second_are_measured_alone(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        jobs = [seated("one", 50, 20, steps=12, step_s=0.5), seated("other", 50, 20, steps=12, step_s=0.6)]
        dispatcher(tmp_path, journal, jobs, policy="complementary").run()
    speeds = {each.job_kind: each.steps_per_s for each in read_records(tmp_path) if isinstance(each, Profiled)}
    assert speeds == {jobs[0].kind: pytest.approx(2.0, rel=0.1), jobs[1].kind: pytest.approx(1 / 0.6, rel=0.1)}


def test_job_waits_at_its_first_step_until_its_memory_is_free(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        jobs = [seated("first", 2000, 20, steps=30), seated("second", 1500, 20, steps=30)]
        made = dispatcher(tmp_path, journal, jobs, devices=[place(3200)])

        def charges() -> int:
            return sum(job.charges["host"] for job in made.running.values())

        made.look()
        run_until(made.look, lambda: any(job.phase == "asks" for job in made.running.values()), "a job that asks", TIMEOUT_S)
        while made.running:
            assert charges() <= 3200 << 20
            made.look()
    assert results(tmp_path) == {"first": ["done"], "second": ["done"]}
    spans = {record.job: record.spans for record in read_records(tmp_path) if isinstance(record, Ended)}
    trained = {job: [span for span in of_job if span.phase == "running"][-1] for job, of_job in spans.items()}
    early, late = sorted(trained.values(), key=lambda span: span.began)
    assert late.began >= early.ended


def test_job_that_has_not_seen_its_grant_yet_keeps_it(tmp_path: Path) -> None:
    until = tmp_path / "until"
    with Journal(tmp_path) as journal:
        jobs = [seated(name, mib, 20, steps=100_000, until=until) for name, mib in (("one", 2000), ("other", 1500))]
        made = dispatcher(tmp_path, journal, jobs, devices=[place(3200)])

        def phases() -> list[str]:
            return sorted(job.phase for job in made.running.values())

        try:
            run_until(made.look, lambda: phases() == ["asks", "running"], "a job that waits", TIMEOUT_S)
            waits = next(job for job in made.running.values() if job.phase == "asks")
            (report,) = waits.reports
            os.kill(report.process_id, signal.SIGSTOP)
            until.touch()
            run_until(made.look, lambda: phases() == ["running"], "the grant", TIMEOUT_S)
            granted = dict(waits.charges)
            for _ in range(3):
                made.look()
                assert waits.reports[0].waits
                assert (waits.phase, waits.charges) == ("running", granted)
                assert [span.phase for span in waits.spans] == ["starting", "asks"]
            os.kill(report.process_id, signal.SIGCONT)
        finally:
            made.run()
    assert results(tmp_path) == {"one": ["done"], "other": ["done"]}


def test_grant_that_cannot_be_written_is_given_at_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True] * 3)

    def fail_first(folder: Path, answer: Answer) -> None:
        if answer.admitted and next(failures, False):
            raise OSError(errno.ENOSPC, "no space left on device")
        write_answer(folder, answer)

    monkeypatch.setattr(dispatcher_module, "write_answer", fail_first)
    assert run(tmp_path, seated("job", 50, 20)) == {"job": ["done"]}


def test_ends_and_requests_for_memory_are_noticed_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlrover.colocate.dispatcher.LOOK_S", 1000.0)
    jobs = [seated(f"job-{number}", 50, 20, steps=3) for number in range(3)]
    assert run(tmp_path, *jobs, policy="sequential") == {job.name: ["done"] for job in jobs}


def test_jobs_end_where_processes_have_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert run(tmp_path, python("one", "pass"), python("other", "pass")) == {"one": ["done"], "other": ["done"]}


def test_job_that_needs_more_than_the_device_fails_before_its_first_step(tmp_path: Path) -> None:
    assert run(tmp_path, seated("large", 5000, 10), devices=[place(2048)]) == {"large": ["failed"]}
    assert "and the device has 2,048 MiB" in reason(tmp_path, "large")


def test_job_that_lies_about_its_memory_goes_back_and_the_others_finish(tmp_path: Path) -> None:
    until = tmp_path / "until"
    with Journal(tmp_path) as journal:
        honest = seated("honest", 1200, 100, steps=100_000, step_s=0.05, until=until)
        made = dispatcher(tmp_path, journal, [honest, seated("liar", 60, 1500, steps=60, step_s=0.05)], devices=[place(2600)])

        def is_held_back() -> bool:
            liar = made.running.get("liar")
            return "liar" in results(tmp_path) or (liar is not None and liar.phase == "paused")

        run_until(made.look, is_held_back, "more memory than expected", TIMEOUT_S)
        until.touch()
        made.run()
    found = results(tmp_path)
    assert found["honest"] == ["done"]
    assert found["liar"][-1] == "done", reason(tmp_path, "liar")
    ended = [record for record in read_records(tmp_path) if isinstance(record, Ended)]
    paused = sum(span.phase == "paused" for record in ended if record.job == "liar" for span in record.spans)
    assert paused or found["liar"][0] == "evicted"


def test_command_that_reports_nothing_is_charged_with_what_its_probe_found(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        made = dispatcher(tmp_path, journal, [python("hoarder", HOARDER.format(mib=1500, seconds=30))])
        run_until(made.look, lambda: "hoarder" in made.running, "a start", TIMEOUT_S)
        job = made.running["hoarder"]
        run_until(
            made.look, lambda: job.phase == "running" and job.charges["host"] > 1500 << 20, "the end of the probe", TIMEOUT_S
        )
        assert job.charges["host"] < 2500 << 20
        job.supervised.end(0.0)
        run_until(made.look, lambda: not made.running, "the job's end", TIMEOUT_S)


def test_second_run_of_a_kind_is_expected_to_need_what_the_first_has_needed(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        dispatcher(tmp_path, journal, [python("first", HOARDER.format(mib=300, seconds=0.6))]).run()
        again = dispatcher(tmp_path, journal, [python("second", HOARDER.format(mib=300, seconds=0.6))])
        (waiting,) = again.waiting()
    assert 300 << 20 < waiting.expected["cpu"]["host"] < 400 << 20


def test_job_of_a_measured_kind_needs_no_estimate(tmp_path: Path) -> None:
    asks = "print('estimate' if not client.needs_no_estimate else 'known', flush=True)\nclient.ask("
    program = SEATED.replace("client.ask(", asks)
    jobs = [JobSpec(name, (sys.executable, "-c", program, "50", "20", "50", "0.04"), "/") for name in ("first", "second")]
    with Journal(tmp_path) as journal:
        for job in jobs:
            dispatcher(tmp_path, journal, [job]).run()
    outputs = [(tmp_path / "jobs" / name / "1" / OUTPUT).read_text().strip() for name in ("first", "second")]
    assert outputs == ["estimate", "known"]


@contextmanager
def killed_dispatcher(folder: Path, program: str) -> Iterator[None]:
    """Run a program with a `journal` of a folder in a process of its own, and kill it at the end of the block."""
    prologue = f"""
from pathlib import Path
from tests.support.colocated_jobs import dispatcher, python, seated
from lightning_dlrover.colocate.journal import Journal
folder = Path({str(folder)!r})
journal = Journal(folder).__enter__()
"""
    parent = subprocess.Popen([sys.executable, "-c", prologue + program])
    try:
        yield
    finally:
        parent.kill()
        parent.wait(10)


def test_queue_continues_after_its_dispatcher_was_killed(tmp_path: Path) -> None:
    program = """
jobs = [seated("quick", 50, 10, steps=5), seated("long", 50, 10, steps=100_000)]
jobs.append(python("orphan", "import time; time.sleep(1000)"))
dispatcher(folder, journal, jobs).run()
"""
    with killed_dispatcher(tmp_path, program):
        eventually(lambda: (tmp_path / FILE_NAME).exists() and "quick" in results(tmp_path), "the end of the first job")
    with Journal(tmp_path) as journal:
        made = dispatcher(tmp_path, journal, [])
        assert {job.name for job in made.waiting()} == {"long", "orphan"}
        made.look()
        assert {job.attempt for job in made.running.values()} <= {2}
        made._stop()
        assert not marked(variables.QUEUE, journal.queue)
    assert results(tmp_path)["quick"] == ["done"]


def test_process_that_survived_dispatcher_and_supervisor_is_ended_by_the_next_one(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        environment = {**os.environ, variables.QUEUE: journal.queue}
        subprocess.run(["sh", "-c", "setsid sleep 100 &"], env=environment, check=True)
        # While a process starts its program, it has no environment to be found by.
        run_until(lambda: None, lambda: len(marked(variables.QUEUE, journal.queue)) == 1, "the process", TIMEOUT_S)
        dispatcher(tmp_path, journal, []).run()
        assert not marked(variables.QUEUE, journal.queue)


def test_killed_supervisor_fails_its_job_only(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        program = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '100']); time.sleep(100)"
        made = dispatcher(tmp_path, journal, [python("kept", program), seated("good", 50, 20)])
        run_until(
            made.look, lambda: "kept" in made.running and made.running["kept"].use.num_processes >= 2, "processes", TIMEOUT_S
        )
        os.kill(made.running["kept"].supervised.supervisor_pid, signal.SIGKILL)
        made.run()
        assert not marked(variables.QUEUE, journal.queue)
    assert results(tmp_path) == {"kept": ["failed"], "good": ["done"]}
    assert reason(tmp_path, "kept").startswith("its supervisor was killed")


def test_changed_job_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        dispatcher(tmp_path, journal, [python("a", "pass")])
        with pytest.raises(ValueError, match="job 'a' is in the queue"):
            dispatcher(tmp_path, journal, [python("a", "print()")])


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (JobSpec("odd", ("true",), "/nonexistent"), "cannot be started in /nonexistent"),
        (python("odd", "import os; os.kill(os.getpid(), 40)"), "killed by signal 40"),
        (python("odd", "import os; os.mkfifo(os.environ['DLROVER_SEAT'] + '/progress-0')"), ""),
        (python("odd", "import os; open(os.environ['DLROVER_SEAT'] + '/progress-0', 'w').write('[' * 60_000)"), ""),
        (python("odd", "import os, shutil; shutil.rmtree(os.path.dirname(os.environ['DLROVER_SEAT']))"), ""),
    ],
)
def test_odd_job_harms_no_other(tmp_path: Path, job: JobSpec, message: str) -> None:
    assert run(tmp_path, job, seated("good", 50, 20)) == {"good": ["done"], "odd": ["failed" if message else "done"]}
    assert message in reason(tmp_path, "odd")


def test_jobs_start_on_a_device_smaller_than_the_usual_allowance(tmp_path: Path) -> None:
    assert run(tmp_path, seated("a", 50, 20), seated("b", 50, 20), devices=[place(700)]) == {"a": ["done"], "b": ["done"]}


def test_job_that_ended_after_its_dispatcher_was_killed_is_done(tmp_path: Path) -> None:
    marker = tmp_path / "runs"
    program = f"""
import time
ends_in_its_grace = "import time; time.sleep(0.3); open({str(marker)!r}, 'a').write('x')"
dispatcher(folder, journal, [python("short", ends_in_its_grace)]).look()
time.sleep(60)
"""
    with killed_dispatcher(tmp_path, program):
        eventually(lambda: (tmp_path / "jobs/short/1/result.json").exists(), "the job's end")
    with Journal(tmp_path) as journal:
        dispatcher(tmp_path, journal, []).run()
    assert results(tmp_path) == {"short": ["done"]}
    assert marker.read_text() == "x"


def test_job_that_is_done_before_it_is_asked_to_end_stays_done(tmp_path: Path) -> None:
    leaves_a_child = "import subprocess; subprocess.Popen(['sleep', '100'])"
    with Journal(tmp_path) as journal:
        made = dispatcher(tmp_path, journal, [python("parent", leaves_a_child)])
        made.look()
        job = made.running["parent"]

        def is_left_behind() -> bool:
            below = families([job.supervised.supervisor_pid])[job.supervised.supervisor_pid]
            return len(below) == 1 and is_program(below[0], "sleep")

        eventually(is_left_behind, "the end of the command, which its supervisor has reaped")
        made._stop()
    assert results(tmp_path) == {"parent": ["done"]}
