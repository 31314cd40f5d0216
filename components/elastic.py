"""The TorchX component: one node of a live job.

A job is as many of these apps as its plan says, all with the same rendezvous id. On its own it is used by file path,
`torchx run -s local_cwd components/elastic.py:train --script train.py --rdzv_endpoint HOST:PORT --rdzv_id JOB --workers 1:4`.
"""

# No `from __future__ import annotations`: TorchX reads the types of a component from its signature.
import sys

import torchx.specs as specs

__all__ = ["train"]


def train(
    *script_args: str,
    script: str,
    rdzv_endpoint: str,
    rdzv_id: str,
    workers: str = "1:1",
    node: str = "node",
    max_restarts: int = 0,
    key_prefix: str = "",
    user: str = "",
    password_file: str = "",
    ca_cert: str = "",
    cert: str = "",
    cert_key: str = "",
    cpu: int = 1,
    gpu: int = 0,
    memMB: int = 1024,
    image: str = "",
) -> specs.AppDef:
    """One node that joins a live elastic job.

    Args:
        script_args: arguments of the script
        script: the training script
        rdzv_endpoint: etcd, HOST:PORT or several with commas
        rdzv_id: name of the job; nodes with the same one train together
        workers: least and most workers of the job, MIN:MAX
        node: name of this node, shown in logs and status
        max_restarts: how often the agent starts a failed worker again by itself
        key_prefix: folder of the job's keys in etcd
        user: of an etcd that asks who one is
        password_file: file whose first line is the user's password
        ca_cert: PEM file of the authority that etcd's certificate is checked against
        cert: PEM file of the certificate to show to etcd
        cert_key: PEM file of its key
        cpu: cores
        gpu: accelerators
        memMB: memory
        image: container image or folder, where the scheduler needs one
    """
    access = {"user": user, "password_file": password_file, "ca_cert": ca_cert, "cert": cert, "cert_key": cert_key}
    values = {"live": "1", "key_prefix": key_prefix, **access}
    for name, value in values.items():
        if "," in value or "=" in value:
            raise ValueError(f"{name}={value!r} cannot be used: --rdzv-conf separates its values by ',' and '='")
    conf = ",".join(f"{name}={value}" for name, value in values.items() if value)
    return specs.AppDef(
        name=node,
        roles=[
            specs.Role(
                name="worker",
                image=image,
                entrypoint=sys.executable,
                args=[
                    "-m",
                    "lightning_dlrover.components.node",
                    "--rdzv-backend=etcd-v3",
                    f"--rdzv-endpoint={rdzv_endpoint}",
                    f"--rdzv-id={rdzv_id}",
                    f"--rdzv-conf={conf}",
                    f"--nnodes={workers}",
                    "--nproc-per-node=1",
                    f"--max-restarts={max_restarts}",
                    script,
                    *script_args,
                ],
                env={"DLROVER_NODE": node},
                num_replicas=1,
                resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB),
            )
        ],
    )
