"""Jobs with memory that grows to a hard limit. A static one is killed, and a watched one finishes.

    python benchmarks/memory_growth.py                  # a leak, and a table that grows
    python benchmarks/memory_growth.py --what leak

Every worker above the limit is killed at once, as Slurm does without control groups, and finds its limit in the same variable.
The last line counts the killed static jobs, the finished watched jobs, and the workers of watched jobs that were killed anyway.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
from jobs import ControlledJob, Workspace, describe_machine, result_line

SCRIPT = Path(__file__).resolve().parent / "memory_script.py"
MIB = 2**20
LIMIT_MIB = 900  # Python and its libraries take about 400 of these
TIMEOUT_S = 400.0
NUM_STEPS = 1500
# A leak passes the limit after half of the steps. A table that is too large for one worker fits into three.
GROWTH = {"leak": 1 * MIB, "table": 3 * MIB // 4}
WORKERS = {"leak": (1, 1), "table": (1, 3)}


class MemoryKiller:
    """Kills the workers of a job that exceed the limit."""

    def __init__(self, job: ControlledJob) -> None:
        self.killed: list[int] = []
        self._job = job
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> MemoryKiller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(0.1):
            for agent in self._job.agents:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(agent.pid).children(recursive=True):
                        self._judge(process)

    def _judge(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            if process.memory_info().rss > LIMIT_MIB * MIB:
                process.kill()
                self.killed.append(process.pid)


@contextlib.contextmanager
def _job(workspace: Workspace, endpoint: str, what: str, static: bool) -> Iterator[tuple[ControlledJob, Path]]:
    name = f"{what}-{'static' if static else 'watched'}"
    finished = workspace.folder / f"{name}.finished"
    arguments = ["--what", what, "--bytes-per-step", str(GROWTH[what]), "--max-steps", str(NUM_STEPS)]
    arguments += ["--finished", str(finished), *(["--static"] if static else [])]
    low, high = (1, 1) if static else WORKERS[what]
    with workspace.controlled_job(name, endpoint, arguments, SCRIPT) as job:
        job.environment = {"SLURM_MEM_PER_NODE": str(LIMIT_MIB)}
        job.start(low, high)
        yield job, finished


def run(workspace: Workspace, endpoint: str, what: str, static: bool) -> tuple[int, bool]:
    """Return the number of killed workers, and whether the job has made all its steps."""
    with _job(workspace, endpoint, what, static) as (job, finished), MemoryKiller(job) as killer:

        def over() -> bool | None:
            return True if finished.exists() or (static and killer.killed) or job.agents[0].poll() is not None else None

        with contextlib.suppress(Exception) if static else contextlib.nullcontext():
            job.wait_for("the end", over, TIMEOUT_S, poll_s=0.2)
        made = int(finished.read_text()) if finished.exists() else 0
        print(
            f"{job.name}: {len(killer.killed)} workers killed, {'finished' if made == NUM_STEPS else 'not finished'}",
            flush=True,
        )
        for event in job.events("memory"):
            print(f"  {event.data['act']} at step {event.data['step']}: {event.text}", flush=True)
        return len(killer.killed), made == NUM_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=sorted(GROWTH), action="append", help="default: both")
    parser.add_argument("--quick", action="store_true", help="the leak only")
    parser.add_argument("--keep", action="store_true", help="do not remove logs")
    options = parser.parse_args()
    kinds = ["leak"] if options.quick else options.what or sorted(GROWTH)
    print(describe_machine(), flush=True)
    with Workspace("memory", options.keep) as workspace:
        endpoint = workspace.etcd().endpoint
        static = [run(workspace, endpoint, what, static=True) for what in kinds]
        watched = [run(workspace, endpoint, what, static=False) for what in kinds]
    values: dict[str, int | float] = {
        "static_killed": sum(killed > 0 and not finished for killed, finished in static),
        "finished": sum(finished for _, finished in watched),
        "killed": sum(killed for killed, _ in watched),
        "jobs": len(kinds),
    }
    print(result_line(values))


if __name__ == "__main__":
    main()
