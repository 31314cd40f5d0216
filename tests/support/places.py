"""The places where targets run their nodes, with all events that a test can cause there.

Each is the one that the target's own tests use: real processes, Slurm's commands under the test's control, an API server. The
nodes hold no agents. They run and end as the test wants.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from lightning_dlrover.components import elastic
from lightning_dlrover.components.targets.kubernetes import KubernetesTarget
from lightning_dlrover.components.targets.kubernetes_api import KubernetesApi
from lightning_dlrover.components.targets.kubernetes_manifests import KubernetesOptions
from lightning_dlrover.components.targets.local import LocalTarget
from lightning_dlrover.components.targets.slurm import SlurmOptions, SlurmTarget
from lightning_dlrover.components.targets.target import NodeSpec, Target
from tests.support.fake_target import FakeTarget
from tests.support.kubernetes_cluster import Answer, KubernetesCluster
from tests.support.manual_clock import ManualClock
from tests.support.slurm_commands import SlurmCommands

MARK = "0123456789"
POLL_S = 2.0
SPEC = NodeSpec("/s/train.py", (), "h:1", "run", "/dlrover", 1, 2)


class Place(Protocol):
    """A place where nodes run, and the events that happen to them there."""

    clock: ManualClock

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None: ...

    def make_target(self) -> Target: ...

    def run(self, node: str) -> None:
        """Let a node run that was accepted."""

    def end(self, node: str, exit_code: int) -> None:
        """Let a node end normally."""

    def end_cancelled(self, node: str) -> None:
        """Let a node end that was cancelled."""

    def close(self) -> None: ...


class FailingPlace(Place, Protocol):
    """A place with a scheduler that may fail, and nodes that outlive their controller."""

    list_failures: ClassVar[Sequence[str]]
    cancel_failures: ClassVar[Sequence[str]]
    foreign_handles: ClassVar[Sequence[str]]  # none is of this job's node1

    def break_lists(self, failure: str) -> None: ...

    def break_cancel(self, failure: str) -> None: ...

    def refuse(self) -> None:
        """Refuse all further nodes."""

    def lose_answer(self, is_accepted: bool) -> None:
        """Give no usable answer to the next request for a node."""

    def mend(self) -> None: ...


class PolledPlace(FailingPlace, Protocol):
    """A place with a scheduler that is asked at intervals."""

    @property
    def num_queries(self) -> int:
        """Requests for lists of nodes or for the state of one."""

    def remove(self, node: str) -> None:
        """Remove a node as its owner or an administrator does."""


class LocalPlace:
    """This machine. A node is a process that waits for a file with its exit code."""

    foreign_handles: ClassVar[Sequence[str]] = ("", "local_cwd://torchx/node1-x")

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self._folder = folder
        self._made: list[LocalTarget] = []
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        code, agent = f'"{folder}/$DLROVER_NODE"', folder / "agent"
        agent.write_text(f'#!/bin/bash\ntrap "exit 143" TERM\nuntil [ -e {code} ]; do sleep 0.02; done\nexit $(cat {code})\n')
        agent.chmod(0o755)
        monkeypatch.setattr(elastic, "_python", lambda image: str(agent))

    def make_target(self) -> Target:
        self._made.append(LocalTarget(SPEC, self._folder / "logs", grace_s=5.0))
        return self._made[-1]

    def run(self, node: str) -> None:
        pass

    def end(self, node: str, exit_code: int) -> None:
        new = self._folder / f".{node}"
        new.write_text(str(exit_code))
        new.rename(self._folder / node)

    def end_cancelled(self, node: str) -> None:
        pass

    def close(self) -> None:
        for target in self._made:
            target.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


class FakePlace:
    outlives_controller = True
    list_failures: ClassVar[Sequence[str]] = ("no answer",)
    cancel_failures: ClassVar[Sequence[str]] = ("no answer",)
    foreign_handles: ClassVar[Sequence[str]] = ("", "node1", "1/node2", "x/node1", "1/node1/")

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self._made = [FakeTarget(folder, outlives_controller=self.outlives_controller)]

    def make_target(self) -> Target:
        self._made.append(self._made[0].successor())
        return self._made[-1]

    def run(self, node: str) -> None:
        pass

    def end(self, node: str, exit_code: int) -> None:
        self._made[0].nodes[node] = "failed" if exit_code else "succeeded"

    def end_cancelled(self, node: str) -> None:
        pass

    def break_lists(self, failure: str) -> None:
        for target in self._made:
            target.answers = False

    break_cancel = break_lists

    def refuse(self) -> None:
        for target in self._made:
            target.refuses = "no room"

    def lose_answer(self, is_accepted: bool) -> None:
        for target in self._made:
            target.loses_requests = True
            target.accepts_lost = is_accepted

    def mend(self) -> None:
        for target in self._made:
            target.answers, target.refuses, target.loses_requests = True, "", False

    def close(self) -> None:
        pass


class EndingFakePlace(FakePlace):
    outlives_controller = False


class SlurmPlace:
    list_failures: ClassVar[Sequence[str]] = (
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
        "echo 'Segmentation fault'",
        "head -c 300 /dev/urandom; exit 0",
        "exit 139",
        "sleep 600",
    )
    cancel_failures: ClassVar[Sequence[str]] = (
        "echo 'scancel: error: Kill job error on job id 1: Access/permission denied' >&2; exit 1",
        "exit 1",
        "sleep 600",
    )
    foreign_handles: ClassVar[Sequence[str]] = (
        *("", "17", "17/node2", "0/node1", "-1/node1", "--user=me/node1", "17 18/node1", "17/node1\n"),
        "\u0661\u0667/node1",  # digits, but not the ASCII ones that Slurm uses
    )

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self._folder = folder
        (folder / "bin").mkdir()
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        self._commands = SlurmCommands(folder / "bin")
        self._commands.keep_jobs()

    def make_target(self) -> Target:
        return SlurmTarget(SPEC, SlurmOptions(), self._folder / "logs", POLL_S, command_s=2.0, clock=self.clock)

    def run(self, node: str) -> None:
        self._commands.set_state(node, "RUNNING")

    def end(self, node: str, exit_code: int) -> None:
        self._commands.set_state(node, "FAILED" if exit_code else "COMPLETED")

    def end_cancelled(self, node: str) -> None:
        pass

    def break_lists(self, failure: str) -> None:
        self._commands.set("squeue", failure)

    def break_cancel(self, failure: str) -> None:
        self._commands.set("scancel", failure)

    def refuse(self) -> None:
        self._commands.set("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")

    def lose_answer(self, is_accepted: bool) -> None:
        self._commands.set("sbatch", "echo 'Socket timed out on send/recv operation' >&2; exit 1", is_executed=is_accepted)

    def mend(self) -> None:
        self._commands.keep_jobs()

    @property
    def num_queries(self) -> int:
        lookups = [call for call in self._commands.calls("scontrol") if " show job " in call]  # not its release, read once
        return len(self._commands.calls("squeue")) + len(lookups)

    def remove(self, node: str) -> None:
        self._commands.set_state(node, "")

    def close(self) -> None:
        pass


LIST_FAILURES = {
    "closed": Answer(),
    "500": Answer(500, "boom"),
    "429": Answer(429, "too many requests"),
    "401": Answer(401, "Unauthorized"),
    "403": Answer(403, "jobs is forbidden"),
    "410": Answer(410, "too old resource version", "Expired"),
    "text": Answer(200, body=b"nonsense"),
    "status": Answer(200, body=b'{"kind": "Status", "status": "Success"}'),
    "number": Answer(200, body=b'{"items": [3]}'),
}
CANCEL_FAILURES = {"500": Answer(500, "boom"), "403": Answer(403, "forbidden"), "closed": Answer()}


class KubernetesPlace:
    has_volcano = False
    list_failures: ClassVar[Sequence[str]] = tuple(f"{kind} {name}" for kind in ("jobs", "pods") for name in LIST_FAILURES)
    cancel_failures: ClassVar[Sequence[str]] = tuple(CANCEL_FAILURES)
    foreign_handles: ClassVar[Sequence[str]] = (
        *("", "node1", "other/node1", f"run-node1-{MARK}/node1/", "run-node1-9876543210/node1", f"run-node1-{MARK}/node2"),
    )

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self._folder = folder
        self._made: list[KubernetesTarget] = []
        self._cluster = KubernetesCluster(folder, runs_pods=False, has_volcano=self.has_volcano)
        self._cluster.start()
        monkeypatch.setenv("KUBECONFIG", str(self._cluster.kubeconfig))

    def make_target(self) -> Target:
        options, api = KubernetesOptions(image="trainer:1"), KubernetesApi(request_s=5.0, pause_s=0.01)
        self._made.append(KubernetesTarget(SPEC, options, self._folder / "logs", POLL_S, api, clock=self.clock, watches=False))
        return self._made[-1]

    def run(self, node: str) -> None:
        self._cluster.set_pod(node, "Running")

    def end(self, node: str, exit_code: int) -> None:
        self._cluster.set_pod(node, "Failed" if exit_code else "Succeeded")

    def end_cancelled(self, node: str) -> None:
        assert node not in self._cluster.nodes(), "its Job is still there"
        self._cluster.remove_pod(node)

    def break_lists(self, failure: str) -> None:
        kind, name = failure.split()
        self._cluster.answer_next("GET", kind, *[LIST_FAILURES[name]] * 100)

    def break_cancel(self, failure: str) -> None:
        self._cluster.answer_next("DELETE", "jobs", *[CANCEL_FAILURES[failure]] * 3)

    def refuse(self) -> None:
        self._cluster.max_jobs = 0

    def lose_answer(self, is_accepted: bool) -> None:
        # A target repeats a request if its answer is lost. A proxy's page is an answer, but not the server's.
        page = Answer(200, body=b"<html>Welcome to our proxy</html>", is_carried_out=True)
        self._cluster.answer_next("POST", "jobs", *([page] if is_accepted else [Answer()] * 3))

    def mend(self) -> None:
        self._cluster.max_jobs = 1000
        self._cluster.clear_answers()

    @property
    def num_queries(self) -> int:
        return self._cluster.num_requests("GET", "jobs")

    def remove(self, node: str) -> None:
        with self._cluster.lock:
            self._cluster.objects["jobs"].clear()
            self._cluster.objects["pods"].clear()

    def close(self) -> None:
        for target in self._made:
            target.close()
        self._cluster.stop()


class VolcanoPlace(KubernetesPlace):
    has_volcano = True


POLLED: list[type[PolledPlace]] = [SlurmPlace, KubernetesPlace, VolcanoPlace]
FAILING: list[type[FailingPlace]] = [*POLLED, FakePlace]
ALL: list[type[Place]] = [*FAILING, EndingFakePlace, LocalPlace]
