"""Check the places where nodes may run: Slurm and Kubernetes. A place that is not set up here is no trouble."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from lightning_dlrover.components.targets.kubernetes_api import KubernetesApi, has_cluster
from lightning_dlrover.components.targets.kubernetes_pod import VOLCANO_JOBS
from lightning_dlrover.components.targets.target import TargetError
from lightning_dlrover.finding import Finding, ok, warning

__all__ = ["check_kubernetes", "check_slurm"]

_ANSWER_S = 5.0


def check_slurm(environ: Mapping[str, str] = os.environ, commands: Sequence[str] = ("sbatch", "squeue", "scontrol")) -> Finding:
    """Check that Slurm's commands are complete and its controller answers."""
    found = [command for command in commands if shutil.which(command, path=environ.get("PATH"))]
    if not found:
        return ok("slurm", "not installed here")
    if missing := [command for command in commands if command not in found]:
        return warning("slurm", f"{', '.join(found)} without {', '.join(missing)}", "install the rest of Slurm's commands")
    try:
        ran = subprocess.run(
            ["scontrol", "ping"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
        )
        answer = " ".join((ran.stdout + ran.stderr).split())
    except subprocess.TimeoutExpired:
        answer = f"no answer within {_ANSWER_S:g} s"
    except OSError as problem:
        answer = str(problem)
    if " is UP" in answer:
        return ok("slurm", answer[:100])
    if "configuration source" in answer or "slurm.conf" in answer:
        return ok("slurm", "installed, but no cluster is configured here")
    return warning("slurm", f"its controller does not answer: {answer[:120]}", "check slurmctld and slurm.conf (scontrol ping)")


def check_kubernetes() -> Finding:
    """Check that the API server answers if a cluster is configured for this user or pod."""
    if not has_cluster():
        return ok("kubernetes", "no cluster is configured here")
    try:
        api = KubernetesApi(request_s=_ANSWER_S, num_attempts=1)
        try:
            volcano = api.has(VOLCANO_JOBS, "jobs")
        finally:
            api.close()
    except TargetError as problem:
        missing = "pip install" in str(problem)
        move = (
            "pip install 'lightning-dlrover[kubernetes]'" if missing else "check with `kubectl get jobs`, or unset KUBECONFIG"
        )
        return warning("kubernetes", str(problem)[:200], move)
    return ok("kubernetes", f"its API server answers, namespace {api.namespace}, {'with' if volcano else 'without'} Volcano")
