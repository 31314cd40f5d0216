"""The timeouts of a job that `--rdzv-conf` sets: read by the agent, handed to its workers in environment variables.

A field `wait_timeout_s` is the key `wait_timeout` of `--rdzv-conf` and the variable `DLROVER_WAIT_TIMEOUT_S`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Timeouts", "seconds"]

_LONGEST_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Timeouts:
    """Seconds that the agents and workers of a job wait, and for what."""

    lease_ttl_s: float = 5.0  # without a sign of life: an agent or worker is dead. etcd makes it 2 at least
    wait_timeout_s: float = 600.0  # for enough workers; a job with a controller waits for as long as that is there
    form_timeout_s: float = 120.0  # until all members of a round have arrived; they may be saving a checkpoint
    start_timeout_s: float = 60.0  # for announced workers, before the job starts without them
    regroup_timeout_s: float = 120.0  # for survivors of a broken round, before the others go on without them
    collective_timeout_s: float = 1800.0  # for a collective of the training script
    etcd_timeout_s: float = 5.0  # for the answer to one request to etcd

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Timeouts:
        """What `to_environment` has written, and defaults.

        Raises:
            ValueError: a variable is no number of seconds, or out of range; it is named.
        """
        values = {}
        for name in cls.names():
            if (text := environ.get(_variable(name))) is not None:
                try:
                    values[f"{name}_s"] = seconds(name, text)
                except ValueError as error:
                    raise ValueError(f"environment variable {_variable(name)}={text!r} cannot be used: {error}") from error
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        return {_variable(name): f"{getattr(self, f'{name}_s'):g}" for name in self.names()}

    @classmethod
    def names(cls) -> list[str]:
        """Keys of `--rdzv-conf`."""
        return [field.name.removesuffix("_s") for field in dataclasses.fields(cls)]


def seconds(name: str, text: str) -> float:
    """The value of a timeout.

    Raises:
        ValueError: not a number, or out of range.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"it must be a number of seconds without a unit, such as {name}=60") from None
    if not 0 < value <= _LONGEST_S or math.isnan(value):
        raise ValueError(f"it must be a number of seconds above 0, and at most {_LONGEST_S:.0f} (30 days)")
    return value


def _variable(name: str) -> str:
    return f"DLROVER_{name.upper()}_S"
