"""The user's objective, its cost, and the text that explains both."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from lightning_dlrover.tuning import configuration_of
from lightning_dlrover.tuning.plan import Objective, Prices, Resources, Settings, objective_from, parse_prices, resources_of
from tests.support.simulated_jobs import dense_heavy, window

PROFILE = window(dense_heavy(8), Settings(3, 1, 2, 2), random.Random(0), 0.0)


def test_one_core_per_thread_and_loader_worker_up_to_the_nodes() -> None:
    assert resources_of(configuration_of(PROFILE, 16.0)).cores == 3 * (2 + 1)
    assert resources_of(configuration_of(PROFILE, 8.0)).cores == 8
    assert resources_of(configuration_of(PROFILE, 0.0)).cores == 9
    assert resources_of(configuration_of(replace(PROFILE, cores=2.0), 16.0)).cores == 3 * 2
    assert resources_of(configuration_of(PROFILE, 8.0)).gpus == 0
    assert resources_of(configuration_of(replace(PROFILE, device="H200"), 8.0)).gpus == 3
    assert resources_of(configuration_of(PROFILE, 8.0), 2**30).memory_gib == 3


@pytest.mark.parametrize(
    "prices, used, expected",
    [
        (Prices(), Resources(4, 0, 2.0), None),
        (Prices(core_hour=0.5), Resources(4, 0, 2.0), 2.0),
        (Prices(core_hour=0.5, gib_hour=0.1), Resources(4, 0, 2.0), 2.2),
        (Prices(core_hour=0.5), Resources(4, 2, 2.0), None),  # an unknown price of a GPU is not guessed
        (Prices(gpu_hour=3.0), Resources(4, 2, 2.0), 6.0),
        (Prices(core_hour=0.0), Resources(4, 0, 0.0), 0.0),
    ],
)
def test_a_price_is_known_or_unknown_never_guessed(prices: Prices, used: Resources, expected: float | None) -> None:
    found = prices.per_hour(used)
    assert found == (pytest.approx(expected) if expected is not None else None)


def test_the_environment_carries_an_objective_from_the_command_line() -> None:
    environ = {"DLROVER_OBJECTIVE": "cheapest", "DLROVER_DEADLINE_S": "7200", "DLROVER_PRICES": "core_hour=0.04, gpu_hour=2.5"}
    assert objective_from(environ) == Objective("cheapest", deadline_s=7200.0, prices=Prices(0.04, 2.5))
    assert objective_from({}) == Objective()


@pytest.mark.parametrize(
    "environ, named",
    [
        ({"DLROVER_OBJECTIVE": "best"}, "'best'"),
        ({"DLROVER_BUDGET": "much"}, "DLROVER_BUDGET"),
        ({"DLROVER_BUDGET": "10"}, "needs prices"),
        ({"DLROVER_DEADLINE_S": "-1"}, "deadline_s"),
        ({"DLROVER_PRICES": "core=1"}, "core_hour, gpu_hour, gib_hour"),
        ({"DLROVER_PRICES": "core_hour"}, "core_hour=0.04"),
        ({"DLROVER_PRICES": "core_hour=-1"}, "core_hour"),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        objective_from(environ)


@pytest.mark.parametrize("wrong", [{"budget": 0.0}, {"deadline_s": math.nan}, {"budget": math.inf}])
def test_amounts_without_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Objective(prices=parse_prices("core_hour=1"), **wrong)
