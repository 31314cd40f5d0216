"""The choice of the straggler, and the conditions under which its replacement pays."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.tuning.samples import OwnTimes
from lightning_dlrover.tuning.stragglers import (
    REST,
    SPEED_UNIT,
    ShareBalancer,
    Straggler,
    better_speeds,
    find_straggler,
    judge_replacement,
    own_times_of_present_shares,
)


def observed(
    compute_s: Sequence[float], num: int = 16, data_s: Sequence[float] = (), queued_s: Sequence[float] = (), noise: float = 0.05
) -> list[OwnTimes]:
    rng = random.Random(1)

    def noisy(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * max(0.1, rng.gauss(1, noise)) for value in values)

    nothing = [0.0] * len(compute_s)
    parts = [(noisy(compute_s), noisy(data_s or nothing), noisy(queued_s or nothing)) for _ in range(num)]
    return [OwnTimes(2, max(sum(times) for times in zip(*p, strict=True)) + 0.005, *p) for p in parts]


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("slow", [0, -1])
def test_one_that_takes_twice_as_long_is_named_in_a_world_of_any_size(size: int, slow: int) -> None:
    times = [0.05] * size
    times[slow] = 0.1
    found = find_straggler(observed(times))
    assert found is not None
    assert (found.global_rank, found.part) == (slow % size, "compute")
    assert found.ratio == pytest.approx(2, rel=0.15)
    assert found.lost_s == pytest.approx(0.05, rel=0.3)


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 200))])
def test_equal_workers_are_never_named_despite_varying_times(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    # Log-normal with a heavy tail: one in fifty takes five times as long.
    own = [
        tuple(0.05 * rng.lognormvariate(0, 0.2) * (5 if rng.random() < 0.02 else 1) for _ in range(size)) for _ in range(100)
    ]
    seen = [OwnTimes(2, max(times), times, (0.0,) * size, (0.0,) * size) for times in own]
    assert [find_straggler(seen[:end]) for end in range(1, 101)] == [None] * 100


def test_straggler_is_named_within_thirty_steps() -> None:
    before, after = observed([0.05] * 3, 30), observed([0.05, 0.1, 0.05], 30)
    for num_steps in (1, 2, 5):
        seen = [OwnTimes(num_steps, o.step_time_s, o.compute_s, o.data_s, o.queued_s) for o in (*before, *after)]
        named = next(n for n in range(1, 31) if find_straggler(seen[: 30 + n]) is not None)
        assert named * num_steps <= 30


def test_too_few_observations_name_no_worker() -> None:
    assert find_straggler(observed([0.05, 0.2, 0.05], 5)) is None
    assert find_straggler([]) is None


def test_worker_that_waits_for_data_is_named_for_that() -> None:
    found = find_straggler(observed([0.05] * 3, data_s=[0.001, 0.001, 0.08]))
    assert found is not None
    assert (found.global_rank, found.part) == (2, "data")
    assert "waiting for its data" in found.text


def test_lone_worker_cannot_be_a_straggler() -> None:
    assert find_straggler(observed([0.05])) is None


def test_waiting_for_cores_counts_only_on_a_host_of_its_own() -> None:
    seen = observed([0.05] * 3, queued_s=[0.0, 0.0, 0.06])
    assert find_straggler(seen, hosts=["a", "a", "a"]) is None
    found = find_straggler(seen, hosts=["a", "b", "c"])
    assert found is not None
    assert found.global_rank == 2


def test_slow_worker_without_waiting_peers_is_not_a_straggler() -> None:
    """The others need as long because they share too few cores, and this worker uses less of them."""
    seen = observed([0.05, 0.05, 0.1], queued_s=[0.06, 0.06, 0.0])
    assert find_straggler(seen, hosts=["a"] * 3) is None


def test_more_work_or_fewer_cores_do_not_make_a_straggler() -> None:
    assert find_straggler(observed([0.05, 0.05, 0.1]), loads=[1, 1, 2]) is None
    # On more cores a worker should be faster, but not in every part.
    assert find_straggler(observed([0.05, 0.05, 0.05]), loads=[1, 1, 0.25]) is None
    found = find_straggler(observed([0.05, 0.05, 0.2]), loads=[1, 1, 2])
    assert found is not None
    assert found.ratio == pytest.approx(2, rel=0.2)


def test_incomparable_times_are_refused() -> None:
    seen = observed([0.05] * 3)
    with pytest.raises(ValueError, match="2 hosts were given for 3 workers"):
        find_straggler(seen, hosts=["a", "b"])
    with pytest.raises(ValueError, match="must be above 0"):
        find_straggler(seen, loads=[1, 0, 1])
    with pytest.raises(ValueError, match="different numbers of workers"):
        find_straggler([*seen, *observed([0.05] * 2, 3)])


SLOW = Straggler(1, "compute", own_s=0.1, others_s=0.05, ratio=2.0, lost_s=0.04, step_time_s=0.1, num_steps=12)


def test_a_replacement_pays_if_it_saves_more_than_it_costs() -> None:
    assert judge_replacement(SLOW, 1000, resize_cost_s=0.5, num_earlier=0).pays  # 40 s for 0.5 s
    near_the_end = judge_replacement(SLOW, 20, resize_cost_s=0.5, num_earlier=0)
    assert not near_the_end.pays
    assert "would save 0.8 s of 2 s left and cost 0.5 s" in near_the_end.reason
    assert judge_replacement(SLOW, None, resize_cost_s=0.5, num_earlier=0).pays  # an unknown end counts as an hour away


def test_a_replacement_that_would_start_too_late_does_not_pay() -> None:
    for lead_s, pays in ((5.0, True), (15.0, False), (60.0, False)):
        found = judge_replacement(SLOW, 160, resize_cost_s=0.5, num_earlier=0, lead_s=lead_s)
        assert found.pays == pays
        assert found.saved_s == pytest.approx(0.4 * max(0.0, 16.0 - lead_s))
    assert "would save 0 s of 16 s left" in found.reason
    assert "a new worker starts in about 60 s" in found.reason


def test_replacing_again_and_again_ends() -> None:
    verdicts = [judge_replacement(SLOW, 1000, resize_cost_s=1.0, num_earlier=n).pays for n in range(10)]
    assert verdicts == sorted(verdicts, reverse=True)
    assert verdicts[0]
    assert not verdicts[-1]


def test_a_cost_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="resize_cost_s is -1"):
        judge_replacement(SLOW, 10, resize_cost_s=-1, num_earlier=0)
    with pytest.raises(ValueError, match="remaining_steps is inf"):
        judge_replacement(SLOW, float("inf"), resize_cost_s=1, num_earlier=0)


# --- shares by speed ----------------------------------------------------------------------------------------------------------


def speeds_after(
    observations: Sequence[OwnTimes], batch: int, hosts: Sequence[object] = (), largest_shares: Sequence[float] = ()
) -> tuple[int, ...] | None:
    own_s = own_times_of_present_shares(observations, hosts)
    return better_speeds(own_s, observations[-1].speeds, batch, largest_shares) if own_s is not None else None


def balanced(
    sample_s: Sequence[float],
    fixed_s: Sequence[float] = (),
    seed: int = 0,
    noise: float = 0.05,
    rounds: int = 60,
    batch: int = 960,
) -> list[tuple[int, ...]]:
    """Return the speeds after each vote of workers that need so long per sample, and so long for anything else in a step."""
    rng = random.Random(seed)
    size = len(sample_s)
    speeds: tuple[int, ...] = ()
    seen: list[OwnTimes] = []
    chosen = []
    balancer = ShareBalancer()
    for number in range(rounds):
        shares = [batch * speed / sum(speeds or (1,) * size) for speed in speeds or (1,) * size]
        exact = [n * s + c for n, s, c in zip(shares, sample_s, fixed_s or (0.0,) * size, strict=True)]
        own = tuple(seconds * math.exp(rng.gauss(0, noise)) for seconds in exact)
        seen.append(OwnTimes(4, max(own), own, (0.0,) * size, (0.0,) * size, speeds))
        found = balancer.decide(1, number, seen, batch)
        speeds = speeds if found is None else found
        chosen.append(speeds)
    return chosen


@pytest.mark.parametrize("size", [2, 3, 8])
def test_worker_at_half_speed_gets_half_as_much_as_each_other_one(size: int) -> None:
    chosen = balanced([2e-4, *[1e-4] * (size - 1)])
    assert chosen[10] != ()
    slow, *others = chosen[-1]
    assert slow == pytest.approx(min(others) / 2, rel=0.1)
    assert sum(chosen[-1]) == pytest.approx(SPEED_UNIT * size, rel=0.01)


@pytest.mark.parametrize("seed", range(30))
def test_even_workers_keep_equal_shares_despite_varying_times(seed: int) -> None:
    assert {*balanced([1e-4] * (2 + seed % 4), seed=seed, noise=0.15, rounds=100)} == {()}


def test_constant_part_of_a_step_is_corrected_by_further_changes() -> None:
    chosen = balanced([2e-4, 1e-4], fixed_s=[0.05, 0.0])
    slow, fast = chosen[-1]
    # 960 samples: 2e-4 n + 0.05 = 1e-4 (960 - n) at n = 153.
    assert slow / (slow + fast) == pytest.approx(153 / 960, abs=0.04)


def test_worker_that_becomes_slow_late_in_a_round_loses_samples_as_soon() -> None:
    before, after = observed([0.05, 0.05], 100), observed([0.1, 0.05], 24)
    found = [speeds_after([*before, *after[:number]], 64) for number in range(25)]
    assert not any(found[:6])
    assert all(found[22:])


def test_shares_are_equal_again_once_no_worker_is_slow() -> None:
    before, after = observed([0.1, 0.05]), observed([0.033, 0.067])
    assert speeds_after(before, 64) == pytest.approx((667, 1333), rel=0.05)
    evened = [OwnTimes(o.num_steps, o.step_time_s, o.compute_s, o.data_s, o.queued_s, (667, 1333)) for o in after]
    assert speeds_after([*before, *evened], 64) == ()


def test_no_share_exceeds_what_its_worker_may_take() -> None:
    seen = observed([0.2, 0.05, 0.05])
    assert speeds_after(seen, 64, largest_shares=[2, 1.1, 2]) == pytest.approx((380, 1100, 1520), rel=0.05)
    assert speeds_after(seen, 64, largest_shares=[1, 1, 1]) is None


def test_script_that_needs_equal_shares_gets_them_back() -> None:
    seen = [OwnTimes(4, 0.1, (0.1, 0.1), (0.0, 0.0), (0.0, 0.0), (500, 1500))] * 3
    assert ShareBalancer().decide(1, 3, seen, 64, largest_shares=[2, 0]) == ()
    assert ShareBalancer().decide(1, 12, observed([0.2, 0.05]), 64, largest_shares=[2, 0]) is None


@pytest.mark.parametrize(("size", "batch", "least"), [(2, 2, None), (2, 4, None), (2, 6, 2), (3, 5, 1), (3, 8, 2), (2, 64, 8)])
def test_slowest_worker_keeps_two_samples_or_as_many_as_of_equal_shares(size: int, batch: int, least: int | None) -> None:
    speeds = speeds_after(observed([0.8, *[0.05] * (size - 1)]), batch)
    if least is None:
        assert speeds is None
        return
    assert speeds is not None
    for turned in range(size):  # wherever rounding falls
        places = [*speeds[turned:], *speeds[:turned]]
        ranges = [share(batch, rank, size, places) for rank in range(size)]
        assert min(stop - start for start, stop in ranges) == least


def run_with_fixed_time(balancer: ShareBalancer, numbers: range, fixed_s: float) -> list[tuple[int, ...]]:
    """Return the speeds after each vote where one of two workers needs `fixed_s` a step, whatever its share."""
    speeds: tuple[int, ...] = ()
    seen: list[OwnTimes] = []
    chosen = []
    for number in numbers:
        own = fixed_s, 0.05 * (speeds[1] / SPEED_UNIT if speeds else 1.0)
        seen = [*seen, OwnTimes(4, max(own), own, (0.0, 0.0), (0.0, 0.0), speeds)][-100:]
        found = balancer.decide(1, number, seen, 64)
        speeds = speeds if found is None else found
        chosen.append(speeds)
    return chosen


def test_change_that_does_not_pay_is_taken_back_and_tried_less_and_less_often() -> None:
    chosen = run_with_fixed_time(ShareBalancer(), range(900), fixed_s=0.1)
    changes = [(number, speeds) for number, speeds in enumerate(chosen) if number and speeds != chosen[number - 1]]
    begun = [number for number, speeds in changes if speeds]
    assert [speeds for _, speeds in changes[1::2]] == [()] * (len(changes) // 2)
    assert [after - before > REST * 2**i for i, (before, after) in enumerate(pairwise(begun))] == [True] * (len(begun) - 1)
    assert len(begun) == 4
    assert sum(bool(speeds) for speeds in chosen) <= 0.03 * len(chosen)


def test_balancer_forgets_what_it_has_tried_in_an_earlier_round() -> None:
    balancer = ShareBalancer()
    assert not run_with_fixed_time(balancer, range(60), fixed_s=0.1)[-1]
    assert balancer.decide(1, 60, observed([0.1, 0.05]), 64) is None
    assert balancer.decide(2, 61, observed([0.1, 0.05]), 64)


def test_waiting_for_shared_cores_moves_no_samples() -> None:
    seen = observed([0.05, 0.05], queued_s=[0.05, 0.0])
    assert speeds_after(seen, 64, hosts=[0, 0]) is None
    assert speeds_after(seen, 64, hosts=[0, 1]) is not None


def test_slow_worker_with_a_small_share_is_still_a_straggler_that_costs_less() -> None:
    seen = [
        OwnTimes(o.num_steps, o.step_time_s, o.compute_s, o.data_s, o.queued_s, (500, 1250, 1250))
        for o in observed([0.05, 0.05, 0.05])
    ]
    found = find_straggler(seen)
    assert found is not None
    assert found.global_rank == 0
    assert found.ratio == pytest.approx(2.5, rel=0.1)
    # With a worker of speed 1250 in its place, the step takes 3000 / 3750 of its time.
    assert found.lost_s == pytest.approx(0.2 * found.step_time_s, rel=0.05)
