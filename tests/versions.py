"""Run a core of the tests with other versions of Python, torch, Lightning and torchrec: `make test-versions`.

    python tests/versions.py [NAME...] [--keep]

Each environment is made with uv in `build/versions`, and removed after its tests unless `--keep` is given. Wheels of torch from
the package index bring several GB of CUDA libraries; uv shares them between environments, and fetches an interpreter
that is not installed.

One line for each environment, and a last one with the number of environments that passed:

    torch-2.15 python=3.11.7 torch=2.15.0 lightning=2.6.6 torchrec=none passed=312 of=312 seconds=240
    passed=10 of=10

Results are kept in `tests/versions.json` and shown in docs/reference/compatibility_models.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
FOLDER = REPOSITORY / "build" / "versions"
RESULTS = Path(__file__).with_suffix(".json")
PAGE = REPOSITORY / "docs" / "reference" / "compatibility_models.md"
HEAD = "| environment | Python | torch | Lightning | torchrec | passed | on |\n| --- | --- | --- | --- | --- | --- | --- |\n"

INSTALL_S = 1800.0
TESTS_S = 3600.0

CORE = [
    "tests/live",
    "tests/rdzv/desync",
    "tests/rdzv/group",
    "tests/rdzv/transport",
    "tests/test_packages.py",
    "tests/test_strategy.py",
    "tests/test_compiled_models.py",
    "tests/e2e/test_plain_loop.py",
    "tests/e2e/test_same_maths.py",
    "tests/e2e/test_table_of_features.py",
]
"""Tests of what depends on torch and Lightning: private names, process groups, and features in changing jobs."""

TABLES = ["tests/tables", "tests/e2e/test_table_schedules.py"]
"""Tests that need torchrec."""


@dataclass(frozen=True)
class Environment:
    """Versions to try. An empty one is the newest that fits the others."""

    name: str
    python: str
    torch: str
    lightning: str = ""
    torchrec: str = ""
    fbgemm: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def tests(self) -> list[str]:
        return TABLES if self.torchrec else CORE


ENVIRONMENTS = [
    Environment("torch-2.11", "3.11", "2.11.0"),
    Environment("torch-2.12", "3.11", "2.12.1"),
    Environment("torch-2.13", "3.11", "2.13.0"),
    Environment("torch-2.14", "3.11", "2.14.1"),
    Environment("torch-2.15", "3.11", "2.15.0"),
    Environment("python-3.10", "3.10", "2.14.1"),
    Environment("python-3.12", "3.12", "2.15.0"),
    Environment("python-3.13", "3.13", "2.15.0"),
    Environment("lightning-2.5", "3.11", "2.13.0", lightning="2.5.6"),
    Environment("torchrec-1.7", "3.11", "2.12.1", torchrec="1.7.0", fbgemm="1.7.0"),
    Environment("torchrec-1.8", "3.11", "2.13.0", torchrec="1.8.0", fbgemm="1.8.0"),
    Environment("torchrec-1.9", "3.11", "2.14.1", torchrec="1.9.2", fbgemm="1.9.0"),
]


@dataclass(frozen=True)
class Result:
    """An environment's versions as installed, and its tests."""

    name: str
    python: str
    torch: str
    lightning: str
    torchrec: str
    passed: int
    of: int
    date: str

    @property
    def line(self) -> str:
        versions = f"python={self.python} torch={self.torch} lightning={self.lightning} torchrec={self.torchrec or 'none'}"
        return f"{self.name} {versions} passed={self.passed} of={self.of}"


def results() -> list[Result]:
    """Newest result of each environment, in the order of `ENVIRONMENTS`."""
    found = {entry["name"]: Result(**entry) for entry in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    return [found[environment.name] for environment in ENVIRONMENTS if environment.name in found]


def table() -> str:
    """Return the table of results, with which the page ends."""
    rows = (
        f"| {r.name} | {r.python} | {r.torch} | {r.lightning} | {r.torchrec or '-'} | {r.passed} of {r.of} | {r.date} |\n"
        for r in results()
    )
    return HEAD + "".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(environment.name for environment in ENVIRONMENTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"environments (default: all): {known}")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    if unknown := set(options.names) - {environment.name for environment in ENVIRONMENTS}:
        parser.error(f"no environment is called {', '.join(sorted(unknown))}; there are {known}")
    chosen = [e for e in ENVIRONMENTS if not options.names or e.name in options.names]
    num_passed = 0
    for environment in chosen:
        begin = time.monotonic()
        try:
            _make(environment)
            result = _test(environment)
        except _FailedError as error:
            print(f"{environment.name} failed: {error}", flush=True)
            continue
        finally:
            if not options.keep:
                shutil.rmtree(environment.folder, ignore_errors=True)
        print(f"{result.line} seconds={time.monotonic() - begin:.0f}", flush=True)
        _keep(result)
        num_passed += result.passed == result.of
    print(f"passed={num_passed} of={len(chosen)}")
    return 0 if num_passed == len(chosen) else 1


class _FailedError(Exception):
    """An environment could not be made, or its tests did not run to the end."""


def _make(environment: Environment) -> None:
    """Install the versions, and this package from the repository."""
    shutil.rmtree(environment.folder, ignore_errors=True)
    _uv("venv", "--python", environment.python, str(environment.folder))
    own = f"{REPOSITORY}[dev{',torchrec' if environment.torchrec else ''}]"
    pins = [f"torch=={environment.torch}", "numpy"]
    if environment.lightning:
        pins += [f"lightning=={environment.lightning}", f"pytorch-lightning=={environment.lightning}"]
    overrides = FOLDER / f"{environment.name}-overrides.txt"
    overrides.write_text(f"fbgemm-gpu-cpu=={environment.fbgemm}\n" if environment.fbgemm else "")
    _uv("pip", "install", "--python", str(environment.interpreter), "--overrides", str(overrides), *pins, "--editable", own)
    if environment.torchrec:  # its metadata asks for the CUDA build of fbgemm
        _uv("pip", "install", "--python", str(environment.interpreter), "--no-deps", f"torchrec=={environment.torchrec}")


def _uv(*arguments: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "uv", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise _FailedError(f"`uv {' '.join(arguments)}` ended with {done.returncode}: {done.stderr.strip()[-2000:]}")


def _test(environment: Environment) -> Result:
    report = FOLDER / f"{environment.name}.xml"
    report.unlink(missing_ok=True)
    log = FOLDER / f"{environment.name}.log"
    command = [str(environment.interpreter), "-m", "pytest", "-q", "-n", "2", "-m", "not gpu", "-p", "no:cacheprovider"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, f"--junitxml={report}", *environment.tests],
            cwd=REPOSITORY,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(TESTS_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            raise _FailedError(f"its tests took more than {TESTS_S:g} s, see {log}") from None
    if not report.exists():
        raise _FailedError(f"pytest ended with {process.returncode} and without a report, see {log}")
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped, bad = (
        sum(int(suite.get(name, "0")) for suite in suites for name in names)
        for names in (("tests",), ("skipped",), ("failures", "errors"))
    )
    versions = {name: _installed(environment, name) for name in ("torch", "lightning", "torchrec")}
    python = _output(environment, "import platform; print(platform.python_version())")
    today = datetime.date.today().isoformat()
    num_run = total - skipped
    return Result(environment.name, python, passed=num_run - bad, of=num_run, date=today, **versions)


def _installed(environment: Environment, name: str) -> str:
    ask = f"import importlib.metadata as m, importlib.util as u; print(m.version({name!r}) if u.find_spec({name!r}) else '')"
    return _output(environment, ask).partition("+")[0]


def _output(environment: Environment, code: str) -> str:
    command = [str(environment.interpreter), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def _keep(result: Result) -> None:
    kept = {r.name: r for r in results()} | {result.name: result}
    entries = [asdict(kept[e.name]) for e in ENVIRONMENTS if e.name in kept]
    RESULTS.write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]\n")
    PAGE.write_text(PAGE.read_text().partition(HEAD)[0] + table())


if __name__ == "__main__":
    sys.exit(main())
