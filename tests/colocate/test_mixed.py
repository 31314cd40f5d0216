"""Jobs that may run on a GPU or on cores: their expected speeds, and which of them the cores take."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.colocate.policies import make_policy
from lightning_dlrover.colocate.slowdown import FACTOR, Left, factor_of, for_cores, speed_on_cores, speed_on_gpu
from lightning_dlrover.tuning.cluster import Device, Job, PolicySettings, Profile, Running, State

GB = 10**9
DEVICES = (Device("gpu", "gpu", "a", 16 * GB, {"gpu": 1.0}, 4), Device("cpu", "cpu", "b", 64 * GB, {"cores": 8.0}, 2))


def on_gpu(busy: float, steps_per_s: float = 10.0) -> Profile:
    return Profile(GB, steps_per_s, {"gpu": busy})


def test_only_the_kernels_of_a_step_take_longer_on_cores() -> None:
    assert speed_on_cores(on_gpu(0.0), FACTOR) == pytest.approx(10.0)
    assert speed_on_cores(on_gpu(1.0), FACTOR) == pytest.approx(10.0 / FACTOR)
    assert speed_on_gpu(Profile(0, 1.0, {"input": 1.0}), FACTOR) == pytest.approx(1.0)
    assert speed_on_gpu(Profile(0, 1.0), FACTOR) == pytest.approx(FACTOR)


@given(st.floats(0.3, 1.0), st.floats(1.0, 200.0))
def test_factor_tends_to_that_of_the_jobs_that_were_measured_on_both(busy: float, factor: float) -> None:
    seen = [(on_gpu(busy), Profile(0, speed_on_cores(on_gpu(busy), factor)))]
    assert factor_of([]) == FACTOR
    assert abs(factor_of(seen) - factor) <= abs(FACTOR - factor) + 1e-6
    assert factor_of(seen * 300) == pytest.approx(factor, rel=0.2)


left = st.builds(Left, st.floats(1, 100), st.floats(0, 1), st.floats(1, 1000), st.floats(0.1, 8))


@given(st.lists(left, max_size=8), st.lists(left, max_size=4), st.lists(left, max_size=4))
def test_cores_take_only_jobs_that_they_end_before_the_gpus_end_the_rest(
    jobs: list[Left], on_gpus: list[Left], on_cores: list[Left]
) -> None:
    chosen = for_cores(jobs, on_gpus, on_cores, 4, 1, 8.0)
    one_by_one_s = sum(job.gpu_s for job in (*jobs, *on_gpus))
    for index in chosen:
        assert jobs[index].cores_s < one_by_one_s
    assert [jobs[index].price for index in chosen] == sorted(jobs[index].price for index in chosen)


def test_cores_take_the_job_first_that_relieves_the_gpu_most() -> None:
    kernels, waits = Left(10.0, 1.0, 100.0, 8.0), Left(10.0, 0.2, 20.0, 1.0)
    assert for_cores([kernels, waits] * 20, [], [], 4, 1, 8.0)[0] == 1
    assert for_cores([kernels], [], [], 4, 1, 8.0) == []
    assert for_cores([Left(math.inf, 1.0, 100.0, 8.0)], [], [], 4, 1, 8.0) == [0]


def both(number: int, busy: float) -> Job:
    return Job(f"job-{number:02d}", {"gpu": on_gpu(busy), "cpu": Profile(GB, 1.0)}, submitted_s=float(number))


def test_rmixer_puts_the_low_intensity_tail_of_its_list_on_the_cores_and_none_near_the_end() -> None:
    policy = make_policy("rmixer_mixed", PolicySettings(most_together=4))
    many = policy(State(100.0, DEVICES, tuple(both(number, 1 - number / 20) for number in range(20))))
    assert {name for name, where in many.items() if where == ("gpu",)} == {f"job-{number:02d}" for number in range(4)}
    # Four of six workers are the GPU's: the tail are the last third of twenty.
    assert {name for name, where in many.items() if where == ("cpu",)} == {"job-14", "job-15"}
    few = policy(State(100.0, DEVICES, tuple(both(number, 1 - number / 20) for number in range(8))))
    assert set(few.values()) == {("gpu",)}


def test_rmixer_keeps_jobs_of_one_type_of_device_there_to_the_end() -> None:
    only = Job("cores", {"cpu": Profile(GB, 1.0)})
    runs = tuple(Running(both(number, 0.5), ("gpu",)) for number in range(4))
    allocation = make_policy("rmixer_mixed")(State(100.0, DEVICES, (only, both(9, 0.1)), runs))
    assert allocation["cores"] == ("cpu",)
    assert "job-09" not in allocation
