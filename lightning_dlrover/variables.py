"""Environment variables: the names of all that are this package's own, and foreign ones that several rooms read.

Each kind of process reads its variables in one place and passes values on:

| kind | reads |
| --- | --- |
| worker | `rdzv/group/config.py`: its place in the job; `host.py`: what limits its node |
| agent | `rdzv/agents/rendezvous.py`, which also writes what its workers read |
| node | `components/node.py` |
| command | `rdzv/job/folders.py`: the etcd to use |
| all that are forked from a spare process | `spares.py`: the folder of its records |

Settings of the user hold for several kinds: `tuning/plan.py`, `tuning/history.py` and `watchdog.py` read their own.
"""

from __future__ import annotations

from collections.abc import Mapping

# --- the job's etcd: the agent writes them for its workers, and users for commands --------------------------------------------

ENDPOINT = "DLROVER_ENDPOINT"
PREFIX = "DLROVER_PREFIX"
ACCESS = {
    "user": "DLROVER_USER",
    "password_file": "DLROVER_PASSWORD_FILE",
    "ca_cert": "DLROVER_CA_CERT",
    "cert": "DLROVER_CERT",
    "cert_key": "DLROVER_CERT_KEY",
}
"""Authentication by field of `EtcdConfig`."""

# --- from an agent to its workers ---------------------------------------------------------------------------------------------

RUN_ID = "DLROVER_RUN_ID"
AGENT_ID = "DLROVER_AGENT_ID"
AGENT_PID = "DLROVER_AGENT_PID"
MIN_NODES = "DLROVER_MIN_NODES"
MAX_NODES = "DLROVER_MAX_NODES"
SIZES = "DLROVER_SIZES"  # numbers of workers that may be requested, as `--rdzv-conf` takes them; unset: any
HISTORY_TTL_S = "DLROVER_HISTORY_TTL_S"
LEFT_STATE = "DLROVER_LEFT_STATE"  # folder of an agent of several workers for the state that they leave
SPARES = "DLROVER_SPARES"  # folder of records of spare processes, and of the modules that they import
SPARES_PADDING = "DLROVER_SPARES_PADDING"  # text of a spare process: room for the variables of those that are forked from it

# --- from a controller to its nodes -------------------------------------------------------------------------------------------

NODE = "DLROVER_NODE"  # name of the node, set by `dlrover run` on every target
STARTED_BY = "DLROVER_STARTED_BY"  # mark of all processes that a controller on this machine has started
PARENT_PID = "DLROVER_DIE_WITH_PID"  # process id of the parent. The node ends with it; unset where nodes run independently
WORKERS_PER_NODE = "DLROVER_WORKERS_PER_NODE"  # workers of each node, with an agent each; unset: one
THREADS_PER_CORE = "DLROVER_THREADS_PER_CORE"  # set where OMP_NUM_THREADS follows the node's cores; unset: the user's choice
MEMORY_GROUP = "DLROVER_MEMORY_GROUP"  # folder of the control group that limits the node's memory, if there is one
EXIT_FILE = "DLROVER_EXIT_FILE"
"""File for the agent's exit code. If set, SIGUSR1 is a notice that the scheduler will take the node back."""
NOTICE_S = "DLROVER_NOTICE_S"  # seconds between the notice and a node's end
POOL = "DLROVER_POOL"  # name of the pool that decides how many workers the job has; empty if none does
LEAVE_ON_SIGTERM = "DLROVER_LEAVE_ON_SIGTERM"
"""Set where SIGTERM asks the worker to hand over and leave. Its sender kills what remains after a grace period."""

# --- from a dispatcher of co-located jobs to its jobs -------------------------------------------------------------------------

SEAT = "DLROVER_SEAT"  # folder for a job's progress and its dispatcher's answer
QUEUE = "DLROVER_QUEUE"  # mark of all processes that the dispatcher of a queue has started

# --- settings of the user -----------------------------------------------------------------------------------------------------

OBJECTIVE = {
    "aim": "DLROVER_OBJECTIVE",
    "deadline_s": "DLROVER_DEADLINE_S",
    "budget": "DLROVER_BUDGET",
    "prices": "DLROVER_PRICES",
}
"""The user's objective by argument of `Objective`; `dlrover run` passes it to its nodes."""
HISTORY = "DLROVER_HISTORY"  # location of the job history, or `off`
METADATA_URL = "DLROVER_METADATA_URL"  # beginning of the URLs of another metadata service than the cloud's own
UNSAFE_STACKS = "DLROVER_UNSAFE_STACKS"
"""Set to 1: after `watchdog.GIL_TIMEOUT_S` faulthandler's thread, which needs no GIL, writes the stacks to standard error.

Off by default: the thread reads frames that may change at the same time. That may crash a worker that is not stuck but was
stopped, or starved by an overloaded machine.
"""


def timeout(name: str) -> str:
    """Return the variable of a timeout by its key in `--rdzv-conf`: `DLROVER_WAIT_TIMEOUT_S` for `wait_timeout`."""
    return f"DLROVER_{name.upper()}_S"


# --- foreign ones -------------------------------------------------------------------------------------------------------------


def local_world_size(environ: Mapping[str, str]) -> int:
    """Return the workers of this worker's agent, as TorchElastic sets it.

    Raises:
        ValueError: the variable holds no whole number.
    """
    return whole_number(environ, "LOCAL_WORLD_SIZE", 1)


def workers_here(environ: Mapping[str, str]) -> int:
    """Return the workers that share this worker's node: those of its agent, or of all agents that `dlrover run` started there.

    Raises:
        ValueError: a variable holds no whole number.
    """
    return local_world_size(environ) * max(1, whole_number(environ, WORKERS_PER_NODE, 1))


def slurm_job(environ: Mapping[str, str]) -> str:
    """Return the id of the Slurm job of this process; empty outside of Slurm."""
    return environ.get("SLURM_JOB_ID", "")


def whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable's whole number.

    Raises:
        ValueError: it holds something else.
    """
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name} is {text!r}, not a whole number") from error
