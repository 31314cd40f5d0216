"""What live workers cost an etcd that many jobs share.

    python benchmarks/etcd_load.py [--parts bytes,workers,decisions,world] [--quick]

Each part is a module of its own:

    bytes      `etcd_load_bytes.py`: bytes that a job writes while it trains undisturbed
    workers    `etcd_load_workers.py`: requests of 1,000 simulated workers, idle and at a change
    decisions  `etcd_load_decisions.py`: time of a coordinator's decision in a job of 1,000 workers
    world      `large_world.py`: 200 real workers that grow by one and lose one

A part's module offers `def measure(quick: bool) -> dict[str, float]`. It prints its own table, and returns its figures in the
order of the last line. It is imported only if the part is asked for. It raises `BenchmarkError` if it cannot measure.

The last line holds the figures of all parts that were run, in this order: `mb_per_worker_day` (megabytes, 10^6 bytes),
`idle_rps_per_worker` (requests/s), `change_1000_s` (seconds), `requests_per_change_1000`, `kb_per_change_1000` (of each
worker; kilobytes, 10^3 bytes), `decision_100_ms`, `decision_1000_ms` (milliseconds),
`world_200_grow_s`, `world_200_loss_s` (seconds). The numbers in names are
those of the workers, fewer with `--quick`.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from jobs import describe_machine, result_line

MODULES = {
    "bytes": "etcd_load_bytes",
    "workers": "etcd_load_workers",
    "decisions": "etcd_load_decisions",
    "world": "large_world",
}


def parts_of(text: str) -> list[str]:
    """Return the parts that are named, in their usual order.

    Raises:
        ArgumentTypeError: a name is unknown, or none is given.
    """
    named = {part.strip() for part in text.split(",") if part.strip()}
    if not named or named - {*MODULES}:
        raise argparse.ArgumentTypeError(f"{text!r} names other parts than {', '.join(MODULES)}, or none")
    return [part for part in MODULES if part in named]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=parts_of, default=[*MODULES], help=f"some of {','.join(MODULES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="short runs with less exact figures")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    figures: dict[str, float | int] = {}
    for part in options.parts:
        print(f"\n-- {part}", flush=True)
        figures |= importlib.import_module(MODULES[part]).measure(options.quick)
    print(result_line(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
