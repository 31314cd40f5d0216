"""A real Slurm on this machine: one slurmctld and several slurmd, in their own folders and on free ports.

For tests and benchmarks, run by root or not. It uses no installed configuration, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.processes import ends_of_logs, start_logged
from tests.support.waiting import eventually

_SBIN = "/usr/sbin:/sbin"  # folders of the daemons, which may be missing in PATH


def missing_packages() -> str:
    """Missing packages and the command to install them; empty if none is missing."""
    path = f"{os.environ.get('PATH', '')}:{_SBIN}"
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "squeue", "scancel") if shutil.which(name, path=path) is None]
    return f"{', '.join(missing)} not found; .ci/install_slurm installs Debian's packages" if missing else ""


@dataclass
class SlurmCluster:
    """A cluster created by `slurm_cluster`."""

    folder: Path
    num_hosts: int
    limits_memory: bool = False  # kill jobs that exceed their requested memory
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __call__(self, *command: str, timeout_s: float = 20.0) -> str:
        """Output of a Slurm command."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Name and state of every job that has not ended, by its number."""
        lines = (line.split() for line in self("squeue", "--noheader", "--format=%A %j %T").splitlines())
        return {number: (name, state) for number, name, state in lines}

    def host(self, job: str) -> str:
        return self("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()

    def preempt(self, job: str) -> str:
        """Submit a job of higher priority for the whole host of `job`; return its number."""
        wanted = (
            "--partition=urgent",
            "--exclusive",
            f"--nodelist={self.host(job)}",
            "--output=/dev/null",
            "--wrap=exec sleep 3600",
        )
        return self("sbatch", "--parsable", *wanted).strip()

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-f", self.environment["SLURM_CONF"])

    def _start(self, name: str, *command: str) -> None:
        path = f"{os.environ.get('PATH', '')}:{_SBIN}"
        program = shutil.which(command[0], path=path)
        assert program is not None, missing_packages()
        environment = {**os.environ, **self.environment, "PATH": path}
        self.daemons[name] = start_logged([program, *command[1:]], self.folder / f"{name}.log", environment)

    def start(self) -> None:
        """Start the daemons; return when all hosts are idle.

        Raises:
            AssertionError: they are not idle within 30 s; the message ends with the daemons' logs.
        """
        self._configure()
        self.start_controller()
        for number in range(self.num_hosts):
            self._start(f"h{number}", "slurmd", "-D", "-N", f"h{number}", "-f", self.environment["SLURM_CONF"])

        def ended() -> str:
            names = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            return f"{names} have ended" if names else ""

        def report() -> str:
            return f"hosts are {self._states()}\n{ends_of_logs(self.folder)}"

        eventually(lambda: self._states().count("idle") == self.num_hosts, "idle hosts", 30.0, 0.1, ended=ended, report=report)

    def _states(self) -> list[str]:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            return self("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t", timeout_s=5.0).split()
        return []

    def _configure(self) -> None:
        user, host = getpass.getuser(), socket.gethostname()
        ports = _free_ports(1 + self.num_hosts)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        # More cores than this machine may have: jobs here mostly wait.
        hosts = "\n".join(
            f"NodeName=h{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN"
            for n, port in enumerate(ports[1:])
        )
        memory = "SelectTypeParameters=CR_Core\nJobAcctGatherType=jobacct_gather/none"
        if self.limits_memory:
            memory = "SelectTypeParameters=CR_Core_Memory\nJobAcctGatherType=jobacct_gather/linux\n"
            memory += "JobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill"
        (self.folder / "slurm.conf").write_text(
            f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
{memory}
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
KillWait=15
MinJobAge=20
InactiveLimit=0
SlurmctldTimeout=60
SlurmdTimeout=60
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/%n.log
{hosts}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=15
PartitionName=requeued Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""
        )

    def stop(self) -> None:
        """End all jobs, then the daemons and all their children."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if jobs := list(self.jobs()):
                self("scancel", "--signal=KILL", "--full", *jobs)
                self("scancel", *jobs)
        family = []
        for daemon in self.daemons.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                family += psutil.Process(daemon.pid).children(recursive=True)
        family += self._steps()
        for daemon in self.daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=5)

    def _steps(self) -> list[psutil.Process]:
        """All slurmstepd processes. They leave slurmd's process tree, but write to its log; their jobs inherit the settings."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid == os.getpid():
                    continue
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"] or (
                    process.name().startswith("slurmstepd")
                    and any(Path(file.path).is_relative_to(self.folder) for file in process.open_files())
                ):
                    found.append(process)
        return found


@contextlib.contextmanager
def slurm_cluster(folder: Path, num_hosts: int, limits_memory: bool = False) -> Iterator[SlurmCluster]:
    """A cluster of `num_hosts` hosts, all of them this machine."""
    cluster = SlurmCluster(folder, num_hosts, limits_memory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
