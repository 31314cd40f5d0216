"""What workers without progress are seen to do, and whether all of them may belong to one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CollectiveCounts", "DesyncReport", "can_go_on", "difference", "ranges"]


@dataclass(frozen=True)
class CollectiveCounts:
    """Collectives that a worker has begun in a round."""

    compared: int  # votes and comparisons begun in their separate group
    begun: int  # collectives begun in the round's group


@dataclass(frozen=True)
class DesyncReport:
    """Observed activity of a worker that makes no progress."""

    counts: CollectiveCounts
    text: str
    waits_for: str = ""  # collective begun last in the round's group, if it is known


def can_go_on(one: DesyncReport, other: DesyncReport) -> bool:
    """Whether two workers may belong to one program; if not, neither of them ever ends.

    Workers of one program begin the same collectives in the same order. Their counts, whenever they are read, therefore belong
    to one sequence. Two entries of a growing sequence cannot be ahead of each other, and equal entries have one meaning.
    """
    ahead = one.counts.compared - other.counts.compared, one.counts.begun - other.counts.begun
    if ahead[1] == 0 and one.waits_for and other.waits_for and one.waits_for != other.waits_for:
        return False
    return ahead[0] * ahead[1] >= 0


def difference(texts: Sequence[tuple[int, str]], counts: Sequence[CollectiveCounts] = ()) -> str:
    """Return the text of a `MismatchError`, which names the place of each rank.

    Args:
        texts: rank and activity of all known workers.
        counts: counts of the same workers, if they differ.
    """
    by_text: dict[str, list[int]] = {}
    for i, (rank, text) in enumerate(texts):
        extra = f" [{counts[i].begun} collectives begun in this round]" if counts else ""
        by_text.setdefault(text + extra, []).append(rank)
    lines = [f"  {'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}: {text}" for text, ranks in by_text.items()]
    return "\n".join(
        [
            "workers have met in different collectives, so none of them can go on:",
            *lines,
            "All workers must run the same collectives in the same order. Look for one of these calls, or for a step, a log "
            "with sync_dist or a checkpoint before it, that depends on the rank or on a worker's own data",
        ]
    )


def ranges(ranks: Sequence[int]) -> str:
    """Format ranks as ranges: 0, 2-5."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)
