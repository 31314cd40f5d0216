"""The membership protocol under arbitrary faults; `simulation/invariants.py` lists the invariants."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.rdzv.simulation.invariants import INVARIANTS
from tests.rdzv.simulation.planted import BUGS, planted
from tests.rdzv.simulation.run import Outcome, play

SEEDS = int(os.environ.get("DLROVER_SEEDS", "2000"))
CHUNK = min(SEEDS, 250)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_invariant_is_violated_under_faults(first: int) -> None:
    """100,000 seeds: `python -m tests.rdzv.simulate --seeds 100000 --processes 8`."""
    outcomes = [play(seed) for seed in range(first, first + CHUNK)]
    failed = [outcome for outcome in outcomes if outcome.invariant]
    assert not failed, "\n".join([*map(str, failed), "", *failed[0].trace])
    # A simulation without events would violate no invariant.
    assert sum(outcome.num_rounds for outcome in outcomes) > 1.5 * CHUNK
    assert sum(outcome.num_steps for outcome in outcomes) > 10 * CHUNK


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    with planted(name):
        found = next((o for o in map(play, range(bug.near, bug.near + 2000)) if o.invariant), None)
        assert found is not None
        assert found.invariant == bug.invariant, found
        assert play(found.seed) == found
    assert not play(found.seed).invariant, "without the bug the same seed is good"


def test_every_invariant_has_a_name_and_at_least_ten_bugs_are_planted() -> None:
    assert len(INVARIANTS) == len(set(INVARIANTS)) > 10
    assert len(BUGS) >= 10
    assert {bug.invariant for bug in BUGS.values()} <= set(INVARIANTS)


def simulate(*arguments: str, hash_seed: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.rdzv.simulate", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_seed_gives_the_same_trace_in_every_process() -> None:
    here = play(7)
    assert len(here.trace) > 10
    assert play(7) == here
    assert play(8).trace_hash != here.trace_hash
    for hash_seed in ("1", "2"):
        done = simulate("--seed", "7", "--trace", hash_seed=hash_seed)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"seed 7: trace {here.trace_hash}" in done.stdout.splitlines()


def test_failure_names_the_invariant_and_its_seed() -> None:
    name = "a number is skipped after a loss"
    with planted(name):
        found: Outcome = next(o for o in map(play, range(2000)) if o.invariant)
    done = simulate("--bug", name, "--seed", str(found.seed), "--trace", hash_seed="3")
    assert done.returncode == 1
    assert found.trace[-1] in done.stdout
    assert re.search(rf"^seed {found.seed}: one-number: \w+ wrote round \d+ where \d+ was next$", done.stdout, re.MULTILINE)
    assert f"replay: python -m tests.rdzv.simulate --seed {found.seed} --trace" in done.stdout
