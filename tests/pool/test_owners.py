"""Fairness among the owners of a pool's jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.pool.budget import Owners, PoolJob, Rate, Resources, queue_in_order, weighed
from lightning_dlrover.pool.decisions import Rules, choose
from tests.support.pool_of_owners import Flood, PoolOfOwners

CORE = Resources(1.0)
LONGEST_S = 10
POLICIES = ("jct", "sia", "as-requested")


def job(name: str, owner: str, held: int = 0, fewest: int = 1, most: int = 4, **more: object) -> PoolJob:
    """A job of `most` cores at most; one that runs gains by each of them."""
    rates = tuple(Rate(n, n**0.9, n**0.9, n**0.9) for n in range(1, most + 1)) if held else ()
    made = PoolJob(name, CORE, fewest, most, held, held, held, rates=rates, owner=owner)
    return replace(made, **more)  # type: ignore[arg-type]


def sizes(jobs: list[PoolJob], rules: Rules, now_s: float = 50.0) -> dict[str, int]:
    return dict(choose(jobs, rules, now_s, may_grow=True).wanted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spread", [0, 3])
def test_job_behind_two_hundred_of_another_owner_starts_within_the_length_of_one(policy: str, spread: int) -> None:
    pool = PoolOfOwners(Rules(Resources(64.0), policy, 1000.0, Owners({"b": 100.0})))
    for number in range(200):
        fewest = 1 + number % 4
        pool.submit("a", fewest, fewest + spread, length_s=1 + number % LONGEST_S, priority=9)
    for _ in range(5):
        pool.step()
    last = pool.submit("b", 4, 4, length_s=5)
    for _ in range(LONGEST_S):
        pool.step()
    has_started = last not in pool.jobs or pool.jobs[last].held == 4
    assert has_started


@settings(max_examples=10, deadline=None)
@given(st.data(), st.sampled_from(POLICIES), st.integers(8, 20), st.integers(0, 1 << 20))
def test_owner_with_jobs_that_wait_gets_its_part_of_the_device_time(
    data: st.DataObject, policy: str, cores: int, seed: int
) -> None:
    """From one job's length on, its mean is the part of its weight, less at most one of its jobs."""
    weights = dict(
        zip("abcd", data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4)), strict=False)
    )
    parts = {owner: cores * weight / sum(weights.values()) for owner, weight in weights.items()}
    floods = {}
    for owner, part in parts.items():
        fewest = data.draw(st.integers(1, max(1, int(part))))
        # A rigid policy counts a job with its most workers, and a job larger than its owner's part may take that of others.
        spread = 3 if policy != "as-requested" else max(0, min(3, int(part) - fewest))
        from_s = 0.0 if owner == "a" else float(data.draw(st.integers(1, 20)))
        floods[owner] = Flood(from_s, fewest, data.draw(st.sampled_from([0, spread])), LONGEST_S)
    max_wait_s = data.draw(st.sampled_from([15.0, 1000.0]))
    pool = PoolOfOwners(Rules(Resources(float(cores)), policy, max_wait_s, Owners(weights)), floods, seed)
    held: dict[str, list[int]] = {owner: [] for owner in weights}
    while pool.now_s < 90:
        pool.step()
        for owner, flood in floods.items():
            if pool.now_s > flood.from_s + LONGEST_S:
                held[owner].append(pool.held(owner))
    for owner, had in held.items():
        assert sum(had) / len(had) >= parts[owner] - floods[owner].most_fewest - floods[owner].spread


def test_owner_of_large_jobs_has_no_more_than_its_part_where_all_wait_longer_than_the_bound() -> None:
    floods = {"a": Flood(most_fewest=7, longest_s=LONGEST_S), "b": Flood(from_s=15.0, most_fewest=1, longest_s=LONGEST_S)}
    pool, held = PoolOfOwners(Rules(Resources(18.0), "jct", 15.0), floods, seed=158), []
    while pool.now_s < 90:
        pool.step()
        held.append(pool.held("b"))
    assert sum(held[25:]) / len(held[25:]) >= 8


def test_owner_of_many_or_urgent_jobs_gets_no_more_of_the_room_that_is_left() -> None:
    several = [job(f"a{number}", "a", 1, priority=9) for number in range(4)]
    assert sizes([*several, job("b", "b", 1, most=8)], Rules(Resources(8.0)))["b"] == 4


def test_owner_with_many_jobs_has_the_weight_of_one_with_few() -> None:
    jobs = [job("a1", "a", weight=2.0), job("a2", "a", priority=5), job("b", "b", priority=1), job("c", "c", weight=9.0)]
    seen = weighed(jobs, Owners({"b": 2.0}))
    assert [each.weight for each in seen] == pytest.approx([2 / 3, 1 / 3, 2.0, 1.0])
    assert [each.priority for each in seen] == [-1, 0, 0, 0]


def test_priority_takes_back_all_but_the_fewest_workers_of_its_owners_jobs_and_stops_none() -> None:
    low, high = job("low", "a", 4, fewest=2), job("high", "a", fewest=2, priority=9)
    assert sizes([low, high], Rules(Resources(4.0))) == {"low": 2, "high": 2}
    assert sizes([low, replace(high, min_workers=3)], Rules(Resources(4.0)))["high"] == 0


def test_job_whose_owner_has_its_turn_holds_back_those_of_others_but_not_smaller_ones_of_its_own() -> None:
    runs = job("runs", "b", 3, most=3, min_workers=3)
    large, small = job("large", "a", fewest=2, most=2), job("small", "a", most=1, submitted_s=1.0)
    other = job("other", "b", most=1)
    assert sizes([runs, large, other], Rules(Resources(4.0))) == {"runs": 3, "large": 0, "other": 0}
    assert sizes([runs, large, other, small], Rules(Resources(4.0))) == {"runs": 3, "large": 0, "other": 0, "small": 1}


def test_queue_tells_a_job_that_could_start_whose_turn_is_before_it() -> None:
    runs = job("runs", "b", 3, most=3, min_workers=3, samples_left=3**0.9 * 60)
    large, other = job("large", "a", fewest=2, most=2), job("other", "b", most=1)
    waits = choose([runs, large, other], Rules(Resources(4.0)), 50.0, may_grow=True).waits
    assert [wait.name for wait in waits] == ["large", "other"]
    assert [wait.expected_s for wait in waits] == pytest.approx([60.0, 60.0])
    assert waits[1].reason == "owner a has its turn first, with large"


def test_job_larger_than_its_owners_part_starts_after_the_bound_in_a_flood_of_two_others() -> None:
    floods = {owner: Flood(most_fewest=1, longest_s=LONGEST_S) for owner in ("b", "c")}
    pool = PoolOfOwners(Rules(Resources(9.0), "as-requested", 30.0), floods)
    large = pool.submit("a", 8, 8, length_s=5)
    while pool.jobs[large].is_waiting:
        pool.step()
        assert pool.now_s <= 30 + LONGEST_S + 2


def test_next_start_goes_to_the_owner_with_the_least_of_its_dominant_resource() -> None:
    """Three cores of 8 are less than one GPU of 2."""
    runs = [job("a1", "a", 2), job("b1", "b", 1, needs=Resources(1.0, gpus=1.0))]
    waiting = [job("b2", "b", priority=9), job("a2", "a", submitted_s=9.0)]
    queue = queue_in_order([*runs, *waiting], Resources(8.0, gpus=2.0), Owners(), 50.0, 100.0)
    assert [each.name for each in queue.jobs] == ["a2", "b2"]


def test_rigid_policy_counts_workers_that_it_never_takes_back() -> None:
    jobs = [job("a1", "a", 4), job("a2", "a"), job("b", "b", fewest=4, submitted_s=1.0)]
    assert sizes(jobs, Rules(Resources(8.0), "as-requested")) == {"a1": 4, "a2": 0, "b": 4}


QUOTA = Rules(Resources(8.0), owners=Owners(quotas={"a": Resources(3.0, float("inf"), float("inf"))}))


def test_owner_grows_to_its_quota_and_the_others_get_the_rest() -> None:
    found = sizes([job("a1", "a", 1), job("a2", "a", 1), job("b", "b", 1, most=8)], QUOTA)
    assert found["b"] >= 5
    assert sum(found.values()) == 8
    assert sizes([job("a1", "a", 1), job("b", "b", 1)], QUOTA) == {"a1": 3, "b": 4}


def test_job_beyond_the_quota_of_its_owner_waits_and_holds_back_no_other() -> None:
    runs = job("a1", "a", 2, most=2, min_workers=2)
    found = choose([runs, job("a2", "a", fewest=2), job("b", "b", submitted_s=1.0)], QUOTA, 50.0, may_grow=True)
    assert (found.wanted["a2"], found.wanted["b"]) == (0, 4)
    [wait] = found.waits
    assert wait.reason == "it needs 2 cores, and with the jobs before it owner a has its quota of 3 cores"
    refused = choose([job("a3", "a", fewest=4)], QUOTA, 50.0, may_grow=True).refused
    assert refused == {"a3": "its 4 workers need 4 cores, and the quota of owner a is 3 cores"}


def test_quota_that_has_become_smaller_takes_workers_back() -> None:
    assert sizes([job("a1", "a", 4), job("a2", "a", 4)], QUOTA) in ({"a1": 2, "a2": 1}, {"a1": 1, "a2": 2})
