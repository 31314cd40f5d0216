"""Measured speeds of two jobs that share devices, from a file in the form of Gavel's artefact (Narayanan et al., OSDI 2020).

`pair_throughputs.csv` holds `device`, `job_a`, `num_devices_a`, `job_b`, `num_devices_b`, `steps_per_s_a`, `steps_per_s_b`,
with 0 where the pair does not fit in memory. `throughputs.csv`, beside it, holds the speeds alone: `device`, `job`,
`num_devices`, `steps_per_s`. A job is named by its model and its samples per device and step: "ResNet-18 (batch size 16)".

Only pairs on one device count, as Gavel measured no others that fit. Jobs on several devices form a pair on each of them. Their
computation is slowed as on one device. Their synchronisation takes `SHARED_LINKS` times as long as alone, which is the most:
as if both always synchronised at the same time. Batches between measured ones are interpolated, and none beyond them.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

__all__ = ["MEASURED_AS", "SHARED_LINKS", "MeasuredPairs", "PairsError", "Partner", "read_pairs"]

MEASURED_AS: Mapping[str, str] = {"cifar10": "ResNet-18", "imagenet": "ResNet-50"}
"""Models of Gavel's artefact by the application of Pollux's that trains the same model on the same data.

The others have none. NCF is no autoencoder ("Recommendation"), BERT is neither the small translating "Transformer" nor the
recurrent "LM", and DeepSpeech 2 and YOLOv3 are not there. An application that is absent here goes by its own name.
"""

SHARED_LINKS = 2.0
"""Factor on the time of synchronisation of a job that shares its devices, and so its links, with another one."""

ALONE_FILE = "throughputs.csv"
USUAL_DEVICE = "v100"
"""Kind of device that is taken from a file with several: the one with as much memory as those of Pollux's step times."""

Partner: TypeAlias = tuple[str, float]
"""Model, and samples per device and step."""


class PairsError(ValueError):
    """A file of measured pairs that cannot be used; the message names the line."""


@dataclass(frozen=True)
class MeasuredPairs:
    """Pairs measured on one device of a kind.

    Args:
        speeds: speed of the first of a pair over its speed alone; 0: they do not fit in memory together.
        alone: steps/s of each job alone.
        digest: hash of the files and the kind.
    """

    device: str
    speeds: Mapping[tuple[Partner, Partner], float] = field(repr=False)
    alone: Mapping[Partner, float] = field(repr=False)
    digest: str

    def model(self, application: str) -> str | None:
        """Return the measured model of an application, None if there is none."""
        name = MEASURED_AS.get(application, application)
        return name if name in self._batches else None

    def relative_speed(self, one: Partner, other: Partner) -> float | None:
        """Return the speed of the first beside the second over its speed alone on a device.

        Its logarithm is linear in the logarithms of both batches.

        Returns:
            None for models and batches without measured counterpart, and where measured neighbours do not fit in memory.
        """
        log_speed = 0.0
        ones, others = self._between(one), self._between(other)
        if not ones or not others:
            return None
        for (weight_one, near_one), (weight_other, near_other) in itertools.product(ones, others):
            speed = self.speeds.get((near_one, near_other), 0.0)
            if not speed > 0:
                return None
            log_speed += weight_one * weight_other * math.log(speed)
        return math.exp(log_speed)

    def alone_per_s(self, one: Partner) -> float:
        """Return the steps/s of a job alone; between measured batches as `relative_speed`.

        Raises:
            ValueError: the batch is beyond the measured ones.
        """
        near = self._between(one)
        if not near:
            raise ValueError(f"{one[0]!r} was not measured with batch size {one[1]:g} alone on {self.device}")
        return math.exp(sum(weight * math.log(self.alone[partner]) for weight, partner in near))

    @cached_property
    def _batches(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for model, batch in sorted(self.alone):
            found.setdefault(model, []).append(batch)
        return found

    def _between(self, partner: Partner) -> list[tuple[float, Partner]]:
        """Return the measured neighbours of a batch, and their weights; none beyond the measured ones."""
        model, batch = partner
        known = self._batches.get(model, [])
        after = bisect_left(known, batch)
        if after == len(known) or (after == 0 and known[0] != batch):
            return []
        if known[after] == batch:
            return [(1.0, (model, known[after]))]
        low, high = known[after - 1], known[after]
        weight = math.log(batch / low) / math.log(high / low)
        return [(1 - weight, (model, low)), (weight, (model, high))]


def read_pairs(path: Path, device: str | None = None) -> MeasuredPairs:
    """Read the pairs on one device of a kind.

    Args:
        device: kind of device; None: the only one of the file, or `USUAL_DEVICE`.
    Raises:
        PairsError: the file, or that of the speeds alone, holds a line that cannot be, or nothing of that kind.
        OSError: a file cannot be read.
    """
    alone_path = path.with_name(ALONE_FILE)
    text, alone_text = path.read_text(encoding="utf-8-sig"), alone_path.read_text(encoding="utf-8-sig")
    pairs = list(
        _rows(text, path, ("device", "job_a", "num_devices_a", "job_b", "num_devices_b", "steps_per_s_a", "steps_per_s_b"))
    )
    kind = device or _usual_device({row["device"] for row, _ in pairs}, path)
    alone: dict[Partner, float] = {}
    for row, at in _rows(alone_text, alone_path, ("device", "job", "num_devices", "steps_per_s")):
        if row["device"] == kind and row["num_devices"] == "1":
            alone[_partner(row["job"])] = _speed(row["steps_per_s"], at)
    speeds: dict[tuple[Partner, Partner], float] = {}
    for row, at in pairs:
        if row["device"] != kind or row["num_devices_a"] != "1" or row["num_devices_b"] != "1":
            continue
        one, other = _partner(row["job_a"]), _partner(row["job_b"])
        for first, second, column in ((one, other, "steps_per_s_a"), (other, one, "steps_per_s_b")):
            if not alone.get(first, 0.0) > 0:
                raise PairsError(f"{at}: no speed of {first[0]!r} with batch size {first[1]:g} alone on {kind} in {alone_path}")
            speeds[first, second] = _speed(row[column], at) / alone[first]
    if not any(speeds.values()):
        kinds = ", ".join(sorted({row["device"] for row, _ in pairs}))
        raise PairsError(f"{path} holds no pair that fits on one device of kind {kind!r}; its kinds are {kinds}")
    paired = {one for one, _ in speeds}
    alone = {partner: speed for partner, speed in alone.items() if partner in paired}
    digest = hashlib.sha256(f"{kind}\n{text}\n{alone_text}".encode()).hexdigest()
    return MeasuredPairs(kind, speeds, alone, digest)


def _usual_device(kinds: set[str], path: Path) -> str:
    if len(kinds) == 1 or USUAL_DEVICE in kinds:
        return USUAL_DEVICE if USUAL_DEVICE in kinds else min(kinds)
    raise PairsError(f"{path} holds pairs on {', '.join(sorted(kinds)) or 'no device'}; name the kind with --pairs-device")


def _rows(text: str, path: Path, columns: Sequence[str]) -> Iterator[tuple[dict[str, str], str]]:
    """Yield each row, and its file and line."""
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise PairsError(f"{path}:1: no column {', '.join(missing)}; the columns are {', '.join(columns)}")
    for row in reader:
        at = f"{path}:{reader.line_num}"
        if any(row[column] is None for column in columns):
            raise PairsError(f"{at}: the row has fewer values than columns")
        yield row, at


def _partner(name: str) -> Partner:
    """Return model and batch of a job's name; a batch of 0 where the name holds none."""
    found = re.fullmatch(r"(.+) \(batch size (\d+)\)", name)
    return (found[1], float(found[2])) if found else (name, 0.0)


def _speed(text: str, at: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not (math.isfinite(speed) and speed >= 0):
        raise PairsError(f"{at}: {text!r} is no speed; it is a number of steps/s, 0 for a pair that does not fit in memory")
    return speed
