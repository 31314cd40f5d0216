"""Draw the loss of a job that loses a worker to SIGKILL, for our package and for stock torchrun, as a moving picture.

    python benchmarks/kill_picture.py [--steps N] [--stock-tries N] [--output docs/kill.svg]

Both jobs train the same model on the same rows with three workers on this machine. One worker is killed after the same step:

    ours     live, under torchrun with our rendezvous: the others repeat the step in flight, and its agent restarts the worker
    stock    torchrun with the c10d backend and DDPStrategy: all workers restart from a checkpoint, one every 50 steps. One
             agent has all workers: with an agent for each, most jobs never come back (see kill_recovery.py). Of several
             tries, as some hang after the restart, the one with the shortest pause is drawn

The picture has the loss over the seconds since a job's first step. The last line holds, for each job, the longest time
without a step (`pause_s`, `stock_pause_s`) and the number of steps that were made twice (`repeated`, `stock_repeated`; the
step in flight is not counted, as nothing of it was kept), and how many of the stock tries came back.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jobs import BenchmarkError, Job, Step, Workspace, describe_machine, result_line, stock_agent
from kill_recovery import etcd_options

from tests.support.processes import ends_of_logs

NUM_WORKERS = 3
TIMEOUT_S = 120.0
CHECKPOINT_EVERY = 50
ARGUMENTS = [
    "--losses",
    "--width=512",
    "--batch-size=32",
    "--num-samples=40000",
    "--step-floor-s=0.05",
    f"--checkpoint-every={CHECKPOINT_EVERY}",
]

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 46, 40
DRAWN_S, HELD_S = 8.0, 4.0
"""Seconds of the animation in which the curves are drawn, and in which they stay complete before that."""

LEAST_PAUSE_S = 1.0
"""Time without a step that is drawn as a dotted line."""

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #57606a } .title { font-size: 15px; font-weight: 600; fill: #24292f }
.axis { stroke: #8c959f; stroke-width: 1 } .ours { stroke: #0969da } .stock { stroke: #bc4c00 } .kill { stroke: #cf222e }
path { fill: none; stroke-width: 2 } text.ours { fill: #0969da; stroke: none } text.stock { fill: #bc4c00; stroke: none }
text.kill { fill: #cf222e; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #8b949e } .title { fill: #e6edf3 } .ours { stroke: #58a6ff } .stock { stroke: #f0883e } .kill { stroke: #ff7b72 }
  text.ours { fill: #58a6ff } text.stock { fill: #f0883e } text.kill { fill: #ff7b72 }
}"""


@dataclass(frozen=True)
class Curve:
    """Loss of one job.

    Args:
        points: seconds since the first step, and the mean loss of the workers in it, in order of time.
        killed_s: seconds from the first step to SIGKILL.
        pause_s: longest time without a step.
        repeated: number of steps that were made again.
    """

    points: Sequence[tuple[float, float]]
    killed_s: float
    pause_s: float
    repeated: int

    def __str__(self) -> str:
        return f"{self.pause_s:.2f} s without a step, {self.repeated} steps made twice"


def curve_of(steps: Sequence[Step], killed_at_s: float) -> Curve:
    """Return the curve of a job's records, of which each worker writes one for a step."""
    made: dict[tuple[int, bool], list[Step]] = defaultdict(list)  # by number, and whether it was made after the kill
    for step in steps:
        made[step.number, step.ended_s > killed_at_s].append(step)
    ended = sorted((max(s.ended_s for s in group), sum(s.loss or 0.0 for s in group) / len(group)) for group in made.values())
    first_s = ended[0][0]
    pause_s = max(later - earlier for (earlier, _), (later, _) in pairwise(ended))
    twice = {number for number, after in made if after and (number, False) in made}
    # A survivor records the step in which the other was lost before the kill, the others after it.
    twice = {number for number in twice if len(made[number, False]) + len(made[number, True]) > NUM_WORKERS}
    return Curve([(at - first_s, loss) for at, loss in ended], killed_at_s - first_s, pause_s, len(twice))


def run(job: Job, agents: Sequence[list[str]], kill_after: int) -> Curve:
    """Run a job whose agents have these options, and kill a worker after that step."""
    for options in agents:
        job.start_agent(options)
    job.wait_for_steps(kill_after, NUM_WORKERS, timeout_s=TIMEOUT_S)
    pids = {step.global_rank: step.pid for step in job.steps()}
    steps = job.steps()
    os.kill(pids[1], signal.SIGKILL)
    killed_at_s = max(step.ended_s for step in steps)
    codes = job.wait_until_ended(TIMEOUT_S)
    if any(codes):
        raise BenchmarkError(f"job {job.name}: agents ended with {codes}:\n" + ends_of_logs(job.folder))
    return curve_of(job.steps(), killed_at_s)


def smoothed(points: Sequence[tuple[float, float]], width: int = 5) -> list[tuple[float, float]]:
    """Return running geometric means, which end where time stands still."""
    means = []
    for i, (at, _) in enumerate(points):
        near = [loss for other, loss in points[max(0, i - width) : i + 1] if at - other < LEAST_PAUSE_S]
        means.append((at, math.exp(sum(map(math.log, near)) / len(near))))
    return means


def picture(ours: Curve, stock: Curve) -> str:
    """Return the SVG: both curves are drawn from left to right, again and again."""
    curves = {"ours": smoothed(ours.points), "stock": smoothed(stock.points)}
    end_s = max(points[-1][0] for points in curves.values())
    losses = [loss for points in curves.values() for _, loss in points]
    low, high = math.log(min(losses)), math.log(max(losses))

    def x(seconds: float) -> float:
        return LEFT + seconds / end_s * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - math.log(loss)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(name: str) -> str:
        """Return the curve, and a dotted line where no step is made."""
        steps, pauses = f"M{x(curves[name][0][0]):.1f} {y(curves[name][0][1]):.1f}", ""
        for (earlier, before), (later, after) in pairwise(curves[name]):
            pausing = later - earlier > LEAST_PAUSE_S
            steps += f"{'M' if pausing else 'L'}{x(later):.1f} {y(after):.1f}"
            pauses += f"M{x(earlier):.1f} {y(before):.1f}H{x(later):.1f}V{y(after):.1f}" if pausing else ""
        dotted = f'<path class="{name}" stroke-dasharray="2 4" d="{pauses}" clip-path="url(#drawn)"/>' if pauses else ""
        return f'<path class="{name}" d="{steps}" clip-path="url(#drawn)"/>{dotted}'

    killed_x = x((ours.killed_s + stock.killed_s) / 2)
    every_s = next(step for step in (5, 10, 20, 50, 100) if end_s / step <= 8)
    whole_s = DRAWN_S + HELD_S
    label_y = HEIGHT - BOTTOM - 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label='
        f'"Training loss over time. One of three workers is killed: our job pauses for {ours.pause_s:.1f} seconds, '
        f'stock torchrun for {stock.pause_s:.1f} seconds and repeats {stock.repeated} steps.">',
        f"<style>{STYLE}</style>",
        # The complete curves come first: an index that shows a still picture takes the first frame.
        f'<clipPath id="drawn"><rect x="0" y="0" width="{WIDTH}" height="{HEIGHT}"><animate attributeName="width" '
        f'values="{WIDTH};{WIDTH};{LEFT};{WIDTH}" keyTimes="0;{HELD_S / whole_s:.3f};{HELD_S / whole_s:.3f};1" '
        f'dur="{whole_s:g}s" repeatCount="indefinite"/></rect></clipPath>',
        f'<text class="title" x="{LEFT}" y="20">Training loss; one of {NUM_WORKERS} workers is killed with SIGKILL</text>',
        f'<path class="axis" d="M{LEFT} {TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}"/>',
        *(
            f'<text x="{x(at):.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{at} s</text>'
            for at in range(0, int(end_s) + 1, every_s)
        ),
        f'<text x="{LEFT - 8}" y="{TOP + 10}" text-anchor="end">{math.exp(high):.2g}</text>',
        f'<text x="{LEFT - 8}" y="{HEIGHT - BOTTOM}" text-anchor="end">{math.exp(low):.1g}</text>',
        f'<path class="kill" stroke-dasharray="4 3" d="M{killed_x:.1f} {TOP} V{HEIGHT - BOTTOM}"/>',
        f'<text class="kill" x="{killed_x + 6:.1f}" y="{label_y}">kill -9</text>',
        path("stock"),
        path("ours"),
        f'<text class="ours" x="{WIDTH - RIGHT}" y="{TOP + 4}" text-anchor="end">lightning-dlrover: '
        f"{ours.pause_s:.1f} s without a step</text>",
        f'<text class="stock" x="{WIDTH - RIGHT}" y="{TOP + 24}" text-anchor="end">torchrun: {stock.pause_s:.1f} s, then '
        f"{stock.repeated} steps again</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps of each job (default: %(default)s)")
    parser.add_argument("--stock-tries", type=int, default=3, help="stock jobs (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "kill.svg")
    options = parser.parse_args()
    print(describe_machine())
    kill_after = options.steps // 3 + CHECKPOINT_EVERY // 2
    arguments = [*ARGUMENTS, f"--max-steps={options.steps}"]
    with Workspace("kill-picture") as space:
        etcd = space.etcd()
        live = [etcd_options(etcd.endpoint, "ours", "live")] * NUM_WORKERS
        with space.job("ours", [*arguments, "--strategy=dlrover", f"--checkpoint={space.folder}/ours.ckpt"]) as job:
            ours = run(job, live, kill_after)
        print(f"ours: {ours}", flush=True)
        tries: list[Curve] = []
        for number in range(options.stock_tries):
            name = f"stock-{number}"
            with space.job(name, [*arguments, "--strategy=ddp", f"--checkpoint={space.folder / name}.ckpt"]) as job:
                try:
                    tries.append(run(job, [[*stock_agent(NUM_WORKERS), f"--max-restarts={NUM_WORKERS}"]], kill_after))
                except BenchmarkError as error:
                    print(f"{name} did not come back: {str(error).splitlines()[0]}", flush=True)
                else:
                    print(f"{name}: {tries[-1]}", flush=True)
    if not tries:
        print(
            "no stock job came back, so there is nothing to compare with; run it again with more --stock-tries", file=sys.stderr
        )
        return 1
    stock = min(tries, key=lambda curve: curve.pause_s)
    options.output.write_text(picture(ours, stock), encoding="utf-8")
    values = {"pause_s": ours.pause_s, "stock_pause_s": stock.pause_s, "repeated": ours.repeated}
    print(result_line({**values, "stock_repeated": stock.repeated, "stock_came_back": len(tries), "of": options.stock_tries}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
