"""TorchX components: a live job, as one app that starts and ends its nodes, and a single node of such a job.

`torchx run -s local_cwd components/elastic.py:train --script train.py --workers 1:4 -- ARGS`, or by name: `dlrover.train`. See
docs/start/torchx.md for Slurm and Kubernetes.
"""

# No `from __future__ import annotations`: TorchX reads parameter types from the signature and supports only these.
import re
import shlex
import sys
from pathlib import PurePath
from typing import Any, Dict, List, Optional  # noqa: UP035
from urllib.parse import quote

import torchx.specs as specs

from lightning_dlrover import variables
from lightning_dlrover.components import ESCAPED
from lightning_dlrover.components.node import AGENTS_OPTION

# Resources of `dlrover run` and an embedded etcd, with room for the records of thousands of rounds. The controller computes
# next to nothing. On Kubernetes TorchX requests 1 GiB less than this.
CONTROLLER = specs.Resource(cpu=1, gpu=0, memMB=2048)

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""Capability in the named resources of clouds, and a label of Kubernetes hosts."""


def train(
    *script_args: str,
    script: str,
    workers: str = "1:2",
    sizes: str = "",
    rdzv_id: str = specs.macros.app_id,
    rdzv_endpoint: str = "",
    key_prefix: str = "",
    user: str = "",
    password_file: str = "",
    ca_cert: str = "",
    cert: str = "",
    cert_key: str = "",
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    h: str = "",
    partition: str = "",
    account: str = "",
    time: str = "",
    image: str = "",
    namespace: str = "",
    service_account: str = "",
    node_selector: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    run_dir: str = "",
    log_dir: str = "",
    options: str = "",
) -> specs.AppDef:
    """A live elastic job: a controller that starts its nodes on this machine, or in the Slurm or Kubernetes it runs in.

    The app is the controller alone, with one replica. The job's size comes from `workers`; `min_replicas` stays unset because a
    scheduler could only apply it to replicas of one app. The controller ignores options of other places and logs them.

    Args:
        script_args: arguments of the script
        script: the training script; Kubernetes: as the image or a mount has it
        workers: least and most workers, MIN:MAX; each is a node of its own
        sizes: the only numbers of workers that plans may request, such as 1,2,4,8, or pow2
        rdzv_id: name of the job; default: the app's id, so that a restarted controller resumes its job
        rdzv_endpoint: etcd, HOST:PORT or several with commas; default: an embedded etcd that ends with the controller
        key_prefix: folder of the job's keys in etcd
        user: etcd user, if etcd has authentication enabled
        password_file: file whose first line is the user's password
        ca_cert: PEM file of the authority that signed etcd's certificate
        cert: PEM file of the client certificate for etcd
        cert_key: PEM file of the client certificate's key
        cpu: cores of each node
        gpu: accelerators of each node
        memMB: memory of each node
        h: named resource of each node, instead of cpu, gpu and memMB
        partition: Slurm: partition of the nodes
        account: Slurm: account charged for the nodes
        time: Slurm: time limit of each node, such as 12:00:00
        image: container image of the controller and of all nodes
        namespace: Kubernetes: namespace of the nodes; default: the controller's
        service_account: Kubernetes: service account of the nodes
        node_selector: Kubernetes: required labels of a node's host, LABEL=VALUE,...
        mounts: Kubernetes: volume claims of the controller and all nodes, type=volume,src=CLAIM,dst=PATH[,readonly],...
        env: environment variables of the nodes, NAME=VALUE,...
        run_dir: parent folder of run folders
        log_dir: folder for the nodes' output
        options: further options of `dlrover run`, quoted as in a shell
    """
    # Only the options that are set: unset ones keep the cluster's defaults.
    size = _size(h, cpu, gpu, memMB)
    labels = {name: str(value) for name, value in size.capabilities.items() if name == INSTANCE_TYPE}
    volumes = specs.parse_mounts(mounts or [])
    for volume in volumes:
        if not isinstance(volume, specs.VolumeMount):
            raise ValueError(f"--mounts: {volume} cannot be given to nodes; only type=volume,src=CLAIM,dst=PATH[,readonly] can")
    given = {
        "sizes": sizes,
        "endpoint": rdzv_endpoint,
        "key-prefix": key_prefix,
        "user": user,
        "password-file": password_file,
        "ca-cert": ca_cert,
        "cert": cert,
        "cert-key": cert_key,
        "cpus": str(size.cpu) if size.cpu else "",
        "gpus": str(size.gpu) if size.gpu else "",
        "mem": f"{size.memMB}M" if size.memMB else "",
        "partition": partition,
        "account": account,
        "time": time,
        "image": image,
        "namespace": namespace,
        "service-account": service_account,
        "run-dir": run_dir,
        "log-dir": log_dir,
    }
    repeated = [
        *(("node-selector", f"{name}={value}") for name, value in {**labels, **(node_selector or {})}.items()),
        *(("mount", f"{volume.src}:{volume.dst_path}{':ro' * volume.read_only}") for volume in volumes),
        *(("env", f"{name}={value}") for name, value in (env or {}).items()),
    ]
    arguments = [
        *(f"--{name}={value}" for name, value in [*given.items(), *repeated] if value),
        *shlex.split(options),
        script,
        *script_args,
    ]
    name = PurePath(script).stem if rdzv_id == specs.macros.app_id else rdzv_id
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "job"
    # Must be valid for Volcano, which names a service like the app and derives longer pod names from it.
    name = (slug if slug[0].isalpha() else f"job-{slug}")[:33].rstrip("-")
    command = ["-m", "lightning_dlrover.cli", "run", ESCAPED, "--target=auto", f"--workers={workers}", f"--rdzv-id={rdzv_id}"]
    # TorchX expands ${...}, Kubernetes expands $(...), and not all of them restore $$.
    command += [quote(argument, safe="/:=,@+") for argument in arguments]
    return specs.AppDef(name, [_role("controller", image, command, CONTROLLER, mounts=volumes)])


def node(
    *script_args: str,
    script: str,
    rdzv_endpoint: str,
    rdzv_id: str,
    workers: str = "1:1",
    node: str = "node",
    agents: int = 1,
    sizes: str = "",
    max_restarts: int = 0,
    spares: int = 0,
    notices: str = "",
    key_prefix: str = "",
    user: str = "",
    password_file: str = "",
    ca_cert: str = "",
    cert: str = "",
    cert_key: str = "",
    timeouts: str = "",
    cpu: int = 1,
    gpu: int = 0,
    memMB: int = 1024,
    h: str = "",
    image: str = "",
) -> specs.AppDef:
    """One node that joins a live elastic job. No controller manages it: you start it and end it.

    A job consists of as many of these apps as its plan requires, all with the same rendezvous id. Each has one replica, so
    `min_replicas` would have no effect. Instead, all nodes of the job agree on `workers`.

    Args:
        script_args: arguments of the script
        script: the training script
        rdzv_endpoint: etcd, HOST:PORT or several with commas
        rdzv_id: name of the job; nodes with the same name train together
        workers: least and most workers of the job, MIN:MAX
        node: name of this node in logs and status
        agents: workers of this node, each with an agent and a GPU of its own; all nodes of a job have equally many
        sizes: the only numbers of workers that plans may request, such as 1+2+4+8, or pow2; the same for all nodes of a job
        max_restarts: how often the agent restarts a failed worker in place
        spares: 1: the agent keeps a process that has imported the script's modules, and forks restarted workers from it
        notices: aws, gcp or azure: the agent reads from that cloud's metadata service when its machine will be taken away
        key_prefix: folder of the job's keys in etcd
        user: etcd user, if etcd has authentication enabled
        password_file: file whose first line is the user's password
        ca_cert: PEM file of the authority that signed etcd's certificate
        cert: PEM file of the client certificate for etcd
        cert_key: PEM file of the client certificate's key
        timeouts: further values of --rdzv-conf, such as join_timeout=3600,lease_ttl=10
        cpu: cores
        gpu: accelerators
        memMB: memory
        h: named resource, instead of cpu, gpu and memMB
        image: container image or folder, where the scheduler needs one
    """
    access = {"user": user, "password_file": password_file, "ca_cert": ca_cert, "cert": cert, "cert_key": cert_key}
    own = {"live": "1", "spares": "1" if spares else "", "notices": notices, "sizes": sizes, "key_prefix": key_prefix}
    values = {**own, **access}
    for name, value in values.items():
        if "," in value or "=" in value:
            raise ValueError(f"{name}={value!r} cannot be used: --rdzv-conf separates its values by ',' and '='")
    if timeouts and not re.fullmatch(r"[a-z_]+=[0-9.e+]+(,[a-z_]+=[0-9.e+]+)*", timeouts):
        raise ValueError(f"timeouts={timeouts!r} cannot be used: give NAME=SECONDS,..., such as join_timeout=3600,lease_ttl=10")
    conf = ",".join([*(f"{name}={value}" for name, value in values.items() if value), *([timeouts] if timeouts else [])])
    several, env = [], {variables.NODE: node}
    if agents > 1:
        several, env[variables.WORKERS_PER_NODE] = [f"{AGENTS_OPTION}{agents}"], str(agents)
    rendezvous = ["--rdzv-backend=etcd-v3", f"--rdzv-endpoint={rdzv_endpoint}", f"--rdzv-id={rdzv_id}", f"--rdzv-conf={conf}"]
    limits = [f"--nnodes={workers}", "--nproc-per-node=1", f"--max-restarts={max_restarts}"]
    command = ["-m", "lightning_dlrover.components.node", *several, *rendezvous, *limits, script, *script_args]
    return specs.AppDef(node, [_role("worker", image, command, _size(h, cpu, gpu, memMB), env=env)])


def _role(name: str, image: str, arguments: List[str], resource: specs.Resource, **more: Any) -> specs.Role:  # noqa: UP006
    """Return a role of one process."""
    python = _python(image)
    return specs.Role(name, image=image, entrypoint=python, args=arguments, num_replicas=1, resource=resource, **more)


def _size(h: str, cpu: int, gpu: int, memMB: int) -> specs.Resource:
    """Return a resource by name or by numbers. `specs.resource` would replace 0 with a default of its own."""
    return specs.resource(h=h) if h else specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB)


def _python(image: str) -> str:
    """Return the image's interpreter, or the current one without an image."""
    return "python" if image else sys.executable
