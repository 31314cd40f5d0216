"""Bytes that a job writes to etcd while it trains undisturbed: a part of `etcd_load.py`.

A job of three workers, with a controller, elastic agents, profiles and a planner, trains beside whatever else this machine
does. Its etcd keeps every revision. After the start-up, which ends a minute after the first step, the job trains for ten
minutes. Each revision below the job's prefix is then read again with a watch, and counted with the bytes that it
takes in etcd's database: key, value, and the fields that etcd stores with them. The growth of the database that etcd itself
reports stands beside their sum: it counts whole pages, which are about half full.

- A worker's own bytes are those of the keys with its name: its record, its agent's, its profile. The largest counts.
- The job's bytes are all others, wherever they come from: history, plan, rounds. They do not depend on the number of workers.

`mb_per_worker_day` is a day of both together, start-up included: what a job of one worker writes. With more workers the job's
bytes are shared by all of them. The bound by construction holds for any noise (`tuning/profile_log.py`).
Seconds are not extrapolated beyond that bound, if it held in them.

If there are step-time traces (`$DLROVER_SHARED_DATA`, else ../shared/data), their noise is replayed: the deviations of a
model's measured step times, among placements of equal nodes, workers and batch, become those of windows of two seconds, without
any order in time, as measured and three times as large. The rules of `tuning/profile_log.py` were chosen on ncf, cifar10 and
deepspeech2; bert, imagenet and yolov3 are reported.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from jobs import BenchmarkError, ControlledJob, Workspace

from lightning_dlrover.codec import to_json
from lightning_dlrover.lab.simulate.traces import read_trace
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc, grpc
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import Keys
from lightning_dlrover.tuning.profile_log import (
    DECISIONS,
    FIRST_WINDOWS,
    PROFILES,
    PROGRESS,
    WINDOWS,
    PublishedProfile,
    Rate,
    WindowLog,
    rounded,
    stored_bytes,
)
from lightning_dlrover.tuning.samples import StepProfile

SHARED_DATA = Path(os.environ.get("DLROVER_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
CHOSEN_ON = ("ncf", "cifar10", "deepspeech2")
REPORTED_ON = ("bert", "imagenet", "yolov3")

NUM_WORKERS = 3
STEP_S = 0.1
START_UP_S = 60.0
WATCH_TIMEOUT_S = 60.0
MB = 1e6
DAY_S = 86_400.0

ENTRY_BYTES = 16 + 17
"""Bytes of an entry's place in a page of etcd's database, and of the revision that is its key there."""

WORKER_RATES, JOB_RATES = (PROFILES,), (WINDOWS, FIRST_WINDOWS, DECISIONS, PROGRESS)
WITH_ALLOWANCE = ("profiles/", "events/", "live/shared/plan", "progress")
"""Bounds by construction, and the keys that they hold for."""

OWN_FOLDERS = ("live/workers/", "live/agents/", "profiles/", "stacks/", "live/drains/")
"""Folders with one key per worker or agent. A worker of this job has an agent of its own."""


def measure(quick: bool) -> dict[str, float]:
    """Run the job, print its table, and return megabytes per worker and day.

    Raises:
        BenchmarkError: the job ended early, or etcd did not return its revisions.
    """
    figure = measure_job(start_up_s=40.0, slices=4, slice_s=10.0) if quick else measure_job(START_UP_S, slices=20, slice_s=30.0)
    if (SHARED_DATA / "step_traces").is_dir():
        replay(SHARED_DATA / "step_traces", hours=1 if quick else 24)
    else:
        print(f"no step_traces in {SHARED_DATA}: no noise is replayed (set DLROVER_SHARED_DATA to their folder)")
    return {"mb_per_worker_day": figure}


# --- a job ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """etcd's own figures at a moment."""

    at_s: float  # monotonic clock
    revision: int
    raft_index: int  # requests that etcd has logged
    used_bytes: int  # pages in use in its database


@dataclass(frozen=True)
class Revision:
    number: int
    key: str  # below the job's root
    num_bytes: int
    removes: bool = False  # it removes the key

    @property
    def is_disturbance(self) -> bool:
        """Whether a worker or an agent was lost, or the workers formed another round."""
        return self.key == "live/shared/round" or (self.removes and self.key.startswith(("live/workers/", "live/agents/")))

    @property
    def folder(self) -> str:
        """Folder of its key, or the key itself if it is the only one of its kind."""
        if self.owner:
            return self.key.removesuffix(self.owner)
        is_single = self.key.startswith("live/") or "/" not in self.key
        return self.key if is_single else self.key[: self.key.find("/") + 1]

    @property
    def owner(self) -> str:
        """Worker or agent that the key belongs to; empty: the job."""
        return self.key.rpartition("/")[2] if self.key.startswith(OWN_FOLDERS) else ""


def measure_job(start_up_s: float, slices: int, slice_s: float) -> float:
    with contextlib.ExitStack() as stack:
        workspace = stack.enter_context(Workspace("etcd-load"))
        etcd = stack.enter_context(EmbeddedEtcd(superseded_s=DAY_S))
        client = stack.enter_context(EtcdClient(EtcdConfig(etcd.endpoint)))
        arguments = ["--profiled", "--step-floor-s", str(STEP_S)]
        job = stack.enter_context(workspace.controlled_job("etcd-load", etcd.endpoint, arguments))
        empty = moment(client, etcd)
        job.start(NUM_WORKERS, NUM_WORKERS)
        job.wait_for_steps(1, NUM_WORKERS)
        train_for(job, start_up_s)
        moments = [moment(client, etcd)]
        for _ in range(slices):
            train_for(job, slice_s)
            moments.append(moment(client, etcd))
        revisions = revisions_of(client, Keys("etcd-load").root)
    load = Load(empty, moments, revisions)
    load.print_table()
    return load.mb_per_worker_day


def train_for(job: ControlledJob, seconds: float) -> None:
    """Wait while the job trains.

    Raises:
        BenchmarkError: it ended, or makes no steps any more.
    """
    until, newest = time.monotonic() + seconds, job.newest_step()
    job.wait_for("the end of the measurement", lambda: time.monotonic() > until or None, seconds + 60.0, poll_s=0.2)
    if job.newest_step() == newest:
        raise BenchmarkError(f"the job made no step in {seconds:.0f} s")


def moment(client: EtcdClient, etcd: EmbeddedEtcd) -> Moment:
    status = client.caller.call("read the size", "Maintenance", "Status", etcdrpc.StatusRequest())
    connection = http.client.HTTPConnection(etcd.endpoint, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    used = re.search(r"^etcd_mvcc_db_total_size_in_use_in_bytes ([-+.\deE]+)$", page, re.MULTILINE)
    if used is None:
        raise BenchmarkError("etcd does not report the size of its database")
    return Moment(time.monotonic(), int(status.header.revision), int(status.raftIndex), int(float(used[1])))


def revisions_of(client: EtcdClient, root: str) -> list[Revision]:
    """Return all revisions below a folder so far.

    Raises:
        BenchmarkError: etcd did not return them in time.
    """
    mark = root + "the-last-one"
    client.put(mark, b"")
    found: list[Revision] = []
    stream = client.caller.watch(root, 1)
    limit = threading.Timer(WATCH_TIMEOUT_S, stream.cancel)
    limit.start()
    try:
        for response in stream:
            if response.canceled or response.compact_revision:
                raise BenchmarkError(f"etcd ended the watch of {root!r}: {response.cancel_reason or 'compacted'}")
            for event in response.events:
                key = event.kv.key.decode()
                if key == mark:
                    return found
                name, num_bytes, removes = key.removeprefix(root), ENTRY_BYTES + entry_bytes(event), event.type == event.DELETE
                found.append(Revision(event.kv.mod_revision, name, num_bytes, removes))
    except grpc.RpcError as error:
        raise BenchmarkError(f"etcd did not return the revisions below {root!r} within {WATCH_TIMEOUT_S:g} s") from error
    finally:
        limit.cancel()
        stream.cancel()
    raise BenchmarkError(f"etcd ended the watch of {root!r} before the last revision")


def entry_bytes(event: Any) -> int:
    """Return the size of the value that etcd stores for a revision."""
    if event.type == event.DELETE:
        return 1 + len(event.kv.key) + 2  # a mark in the entry's name, and the key alone
    return int(event.kv.ByteSize())


def most_bytes(rates: Sequence[Rate], seconds: float) -> float:
    return sum(rate.within(seconds) for rate in rates)


class Load:
    """Revisions of one job, by folder and by phase.

    Args:
        empty: before the job.
        moments: the ends of the start-up and of each slice of the measurement. A slice counts if neither it nor the one before
            saw a disturbance: on an overloaded machine leases expire, and workers come back.

    Raises:
        BenchmarkError: too few slices count.
    """

    def __init__(self, empty: Moment, moments: Sequence[Moment], revisions: Sequence[Revision]) -> None:
        self._empty, self._began, self._ended = empty, moments[0], moments[-1]
        self._revisions = revisions
        self._start_up = [each for each in revisions if each.number <= self._began.revision]
        self._steady: list[Revision] = []
        self._num_slices, self._num_disturbed = len(moments) - 1, 0
        steady_s, was_disturbed = 0.0, False
        for before, after in pairwise(moments):
            seen = [each for each in revisions if before.revision < each.number <= after.revision]
            is_disturbed = any(each.is_disturbance for each in seen)
            if is_disturbed or was_disturbed:
                self._num_disturbed += 1
            else:
                self._steady += seen
                steady_s += after.at_s - before.at_s
            was_disturbed = is_disturbed
        if self._num_disturbed > self._num_slices / 2:
            raise BenchmarkError(
                f"workers or agents were lost in or before {self._num_disturbed} of {self._num_slices} slices of the time: "
                "the machine is overloaded; repeat it on a quieter one"
            )
        self._days = steady_s / DAY_S

    def _mb_per_day(self, owner: str) -> float:
        """Return what a worker or agent, or the job (an empty name), writes on its first day."""
        rates = WORKER_RATES if owner else JOB_RATES
        once = sum(each.num_bytes for each in self._start_up if each.owner == owner)
        own = [each for each in self._steady if each.owner == owner]
        others = sum(each.num_bytes for each in own if each.folder not in WITH_ALLOWANCE)
        bounded = sum(each.num_bytes for each in own if each.folder in WITH_ALLOWANCE)
        a_day = bounded / self._days
        if bounded <= most_bytes(rates, self._days * DAY_S):
            a_day = min(a_day, most_bytes(rates, DAY_S))  # a burst of seconds does not last for a day
        return (once + others / self._days + a_day) / MB

    @property
    def job_mb_per_day(self) -> float:
        return self._mb_per_day("")

    @property
    def own_mb_per_day(self) -> float:
        """Largest worker's megabytes on the first day, and the largest agent's."""
        most = {"agent": 0.0, "worker": 0.0}
        for each in [*self._start_up, *self._steady]:
            if each.owner:
                kind = "agent" if each.folder == "live/agents/" else "worker"
                most[kind] = max(most[kind], self._mb_per_day(each.owner))
        return sum(most.values())

    @property
    def mb_per_worker_day(self) -> float:
        return self.own_mb_per_day + self.job_mb_per_day

    def print_table(self) -> None:
        trained_s, measured_s = self._began.at_s - self._empty.at_s, self._days * DAY_S
        print(f"{NUM_WORKERS} workers and their controller: start-up of {trained_s:.0f} s, then {measured_s:.0f} s counted")
        if self._num_disturbed:
            print(f"{self._num_disturbed} of {self._num_slices} slices do not count: a lease expired, or a worker was lost")
        print(f"{'key':<20}{'start-up':>10}{'bytes':>10}{'measured':>10}{'bytes':>10}{'MB/day':>9}")
        for folder in sorted({each.folder for each in [*self._start_up, *self._steady]}):
            before, after = ([e.num_bytes for e in some if e.folder == folder] for some in (self._start_up, self._steady))
            per_day = sum(after) / self._days / MB
            print(f"{folder:<20}{len(before):>10}{sum(before):>10}{len(after):>10}{sum(after):>10}{per_day:9.3f}")
        later = [each for each in self._revisions if self._began.revision < each.number <= self._ended.revision]
        num_logged, since_s = self._ended.raft_index - self._began.raft_index, self._ended.at_s - self._began.at_s
        print(f"after the start-up: {len(later)} revisions; etcd logged {num_logged} requests in {since_s:.0f} s")
        counted = sum(each.num_bytes for each in [*self._start_up, *later])
        grown = self._ended.used_bytes - self._empty.used_bytes
        print(f"all revisions: {counted} bytes; etcd's pages in use have grown by {grown} bytes")
        of_worker, of_job = most_bytes(WORKER_RATES, DAY_S) / MB, most_bytes(JOB_RATES, DAY_S) / MB
        rows = (
            ("each worker", self.own_mb_per_day, of_worker),
            ("the job, all workers", self.job_mb_per_day, of_job),
            ("a job of one worker", self.mb_per_worker_day, of_worker + of_job),
        )
        print(f"{'MB on the first day':<24}{'measured':>10}{'bound':>10}")
        for name, measured, bound in rows:
            print(f"  {name:<22}{measured:10.3f}{bound:10.3f}")


# --- noise that was measured elsewhere ---------------------------------------------------------------------------------------


WINDOW = StepProfile(
    *("a-host-of-a-cluster-12345-abcdef", 1, 0, 4, 4, 0, 20, 512, 128, 1, 1, 4.0, "NVIDIA H200"),
    *(0.1, 0.0, 0.04, 0.04, 0.01, 0.01, 0.0, 5120.0, 1 << 34, 95.0, 1 << 28, 1 << 36, 80.0),
)
WINDOW_S = 2.0
NUM_SLOWDOWNS = 20


def replay(folder: Path, hours: int) -> None:
    """Print what windows with the noise of the traces cost."""
    print(f"\n{hours} h of windows of {WINDOW_S:g} s with noise of the traces: MB/day, and time until a halved speed is shown")
    print(f"{'model':<14}{'noise':>8}{'largest':>9}{'profile':>10}{'history':>10}{'shown after s':>16}")
    for models, use in ((CHOSEN_ON, "chosen on"), (REPORTED_ON, "reported")):
        print(f"{use}:")
        for model in models:
            deviations = deviations_of(folder / f"{model}-placements.csv")
            for factor in (1, 3):
                noise = [factor * each for each in deviations]
                profile, history = cost_of(noise, hours, random.Random(1))
                shown = median(seconds_until_shown(noise, random.Random(seed)) for seed in range(NUM_SLOWDOWNS))
                spread = math.sqrt(sum(each**2 for each in noise) / len(noise))
                largest = max(map(abs, noise))
                print(f"{model:<14}{spread:8.3f}{largest:9.2f}{profile:10.3f}{history:10.3f}{shown:16.0f}", flush=True)


def deviations_of(path: Path) -> list[float]:
    """Return log ratios of step times to the median of placements with equal nodes, workers and batch."""
    alike = defaultdict(list)
    for sample in read_trace(path).samples:
        alike[sample.num_nodes, sample.num_workers, sample.local_batch].append(sample.step_time_s)
    return [math.log(each / median(times)) for times in alike.values() if len(times) > 2 for each in times]


def noisy(noise: Sequence[float], rng: random.Random, slowdown: float = 1.0) -> StepProfile:
    factor = slowdown * math.exp(rng.choice(noise))
    parts = {name: getattr(WINDOW, name) * factor for name in ("step_time_s", "forward_s", "backward_s", "communication_s")}
    return rounded(replace(WINDOW, samples_per_s=WINDOW.samples_per_s / factor, at=1.8e9 + rng.random(), **parts))


def cost_of(noise: Sequence[float], hours: int, rng: random.Random) -> tuple[float, float]:
    """Return megabytes of profiles and of logged windows per day."""
    published, log = PublishedProfile(), WindowLog()
    profile_bytes = history_bytes = 0
    for number in range(round(3600 * hours / WINDOW_S)):
        window, now = noisy(noise, rng), number * WINDOW_S
        num_bytes = stored_bytes(to_json(window))
        profile_bytes += num_bytes * published.is_due(window, num_bytes, now)
        history_bytes += sum(stored_bytes(to_json(rounded(each))) for each in log.add(window, now))
    return profile_bytes * 24 / hours / MB, history_bytes * 24 / hours / MB


def seconds_until_shown(noise: Sequence[float], rng: random.Random) -> float:
    """Return the time from a slowdown by two, after half an hour of noise, until a published window shows half of it."""
    published, shown = PublishedProfile(), WINDOW
    for number in range(900):
        window = noisy(noise, rng)
        if published.is_due(window, stored_bytes(to_json(window)), number * WINDOW_S):
            shown = window
    for number in range(900, 3600):
        if shown.step_time_s > 1.5 * WINDOW.step_time_s:
            return (number - 900) * WINDOW_S
        window = noisy(noise, rng, slowdown=2.0)
        if published.is_due(window, stored_bytes(to_json(window)), number * WINDOW_S):
            shown = window
    return math.inf
