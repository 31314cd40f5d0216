"""Groups of options that several commands share, and the options of each target."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_dlrover.cli import values
from lightning_dlrover.cli.former_names import add_renamed_option
from lightning_dlrover.output import counted
from lightning_dlrover.report.discovery import DEFAULT_RUN_DIR

TARGETS = ("local", "slurm", "kubernetes")

TIMEOUTS = {
    "join_timeout": "time that a node waits for room in the job after the controller has gone, such as 1h (default 10m)",
    "wait_timeout": "time that workers wait for the minimum of --workers after the controller has gone (default 10m)",
    "lease_ttl": "silence after which a node or worker counts as lost (default 5s), and after twice as long a run with --pool",
}
"""Timeouts of nodes and workers, by their keys in --rdzv-conf."""

SETTINGS = {
    "loader_workers": ("loader workers", "per worker; 0: the training process prepares its own batches"),
    "intra_op_threads": ("threads", "per worker; 0: one per core"),
    "prefetch_factor": ("batches ahead", "per loader worker"),
}
"""Fields of a plan that every worker carries out by itself: unit and help text."""

COUNTED = {name: texts[0] for name, texts in SETTINGS.items()} | {"node_cpus": "cores", "node_memory_mb": "MiB of memory"}
"""Units of a plan's fields for each worker and its node."""


def counted_field(name: str, value: int) -> str:
    """Return the value of a plan's field with its unit."""
    unit = COUNTED[name]
    return counted(value, unit.removesuffix("s")) if unit.endswith("s") else f"{value} {unit}"


NODE_OPTIONS = {
    "gpus": (
        "[TYPE:]N",
        "GPUs per node. TYPE is the resource's name on Kubernetes (default nvidia.com/gpu); --target local accepts N only",
    ),
    "work_dir": (
        "DIR",
        "working directory of the script. Default: the current folder (Slurm), the image's (Kubernetes). "
        "Only with --target slurm or kubernetes",
    ),
}
"""Options of each node that apply to any scheduler."""

SLURM_OPTIONS = {
    "partition": ("NAME", "partition of the nodes"),
    "account": ("NAME", "account charged for the nodes"),
    "qos": ("NAME", "quality of service of the nodes"),
    "time": ("LIMIT", "time limit of each node, such as 90 (minutes), 12:00:00 or 2-00"),
    "constraint": ("LIST", "required features of a node's host"),
    "nodelist": ("HOSTS", "hosts that nodes may use"),
    "exclude": ("HOSTS", "hosts that nodes must not use"),
    "gres": ("LIST", "generic resources of each node"),
    "setup": ("LINE", "shell commands to run before the script, such as 'module load cuda'"),
}
"""Fields of `SlurmOptions` that are passed on unchanged."""

KUBERNETES_OPTIONS = {
    "image": (
        "IMAGE",
        "container image of the nodes. It must contain this package, and the script unless a volume provides it",
    ),
    "namespace": ("NAME", "namespace of the nodes (default: kubectl's current one)"),
    "service_account": ("NAME", "service account of the nodes"),
    "secret": ("NAME", "Secret with the files for etcd's authentication: password, ca.crt, tls.crt, tls.key"),
    "image_pull_secret": ("NAME", "Secret with the image registry's credentials"),
    "pod_endpoint": ("HOST:PORT", "address at which pods reach etcd (default: --endpoint)"),
    "pod_template": ("FILE", "YAML file with a pod template, for fields without an option here, such as tolerations"),
    "python": ("PROGRAM", "Python interpreter of the image (default python)"),
    "queue": ("NAME", "Volcano queue of the nodes (default: default)"),
}

REPEATED_OPTIONS = {
    "node_selector": ("LABEL=VALUE", "required label of a node's host"),
    "mount": ("CLAIM:PATH[:ro]", "persistent volume claim and its mount path in the nodes"),
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
    add_etcd_options(parser)
    parser.add_argument(
        "--run-dir", type=Path, default=DEFAULT_RUN_DIR, metavar="DIR", help="parent of the jobs' run folders (default runs)"
    )


def add_etcd_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that locate etcd and the jobs in it."""
    parser.add_argument(
        "--endpoint",
        type=values.given,
        metavar="HOST:PORT",
        help="etcd v3 (default: DLROVER_ENDPOINT, else the job's own server)",
    )
    access = parser.add_argument_group(
        "etcd authentication", "Default: the job's own settings, then DLROVER_USER, DLROVER_PASSWORD_FILE and so on."
    )
    access.add_argument("--user", metavar="NAME", help="etcd user")
    access.add_argument("--password-file", metavar="FILE", help="file whose first line is the user's password")
    access.add_argument(
        "--ca-cert", metavar="FILE", help="PEM file of the authority that signed etcd's certificate; enables TLS"
    )
    access.add_argument("--cert", metavar="FILE", help="PEM file of the client certificate")
    access.add_argument("--cert-key", metavar="FILE", help="PEM file of the client certificate's key")
    parser.add_argument("--key-prefix", metavar="PREFIX", help="prefix of all jobs' keys in etcd (default /dlrover)")


def add_objective_options(parser: argparse.ArgumentParser) -> None:
    """Add the planner's objective, and the job history that it starts from."""
    group = parser.add_argument_group("planner", "Ignored where the script's DLRoverCallback sets the same.")
    group.add_argument(
        "--objective", choices=("fastest", "cheapest", "efficient"), help="what the planner optimizes (default fastest)"
    )
    group.add_argument(
        "--deadline",
        type=values.duration,
        metavar="TIME",
        help="time limit of the whole job, counted from its start, such as 90m or 2h",
    )
    group.add_argument("--budget", type=float, metavar="MONEY", help="cost limit of the whole job; needs --prices")
    group.add_argument("--prices", metavar="LIST", help="prices per hour, such as core_hour=0.04,gpu_hour=2.5,gib_hour=0.005")
    group.add_argument("--history", metavar="PLACE", help="job history: a path, a SQLAlchemy URL, or off")


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the resources of each node, for any target."""
    title = "resources of each node"
    text = "Default: the cluster's. With --target local, nodes share the whole machine (docs/start/local.md)."
    group = parser.add_argument_group(title, text)
    _add_texts(group, NODE_OPTIONS)
    within = "with MAX, a plan may raise it up to MAX and replaces smaller nodes one at a time"
    group.add_argument(
        "--cpus", type=values.cpus, metavar="N[:MAX]", help=f"cores per node (default 1; --target local: all, shared); {within}"
    )
    group.add_argument(
        "--mem",
        type=values.memory_range,
        metavar="SIZE[:MAX]",
        help="memory per node, such as 16G or 16G:64G; MAX as for --cpus",
    )
    group.add_argument("--etcd-host", metavar="HOST", help="address of this host at which nodes reach the embedded etcd")
    add_renamed_option(
        group,
        "--preemption-notice",
        "--notice",
        type=int,
        metavar="S",
        help="seconds of warning before a node is taken away (default 120). Slurm: also sent this long before the time limit, "
        "so that a replacement can start; 0 disables it. Kubernetes: the pod's termination grace period. "
        "Only with --target slurm or kubernetes",
    )
    group.add_argument(
        "--poll-interval",
        type=values.duration,
        metavar="TIME",
        help="time between two questions to the scheduler, and between two looks at the nodes' output (default 2s). While "
        "nothing changes, Slurm is asked five times less often. Only with --target slurm or kubernetes",
    )


def add_slurm_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of Slurm alone."""
    group = parser.add_argument_group("Slurm", "Only with --target slurm; see docs/start/slurm.md.")
    _add_texts(group, SLURM_OPTIONS)
    group.add_argument(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="further option of sbatch, such as --sbatch-arg=--exclusive; repeatable",
    )


def add_kubernetes_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of Kubernetes alone."""
    group = parser.add_argument_group("Kubernetes", "Only with --target kubernetes; see docs/start/kubernetes.md.")
    _add_texts(group, KUBERNETES_OPTIONS)
    for name, (value, text) in REPEATED_OPTIONS.items():
        group.add_argument(flag(name), action="append", default=[], metavar=value, help=f"{text}; repeatable")
    text = "create plain Jobs even where the cluster has Volcano (default: Volcano Jobs there)"
    group.add_argument("--plain-jobs", action="store_const", const=True, help=text)


def _add_texts(group: Any, options: Mapping[str, tuple[str, str]]) -> None:
    for name, (value, text) in options.items():
        group.add_argument(flag(name), default="", metavar=value, help=text)
