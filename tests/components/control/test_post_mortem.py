"""Real output of torchrun in, cause of the failure out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dlrover.components.control.post_mortem import examine

AGENT = """\
E1121 03:07:37.086000 8654 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 0
Traceback (most recent call last):
  File "/venv/torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  exitcode  : {code} (pid: 8773)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
SCRIPT = """\
Traceback (most recent call last):
  File "train.py", line 2, in <module>
    raise ValueError("bad")
ValueError: bad
"""
RANKED = SCRIPT.replace("Trace", "[rank0]: Trace").replace("\n", "\n[rank0]: ")
CHAINED = f"""\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    {{}}["k"]
KeyError: 'k'

The above exception was the direct cause of the following exception:

{SCRIPT}"""
SIGNALLED = """\
Traceback (most recent call last):
  File "/venv/torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.api.SignalException: Process 17357 got signal: 15
"""
REFUSED = """\
Traceback (most recent call last):
  File "/venv/handler.py", line 125, in take
ValueError: it must start with '/'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/venv/torch/distributed/run.py", line 1032, in <module>
    main()
RendezvousConnectionError: no etcd answers
"""


SEGFAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f2bb5dc6740 (most recent call first):
  File "train.py", line 9 in lookup
"""


def test_traceback_of_a_fatal_signal_is_that_of_faulthandler() -> None:
    assert examine("read data\n" + SEGFAULT + AGENT.format(code=-11)).traceback == SEGFAULT.rstrip("\n")


@pytest.mark.parametrize("by", ["this machine", "Kubernetes", "Slurm"])
@pytest.mark.parametrize(
    "output", ["", "Kubernetes: as the script says\n", AGENT.format(code=-9), SCRIPT + AGENT.format(code=1), SIGNALLED]
)
def test_why_a_place_has_ended_a_node_is_its_last_line(output: str, by: str) -> None:
    without = examine(output + "the last words\n")
    assert without.cause == ""
    cause = "out of memory (limit 64 MB)"
    assert examine(f"{output}{by}: {cause}\n") == replace(examine(output + "-\n"), cause=cause)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (SCRIPT + AGENT.format(code=1), "ValueError: bad"),
        ("some words\n" + CHAINED + AGENT.format(code=1), "ValueError: bad"),
        (RANKED + "\n" + AGENT.format(code=1), "ValueError: bad"),
        (AGENT.format(code=3), "the script ended with exit code 3"),
        ("read data\nno such file\n\n" + AGENT.format(code=2), "the script ended with exit code 2: no such file"),
        (AGENT.format(code=-11), "the script was ended by SIGSEGV"),
        (AGENT.format(code=-31), "the script was ended by SIGSYS"),
        (AGENT.format(code=134), "the script was ended by SIGABRT"),
        (AGENT.format(code=130 + 40), "the script ended with exit code 170"),
        ("UserWarning: slow data loader\n" + SEGFAULT + AGENT.format(code=-11), "the script was ended by SIGSEGV"),
        (SCRIPT + AGENT.format(code=-6), "the script was ended by SIGABRT, after ValueError: bad"),
        (REFUSED, "RendezvousConnectionError: no etcd answers"),
        ("/venv/bin/python: nothing\n" + SCRIPT, "ValueError: bad"),
    ],
)
def test_error_of_the_script_or_its_agent_is_shown(output: str, error: str) -> None:
    assert examine(output).error == error


@pytest.mark.parametrize(
    "output", ["", "trained a bit\n", AGENT.format(code=-9), AGENT.format(code=143), SIGNALLED, SCRIPT + SIGNALLED]
)
def test_a_node_that_was_killed_has_no_error(output: str) -> None:
    assert examine(output).error == ""


NOT_STARTED = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "<frozen runpy>", line 88, in _run_code
  File "/venv/lightning_dlrover/components/node.py", line 26, in <module>
ImportError: no psutil
IMPORTANT: install it
"""


@pytest.mark.parametrize(
    "output",
    [
        SCRIPT + "epoch 1\n",
        SCRIPT + "\nepoch 1\n",
        CHAINED + "epoch 1\n",
        SCRIPT + "Slurm: NODE_FAIL\n",
        "epoch 1\n" + SCRIPT + "\nKubernetes: Evicted: The node was low on resource\n",
        RANKED + "\nepoch 1\n",
    ],
)
def test_a_handled_error_is_not_why_a_whole_node_was_killed(output: str) -> None:
    found = examine(output)
    assert (found.error, found.traceback) == ("", "")
    assert found.cause == output.splitlines()[-1].partition(": ")[2]


@pytest.mark.parametrize("end", ["", "Slurm: FAILED early\n"])
def test_error_before_torchrun_starts_is_the_nodes(end: str) -> None:
    found = examine(SCRIPT + "retrying\n" + NOT_STARTED + "\n" + end)
    assert found.error == "ImportError: no psutil"
    assert found.traceback == NOT_STARTED.rstrip()


def test_the_traceback_is_whole_and_without_the_agents() -> None:
    text = examine(CHAINED + AGENT.format(code=1)).traceback
    assert "KeyError: 'k'" in text
    assert text.endswith("ValueError: bad")
    assert "ChildFailedError" not in text


def test_a_message_of_several_lines_is_kept() -> None:
    text = examine(SCRIPT + "second line\n" + AGENT.format(code=1)).traceback
    assert text.endswith("ValueError: bad\nsecond line")


LOOP = "/v/site-packages/lightning/pytorch/x.py"


def trace(*frames: str) -> str:
    """A traceback of an error in the innermost of these frames."""
    lines = "".join(f'  File "{frame}", line 7, in step\n    x()\n' for frame in frames)
    return f"Traceback (most recent call last):\n{lines}ValueError: bad\n" + AGENT.format(code=1)


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (["train.py", "/v/site-packages/lightning/pytorch/loops/fit.py", "model.py"], "model.py:7 (step)"),
        (["train.py", LOOP, "data.py", "/v/site-packages/pandas/y.py"], "data.py:7 (step)"),
        (["train.py", LOOP, "/v/site-packages/torch/autograd/graph.py"], ""),
        (["train.py", "/v/site-packages/pytorch_lightning/x.py", "/src/lightning_dlrover/strategy.py"], ""),
        (["train.py", "/usr/lib/python3.11/json/decoder.py"], "train.py:7 (step)"),
        (["/v/site-packages/torch/x.py"], ""),
    ],
)
def test_place_of_an_error_is_the_innermost_frame_of_the_script(frames: list[str], place: str) -> None:
    assert examine(trace(*frames)).place == place


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (
            "/usr/bin/python: Error while finding module specification for 'lightning_dlrover.components.node' "
            "(ModuleNotFoundError: No module named 'lightning_dlrover')\n",
            "its Python has no package lightning_dlrover: ",
        ),
        ("/usr/bin/python: No module named lightning_dlrover\n", "its Python has no package lightning_dlrover: "),
        ("Kubernetes: its command could not start: no such file\n", "its command could not start: no such file"),
    ],
)
def test_command_that_never_ran_is_an_error_of_its_own(output: str, error: str) -> None:
    found = examine(output)
    assert found.could_not_start
    assert found.error.startswith(error)
