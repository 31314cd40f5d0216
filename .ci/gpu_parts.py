"""Run the parts of a GPU bundle, one after the other, each within its own time, and collect their figures.

    bash run.sh [--device cuda|cpu] [--minutes M] [--parts NAME...]

`run.sh` starts this in the folder that `gpu_bundle.py` has built, with the machine's own Python. It installs the wheels that
this Python lacks into `site/`, without a network, and then runs the parts. The most informative ones come first. A part that
fails or exceeds its time is ended with all its processes, and the next one starts. Parts that need a GPU are left out on a CPU.

Results are in `results/`, and in $OUT if that is set: the output of each part, and `results.json` with its exit code (124: its
time was over), seconds and figures. The last line has all figures: `gpu_bundle name=value ...`.

Exit codes: 0: all parts that ran ended with 0; 1: one did not. A part for which no time was left did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

__all__ = ["Part", "Result", "missing_wheels", "parts_for", "run_parts"]

BUNDLE = Path(__file__).resolve().parent
GPU_TESTS = "gpu_tests.txt"
"""Name of a file with the test files that hold tests marked `gpu`, one per line."""

MARK = "DLROVER_GPU_PART"
"""Variable in the environment of all processes of a part."""

MIN_S = 15.0
"""Seconds below which no further part starts."""

GRACE_S = 12.0
"""Seconds that a part has after SIGINT, to end its processes and report what it has."""

MINUTES = 8.0
TIMED_OUT = 124
FIGURES = re.compile(r"[A-Za-z_][\w.]*=\S+(?: [A-Za-z_][\w.]*=\S+)*")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|points)\b")
MANY_CORES = 8

LOOK = """
import importlib.metadata, os, shutil, subprocess, sys, torch
if shutil.which("nvidia-smi"):
    subprocess.run(["nvidia-smi"])
subprocess.run([sys.executable, "-m", "pip", "check"])
import lightning_dlrover
from lightning_dlrover import DLRoverCallback, DLRoverStrategy
print(lightning_dlrover.__file__)
gpus = torch.cuda.device_count()
print("GPUs:", [torch.cuda.get_device_name(i) for i in range(gpus)])
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
lightning = importlib.metadata.version("lightning")
print(f"python={sys.version.split()[0]} torch={torch.__version__} cuda={torch.version.cuda} nccl={nccl} lightning={lightning}"
      f" lightning_dlrover={lightning_dlrover.__version__} cores={os.cpu_count()} gpus={gpus}")
if sys.argv[1] == "cuda" and not gpus:
    sys.exit("torch finds no GPU")
"""


@dataclass(frozen=True)
class Part:
    """One command, run in the folder of the bundle."""

    name: str
    command: Sequence[str]
    limit_s: float
    needs_gpu: bool = False


@dataclass(frozen=True)
class Result:
    """What a part has left."""

    name: str
    command: Sequence[str]
    limit_s: float
    rc: int | None  # None: it did not run
    seconds: float = 0.0
    note: str = ""  # why it did not run, or was ended
    figures: dict[str, str] = field(default_factory=dict)


def parts_for(device: str, results: Path) -> list[Part]:
    """Return all parts, the most informative first."""

    def benchmark(script: str, *options: str) -> list[str]:
        return [sys.executable, f"benchmarks/{script}.py", *options]

    files = (BUNDLE / GPU_TESTS).read_text().split()
    tests = [sys.executable, "-m", "pytest", "-v", "--durations=10", "-p", "no:cacheprovider", *files]
    tests += [f"--junitxml={results / 'tests.xml'}"]
    # On a CPU all of these files are imported, and the bodies of some GPU tests run.
    tests += ["-m", "gpu"] if device == "cuda" else ["-k", "test_gpu"]
    tests += ["-n", "4"] if (os.cpu_count() or 1) >= MANY_CORES else []
    on_device = f"--device={device}"
    characterize = [sys.executable, "-m", "lightning_dlrover.cli", "lab", "characterize", on_device, "--history", "off"]
    characterize += ["--budget", "0.8" if device == "cuda" else "0.4", "--out", str(results / "characterize")]
    colocation = ["--gpu=0", "--copies=2", "--rounds=1", "--job-seconds=2.5"]
    colocation += ["--policies", "sequential", "rmixer", "complementary"]
    kills = ["--jobs=1", "--plain-live-jobs=1", "--stock-jobs=0", "--stock-plain-jobs=0", "--rounds=0", "--kills=2"]
    kills += ["--steps=200", "--restart-steps=60", "--deadline=90"]
    return [
        Part("look", [sys.executable, "-c", LOOK, device], 60.0),
        Part("faults", benchmark("gpu_faults", "--keep", on_device), 150.0),
        Part("tests", tests, 150.0),
        Part("live_resize", benchmark("live_resize", "--quick", "--without-stock", on_device), 120.0),
        Part("kill_recovery", benchmark("kill_recovery", *kills, on_device), 120.0),
        Part("overhead", benchmark("overhead", "--quick", on_device), 90.0),
        Part("colocation", benchmark("colocation", *colocation), 180.0, needs_gpu=True),
        Part("characterize", characterize, 90.0),
        Part("large_world", benchmark("large_world", "--quick"), 90.0),
    ]


def run_parts(parts: Sequence[Part], device: str, results: Path, until: float, copy_to: Path | None = None) -> list[Result]:
    """Run parts in order; write `results.json` after each one.

    Args:
        until: end of all parts, on the monotonic clock.
        copy_to: folder that gets a copy of the results after each part.
    """
    results.mkdir(parents=True, exist_ok=True)
    done: list[Result] = []
    for part in parts:
        left_s = until - time.monotonic()
        if part.needs_gpu and device != "cuda":
            done.append(_left_out(part, "needs a GPU"))
        elif left_s < min(MIN_S, part.limit_s):
            done.append(_left_out(part, f"{max(left_s, 0):.0f} s of the bundle's time were left"))
        else:
            done.append(_run(part, min(part.limit_s, left_s), results))
        text = json.dumps({"device": device, "parts": [asdict(each) for each in done]}, indent=1)
        (results / "results.json").write_text(text + "\n")
        if copy_to is not None:
            shutil.copytree(results, copy_to, dirs_exist_ok=True)
    return done


def _left_out(part: Part, why: str) -> Result:
    print(f"=== {part.name}: left out, {why}", flush=True)
    return Result(part.name, part.command, part.limit_s, None, note=why)


def _run(part: Part, limit_s: float, results: Path) -> Result:
    shown = " ".join(word if "\n" not in word else "..." for word in part.command)
    print(f"=== {part.name}: at most {limit_s:.0f} s: {shown}", flush=True)
    began = time.monotonic()
    # Short, as some parts have sockets there, whose paths must be short. What they keep there are logs of failures.
    temporary = tempfile.mkdtemp(prefix="gpu-")
    mark = f"{os.getpid()}-{part.name}"
    environment = {**os.environ, MARK: mark, "TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
    output: list[str] = []
    with (results / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            part.command,
            cwd=BUNDLE,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                output.append(line.rstrip("\n"))
                log.write(line)
                log.flush()
                sys.stdout.write(line)
                sys.stdout.flush()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        note = ""
        try:
            process.wait(max(limit_s - GRACE_S, limit_s / 2))
        except subprocess.TimeoutExpired:
            note = f"ended after {limit_s:.0f} s"
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(GRACE_S, limit_s / 2))
        _kill(mark)
        rc = TIMED_OUT if note else process.wait(10.0)
        reader.join(10.0)
    _keep_logs(Path(temporary), results / f"{part.name}-logs")
    seconds = time.monotonic() - began
    print(f"=== {part.name}: rc {rc} after {seconds:.0f} s{', ' if note else ''}{note}", flush=True)
    return Result(part.name, part.command, part.limit_s, rc, round(seconds, 1), note, figures_of(output))


def _kill(mark: str) -> None:
    """End every process that a part has left. Agents come and go, so look until there are none."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(50):
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _keep_logs(temporary: Path, kept: Path) -> None:
    """Move the logs that a failed part has left, and remove the rest."""
    for file in temporary.rglob("*"):
        if file.suffix in (".log", ".txt") and file.is_file() and file.stat().st_size < 1 << 20:
            target = kept / file.relative_to(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    shutil.rmtree(temporary, ignore_errors=True)


def figures_of(output: Sequence[str]) -> dict[str, str]:
    """Return the figures of the last line that consists of `name=value` pairs, or else of the last one with counts."""
    for line in reversed(output):
        if FIGURES.fullmatch(line.strip()):
            return dict(pair.split("=", 1) for pair in line.split())
    for line in reversed(output):
        if found := COUNTS.findall(line):
            return {name: count for count, name in found}
    return {}


# --- installing ---


def missing_wheels(wheels: Path) -> list[Path]:
    """Return our own wheel, and those of distributions that this Python does not have."""

    def is_missing(wheel: Path) -> bool:
        name = wheel.name.partition("-")[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return True
        return name == "lightning_dlrover"

    return sorted(filter(is_missing, wheels.glob("*.whl")))


def install(site: Path) -> None:
    """Install missing wheels into `site`, and let all processes from now on import from there."""
    shutil.rmtree(site, ignore_errors=True)
    wheels = missing_wheels(BUNDLE / "wheels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    command += ["--root-user-action=ignore", "--disable-pip-version-check", *map(str, wheels)]
    if subprocess.run(command, env={**os.environ, "PIP_CONFIG_FILE": os.devnull}, check=False).returncode:
        version = ".".join(map(str, sys.version_info[:2]))
        sys.exit(
            f"error: pip cannot install the bundle's wheels for Python {version}; build it with make gpu-bundle PY={version}"
        )
    print("installed:", *(wheel.name for wheel in wheels), flush=True)
    for name, folder in (("PYTHONPATH", site), ("PATH", site / "bin")):
        os.environ[name] = os.pathsep.join([str(folder), *filter(None, [os.environ.get(name)])])


def last_line(results: Sequence[Result], device: str, seconds: float) -> str:
    failed = sum(each.rc not in (None, 0) for each in results)
    left_out = sum(each.rc is None for each in results)
    figures = [f"gpu_bundle device={device} seconds={seconds:.0f} failed={failed} left_out={left_out}"]
    for each in results:
        figures.append(f"{each.name}.rc={'none' if each.rc is None else each.rc}")
        figures += [f"{each.name}.{name}={value}" for name, value in each.figures.items()]
    return " ".join(figures)


def main() -> int:
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would all parts
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"error: {sys.executable} has no torch; name a Python that has: PYTHON=/path/to/python bash run.sh")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of all parts (default: cuda)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="time of all parts together (default: %(default)s); with more, the limit of each part grows, too",
    )
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts (default: all)")
    options = parser.parse_args()
    results = BUNDLE / "results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    copy_to = Path(os.environ["OUT"], "gpu-bundle") if os.environ.get("OUT") else None
    parts = parts_for(options.device, results)
    if unknown := {*(options.parts or ())} - {part.name for part in parts}:
        parser.error(f"--parts {' '.join(sorted(unknown))}: unknown; there are {', '.join(part.name for part in parts)}")
    install(BUNDLE / "site")
    slower = max(1.0, options.minutes / MINUTES)
    chosen = [replace(p, limit_s=p.limit_s * slower) for p in parts if not options.parts or p.name in options.parts]
    done = run_parts(chosen, options.device, results, began + 60 * options.minutes, copy_to)
    line = last_line(done, options.device, time.monotonic() - began)
    (results / "figures.txt").write_text(line + "\n")
    if copy_to is not None:
        shutil.copytree(results, copy_to, dirs_exist_ok=True)
    print(line, flush=True)
    return 1 if any(each.rc not in (None, 0) for each in done) else 0


if __name__ == "__main__":
    sys.exit(main())
