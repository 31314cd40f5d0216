"""Programs that are forked from a process with imported modules behave as fresh ones, whatever happens to that process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_dlrover import host, spares, variables
from lightning_dlrover.host import ForkedProcess
from lightning_dlrover.spares import Spares
from tests.support.waiting import eventually

START_S = 90.0

RECORDING = "from lightning_dlrover.spares import note_first_step; note_first_step()\n"


class Place:
    """A folder with a script and its modules, and the owner of a template for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.said: list[str] = []
        self.records = folder / "records"
        self.records.mkdir()
        self.spares = self.owner()
        self.environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}

    def owner(self) -> Spares:
        return Spares(str(self.records), self.said.append, "controller")

    def write(self, text: str, name: str = "train") -> None:
        (self.folder / f"{name}.py").write_text(text)

    def run(self, *arguments: str, as_usual: bool = False, **environ: str) -> tuple[int, str, str]:
        """Run the script, or a module with `-m NAME`; return its exit code and its output."""
        outputs = [self.folder / f"{time.monotonic_ns()}.{name}" for name in ("out", "err")]
        given = list(arguments) if arguments[:1] == ("-m",) else [str(self.script), *arguments]
        command, environ = [sys.executable, "-u", *given], {**self.environ, **environ}
        with outputs[0].open("w") as out, outputs[1].open("w") as err:
            if as_usual:
                environ[variables.SPARES] = str(self.records)
                process: Any = subprocess.Popen(command, env=environ, stdout=out, stderr=err, start_new_session=True)
            else:
                process = self.spares.start(command, environ, stdout=out, stderr=err)
            code = process.wait(START_S)
        return code, *(each.read_text() for each in outputs)

    def make_ready(self) -> None:
        """Run the script once, as usual, and wait for the template."""
        code, _, err = self.run()
        assert code == 0, err
        self.await_state("ready")

    def await_state(self, state: str) -> None:
        def look() -> bool:
            self.spares.look()
            return self.spares.state == state

        eventually(look, f"state {state}, said {self.said}", START_S)

    @property
    def template(self) -> psutil.Process:
        assert self.spares._template is not None
        return psutil.Process(self.spares._template.pid)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    found.spares.close()
    assert [each for each in psutil.Process().children() if runs(each) and spares.TITLE in each.cmdline()] == []


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended. Another test may have made this process adopt orphans, which it does not reap."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


LOOK_AROUND = (
    RECORDING
    + """
import atexit, json, os, random, signal, sys, threading
import parts
def line(name):
    with open(f"/proc/self/{name}") as file:
        return file.read().rstrip("\\0").split("\\0")
found = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "package": __package__,
    "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(), "cwd": os.getcwd(),
    "environ": sorted(os.environ.items()), "shown": sorted(line("environ")), "cmdline": line("cmdline"),
    "is_leader": os.getsid(0) == os.getpid(), "parent": os.getppid(),
    "umask": os.umask(0), "cores": sorted(os.sched_getaffinity(0)), "threads": threading.active_count(),
    "files": sorted(int(each) for each in os.listdir("/proc/self/fd"))[:-1],
    "signals": [str(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
    "unbuffered": [each.write_through for each in (sys.stdout, sys.stderr)], "stdin": os.readlink("/proc/self/fd/0"),
    "loader": type(globals().get("__loader__")).__name__, "doc": __doc__,
}
print(json.dumps(found))
print(os.getpid(), random.random(), file=sys.stderr)
"""
)


@pytest.mark.parametrize("arguments", [("a", "--b=c d"), ("-m", "train", "x")])
def test_forked_program_finds_what_a_fresh_one_finds(place: Place, arguments: tuple[str, ...]) -> None:
    place.write("VALUE = 1\n", "parts")
    place.write(LOOK_AROUND)
    place.make_ready()
    forked = [place.run(*arguments, MARK="1"), place.run(*arguments, MARK="1")]
    fresh = place.run(*arguments, as_usual=True, MARK="1")
    assert not place.said[1:]
    ours, theirs = json.loads(forked[0][1]), json.loads(fresh[1])
    assert ours == theirs
    (first, number), (second, other) = (each[2].split() for each in forked)
    assert first != second
    assert number != other  # the random numbers of two forks differ


ENDS = {
    "code": "import sys; sys.exit(3)",
    "text": "import sys; print('out'); sys.exit('the end')",
    "error": "def f():\n    raise ValueError('an error')\nf()",
    "at once": "import os; print('out', flush=True); os._exit(7)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
    "last words": "import atexit, threading, time\natexit.register(print, 'exit')\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')",
    "syntax": "def f(:\n",
}


def test_forked_program_ends_as_a_fresh_one(place: Place) -> None:
    place.write(RECORDING)
    place.make_ready()
    for kind, text in ENDS.items():
        place.write(text)
        # It has not trained, which would turn the spares off.
        ours, theirs = run_forked(place), place.run(as_usual=True)
        if kind == "interrupt":  # its traceback has frames of this package
            assert (ours[:2], ours[2].splitlines()[-1]) == (theirs[:2], theirs[2].splitlines()[-1])
        else:
            assert ours == theirs, kind


def run_forked(place: Place) -> tuple[int, str, str]:
    found = place.run()
    assert place.spares.state == "ready", place.said
    return found


UNSAFE = {
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "process": "import atexit, subprocess; child = subprocess.Popen(['sleep', '600']); atexit.register(child.kill)",
    "rank": "import os; RANK = int(os.environ.get('RANK', 0))",
    "needs the rank": "import os; RANK = int(os.environ['RANK'])",
}


@pytest.mark.parametrize("kind", list(UNSAFE))
def test_module_that_is_not_safe_is_left_out_with_those_that_import_it(place: Place, kind: str) -> None:
    place.write(UNSAFE[kind], "unsafe_part")
    place.write("import safe_part, unsafe_part\n", "user_of_part")
    place.write("", "safe_part")
    before = "import sys; early = sorted(m for m in ('unsafe_part', 'user_of_part', 'safe_part', 'json') if m in sys.modules)\n"
    place.write(before + "import json, user_of_part, unsafe_part\nprint(early, getattr(unsafe_part, 'RANK', 0))\n" + RECORDING)
    place.environ["RANK"] = "5"
    place.make_ready()
    code, out, err = place.run()
    assert (code, err) == (0, "")
    assert out.split(" ", 2)[:2] == ["['json',", "'safe_part']"]
    assert out.split()[-1] == ("5" if "rank" in kind else "0")
    assert "without 2 that are not safe" in place.said[0]
    assert psutil.Process(place.template.pid).children() == []


def test_program_of_changed_modules_starts_as_usual_and_the_next_template_has_them(place: Place) -> None:
    place.write("VALUE = 1\n", "parts")
    place.write("import parts; print(parts.VALUE)\n" + RECORDING)
    place.make_ready()
    first = place.template
    place.write("VALUE = 22\n", "parts")
    assert place.run()[1] == "22\n"
    assert "parts.py has changed" in place.said[-1]
    assert not first.is_running()
    place.await_state("ready")
    said = list(place.said)
    assert place.run()[1] == "22\n"
    assert place.said == said  # it was forked


def test_changed_script_is_read_again(place: Place) -> None:
    place.write("print(1)\n" + RECORDING)
    place.make_ready()
    place.write("print(2)\n" + RECORDING)
    assert run_forked(place)[1] == "2\n"


def test_variable_that_an_import_has_read_must_be_the_same(place: Place) -> None:
    place.write("import os; LEVEL = os.environ.get('LEVEL')\n", "parts")
    place.write("import parts; print(parts.LEVEL)\n" + RECORDING)
    place.make_ready()
    assert place.run(LEVEL="high")[1] == "high\n"
    assert "LEVEL is 'high'" in place.said[-1]
    assert place.run(OTHER="high")[1] == "None\n"
    assert len(place.said) == 2


@pytest.mark.parametrize("repetition", range(3))
@pytest.mark.parametrize("state", ["importing", "ready", "stopped"])
def test_program_starts_without_its_template(
    place: Place, state: str, repetition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("import time; time.sleep(0.5)\n", "slow_part")
    place.write("import slow_part; print('done')\n" + RECORDING)
    if state == "importing":
        assert place.run()[0] == 0
        place.await_state("importing")
        place.template.kill()
    else:
        place.make_ready()
        place.template.send_signal(signal.SIGKILL if state == "ready" else signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(spares, "FORK_S", 0.3 if state == "stopped" else spares.FORK_S)
        code, out, _ = place.run()
    assert (code, out) == (0, "done\n")
    place.await_state("ready")
    assert run_forked(place)[:2] == (0, "done\n")
    assert [text for text in place.said if "lost" in text or "without its spare" in text]


def test_template_that_dies_again_and_again_is_given_up(place: Place) -> None:
    place.write(RECORDING)
    for _ in range(spares.MAX_DEATHS):
        assert place.run()[0] == 0
        place.await_state("ready")
        place.template.kill()
        assert place.run()[0] == 0
    place.await_state("off")
    assert "have died" in place.said[-1]
    assert place.run()[0] == 0


OWNER = """
import os, sys, time
from lightning_dlrover.spares import Spares
spares = Spares(sys.argv[1], lambda text: print(text, flush=True), "controller")
process = spares.start([sys.executable, sys.argv[2]], dict(os.environ))
process.wait()
while True:
    spares.look()
    print(spares.state, spares._template.pid if spares._template else 0, flush=True)
    if spares.state == sys.argv[3]:
        if sys.argv[3] == "ready":
            print("child", spares.start([sys.executable, sys.argv[2], "long"], dict(os.environ)).pid, flush=True)
        time.sleep(600)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("repetition", range(3))
@pytest.mark.parametrize("state", ["importing", "ready"])
def test_template_ends_with_its_killed_owner(place: Place, state: str, repetition: int) -> None:
    place.write("import time; time.sleep(0.5)\n", "slow_part")
    place.write("import slow_part, sys, time\n" + RECORDING + "if sys.argv[1:]: time.sleep(600)\n")
    command = [sys.executable, "-c", OWNER, str(place.records), str(place.script), state]
    with subprocess.Popen(command, env=place.environ, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        children: list[psutil.Process] = []
        for line in owner.stdout:
            if line.startswith(state) and "spare" not in line:
                children.append(psutil.Process(int(line.split()[1])))
            if line.startswith("child"):
                children.append(psutil.Process(int(line.split()[1])))
            if len(children) == (2 if state == "ready" else 1):
                break
        if state == "ready":
            eventually(lambda: (place.records / f"{spares.STEPPED_FILE}{children[1].pid}").exists(), "a program", START_S)
        owner.kill()
    eventually(lambda: not runs(children[0]), "the template's end", START_S)
    if state == "ready":
        assert runs(children[1])  # as a worker of a killed agent, whose strategy ends it
        children[1].kill()


def test_program_that_fails_before_its_first_step_turns_the_spares_off(place: Place) -> None:
    place.spares = Spares(str(place.records), place.said.append, "agent")
    place.write(RECORDING)
    place.make_ready()
    template = place.template
    place.write("import sys\nfrom lightning_dlrover.spares import is_forked\nsys.exit(is_forked())\n")
    assert place.run()[0] == 1
    assert place.run()[0] == 0
    assert place.spares.state == "off"
    assert "failed before its first step" in place.said[-1]
    assert not template.is_running()
    other = place.owner()
    other.look()
    assert other.state == "off"  # all owners of the folder
    other.close()


def test_program_that_fails_after_its_first_step_is_forked_again(place: Place) -> None:
    place.spares = Spares(str(place.records), place.said.append, "agent")
    place.write(RECORDING)
    place.make_ready()
    place.write(RECORDING + "raise SystemExit(4)")
    assert [place.run()[0] for _ in range(3)] == [4, 4, 4]
    assert place.spares.state == "ready"


def test_killed_program_is_forked_again(place: Place) -> None:
    place.spares = Spares(str(place.records), place.said.append, "agent")
    place.write(RECORDING)
    place.make_ready()
    place.write("import time\nfrom lightning_dlrover.spares import is_forked\nprint(is_forked(), flush=True)\ntime.sleep(600)")
    for _ in range(5):
        process = place.spares.start([sys.executable, "-u", str(place.script)], place.environ)
        assert isinstance(process, ForkedProcess)
        process.kill()
        assert process.wait(START_S) == -signal.SIGKILL
    assert place.spares.state == "ready"


def test_agent_keeps_no_template_before_a_program_of_its_own_has_trained(place: Place) -> None:
    place.write(RECORDING)
    place.make_ready()
    agent = Spares(str(place.records), place.said.append, "agent")
    place.write("")
    assert agent.start([sys.executable, str(place.script)], place.environ).wait(START_S) == 0
    agent.look()
    assert agent.state == "waiting"


NODE = """
import subprocess, sys
from lightning_dlrover import spares
print("node", spares.is_forked(), flush=True)
spares.keep_template()
own = spares.Spares(sys.argv[1], print, "node")
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # its template has none
import os
process = own.start([sys.executable, "-u", sys.argv[2], "x"], dict(os.environ))
print("worker", type(process).__name__, process.wait(), flush=True)
own.close()
"""


def test_forked_program_forks_others_from_a_template_of_its_own(place: Place) -> None:
    place.write(RECORDING)
    place.make_ready()
    place.write(NODE, "node")
    place.write(
        RECORDING + "import os, sys; print(sys.argv[1:], __name__, len(os.listdir('/proc/self/task')), flush=True); sys.exit(6)"
    )
    code, out, err = place.run("-m", "node", str(place.records), str(place.script))
    assert (code, err) == (0, "")
    assert out.splitlines() == ["node True", "['x'] __main__ 1", "worker ForkedProcess 6"]


def test_memory_of_the_template_is_known_to_workers(place: Place) -> None:
    place.write(RECORDING)
    place.make_ready()
    (place.records / f"{spares.MEMORY_FILE}1").write_text("1000")  # another owner's
    worker = {variables.SPARES: str(place.records), variables.AGENT_PID: str(os.getpid())}
    own, total = spares.memory_bytes(worker)
    assert own == place.spares.memory_bytes > 2**20
    assert total == own + 1000
    assert spares.memory_bytes({}) == (0, 0)
    place.spares.close()
    assert spares.memory_bytes(worker) == (0, 1000)


@pytest.mark.parametrize("command", [["python3", __file__], [sys.executable, "-c", "print()"], [sys.executable, "missing.py"]])
def test_other_programs_are_not_forked(command: Sequence[str]) -> None:
    assert spares._program(command, {}, None) is None


def test_platform_without_proc_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    spares.check_platform()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(spares.SparesError, match=r"darwin, not Linux.*--spares"):
        spares.check_platform()


def test_sandbox_that_hides_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0)  # noqa: E731
    monkeypatch.setattr(host, "memory_regions", hidden)
    with pytest.raises(spares.SparesError, match="hides the addresses"):
        spares.check_platform()


@pytest.mark.long
def test_worker_of_lightning_starts_without_imports(place: Place) -> None:
    place.write(
        "import time; began = time.perf_counter()\nimport os, sys, lightning, torch, lightning_dlrover.strategy\n"
        "print(time.perf_counter() - began, torch.get_num_threads(), torch.cuda.is_initialized(), "
        "lightning.fabric.utilities.rank_zero.rank_zero_only.rank)\n" + RECORDING
    )
    place.make_ready()
    fresh, forked = (place.run(as_usual=as_usual, RANK="3")[1].split() for as_usual in (True, False))
    assert len(place.said) == 1
    assert fresh[1:] == forked[1:]
    assert fresh[-1] == "3"
    assert float(forked[0]) < float(fresh[0]) / 5
