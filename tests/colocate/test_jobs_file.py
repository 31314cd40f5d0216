from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lightning_dlrover.colocate.journal import JobsFileError, JobSpec, read_jobs


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    return path


def test_text_and_list_are_the_same_command(tmp_path: Path) -> None:
    path = written(tmp_path, 'jobs:\n- command: python "my train.py" --lr 0.1\n- command: [python, my train.py, --lr, 0.1]\n')
    first, second = read_jobs(path)
    assert first.command == second.command == ("python", "my train.py", "--lr", "0.1")
    assert first.kind == second.kind
    assert (first.name, second.name) == ("job-1", "job-2")
    assert first.folder == str(tmp_path)


def test_copies_have_names_of_their_own_and_one_kind(tmp_path: Path) -> None:
    specs = read_jobs(written(tmp_path, "jobs:\n- {name: a, command: x, copies: 3, memory: 1.5G, priority: 2, env: {A: 1}}\n"))
    assert [spec.name for spec in specs] == ["a-1", "a-2", "a-3"]
    assert {spec.kind for spec in specs} == {specs[0].kind}
    assert {(spec.memory_bytes, spec.priority, spec.env["A"]) for spec in specs} == {(3 << 29, 2, "1")}


def test_jobs_of_a_declared_kind_are_of_one_kind(tmp_path: Path) -> None:
    text = "- {command: a --lr 1, kind: sweep}\n- {command: b, kind: sweep}\n- {command: b, kind: other}\n"
    first, second, other = read_jobs(written(tmp_path, f"jobs:\n{text}"))
    assert first.kind == second.kind
    assert first.kind != other.kind


@pytest.mark.parametrize(
    ("first", "second", "are_kin"),
    [
        ("python train.py --lr 0.1", "python train.py --lr 0.2", True),
        ("dlrover run --workers 2 train.py a", "dlrover run --workers 2 train.py b", True),
        ("python -m train.ctr --lr 0.1", "python -m train.ctr", True),
        ("./train --size 1", "./train --size 2", True),
        ("python train.py", "python other.py", False),
        ("python -m one", "python -m other", False),
        ("bash -c 'python one.py'", "bash -c 'python other.py'", False),
        ("python -c 'print(1)'", "python -c 'print(2)'", False),
    ],
)
def test_jobs_with_one_script_are_kin(first: str, second: str, are_kin: bool) -> None:
    specs = [JobSpec("job", tuple(shlex.split(command)), "/") for command in (first, second)]
    assert specs[0].kind != specs[1].kind
    assert (specs[0].kin == specs[1].kin != "") == are_kin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no jobs"),
        ("jobs: {a: 1}", "has no jobs"),
        ("jobs: [1]", "job 1 is 1, not a list of fields"),
        ("jobs:\n- {command: x, comand: y}", "unknown: comand; the fields are name, command"),
        ("jobs:\n- {name: a}", "command None is neither a text nor a list"),
        ("jobs:\n- {command: ''}", "command is empty"),
        ("jobs:\n- {command: 'a \"b'}", "No closing quotation"),
        ("jobs:\n- {command: x, folder: nowhere}", "nowhere does not exist"),
        ("jobs:\n- {command: x, memory: much}", "memory 'much' is not a size"),
        ("jobs:\n- {command: x, memory: 999999999T}", "memory 999999999T is more than 64T"),
        ("jobs:\n- {command: x, memory: 0M}", "memory '0M' is not a size"),
        ("jobs:\n- {command: x, priority: high}", "priority 'high' is not a whole number"),
        ("jobs:\n- {command: x, copies: 0}", "copies 0 is not between"),
        ("jobs:\n- {command: x, device: tpu}", "device 'tpu' is none of"),
        ("jobs:\n- {command: x, name: ../up}", "name '../up'"),
        ("jobs:\n- {command: x, name: 7}", "name 7 is not a text"),
        ("jobs:\n- {command: x, kind: 7}", "kind 7 is not a text"),
        ("jobs:\n- {command: x, kind: ''}", "kind '' is not a text"),
        ("jobs:\n- {command: x, kind: a/b}", "kind 'a/b': up to 100 letters"),
        ("jobs:\n- {command: x, gpu_memory: 3}", "gpu_memory 3 is not a size"),
        ("jobs:\n- {command: x, env: {A=B: 1}}", "env has the name 'A=B'"),
        ("jobs:\n- {command: x, env: {CUDA_VISIBLE_DEVICES: 0}}", "env has CUDA_VISIBLE_DEVICES, which the queue sets"),
        ("jobs:\n- {command: x, device: cpu, gpu_memory: 1G}", "it has gpu_memory, and device cpu"),
        ("jobs:\n- {command: x, env: [a]}", "env ['a'] is not"),
        ("jobs:\n- {command: x, name: a}\n- {command: y, name: a}", "two jobs have the name 'a'"),
        ("jobs: [", "is not YAML"),
        ("jobs:\n- {command: x}\nother: 1", "unknown: other; the file has only the field `jobs`"),
    ],
)
def test_wrong_file_is_refused_with_the_cause(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(JobsFileError) as refused:
        read_jobs(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobsFileError, match=r"none\.yaml cannot be read"):
        read_jobs(tmp_path / "none.yaml")
