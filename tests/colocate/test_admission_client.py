from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lightning_dlrover import variables
from lightning_dlrover.colocate.admission_client import (
    AdmissionClient,
    AdmissionReport,
    Answer,
    NotAdmittedError,
    read_answer,
    read_reports,
    write_answer,
)
from tests.support.waiting import eventually


def test_job_without_a_dispatcher_has_no_client() -> None:
    assert AdmissionClient.from_environment({}, 0) is None


def test_job_waits_for_its_answer(tmp_path: Path) -> None:
    client = AdmissionClient.from_environment({variables.SEAT: str(tmp_path)}, 0)
    assert client is not None
    got: list[Answer] = []
    waiter = threading.Thread(target=lambda: got.append(client.ask(AdmissionReport(1, 0.0, estimate_bytes=7))))
    waiter.start()
    reports = eventually(lambda: read_reports(tmp_path), "the job's report", 10)
    assert (reports[0].waits, reports[0].estimate_bytes) == (True, 7)
    write_answer(tmp_path, Answer(admitted=False, threads=3))
    assert not got
    write_answer(tmp_path, Answer(admitted=True, request=1, threads=2))
    waiter.join(10)
    assert got == [Answer(True, 1, 2)]
    assert not read_reports(tmp_path)[0].waits


def test_second_request_is_not_answered_by_the_first_answer(tmp_path: Path) -> None:
    write_answer(tmp_path, Answer(admitted=True, request=1))
    with pytest.raises(NotAdmittedError):
        AdmissionClient(tmp_path, 0).ask(AdmissionReport(os.getpid(), 0.0, estimate_bytes=1), timeout_s=0.05)


def test_wait_for_an_answer_ends_with_the_need(tmp_path: Path) -> None:
    with pytest.raises(NotAdmittedError, match=r"has not admitted this job within 0 s; it needs 3 MiB"):
        AdmissionClient(tmp_path, 0).ask(
            AdmissionReport(os.getpid(), 0.0, estimate_bytes=2 << 20, estimate_margin_bytes=1 << 20), timeout_s=0.05
        )


def test_steps_of_each_process_are_counted(tmp_path: Path) -> None:
    for rank in (0, 1):
        client = AdmissionClient(tmp_path, rank)
        for _ in range(5 + rank):
            client.step_ended(0.25)
        client.report(steps_left=3, threads=2)
    first, second = read_reports(tmp_path)
    assert (first.num_steps, first.data_wait_s, first.steps_left, first.threads) == (5, 1.25, 3, 2)
    assert second.num_steps == 6


def test_unreadable_files_are_as_if_there_were_none(tmp_path: Path) -> None:
    (tmp_path / "progress-0").write_text("{")
    (tmp_path / "answer").write_text('{"admitted": 7}')
    assert read_reports(tmp_path) == []
    assert read_answer(tmp_path) == Answer()


def test_report_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    client = AdmissionClient(tmp_path / "gone", 0)
    client.step_ended(0.0)
    client.report(None, 1)
