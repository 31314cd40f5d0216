"""Every benchmark runs in its short form and reports the figures that its documentation promises, within wide bounds.

Times are judged by their order of magnitude, as the cores may be shared. Counted figures are exact.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pytest
from gavel_traces import default_folder
from slurm_cluster import missing_packages

from tests.support.benchmark_figures import BENCHMARKS, DEADLINE_S, ONE_THREAD, figures_of
from tests.support.waiting import eventually
from tests.support.windows import TRACES, needs_traces

Figures = dict[str, float]
Bounds = dict[str, tuple[float, float]]
"""Smallest and largest value of each figure of the last line, in its order."""

LARGE = sys.float_info.max
ANY = (-LARGE, LARGE)  # finite, as all figures are
A_FEW = (0.2, 5.0)
"""Bounds of a ratio that is near 1 on a quiet machine."""

SPLITS = ("interp", "extrap", "scale", "few", "by_placement")
WITH_HISTORY = ("few_history", "interp_history", "by_placement_history")
SECONDS = (1e-9, 5.0)
ABOVE_0 = (1e-9, LARGE)
CHANGES = ("grow_s", "shrink_s", "replace_s", "rank0_leaves_s", "kill_s")
MAY_BE_NAN = ("slurm_stall_s", "slurm_decision_to_training_s") if missing_packages() else ()
needs_pairs = pytest.mark.skipif(not default_folder().is_dir(), reason=f"no traces in {default_folder()}")
needs_torchrec = pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="sharded tables need torchrec")


def at_most(value: float) -> tuple[float, float]:
    return -LARGE, value


def _stalls_are_shorter(result: Figures) -> bool:
    # A stall can be slightly negative on a busy machine, because a usual step is subtracted from it.
    return all(-0.5 < result[name] < result["stock_s"] for name in CHANGES)


def _stall_is_a_part(result: Figures) -> bool:
    # No worker imports torch within a second.
    pairs = [(result[f"{target}_stall_s"], result[f"{target}_decision_to_training_s"]) for target in ("local", "slurm")]
    measured = pairs[:1] if missing_packages() else pairs
    return all(1 < total_s < 120 and -0.5 < stall_s < total_s / 3 for stall_s, total_s in measured)


def _always(_: Figures) -> bool:
    return True


def case(
    sentence: str, command: str, bounds: Bounds, also: Callable[[Figures], bool] = _always, *marks: pytest.MarkDecorator
) -> Any:
    return pytest.param(command, bounds, also, id=sentence, marks=marks)


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.timeout(DEADLINE_S + 40)
@pytest.mark.parametrize(
    "command, bounds, also",
    [
        case(
            "a live resize is many times shorter than a restart",
            "live_resize.py",
            {**dict.fromkeys([*CHANGES, "stock_s"], ANY), "ratio": (3, LARGE)},
            _stalls_are_shorter,
        ),
        case(
            "a live resize of a stream is compared with one of map data",
            "live_resize.py --data stream",
            {**dict.fromkeys([*CHANGES, "stock_s"], ANY), "ratio": (2, LARGE), "stream_over_map": ANY},
        ),
        case(
            "streams lose no row and their cost is compared",
            "stream.py",
            {
                "lost": (0, 0),
                "doubled": (0, 0),
                "control_lost": ABOVE_0,
                "rows_ratio": (0.3, LARGE),
                **dict.fromkeys(["others_ratio", "views_ratio", "rows_cpu_ratio", "others_cpu_ratio", "seek_ms"], ANY),
                "plan_s": (-LARGE, 5),
                "plan_mb": (-math.inf, 200),
                "auc_difference": ANY,
            },
        ),
        case(
            "four jobs are compared at both step times",
            "overhead.py",
            dict.fromkeys([f"{job}_{step}" for job in ("strategy", "callback", "control") for step in ("50ms", "5ms")], A_FEW),
        ),
        case(
            "the page is painted soon and costs its server and etcd little",
            "dashboard.py",
            {"first_paint_s": (1e-9, 3), "core_per_viewer": (0, 0.1), "etcd_rps": (0, 1)},
        ),
        case("a share in two parts is hardly slower than at once", "parts.py", {"parts": (0.5, 2)}),  # 0.9 to 1 if quiet
        case(
            "jobs whose workers are killed finish and survivors agree soon",
            "kill_recovery.py",
            {
                "finished": (2, 2),
                "of": (2, 2),
                "stock_finished": ANY,
                "stock_of": ANY,
                "agree_s": SECONDS,  # 0.5 s on a quiet machine
                "node_lost_s": (1, 20),  # at least a lease's expiry, else nothing had vanished
            },
        ),
        case(
            "resizing and losing workers does not change the model",
            "accuracy.py",
            # A few hundred steps on few rows; the full run on the Adult rows is held to 0.003.
            {"elastic_auc": ANY, "unresized_auc": (0.6, 1), "largest_difference": (-LARGE, 0.01)},
        ),
        case("faults of etcd cost no job and no step", "etcd_faults.py", {"jobs_lost": (0, 0), "steps_lost": (0, 0)}),
        case(
            "nodes join faster than torch's and are quiet while idle",
            "rendezvous_scale.py",
            # Requests are counted, not timed: lease refreshes every 2.5 s, and the coordinator's checks of its watch.
            {"join_16_s": SECONDS, "absorb_16_s": SECONDS, "idle_rps_per_node": (0.2, 0.6), "ratio_16": (1, LARGE)},
        ),
        case(
            "a new node costs the others a switch and nothing else",
            "deploy.py",
            dict.fromkeys([f"{t}_{name}_s" for name in ("stall", "decision_to_training") for t in ("local", "slurm")], ANY),
            _stall_is_a_part,
        ),
        case(
            "the planner's choice is compared with the best of a grid",
            "auto_config.py",
            {"cold_min": A_FEW, "warm_min": A_FEW, "visited_max": (1, 4)},  # four configurations in all
        ),
        case(
            "only the slow worker is named and replaced",
            "stragglers.py",
            {"named_steps": (1e-9, 100), "recovered": (0.5, LARGE), "false_alarms": (0, 0)},
        ),
        case(
            "a leaking job finishes only if it is watched",
            "memory_growth.py",
            {"static_killed": (1, 1), "finished": (1, 1), "killed": (0, 0), "jobs": (1, 1)},
        ),
        case(
            "resharding in memory is shorter than a restart",
            "reshard.py",
            {
                "stall_s": (-0.5, 10),
                "ratio": (2, LARGE),  # a usual step is subtracted
                "bytes_ratio": (0.99, 1.01),
                "bandwidth_ratio": ABOVE_0,  # bytes are counted, not timed
                "extra_memory": ANY,
                "kill_s": (-2, 20),  # memory is not meaningful for small tables
            },
            _always,
            needs_torchrec,
        ),
        case(
            "snapshots leave most of the throughput",
            "snapshot.py",
            {"throughput_ratio": A_FEW, "stall_ratio": (1e-9, 5)},
            _always,
            needs_torchrec,
        ),
    ],
)
def test_figures_are_within_their_bounds(command: str, bounds: Bounds, also: Callable[[Figures], bool]) -> None:
    result = figures_within(command, bounds)
    assert also(result), result


def figures_within(command: str, bounds: Bounds, environment: Mapping[str, str] | None = None) -> Figures:
    """Run the short form of a benchmark, and return its figures, which have these names and bounds."""
    script, *options = command.split()
    result = figures_of(script, "--quick", *options, environment=environment)
    assert list(result) == list(bounds)
    for name, (least, most) in bounds.items():
        assert least <= result[name] <= most or name in MAY_BE_NAN, result
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command, bounds",
    [
        pytest.param(
            "perf_model.py",
            {
                **dict(zip(SPLITS, map(at_most, (5, 5, 8, 9, 6.5)), strict=True)),
                "worst_ratio": at_most(1.15),  # two seeds; 1.1 over ten
                "coverage": (85, 95),
                "off_node": at_most(25),
                "off_node_coverage": (85, 98),
            },
            id="errors on measured traces are small",
            marks=[needs_traces, pytest.mark.slow],
        ),
        pytest.param(
            "perf_model.py --without-sync",
            {
                **dict.fromkeys([*SPLITS, "worst_ratio", "coverage", "off_node", "off_node_coverage"], ANY),
                "interp": at_most(5.5),
                "few": at_most(9),
                "coverage": (85, 95),
            },
            id="they are where synchronisation was not measured apart",
            marks=[needs_traces, pytest.mark.on_demand],
        ),
        pytest.param(
            "perf_model.py --history",
            {
                **dict(zip(WITH_HISTORY, map(at_most, (7.5, 4.9, 5.5)), strict=True)),
                "worst_harm": at_most(0.5),  # two seeds
                "coverage": (85, 95),
                "off_node": at_most(15),
                "off_node_coverage": (85, 98),
            },
            id="other jobs on the same hardware lower the errors",
            marks=[needs_traces, pytest.mark.on_demand],
        ),
        pytest.param(
            "colocation.py --pairs --seeds 1",
            {"known_error": at_most(0.14), "left_out_error": at_most(0.16), "oracle": (0.95, LARGE), "decision_ms": ANY},
            id="slowdowns and sets of measured pairs are predicted",
            marks=[needs_pairs, pytest.mark.on_demand],
        ),
        pytest.param(
            f"cluster.py --scale --speeds {TRACES}",
            {"decision_s": at_most(5), "decision_mb": at_most(500), "optimality": (0.98, LARGE)},  # 0.25 s on an idle core
            id="one decision for a large cluster is fast and near the optimum",
            marks=[needs_traces, pytest.mark.long],
        ),
        pytest.param(
            "etcd_load.py --parts bytes",
            {"mb_per_worker_day": (1e-9, 20)},  # 2 in the full run; a record of the short one counts for thousands in a day
            id="an undisturbed job writes little",
            marks=[pytest.mark.slow, pytest.mark.on_demand],
        ),
    ],
)
def test_computed_figures_are_within_their_bounds(command: str, bounds: Bounds) -> None:
    figures_within(command, bounds, ONE_THREAD)


def test_benchmark_of_streams_runs_only_the_requested_parts() -> None:
    assert list(figures_of("stream.py", "--quick", "--parts", "plan")) == ["plan_s", "plan_mb"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_no_process_behind(how: signal.Signals) -> None:
    benchmark = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "live_resize.py"), "--quick"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def started() -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(benchmark.pid).children(recursive=True)
        return found if len(found) >= 4 else []  # etcd and three agents

    try:
        processes = eventually(started, "etcd and three agents", 60.0, 0.1)
        os.kill(benchmark.pid, how)
        assert benchmark.wait(30.0) != 0
        _, alive = psutil.wait_procs(processes, timeout=10.0)
        assert alive == []
    finally:
        benchmark.kill()
        benchmark.wait()
