from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_dlrover.colocate.company import Alone, Companion, Company
from lightning_dlrover.colocate.journal import Profiled, Rates
from lightning_dlrover.colocate.watched import Moment


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

    def seen(self, now: float) -> Companion:
        steps, cpu_s, step_s, wait_s = self._done
        moment = Moment(now, now, cpu_s, int(steps) if self._reports else 0, step_s, wait_s)
        return Companion(self.name, self.name, moment, step_bytes=1000, reports=self._reports)


def watch(
    company: Company,
    jobs: Sequence[Pretended],
    until_s: float,
    start_s: float = 0.0,
    alone: Alone | None = None,
    speed: float = 1.0,
) -> list[Profiled | Rates]:
    found = []
    for tick in range(int((until_s - start_s) * 10)):
        now = start_s + tick / 10
        found += company.look(now, [job.seen(now) for job in jobs], alone or {})
        for job in jobs:
            job.run(0.1, speed)
    return found


def test_job_alone_gives_its_profile() -> None:
    found = watch(Company("cpu", "fast"), [Pretended("a", 50.0, 0.75, waits=0.25)], 3.0)
    assert isinstance(found[0], Profiled)
    assert (found[0].job_kind, found[0].device_kind) == ("a", "fast")
    assert found[0].steps_per_s == pytest.approx(50.0, rel=0.05)
    assert found[0].use == pytest.approx({"cores": 0.75, "input": 0.25, "memory_bandwidth": 50_000.0}, rel=0.05)


def test_jobs_side_by_side_give_their_speeds_over_those_alone() -> None:
    jobs = [Pretended("a", 50.0, 1.0), Pretended("b", 20.0, 1.0), Pretended("c", 0.0, 0.8, reports=False)]
    found = watch(Company("cpu", "fast"), jobs, 6.0, alone={("a", True): 50.0, ("b", True): 20.0, ("c", False): 0.8}, speed=0.6)
    assert [type(record) for record in found] == [Rates]
    assert isinstance(found[0], Rates)
    assert found[0].speeds == pytest.approx({"a": 0.6, "b": 0.6, "c": 0.6}, rel=0.1)
    assert found[0].kinds == ("a", "b", "c")


def test_job_that_was_never_alone_or_reported_otherwise_gives_no_speed() -> None:
    jobs = [Pretended("a", 50.0, 1.0), Pretended("b", 20.0, 1.0)]
    assert watch(Company("cpu", "fast"), jobs, 6.0, alone={("a", True): 50.0, ("b", False): 0.5}) == []


def test_window_of_a_set_that_changed_too_early_tells_nothing() -> None:
    company = Company("cpu", "fast")
    a, b = Pretended("a", 50.0, 1.0), Pretended("b", 20.0, 1.0)
    known: Alone = {("a", True): 50.0, ("b", True): 20.0}
    found = watch(company, [a, b], 0.8, alone=known)
    found += watch(company, [a], 1.4, 0.8, alone=known)
    found += watch(company, [a, b], 2.0, 1.4, alone=known)
    assert found == []


def test_first_steps_do_not_count() -> None:
    slow = Pretended("a", 0.5, 1.0)
    assert watch(Company("cpu", "fast"), [slow], 4.0) == []
