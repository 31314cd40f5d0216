"""Configuration of an agent: torchrun's options and the values of --rdzv-conf."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from lightning_dlrover import variables
from lightning_dlrover.rdzv.agents.rounds import Limits
from lightning_dlrover.rdzv.etcd.config import EtcdConfig
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX, HISTORY_TTL_S, Keys
from lightning_dlrover.rdzv.timeouts import Timeouts, seconds

__all__ = ["HandlerConfig"]

T = TypeVar("T")


@dataclass(frozen=True)
class HandlerConfig:
    """The handler's options: --rdzv-endpoint, --rdzv-id, --nnodes and --rdzv-conf."""

    etcd: EtcdConfig
    run_id: str
    limits: Limits
    key_prefix: str = DEFAULT_PREFIX
    local_address: str | None = None
    join_timeout_s: float = 600.0  # limit on waiting for a round with room; the clock stops while there is a controller
    last_call_timeout_s: float = 3.0  # seconds that a round with enough nodes waits for more
    close_timeout_s: float = 30.0
    timeouts: Timeouts = field(default_factory=Timeouts)  # timeouts of this agent and its workers
    live: bool = False  # True if the script re-forms in process: never wait for more nodes, never restart
    num_workers: int = 1  # workers of this node, until the agent reports the number
    node: str = ""  # name of this node; empty if `dlrover run` has not started it
    history_ttl_s: float = HISTORY_TTL_S  # seconds that the run's records outlast its last agent and worker

    @staticmethod
    def from_parameters(params: RendezvousParameters) -> HandlerConfig:
        """Read `--rdzv-conf`, and the environment of this agent.

        Raises:
            ValueError: a key is unknown or its value malformed; the message names it.
        """
        conf = dict(params.config)
        # LaunchConfig adds these for other backends; this one does not use them.
        for foreign in ("timeout", "rank"):
            conf.pop(foreign, None)

        known = {"user", "password_file", "ca_cert", "cert", "cert_key"}

        def take(key: str, parse: Callable[[str], T], default: T) -> T:
            known.add(key)
            if key not in conf:
                return default
            text = str(conf.pop(key))
            try:
                return parse(text)
            except (ValueError, OSError) as error:
                raise ValueError(f"--rdzv-conf {key}={text!r} cannot be used: {error}") from error

        def take_seconds(key: str, default_s: float) -> float:
            return take(key, functools.partial(seconds, key), default_s)

        defaults = Timeouts()
        timeouts = Timeouts(**{f"{key}_s": take_seconds(key, getattr(defaults, f"{key}_s")) for key in Timeouts.names()})
        user = take("user", str, None)
        files = {key: take(key, _readable_file, None) for key in ("password_file", "ca_cert", "cert", "cert_key")}
        config = HandlerConfig(
            etcd=EtcdConfig(params.endpoint, user, timeout_s=timeouts.etcd_timeout_s, **files),
            run_id=params.run_id,
            limits=Limits(params.min_nodes, params.max_nodes),
            key_prefix=take("key_prefix", _key_prefix, DEFAULT_PREFIX),
            local_address=params.local_addr,
            join_timeout_s=take_seconds("join_timeout", 600.0),
            last_call_timeout_s=take("last_call_timeout", _seconds_or_zero, 3.0),
            close_timeout_s=take_seconds("close_timeout", 30.0),
            timeouts=timeouts,
            node=os.environ.get(variables.NODE, ""),
            live=take("live", _flag, False),
            history_ttl_s=take("history_ttl", _lifetime, HISTORY_TTL_S),
            num_workers=take("nproc", _positive, variables.local_world_size(os.environ)),
        )
        if conf:
            raise ValueError(f"--rdzv-conf has unknown keys {sorted(conf)}; known are {' '.join(sorted(known))}")
        Keys(config.run_id, config.key_prefix)
        return config


def _lifetime(text: str) -> float:
    if not 60 <= (value := float(text)) <= 9e9:
        # If a whole running job is cut off from etcd for this long, its records expire.
        raise ValueError("it must be at least 60 seconds")
    return value


def _seconds_or_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) == 0:
            return 0.0
    return seconds("last_call_timeout", text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no"):
        return False
    raise ValueError("it must be 1 or 0")


def _key_prefix(text: str) -> str:
    if not text.startswith("/") or "//" in text or text == "/":
        raise ValueError("it must start with '/' and name a folder of keys, such as /dlrover")
    return text.rstrip("/")


def _readable_file(path: str) -> str | None:
    with open(path, "rb"):
        return os.path.abspath(path)
