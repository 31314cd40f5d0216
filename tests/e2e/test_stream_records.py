"""`dlrover data` lists exactly the rows that a real job has trained, although workers were killed and others have joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.cli.main import main
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, violations
from tests.e2e.toy_job import ToySettings
from tests.support.spoiled_files import spoil_row_group


def asked(capsys: pytest.CaptureFixture[str], etcd: EmbeddedEtcd, job: Job, *options: str) -> dict[str, Any]:
    assert main(["data", "--json", "--endpoint", etcd.endpoint, job.run_id, *options]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["streams"]
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_on_record_are_those_that_were_trained(
    make_job: MakeJob, etcd: EmbeddedEtcd, capsys: pytest.CaptureFixture[str], accumulate: int
) -> None:
    settings = ToySettings(num_rows=101, batch_size=8, streams=True, accumulate=accumulate, max_epochs=2)
    job = make_job(settings)
    settings.write_streams(job.folder)
    job.start()
    second = job.start()
    job.wait_for_step(2)
    job.wait_until(lambda: job.events("stream"), "the record of the stream")
    answer = asked(capsys, etcd, job)
    assert answer["guarantee"] == "each row exactly once"
    assert (answer["num_rows"], answer["num_files"], answer["has_finished"]) == (101, 5, False)
    job.start()
    job.wait_for_step(5)
    second.kill()
    job.finish()
    assert violations(job, settings) == []

    answer = asked(capsys, etcd, job)
    assert answer["has_finished"]
    assert (answer["epoch"], answer["rows_done"]) == (1, 101)
    assert (answer["files_done"], answer["files_in_work"], answer["files_left"]) == (5, 0, 0)

    trained, cuts = trained_rows(job, settings), firsts(job.folder / "train")
    for step in range(1, settings.num_steps + 1):
        listed = asked(capsys, etcd, job, "--step", str(step))
        rows = [
            cuts[Path(each["file"]).name] + row
            for each in listed["rows"]
            for first_row, last_row in each["ranges"]
            for row in range(first_row, last_row + 1)
        ]
        assert sorted(rows) == sorted(trained[step])
    answer = asked(capsys, etcd, job, "--row", "1.parquet:3")
    for place in answer["places"]:
        assert place["is_done"]
        assert cuts["1.parquet"] + 3 in trained[place["step"]]
    assert [place["epoch"] for place in answer["places"]] == [0, 1]


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_rows_that_cannot_be_read_are_counted_once(
    make_job: MakeJob, etcd: EmbeddedEtcd, capsys: pytest.CaptureFixture[str], loader_workers: int
) -> None:
    settings = ToySettings(
        num_rows=403, batch_size=32, streams=True, on_error="skip", loader_workers=loader_workers, max_epochs=3
    )
    job = make_job(settings)
    settings.write_streams(job.folder)
    spoil_row_group(job.folder / "train" / "2.parquet", 3)
    job.start()
    second = job.start()
    job.wait_for_world(2, since=0)
    job.start()
    job.wait_for_world(3)
    second.kill()
    job.wait_for_world(2)
    assert job.finish()[::2] == [0, 0]

    first = firsts(job.folder / "train")["2.parquet"] + 33
    there = [n for n in range(403) if not first <= n < first + 11]
    trained = trained_rows(job, settings)
    for epoch in range(3):
        of_epoch = [trained[step] for step in range(1 + epoch * 13, 14 + epoch * 13)]
        assert sorted(row for rows in of_epoch for row in rows) == there
    answer = asked(capsys, etcd, job)
    assert (answer["rows_skipped"], answer["all_skipped_are_known"]) == (11, True)
    (skipped,) = answer["skipped"]
    assert (Path(skipped["file"]).name, skipped["ranges"]) == ("2.parquet", [[33, 44]])
    assert "row group 3 of" in skipped["reason"]
    assert main(["data", "--endpoint", etcd.endpoint, job.run_id]) == 0
    assert "11 rows skipped in " in capsys.readouterr().out
    assert len(job.events("skipped")) <= 3  # at most one for each worker


def firsts(folder: Path) -> dict[str, int]:
    """Return the id of each file's first row."""
    import pyarrow.parquet as pq

    found, first = {}, 0
    for file in sorted(folder.iterdir()):
        found[file.name] = first
        first += pq.ParquetFile(file).metadata.num_rows
    return found


def trained_rows(job: Job, settings: ToySettings) -> dict[int, list[int]]:
    """Return the ids that the workers have recorded for each step, in the round that completed it."""
    rounds = {(r["epoch"], r["batch"]): (r["step"], r["round"]) for r in job.records("done")}
    found: dict[int, set[int]] = {}
    for share in job.records("share"):
        closing = min(
            share["batch"] // settings.accumulate * settings.accumulate + settings.accumulate, settings.batches_per_epoch
        )
        step, number = rounds[share["epoch"], closing - 1]
        if share["round"] == number:
            found.setdefault(step, set()).update(share["ids"])
    return {step: list(ids) for step, ids in found.items()}
