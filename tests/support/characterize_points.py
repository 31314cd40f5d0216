"""Points and visits for tests."""

from __future__ import annotations

from lightning_dlrover.lab.characterize.points import PARTS, Point, Scope, Visit

SCOPE = Scope("quick", "cpu", cores=2, memory_bytes=16 << 30, has_torchrec=True, has_pyarrow=True)


def visit(point: Point, *blocks: float, at: float = 1.0, took_s: float = 1.0, problem: str = "") -> Visit:
    middle = sorted(blocks)[len(blocks) // 2] if blocks else 0.0
    part_s = {part: middle / len(PARTS) for part in PARTS} if blocks else {}
    return Visit(point, at, took_s, blocks, part_s, forward_s=middle / 7, problem=problem)
