"""The etcd and the run folders that a command uses unless its options name others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover import variables
from lightning_dlrover.rdzv.etcd.config import access_from
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX

__all__ = ["DEFAULT_RUN_DIR", "EtcdDefaults"]

DEFAULT_RUN_DIR = Path("runs")
"""Parent of the jobs' run folders."""


@dataclass(frozen=True)
class EtcdDefaults:
    """The etcd of a job's worker that starts a command, or the one that the user has set."""

    endpoint: str | None
    prefix: str
    access: Mapping[str, str]  # see `EtcdConfig.access`

    @classmethod
    def of_this_process(cls) -> EtcdDefaults:
        endpoint, prefix = os.environ.get(variables.ENDPOINT), os.environ.get(variables.PREFIX)
        return cls(endpoint or None, prefix or DEFAULT_PREFIX, access_from(os.environ))
