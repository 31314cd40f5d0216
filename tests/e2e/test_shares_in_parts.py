"""A share that does not fit into a worker's memory is computed in parts, with the result of a whole one."""

from __future__ import annotations

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, Record
from tests.e2e.parts_jobs import NUM_ROWS, PartsRun, run_in_parts, write_files

STEP_S = 0.05


def make(make_job: MakeJob, run: PartsRun) -> Job:
    job = make_job(run, script=run_in_parts)
    if run.kind == "stream":
        write_files(job.folder / "train", NUM_ROWS)
    return job


def undisturbed(make_job: MakeJob, kind: str) -> Record:
    job = make(make_job, PartsRun(kind))
    job.start()
    assert job.finish() == [0], job.report()
    return job.records("result")[0]


def assert_same(job: Job, expected: Record, rel: float = 1e-4) -> None:
    results = job.records("result")
    assert results, job.report()
    for result in results:
        assert result["step"] == expected["step"]
        assert result["weights"].keys() == expected["weights"].keys()
        for name, values in expected["weights"].items():
            assert result["weights"][name] == pytest.approx(values, rel=rel, abs=rel), name
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-4), "metrics"


@pytest.mark.parametrize("kind", ["plain", "accumulation", "scaled", "logged", "dictionaries", "stream"])
def test_shares_that_no_longer_fit_after_losses_end_as_the_undisturbed_run(kind: str, make_job: MakeJob) -> None:
    expected = undisturbed(make_job, kind)
    job = make(make_job, PartsRun(kind, room=(3, 1), step_s=STEP_S))
    num_workers = 3 if kind in ("plain", "logged") else 2  # three have uneven shares
    job.start_all(num_workers)
    job.wait_for_world(num_workers)
    for size in reversed(range(1, num_workers)):
        job.workers[size].arm("forward")
        job.wait_for_world(size)

    assert job.finish() == [0] + [-9] * (num_workers - 1), job.report()
    assert_same(job, expected, rel=5e-3 if kind == "scaled" else 1e-4)
    for worker in job.workers[:2]:
        full = [record["samples"] for record in worker.records("full")]
        assert full, "a share did not fit"
        assert full == sorted(set(full), reverse=True), "the room is remembered"


def run_of_two(make_job: MakeJob, run: PartsRun) -> Job:
    job = make_job(run, script=run_in_parts, min_workers=2)
    job.start_all(2)
    assert job.finish() == [0, 0], job.report()
    return job


@pytest.mark.parametrize("fails_in", ["backward", "logged"])
def test_all_repeat_a_step_in_which_memory_ran_out_after_a_collective(fails_in: str, make_job: MakeJob) -> None:
    expected = undisturbed(make_job, "logged")
    job = run_of_two(make_job, PartsRun("logged", room=(0, 3), fails_in=fails_in))
    assert_same(job, expected)
    assert [record["samples"] for record in job.records("full")] == [4]
    assert {record["round"] for record in job.records("done")} == {2}, "both have met again"


def test_others_wait_for_a_worker_that_starts_over_by_itself(make_job: MakeJob) -> None:
    job = run_of_two(make_job, PartsRun("logged", room=(1, 0)))
    assert_same(job, undisturbed(make_job, "logged"))
    assert [record["samples"] for record in job.records("full")] == [4, 2]
    assert {record["round"] for record in job.records("done")} == {1}


def test_limited_shares_log_and_return_what_whole_ones_do(make_job: MakeJob) -> None:
    def seen(run: PartsRun) -> dict[tuple[object, ...], dict[str, float]]:
        job = run_of_two(make_job, run)
        assert not job.records("full")
        names = ("at", "kind", "loss", "val")
        records = [*job.records("step_values"), *job.records("ended")]
        return {
            (r["kind"], r["rank"], r.get("epoch"), r["batch"]): {k: v for k, v in r.items() if k not in names or k == "loss"}
            for r in records
        }

    whole, limited = seen(PartsRun("logged")), seen(PartsRun("logged", room=(3, 3), max_share=3))
    assert whole.keys() == limited.keys()
    for place, values in whole.items():
        assert limited[place] == pytest.approx(values, rel=1e-5), place


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (PartsRun("plain", room=(-1,)), "1 samples at once, as one of 1 workers, and one sample does not fit"),
        (PartsRun("plain", room=(3,), max_share="whole"), "DLRoverStrategy(max_share='whole') rules out parts"),
        (PartsRun("manual", room=(3,)), "8 samples at once, as one of 1 workers, and manual optimization cannot be"),
        (PartsRun("opaque", max_share=3), "but batch is of type Opaque, so its samples cannot be separated"),
        (PartsRun("manual", max_share=3), "max_share=3 of DLRoverStrategy limits the samples of one pass, but manual"),
    ],
)
def test_share_that_cannot_be_computed_in_parts_is_refused(run: PartsRun, text: str, make_job: MakeJob) -> None:
    job = make_job(run, script=run_in_parts)
    job.start()
    assert job.finish() == [1]
    assert text in job.workers[0].output


@pytest.mark.parametrize("kind", ["own_parts", "in_place"])
def test_module_may_cut_and_change_its_batches_itself(kind: str, make_job: MakeJob) -> None:
    job = make_job(PartsRun(kind, room=(3,)), script=run_in_parts)
    job.start()
    assert job.finish() == [0], job.report()
    assert_same(job, undisturbed(make_job, kind))
    assert [record["samples"] for record in job.records("full")] == [8, 4]


def test_collective_of_the_users_is_refused_in_a_part(make_job: MakeJob) -> None:
    job = make_job(PartsRun("contrastive", max_share=3), script=run_in_parts, min_workers=2)
    job.start_all(2)
    assert job.finish() == [1, 1]
    assert "this worker computes its share in parts, so it would take part more often than the others" in job.workers[0].output


@pytest.mark.gpu
def test_share_that_does_not_fit_into_a_gpu_ends_as_one_that_does(make_job: MakeJob) -> None:
    jobs = [make_job(PartsRun("wide", gpu_mib=gpu_mib), script=run_in_parts) for gpu_mib in (8000, 700)]
    for job in jobs:
        job.start()
        assert job.finish() == [0], job.report()
    assert "do not fit into its memory" not in jobs[0].workers[0].output
    assert "8 samples do not fit into its memory" in jobs[1].workers[0].output
    assert_same(jobs[1], jobs[0].records("result")[0])
