"""Requests that the live workers of a large job send to etcd, and how soon all of them know of a change.

    python benchmarks/etcd_load_workers.py [--workers 250,1000] [--idle 40] [--writes 5] [--rounds 3] [--quick]

A worker is the real `Membership`, with its own connection to etcd, its lease, its mirrors and its turn as coordinator. It
trains nothing and connects to no other worker: it enters each round as soon as it sees it. Light processes hold the workers
(`light_processes.py`). For each number of workers N:

- idle: requests to etcd per second and worker while nothing happens, as `rendezvous_scale.py` counts them. Keys elsewhere in
  etcd change meanwhile (`--writes` per second), as on a shared etcd.
- grow: a worker is ready to join; until all N + 1 know the round that takes it in, on the machine's monotonic clock.
- loss: a worker dies and is evicted by a neighbour; until the other N know the round without it.
- settled: after the grow, until the coordinator has seen all workers enter.
- requests, notices and kilobytes per worker: what each change costs, by etcd's own count, without the requests of an idle job.
  A notice is one event of a watch. Kilobytes (10^3 bytes) are those from and to all clients, an idle job's among them.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import threading
import time
from dataclasses import astuple, dataclass
from typing import Any

from jobs import BenchmarkError, Workspace, describe_machine, result_line
from light_processes import LightProcesses, OtherUser, metrics_of, requests_to

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, KeyValue
from lightning_dlrover.rdzv.job.records import Keys, RoundRecord
from lightning_dlrover.rdzv.membership import membership as membership_module
from lightning_dlrover.rdzv.membership.membership import Membership, MembershipConfig
from lightning_dlrover.rdzv.membership.rounds import Decoder, WorkerView, dead_workers
from tests.support.waiting import eventually

WORKERS_PER_PROCESS = 25
TIMEOUT_S = 600.0
SETTLE_S = 5.0
BYTES = ("etcd_network_client_grpc_sent_bytes_total", "etcd_network_client_grpc_received_bytes_total")
PRELOADED = ["lightning_dlrover.rdzv.membership.membership"]


class _Worker:
    """One worker, which enters each round that it is a member of."""

    def __init__(self, endpoint: str, run_id: str, min_workers: int, max_workers: int) -> None:
        self._client = EtcdClient(EtcdConfig(endpoint, timeout_s=60))
        self._port = socket.create_server(("127.0.0.1", 0))  # refuses connections once the worker is dead
        self.seen: dict[int, float] = {}  # time at which this worker knew of each round
        self.error = ""
        self._entered = 0
        self._news = threading.Event()
        config = MembershipConfig(
            run_id=run_id,
            prefix="/dlrover",
            agent_id=f"agent-{self._port.getsockname()[1]}",
            local_rank=0,
            min_workers=min_workers,
            max_workers=max_workers,
            version="1",
            address="127.0.0.1",
            port=self._port.getsockname()[1],
        )
        self.membership = Membership(self._client, config, on_view=self._look)
        self.state = self.membership.register()
        threading.Thread(target=self._follow, daemon=True).start()

    def _look(self, view: WorkerView) -> None:
        if view.round is not None and view.round.number not in self.seen:
            self.seen[view.round.number] = time.monotonic()
            self._news.set()

    def _follow(self) -> None:
        try:
            while True:
                self._news.wait()
                self._news.clear()
                round_ = self.membership.view.round
                if round_ is not None and round_.number > self._entered and self.membership.worker_id in round_.members:
                    self._entered = round_.number
                    self.membership.own.update("active", round_.number)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def die(self) -> None:
        """Stop as a killed process: its port refuses, and its lease is not kept alive any more."""
        self._port.close()
        self.membership._closing = True
        self._client.end_children(0.1)


class _Host:
    """The workers of one process."""

    def __init__(self) -> None:
        membership_module.TICK_S = 5.0  # a change wakes the thread at once; so many threads must not wake up without one
        self._workers: list[_Worker] = []

    def make(self, number: int, *arguments: Any) -> None:
        self._workers += [_Worker(*arguments) for _ in range(number)]

    def ready(self) -> tuple[float, str]:
        """Let the newest worker ask for admission; return the time and its id."""
        worker = self._workers[-1]
        worker.membership.own.update("standby")
        began = time.monotonic()
        worker.membership.own.update("ready")
        return began, worker.membership.worker_id

    def kill_one(self) -> tuple[float, str]:
        """Kill the newest worker; return the time and its id."""
        worker = self._workers.pop()
        began = time.monotonic()
        worker.die()
        return began, worker.membership.worker_id

    def evict_if_dead(self, worker_id: str) -> None:
        """Let a worker probe another one, as its neighbour does."""
        membership = self._workers[0].membership
        membership.evict(dead_workers(membership.whose_refusal_counts([worker_id])))

    def saw(self, number: int) -> float:
        """Time at which the last worker knew of a round."""

        def failed() -> str:
            errors = [worker.error for worker in self._workers if worker.error]
            return f"{len(errors)} workers failed, the first with {errors[0]}" if errors else ""

        what = f"all workers to know of round {number}"
        known = lambda: all(number in worker.seen for worker in self._workers)  # noqa: E731
        eventually(known, what, TIMEOUT_S, ended=failed, error=BenchmarkError)
        return max((worker.seen[number] for worker in self._workers), default=0.0)


@dataclass(frozen=True)
class Figures:
    idle_rps: float
    grow_s: float
    loss_s: float
    settled_s: float
    requests: float  # per worker, for one change of both kinds
    notices: float
    kilobytes: float


class Job:
    """A job of light workers, observed from outside."""

    def __init__(self, etcd: EmbeddedEtcd, run_id: str, num_workers: int) -> None:
        self._etcd = etcd
        self._client = EtcdClient(EtcdConfig(etcd.endpoint, timeout_s=60))
        self._keys = Keys(run_id)
        self._mirror = Mirror(self._client, self._keys.live)  # a controller has the same
        self._decoder = Decoder(self._keys, lambda key, error: None)
        self._num_workers = num_workers
        self._arguments = (etcd.endpoint, run_id, num_workers, num_workers + 1)
        num_hosts = max(2, -(-num_workers // WORKERS_PER_PROCESS))
        self._shares = [num_workers // num_hosts + (host < num_workers % num_hosts) for host in range(num_hosts)]
        self._hosts = LightProcesses(_Host, num_hosts + 1, PRELOADED, TIMEOUT_S)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        self._hosts.__exit__(*error)
        self._client.close()

    def start(self) -> None:
        """Start all workers in one round; one more stands by."""
        for host, share in enumerate(self._shares):  # a thousand simultaneous connections overflow the server's queue
            self._hosts.ask(host, "make", share, *self._arguments)
        self.settle()
        self._hosts.ask(len(self._shares), "make", 1, *self._arguments)

    def settle(self) -> tuple[RoundRecord, float]:
        """Wait until all members of the newest round have entered it; return it and the time."""

        def look(entries: dict[str, KeyValue]) -> RoundRecord | None:
            view = self._decoder.view(entries)
            members = view.round.members if view.round is not None else []
            records = [view.workers.get(member) for member in members]
            number = view.round.number if view.round is not None else 0
            has_settled = all(r is not None and (r.state, r.round_number) == ("active", number) for r in records)
            return view.round if len(members) >= self._num_workers and has_settled else None

        return self._mirror.wait_for(look, TIMEOUT_S), time.monotonic()

    def grow(self) -> tuple[float, float]:
        """Admit the worker that stands by; return the seconds until all know, and until all have entered."""
        round_, _ = self.settle()
        began, worker_id = _moment(self._hosts.ask(len(self._shares), "ready"))
        known = self._all_know(round_.number + 1)
        after, settled = self.settle()
        if worker_id not in after.members or after.number != round_.number + 1:
            raise BenchmarkError(f"{worker_id} was not admitted by one round: {after.reason}")
        return known - began, settled - began

    def lose_one(self) -> float:
        """Kill a worker, let a neighbour notice, and return the seconds until all others know."""
        round_, _ = self.settle()
        began, worker_id = _moment(self._hosts.ask(len(self._shares), "kill_one"))
        self._hosts.ask(0, "evict_if_dead", worker_id)
        known = self._all_know(round_.number + 1)
        after, _ = self.settle()
        if set(round_.members) - set(after.members) != {worker_id}:
            raise BenchmarkError(f"not only {worker_id} was lost: {after.reason}")
        return known - began

    def idle_rps(self, idle_s: float, writes_per_s: float) -> float:
        with OtherUser(self._etcd, writes_per_s) as other:
            time.sleep(min(SETTLE_S, idle_s))
            before, writes_before, since = requests_to(self._etcd), other.num_writes, time.monotonic()
            time.sleep(idle_s)
            after, num_writes, lasted_s = requests_to(self._etcd), other.num_writes - writes_before, time.monotonic() - since
        counts = {method: after[method] - before.get(method, 0.0) for method in after}
        counts["Put"] = counts.get("Put", 0.0) - num_writes
        told = ", ".join(f"{method} {count / lasted_s:.1f}" for method, count in sorted(counts.items()) if count > 0)
        print(f"  {self._num_workers} workers idle for {lasted_s:.0f} s, requests/s: {told or 'none'}", flush=True)
        total: float = sum(counts.values())
        return total / lasted_s / (self._num_workers + 1)

    def costs(self) -> tuple[float, float, float]:
        """Requests, events of watches, and kilobytes from and to clients so far."""
        metrics = metrics_of(self._etcd)
        events = sum(v for name, _, v in metrics if name == "etcd_debugging_mvcc_events_total")
        num_bytes = sum(v for name, _, v in metrics if name in BYTES)
        return sum(requests_to(self._etcd).values()), events, num_bytes / 1000

    def _all_know(self, number: int) -> float:
        seen: list[float] = self._hosts.ask_all("saw", [(number,)] * len(self._hosts))
        return max(seen)


def _moment(answer: tuple[float, str]) -> tuple[float, str]:
    return answer


def measure_job(etcd: EmbeddedEtcd, num_workers: int, idle_s: float, writes_per_s: float) -> Figures:
    with Job(etcd, f"load-{num_workers}", num_workers) as job:
        job.start()
        idle_rps = job.idle_rps(idle_s, writes_per_s)
        before, since = job.costs(), time.monotonic()
        grow_s, settled_s = job.grow()
        loss_s = job.lose_one()
        requests, events, kilobytes = (after - first for after, first in zip(job.costs(), before, strict=True))
        requests -= idle_rps * num_workers * (time.monotonic() - since)
    costs = (each / num_workers / 2 for each in (requests, events, kilobytes))
    return Figures(idle_rps, grow_s, loss_s, settled_s, *costs)


def measure(
    quick: bool, workers: str = "250,1000", idle_s: float = 40.0, writes: float = 5.0, rounds: int = 3
) -> dict[str, float]:
    """Measure jobs of several sizes; return the figures of the largest one."""
    if quick:
        workers, idle_s, rounds = "25,100", 6.0, 1
    print(
        f"{'workers':>8}{'idle requests/s/worker':>24}{'grow s':>9}{'settled s':>11}{'loss s':>9}"
        f"{'requests/worker/change':>24}{'notices/worker/change':>23}{'kB/worker/change':>18}"
    )
    found = {}
    for num_workers in map(int, workers.split(",")):
        runs = []
        for _ in range(rounds):
            with EmbeddedEtcd() as etcd:
                runs.append(measure_job(etcd, num_workers, idle_s, writes))
        found[num_workers] = f = Figures(*map(statistics.median, zip(*map(astuple, runs), strict=True)))
        print(
            f"{num_workers:8}{f.idle_rps:24.3f}{f.grow_s:9.3f}{f.settled_s:11.3f}{f.loss_s:9.3f}{f.requests:24.2f}{f.notices:23.2f}"
            f"{f.kilobytes:18.1f}",
            flush=True,
        )
    largest = found[max(found)]
    return {
        "idle_rps_per_worker": largest.idle_rps,
        f"change_{max(found)}_s": max(largest.grow_s, largest.loss_s),
        f"requests_per_change_{max(found)}": largest.requests,
        f"kb_per_change_{max(found)}": largest.kilobytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="250,1000", help="numbers of workers, separated by commas")
    parser.add_argument("--idle", type=float, default=40.0, help="seconds that requests are counted for")
    parser.add_argument("--writes", type=float, default=5.0, help="writes per second of somebody else meanwhile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="25 and 100 workers, under 60 s")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    with Workspace("etcd-load-workers"):
        print(result_line(measure(options.quick, options.workers, options.idle, options.writes, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
