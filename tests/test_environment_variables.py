"""The package's environment variables have one list of names, and one reader per kind of process."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import lightning_dlrover
from lightning_dlrover import variables

PACKAGE = Path(lightning_dlrover.__file__).parent

WORKER, AGENT, NODE, COMMAND = "rdzv/group/config.py", "rdzv/agents/rendezvous.py", "components/node.py", "rdzv/job/folders.py"
READERS = {
    "ENDPOINT": {WORKER, COMMAND},
    "PREFIX": {WORKER, COMMAND},
    "ACCESS": {"rdzv/etcd/types.py"},  # read for workers and commands
    **{
        key: {WORKER}
        for key in ["RUN_ID", "AGENT_ID", "AGENT_PID", "MIN_NODES", "MAX_NODES", "SIZES", "HISTORY_TTL_S", "LEFT_STATE", "POOL"]
    },
    "WORKERS_PER_NODE": {WORKER},
    "timeout": {"rdzv/group/config.py"},  # read for workers
    "NODE": {WORKER, AGENT, "host.py", "components/targets/local.py"},  # the target reads it of other processes
    "STARTED_BY": {"host.py", "components/targets/local.py"},
    **{key: {NODE} for key in ["PARENT_PID", "MEMORY_GROUP", "EXIT_FILE", "NOTICE_S", "LEAVE_ON_SIGTERM"]},
    "SEAT": {"colocate/admission_client.py"},
    "QUEUE": {"colocate/dispatcher.py"},
    "OBJECTIVE": {"tuning/plan.py"},
    "HISTORY": {"tuning/history.py"},
    "UNSAFE_STACKS": {"watchdog.py"},
    "METADATA_URL": {AGENT},
    "THREADS_PER_CORE": {"tuning/resources.py", "components/targets/target.py"},
    "SPARES": {"spares.py", AGENT},
    "SPARES_PADDING": {"spares.py"},
}
WRITERS = {
    "spares.py",
    "rdzv/agents/rendezvous.py",
    "components/elastic.py",
    "components/host_agents.py",
    "components/targets/slurm.py",
    "components/targets/kubernetes_manifests.py",
    "components/targets/local.py",
    "components/targets/machine.py",
    "lab/characterize/run.py",
    "colocate/dispatcher.py",
    "pool/plugin.py",
    "cli/run.py",
    "cli/run_options.py",
    "doctor/report.py",
}
OTHER_USES = {("ACCESS", "report/status.py")}  # its keys are those of `job.json`


@cache
def sources() -> dict[str, ast.Module]:
    """The package's files by their paths."""
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def uses() -> frozenset[tuple[str, str]]:
    """Return each use of a name of `variables`, with its file."""
    return frozenset(
        (node.attr, file)
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "variables"
    )


def test_names_of_own_variables_are_in_one_file() -> None:
    found = {
        (file, node.value)
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"DLROVER_[A-Z_]*", node.value)
    }
    assert {file for file, _ in found} == {"variables.py"}
    listed = {name for name in vars(variables) if name.isupper()} | {"timeout"}
    assert listed == set(READERS)


@pytest.mark.parametrize("name", READERS)
def test_variable_is_read_in_one_place_per_kind_of_process(name: str) -> None:
    files = {file for used, file in uses() - OTHER_USES if used == name}
    assert files - (WRITERS - READERS[name]) == READERS[name]


def test_names_are_only_reached_through_their_module() -> None:
    imported = {
        file
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "lightning_dlrover.variables"
    }
    assert not imported
