"""Where nodes run: one class per kind of place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightning_dlrover.components import elastic
from lightning_dlrover.components.torchx_api import AppStatus, TorchXRunner

__all__ = ["LocalTarget", "NodeSpec", "Target"]


@dataclass(frozen=True)
class NodeSpec:
    """What every node of a job runs."""

    script: str
    script_args: tuple[str, ...]
    endpoint: str
    run_id: str
    prefix: str
    min_workers: int
    max_workers: int
    max_restarts: int


class Target(Protocol):
    """A place that runs one-node apps."""

    name: str

    def start(self, node: str) -> str:
        """Start a node and return its app's handle."""

    def status(self, handle: str) -> AppStatus: ...

    def cancel(self, handle: str) -> None: ...

    def logs(self, handle: str) -> list[Path]:
        """Files that hold the node's output."""

    def close(self) -> None: ...


class LocalTarget:
    """Nodes as processes on this machine, through TorchX's local scheduler.

    Args:
        spec: what the nodes run.
        log_dir: where their output goes.
    """

    name = "local"

    def __init__(self, spec: NodeSpec, log_dir: Path) -> None:
        self._spec = spec
        self._log_dir = log_dir
        self._runner = TorchXRunner("local_cwd", {"log_dir": str(log_dir)})

    def start(self, node: str) -> str:
        spec = self._spec
        app = elastic.train(
            *spec.script_args,
            script=spec.script,
            rdzv_endpoint=spec.endpoint,
            rdzv_id=spec.run_id,
            workers=f"{spec.min_workers}:{spec.max_workers}",
            node=node,
            max_restarts=spec.max_restarts,
            key_prefix=spec.prefix,
        )
        app.roles[0].env["DLROVER_DIE_WITH_PARENT"] = "1"
        # One worker per node and several nodes per machine: more threads than cores would only get in each other's way.
        app.roles[0].env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return self._runner.submit(app)

    def status(self, handle: str) -> AppStatus:
        return self._runner.status(handle)

    def cancel(self, handle: str) -> None:
        self._runner.cancel(handle)

    def logs(self, handle: str) -> list[Path]:
        app_id = handle.rsplit("/", 1)[-1]
        return [file for name in ("stdout", "stderr") for file in sorted(self._log_dir.glob(f"*/{app_id}/*/*/{name}.log"))]

    def close(self) -> None:
        self._runner.close()
