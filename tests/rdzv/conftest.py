"""Stock torchrun processes with our backend, which end with the test, and an environment that each test leaves as it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

from lightning_dlrover.rdzv.agents.rendezvous import create_backend
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.support.elastic_agents import ElasticAgents, Nursery
from tests.support.torchrun_agent import Agent, StartAgent
from tests.support.warm_process import WarmProcess
from tests.support.warm_tree import run_program


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Undo a handler's export to its workers. A Trainer in a later test of this process would join the handler's job."""
    before = {name: value for name, value in os.environ.items() if name.startswith("DLROVER_")}
    yield
    for name in [name for name in os.environ if name.startswith("DLROVER_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def agents(nursery: Nursery, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> Iterator[ElasticAgents]:
    """Stock elastic agents without torchrun's command line."""
    made = ElasticAgents(nursery, etcd.endpoint, run_id, tmp_path / "job")
    yield made
    made.close()


@pytest.fixture
def start_agent(fork_server: None, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> Iterator[StartAgent]:
    """Start `torchrun --rdzv-backend=etcd-v3` with a script of the given source."""
    agents: list[Agent] = []

    def start(
        source: str,
        *,
        nnodes: str = "1",
        nproc: int = 1,
        max_restarts: int = 0,
        conf: str = "last_call_timeout=1,lease_ttl=2",
        endpoint: str = "",
        env: dict[str, str] | None = None,
    ) -> Agent:
        script = tmp_path / f"script{len(agents)}.py"
        script.write_text(source)
        log_path = tmp_path / f"agent{len(agents)}.log"
        arguments = [
            *("-m", "torch.distributed.run"),
            "--rdzv-backend=etcd-v3",
            f"--rdzv-endpoint={endpoint or etcd.endpoint}",
            f"--rdzv-id={run_id}",
            f"--rdzv-conf={conf}",
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            f"--max-restarts={max_restarts}",
            str(script),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        agents.append(Agent(WarmProcess(run_program, arguments, environment, log_path), log_path))
        return agents[-1]

    yield start
    for agent in agents:
        if agent.process.poll() is None:
            agent.kill_with_workers()


@pytest.fixture
def make_handler(etcd: EmbeddedEtcd, run_id: str) -> Iterator[Callable[..., RendezvousHandler]]:
    """Handlers without torchrun, each as in an agent of its own."""
    made: list[RendezvousHandler] = []

    def make(min_nodes: int = 1, max_nodes: int = 1, *, server: Any = etcd, **conf: str) -> RendezvousHandler:
        conf = {"last_call_timeout": "0", "lease_ttl": "2", **conf}
        params = RendezvousParameters("etcd-v3", server.endpoint, run_id, min_nodes, max_nodes, **conf)
        made.append(create_backend()(params))
        return made[-1]

    yield make
    for handler in made:
        handler.shutdown()
