"""Watch over a job while it trains: workers that make the others wait, that hang, or that are about to run out of memory.

One thread per worker, which acts only where the job itself cannot. `tuning/stragglers.py` computes a straggler's cost and
decides whether replacing it pays; the controller that starts and ends nodes carries it out. Every finding is an event.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import TYPE_CHECKING

from lightning_dlrover import variables
from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.job.events import (
    Event,
    HangFound,
    MemoryShort,
    NodeMemoryShort,
    RoundFormed,
    StragglerFound,
    TrainingStalled,
    events_of,
)
from lightning_dlrover.rdzv.job.records import EventRecord, PlanRecord, StacksRecord, StacksRequest
from lightning_dlrover.rdzv.job.sizes import ANY_NUMBER
from lightning_dlrover.tuning.health import innermost_user_place, is_in_debugger, stacks
from lightning_dlrover.tuning.memory import (
    LEADS,
    MAX_WINDOWS,
    NUM_SETTLING,
    Act,
    GrowthSituation,
    MemoryForecast,
    Remedy,
    choose_remedy,
    forecast_memory,
    inherited_forecast,
)
from lightning_dlrover.tuning.samples import StepProfile
from lightning_dlrover.tuning.stragglers import Straggler, find_straggler, judge_replacement

if TYPE_CHECKING:
    from lightning_dlrover.live.fit_parts import FitProgress, Progress
    from lightning_dlrover.rdzv.membership.membership import Membership


log = logging.getLogger(__name__)

POLL_S = 0.5  # seconds between two checks of this worker; each takes time from its training thread
STOPPED_S = 5.0  # interval of two checks above which the process counts as stopped, or its host as asleep, in between
DEFAULT_RESIZE_COST_S = 0.5  # seconds assumed until the job has measured a change of the world of its own
RAISE_S = 15.0
"""Seconds for a node to get more memory in place, before a worker on another node takes its place."""

REMEDIES: tuple[Act, ...] = ("replace", "enlarge", "add_workers")  # acts that end in another worker
DEFAULT_LEAD_S = 30.0  # seconds from a request for a worker to the round with it, assumed until the job has measured it
SEARCH_SHARE = 0.005  # maximum share of a core for the search for stragglers, which takes 5 ms of the cores that train
MAX_SEARCH_PAUSE_S = 10.0  # maximum seconds between two searches; with hundreds of workers one takes long
JUDGE_AGAIN_S = 10.0  # seconds until a straggler is judged again if its replacement does not pay
GIL_TIMEOUT_S = 15.0  # seconds without any running Python thread of this worker before the watch reports it
GIL_POLL_S = 1.0  # seconds between two checks that a Python thread of this worker can run
REPORT_AGAIN_S = 600.0  # seconds between two equal reports: that no Python thread could run, or that a worker is a straggler
MAX_EVENT_BYTES = 60_000  # maximum size of the stacks in one event, all workers together


@dataclass(frozen=True)
class HangPatience:
    """Seconds that a worker may make no progress."""

    floor_s: float = 60.0  # minimum limit within a training step; 0 disables the search for hangs
    factor: float = 20.0  # multiple of the usual step time, if that is longer
    first_s: float = 600.0  # limit for first steps in a round, shares in parts, validation, checkpoints, changes of the world
    answer_s: float = 10.0  # time for all workers to report their position
    again_s: float = 600.0  # interval between reports of the same hang

    def limit_s(self, phase: str, steps_in_round: int, step_time_s: float) -> float:
        """Return how long a worker may stay in this phase; infinity where no duration counts as a hang."""
        if phase in ("setup", "debugger"):
            return math.inf  # a joiner may wait as long as the job runs
        usual_s = max(self.floor_s, self.factor * step_time_s)
        return usual_s if phase in ("step", "between") and steps_in_round > 3 else max(usual_s, self.first_s)


class Watchdog:
    """One worker's watch, from the start of the training loop to its end."""

    def __init__(self, fit: FitProgress, patience: HangPatience | None = None) -> None:
        self._hangs = _Hangs(fit, patience or HangPatience())
        self._stragglers = _Stragglers(fit)
        self._memory = _Memory(fit)
        self._closing = threading.Event()
        # Runs in a thread of its own, because the other one waits for etcd at times, which is not time without the GIL.
        self._gil = _GilWatch(os.environ)
        self._gil.start()
        self._thread = threading.Thread(target=self._run, name="dlrover-watchdog", daemon=True)
        self._thread.start()

    def saw(self, window: StepProfile) -> None:
        """Record one more window of this worker's steps."""
        self._memory.windows.append(window)

    def close(self, timeout_s: float = 5.0) -> None:
        self._closing.set()
        self._gil.close()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        polled_at = 0.0
        away = False
        while not self._closing.wait(POLL_S):
            now = time.monotonic()
            try:
                # A stopped process, or one on a host that slept, has missed its own polls.
                self._hangs.check(now, was_stopped=polled_at > 0 and now - polled_at > STOPPED_S)
                self._stragglers.check(now)
                self._memory.check(now)
                away = False
            except EtcdError as error:
                if not away:
                    log.warning("hangs and stragglers go unnoticed until etcd is back: %s", error)
                away = True
            except Exception:
                # Training must continue without the watch. The traceback records the failure.
                log.exception("the watch over this worker failed")
            polled_at = time.monotonic()


class _GilWatch:
    """Reports times without any running Python thread, as when C code holds the GIL and this process cannot answer."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._is_unsafe = environ.get(variables.UNSAFE_STACKS) == "1"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlrover-gil-watch", daemon=True)
        self._checked_at = self._armed_at = self._reported_at = -math.inf
        if self._is_unsafe:
            log.warning(
                "%s is set: if no Python thread of this worker can run for %.0f s, its stacks are written below the word "
                "'Timeout', which may crash it; unset the variable to switch that off",
                *(variables.UNSAFE_STACKS, GIL_TIMEOUT_S),
            )

    def start(self) -> None:
        self.check(time.monotonic())  # covers the thread's first wait, too
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(GIL_POLL_S):
            self.check(time.monotonic())
        if self._is_unsafe:
            faulthandler.cancel_dump_traceback_later()

    def check(self, now: float) -> None:
        """Check once. Call this regularly from a thread that does nothing else."""
        if self._is_unsafe and (stream := sys.__stderr__) is not None and now - self._armed_at > GIL_TIMEOUT_S / 4:
            self._armed_at = now
            with contextlib.suppress(ValueError, OSError, RuntimeError):  # standard error is closed or not a file
                faulthandler.dump_traceback_later(GIL_TIMEOUT_S, file=stream)
        silent_s, self._checked_at = now - self._checked_at, now
        if GIL_TIMEOUT_S < silent_s < math.inf and now - self._reported_at > REPORT_AGAIN_S:
            self._reported_at = now
            log.warning(
                "no Python thread of this worker ran for %.0f s: it was stopped, its machine is overloaded, or C code held the "
                "GIL; it is at %s now",
                *(silent_s, innermost_user_place()),
            )

    def close(self, timeout_s: float = 5.0) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)


# --- hangs --------------------------------------------------------------------------------------------------------------------


class _Hangs:
    """Answers requests for this worker's position, and requests the others' when it makes no progress itself."""

    def __init__(self, fit: FitProgress, patience: HangPatience) -> None:
        self._fit = fit
        self._membership: Membership = fit.world.membership
        self._shared = self._membership.shared
        self._patience = patience
        request = self._shared.stacks_request()
        self._answered = request.number if request is not None else 0
        self._asked: tuple[StacksRequest, float] | None = None  # this worker's own request, and its time
        self._reported_at: float | None = None  # report of this hang, by any worker
        self._progress: Progress | None = None
        self._since = time.monotonic()

    def check(self, now: float, was_stopped: bool) -> None:
        progress = self._fit.now
        if progress != self._progress or was_stopped:
            self._progress, self._since, self._reported_at = progress, now, None
        request = self._shared.stacks_request()
        if request is not None and request.number > self._answered:
            self._answer(request, now)
            self._reported_at = now
        if self._asked is not None:
            self._conclude(now)
        elif self._patience.floor_s > 0 and (self._reported_at is None or now - self._reported_at > self._patience.again_s):
            phase = "debugger" if is_in_debugger() else progress.phase
            limit_s = self._patience.limit_s(phase, progress.steps_in_round, self._fit.step_time_s)
            if now - self._since > limit_s:
                self._ask(now)

    def _ask(self, now: float) -> None:
        usual = f"{self._fit.step_time_s:.3g} s are usual" if self._fit.step_time_s else "none was made before"
        asked = self._shared.ask_for_stacks(self._answered, f"no step for {now - self._since:.0f} s, {usual}")
        self._asked = (asked, now) if asked is not None else None

    def _answer(self, request: StacksRequest, now: float) -> None:
        formation = self._fit.formation
        self._shared.put_stacks(
            StacksRecord(
                worker_id=self._membership.worker_id,
                request=request.number,
                global_rank=formation.rank if formation is not None else 0,
                host=socket.gethostname(),
                pid=os.getpid(),
                phase="debugger" if is_in_debugger() else self._fit.now.phase,
                since_s=now - self._since,
                in_collective=self._fit.is_in_collective,
                place=innermost_user_place(),
                stacks=stacks(),
            )
        )
        self._answered = request.number

    def _conclude(self, now: float) -> None:
        """Report the hang once all answers are there or the wait for them is over."""
        assert self._asked is not None
        request, asked_at = self._asked
        answers = self._shared.stacks(request.number)
        view = self._membership.view
        members = [w for w in view.round.members if w not in view.lost] if view.round is not None else []
        missing = [worker for worker in members if worker not in answers]
        if missing and now - asked_at < self._patience.answer_s:
            return
        self._asked = None
        found = sorted((answers[w] for w in members if w in answers), key=lambda a: a.global_rank)
        slow = ("parts", "validation", "checkpoint", "resize")
        excused = [a for a in found if a.phase in slow and a.since_s < self._patience.first_s]
        if excused or any(a.phase == "debugger" for a in found) or self._since > asked_at:
            log.info("no hang: %s", ", ".join(f"rank {a.global_rank} is in {a.phase}" for a in found))
            return
        event, text = hang_event(request, found, missing)
        self._shared.event(event, text)
        log.error("%s", text)


def hang_event(request: StacksRequest, answers: list[StacksRecord], missing: list[str]) -> tuple[HangFound, str]:
    """Return the event that reports a hang, and its text; equal stacks are kept once.

    Args:
        missing: workers without an answer.
    """
    waiting = [a for a in answers if a.in_collective]
    others = [a for a in answers if not a.in_collective]
    parts = [f"rank {a.global_rank} ({a.host}:{a.pid}) is at {a.place}" for a in others]
    if missing:
        parts.append(f"{', '.join(missing)} has not sent its stack traces: it is stopped, or in C code that holds the GIL")
    if waiting and parts:
        ranks = ", ".join(str(a.global_rank) for a in waiting)
        parts.append(f"rank{'s' * (len(waiting) > 1)} {ranks} wait{'s' * (len(waiting) == 1)} for that in a collective")
    elif waiting:
        parts.append("all workers wait in a collective, for a message that was lost or for different collectives")
    kept: dict[str, int] = {}
    room = MAX_EVENT_BYTES // max(1, len({a.stacks for a in answers}))
    for answer in (*others, *waiting):
        kept.setdefault(answer.stacks[:room], len(kept))
    workers = [
        {**{k: v for k, v in asdict(a).items() if k not in ("stacks", "request")}, "stack": kept[a.stacks[:room]]}
        for a in answers
    ]
    event = HangFound(request.number, request.asked_by, request.reason, workers, missing, list(kept))
    return event, f"the job hangs: {request.reason}; {'; '.join(parts)}"


# --- stragglers ---------------------------------------------------------------------------------------------------------------


class _Stragglers:
    """On rank 0: judges every worker by the times in the votes, and requests a straggler's replacement where that pays."""

    def __init__(self, fit: FitProgress) -> None:
        self._fit = fit
        self._membership: Membership = fit.world.membership
        self._num_observations = 0
        self._replacing = ""  # the worker whose replacement was requested last, if it is still the straggler
        self._judged_at: dict[str, float] = {}  # monotonic clock, by worker
        self._reported_at: dict[tuple[str, str], float] = {}  # time of the newest event, by worker and act
        self._next_search = 0.0

    def check(self, now: float) -> None:
        fit, pulse = self._fit, self._fit.pulse
        formation = fit.formation
        if (
            formation is None
            or formation.rank != 0
            or pulse.num_observations == self._num_observations
            or now < self._next_search
        ):
            return
        self._num_observations = pulse.num_observations
        members, hosts = formation.round.members, formation.round.hosts
        observations = pulse.observations(formation.round.number)
        if not observations or self._membership.view.lost or len(hosts) != len(members):
            return  # the world is changing
        began_s = time.thread_time()
        found = find_straggler(observations, hosts=hosts, loads=fit.loads)
        self._next_search = now + min((time.thread_time() - began_s) / SEARCH_SHARE, MAX_SEARCH_PAUSE_S)
        if found is None:
            return
        worker = members[found.global_rank]
        if self._replacing == worker or now - self._judged_at.get(worker, -math.inf) < JUDGE_AGAIN_S:
            return
        self._judged_at[worker] = now
        self._judge(found, worker, now)

    def _judge(self, found: Straggler, worker: str, now: float) -> None:
        membership, shared = self._membership, self._membership.shared
        past = shared.journal.events()
        num_earlier = sum(straggler.act == "replace" for _, straggler in events_of(past, StragglerFound))
        known = [stall.seconds for _, stall in events_of(past, TrainingStalled) if 0 <= stall.seconds < 3600]
        replacement = judge_replacement(
            found,
            self._fit.remaining_steps,
            median(known) if known else DEFAULT_RESIZE_COST_S,
            num_earlier,
            lead_s=_lead_s(past),
        )
        act, why = "none", replacement.reason
        if replacement.pays and not shared.has_controller():
            act, why = "recommend", f"{replacement.reason} (a recommendation: no controller starts or ends nodes)"
        elif replacement.pays and not membership.view.replacements and shared.replace(worker, f"a straggler: {found.text}"):
            act = "replace"
        self._replacing = worker if act == "replace" else ""
        if act != "replace" and now - self._reported_at.get((worker, act), -math.inf) < REPORT_AGAIN_S:
            return
        self._reported_at[worker, act] = now
        record = membership.workers.of([worker]).get(worker)
        where = f"rank {found.global_rank}, {record.host}:{record.pid}" if record is not None else f"rank {found.global_rank}"
        event = StragglerFound(
            worker_id=worker,
            act=act,
            why=why,
            round=self._fit.formation.round.number if self._fit.formation is not None else 0,
            step=self._fit.now.counts[0],
            saved_s=replacement.saved_s,
            cost_s=replacement.cost_s,
            **asdict(found),
        )
        shared.event(event, f"{worker} ({where}) makes the others wait: {found.text}; {why}")
        log.warning("%s is a straggler: %s; %s", worker, found.text, why)


# --- memory -------------------------------------------------------------------------------------------------------------------


class _Memory:
    """Predicts when this worker's memory reaches its limit, and requests a remedy before that."""

    def __init__(self, fit: FitProgress) -> None:
        self._fit = fit
        self._membership: Membership = fit.world.membership
        self.windows: deque[StepProfile] = deque(maxlen=MAX_WINDOWS + NUM_SETTLING)
        self._first_round = 0  # first round with this worker; 0: not known yet
        self._checked_at = 0.0  # end of the newest window examined
        self._acted: tuple[int, Act] = (0, "none")  # round, and the act of this worker in it
        self._acted_at = 0.0
        self._raised_bytes = 0  # memory limit at the newest request for more memory in place
        self._stuck_bytes = 0  # memory limit that was not raised in time; 0: each request was granted
        self._awaited: tuple[Set[str], float] = (frozenset(), 0.0)  # workers to be replaced, and the time of the request

    def check(self, now: float) -> None:
        if self._membership.view.replacements != self._awaited[0]:
            self._awaited = self._membership.view.replacements, now
        windows = list(self.windows)
        if not windows or windows[-1].at == self._checked_at:
            return
        self._checked_at = windows[-1].at
        membership, shared, view = self._membership, self._membership.shared, self._membership.view
        forecast = forecast_memory(windows)
        self._first_round = self._first_round or windows[0].round_number
        past = shared.journal.events() if forecast is not None or len(windows) == NUM_SETTLING + 1 else []
        if forecast is None and (earlier := self._of_replaced(past)) is not None:
            forecast = inherited_forecast(windows[-1], earlier)
        if forecast is None:
            return
        lead_s = _lead_s(past)
        number, act = self._acted if self._acted[0] == windows[-1].round_number else (windows[-1].round_number, "none")
        if act == "checkpoint":
            return
        # Workers are replaced one at a time. If none has arrived for a long time, as in a full cluster, none will in time.
        awaits_worker = bool(view.replacements) or act in REMEDIES
        is_urgent = forecast.earliest_seconds_left < lead_s
        awaited_since = self._awaited[1] if view.replacements else self._acted_at
        if awaits_worker and now - awaited_since < (lead_s if is_urgent else LEADS * lead_s):
            return
        can_replace = shared.has_controller() and not awaits_worker
        nodes = shared.nodes
        limit_bytes = windows[-1].memory_limit_bytes
        if act == "raise" and limit_bytes <= self._raised_bytes:
            if now - self._acted_at < RAISE_S:
                return
            self._stuck_bytes = limit_bytes  # there is no room for it: a larger node may be elsewhere
        elif act == "raise":
            act = "none"  # granted; it may be needed again
        remedy = choose_remedy(
            forecast,
            GrowthSituation(
                remaining_steps=self._fit.remaining_steps,
                lead_s=lead_s,
                num_workers=windows[-1].num_workers,
                max_workers=view.job.most_workers(windows[-1].num_workers) if view.job is not None else windows[-1].num_workers,
                can_add=can_replace and (view.plan is None or view.plan.owner != "user"),
                can_replace=can_replace,
                has_sharded_tables=windows[-1].embedding_bytes > 0,
                max_memory_bytes=nodes.max_memory_mb * 2**20 // self._workers_per_node if nodes is not None else 0,
                tried=self._tried(past, windows),
                sizes=view.job.world_sizes if view.job is not None else ANY_NUMBER,
                spare_bytes=windows[-1].spare_bytes,
                can_raise=can_replace and nodes is not None and nodes.in_place and limit_bytes > self._stuck_bytes,
            ),
        )
        if remedy.act == act or not self._carry_out(remedy):
            return
        self._acted, self._acted_at = (number, remedy.act), now
        if remedy.act == "none":
            return
        event = MemoryShort(
            worker_id=membership.worker_id, round=number, step=self._fit.now.counts[0], **asdict(remedy), **asdict(forecast)
        )
        shared.event(event, f"{membership.worker_id}: {remedy.reason}")
        log.warning("memory of this worker: %s", remedy.reason)

    @property
    def _workers_per_node(self) -> int:
        job = self._membership.view.job
        return job.workers_per_node if job is not None else 1

    def _of_replaced(self, past: list[EventRecord]) -> MemoryForecast | None:
        """Return the forecast for the worker that this one replaced because of its memory; None if it replaced none.

        Rounds give the order of events, because the clocks of several hosts do not.
        """
        asked = [
            short
            for _, short in events_of(past, MemoryShort)
            if short.act in ("replace", "enlarge") and 0 < short.round < self._first_round
        ]
        present = self._membership.workers.present({short.worker_id for short in asked})
        asked = [short for short in asked if short.worker_id not in present]
        if not asked:
            return None
        newest = max(asked, key=lambda short: short.round)
        before: set[str] = set()
        between: set[str] = set()
        for _, formed in events_of(past, RoundFormed):
            if formed.number < self._first_round:
                there = before if formed.number <= newest.round else between
                there.update(formed.members, formed.cause.get("joined", ()))
        if between - before:
            return None  # another worker has taken that place
        return MemoryForecast(**{f.name: getattr(newest, f.name) for f in fields(MemoryForecast)})

    def _carry_out(self, remedy: Remedy) -> bool:
        membership, shared = self._membership, self._membership.shared
        if remedy.act == "checkpoint":
            shared.ask_for_checkpoint(remedy.reason)
        if remedy.act in ("raise", "enlarge"):
            memory_mb = math.ceil(remedy.node_memory_bytes * self._workers_per_node / 2**20)

            def larger(now: PlanRecord | None) -> PlanRecord | None:
                if now is None or (now.node_memory_mb or 0) >= memory_mb:
                    return None
                return replace(now, node_memory_mb=memory_mb)

            shared.update_plan(larger)
            self._raised_bytes = self.windows[-1].memory_limit_bytes
        if remedy.act in ("replace", "enlarge"):
            return shared.replace(membership.worker_id, f"memory: {remedy.reason}")  # False: another one is replaced first
        if remedy.act == "add_workers":
            plan = PlanRecord(remedy.num_workers, "planner", remedy.reason, binding=True, created_at=time.time())

            def more(now: PlanRecord | None) -> PlanRecord | None:
                if now is None:
                    return plan
                if now.owner != "planner" or now.num_workers >= plan.num_workers:
                    return None
                wanted = {name: getattr(plan, name) for name in ("num_workers", "source", "reason", "binding", "created_at")}
                return replace(now, **wanted)

            shared.update_plan(more)
        return True

    def _tried(self, past: list[EventRecord], windows: list[StepProfile]) -> list[Act]:
        """Return earlier remedies that made neither this worker nor the one it replaced smaller."""
        tried: list[Act] = []
        here = [w for w in windows if w.round_number == windows[-1].round_number][:NUM_SETTLING]
        level = max(w.memory_bytes for w in here)
        for _, short in events_of(past, MemoryShort):
            entered = windows[-1].round_number if short.act == "add_workers" else self._first_round
            helped = level <= short.level_bytes - short.grown_bytes / 2
            if short.act == "enlarge":
                helped = windows[-1].memory_limit_bytes > short.limit_bytes
            if 0 < short.round < entered and not helped:
                tried += [act for act in REMEDIES if act == short.act and act not in tried]
        return tried


def _lead_s(past: list[EventRecord]) -> float:
    """Return the seconds between the last request for a worker in this job and the round with it."""
    taken = DEFAULT_LEAD_S
    asked_at: float | None = None
    for record, event in events_of(past, Event):
        if isinstance(event, MemoryShort | NodeMemoryShort | StragglerFound) and event.act in REMEDIES:
            asked_at = record.at
        elif isinstance(event, RoundFormed) and event.kind in ("replace", "grow") and asked_at is not None:
            taken, asked_at = record.at - asked_at, None
    return max(1.0, taken)
