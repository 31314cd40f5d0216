"""Recommend sizes of a job to others, such as a controller of training jobs in a cluster: the planner as a service.

A request has windows of measured steps, or the name of a job that has some. The answer lists every size within the limits, with
its predicted step time, the time to the end, the cost, their 90 % intervals, and the size to choose. Nothing is changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_dlrover._version import __version__
from lightning_dlrover.codec import RecordError, from_fields
from lightning_dlrover.rdzv.job.events import DecisionMade, WindowMeasured, events_of
from lightning_dlrover.rdzv.job.records import EventRecord, JobRecord
from lightning_dlrover.tuning.candidates import DEFAULT_RULES, CandidateTable, PlanRequest
from lightning_dlrover.tuning.memory import GPU_TERMS, MemoryModel, on_gpu
from lightning_dlrover.tuning.plan import Decision, Limits, Objective, Prices
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile
from lightning_dlrover.tuning.step_time import StepTimeModel

MAX_WINDOWS = 2000
"""Maximum number of windows of a request; of a job's own, the newest."""

MAX_SIZE = 4096
"""Maximum number of workers that is considered."""

MIN_GAIN = 0.02
"""Least relative gain for which a size other than the present one is recommended."""


@dataclass(frozen=True)
class RecommendRequest:
    """The fields of a request. Exactly one of `job` and `samples` is given."""

    job: str = ""
    samples: list[StepProfile] = field(default_factory=list)  # windows of one job, oldest first; the last has its present size
    min_workers: int = 0  # 0: that of the job, else 1
    max_workers: int = 0  # 0: that of the job, else twice the largest measured size
    workers_per_node: int = 0  # 0: that of the job, else 1
    node_cores: float = 0.0  # cores of one node; 0: those of a worker
    remaining_samples: float | None = None  # None: as the job's planner knows it
    resize_cost_s: float = 0.5  # pause of the job for a change of workers
    aim: str = "fastest"  # fastest, cheapest or efficient
    deadline_s: float | None = None  # from now
    budget: float | None = None  # money from now; needs prices
    prices: dict[str, float] = field(default_factory=dict)  # core_hour, gpu_hour, gib_hour


@dataclass(frozen=True)
class JobEvidence:
    """What is known about a job: its windows, limits and remaining work."""

    windows: Sequence[StepProfile]
    job: JobRecord | None = None
    remaining_samples: float | None = None
    is_local: bool = False  # its nodes are processes of one machine


def evidence_of(events: Sequence[EventRecord], job: JobRecord | None, now: float, is_local: bool = False) -> JobEvidence:
    """Return what a job's history says. Unreadable events are skipped.

    Args:
        now: seconds since the epoch.
    """
    windows = []
    for _, measured in events_of(events, WindowMeasured):
        with contextlib.suppress(RecordError):
            windows.append(from_fields(StepProfile, measured.document, "a window"))
    left = None
    for _, made in events_of(reversed(events), DecisionMade):
        with contextlib.suppress(RecordError, ValueError):
            decision = Decision.from_data(made.document)
            if decision.left_s is not None:
                rate = next((c.samples_per_s for c in decision.candidates if c.settings == decision.current), None)
                left = max(0.0, decision.left_s - max(0.0, now - decision.at)) * rate if rate is not None else None
            break
    return JobEvidence(sorted(windows, key=lambda window: window.at)[-MAX_WINDOWS:], job, left, is_local)


def recommendation(given: Any, find: Callable[[str], JobEvidence]) -> dict[str, Any]:
    """Answer a request.

    Args:
        given: fields of the request, as `RecommendRequest` names them.
        find: returns what is known about a job. Raises ValueError if that is nothing.

    Raises:
        ValueError: a field is unknown, has another type or an impossible value, or there is too little evidence.
    """
    try:
        request = from_fields(RecommendRequest, given, "the request")
    except RecordError as error:
        raise ValueError(str(error)) from error
    if bool(request.job) == bool(request.samples):
        raise ValueError("give either `job`, the name of a job, or `samples`, its windows of measured steps")
    if len(request.samples) > MAX_WINDOWS:
        raise ValueError(f"{len(request.samples)} windows are more than {MAX_WINDOWS}; leave out the oldest")
    evidence = find(request.job) if request.job else JobEvidence(request.samples)
    if not evidence.windows:
        raise ValueError(
            f"job {request.job!r} has not measured any step yet: it needs a DLRoverCallback in its Trainer, and some steps"
        )
    return _answer(request, evidence)


def _answer(request: RecommendRequest, evidence: JobEvidence) -> dict[str, Any]:
    windows, job = list(evidence.windows), evidence.job
    present = windows[-1]
    windows = [window for window in windows if window.device == present.device]
    largest = max(window.num_workers for window in windows)
    per_node = request.workers_per_node or (job.workers_per_node if job is not None else 0) or 1
    fewest = request.min_workers or (job.min_workers if job is not None else 1)
    most = request.max_workers or (job.max_workers if job is not None else 2 * largest)
    if most > MAX_SIZE:
        raise ValueError(f"max_workers is {most}; sizes up to {MAX_SIZE} can be compared")
    failed = job.sizes_not_planned if job is not None and not request.workers_per_node else frozenset[int]()
    limits = Limits(fewest, most, workers_per_node=0 if evidence.is_local else per_node, failed_sizes=failed)
    if unknown := request.prices.keys() - {f.name for f in fields(Prices)}:
        raise ValueError(f"there is no price {sorted(unknown)[0]!r}; known are core_hour, gpu_hour and gib_hour")
    objective = Objective(request.aim, request.deadline_s, request.budget, Prices(**request.prices))  # type: ignore[arg-type]
    left = request.remaining_samples if request.remaining_samples is not None else evidence.remaining_samples
    node_cores = request.node_cores or present.cores
    asked = PlanRequest(windows, node_cores, left, request.resize_cost_s)
    model = StepTimeModel.fit(windows, node_cores=node_cores)
    memory = MemoryModel.fit(windows) if any(w.memory_bytes or w.peak_memory_bytes for w in windows) else None
    on_gpus = on_gpu(windows)
    gpu_memory = MemoryModel.fit(on_gpus, GPU_TERMS) if on_gpus else None
    table = CandidateTable.of(asked, model, limits, objective, memory, DEFAULT_RULES, gpu_memory)
    best_of = _best_of_sizes(table, limits)
    sizes = [_size(table, index) for _, index in sorted(best_of.items())]
    chosen, reason = _choose(table, best_of, objective)
    return {
        "recommended": None if chosen is None else _size(table, chosen),
        "reason": reason,
        "objective": objective.describe(),
        "present": {"num_workers": present.num_workers, "step_time_s": present.step_time_s, "device": present.device},
        "remaining_samples": left,
        "num_windows": len(windows),
        "interval_percent": 90,
        "sizes": sizes,
    }


def _best_of_sizes(table: CandidateTable, limits: Limits) -> dict[int, int]:
    """Return the index of the best settings of each size within the limits; infeasible ones only where nothing else is left."""
    best: dict[int, int] = {}
    for index, settings in enumerate(table.settings):
        if not limits.allows(settings):
            continue
        known = best.get(settings.num_workers)
        rank = (bool(table.notes[index]), float(table.loss[index]))
        if known is None or rank < (bool(table.notes[known]), float(table.loss[known])):
            best[settings.num_workers] = index
    return best


def _choose(table: CandidateTable, best_of: Mapping[int, int], objective: Objective) -> tuple[int | None, str]:
    """Return the index of the settings to choose, and why."""
    able = [index for index in best_of.values() if not table.notes[index]]
    if not able:
        notes = {table.notes[index] for index in best_of.values()} or {"the limits leave no size"}
        return None, f"no size within the limits can be run: {'; '.join(sorted(notes))}"
    kept = [index for index in able if table.step_s[index] <= table.bound_s[index]]
    if not kept:
        fastest = min(able, key=lambda index: float(table.step_s[index]))
        return fastest, f"no size keeps the deadline or the budget ({objective.describe()}); this is the fastest"
    best = min(kept, key=lambda index: (float(table.loss[index]), table.settings[index]))
    now = table.now
    if best != now and now in kept and table.loss[now] <= table.loss[best] * (1 + MIN_GAIN):
        return now, f"the present size is within {MIN_GAIN:.0%} of the best ({table.settings[best].num_workers} workers)"
    if best == now:
        return now, "the present size is the best of those within the limits"
    gain = float(table.step_s[now] / table.step_s[best])
    known = "measured" if table.measured[best] else "predicted"
    return best, f"{gain:.2f} times the present speed ({known})"


def _size(table: CandidateTable, index: int) -> dict[str, Any]:
    """Return one size with its figures. Those of the whole rest of the job are null where its end is unknown."""
    settings = table.settings[index]
    change_s = table.change_cost_s(table.now, index)
    has_end = table.request.remaining_samples is not None
    price = table.cost_per_hour[index]

    def rest(step_s: float) -> float | None:
        return table.steps_left * step_s + change_s if has_end else None

    step_s, low_s, high_s = (float(each[index]) for each in (table.step_s, table.low_s, table.high_s))
    seconds = {"value": rest(step_s), "low": rest(low_s), "high": rest(high_s)}
    cost = {name: price * each / 3600 if price is not None and each is not None else None for name, each in seconds.items()}
    return {
        "num_workers": settings.num_workers,
        "settings": {name: value for name, value in asdict(settings).items() if name != "num_workers"},
        "step_time_s": {"value": step_s, "low": low_s, "high": high_s},
        "samples_per_s": table.global_batch / step_s,
        "seconds_to_end": seconds,
        "cost_per_hour": price,
        "cost_to_end": cost,
        "cores": _finite(float(table.cores[index])),
        "gpus": int(table.gpus[index]),
        "is_measured": bool(table.measured[index]),
        "is_feasible": not table.notes[index],
        "note": table.notes[index],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- the description of the interface ---------------------------------------------------------------------------------------

_NUMBER, _TEXT, _WHOLE = {"type": "number"}, {"type": "string"}, {"type": "integer", "minimum": 0}


def _optional(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _interval(name: str) -> dict[str, Any]:
    figures = {key: _optional(_NUMBER) for key in ("value", "low", "high")}
    return {"type": "object", "description": f"{name}, with its interval of 90 %", "properties": figures}


def _window_schema() -> dict[str, Any]:
    """Return the schema of a window. Its fields are those of `StepProfile`."""
    kinds = {"int": _WHOLE, "float": _NUMBER, "str": _TEXT}
    properties = {f.name: kinds[str(f.type)] for f in fields(StepProfile)}
    required = [f.name for f in fields(StepProfile) if str(f.default).startswith("<dataclasses._MISSING")]
    text = f"Means over consecutive steps of one worker. {', '.join(f'{part}_s' for part in STEP_PARTS)} add up to step_time_s."
    return {"type": "object", "description": text, "properties": properties, "required": required}


_SIZE = {
    "type": "object",
    "properties": {
        "num_workers": _WHOLE,
        "settings": {"type": "object", "description": "of each worker: loader workers, threads, batches ahead"},
        "step_time_s": _interval("seconds of a step"),
        "samples_per_s": _NUMBER,
        "seconds_to_end": _interval("seconds until the end of training, null where that is unknown"),
        "cost_per_hour": _optional(_NUMBER),
        "cost_to_end": _interval("money until the end of training, null without prices or an end"),
        "cores": _optional(_NUMBER),
        "gpus": _WHOLE,
        "is_measured": {"type": "boolean"},
        "is_feasible": {"type": "boolean"},
        "note": {"type": "string", "description": "why the size cannot be run"},
    },
}

_ANSWER = {
    "type": "object",
    "properties": {
        "recommended": {"anyOf": [{"$ref": "#/components/schemas/Size"}, {"type": "null"}]},
        "reason": _TEXT,
        "objective": _TEXT,
        "present": {"type": "object"},
        "remaining_samples": _optional(_NUMBER),
        "num_windows": _WHOLE,
        "interval_percent": _WHOLE,
        "sizes": {"type": "array", "items": {"$ref": "#/components/schemas/Size"}},
    },
}

_REQUEST = {
    "type": "object",
    "description": "Give either job or samples. Other fields default to what is known about the job.",
    "additionalProperties": False,
    "properties": {
        "job": {"type": "string", "description": "name of a job that this server shows, or that its history has"},
        "samples": {"type": "array", "maxItems": MAX_WINDOWS, "items": {"$ref": "#/components/schemas/Window"}},
        "min_workers": _WHOLE,
        "max_workers": {**_WHOLE, "maximum": MAX_SIZE},
        "workers_per_node": _WHOLE,
        "node_cores": _NUMBER,
        "remaining_samples": _optional(_NUMBER),
        "resize_cost_s": _NUMBER,
        "aim": {"type": "string", "enum": ["fastest", "cheapest", "efficient"]},
        "deadline_s": {**_optional(_NUMBER), "description": "seconds from now"},
        "budget": _optional(_NUMBER),
        "prices": {"type": "object", "properties": {f.name: _NUMBER for f in fields(Prices)}},
    },
}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": dict(schema)}}}


def openapi() -> dict[str, Any]:
    """Return the OpenAPI description of the server's interface."""
    problem = {"description": "the request cannot be answered; `error` has the reason", **_json({"type": "object"})}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dlrover serve", "version": __version__},
        "paths": {
            "/v1/recommend": {
                "post": {
                    "summary": "Recommend the size of a job",
                    "operationId": "recommend",
                    "requestBody": {"required": True, **_json({"$ref": "#/components/schemas/Request"})},
                    "responses": {
                        "200": {
                            "description": "sizes, and the one to choose",
                            **_json({"$ref": "#/components/schemas/Answer"}),
                        },
                        "400": problem,
                        "413": problem,
                        "415": problem,
                    },
                }
            },
            "/api/jobs": {"get": {"summary": "All jobs and pools", "responses": {"200": {"description": "lists"}}}},
            "/api/jobs/{name}": {
                "get": {
                    "summary": "One job",
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": _TEXT}],
                    "responses": {"200": {"description": "the job"}, "404": problem},
                }
            },
            "/metrics": {"get": {"summary": "Metrics for Prometheus", "responses": {"200": {"description": "text"}}}},
        },
        "components": {"schemas": {"Request": _REQUEST, "Answer": _ANSWER, "Size": _SIZE, "Window": _window_schema()}},
    }
