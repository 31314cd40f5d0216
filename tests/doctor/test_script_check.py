"""Scripts are run up to their first batch: each part that a job does not support is named, and nothing is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_dlrover.checks import check_arguments
from lightning_dlrover.cli.main import main
from lightning_dlrover.doctor.dry_run import Notes, note_problem
from lightning_dlrover.doctor.report import check_script
from lightning_dlrover.output import Finding
from lightning_dlrover.rdzv.job.folders import name_of_job, short, users_folder
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX, Keys
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

MODEL = """
    import sys
    import torch
    import lightning as L
    from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
    from lightning_dlrover import DLRoverCallback, DLRoverStrategy

    class Model(L.LightningModule):
        def __init__(self, width: int = 1):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(4, width)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val", self.layer(batch[0]).mean())

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            steps = int(self.trainer.estimated_stepping_batches)
            assert steps == 20, steps
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

    samples = TensorDataset(torch.randn(100, 4))
"""

GOOD = """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    assert sys.argv[1:] == ["--epochs", "2"], sys.argv
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),
        callbacks=[DLRoverCallback(), ModelCheckpoint("checkpoints", every_n_train_steps=1, save_last=True)],
        logger=CSVLogger("logs"),
        accelerator="cpu",
        max_epochs=2,
    )
    trainer.fit(Model(), DataLoader(samples, 10, shuffle=True), DataLoader(samples, 10))
    open("after-fit", "w")
"""

BAD = """
    class Batches(IterableDataset):
        def __iter__(self):
            return iter(DataLoader(samples, 10))

    class OfThisRank(Sampler):
        rank, num_replicas = 0, 2

        def __len__(self):
            return 50

        def __iter__(self):
            return iter(range(50))

    class Few:
        def __len__(self):
            return 1

        def __iter__(self):
            return iter([[torch.zeros(2, 4)]])

    class Unloadable:
        def __reduce__(self):
            return (int, ("no number",))

        def __deepcopy__(self, memo):
            return self

    class Bad(Model):
        def __init__(self, sizes=Unloadable()):
            super().__init__()
            self.save_hyperparameters("sizes")
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.layer(batch[0]).square().mean().backward()
            self.optimizers().step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["f"] = lambda: 1

    trainer = L.Trainer(strategy="ddp", devices=4, accelerator="cpu", max_epochs=2)
    trainer.fit(Bad(), DataLoader(Batches(), None), [DataLoader(samples, 10, sampler=OfThisRank()), Few()])
"""


WITH_AN_ITERATOR = """
    import torch
    import pytorch_lightning as pl
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    class Own(BatchSampler):
        pass

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)

    samples = TensorDataset(torch.randn(100, 4))
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2)
    trainer.fit(Model(), DataLoader(samples, batch_sampler=Own(SequentialSampler(samples), 10, False)))
"""


def script(folder: Path, *parts: str) -> Path:
    file = folder / "train.py"
    file.write_text("".join(map(textwrap.dedent, parts)))
    return file


def named(findings: list[Finding], check: str, text: str) -> Finding:
    """The finding about a part of the script with a text."""
    found = [each for each in findings if each.check == check and text in each.text]
    assert found, (check, text, findings)
    return found[0]


RELATIVE = "    from .sizes import BATCH\n    assert BATCH == 10\n"


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_supported_script_and_machine_have_no_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_module: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DLROVER_ENDPOINT", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    arguments = ["train.py"]
    if is_module:
        (tmp_path / "package").mkdir()
        script(tmp_path / "package", RELATIVE, MODEL, GOOD)
        (tmp_path / "package" / "sizes.py").write_text("BATCH = 10\n")
        arguments = ["-m", "package.train"]
    else:
        script(tmp_path, MODEL, GOOD)
    code = main(["doctor", "--json", *arguments, "--", "--epochs", "2"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["errors"]) == (0, 0), found
    by_check = {each["check"]: each for each in found["findings"]}
    of_script = ("script", "strategy", "callback", "training data", "validation data", "model", "imports", "packages", "etcd")
    assert [by_check[check]["verdict"] for check in of_script] == ["ok"] * len(of_script), found
    assert by_check["training data"]["text"] == "100 samples in batches of 10, RandomSampler, 0 loader workers"
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == (["sizes.py"] * is_module + ["train.py"])


def test_unsupported_parts_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("DLROVER_RUN_ID", "another job")
    findings = check_script(script(tmp_path, MODEL, BAD), deadline_s=90.0)
    assert named(findings, "script", "has trained its first batch").verdict == "ok"
    for check, text, move in (
        ("strategy", "Trainer(strategy='ddp') is not DLRoverStrategy", "strategy=DLRoverStrategy()"),
        ("training data", "takes whole batches from Batches", "give it a batch_size"),
        ("validation data", "sampler OfThisRank gives every worker samples of its own", "give the DataLoader a sampler"),
        ("validation data", "holds a __main__.Few", "map-style dataset"),
        ("training_step", "follows loss.backward()", "self.manual_backward(loss)"),
        ("hyperparameters", "'sizes' of Bad cannot be saved and loaded", "ignore=['sizes']"),
    ):
        found = named(findings, check, text)
        assert found.verdict == "error"
        assert move in found.next_move
    for check, text, move in (
        ("trainer", "Trainer(devices=4, num_nodes=1) has no effect", "dlrover run --workers"),
        ("callback", "without DLRoverCallback", "callbacks=[DLRoverCallback()"),
        ("script", "no worker can join", "keep it as tensors"),
    ):
        found = named(findings, check, text)
        assert found.verdict == "warning"
        assert move in found.next_move
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_refusals_of_another_package_s_trainer_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    findings = check_script(script(tmp_path, WITH_AN_ITERATOR), deadline_s=90.0)
    for check, text, move in (
        ("strategy", "Trainer(strategy='auto') is not DLRoverStrategy", "strategy=DLRoverStrategy()"),
        ("training data", "batch_sampler Own decides which samples form a batch", "give the DataLoader a batch_size"),
        ("training_step", "dataloader_iter) fetches its batches itself", "training_step(self, batch, batch_idx)"),
        ("optimizers", "ZeroRedundancyOptimizer spreads its state", "Use the wrapped optimizer"),
    ):
        found = named(findings, check, text)
        assert found.verdict == "error"
        assert move in found.next_move


TABLES = """
    import torch
    import lightning as L
    from torch.utils.data import DataLoader
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from lightning_dlrover import DLRoverStrategy, SnapshotConfig

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=1000, feature_names=["f"])
            self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, ids, batch_idx):
            batch = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))
            return self.layer(self.tables(batch).values()).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    strategy = DLRoverStrategy(snapshots=SnapshotConfig(disk=None))
    L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1).fit(Model(), DataLoader(list(range(64)), 8))
"""


def test_sharded_tables_leave_no_snapshot(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="sharded tables need torchrec")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TABLES))
    folders = f"{short(name_of_job(Keys('doctor', DEFAULT_PREFIX)))}-*"
    before = set(users_folder().glob(folders))
    found = check_script(script)
    assert [finding.text for finding in found if finding.check == "strategy"] == ["DLRoverStrategy"], found
    assert set(users_folder().glob(folders)) == before


def test_refused_argument_is_distinguished_from_an_error_of_the_script(tmp_path: Path) -> None:
    def note(raise_it: Callable[[], object]) -> dict[str, Any]:
        file = tmp_path / f"{raise_it.__name__}.jsonl"
        try:
            raise_it()
        except Exception as problem:
            note_problem(Notes(file), __file__, problem)
        last: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])["end"]
        return last

    def refused() -> None:
        check_arguments(0, 0.1, timedelta(1), None, None, None, True, True, 60.0, None, "equal", "end")

    def wrong() -> None:
        raise ValueError("no data")

    assert note(refused) == {"how": "refused", "text": "ValueError: global_batch_size is 0, it must be at least 1"}
    assert note(wrong)["how"] == "raised"
    assert note(wrong)["text"].startswith(f"{Path(__file__).name}:")


def test_plain_loop_ends_after_its_first_step_and_names_the_state_of_joiners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = """
        import torch
        from lightning_dlrover.rdzv import World

        model = torch.nn.Linear(2, 1)
        with World.from_environment() as world:
            for step in world.steps(5, model=model):
                with step:
                    open(f"step-{step.number}", "w")
        open("after-loop", "w")
    """
    findings = check_script(script(tmp_path, lines), deadline_s=60.0)
    assert [finding.verdict for finding in findings] == ["ok", "ok"]
    assert findings[0].text.startswith("train.py has trained its first batch after ")
    assert findings[1].text == "5 steps of World; joiners receive model"
    assert sorted(file.name for file in tmp_path.glob("*-*")) == ["step-0"]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("print(1)", "train.py has ended and never called fit, nor made a Trainer"),
        ("import sys\nsys.exit('usage: train.py DATA')", "train.py exited with code usage: train.py DATA"),
        ("def load():\n    raise KeyError('data')\nload()", "train.py:2: KeyError: 'data'"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
    ],
)
def test_script_that_never_trains_is_named(tmp_path: Path, lines: str, text: str) -> None:
    [found] = check_script(script(tmp_path, lines), deadline_s=60.0)
    assert found.verdict == "error"
    assert text in found.text
    assert "its arguments follow `--`" in found.next_move


def test_script_that_does_not_end_is_named_with_its_place(tmp_path: Path) -> None:
    lines = "import subprocess, time\nchild = subprocess.Popen(['sleep', '99'])\ndef wait():\n    time.sleep(99)\nwait()"
    [found] = check_script(script(tmp_path, lines), deadline_s=4.0)
    assert found.text == "train.py has not trained a batch within 4 s; it was at train.py:4, in wait"
    assert "--timeout" in found.next_move


def test_wrong_use_ends_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DLROVER_ENDPOINT", raising=False)
    assert main(["doctor", "nowhere.py"]) == 2
    assert main(["doctor", "--endpoint", "no-port"]) == 2
    assert main(["doctor", "--user", "me"]) == 2
    assert "nowhere.py" in capsys.readouterr().err


def test_interrupted_doctor_leaves_nothing_behind(tmp_path: Path) -> None:
    for name in ("modules", "tmp", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "modules/torch.py").write_text("raise ImportError('a quick one')")
    began = tmp_path / "work/began"
    lines = f"import os, pathlib, time\npathlib.Path({str(began)!r}).write_text(str(os.getpid()))\ntime.sleep(99)"
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(tmp_path / "modules")}
    command = [sys.executable, "-m", "lightning_dlrover.cli", "doctor", str(script(tmp_path / "work", lines))]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as doctor:
        pid = eventually(lambda: began.exists() and began.read_text(), "the script's start")
        inside = [child.pid for child in psutil.Process(doctor.pid).children(recursive=True)]
        doctor.terminate()
        assert doctor.wait(30) == 128 + signal.SIGTERM
    assert int(str(pid)) in inside
    assert [each for each in inside if psutil.pid_exists(each)] == []
    assert list((tmp_path / "tmp").iterdir()) == []
