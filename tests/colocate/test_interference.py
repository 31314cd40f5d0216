from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_dlrover.colocate.admission_client import REPORT_S
from lightning_dlrover.colocate.journal import Ended, JobSpec, Profiled, Rates
from lightning_dlrover.colocate.running import MEASURE_S, Moment
from lightning_dlrover.colocate.scheduler import (
    ALONE_S,
    GPU_SETTLE_S,
    WARMUP_STEPS,
    Alone,
    CoRunner,
    InterferenceMeter,
    Knowledge,
)
from lightning_dlrover.colocate.tenants import CPU


class Pretended:
    """A job with constant rates on a clock of its own making."""

    def __init__(self, name: str, steps_per_s: float, cores: float, waits: float = 0.0, reports: bool = True) -> None:
        self.name, self._rates, self._reports = name, (steps_per_s, cores, waits), reports
        self._done = [0.0, 0.0, 0.0, 0.0]

    def run(self, seconds: float, speed: float = 1.0) -> None:
        steps_per_s, cores, waits = self._rates
        done = self._done
        self._done = [done[0] + speed * steps_per_s * seconds, done[1] + speed * cores * seconds, done[2] + seconds, 0.0]
        self._done[3] = done[3] + waits * seconds

    def seen(self, now: float) -> CoRunner:
        steps, cpu_s, step_s, wait_s = self._done
        moment = Moment(now, now, cpu_s, int(steps) if self._reports else 0, step_s, wait_s)
        return CoRunner(self.name, self.name, moment, step_bytes=1000, reports=self._reports)


def watch(
    meter: InterferenceMeter,
    jobs: Sequence[Pretended],
    until_s: float,
    start_s: float = 0.0,
    alone: Alone | None = None,
    speed: float = 1.0,
) -> list[Profiled | Rates]:
    found = []
    for tick in range(int((until_s - start_s) * 10)):
        now = start_s + tick / 10
        found += meter.look(now, [job.seen(now) for job in jobs], alone or {})
        for job in jobs:
            job.run(0.1, speed)
    return found


def test_job_alone_gives_its_profile() -> None:
    found = watch(InterferenceMeter("cpu", "fast"), [Pretended("a", 50.0, 0.75, waits=0.25)], 3.0)
    assert isinstance(found[0], Profiled)
    assert (found[0].job_kind, found[0].device_kind) == ("a", "fast")
    assert found[0].steps_per_s == pytest.approx(50.0, rel=0.05)
    assert found[0].use == pytest.approx({"cores": 0.75, "input": 0.25, "memory_bandwidth": 50_000.0}, rel=0.05)


def test_jobs_side_by_side_give_their_speeds_over_those_alone() -> None:
    jobs = [Pretended("a", 50.0, 1.0), Pretended("b", 20.0, 1.0), Pretended("c", 0.0, 0.8, reports=False)]
    found = watch(
        InterferenceMeter("cpu", "fast"), jobs, 6.0, alone={("a", True): 50.0, ("b", True): 20.0, ("c", False): 0.8}, speed=0.6
    )
    assert [type(record) for record in found] == [Rates]
    assert isinstance(found[0], Rates)
    assert found[0].speeds == pytest.approx({"a": 0.6, "b": 0.6, "c": 0.6}, rel=0.1)
    assert found[0].kinds == ("a", "b", "c")


def test_job_that_was_never_alone_or_reported_otherwise_gives_no_speed() -> None:
    jobs = [Pretended("a", 50.0, 1.0), Pretended("b", 20.0, 1.0)]
    assert watch(InterferenceMeter("cpu", "fast"), jobs, 6.0, alone={("a", True): 50.0, ("b", False): 0.5}) == []


def test_window_of_a_set_that_changed_too_early_tells_nothing() -> None:
    meter = InterferenceMeter("cpu", "fast")
    a, b = Pretended("a", 50.0, 1.0), Pretended("b", 20.0, 1.0)
    known: Alone = {("a", True): 50.0, ("b", True): 20.0}
    found = watch(meter, [a, b], 0.8, alone=known)
    found += watch(meter, [a], 1.4, 0.8, alone=known)
    found += watch(meter, [a, b], 2.0, 1.4, alone=known)
    assert found == []


def test_first_steps_do_not_count() -> None:
    slow = Pretended("a", 0.5, 1.0)
    assert watch(InterferenceMeter("cpu", "fast"), [slow], 4.0) == []


class Reporting:
    """A job that reports as `colocate/admission_client.py` does: at the end of a step, `REPORT_S` or more after its last
    report."""

    def __init__(self, name: str, step_s: float, began_s: float = 0.0) -> None:
        self.name, self.step_s = name, step_s
        self._now = self._reported_s = began_s
        self._num_steps, self._left_s = 0, step_s
        self._reported = 0

    def run_to(self, now: float, speed: float = 1.0) -> None:
        """Make steps up to a moment, in as many seconds as they take at this speed."""
        while self._now + self._left_s / speed <= now:
            self._now += self._left_s / speed
            self._num_steps, self._left_s = self._num_steps + 1, self.step_s
            if self._now - self._reported_s >= REPORT_S:
                self._reported_s, self._reported = self._now, self._num_steps
        self._left_s -= (now - self._now) * speed
        self._now = now

    def pause_to(self, now: float) -> None:
        self._now = now

    def seen(self) -> CoRunner:
        measured_s = MEASURE_S * int(self._now / MEASURE_S)
        moment = Moment(self._reported_s, measured_s, measured_s, self._reported, self._reported * self.step_s, 0.0)
        return CoRunner(self.name, self.name, moment)


STEPS_S = (0.05, 0.3, 0.5, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("kind", [CPU, "a GPU"])
@pytest.mark.parametrize("step_s", STEPS_S)
def test_job_of_any_step_time_is_measured_alone_after_a_few_steps(step_s: float, kind: str) -> None:
    meter, job = InterferenceMeter("device", kind), Reporting("a", step_s)
    took_s = 0.0
    while not (found := meter.look(took_s, [job.seen()], {})):
        took_s += 0.1
        job.run_to(took_s)
        assert took_s <= WARMUP_STEPS * step_s + GPU_SETTLE_S + max(ALONE_S, 5 * step_s) + 2 * REPORT_S
    (profile,) = found
    assert isinstance(profile, Profiled)
    assert profile.steps_per_s == pytest.approx(1 / step_s, rel=0.01)


def test_pause_in_the_middle_of_a_step_is_no_part_of_its_time() -> None:
    meter, job = InterferenceMeter("cpu", CPU), Reporting("a", 2.0)
    job.run_to(5.0)  # two steps and a half
    meter.look(5.0, [job.seen(), Reporting("b", 0.1, 5.0).seen()], {})
    meter.look(5.1, [Reporting("b", 0.1, 5.1).seen()], {})
    job.pause_to(30.0)
    found: list[Profiled | Rates] = []
    for tick in range(300, 395):
        job.run_to(tick / 10)
        found += meter.look(tick / 10, [job.seen()], {})
    assert [each.steps_per_s for each in found if isinstance(each, Profiled)] == [pytest.approx(0.5, rel=0.01)]


@pytest.mark.parametrize("kind", [CPU, "a GPU"])
@pytest.mark.parametrize("steps_s", [(0.05, 0.05), (0.05, 2.0), (0.05, 3.0), (1.0, 3.0), (3.0, 3.0)])
def test_jobs_of_any_step_times_are_measured_side_by_side(steps_s: tuple[float, float], kind: str) -> None:
    meter = InterferenceMeter("device", kind)
    jobs = [Reporting(name, step_s) for name, step_s in zip("ab", steps_s, strict=True)]
    alone: Alone = {(job.name, True): 1 / job.step_s for job in jobs}
    found: list[Profiled | Rates] = []
    now, longest_s = 0.0, max(steps_s) / 0.6
    while not found:
        now += 0.1
        for job in jobs:
            job.run_to(now, speed=0.6)
        found = meter.look(now, [job.seen() for job in jobs], alone)
        assert now <= GPU_SETTLE_S + max(6.0, 6 * longest_s) + longest_s
    (rates,) = found
    assert isinstance(rates, Rates)
    assert rates.speeds == pytest.approx({"a": 0.6, "b": 0.6}, rel=0.02)


GIB = 1 << 30
SPEC = JobSpec("job", ("train",), "/", device="gpu")


def ended(result: str, host_gib: float, gpu_gib: float) -> Ended:
    peaks = int(host_gib * GIB), int(gpu_gib * GIB)
    return Ended("job", 1, result, 0, "", 0.0, 1.0, 0.0, 1.0, peaks[0], gpu_peak_bytes=peaks[1], where="gpu")


def test_job_that_was_evicted_for_one_memory_still_fits_into_the_other() -> None:
    knowledge = Knowledge()
    knowledge.learn_end(SPEC, ended("evicted", 3.0, 8.5))
    assert knowledge.need_bytes(SPEC, "gpu", "gpu", (0, 0), GIB, 10 * GIB) == 10 * GIB
    assert knowledge.need_bytes(SPEC, "gpu", "host", (0, 0), GIB, 10 * GIB) == int(1.25 * 3 * GIB)


def test_margin_alone_makes_no_job_too_large() -> None:
    assert Knowledge().need_bytes(SPEC, "gpu", "gpu", (8 * GIB, 3 * GIB), GIB, 10 * GIB) == 10 * GIB
    assert Knowledge().need_bytes(SPEC, "gpu", "gpu", (11 * GIB, 3 * GIB), GIB, 10 * GIB) == 14 * GIB


def test_peaks_of_the_memories_are_kept_apart() -> None:
    knowledge = Knowledge()
    assert not knowledge.has_gpu_peak(SPEC)
    knowledge.learn_end(SPEC, ended("done", 2.0, 4.0))
    assert knowledge.has_gpu_peak(SPEC)
    assert knowledge.expected(SPEC, "gpu") == {"host": pytest.approx(2.1 * GIB), "gpu": pytest.approx(4.2 * GIB)}
