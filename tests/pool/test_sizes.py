"""Which size each job of a pool should have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.pool.budget import UNLIMITED, Owners, PoolJob, Rate, Resources, queue_of, wanted_sizes, why_never
from lightning_dlrover.pool.decisions import elastic_divider
from lightning_dlrover.rdzv.job.sizes import WorldSizes

CORE = Resources(1.0)
MAX_WAIT_S = 100.0
OURS, USER = elastic_divider("jct", MAX_WAIT_S), elastic_divider("as-requested", MAX_WAIT_S)


def running(name: str, workers: int, speeds: list[float], most: int = 4, **more: object) -> PoolJob:
    known = tuple(Rate(n, speed, speed, speed) for n, speed in enumerate(speeds, start=1))
    job = PoolJob(name, CORE, 1, most, workers, workers, workers, rates=known)
    return replace(job, **more)  # type: ignore[arg-type]


def waiting(name: str, fewest: int = 1, most: int = 4, submitted_s: float = 0.0, priority: int = 0) -> PoolJob:
    return PoolJob(name, CORE, fewest, most, submitted_s=submitted_s, priority=priority)


def sizes(jobs: list[PoolJob], cores: float, now_s: float = 50.0, max_wait_s: float = MAX_WAIT_S) -> dict[str, int]:
    return wanted_sizes(jobs, Resources(cores), OURS, now_s, max_wait_s)


def test_cores_go_to_the_job_that_gains_more() -> None:
    steep, flat = running("steep", 1, [10, 19, 28, 37]), running("flat", 3, [10, 10.2, 10.3, 10.4])
    assert sizes([steep, flat], 4) == {"steep": 3, "flat": 1}


def test_job_set_by_hand_keeps_its_size_and_is_counted() -> None:
    steep, flat = running("steep", 1, [10, 19, 28, 37]), running("flat", 3, [10, 10.2, 10.3, 10.4], is_by_hand=True)
    assert sizes([steep, flat], 5) == {"steep": 2, "flat": 3}


def test_job_without_a_decision_keeps_its_size() -> None:
    assert sizes([running("new", 2, []), running("steep", 1, [10, 19, 28, 37])], 4) == {"new": 2, "steep": 2}


def test_running_job_shrinks_for_a_waiting_one() -> None:
    assert sizes([running("alone", 4, [10, 20, 30, 40]), waiting("fresh", most=1)], 4) == {"alone": 3, "fresh": 1}


def test_small_change_of_predictions_moves_no_job() -> None:
    long = running("long", 1, [10, 17, 23, 28], samples_left=5000.0, change_s=20.0)
    short = running("short", 3, [10, 17, 23, 28], samples_left=3000.0, change_s=20.0)
    assert sizes([long, short], 4) == {"long": 1, "short": 3}
    other = replace(short, rates=running("short", 3, [10, 17.4, 22.6, 28.5]).rates, samples_left=3100.0)
    assert sizes([long, other], 4) == {"long": 1, "short": 3}


def test_new_size_stays_for_a_while_unless_a_job_waits() -> None:
    long = running("long", 3, [10, 17, 23, 28], samples_left=5000.0, since_s=40.0)
    short = running("short", 1, [10, 17, 23, 28], samples_left=3000.0, since_s=40.0)
    assert sizes([long, short], 4) == {"long": 3, "short": 1}
    assert sizes([long, short], 5) == {"long": 3, "short": 2}
    assert sizes([long, short], 4, now_s=71.0) == {"long": 1, "short": 3}
    assert sizes([long, short, waiting("fresh", most=1)], 4)["fresh"] == 1


def test_endless_job_counts_with_all_that_it_has_had() -> None:
    """After 9 hours on 4 cores, as much again is more than the hour that the other job has left."""
    curve, hour_s = [10 * workers**0.8 for workers in range(1, 9)], 3600.0
    stream = running("stream", 4, curve, most=8)
    short = running("short", 4, curve, most=8, since_s=9 * hour_s, samples_left=10 * hour_s)
    assert sizes([stream, short], 8, now_s=10 * hour_s) == {"stream": 1, "short": 7}


def test_memory_is_kept_though_the_policy_divides_cores() -> None:
    needs = Resources(1.0, memory_mb=1000)
    jobs = [running("a", 1, [10, 20, 30, 40], needs=needs), running("b", 1, [10, 20, 30, 40], needs=needs)]
    found = wanted_sizes(jobs, Resources(8.0, memory_mb=5000), OURS, 50.0)
    assert sum(found.values()) == 5


def test_higher_priority_starts_first_but_a_long_wait_goes_before_it() -> None:
    jobs = [waiting("old", submitted_s=0.0), waiting("high", submitted_s=5.0, priority=9)]
    assert sizes(jobs, 1, now_s=10.0) == {"old": 0, "high": 1}
    assert sizes(jobs, 1, now_s=101.0) == {"old": 1, "high": 0}


def test_small_job_passes_a_large_one_until_that_has_waited_too_long() -> None:
    jobs = [running("runs", 1, [1.0], most=1), waiting("large", fewest=3), waiting("small", most=1, submitted_s=5.0)]
    assert sizes(jobs, 3, now_s=10.0) == {"runs": 1, "large": 0, "small": 1}
    assert sizes(jobs, 3, now_s=101.0) == {"runs": 1, "large": 0, "small": 0}


@given(st.integers(1, 4), st.integers(2, 6))
def test_flood_of_small_jobs_does_not_starve_a_large_one(fewest: int, cores: int) -> None:
    """Small jobs of a higher priority arrive for ever and run for 10 s each; the large one starts within bound and run."""
    fewest = min(fewest, cores)
    large, jobs, started_s = waiting("large", fewest=fewest, most=fewest), {}, None
    for second in range(400):
        now_s = float(second)
        jobs[f"small{second}"] = waiting(f"small{second}", most=1, submitted_s=now_s, priority=5)
        jobs = {n: j for n, j in jobs.items() if not (j.held and now_s - j.since_s >= 10)}
        found = wanted_sizes([large, *jobs.values()], Resources(cores), USER, now_s, 100.0)
        if found["large"]:
            started_s = now_s
            break
        for name, job in jobs.items():
            if job.is_waiting and found[name]:
                jobs[name] = replace(job, granted=1, planned=1, alive=1, since_s=now_s, rates=(Rate(1, 1, 1, 1),))
    assert started_s is not None
    assert started_s <= 112


def test_job_that_can_never_start_is_refused_with_its_needs() -> None:
    assert why_never(waiting("large", fewest=3), Resources(2.0)) == "its 3 workers need 3 cores, and the whole pool has 2 cores"
    assert why_never(waiting("large", fewest=3), UNLIMITED) == ""


def test_queue_predicts_starts_from_the_ends_of_running_jobs() -> None:
    runs = running("runs", 2, [10, 20], most=2, min_workers=2, samples_left=600.0)
    first, second = queue_of([runs, waiting("a", 2), waiting("b", 1, submitted_s=1.0)], Resources(2.0), 10.0, 100.0, Owners())
    assert (first.name, first.place, first.expected_s) == ("a", 1, 30.0)
    assert "runs has ended" in first.reason
    assert (second.name, second.place, second.expected_s) == ("b", 2, None)


@pytest.mark.parametrize("amount, text", [(Resources(1, 2, 2048), "1 core, 2 GPUs, 2 GiB"), (UNLIMITED, "nothing")])
def test_resources_are_shown_in_words(amount: Resources, text: str) -> None:
    assert amount.text == text


def sized(name: str, workers: int, listed: tuple[int, ...], speeds: list[float] | None = None) -> PoolJob:
    known = speeds or [10.0 * n**0.9 for n in range(1, 9)]
    made = running(name, workers, known, most=listed[-1], sizes=WorldSizes(listed), min_workers=listed[0])
    return made if workers else replace(made, rates=(), submitted_s=1.0)


@pytest.mark.parametrize("policy", ["jct", "sia", "as-requested"])
@given(st.data(), st.integers(4, 14))
def test_every_policy_gives_listed_sizes_only(policy: str, data: st.DataObject, cores: int) -> None:
    lists = data.draw(st.lists(st.sampled_from([(1, 2, 4, 8), (2, 4), (1, 3, 5), (3,)]), min_size=1, max_size=4))
    jobs = []
    for number, listed in enumerate(lists):
        held = data.draw(st.sampled_from([0, *range(1, listed[-1] + 1)]))  # also sizes that a loss leaves
        jobs.append(sized(f"job{number}", held, listed))
    wanted = wanted_sizes(jobs, Resources(float(cores)), elastic_divider(policy, MAX_WAIT_S), 50.0, MAX_WAIT_S)
    for job, listed in zip(jobs, lists, strict=True):
        assert wanted[job.name] in (0, *listed), (job, wanted)
        assert wanted[job.name] or job.is_waiting
    least = sum(listed[0] for job, listed in zip(jobs, lists, strict=True) if not job.is_waiting)
    assert sum(wanted.values()) <= max(cores, least)


def test_core_that_one_job_cannot_use_goes_to_another() -> None:
    speeds = [10.0, 19.0, 28.0, 37.0]
    powers, any_size = sized("powers", 1, (1, 2, 4), speeds), running("any", 1, speeds)
    assert sizes([powers, any_size], 6) in ({"powers": 2, "any": 4}, {"powers": 4, "any": 2})
    assert sizes([powers, sized("pairs", 2, (2, 4), speeds)], 7) in ({"powers": 2, "pairs": 4}, {"powers": 4, "pairs": 2})
    assert sizes([powers, sized("pairs", 2, (2, 4), speeds)], 5) == {"powers": 1, "pairs": 4}


def test_quota_cuts_to_a_listed_size() -> None:
    owners = Owners(quotas={"ads": Resources(3.0)})
    job = replace(sized("ads-job", 1, (1, 2, 4)), owner="ads")
    assert wanted_sizes([job], Resources(8.0), OURS, 50.0, MAX_WAIT_S, owners) == {"ads-job": 2}


def test_listed_sizes_of_a_large_job_on_several_cores_each_can_be_chosen() -> None:
    rates = tuple(Rate(n, speed, speed, speed) for n, speed in ((50, 50.0), (100, 100.0)))
    job = PoolJob("large", Resources(3.0), 50, 100, 50, 50, 50, rates=rates, sizes=WorldSizes((50, 77, 100)))
    assert sizes([job], 299) == {"large": 77}
