"""Run the jobs of a queue to their ends: observe, decide and act, a few times a second.

All decisions are made elsewhere: `tenants.py` grants memory, `scheduler.py` chooses the jobs that run. This file starts,
admits, pauses and ends processes, and writes each start and end to the journal. Only this file changes a job's phase
(`tenants.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover import variables
from lightning_dlrover.colocate import supervisor
from lightning_dlrover.colocate.admission_client import Answer, has_reported, write_answer
from lightning_dlrover.colocate.devices import (
    VISIBLE,
    Families,
    GpuWatch,
    JobOnGpu,
    bytes_of_jobs,
    families,
    is_program,
    marked,
)
from lightning_dlrover.colocate.journal import Added, Ended, JobSpec, Journal, Opened, Record, Span, Started
from lightning_dlrover.colocate.running import Outcome, SupervisedJob, WatchedJob, read_outcome
from lightning_dlrover.colocate.scheduler import CoRunner, InterferenceMeter, Knowledge, Scheduler
from lightning_dlrover.colocate.tenants import (
    GROWTH,
    Action,
    Admit,
    Charge,
    End,
    LocalDevice,
    Pause,
    Resume,
    Shrink,
    Start,
    Tenant,
    Waiting,
    Where,
    memory_actions,
)

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.1
NEWS_S = 0.01
"""Seconds between two checks for requests of starting jobs. Until such a job is admitted, its core is idle."""
END_S = 10.0
"""Deadline, in seconds, for processes to vanish after SIGKILL."""
GRACE_WITHOUT_STEPS_S = 1.0
PROBE_STEPS = 3
"""Steps after which the peak of a job shows its need: the second one also holds the optimizer's state."""
PATIENCE = 3.0
"""Factor on the probe of a command that keeps no core busy."""
AGAIN_S = 5.0
"""Minimum seconds before an evicted job starts again."""


@dataclass(frozen=True)
class Rules:
    """Settings of a dispatcher.

    Args:
        probe_s: a command that reports nothing is measured for this long before its memory counts as known.
        grace_s: seconds between SIGTERM and SIGKILL.
        hang_s: a job without a step and without use of a core, or a command without use of its GPU, for this long has failed.
        max_evictions: a job that had to give its memory back more often has failed.
    """

    probe_s: float = 20.0
    grace_s: float = 10.0
    hang_s: float = 600.0
    max_evictions: int = 3


class Dispatcher:
    """Runs the jobs of a journal's queue. Those of a former dispatcher have ended (`end_former`).

    Args:
        folder: holds the jobs' output, each attempt in a folder of its own.
        devices: have different names.
        shown: called after each look.
        hurry: when set, jobs that end get no more grace period.
        gpu_watch: measures the GPUs of `devices`; None: they have none.
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        devices: Sequence[LocalDevice],
        scheduler: Scheduler,
        knowledge: Knowledge,
        rules: Rules | None = None,
        shown: Callable[[Dispatcher], None] = lambda _: None,
        hurry: threading.Event | None = None,
        gpu_watch: GpuWatch | None = None,
    ) -> None:
        self.folder = folder
        self.journal = journal
        self.devices = {device.name: device for device in devices}
        self.knowledge = knowledge
        self._scheduler = scheduler
        self._rules = rules or Rules()
        self._shown = shown
        self._hurry = hurry or threading.Event()
        self._epoch_s = time.time() - time.monotonic()
        self.running: dict[str, WatchedJob] = {}
        self.ended: dict[str, Ended] = {}
        self.past: list[WatchedJob] = []
        self.ends: dict[tuple[str, int], Ended] = {}  # key: job and attempt
        self._specs: dict[str, JobSpec] = {}
        self._added_s: dict[str, float] = {}
        self._attempts: dict[str, int] = defaultdict(int)
        self._evictions: dict[str, int] = defaultdict(int)
        self._not_before_s: dict[str, float] = {}
        self._families = Families()
        self._gpu_watch = gpu_watch
        self._settled_s = 0.0  # moment of the last end of a job
        self._meters = {device.name: InterferenceMeter(device.name, device.kind) for device in devices}
        for record in journal.records:
            self._recall(record)

    # --- the queue -----------------------------------------------------------------------------------------------------------

    def add(self, specs: Sequence[JobSpec]) -> None:
        """Add jobs to the queue. Those that are in it already stay as they are.

        Raises:
            ValueError: a job of the same name is in the queue, and differs; or no device is of the kind that a job asks for.
        """
        kinds = {device.where for device in self.devices.values()}
        for spec in (*specs, *self._specs.values()):
            if spec.name not in self.ended and spec.device not in ("any", *kinds):
                have = ", ".join(self.devices)
                raise ValueError(f"job {spec.name!r} asks for device {spec.device!r}; --devices has only {have}")
        for spec in specs:
            known = self._specs.get(spec.name)
            if known is not None and known != spec:
                raise ValueError(
                    f"job {spec.name!r} is in the queue of {self.folder} with other fields; rename it, or give another --out"
                )
        for spec in specs:
            if spec.name not in self._specs:
                added = Added(spec, self.now_epoch())
                self.journal.add(added)
                self._recall(added)

    def waiting(self) -> list[Waiting]:
        """Return the jobs that have no processes, in the order of their arrival."""
        types: set[Where] = {device.where for device in self.devices.values()}
        return [
            Waiting(
                name=name,
                kind=spec.kind,
                priority=spec.priority,
                submitted_s=self._added_s[name],
                expected={where: self.knowledge.expected(spec, where) for where in types if spec.device in ("any", where)},
                owner=spec.owner,
                not_before_s=self._not_before_s.get(name, 0.0),
            )
            for name, spec in self._specs.items()
            if name not in self.running and name not in self.ended
        ]

    def now_epoch(self) -> float:
        """Seconds since the epoch, by the dispatcher's clock."""
        return self._epoch_s + time.monotonic()

    def _recall(self, record: Record) -> None:
        if isinstance(record, Added):
            self._specs[record.spec.name] = record.spec
            self.knowledge.meet(record.spec)
            self._added_s[record.spec.name] = record.at - self._epoch_s
        elif isinstance(record, Started):
            self._attempts[record.job] = record.attempt
        elif isinstance(record, Ended):
            self.ends[record.job, record.attempt] = record
            if record.result == "evicted":
                self._evictions[record.job] += 1
            elif record.result != "stopped":
                self.ended[record.job] = record

    # --- the loop ------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all jobs to their ends. However this call ends, all processes of the jobs have ended.

        Raises:
            OSError: the journal cannot be written.
        """
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._settle_former()
        cores = sum(device.num_cores for device in self.devices.values())
        memory_bytes = sum(device.memory_bytes for device in self.devices.values())
        self.journal.add(Opened(self._scheduler.policy_name, cores, memory_bytes, self.now_epoch()))
        try:
            while self.running or self.waiting():
                began = time.monotonic()
                self.look()
                self._shown(self)
                if self.running or self.waiting():
                    self._await_news(max(NEWS_S, LOOK_S - (time.monotonic() - began)))
        finally:
            self._stop()

    def _await_news(self, timeout_s: float) -> None:
        """Wait for the next look: until a job ends or asks for its memory, or for `timeout_s`."""
        ends = select.poll()
        for job in self.running.values():
            if job.supervised.end_descriptor is not None:
                ends.register(job.supervised.end_descriptor, select.POLLIN)
        starting = [job.admission for job in self.running.values() if job.phase == "starting" and not job.has_reported]
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if ends.poll(1000 * (min(NEWS_S, left_s) if starting else left_s)) or any(map(has_reported, starting)):
                return

    def _settle_former(self) -> None:
        """Record the ends of jobs that ended by themselves after their dispatcher was killed."""
        for name, attempt in list(self._attempts.items()):
            outcome = read_outcome(self.folder / "jobs" / name / str(attempt))
            is_settled = (name, attempt) in self.ends or name in self.running or name not in self._specs
            if is_settled or outcome is None or outcome.asked_to_end:
                continue
            ended = Ended(
                job=name,
                attempt=attempt,
                result="done" if outcome.succeeded else "failed",
                code=outcome.exit_code,
                reason="" if outcome.succeeded else outcome.text,
                at=outcome.ended_s,
                run_s=max(0.0, outcome.ended_s - outcome.began_s),
                paused_s=0.0,
                cpu_s=outcome.cpu_s,
                peak_bytes=outcome.largest_process_bytes,
                spans=(Span("running", outcome.began_s, outcome.ended_s),),
            )
            self._record(ended)

    def look(self) -> None:
        """Look at all jobs once, decide, and act."""
        now = time.monotonic()
        below = self._families.below([job.supervised.supervisor_pid for job in self.running.values()], now)
        for job in list(self.running.values()):
            if (outcome := job.supervised.outcome()) is not None:
                self._settle(job, outcome, now)
            else:
                job.look(now, below[job.supervised.supervisor_pid])
        if self._gpu_watch is not None:
            self._look_at_gpus(self._gpu_watch, below)
        for job in self.running.values():
            self._follow(job, now)
        self._learn(now)
        for device in self.devices.values():
            for action in memory_actions(device.sizes, self._tenants(device)):
                self._act(action, now)
        tenants = [tenant for device in self.devices.values() for tenant in self._tenants(device)]
        for action in self._scheduler.actions(now, list(self.devices.values()), self.waiting(), tenants):
            self._act(action, now)
        self._share_threads()

    def _look_at_gpus(self, watch: GpuWatch, below: Mapping[int, Sequence[int]]) -> None:
        """Pass each job on a GPU its part of that GPU's memory.

        Args:
            below: ids of the processes of each supervisor.
        """
        for device in self.devices.values():
            here = [job for job in self.running.values() if job.device == device.name]
            if device.gpu is None or not here:
                continue
            # The memory of the job that ended last must no longer be counted.
            use = watch.use(device.gpu.index, self._settled_s)
            known = [
                JobOnGpu(
                    below[job.supervised.supervisor_pid],
                    sum(each.gpu_bytes for each in job.reports) if job.reports else None,
                    job.charges["gpu"],
                )
                for job in here
            ]
            for job, size in zip(here, bytes_of_jobs(use, watch.used_before[device.gpu.index], known), strict=True):
                job.look_at_gpu(use.sums, size)

    def _follow(self, job: WatchedJob, now: float) -> None:
        """Move a job to the phase that its own processes have reached, or end it if it hangs."""
        if job.is_active and job.asks:
            job.probed = {}
            job.charges = {m: min(charge, int(GROWTH * job.resident_bytes(m))) for m, charge in job.charges.items()}
            # On the host, a process just before its first step has most of its final memory.
            has_peak = "gpu" not in job.charges or self.knowledge.has_gpu_peak(job.spec) or job.estimate("gpu")[0] > 0
            job.guessed = set() if has_peak else {"gpu"}
            job.enter("asks", now)
        elif job.phase == "starting" and self._is_probed(job, now):
            job.probed = {m: self.knowledge.probed_bytes(job.spec, job.where, m, job.peaks.get(m, 0)) for m in job.charges}
            job.charges = {m: max(charge, job.probed[m]) for m, charge in job.charges.items()}
            job.enter("running", now)
        elif job.phase == "running" and job.guessed and job.num_steps >= PROBE_STEPS:
            for memory in job.guessed:
                found = self.knowledge.probed_bytes(job.spec, job.where, memory, job.peaks[memory])
                job.charges[memory] = job.probed[memory] = found
            job.guessed = set()
        if job.phase == "ending" and now > job.grace_over_s + END_S:
            log.warning("job %s does not end: its supervisor is killed, too", job.spec.name)
            job.grace_over_s = now
            _kill(job)
        if job.is_active and now - job.moved_s > self._rules.hang_s:
            used = "a core" if self.devices[job.device].gpu is None else "a core or its GPU"
            reason = f"no step and no use of {used} for {self._rules.hang_s:.0f} s: it hangs"
            self._act(End(job.spec.name, "failed", reason), now)

    def _is_probed(self, job: WatchedJob, now: float) -> bool:
        """Whether a command counts as one that reports nothing. A script with the callback may start slowly among others."""
        if job.reports or self.knowledge.reports(job.spec.kind):
            return False
        seconds = now - job.at_s - job.paused_s(now)
        return seconds >= PATIENCE * self._rules.probe_s or seconds >= self._rules.probe_s <= 2 * job.use.cpu_s

    def _learn(self, now: float) -> None:
        by_device = defaultdict(list)
        for job in self.running.values():
            if job.is_active or job.phase == "ending":
                step_bytes = job.reports[0].step_bytes if job.reports else 0
                reports = bool(job.reports) or job.phase == "starting"
                co_runner = CoRunner(job.spec.name, job.spec.kind, job.moment(), step_bytes, reports)
                by_device[job.device].append(co_runner)
        for name, meter in self._meters.items():
            alone = self.knowledge.alone(self.devices[name].kind)
            for record in meter.look(now, by_device[name], alone):
                if self.knowledge.learn(record):
                    self.journal.add(record)

    def _tenants(self, device: LocalDevice) -> list[Tenant]:
        return [
            job.tenant(
                {
                    memory: self.knowledge.need_bytes(
                        job.spec, device.where, memory, job.estimate(memory), job.resident_bytes(memory), size
                    )
                    for memory, size in device.sizes.items()
                }
            )
            for job in self.running.values()
            if job.device == device.name
        ]

    # --- actions -------------------------------------------------------------------------------------------------------------

    def _act(self, action: Action, now: float) -> None:
        if isinstance(action, Start):
            self._start(action, now)
            return
        job = self.running[action.job]
        if isinstance(action, Admit):
            job.charges.update(action.charges)
            self._answer(job, job.request)  # if that fails, the job asks again at the next look
            job.enter("running", now)
        elif isinstance(action, Charge):
            job.charges[action.memory] = action.charge_bytes
        elif isinstance(action, Shrink):
            log.warning("job %s continues with %d processes: %s", action.job, action.num_processes, action.reason)
            job.most_processes, job.asked_to_shrink_s = action.num_processes, now
            self._answer(job, job.answered)
        elif isinstance(action, Pause):
            if (memory := action.memory) is not None:
                log.warning("job %s is paused: %s", action.job, action.reason)
                job.short_of.add(memory)
                job.charges[memory] = job.resident_bytes(memory)
            if job.phase != "paused":
                job.supervised.pause()
                job.paused_from = job.phase
                job.enter("paused", now)
        elif isinstance(action, Resume):
            job.short_of.clear()
            job.supervised.resume()
            job.enter(job.paused_from, now)
        elif isinstance(action, End) and job.phase != "ending":
            job.end_result, job.end_reason = action.result, action.reason
            self._end(job, now)

    def _end(self, job: WatchedJob, now: float) -> None:
        """Ask a job's processes to end. One that has made no step has nothing to save."""
        grace_s = min(self._rules.grace_s, GRACE_WITHOUT_STEPS_S) if job.phase == "asks" else self._rules.grace_s
        job.supervised.end(grace_s)
        job.grace_over_s = now + grace_s
        job.enter("ending", now)

    def _start(self, start: Start, now: float) -> None:
        spec = self._specs[start.job]
        attempt = self._attempts[start.job] + 1
        while (folder := self.folder / "jobs" / start.job / str(attempt)).exists():
            attempt += 1  # the journal was edited or removed
        admission = folder / "admission"
        admission.mkdir(parents=True)
        device = self.devices[start.device]
        if self.knowledge.is_familiar(spec.kind, device.kind):
            write_answer(admission, Answer(memory_known=True))
        self.journal.add(Started(start.job, attempt, start.device, self.now_epoch()))
        self._attempts[start.job] = attempt
        threads = self._scheduler.threads(device)
        own = device.environment(threads)
        environment = {
            **os.environ,
            **own,
            **spec.env,
            VISIBLE: own[VISIBLE],
            variables.SEAT: str(admission.resolve()),
            variables.QUEUE: self.journal.queue,
        }
        try:
            supervised = SupervisedJob(spec.command, folder.resolve(), spec.folder, environment, device.cores)
        except (OSError, ValueError) as error:  # its folder is gone, or its arguments are too long
            reason = f"its command cannot be started in {spec.folder}: {error}"
            self._record(Ended(start.job, attempt, "failed", 127, reason, self.now_epoch(), 0.0, 0.0, 0.0, 0))
            return
        self.running[start.job] = WatchedJob(
            spec,
            attempt,
            start.device,
            supervised,
            admission,
            self._added_s[start.job],
            now,
            {**start.charges},
            threads=threads,
        )

    def _share_threads(self) -> None:
        """Give the jobs that run on a device its cores."""
        for device in self.devices.values():
            active = [job for job in self.running.values() if job.device == device.name and job.is_active]
            shares = self._scheduler.thread_shares(device, [job.spec.kind if job.phase == "running" else "" for job in active])
            for job, threads in zip(active, shares, strict=True):
                if job.phase == "running" and job.reports and job.threads != threads:
                    job.threads = threads
                    self._answer(job, job.answered)

    def _answer(self, job: WatchedJob, request: int) -> None:
        """Answer a job with the memory that it may use, with all requests up to this one granted."""
        try:
            write_answer(job.admission, Answer(request > 0, request, job.threads, most_processes=job.most_processes))
            job.answered = request
        except OSError as error:
            log.warning("job %s gets no answer: %s", job.spec.name, error)

    # --- ends ----------------------------------------------------------------------------------------------------------------

    def _settle(self, job: WatchedJob, outcome: Outcome, now: float) -> None:
        """Record how a job has ended. An evicted one waits again."""
        job.enter("ending", now)
        self._settled_s = now
        job.supervised.close()
        del self.running[job.spec.name]
        self.past.append(job)
        if outcome.code is None:
            self._end_leftovers(job)
        result, reason = self._result(job, outcome)
        estimate, margin = job.estimate("host")
        gpu_estimate, gpu_margin = job.estimate("gpu") if "gpu" in job.charges else (0, 0)
        spans = [Span(span.phase, span.began + self._epoch_s, span.ended + self._epoch_s) for span in job.spans]
        paused_s = job.paused_s(now)
        ended = Ended(
            job=job.spec.name,
            attempt=job.attempt,
            result=result,
            code=outcome.exit_code,
            reason=reason,
            at=self.now_epoch(),
            run_s=max(0.0, now - job.at_s - paused_s),
            paused_s=paused_s,
            cpu_s=max(outcome.cpu_s, job.use.cpu_s),
            peak_bytes=max(job.peaks.get("host", 0), outcome.largest_process_bytes),
            estimate_bytes=estimate,
            margin_bytes=margin,
            num_steps=job.num_steps,
            spans=tuple(spans),
            gpu_peak_bytes=job.peaks.get("gpu", 0),
            gpu_estimate_bytes=gpu_estimate,
            gpu_margin_bytes=gpu_margin,
            where=job.where,
        )
        self._record(ended)
        if result == "evicted":
            self._not_before_s[job.spec.name] = now + AGAIN_S

    def _record(self, ended: Ended) -> None:
        self.journal.add(ended)
        self._recall(ended)
        self.knowledge.learn_end(self._specs[ended.job], ended)

    def _result(self, job: WatchedJob, outcome: Outcome) -> tuple[str, str]:
        """Return a job's result and its reason: the dispatcher's if it has ended the job, else the command's own."""
        if job.end_result and (outcome.code is None or outcome.asked_to_end):
            if job.end_result == "evicted" and self._evictions[job.spec.name] >= self._rules.max_evictions:
                return "failed", f"{job.end_reason}; it had to give its memory back {self._rules.max_evictions} times before"
            return job.end_result, job.end_reason
        if outcome.succeeded:
            return "done", ""
        last = job.supervised.last_words()
        return "failed", outcome.text + (f": {last}" if last else "")

    def _stop(self) -> None:
        """End all jobs, as with the dispatcher's own end, and record it."""
        now = time.monotonic()
        for job in self.running.values():
            if not job.end_result:
                job.end_result, job.end_reason = "stopped", "the dispatcher was stopped"
            self._end(job, now)
        failed: OSError | None = None
        deadline = now + self._rules.grace_s + END_S
        while self.running and time.monotonic() < deadline:
            if self._hurry.is_set():
                self._hurry.clear()
                for job in self.running.values():
                    job.supervised.end(0.0)
            for job in list(self.running.values()):
                if (outcome := job.supervised.outcome()) is not None:
                    try:
                        self._settle(job, outcome, time.monotonic())
                    except OSError as error:  # the others must end, too
                        failed = failed or error
            time.sleep(0.02)
        for job in list(self.running.values()):
            log.warning("job %s does not end: its supervisor is killed, too", job.spec.name)
            _kill(job)
            job.supervised.close()
        self.running.clear()
        self._end_leftovers()
        if failed is not None:
            raise failed

    def _end_leftovers(self, of: WatchedJob | None = None) -> None:
        """Kill processes of this queue, or of a job, that have no supervisor: it was killed, or a former dispatcher was."""
        variable, value = (
            (variables.SEAT, str(of.admission.resolve())) if of is not None else (variables.QUEUE, self.journal.queue)
        )
        _end_marked(variable, value, {job.supervised.supervisor_pid for job in self.running.values()})


def end_former(queue: str) -> None:
    """End the processes of a queue's former dispatcher, if it was killed.

    Its supervisors give their jobs a grace period, to save their state, and are waited for.

    Args:
        queue: the mark in the environment of its processes.
    """
    deadline = time.monotonic() + supervisor.GRACE_WITHOUT_DISPATCHER_S + 1.0
    while any(is_program(pid, supervisor.__file__) for pid in marked(variables.QUEUE, queue)):
        if time.monotonic() > deadline:
            log.warning("jobs of the former dispatcher do not end, and are killed")
            break
        time.sleep(LOOK_S)
    _end_marked(variables.QUEUE, queue)


def _end_marked(variable: str, value: str, supervisors: Collection[int] = ()) -> None:
    """Kill the processes with a variable of this value that are not below one of these supervisors."""
    spared = {*supervisors} | {pid for below in families(supervisors).values() for pid in below}
    deadline = time.monotonic() + END_S
    while left := [pid for pid in marked(variable, value) if pid not in spared]:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            log.warning("processes %s of this queue do not end", left)
            return
        time.sleep(0.02)


def _kill(job: WatchedJob) -> None:
    """Kill a job's supervisor and all processes below it: they have ignored everything else."""
    for pid in [job.supervised.supervisor_pid, *families([job.supervised.supervisor_pid])[job.supervised.supervisor_pid]]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
