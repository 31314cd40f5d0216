"""Slowdowns are learned from what was observed, and carry over to jobs of the same family."""

from __future__ import annotations

import random
import statistics
from itertools import combinations_with_replacement

import pytest

from lightning_dlrover.colocate.slowdown import Observation, SlowdownModel
from lightning_dlrover.tuning.cluster import Device, Job, Profile

GPU = Device("gpu0", "gpu", "node", 16 * 10**9, {"gpu": 1.0, "pcie": 1.0}, 4)
CPU = Device("cpu", "cpu", "node", 16 * 10**9, {"cores": 2.0}, 4)


def job(family: str, batch_size: int, gpu: float, pressure: float = 1.0) -> Job:
    """A job; its hidden pressure is in no profile."""
    name = f"{family} {batch_size} {pressure}"
    profile = Profile(10**9, 1000.0 / batch_size, {"gpu": gpu, "pcie": 1 - gpu})
    return Job(name, {"gpu": profile}, family=family, batch_size=batch_size)


def hidden(one: Job) -> float:
    return float(one.name.split()[-1])


def true_speeds(group: tuple[Job, ...]) -> tuple[float, ...]:
    """Each job's slowdown grows with the pressure of the others and its own use of the GPU."""
    excess = [
        sum(hidden(other) * one.profiles["gpu"].use["gpu"] for j, other in enumerate(group) if j != i)
        for i, one in enumerate(group)
    ]
    return tuple(1 / (1 + e) for e in excess)


def jobs() -> list[Job]:
    rng = random.Random(0)
    return [
        job(family, batch, min(0.2 + 0.1 * batch / 64 + rng.uniform(0, 0.3), 1.0), pressure)
        for family, pressure in (("dlrm", 0.4), ("bert", 1.1), ("resnet", 0.8))
        for batch in (32, 64, 128, 256)
    ]


def observed(groups: list[tuple[Job, ...]], seed: int = 0) -> list[Observation]:
    rng = random.Random(seed)
    return [Observation(GPU, g, tuple(s * rng.lognormvariate(0, 0.02) for s in true_speeds(g))) for g in groups]


def errors(model: SlowdownModel, groups: list[tuple[Job, ...]]) -> list[float]:
    predicted = model.relative_speeds(groups, GPU)
    return [abs(p / s - 1) for g, ps in zip(groups, predicted, strict=True) for p, s in zip(ps, true_speeds(g), strict=True)]


def test_a_third_of_the_pairs_predicts_the_rest() -> None:
    pairs = list(combinations_with_replacement(jobs(), 2))
    random.Random(1).shuffle(pairs)
    known, rest = pairs[: len(pairs) // 3], pairs[len(pairs) // 3 :]
    assert statistics.median(errors(SlowdownModel.fit(observed([*known])), [*rest])) <= 0.08
    assert statistics.median(errors(SlowdownModel(), [*rest])) >= 0.15


def test_groups_of_three_are_predicted_from_pairs_and_learned_from_themselves() -> None:
    some = jobs()
    rng = random.Random(2)
    pairs = [(rng.choice(some), rng.choice(some)) for _ in range(40)]
    triples = [(rng.choice(some), rng.choice(some), rng.choice(some)) for _ in range(20)]
    assert statistics.median(errors(SlowdownModel.fit(observed([*pairs])), [*triples])) <= 0.1
    only_triples = SlowdownModel.fit(observed([(rng.choice(some), rng.choice(some), rng.choice(some)) for _ in range(40)]))
    assert statistics.median(errors(only_triples, [*triples])) <= 0.12


def test_without_observations_use_beyond_a_limit_slows_down_and_other_use_does_not() -> None:
    heavy, light = (Job(n, {"cpu": Profile(0, 1.0, {"cores": c})}) for n, c in (("heavy", 1.8), ("light", 0.2)))
    model = SlowdownModel()
    ((a, b), (c, d), (alone,)) = model.relative_speeds([(heavy, light), (heavy, heavy), (heavy,)], CPU)
    assert (a, b, alone) == (1.0, 1.0, 1.0)
    assert 0.5 <= c == d < 0.65


def test_jobs_of_unknown_use_are_expected_to_share_a_device() -> None:
    unknown = [Job(f"j{i}", {"gpu": Profile(0, 1.0)}) for i in range(2)]
    ((one, other),) = SlowdownModel().relative_speeds([unknown], GPU)
    assert one == other == pytest.approx(0.55)


def test_a_few_observations_move_predictions_towards_them() -> None:
    a, b, c = job("a", 32, 0.5), job("b", 32, 0.5), job("a", 64, 0.5)
    before = SlowdownModel().relative_speeds([(a, b)], GPU)[0][0]
    after = SlowdownModel.fit([Observation(GPU, (a, b), (0.6, 0.9))] * 3).relative_speeds([(a, b), (b, a), (c, b)], GPU)
    assert before == 1.0
    assert after[0][0] == pytest.approx(0.6, abs=0.12)
    assert after[0].tolist() == after[1][::-1].tolist()  # the order of a group changes nothing
    assert after[0][0] < after[2][0] < before  # some of it carries over to other batch sizes


def test_equal_observations_give_equal_predictions_in_any_order() -> None:
    some = jobs()
    known = observed([(some[i], some[(3 * i + 1) % 12]) for i in range(12)])
    groups = [(some[i], some[j]) for i in range(4) for j in range(4)]
    at_once = SlowdownModel.fit(known).relative_speeds(groups, GPU)
    one_by_one = SlowdownModel.fit(known)
    for group, expected in reversed(list(zip(groups, at_once, strict=True))):
        assert one_by_one.relative_speeds([group], GPU)[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("speeds, message", [((0.5,), "2 jobs on 'gpu0' have 1 speeds"), ((0.5, 0.0), "not all above 0")])
def test_observations_that_cannot_be_are_refused(speeds: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Observation(GPU, (job("a", 1, 1), job("b", 1, 1)), speeds)
