"""Play seeds of the simulated membership protocol and report every invariant that is violated.

python -m tests.rdzv.simulate                        2,000 seeds, as in CI
python -m tests.rdzv.simulate --seeds 100000 --processes 8
python -m tests.rdzv.simulate --seed 1234 --trace    one seed, with all that happened
python -m tests.rdzv.simulate --bug "fence removed" --seed 12 --trace
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import sys
import time

from tests.rdzv.simulation.planted import BUGS, planted
from tests.rdzv.simulation.run import Outcome, play


def _play(seed: int) -> Outcome:
    outcome = play(seed)
    # The parent does not need the trace of a good run.
    return outcome if outcome.invariant else dataclasses.replace(outcome, trace=[])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print what happened, and the trace's hash")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this bug first")
    args = parser.parse_args()
    began = time.monotonic()
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds)
    failed: list[Outcome] = []
    rounds = steps = events = 0
    with contextlib.ExitStack() as stack:
        if args.bug:
            stack.enter_context(planted(args.bug))
        if args.processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(args.processes))
            outcomes = pool.imap_unordered(_play, seeds, chunksize=50)
        else:
            outcomes = map(play, seeds)  # type: ignore[assignment]
        for outcome in outcomes:
            rounds, steps, events = rounds + outcome.num_rounds, steps + outcome.num_steps, events + outcome.num_events
            if args.trace:
                print("\n".join(outcome.trace))
                print(f"seed {outcome.seed}: trace {outcome.trace_hash}")
            if outcome.invariant:
                failed.append(outcome)
                print(outcome, flush=True)
    seconds = time.monotonic() - began
    print(f"{len(seeds)} seeds, {rounds} rounds, {steps} steps, {events} events in {seconds:.1f} s: {len(failed)} violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
