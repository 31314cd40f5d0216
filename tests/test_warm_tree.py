"""Processes of `warm_tree` print, return and show in /proc the same as fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_process import WarmProcess
from tests.support.warm_tree import run_program

PARENT = """
import json, os, signal, subprocess, sys
from facts import facts
print(json.dumps(facts()), flush=True)
if "replaced" not in sys.argv:
    os.execv(sys.executable, [sys.executable, "-m", "parent", "replaced"])
child = subprocess.Popen(
    [sys.executable, "-u", "child.py", "a b", ""],
    env={**os.environ, "COLOUR": "blue"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
)
out, errors = child.communicate()
print(out.decode(), errors.decode(), child.returncode, str(child.pid) in out.decode(), flush=True)
for ending in ("raise SystemExit('so long')", "raise KeyboardInterrupt", "os.kill(os.getpid(), 15)", "os._exit(7)", "2 / 0"):
    open("ending.py", "w").write("import os, atexit; atexit.register(print, 'at exit')\\n" + ending)
    done = subprocess.run([sys.executable, "ending.py"], capture_output=True, text=True)
    print(done.returncode, done.stdout, done.stderr)
print(subprocess.run(["echo", "not Python"], capture_output=True, text=True).stdout)
"""

CHILD = """
import json, os
from facts import facts
print(json.dumps({"parent's": os.getppid() == int(os.environ["PARENT"]), "pid": os.getpid(), **facts()}))
os.environ["COLOUR"] = "red"
os.system("echo $COLOUR")
raise ValueError("bad")
"""

FACTS = """
import multiprocessing, os, signal, sys, threading
os.environ["PARENT"] = str(os.getpid()) if "-m" in sys.orig_argv or "parent" in sys.argv[0] else os.environ["PARENT"]

def facts():
    environ = open("/proc/self/environ").read().split("\\0")
    return {
        "argv": sys.argv,
        "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[1:],
        "colours": [os.environ.get("COLOUR"), *[each for each in environ if each.startswith("COLOUR")]],
        "folder": os.getcwd(),
        "path": sys.path[0],
        "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
        "signals": [str(signal.getsignal(n)).split(" at ")[0] for n in (2, 10, 13, 15)],
        "name": sys.modules["__main__"].__name__,
        "process": multiprocessing.current_process().name,
        "threads": [thread.name for thread in threading.enumerate()],
        "files": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:3],
    }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in {"parent": PARENT, "child": CHILD, "facts": FACTS}.items():
        (tmp_path / f"{name}.py").write_text(source)
    return tmp_path


def test_program_and_its_children_are_as_with_fresh_interpreters(fork_server: None, folder: Path) -> None:
    environment = {**os.environ, "COLOUR": "green", "OMP_NUM_THREADS": "1"}
    fresh = subprocess.run(
        [sys.executable, "-m", "parent", "first"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=os.setpgrp,
    )
    output = folder / "output"
    warm = WarmProcess(run_program, ["-m", "parent", "first"], environment, output, folder / "errors", folder)
    assert warm.wait(60) == fresh.returncode == 0, (folder / "errors").read_text() + fresh.stderr
    assert without_numbers(output.read_text()) == without_numbers(fresh.stdout)
    assert (folder / "errors").read_text() == fresh.stderr == ""


def test_child_of_a_warm_program_is_forked_not_executed(fork_server: None, folder: Path) -> None:
    count = "import sys; print(len(sys.modules), flush=True)"
    (folder / "child.py").write_text(count)
    commands = "[sys.executable, 'child.py'], [sys.executable, '-c', COUNT]".replace("COUNT", repr(count))
    (folder / "parent.py").write_text(f"import subprocess, sys\nfor each in {commands}: subprocess.run(each)\n")
    warm = WarmProcess(run_program, ["-m", "parent"], os.environ | {"OMP_NUM_THREADS": "1"}, folder / "output", folder=folder)
    assert warm.wait(60) == 0
    forked, executed = map(int, (folder / "output").read_text().split())
    assert forked > 1000 > executed


def without_numbers(text: str) -> list[str]:
    return [line.replace('"pid": ' + line.partition('"pid": ')[2].partition(",")[0], "") for line in text.splitlines()]
