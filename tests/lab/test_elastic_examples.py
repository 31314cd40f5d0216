"""Each policy on an example that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_dlrover.lab.simulate.baselines import THRESHOLD_DEVICE_S, hesrpt_shares, make_elastic
from lightning_dlrover.tuning.cluster import Job, PolicySettings, Running, State
from tests.support.elastic_jobs import Amdahl, Table, cluster, job, numbers, running

NODE = [device.name for device in cluster(1)]
LINEAR = Table(tuple(float(n) for n in range(1, 65)))


def sizes(
    policy: str,
    waiting: list[Job],
    runs: list[Running],
    num_nodes: int = 1,
    per_node: int = 4,
    now_s: float = 1000.0,
    **settings: object,
) -> dict[str, int]:
    state = State(now_s, cluster(num_nodes, per_node), tuple(waiting), tuple(runs))
    return numbers(make_elastic(policy, PolicySettings(**settings))(state))  # type: ignore[arg-type]


def test_as_requested_starts_a_short_job_ahead_of_one_that_waits_for_devices() -> None:
    now = running(job("now", num_devices=3, scaling=LINEAR, steps_left=300.0), NODE[:3], 900.0)  # ends in 100 s
    head = job("head", num_devices=4, submitted_s=990.0, scaling=LINEAR)
    short = job("short", num_devices=1, submitted_s=995.0, steps_left=90.0, scaling=LINEAR)
    long = job("long", num_devices=1, submitted_s=995.0, steps_left=110.0, scaling=LINEAR)
    assert sizes("as-requested", [head, short], [now]) == {"now": 3, "short": 1}
    assert sizes("as-requested", [head, long], [now]) == {"now": 3}


def test_srtf_stops_a_long_job_for_a_short_one() -> None:
    long = running(job("long", num_devices=4, steps_left=1000.0), NODE, 0.0)
    assert sizes("srtf", [job("short", num_devices=4, steps_left=10.0)], [long]) == {"short": 4}
    assert sizes("srtf", [job("longer", num_devices=4, steps_left=1001.0)], [long]) == {"long": 4}


def test_elastic_srtf_gives_what_is_left_to_the_shortest_jobs_first() -> None:
    short = job("short", num_devices=2, steps_left=10.0, scaling=LINEAR, max_devices=3)
    long = job("long", num_devices=4, steps_left=1000.0, scaling=LINEAR)
    assert sizes("elastic-srtf", [short, long], [], num_nodes=1) == {"short": 2, "long": 2}
    assert sizes("elastic-srtf", [short, long], [], num_nodes=2) == {"short": 3, "long": 5}
    fixed = replace(long, min_devices=4)
    assert sizes("elastic-srtf", [short, fixed], [], num_nodes=1) == {"short": 3}
    flat = replace(short, scaling=Table((1.0, 1.0, 0.9)))
    assert sizes("elastic-srtf", [flat], [], num_nodes=1) == {"short": 2}


def test_las_puts_much_served_jobs_last_and_promotes_after_a_long_wait() -> None:
    served = job("served", num_devices=4, submitted_s=0.0, waiting_since_s=100.0, served_device_s=THRESHOLD_DEVICE_S)
    new = job("new", num_devices=4, submitted_s=900.0)
    assert sizes("las", [served, new], [], max_wait_s=1e9) == {"new": 4}
    # It ran for 14,400 s on 4 devices and is promoted when it has waited 8 times as long.
    assert sizes("las", [served, new], [], now_s=100.0 + 8 * 14400 + 1, max_wait_s=1e9) == {"served": 4}


def test_dlrover_grows_by_four_workers_when_an_interval_has_passed_and_each_gains_a_fifth() -> None:
    good, poor = Table((1.0, 1.2, 1.4, 1.6, 1.8, 1.9, 2.0, 2.1)), Table((1.0, 1.2, 1.4, 1.6, 1.79, 1.9, 2.0, 2.1))
    assert sizes("dlrover", [job("a", num_devices=4)], []) == {"a": 1}
    for scaling, since_s, expected in ((good, 700.0, 5), (good, 701.0, 1), (poor, 700.0, 1)):
        assert sizes("dlrover", [], [running(job("a", scaling=scaling), NODE[:1], since_s)], num_nodes=2) == {"a": expected}


def test_autopilot_takes_devices_that_are_not_used() -> None:
    # With a speed that never grows, one device is used, and the margin makes it two.
    flat = job("flat", num_devices=8, scaling=Table((1.0,) * 8))
    assert sizes("autopilot", [flat], [], num_nodes=2) == {"flat": 8}
    devices = [device.name for device in cluster(2)]
    assert sizes("autopilot", [], [running(flat, devices)], num_nodes=2) == {"flat": 2}


def test_autopilot_lets_a_short_job_pass_one_that_does_not_fit_and_nobody_grow() -> None:
    now = running(job("now", num_devices=2, scaling=LINEAR, steps_left=100.0, max_devices=8), NODE[:2], 0.0)
    wide = job("wide", num_devices=4, min_devices=4, submitted_s=1.0, scaling=LINEAR)
    short = job("short", num_devices=1, submitted_s=2.0, steps_left=10.0, scaling=LINEAR)
    assert sizes("autopilot", [wide, short], [now]) == {"now": 2, "short": 1}
    assert sizes("autopilot", [], [now]) == {"now": 3}


def test_dlrover_rm_weighs_throughput_by_the_time_left() -> None:
    # Of the best throughput, a further device gains each job a quarter; the weights are 1 / 25 s and 1 / 50 s.
    short, long = (
        job(name, scaling=LINEAR, max_devices=4, steps_left=left) for name, left in (("short", 100.0), ("long", 200.0))
    )
    assert sizes("dlrover-rm", [long, short], []) == {"short": 4}
    fewest = [replace(one, min_devices=1) for one in (short, long)]
    # It pauses nobody whose first device gains more than the third of the other one.
    concave = Table((3.0, 4.0, 4.5, 4.6))
    assert sizes("dlrover-rm", [replace(one, scaling=concave) for one in fewest], []) == {"short": 2, "long": 2}


def test_afs_gives_a_device_to_the_shorter_job_only_while_it_gains_more_than_the_longer_one_loses() -> None:
    # From one device to two, the short one's speed grows by 100 %, the long one's by half of what it would be then.
    short, long = (job(name, scaling=LINEAR, steps_left=left) for name, left in (("short", 100.0), ("long", 1000.0)))
    assert sizes("afs", [long, short], [], num_nodes=2) == {"short": 4, "long": 4}
    assert sizes("afs", [long, short], [], per_node=3) == {"short": 2, "long": 1}
    # A gain of 40 % for the short one against 1/2: the long one comes first.
    slow = replace(short, scaling=Table((1.0, 1.4, 1.6, 1.7)))
    assert sizes("afs", [long, slow], [], per_node=3) == {"short": 1, "long": 2}
    many = [job(f"j{left}", scaling=LINEAR, steps_left=float(left)) for left in (50, 20, 40, 10, 30)]
    assert sizes("afs", many, []) == {"j10": 1, "j20": 1, "j30": 1, "j40": 1}


def test_hesrpt_divides_by_its_closed_form() -> None:
    work = np.array([10.0, 1e4, 100.0])
    power = 1 / (1 - 0.6)
    expected = [1 - (2 / 3) ** power, (1 / 3) ** power, (2 / 3) ** power - (1 / 3) ** power]
    assert hesrpt_shares(work, np.ones(3), 0.6) == pytest.approx(expected)
    jobs = [job(f"j{left:g}", scaling=LINEAR, steps_left=left, max_devices=64) for left in work]
    found = sizes("hesrpt", jobs, [], num_nodes=16)
    assert found == {"j10": round(64 * expected[0]), "j10000": round(64 * expected[1]), "j100": round(64 * expected[2])}


def test_optimus_gives_each_device_to_the_largest_gain() -> None:
    # Gains of a second, third and fourth device: 1000 -> 500, 167, 83 s; 100 -> 50 s.
    large, small = job("large", scaling=LINEAR, steps_left=1000.0), job("small", scaling=LINEAR, steps_left=100.0)
    assert sizes("optimus", [large, small], []) == {"large": 3, "small": 1}
    equal = [job(f"j{i}", scaling=LINEAR) for i in range(2)]
    assert sizes("optimus", equal, []) == {"j0": 2, "j1": 2}


def test_pollux_shares_evenly_among_equal_jobs_and_keeps_those_that_restart_often() -> None:
    equal = [job(f"j{i}") for i in range(2)]
    assert sizes("pollux", equal, [], num_nodes=2) == {"j0": 4, "j1": 4}
    restless = job("j0", restarts=100, change_s=30.0, submitted_s=0.0)  # all of its time went into restarts
    assert sizes("pollux", [], [running(restless, NODE[:1])], num_nodes=2) == {"j0": 1}
    speeds = Table(LINEAR.steps_per_s[:8], (0.0, *(1.0,) * 7))  # one device was profiled, so two are the most
    calm = job("j0", restarts=0, change_s=30.0, submitted_s=0.0, scaling=speeds)
    assert sizes("pollux", [], [running(calm, NODE[:1])], num_nodes=2) == {"j0": 2}


@pytest.mark.parametrize("policy", ["pollux", "sia"])
def test_job_of_which_nothing_is_known_starts_on_its_fewest_devices(policy: str) -> None:
    assert sizes(policy, [job("new", scaling=Amdahl(spread=1.0))], [], num_nodes=2) == {"new": 1}


def test_sia_chooses_powers_of_two_and_whole_nodes() -> None:
    found = sizes("sia", [job(f"j{i}", max_devices=64, scaling=LINEAR) for i in range(3)], [], num_nodes=5)
    # Fairness prefers (4, 8, 8) of 20 devices to all other configurations: 1/2 + 2 / sqrt(8) is the least.
    assert sorted(found.values()) == [4, 8, 8]


@pytest.mark.parametrize("policy", ["srtf", "elastic-srtf", "afs"])
def test_jobs_of_unknown_length_do_not_take_turns_while_they_have_had_about_as_much(policy: str) -> None:
    for had, expected in ((4700.0, "now"), (38500.0, "next")):  # the second is more than 8 times 4,800
        old = job("now", steps_left=None, num_devices=4, min_devices=4, served_device_s=had, start_s=30.0, max_devices=5)
        new = job("next", steps_left=None, num_devices=4, min_devices=4, served_device_s=4000.0, start_s=30.0, max_devices=5)
        found = sizes(policy, [replace(new, submitted_s=1.0)], [running(old, NODE, 0.0)])
        assert found == {expected: 4}


def test_ours_divides_as_hesrpt_where_speedups_are_powers() -> None:
    powers = Table(tuple(n**0.7 for n in range(1, 65)))
    short, long = (
        job(name, scaling=powers, max_devices=64, steps_left=left) for name, left in (("short", 10.0), ("long", 1e4))
    )
    state = State(0.0, cluster(1, 64), (short, long))
    # The longest of two gets (1/2)^(1 / 0.3) = 9.9 % of 64 devices.
    assert numbers(make_elastic("jct", PolicySettings(least_gain=0.0))(state)) == {"short": 58, "long": 6}


def test_ours_lets_no_long_job_stand_back_where_devices_suffice_for_all() -> None:
    flat = Table((1.0, 2.0, 3.0, 4.0, *(4.1,) * 4))
    short, long = (job(name, scaling=flat, steps_left=left) for name, left in (("short", 100.0), ("long", 1e5)))
    assert sizes("jct", [short, long], [], num_nodes=2) == {"short": 4, "long": 4}


def test_ours_changes_a_size_only_for_more_than_the_cost() -> None:
    slow_growth = Table((1.0, 2.0, 2.05, 2.06))
    for change_s, expected in ((30.0, 2), (0.1, 3)):
        one = job("a", scaling=slow_growth, max_devices=3, steps_left=1e6, change_s=change_s)
        assert sizes("jct", [], [running(one, NODE[:2])], least_gain=0.0) == {"a": expected}


def test_ours_gives_more_to_an_owner_with_more_weight() -> None:
    jobs = [job(f"j{i}", owner=owner, scaling=Amdahl(serial=0.05)) for i, owner in enumerate(("ads", "search"))]
    found = sizes("jct", jobs, [], num_nodes=2, owner_weights={"search": 8.0})
    assert found["j1"] > found.get("j0", 0)


def test_job_over_the_bound_starts_and_is_not_stopped_at_once() -> None:
    short = [job(f"short-{i}", num_devices=4, submitted_s=990.0, steps_left=1.0, max_devices=4) for i in range(9)]
    late = job("late", num_devices=4, submitted_s=0.0, steps_left=1e6, max_devices=4)
    assert sizes("srtf", [*short, late], [], max_wait_s=500.0) == {"late": 4}
    started = running(late, NODE, 501.0)
    assert sizes("srtf", short, [started], max_wait_s=500.0) == {"late": 4}
    assert "late" not in sizes("srtf", short, [started], max_wait_s=500.0, now_s=1001.0)


def test_policy_with_an_interval_leaves_jobs_alone_that_have_just_changed() -> None:
    one = job("a", scaling=LINEAR, max_devices=8)
    for since_s, expected in ((941.0, 1), (940.0, 4)):
        assert sizes("sia", [], [running(one, NODE[:1], since_s)]) == {"a": expected}


def test_ours_leaves_devices_free_that_would_gain_too_little() -> None:
    flat = job("flat", scaling=Table((1.0, 1.04, 1.08, 1.12)), max_devices=4)
    assert sizes("jct", [flat], []) == {"flat": 1}
    assert sizes("jct", [flat], [], least_gain=0.01) == {"flat": 4}
