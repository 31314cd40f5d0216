"""Jobs whose node is taken away after a notice of 30 s: whether they finish, and how many steps they make again.

    python benchmarks/notice.py [--jobs N] [--at-once N] [--quick]

Each job is a `dlrover run` of one to two workers on this machine, and has two. Once it trains, one of its nodes gets a notice,
and at the end of the notice SIGKILL ends all processes of that node at once. The notice comes in turn from

    aws, gcp, azure     a metadata service on this machine that answers as that cloud's does (`--notices`)
    drain               `dlrover drain --at TIME`
    alone               the same while the job's controller is stopped, so that no other worker comes

In all but the last the controller starts another node, which takes over if it is ready in time. Otherwise the worker leaves.

A job has finished if `dlrover run` ends with 0, the last step was made, and the worker had left before its node was killed.
A step counts as redone if workers made it in two rounds, and so does the step in flight when a round breaks. The last line has
`finished=`, `of=` and `redone=`. The exit code is 1 unless all jobs have finished and none has redone a step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import psutil
from jobs import BenchmarkError, ControlledJob, Workspace, describe_machine, result_line

from tests.support.metadata_services import CloudName, MetadataService

Kind = Literal["aws", "gcp", "azure", "drain", "alone"]
KINDS: tuple[Kind, ...] = ("aws", "alone", "gcp", "drain", "azure")
CLOUDS: dict[Kind, CloudName] = {"aws": "aws", "gcp": "gcp", "azure": "azure"}

NOTICE_S = 30.0
STEP_S = 0.05
MAX_STEPS = 2500
"""Steps of a job: more than it makes at `STEP_S` until its node is killed. Then it hurries."""

STOPPING = threading.Event()
"""Set when the benchmark is interrupted: no job waits for the end of its notice then."""

START_S = 240.0  # limit on the start of a job and on its end, on a machine where others start at the same time
ARGUMENTS = [f"--step-floor-s={STEP_S}", f"--max-steps={MAX_STEPS}", "--width=32"]


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    has_finished: bool
    redone: int  # steps
    left_s: float  # seconds from the worker's leave to the end of its node; below 0: it was killed while it trained
    how: str = ""  # kind of the round without it
    problem: str = ""


@contextlib.contextmanager
def metadata_service(kind: Kind) -> Iterator[MetadataService | None]:
    service = MetadataService(CLOUDS[kind]) if kind in CLOUDS else None
    try:
        yield service
    finally:
        if service is not None:
            service.close()


def outcome_of(space: Workspace, endpoint: str, name: str, kind: Kind) -> Outcome:
    """Run one job to its end."""
    with metadata_service(kind) as service, space.controlled_job(name, endpoint, ARGUMENTS) as job:
        options = ["--notices", CLOUDS[kind]] if service is not None else []
        if service is not None:
            job.environment["DLROVER_METADATA_URL"] = service.url
        job.start(1, 2, *options)
        job.wait_for_steps(5, 1, timeout_s=START_S)
        job.plan(2)
        job.wait_for_steps(20, 2, timeout_s=START_S)
        view = job.view()
        doomed = view.survivors[-1]
        node = view.agents[view.workers[doomed].agent_id].labels["node"]
        ends_at = time.time() + NOTICE_S
        if kind == "alone":
            job.agents[0].send_signal(signal.SIGSTOP)
        try:
            if service is not None:
                service.announce(node, ends_at)
            else:
                drain(job, endpoint, node, ends_at)
            if STOPPING.wait(max(0.0, ends_at - time.time())):
                raise BenchmarkError(f"job {name}: interrupted")
            is_member = doomed in job.view().survivors
            kill_node(job.agents[0].pid, node)
        finally:
            job.agents[0].send_signal(signal.SIGCONT)
        job.wait_for_steps(20, 2, since_s=time.monotonic(), timeout_s=START_S)
        job.hurry()
        codes = job.wait_until_ended(START_S)
        return judged(job, kind, doomed, ends_at, is_member, codes)


def judged(job: ControlledJob, kind: Kind, doomed: str, ends_at: float, is_member: bool, codes: list[int]) -> Outcome:
    rounds = job.events("round")
    made_in: dict[int, set[int]] = defaultdict(set)
    for step in job.steps():
        made_in[step.number].add(step.round_number)
    redone = sum(len(numbers) - 1 for numbers in made_in.values()) + sum(not each.data["planned"] for each in rounds)
    joined = next(each.data["number"] for each in rounds if doomed in each.data["members"])
    left = next((each for each in rounds if each.data["number"] > joined and doomed not in each.data["members"]), None)
    problems = [
        *([f"exit codes {codes}"] if any(codes) else []),
        *([f"its last step is {max(made_in, default=0)}"] if max(made_in, default=0) != MAX_STEPS else []),
        *(["the worker still trained when its node was killed"] if is_member else []),
        *(event.text for event in job.events("loss")),
    ]
    if left is None:
        return Outcome(kind, not problems, redone, -1.0, problem="; ".join(problems))
    return Outcome(kind, not problems, redone, ends_at - left.at, left.data["kind"], "; ".join(problems))


def drain(job: ControlledJob, endpoint: str, node: str, ends_at: float) -> None:
    at = datetime.fromtimestamp(ends_at, timezone.utc).isoformat()  # the command itself takes a while
    command = [sys.executable, "-m", "lightning_dlrover.cli", "drain", "--endpoint", endpoint, job.name, node]
    subprocess.run([*command, "--at", at], check=True, capture_output=True, timeout=60.0)


def kill_node(controller_pid: int, node: str) -> None:
    """End all processes of a node at once, if any are left."""
    name, doomed = f"DLROVER_NODE={node}".encode(), []
    for process in psutil.Process(controller_pid).children(recursive=True):
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                doomed.append(process)
    for process in sorted(doomed, key=lambda p: p.pid, reverse=True):  # the worker first: SIGTERM follows its agent's end
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20, metavar="N", help="number of jobs (default: 20)")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="jobs that run at the same time (default: 2)")
    parser.add_argument("--quick", action="store_true", help="two jobs: one with a replacement, one without")
    parser.add_argument("--keep", action="store_true", help="do not remove logs and records")
    options = parser.parse_args()
    kinds = list(islice(cycle(KINDS), 2 if options.quick else options.jobs))
    print(describe_machine(), flush=True)
    outcomes: list[Outcome] = []
    with Workspace("notice", options.keep) as space:
        endpoint = space.etcd().endpoint

        def run(number: int) -> Outcome:
            kind = kinds[number]
            try:
                found = outcome_of(space, endpoint, f"{kind}-{number}", kind)
            except (BenchmarkError, subprocess.SubprocessError) as error:
                found = Outcome(kind, False, 0, -1.0, problem=str(error).splitlines()[0])
            text = f"{found.how}, {found.left_s:.1f} s before the end" if found.left_s >= 0 else "did not leave"
            print(f"job {number + 1:2} {kind:6} {text}; {found.redone} steps redone {found.problem}".rstrip(), flush=True)
            return found

        with ThreadPoolExecutor(options.at_once) as pool:
            try:
                outcomes += pool.map(run, range(len(kinds)))
            except BaseException:
                STOPPING.set()
                pool.shutdown(cancel_futures=True)
                raise
        if not all(each.has_finished for each in outcomes):
            space.keep()
    finished, redone = sum(each.has_finished for each in outcomes), sum(each.redone for each in outcomes)
    print(result_line({"finished": finished, "of": len(outcomes), "redone": redone}))
    return int(finished < len(outcomes) or redone > 0)


if __name__ == "__main__":
    sys.exit(main())
