"""Growth of the rendezvous' cost with the number of nodes: N elastic agents against one etcd, beside torch's own rendezvous.

    python benchmarks/rendezvous_scale.py [--nodes 16,64,256,1000] [--stock 16,64,256] [--rounds 3] [--quick]

A node is a rendezvous handler as torchrun makes it, with its own connection to etcd, in a thread. Light processes hold the
threads. It starts no workers and trains nothing. Obstacles that only come from sharing one machine are removed, for torch's
nodes as for ours (`light_processes.py`). For each N:

- join: N - 1 nodes wait, the last one comes; until `next_rendezvous` has returned to all N (the round takes exactly N nodes).
- absorb: one more node comes to the N that run, which may be N + 1; until `num_nodes_waiting` is above 0 for each of the N.
- idle: requests to etcd per second and node while all N + 1 are there and nothing happens, by etcd's own count (its /metrics):
  every unary call that it has answered (`grpc_server_handled_total`) and every message that it received on a stream
  (`grpc_server_msg_received_total` of lease refreshes and watches). Keys elsewhere in etcd change meanwhile
  (`--writes` per second), as on a shared etcd: a quiet etcd would make the check of a watch look too cheap.

torch's DynamicRendezvousHandler runs on a TCPStore (the c10d backend) in the same processes, with the same nodes and the same
measure of joining. All clocks are the machine's monotonic one. Each figure is the median of `--rounds`, each on a fresh etcd.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import psutil
from jobs import BenchmarkError, Workspace, describe_machine, result_line
from light_processes import LightProcesses, OtherUser, requests_to
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import Keys
from tests.support.waiting import eventually

NODES_PER_PROCESS = 25
START_TIMEOUT_S = 120.0
SETTLE_S = 5.0
JOIN_TIMEOUT_S = 600.0
LOOK_S = 0.1  # seconds between a running node's checks for waiting nodes, as in torchrun
PRELOADED = [
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "lightning_dlrover.rdzv.agents.rendezvous",
]


# -- a process that holds nodes


class _Node(threading.Thread):
    """One node: joins a round, then counts the nodes that wait for the next."""

    def __init__(self, make_handler: Any, connecting: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self._make_handler = make_handler
        self._connecting = connecting
        self.waits = threading.Event()  # its handler exists, and it is about to join
        self.may_join = threading.Event()
        self.joined_at: float | None = None
        self.knew_at: float | None = None
        self.node_rank = -1
        self.error = ""

    def run(self) -> None:
        try:
            with self._connecting:
                handler = self._make_handler()
            self.waits.set()
            self.may_join.wait()
            info = handler.next_rendezvous()
            self.node_rank, self.joined_at = info.rank, time.monotonic()
            while True:
                if handler.num_nodes_waiting() > 0 and self.knew_at is None:
                    self.knew_at = time.monotonic()
                time.sleep(LOOK_S)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


class _Host:
    def __init__(self) -> None:
        self._nodes: list[_Node] = []

    def make(self, kind: str, endpoint: str, run_id: str, num_nodes: int, min_nodes: int, max_nodes: int) -> None:
        """Create handlers that are ready to join, each with its own connection."""
        from torch.distributed.elastic.rendezvous.api import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend as create_c10d
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler as create_dynamic

        from lightning_dlrover.rdzv.agents.rendezvous import create_backend

        def etcd_handler() -> Any:
            # The round is formed once min_nodes are there, although there is room for more.
            options = {"join_timeout": str(JOIN_TIMEOUT_S), "etcd_timeout": "60", "last_call_timeout": "0"}
            return create_backend()(RendezvousParameters("etcd-v3", endpoint, run_id, min_nodes, max_nodes, **options))

        def c10d_handler() -> Any:
            options = {"is_host": "0", "join_timeout": str(int(JOIN_TIMEOUT_S)), "read_timeout": "60"}
            params = RendezvousParameters("c10d", endpoint, run_id, min_nodes, max_nodes, local_addr="127.0.0.1", **options)
            backend, store = create_c10d(params)
            return create_dynamic(store, backend, params)

        make_handler = etcd_handler if kind == "etcd-v3" else c10d_handler
        # A thousand simultaneous connections overflow the server's queue, ours and torch's.
        connecting = threading.Semaphore(1)
        nodes = [_Node(make_handler, connecting) for _ in range(num_nodes)]
        self._nodes += nodes
        for node in nodes:
            node.start()
        self._wait_for(lambda: all(node.waits.is_set() for node in nodes), "all nodes to be ready", START_TIMEOUT_S)

    def join(self, num_nodes: int) -> float:
        """Let the newest nodes join; return the time at which they were released."""
        began = time.monotonic()
        for node in self._nodes[-num_nodes:] if num_nodes else []:
            node.may_join.set()
        return began

    def joined(self, timeout_s: float) -> list[tuple[int, float]]:
        """Node rank and time of each node, once all of them have joined."""
        self._wait_for(lambda: not any(node.joined_at is None for node in self._nodes), "all nodes to join", timeout_s)
        return [(node.node_rank, node.joined_at or 0.0) for node in self._nodes]

    def knew(self, timeout_s: float) -> float:
        """Time at which the last running node detected that another one waits."""
        running = [node for node in self._nodes if node.joined_at is not None]
        self._wait_for(
            lambda: not any(node.knew_at is None for node in running), "news of the new node at all others", timeout_s
        )
        return max((node.knew_at or 0.0 for node in running), default=0.0)

    def cpu_s(self) -> float:
        return time.process_time()

    def _wait_for(self, found: Callable[[], bool], what: str, timeout_s: float) -> None:
        eventually(found, what, timeout_s, 0.005, ended=self._failed, error=BenchmarkError)

    def _failed(self) -> str:
        errors = [node.error for node in self._nodes if node.error]
        return f"{len(errors)} nodes failed, the first with {errors[0]}" if errors else ""


# -- the parent


class Hosts(LightProcesses):
    """Light processes with nodes in them."""

    def __init__(self, num_nodes: int) -> None:
        num_hosts = max(2, -(-num_nodes // NODES_PER_PROCESS))
        self._shares = [num_nodes // num_hosts + (host < num_nodes % num_hosts) for host in range(num_hosts)]
        # One more for the node that comes last.
        super().__init__(_Host, num_hosts + 1, PRELOADED, JOIN_TIMEOUT_S + START_TIMEOUT_S)

    def __enter__(self) -> Hosts:
        return self

    def make(self, kind: str, endpoint: str, run_id: str, min_nodes: int, max_nodes: int) -> None:
        """Create all nodes but the last one, which the last process holds."""
        shares = [self._shares[0] - 1, *self._shares[1:]]
        self.ask_all("make", [(kind, endpoint, run_id, share, min_nodes, max_nodes) for share in shares])

    def make_one(self, kind: str, endpoint: str, run_id: str, min_nodes: int, max_nodes: int) -> None:
        self.ask(len(self) - 1, "make", kind, endpoint, run_id, 1, min_nodes, max_nodes)

    def join(self) -> None:
        self.ask_all("join", [(share,) for share in [self._shares[0] - 1, *self._shares[1:]]])

    def join_one(self) -> float:
        return float(self.ask(len(self) - 1, "join", 1))

    def joined(self) -> list[tuple[int, float]]:
        """Node rank and time of every node."""
        everyone = range(len(self))
        return [found for host in self.ask_all("joined", [(JOIN_TIMEOUT_S,) for _ in everyone]) for found in host]

    def knew(self) -> float:
        """Time at which the last of all nodes detected one more."""
        return float(max(self.ask_all("knew", [(START_TIMEOUT_S,) for _ in range(len(self))])))

    def cpu_s(self) -> float:
        return float(sum(self.ask_all("cpu_s", [() for _ in range(len(self))])))


@dataclass(frozen=True)
class Figures:
    join_s: float
    absorb_s: float
    idle_rps_per_node: float
    join_cpu_s: float  # CPU time of etcd and of the processes with nodes, while they joined


def measure(etcd: EmbeddedEtcd, num_nodes: int, idle_s: float, writes_per_s: float) -> Figures:
    """Measure our backend, on a fresh etcd."""
    run_id = f"scale-{num_nodes}"
    where = ("etcd-v3", etcd.endpoint, run_id, num_nodes, num_nodes + 1)
    with Hosts(num_nodes) as hosts:
        join_s, join_cpu_s = join(
            hosts, *where, settled=lambda: wait_for_agents(etcd, run_id, num_nodes - 1), etcd_pid=etcd.pid
        )
        hosts.make_one(*where)
        came_at = hosts.join_one()
        absorb_s = hosts.knew() - came_at
        with OtherUser(etcd, writes_per_s) as other:
            time.sleep(min(SETTLE_S, idle_s))
            before, writes_before, since = requests_to(etcd), other.num_writes, time.monotonic()
            time.sleep(idle_s)
            after, num_writes, lasted_s = requests_to(etcd), other.num_writes - writes_before, time.monotonic() - since
    counts = {method: after[method] - before.get(method, 0.0) for method in after}
    counts["Put"] -= num_writes
    told = ", ".join(f"{method} {count / lasted_s:.1f}" for method, count in sorted(counts.items()) if count > 0)
    print(f"  {num_nodes} nodes joined in {join_s:.3f} s; idle for {lasted_s:.0f} s, requests/s: {told or 'none'}", flush=True)
    return Figures(join_s, absorb_s, sum(counts.values()) / lasted_s / (num_nodes + 1), join_cpu_s)


def measure_stock(num_nodes: int) -> float:
    """Seconds that torch's rendezvous takes for the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with Hosts(num_nodes) as hosts:
        # The handler does not report the number of waiting nodes, so allow each node's first attempts to end.
        settled_s = max(2.0, num_nodes / 20)
        join_s, _ = join(
            hosts, "c10d", f"127.0.0.1:{port}", "stock", num_nodes, num_nodes, settled=lambda: time.sleep(settled_s)
        )
    del server
    return join_s


def join(
    hosts: Hosts,
    kind: str,
    endpoint: str,
    run_id: str,
    min_nodes: int,
    max_nodes: int,
    settled: Callable[[], None],
    etcd_pid: int | None = None,
) -> tuple[float, float]:
    """Seconds from the last node's arrival to the last node's rank, and the CPU time meanwhile."""
    where = (kind, endpoint, run_id, min_nodes, max_nodes)
    hosts.make(*where)
    hosts.make_one(*where)
    hosts.join()
    settled()
    cpu_s = hosts.cpu_s() + _cpu_s(etcd_pid)
    came_at = hosts.join_one()
    joined = hosts.joined()
    cpu_s = hosts.cpu_s() + _cpu_s(etcd_pid) - cpu_s
    ranks = sorted(node_rank for node_rank, _ in joined)
    if ranks != list(range(min_nodes)):
        raise BenchmarkError(f"the ranks of {min_nodes} nodes are not 0 to {min_nodes - 1}: {ranks}")
    return max(at for _, at in joined) - came_at, cpu_s


def wait_for_agents(etcd: EmbeddedEtcd, run_id: str, num_agents: int) -> None:
    with EtcdClient(EtcdConfig(etcd.endpoint, timeout_s=60)) as client:
        agents = Keys(run_id).agents
        what = f"{num_agents} nodes to register"
        eventually(lambda: client.count(agents) >= num_agents, what, START_TIMEOUT_S, 0.1, error=BenchmarkError)
    time.sleep(0.5)


def _cpu_s(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times() if pid is not None else None
    return float(times.user + times.system) if times is not None else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="16,64,256,1000", help="numbers of nodes, separated by commas")
    parser.add_argument("--stock", default="16,64,256", help="numbers of nodes for torch's rendezvous")
    parser.add_argument("--idle", type=float, default=40.0, help="seconds that requests are counted for")
    parser.add_argument("--writes", type=float, default=5.0, help="writes per second of somebody else meanwhile")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each N, of ours and torch's in turn")
    parser.add_argument("--quick", action="store_true", help="4 and 16 nodes, under 60 s")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.stock, options.idle, options.rounds = "4,16", "4,16", 6.0, 1
    nodes, stock_nodes = ([int(text) for text in option.split(",") if text] for option in (options.nodes, options.stock))
    print(describe_machine(), flush=True)
    found: dict[int, Figures] = {}
    stock: dict[int, float] = {}
    ours = f"{'nodes':>6}{'join s':>9}{'join CPU s':>13}{'absorb s':>10}{'idle requests/s/node':>22}"
    print(f"{ours}{'torch join s':>14}{'ratio':>8}")
    with Workspace("rendezvous-scale"):
        for num_nodes in nodes:
            rounds, stock_rounds = [], []
            for _ in range(options.rounds):
                with EmbeddedEtcd() as etcd:
                    rounds.append(measure(etcd, num_nodes, options.idle, options.writes))
                if num_nodes in stock_nodes:
                    stock_rounds.append(measure_stock(num_nodes))
            medians = map(statistics.median, zip(*map(astuple, rounds), strict=True))
            found[num_nodes] = figures = Figures(*medians)
            beside = ""
            if stock_rounds:
                stock[num_nodes] = statistics.median(stock_rounds)
                beside = f"{stock[num_nodes]:14.3f}{stock[num_nodes] / figures.join_s:8.1f}"
            print(
                f"{num_nodes:6}{figures.join_s:9.3f}{figures.join_cpu_s:13.2f}{figures.absorb_s:10.3f}"
                f"{figures.idle_rps_per_node:22.3f}{beside}",
                flush=True,
            )
    most = max(found)
    compared = max(stock) if stock else 0
    result: dict[str, float | int] = {
        f"join_{most}_s": found[most].join_s,
        f"absorb_{most}_s": found[most].absorb_s,
        "idle_rps_per_node": max(figures.idle_rps_per_node for figures in found.values()),
    }
    if compared:
        result[f"ratio_{compared}"] = stock[compared] / found[compared].join_s
    print(result_line(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
