"""One real etcd for the whole test session; every test has its own run id, so tests do not see each other."""

from __future__ import annotations

import gc
import os
import signal
import sys
import uuid
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import Keys
from tests.support.leaks import Held, left_behind, mark_descendants
from tests.support.warm_tree import FreshNursery

TESTS = Path(__file__).parent
CHECKED_FOR_LEAKS = {
    *("checks", "cli", "colocate", "components", "dashboard", "data", "distribution", "e2e", "lab", "live", "pool", "rdzv"),
    *("report", "tables", "tuning", "test_watchdog.py"),
}
"""Folders, and files outside of folders, of tests that must leave nothing behind."""

# Scripts that tests start import their helpers as tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))

# Keep the user's own history from warm-starting or recording the jobs of tests.
os.environ["DLROVER_HISTORY"] = "off"

# An example's time says nothing while other tests run beside it.
settings.register_profile("beside others", deadline=None)
settings.load_profile("beside others")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script has started the tests in the background. `dlrover run` leaves ignored signals alone, and tests press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

mark_descendants()

WAITING = ("distribution/", "e2e/", "strangers/", "examples/", "components/", "rdzv/", "benchmarks/")
"""Beginnings of the paths of tests that mostly wait for processes."""

TOGETHER = {
    "distribution/test_wheel.py",
    "e2e/test_grouped_workers.py",
    "e2e/test_slurm_jobs.py",
    "rdzv/test_security.py",
    "rdzv/test_torchelastic_contract.py",
    "tables/test_resharding.py",
}
"""Test files with a fixture that costs seconds. Each runs in one process."""


COMPUTING = (
    *("checks/", "report/", "colocate/test_core_speeds", "colocate/test_matching", "colocate/test_mixed"),
    *("colocate/test_policies", "colocate/test_slowdown", "colocate/test_turns", "lab/test_elastic"),
    *("lab/test_measured_speeds", "lab/test_published_figures", "lab/test_simulator", "lab/test_study", "lab/test_traces"),
    *("pool/test_division", "pool/test_elastic_placement", "pool/test_knapsack", "pool/test_moves"),
    *("pool/test_owners", "pool/test_prices", "pool/test_sizes", "tuning/test_analyst"),
    *("tuning/test_auto", "tuning/test_history", "tuning/test_memory", "tuning/test_model", "tuning/test_plan"),
    *("tuning/test_population", "tuning/test_profile_log", "tuning/test_stragglers", "tuning/test_warm_start"),
)
"""Beginnings of the paths of tests that only compute: they wait for no other process, and no deadline depends on them."""

PATIENT = (
    *("components/control/", "components/test_controller_faults.py", "e2e/test_arguments.py", "e2e/test_cuts.py"),
    *("e2e/test_faults.py", "e2e/test_features.py", "e2e/test_full_etcd.py", "e2e/test_kafka_jobs.py"),
    *("e2e/test_namespaces.py", "e2e/test_pool_jobs.py", "e2e/test_waiting_nodes.py", "rdzv/etcd/", "rdzv/membership"),
)
"""Beginnings of the paths of tests that sleep or wait for timeouts for three quarters of their time, or more."""

MIN_FILLED = 4
"""Processes of a test run from which on the last one only computes, and lets the others go first.

While the others wait for the processes of their tests, it has the cores.
"""

MIN_PATIENT = 5
"""Processes of a test run from which on the last but one only runs tests of `PATIENT`, which hardly need a core."""

if os.environ.get("PYTEST_XDIST_WORKER") == f"gw{max(MIN_FILLED, int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', '0'))) - 1}":
    os.nice(10)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and tests out of all garbage collections: they live as long as this process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests that take long or lack their device; let long tests start first, so that none is the last to run."""
    named = (*CHECKED_FOR_LEAKS, *WAITING, *TOGETHER, *COMPUTING, *PATIENT)
    dead = [name for name in named if not any(TESTS.glob(f"{name}*"))]
    assert not dead, f"tests/conftest.py names tests that do not exist: {dead}"
    items.sort(key=_turn)
    if not os.environ.get("DLROVER_ALL_FAULTS"):
        for item in items:
            if item.get_closest_marker("on_demand") is not None:
                item.add_marker(pytest.mark.skip(reason="takes long: with DLROVER_ALL_FAULTS=1 only"))
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpu:
        import torch  # takes a second, also in the process that only hands tests out

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _turn(item: pytest.Item) -> int:
    place, is_long = item.path.relative_to(TESTS).as_posix(), item.get_closest_marker("long") is not None
    if place.startswith(PATIENT):
        return 3 if is_long else 4
    return 0 if is_long else _turn_of_file(place)


@cache
def _turn_of_file(place: str) -> int:
    if place in TOGETHER:
        return 0
    if _is_computing(place):
        return 5
    return 1 if place.startswith(WAITING) else 2


def _is_computing(file: str) -> bool:
    return file.startswith(COMPUTING)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand tests out one by one in the order above, and the files of `TOGETHER` as a whole.

    With four processes or more, the last one gets tests from the other end, as long as they only compute: see `COMPUTING`.
    With five or more, the last but one gets only those of `PATIENT`. The others take what those two have left.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.removeprefix("tests/") in TOGETHER else nodeid

        def _next_for(self, node: Any) -> str | None:
            """Return the next tests for a process with a role of its own, None if there are none."""
            if self._place_from_end(node) == 1:
                newest = next(reversed(self.workqueue), "")
                return newest if _is_computing(newest.removeprefix("tests/")) else None
            return next((each for each in self.workqueue if each.removeprefix("tests/").startswith(PATIENT)), None)

        def _has_role(self, node: Any) -> bool:
            num_roles = (self.numnodes >= MIN_FILLED) + (self.numnodes >= MIN_PATIENT)
            return bool(self._place_from_end(node) <= num_roles)

        def _place_from_end(self, node: Any) -> int:
            return int(self.numnodes - int(node.gateway.id.removeprefix("gw")))

        def _assign_work_unit(self, node: Any) -> None:
            if self._has_role(node) and (found := self._next_for(node)) is not None:
                self.workqueue.move_to_end(found, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if self._has_role(node) and not node.shutting_down and self.workqueue and self._next_for(node) is None:
                node.shutdown()  # xdist then sends it no more tests
            else:
                super()._reschedule(node)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before all other fixtures of a test and torn down after them."""
    room = request.path.relative_to(TESTS).parts[0]
    if room not in CHECKED_FOR_LEAKS or request.node.get_closest_marker("leaks") is not None:
        yield
        return
    before = Held.now()
    yield
    left = left_behind(before)
    assert not left, f"the test has left behind: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def leaves_no_process_group() -> Iterator[None]:
    """Destroy the default process group that a test leaves behind, in which later tests would train, and fail the test."""
    had_one = _has_process_group()
    yield
    if _has_process_group() and not had_one:
        sys.modules["torch.distributed"].destroy_process_group()
        pytest.fail("the test has left a default process group behind: call torch.distributed.destroy_process_group()")


def _has_process_group() -> bool:
    # No import: torch takes a second.
    return "torch.distributed" in sys.modules and bool(sys.modules["torch.distributed"].is_initialized())


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """The process that forks workers, with all that they import. It is the only one of a test process, as it takes seconds."""
    from tests.e2e import harness

    harness.start_fork_server()
    yield
    harness.stop_fork_server()


@pytest.fixture(scope="session")
def nursery_of_nodes() -> Iterator[FreshNursery]:
    """The process that forks nodes. It is the only one of a test process, as it takes seconds."""
    nursery = FreshNursery()
    yield nursery
    nursery.close()


@pytest.fixture
def warm_nodes(nursery_of_nodes: FreshNursery) -> Iterator[None]:
    """Fork the nodes that the test's own process starts, instead of starting fresh interpreters."""
    with nursery_of_nodes.in_use():
        yield


@pytest.fixture(scope="session")
def etcd() -> Iterator[EmbeddedEtcd]:
    """Shared server: do not stop it in a test; `private_etcd` is for that."""
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def private_etcd() -> Iterator[EmbeddedEtcd]:
    """A server of this test alone, to be killed and restarted at will."""
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def client(etcd: EmbeddedEtcd) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdConfig(etcd.endpoint)) as connected:
        yield connected


@pytest.fixture
def run_id() -> str:
    return f"run-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def keys(run_id: str) -> Keys:
    return Keys(run_id)
