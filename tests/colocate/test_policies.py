"""Whatever the queue, each policy keeps memory, places, priorities and the bound on waiting."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lightning_dlrover.colocate.packing import why_never
from lightning_dlrover.colocate.policies import POLICIES, make_policy
from lightning_dlrover.tuning.cluster import Device, Job, PolicySettings, Profile, Running, State

GB = 10**9
LIMITS = {"cores": 2.0, "gpu": 1.0}

amounts = st.fixed_dictionaries({"cores": st.floats(0, 2), "gpu": st.floats(0, 1)})
profiles = st.builds(
    Profile,
    memory_bytes=st.integers(0, 12 * GB),
    steps_per_s=st.floats(0.1, 100),
    use=amounts,
    host_memory_bytes=st.integers(0, 4 * GB),
)


@st.composite
def jobs(draw: st.DrawFn, prefix: str = "job") -> Job:
    kinds = draw(st.sampled_from([("gpu",), ("cpu",), ("cpu", "gpu")]))
    return Job(
        f"{prefix}-{draw(st.integers(0, 10**9))}",
        {kind: draw(profiles) for kind in kinds},
        submitted_s=draw(st.floats(0, 100)),
        priority=draw(st.integers(0, 2)),
        weight=draw(st.floats(0.5, 4)),
    )


def cluster(num_gpus: int = 3, places: int = 3) -> tuple[Device, ...]:
    gpus = [Device(f"gpu{i}", "gpu", "node", 16 * GB, {"gpu": 1.0}, places) for i in range(num_gpus)]
    return (Device("cpu", "cpu", "node", 24 * GB, {"cores": 2.0}, places), *gpus)


def check_hard_limits(state: State, allocation: dict[str, tuple[str, ...]]) -> None:
    by_name = {job.name: job for job in (*state.waiting, *(r.job for r in state.running))}
    devices = {device.name: device for device in state.devices}
    workers = [(by_name[name], devices[device]) for name, names in allocation.items() for device in names]
    host_bytes = sum(
        job.profiles[d.kind].memory_bytes if d.is_host else job.profiles[d.kind].host_memory_bytes for job, d in workers
    )
    assert host_bytes <= devices["cpu"].memory_bytes
    for device in state.devices:
        there = [job for job, d in workers if d == device]
        assert sum(job.profiles[device.kind].memory_bytes for job in there) <= device.memory_bytes
        assert len(there) <= device.places
    assert all(len(names) == 1 for names in allocation.values())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(jobs(), max_size=14, unique_by=lambda job: job.name),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.booleans(), min_size=14, max_size=14),
)
def test_allocation_of_every_policy_keeps_memory_places_and_running_jobs(
    queue: list[Job], num_gpus: int, places: int, may_stay: list[bool]
) -> None:
    """All policies on each queue: queues take most of the time."""
    devices = cluster(num_gpus, places)
    by_name = {job.name: job for job in queue}
    for name in POLICIES:
        note(f"policy {name}")
        policy = make_policy(name)
        state = State(100.0, devices, tuple(queue))
        first = dict(policy(state))
        check_hard_limits(state, first)
        stay = [job for job, may in zip(first, may_stay, strict=False) if may]
        later = State(
            200.0,
            devices,
            tuple(job for job in queue if job.name not in first),
            tuple(Running(by_name[job], first[job], 100.0) for job in stay),
        )
        second = dict(policy(later))
        check_hard_limits(later, second)
        assert {job: second[job] for job in stay} == {job: first[job] for job in stay}


@pytest.mark.parametrize("name", POLICIES)
def test_order_of_the_queue_changes_no_decision(name: str) -> None:
    rng = random.Random(0)
    queue = [job(f"job-{i}", rng.uniform(0.1, 1.0), rng.randrange(1, 8), submitted_s=rng.randrange(4)) for i in range(20)]
    policy = make_policy(name)
    expected = policy(State(10.0, cluster(), tuple(queue)))
    for _ in range(3):
        rng.shuffle(queue)
        assert policy(State(10.0, cluster(), tuple(queue))) == expected


def job(name: str, gpu: float = 0.5, gigabytes: float = 4.0, **fields: object) -> Job:
    profile = Profile(int(gigabytes * GB), 10.0, {"gpu": gpu})
    return dataclasses.replace(Job(name, {"gpu": profile}), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_lower_priority_does_not_start_before_a_higher_one_that_fits(name: str) -> None:
    low = [job(f"low-{i}", submitted_s=0.0) for i in range(30)]
    high = [job(f"high-{i}", submitted_s=5.0, priority=1) for i in range(3)]
    started = make_policy(name)(State(10.0, cluster(3, 1), (*low, *high)))
    assert set(started) == {"high-0", "high-1", "high-2"}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_no_job_waits_beyond_the_bound_in_a_flood_of_others(name: str, seed: int) -> None:
    """A large job and a difficult one stand against a stream of small ones of a higher priority that always fit."""
    rng = random.Random(seed)
    max_wait_s, longest_s, devices = 50.0, 20.0, cluster(2, 3)
    policy = make_policy(name, PolicySettings(max_wait_s=max_wait_s))
    victims = [job("large", 1.0, 16.0), job("heavy", 1.0, 9.0), job("both", 0.9, 10.0)]
    waiting: list[Job] = list(victims)
    running: list[tuple[float, Running]] = []
    started_s: dict[str, float] = {}
    for now in range(300):
        running = [(end, r) for end, r in running if end > now]
        waiting += [job(f"small-{now}-{i}", 0.2, rng.uniform(1, 5), submitted_s=float(now), priority=1) for i in range(2)]
        allocation = policy(State(float(now), devices, tuple(waiting), tuple(r for _, r in running)))
        for new in [j for j in waiting if j.name in allocation]:
            started_s[new.name] = now
            running.append((now + rng.uniform(1, longest_s), Running(new, allocation[new.name], float(now))))
        waiting = [j for j in waiting if j.name not in allocation]
        if all(v.name in started_s for v in victims):
            break
    # Each of the three may have to wait until the jobs before it, and those on its devices, have ended.
    assert all(started_s.get(v.name, 1e9) <= max_wait_s + len(victims) * 2 * longest_s + 1 for v in victims), started_s


def test_sequential_runs_one_job_on_each_device() -> None:
    started = make_policy("sequential")(State(0.0, cluster(3), tuple(job(f"j{i}") for i in range(9))))
    assert sorted(started.values()) == [("gpu0",), ("gpu1",), ("gpu2",)]


def test_fifo_fills_all_places_in_order() -> None:
    started = make_policy("fifo")(State(0.0, cluster(2), tuple(job(f"j{i}", submitted_s=i) for i in range(9))))
    assert set(started) == {f"j{i}" for i in range(6)}
    assert Counter(started.values()) == {("gpu0",): 3, ("gpu1",): 3}


def test_rmixer_puts_another_type_next_to_the_most_frequent_one() -> None:
    heavy = [job(f"compute-{i}", 0.9, 5.0) for i in range(3)]
    large = [job(f"memory-{i}", 0.1, 6.0) for i in range(3)]
    policy = make_policy("rmixer", PolicySettings(most_together=2))
    started = policy(State(0.0, cluster(3, 2), (*heavy, *large)))
    types = {
        device: {name.split("-")[0] for name, on in started.items() if on == (device,)} for device in ("gpu0", "gpu1", "gpu2")
    }
    assert all(kinds == {"compute"} for kinds in types.values()) or all(len(kinds) == 2 for kinds in types.values())


def test_muri_interleaves_different_stages() -> None:
    def staged(name: str, **use: float) -> Job:
        return Job(name, {"gpu": Profile(GB, 1.0, use)})

    device = Device("gpu0", "gpu", "node", 16 * GB, {"gpu": 1.0, "input": 1.0}, 2)
    queue = (staged("a-gpu", gpu=0.9, input=0.1), staged("b-gpu", gpu=0.9, input=0.1), staged("c-input", gpu=0.1, input=0.9))
    started = make_policy("muri", PolicySettings(most_together=2))(State(0.0, (device,), queue))
    assert set(started) in ({"a-gpu", "c-input"}, {"b-gpu", "c-input"})


def test_jobs_that_can_never_start_are_explained_and_hold_nobody_up() -> None:
    devices = cluster(2)
    too_large, too_wide, alien = job("large", 0.1, 99.0), job("wide", num_devices=9), Job("alien", {"tpu": Profile(0, 1.0)})
    assert "16.00 GB" in str(why_never(too_large, devices))
    assert "9 devices" in str(why_never(too_wide, devices))
    assert "tpu" in str(why_never(alien, devices))
    for name in set(POLICIES) - {"sequential", "fifo"}:
        started = make_policy(name, PolicySettings(max_wait_s=1.0))(
            State(99.0, devices, (too_large, alien, job("fine", submitted_s=98.5)))
        )
        assert set(started) == {"fine"}, name


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lifo'.*sequential, fifo"):
        make_policy("lifo")
