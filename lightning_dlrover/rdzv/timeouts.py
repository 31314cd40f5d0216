"""Timeouts of a job, set with `--rdzv-conf`. The agent reads them and passes them to its workers in environment variables.

The field `wait_timeout_s` is the key `wait_timeout` of `--rdzv-conf` and the variable `DLROVER_WAIT_TIMEOUT_S`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dlrover import variables

__all__ = ["Timeouts", "seconds"]

_LONGEST_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a job's agents and workers, in seconds."""

    lease_ttl_s: float = 5.0  # seconds without a keep-alive until an agent or worker counts as dead; etcd's minimum is 2
    wait_timeout_s: float = 600.0  # limit on waiting for enough workers; ignored while the job has a controller
    form_timeout_s: float = 120.0  # limit on forming a round; members may be saving a checkpoint before they enter it
    start_timeout_s: float = 60.0  # limit on waiting for announced workers before the job starts without them
    regroup_timeout_s: float = 120.0  # limit on waiting for a broken round's survivors before others go on without them
    collective_timeout_s: float = 1800.0  # limit on one collective of the training script
    etcd_timeout_s: float = 5.0  # limit on etcd's response to one request

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Timeouts:
        """Read the variables that `to_environment` wrote; those that are not set keep their defaults.

        Raises:
            ValueError: a variable is not a number of seconds or is out of range. The message names it.
        """
        values = {}
        for name in cls.names():
            if (text := environ.get(variables.timeout(name))) is not None:
                try:
                    values[f"{name}_s"] = seconds(name, text)
                except ValueError as error:
                    raise ValueError(
                        f"environment variable {variables.timeout(name)}={text!r} cannot be used: {error}"
                    ) from error
        return cls(**values)

    def to_environment(self) -> dict[str, str]:
        return {variables.timeout(name): f"{getattr(self, f'{name}_s'):g}" for name in self.names()}

    @classmethod
    def names(cls) -> list[str]:
        """Keys of `--rdzv-conf`."""
        return [field.name.removesuffix("_s") for field in dataclasses.fields(cls)]


def seconds(name: str, text: str) -> float:
    """Parse the value of a timeout.

    Raises:
        ValueError: the text is not a number, out of range, or a fraction where etcd counts whole seconds.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"it must be a number of seconds without a unit, such as {name}=60") from None
    if not 0 < value <= _LONGEST_S or math.isnan(value):
        raise ValueError(f"it must be a number of seconds above 0, and at most {_LONGEST_S:.0f} (30 days)")
    if name == "lease_ttl" and value != int(value):
        # All waits for a silent worker are multiples of the lease, so it must be the one that etcd grants.
        raise ValueError(f"it must be a whole number of seconds, as etcd counts leases in them, such as {math.ceil(value)}")
    return value
