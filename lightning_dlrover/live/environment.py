"""Lightning's view of a worker's place in the job: ranks that change from round to round."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightning_dlrover.packages import fabric_submodule, on_import
from lightning_dlrover.rdzv.group.config import is_in_job

__all__ = ["DLRoverEnvironment"]


class DLRoverEnvironment:
    """Cluster environment of a job with changing workers. The strategy sets ranks and size at every round.

    Lightning's own TorchElastic environment reads both from variables that are frozen when the process starts.
    This class is registered as a `ClusterEnvironment` of `lightning` and of `pytorch_lightning`.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._local_rank = int(environ.get("LOCAL_RANK", "0"))
        self._node_rank = int(environ.get("GROUP_RANK", "0"))
        self._global_rank = int(environ.get("RANK", "0"))
        self._world_size = int(environ.get("WORLD_SIZE", "1"))

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"  # never used: every round has a store of its own

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return is_in_job(os.environ)

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        self._world_size = size

    def global_rank(self) -> int:
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        self._global_rank = rank

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept the Trainer's numbers: neither of them decides how many workers there are."""

    def teardown(self) -> None:
        """Leave the environment as it is, because another Trainer of the script may continue with it."""


on_import(lambda package: fabric_submodule(package, "plugins").ClusterEnvironment.register(DLRoverEnvironment))
