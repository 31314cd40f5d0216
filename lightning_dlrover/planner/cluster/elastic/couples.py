"""Ours, where jobs may share devices: which jobs share, and the sizes of all.

A couple of jobs is divided devices like one job. With k devices its value is the sum of both jobs' values (see `ours`), with
each speed times that beside the other one, and the price of devices counted once:

    v_i (S_i(k) r_i(k) - g k / 2) l_i / (l_i + c_i) + the same of the other job

r_i counts `CAUTION` deviations below the expected speed. A job that is joined on its devices stays where it is and pays no
change, the one that joins it does. To leave a couple costs a change, too.

Which jobs form couples is a matching. Devices have a price there, at which jobs without partners ask for no more than there
are, or some of that. A couple is worth its value at the best size at this price, less those of its jobs. The heaviest matching
by this worth gives the couples, and the sizes of all are chosen anew. Jobs share only if the total value is larger than without
any couple.

Jobs that must get devices, for their wait or a deadline, and those with one size only share with no other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.planner.cluster.beside import Beside
from lightning_dlrover.planner.cluster.elastic.knapsack import best_columns
from lightning_dlrover.planner.cluster.elastic.ours import CAUTION, Worth, worth_of
from lightning_dlrover.planner.cluster.elastic.share import Division, Share
from lightning_dlrover.planner.cluster.elastic.speeds import Ints
from lightning_dlrover.planner.cluster.matching import match
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["ours_with_pairs"]

MOST_SHARING = 64
"""Jobs that one decision considers as partners, those in couples and the first in turn. Bounds its time."""

PRICE_FACTORS = (1.0, 0.75, 0.5)
"""Prices that are tried, over the one at which devices suffice. Sizes that leave devices free make that one too high."""

PRICE_STEPS = 30
"""Halvings of the interval in which the price of a device is found."""


def ours_with_pairs(share: Share, beside: Beside) -> Division:
    """Return the sizes, and the couples."""
    if not len(share.jobs):
        return Division(np.zeros(0, dtype=np.int64))
    worth = worth_of(share)
    guests = _present_guests(share)
    kept = worth.kept.copy()
    kept[guests] = worth.moved[guests]
    alone = worth.values(share, kept)
    columns = best_columns(alone, share.sizes, share.num_devices)
    best = alone[np.arange(len(share.jobs)), columns].sum()
    division = Division(share.sizes[columns])
    for couples in _matchings(share, worth, alone, beside):
        rows = [index for index in range(len(share.jobs)) if all(index not in c.jobs for c in couples)]
        values = np.concatenate([alone[rows], [couple.values for couple in couples]])
        chosen = best_columns(values, share.sizes, share.num_devices)
        total = values[np.arange(len(values)), chosen].sum()
        if total > best + 1e-9 * abs(best):
            best, division = total, _division(share, rows, couples, chosen)
    return division


@dataclass(frozen=True, eq=False)
class _Couple:
    """Two jobs, the values of their sizes together, shape ``(num_sizes,)``, and whether the second one is the host at each."""

    jobs: tuple[int, int]
    values: Floats
    second_hosts: Ints


def _division(share: Share, rows: list[int], couples: list[_Couple], columns: Ints) -> Division:
    numbers = np.zeros(len(share.jobs), dtype=np.int64)
    numbers[rows] = share.sizes[columns[: len(rows)]]
    found = []
    for couple, column in zip(couples, columns[len(rows) :].tolist(), strict=True):
        host, guest = couple.jobs[:: -1 if couple.second_hosts[column] else 1]
        numbers[[host, guest]] = share.sizes[column]
        if column:
            found.append((host, guest))
    return Division(numbers, tuple(found))


def _present_guests(share: Share) -> list[int]:
    """Rows of one job of each present couple: it is the one to leave if they part."""
    places = {job.name: index for index, job in enumerate(share.jobs)}
    return [index for index, name in enumerate(share.partners) if name in places and places[name] < index]


def _matchings(share: Share, worth: Worth, alone: Floats, beside: Beside) -> list[list[_Couple]]:
    """Return the couples of the heaviest matching at each price, where there are any."""
    able = _able(share, beside)
    found: dict[tuple[int, int], _Couple] = {}
    for (i, one), (j, other) in itertools.combinations(enumerate(able), 2):
        couple = _couple(share, worth, alone, beside, one, other)
        if couple is not None:
            found[i, j] = couple
    if not found:
        return []
    dear = _price(alone, share)
    matchings = []
    for factor in PRICE_FACTORS:
        paid = factor * dear * share.sizes
        net = (alone - paid).max(axis=1)
        gains = np.zeros((len(able), len(able)))
        for (i, j), couple in found.items():
            gains[i, j] = gains[j, i] = (couple.values - paid).max() - net[able[i]] - net[able[j]]
        couples = [found[pair] for pair in match(gains)]
        if couples and couples not in matchings:
            matchings.append(couples)
    return matchings


def _able(share: Share, beside: Beside) -> list[int]:
    """Rows of the jobs that may have partners, the members of couples first."""
    able = [
        index
        for index, job in enumerate(share.jobs)
        if not job.exclusive and not share.floors[index] and job.fewest_devices < job.most_devices and beside.may_share(job)
    ]
    return sorted(able, key=lambda index: not (share.partners and share.partners[index]))[:MOST_SHARING]


def _couple(share: Share, worth: Worth, alone: Floats, beside: Beside, one: int, other: int) -> _Couple | None:
    """Return two jobs as a couple; None if no size is open to both of them."""
    both = share.filling[one] & share.filling[other] & (share.sizes > 0) & (share.sizes <= share.num_devices)
    columns = np.flatnonzero(both)
    if not len(columns):
        return None
    speeds = beside.speeds(share.jobs[one], share.jobs[other], share.sizes[columns])
    fits = (speeds.speeds > 0).all(axis=0)
    if not fits.any():
        return None
    columns, counted = columns[fits], (speeds.speeds * np.exp(-CAUTION * speeds.spreads))[:, fits]
    rows = [one, other]
    gained = worth.speedups[rows][:, columns] * counted - share.settings.least_gain * share.sizes[columns] / 2
    gained *= worth.urgency[rows][:, None]
    kept, moved = worth.kept[rows][:, columns], worth.moved[rows][:, columns]
    hosted = np.array([gained[0] * kept[0] + gained[1] * moved[1], gained[0] * moved[0] + gained[1] * kept[1]])
    second_hosts = np.zeros(len(share.sizes), dtype=np.int64)
    second_hosts[columns] = hosted.argmax(axis=0)
    values = np.full(len(share.sizes), -np.inf)
    values[columns] = hosted.max(axis=0)
    if share.partners and share.partners[one] == share.jobs[other].name:
        values[columns] = np.where(share.sizes[columns] == share.present[one], gained.sum(axis=0), values[columns])
    values[0] = alone[one, 0] + alone[other, 0]
    return _Couple((one, other), values, second_hosts)


def _price(values: Floats, share: Share) -> float:
    """Return the least price of a device at which all jobs together want no more devices than there are."""
    finite = values[np.isfinite(values)]
    low, high = 0.0, float(np.ptp(finite)) + 1e-9
    for _ in range(PRICE_STEPS):
        price = (low + high) / 2
        wanted = share.sizes[(values - price * share.sizes).argmax(axis=1)].sum()
        low, high = (price, high) if wanted > share.num_devices else (low, price)
    return high
