"""Set the number of nodes of a Kubeflow TrainJob to the size that `dlrover serve` recommends.

    python recommend_trainjob.py JOB --namespace team --recommender http://dlrover-serve:8700

A recommender in the sense of Kubeflow's KEP-3328: it observes a training job and sets its resources. The job reports its
steps to etcd under the TrainJob's name (DLRoverCallback, `--rdzv-id`), and `dlrover serve` predicts the time of every size.

In a pod, the API server, the token and its authority are those of the pod's service account, which needs `get` and `patch` on
trainjobs of trainer.kubeflow.org. A size that somebody changes at the same time is not overwritten: the patch names the version
that it is based on. Only the standard library is used, so the script runs in any image with Python.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GROUP = "apis/trainer.kubeflow.org/v1alpha1"
TIMEOUT_S = 15.0


class Cluster:
    """The API server of a cluster."""

    def __init__(self, url: str, token_file: Path, authority: Path) -> None:
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._context = ssl.create_default_context(cafile=str(authority)) if authority.exists() else None

    def request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        # The token of a service account is replaced every hour.
        headers = {"Authorization": f"Bearer {self._token_file.read_text().strip()}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        return ask(f"{self._url}/{path}", method, body, headers, self._context)


def ask(
    url: str, method: str, body: Any = None, headers: dict[str, str] | None = None, context: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """Send a request with a JSON body, and return the answer's."""
    content = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, content, headers or {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def step(options: argparse.Namespace, cluster: Cluster) -> str:
    """Compare the TrainJob with the recommendation, change it if they differ, and return what was done."""
    path = f"{GROUP}/namespaces/{urllib.parse.quote(options.namespace)}/trainjobs/{urllib.parse.quote(options.job)}"
    job = cluster.request("GET", path)
    trainer = job["spec"].get("trainer") or {}
    present, each = int(trainer.get("numNodes") or 1), processes_per_node(trainer, options.workers_per_node)
    question = {"job": options.job, "workers_per_node": each, "aim": options.aim}
    question |= {"min_workers": each * options.min_nodes, "max_workers": each * options.max_nodes}
    found = ask(f"{options.recommender.rstrip('/')}/v1/recommend", "POST", question)
    best = found["recommended"]
    if best is None:
        return f"{options.job}: stays at {present} nodes: {found['reason']}"
    wanted = max(options.min_nodes, min(options.max_nodes, -(-best["num_workers"] // each)))
    if wanted == present:
        return f"{options.job}: stays at {present} nodes: {found['reason']}"
    change = f"{options.job}: {present} -> {wanted} nodes: {found['reason']}"
    if options.dry_run:
        return f"{change} (not carried out)"
    note = {"dlrover.dev/reason": found["reason"]}
    metadata = {"resourceVersion": job["metadata"]["resourceVersion"], "annotations": note}
    cluster.request("PATCH", path, {"metadata": metadata, "spec": {"trainer": {"numNodes": wanted}}})
    return change


def processes_per_node(trainer: dict[str, Any], given: int) -> int:
    """Return the workers of a node: as given, else `numProcPerNode` where that is a number, else one."""
    if given:
        return given
    number = trainer.get("numProcPerNode")
    return int(number) if isinstance(number, int) or (isinstance(number, str) and number.isdecimal()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="the TrainJob, which is also the name of the training job")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--recommender", required=True, metavar="URL", help="`dlrover serve`")
    parser.add_argument("--api", default="https://kubernetes.default.svc", metavar="URL", help="API server")
    parser.add_argument("--token-file", type=Path, default=ACCOUNT / "token")
    parser.add_argument("--authority", type=Path, default=ACCOUNT / "ca.crt", help="certificate of the API server's authority")
    parser.add_argument("--min-nodes", type=int, default=1)
    parser.add_argument("--max-nodes", type=int, default=16)
    parser.add_argument("--workers-per-node", type=int, default=0, help="default: the TrainJob's numProcPerNode, else 1")
    parser.add_argument("--aim", choices=("fastest", "cheapest", "efficient"), default="fastest")
    parser.add_argument("--every", type=float, default=300.0, metavar="S", help="seconds between two looks (default 300)")
    parser.add_argument("--once", action="store_true", help="look once")
    parser.add_argument("--dry-run", action="store_true", help="change nothing")
    options = parser.parse_args()
    cluster = Cluster(options.api, options.token_file, options.authority)
    while True:
        try:
            print(step(options, cluster), flush=True)
        except urllib.error.HTTPError as error:
            reason = error.read(2000).decode(errors="replace")
            print(f"{options.job}: {error.url} answered {error.code}: {reason}", file=sys.stderr, flush=True)
            if options.once:
                return 1
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            print(f"{options.job}: {error}; trying again in {options.every:g} s", file=sys.stderr, flush=True)
            if options.once:
                return 1
        if options.once:
            return 0
        time.sleep(options.every)


if __name__ == "__main__":
    sys.exit(main())
