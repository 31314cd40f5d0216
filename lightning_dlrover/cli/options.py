"""Groups of options that several commands share, and the options of each target."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_dlrover.cli import values

TARGETS = ("local", "slurm", "kubernetes")

TIMEOUTS = {
    "join_timeout": "how long a node waits for room in the job once no controller is there, such as 1h (default 10m)",
    "wait_timeout": "how long workers wait for the fewest of --workers once no controller is there (default 10m)",
    "lease_ttl": "how long a node or worker may be silent before it is taken for lost (default 5s)",
}
"""Timeouts of nodes and workers, by their keys in --rdzv-conf."""

SETTINGS = {
    "loader_workers": ("loader workers", "of each worker; 0: it prepares its batches itself"),
    "intra_op_threads": ("threads", "that each worker computes with; 0: as many as it has cores"),
    "prefetch_factor": ("batches ahead", "that each loader worker prepares"),
}
"""Fields of a plan that every worker carries out by itself: unit and help text."""

COUNTED = {name: texts[0] for name, texts in SETTINGS.items()} | {"node_cpus": "cores", "node_memory_mb": "MiB of memory"}
"""Units of a plan's fields for each worker and its node."""

NODE_OPTIONS = {
    "gpus": ("[TYPE:]N", "GPUs; Kubernetes: TYPE is the resource's name (default nvidia.com/gpu); on this machine: N alone"),
    "work_dir": ("DIR", "where the script runs (default: Slurm: the current folder, Kubernetes: the image's); not here"),
}
"""Options of each node that apply to any scheduler."""

SLURM_OPTIONS = {
    "partition": ("NAME", "where nodes are queued"),
    "account": ("NAME", "whom they are charged to"),
    "qos": ("NAME", "quality of service"),
    "time": ("LIMIT", "of each node, such as 90 (minutes), 12:00:00 or 2-00"),
    "constraint": ("LIST", "features that a host must have"),
    "nodelist": ("HOSTS", "where nodes may run"),
    "exclude": ("HOSTS", "where they may not"),
    "gres": ("LIST", "generic resources of each node"),
    "setup": ("LINE", "shell that runs before the script, such as 'module load cuda'"),
}
"""Fields of `SlurmOptions` that are passed on unchanged."""

KUBERNETES_OPTIONS = {
    "image": ("IMAGE", "that nodes run; needs this package, and the script unless that is mounted"),
    "namespace": ("NAME", "where they run (default: as kubectl has it)"),
    "service_account": ("NAME", "that they run as"),
    "secret": ("NAME", "a Secret with the files that etcd wants: password, ca.crt, tls.crt, tls.key"),
    "image_pull_secret": ("NAME", "a Secret with the image's password"),
    "pod_endpoint": ("HOST:PORT", "etcd as pods reach it (default: --endpoint)"),
    "pod_template": ("FILE", "YAML: a pod template with what there is no option for, such as tolerations"),
    "python": ("PROGRAM", "of the image (default python)"),
    "queue": ("NAME", "of Volcano, that nodes wait in (default: default)"),
}

REPEATED_OPTIONS = {
    "node_selector": ("LABEL=VALUE", "that a host must have"),
    "mount": ("CLAIM:PATH[:ro]", "a persistent volume claim, and where nodes see it"),
}
"""Kubernetes options that may be repeated."""


def flag(name: str) -> str:
    """Return the option that is parsed into this name."""
    return f"--{name.replace('_', '-')}"


def option_of(setting: str) -> str:
    """Return the option of `dlrover scale` that sets a field of a plan, without its dashes."""
    options = {"intra_op_threads": "threads", "prefetch_factor": "prefetch", "node_cpus": "cpus", "node_memory_mb": "mem"}
    return options.get(setting, setting.replace("_", "-"))


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that locate a job: its etcd and the folder of run folders."""
    parser.add_argument(
        "--endpoint", type=values.given, metavar="HOST:PORT", help="etcd v3; default: DLROVER_ENDPOINT, else an embedded one"
    )
    access = parser.add_argument_group("an etcd that asks who one is", "default: as of the job, else DLROVER_USER and so on")
    access.add_argument("--user", metavar="NAME")
    access.add_argument("--password-file", metavar="FILE", help="its first line is the password")
    access.add_argument("--ca-cert", metavar="FILE", help="PEM: whom to trust for etcd's certificate; makes the connection TLS")
    access.add_argument("--cert", metavar="FILE", help="PEM: the certificate to show")
    access.add_argument("--cert-key", metavar="FILE", help="PEM: its key")
    parser.add_argument("--key-prefix", metavar="PREFIX", help="folder of all jobs' keys in etcd (default /dlrover)")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of run folders (default runs)"
    )


def add_objective_options(parser: argparse.ArgumentParser) -> None:
    """Add the planner's objective, and the job history that it starts from."""
    group = parser.add_argument_group("what to aim at", "for a script whose DLRoverCallback does not say itself")
    group.add_argument("--objective", choices=("fastest", "cheapest", "efficient"), help="default fastest")
    group.add_argument("--deadline", type=values.duration, metavar="TIME", help="since the job's start, such as 90m or 2h")
    group.add_argument("--budget", type=float, metavar="MONEY", help="for the whole job; needs --prices")
    group.add_argument("--prices", metavar="LIST", help="per hour, such as core_hour=0.04,gpu_hour=2.5,gib_hour=0.005")
    group.add_argument("--history", metavar="PLACE", help="path or SQLAlchemy URL of the job history, or off")


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the resources of each node, for any target."""
    title = "what each node gets"
    text = "default: as the cluster has it; on this machine: what there is, together with the others (docs/local.md)"
    group = parser.add_argument_group(title, text)
    _add_texts(group, NODE_OPTIONS)
    within = "with MAX a plan may ask for as many, and smaller nodes are replaced one at a time"
    group.add_argument(
        "--cpus", type=values.cpus, metavar="N[:MAX]", help=f"cores (default 1; on this machine: all, shared); {within}"
    )
    group.add_argument("--mem", type=values.memory_range, metavar="SIZE[:MAX]", help="memory, such as 16G or 16G:64G; likewise")
    group.add_argument("--etcd-host", metavar="HOST", help="address of this host that nodes reach the embedded etcd at")
    group.add_argument(
        "--notice",
        type=int,
        metavar="S",
        help="to hand over in, before a node's end (default 120); not on this machine. Slurm: before its time limit, for "
        "another one to take its place, too (0: it is not). Kubernetes: between SIGTERM and SIGKILL",
    )


def add_slurm_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of Slurm alone."""
    group = parser.add_argument_group("and Slurm for", "with --target slurm")
    _add_texts(group, SLURM_OPTIONS)
    group.add_argument(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="for sbatch, such as --sbatch-arg=--exclusive; repeatable",
    )


def add_kubernetes_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of Kubernetes alone."""
    group = parser.add_argument_group("and Kubernetes for", "with --target kubernetes; see docs/kubernetes.md")
    _add_texts(group, KUBERNETES_OPTIONS)
    for name, (value, text) in REPEATED_OPTIONS.items():
        group.add_argument(flag(name), action="append", default=[], metavar=value, help=f"{text}; repeatable")
    text = "plain Jobs, though the cluster has Volcano (default: Volcano's where it has)"
    group.add_argument("--plain-jobs", action="store_const", const=True, help=text)


def _add_texts(group: Any, options: Mapping[str, tuple[str, str]]) -> None:
    for name, (value, text) in options.items():
        group.add_argument(flag(name), default="", metavar=value, help=text)
