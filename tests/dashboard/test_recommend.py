"""Recommendations for others: sizes with times, costs and intervals."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_dlrover.dashboard.recommend import JobEvidence, RecommendRequest, evidence_of, openapi, recommendation
from lightning_dlrover.rdzv.job.records import JobRecord
from lightning_dlrover.tuning.samples import StepProfile
from tests.support.recorded_jobs import decision, decision_event, window_event
from tests.support.windows import WINDOW

ROOT = Path(__file__).parents[2]


def window(num_workers: int, step_s: float, at: float = 0.0) -> StepProfile:
    """A window of a job that computes for all but a tenth of its step."""
    work = 0.9 * step_s
    return replace(
        WINDOW,
        num_workers=num_workers,
        num_nodes=num_workers,
        global_batch=960,
        local_batch=960 // num_workers,
        step_time_s=step_s,
        data_wait_s=0.0,
        forward_s=work / 3,
        backward_s=work * 2 / 3,
        communication_s=0.05 * step_s,
        optimizer_s=0.05 * step_s,
        other_s=0.0,
        samples_per_s=960 / step_s,
        prefetch_factor=2,
        at=at,
    )


SCALING = [window(1, 1.0, 1.0), window(1, 1.02, 2.0), window(2, 0.53, 3.0), window(4, 0.28, 4.0), window(4, 0.29, 5.0)]
"""A job that gets faster with more workers."""


def nothing_known(name: str) -> JobEvidence:
    raise ValueError(f"no job {name!r}")


def asked(**given: Any) -> dict[str, Any]:
    windows = given.pop("windows", SCALING)
    request = {"samples": [asdict(each) for each in windows], "max_workers": 8, **given}
    return recommendation(json.loads(json.dumps(request)), nothing_known)


def test_every_size_within_the_limits_has_a_time_with_an_interval() -> None:
    found = asked(min_workers=2, max_workers=6, remaining_samples=960_000, prices={"core_hour": 0.1})
    assert [size["num_workers"] for size in found["sizes"]] == [2, 3, 4, 5, 6]
    for size in found["sizes"]:
        for figure in ("step_time_s", "seconds_to_end", "cost_to_end"):
            assert 0 < size[figure]["low"] <= size[figure]["value"] <= size[figure]["high"]
    by_size = {size["num_workers"]: size for size in found["sizes"]}
    assert by_size[4]["is_measured"]
    assert not by_size[6]["is_measured"]
    assert by_size[4]["seconds_to_end"]["value"] == pytest.approx(285.0, rel=0.1)


def test_fastest_size_has_more_workers_than_the_cheapest() -> None:
    prices = {"core_hour": 0.1}
    fastest = asked(prices=prices)["recommended"]["num_workers"]
    cheapest = asked(prices=prices, aim="cheapest")["recommended"]["num_workers"]
    assert fastest > cheapest
    in_time = asked(prices=prices, aim="cheapest", remaining_samples=960_000, deadline_s=400.0)
    assert cheapest < in_time["recommended"]["num_workers"] <= fastest
    assert in_time["recommended"]["seconds_to_end"]["value"] <= 400


def test_deadline_that_nothing_keeps_is_said() -> None:
    found = asked(remaining_samples=960_000, deadline_s=1.0)
    assert "no size keeps the deadline" in found["reason"]
    assert found["recommended"] is not None


def test_rest_of_the_job_is_null_where_its_end_is_unknown() -> None:
    size = asked()["sizes"][0]
    assert size["seconds_to_end"] == {"value": None, "low": None, "high": None}
    assert size["cost_to_end"]["value"] is None
    assert size["cost_per_hour"] is None


def test_sizes_that_leave_a_node_partly_empty_are_not_recommended() -> None:
    found = asked(workers_per_node=4, min_workers=4, max_workers=8)
    assert {size["num_workers"] for size in found["sizes"] if size["is_feasible"]} <= {4, 8}
    assert found["recommended"]["num_workers"] in (4, 8)


def test_job_by_name_brings_its_limits_and_its_remaining_work() -> None:
    events = [*(window_event(1000.0 + n, 20 * n) for n in range(5)), decision_event(decision(1010.0))]
    evidence = evidence_of(events, JobRecord("training", True, 1, 3, "0"), now=1010.0)
    assert len(evidence.windows) == 5
    assert evidence.remaining_samples == pytest.approx(600.0 * 5120.0)
    found = recommendation({"job": "known"}, lambda _: evidence)
    assert [size["num_workers"] for size in found["sizes"]] == [1, 2, 3]
    assert found["remaining_samples"] == evidence.remaining_samples


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "either `job`"),
        ({"job": "a", "samples": [asdict(WINDOW)]}, "either `job`"),
        ({"job": "a"}, "no job 'a'"),
        ({"jobs": "a"}, "unknown fields"),
        ({"samples": [{"num_workers": 1}]}, "is missing"),
        ({"samples": [asdict(replace(WINDOW, step_time_s=-1.0))]}, "step_time_s"),
        ({"samples": [asdict(WINDOW)], "aim": "best"}, "aim|objective"),
        ({"samples": [asdict(WINDOW)], "prices": {"tpu_hour": 1.0}}, "tpu_hour"),
        ({"samples": [asdict(WINDOW)], "budget": 5.0}, "needs prices"),
        ({"samples": [asdict(WINDOW)], "max_workers": 10**6}, "can be compared"),
        ({"samples": [asdict(WINDOW)], "min_workers": 5, "max_workers": 2}, "min_workers"),
        ({"samples": [asdict(WINDOW)] * 2001}, "leave out the oldest"),
        ([], "not the fields"),
    ],
)
def test_request_that_makes_no_sense_is_refused_with_the_reason(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        recommendation(given, nothing_known)


def test_description_names_every_field_of_request_and_answer() -> None:
    described = openapi()["components"]["schemas"]
    assert described["Request"]["properties"].keys() == RecommendRequest.__dataclass_fields__.keys()
    assert described["Window"]["properties"].keys() == StepProfile.__dataclass_fields__.keys()
    answer = asked()
    assert described["Answer"]["properties"].keys() == answer.keys()
    assert described["Size"]["properties"].keys() == answer["sizes"][0].keys()
    assert set(described["Window"]["required"]) < StepProfile.__dataclass_fields__.keys()
    json.dumps(openapi())


# --- the example that sets the size of a TrainJob ----------------------------------------------------------------------------


class StandIn(ThreadingHTTPServer):
    """Answers as a cluster's API for one TrainJob, and as a recommender for any job."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.num_nodes = 2
        self.version = 7
        self.patches: list[dict[str, Any]] = []
        self.wanted = 6

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: StandIn
    path_of_job = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/dlrm"

    def do_GET(self) -> None:
        self._send(self._job() if self.path == self.path_of_job else None)

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        assert self.headers["Authorization"] == "Bearer secret"
        patch = self._body()
        if patch["metadata"]["resourceVersion"] != str(self.server.version):
            self._send({"message": "the object has been modified"}, 409)
            return
        self.server.patches.append(patch)
        self.server.num_nodes = patch["spec"]["trainer"]["numNodes"]
        self.server.version += 1
        self._send(self._job())

    def do_POST(self) -> None:
        body = self._body()
        assert body["job"] == "dlrm"
        sizes = {"num_workers": self.server.wanted, "step_time_s": {"value": 0.1, "low": 0.09, "high": 0.12}}
        self._send({"recommended": sizes, "reason": "1.40 times the present speed (predicted)", "sizes": [sizes]})

    def _job(self) -> dict[str, Any]:
        metadata = {"name": "dlrm", "resourceVersion": str(self.server.version), "annotations": {}}
        return {"metadata": metadata, "spec": {"trainer": {"numNodes": self.server.num_nodes, "numProcPerNode": 2}}}

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _send(self, body: Any, status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status if body is not None else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run_example(stand_in: StandIn, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "token").write_text("secret\n")
    command = [sys.executable, str(ROOT / "examples" / "kubernetes" / "recommend_trainjob.py"), "dlrm", "--namespace", "team"]
    command += ["--recommender", stand_in.url, "--api", stand_in.url, "--token-file", str(tmp_path / "token"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_example_sets_the_nodes_of_a_trainjob(stand_in: StandIn, tmp_path: Path) -> None:
    done = run_example(stand_in, tmp_path, "--once")
    assert done.returncode == 0, done.stderr
    [patch] = stand_in.patches
    assert patch["spec"] == {"trainer": {"numNodes": 3}}  # six workers, two on each node
    assert "1.40 times" in patch["metadata"]["annotations"]["dlrover.dev/reason"]
    assert "2 -> 3 nodes" in done.stdout


def test_example_leaves_a_trainjob_of_the_right_size_alone(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.wanted = 4
    assert run_example(stand_in, tmp_path, "--once").returncode == 0
    assert stand_in.patches == []


def test_example_only_shows_with_dry_run(stand_in: StandIn, tmp_path: Path) -> None:
    done = run_example(stand_in, tmp_path, "--once", "--dry-run")
    assert "2 -> 3 nodes" in done.stdout
    assert stand_in.patches == []


def test_example_imports_only_the_standard_library() -> None:
    spec = importlib.util.find_spec("sys")
    assert spec is not None
    text = (ROOT / "examples" / "kubernetes" / "recommend_trainjob.py").read_text()
    names = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert names <= {*sys.stdlib_module_names}
