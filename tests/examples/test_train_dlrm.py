from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ctr_data
import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import train_dlrm
from criteo_to_parquet import Layout, convert, write_generated
from ctr_data import ClickData, collate, load
from ctr_parquet import ClickStreams, load_streams
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader

from lightning_dlrover.tables.sharded import ShardedTables
from lightning_dlrover.tables.torchrec_adapter import check_torchrec
from tests.support.quiet_trainer import quiet_trainer
from tests.support.warm_process import run_warm

torchrec = pytest.importorskip("torchrec")

SCRIPT = Path(train_dlrm.__file__)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
SMALL = ("--accelerator=cpu", "--batch-size=64", "--width=32", "--embedding-dim=8", "--loader-workers=0")


@pytest.fixture
def generated() -> ClickData:
    return load(None, seed=1, rows=10_000)


@pytest.fixture
def one_worker() -> Iterator[None]:
    """A process group of this process alone, which torchrec needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def built(data: ClickData | ClickStreams) -> L.LightningModule:
    """Model with its tables on this process, without a strategy."""
    from dlrm_model import DLRM

    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    model = DLRM(data.cardinalities, data.num_numbers, width=32, embedding_dim=8)
    tables = ShardedTables(model, torch.device("cpu"))
    tables.build(tables.first_plan(["worker"]), ["worker"])
    tables.initialise(seed=1)
    return model


def fit(data: ClickData | ClickStreams, model: L.LightningModule, epochs: int = 1, max_steps: int = -1) -> L.Trainer:
    trainer = quiet_trainer(max_epochs=epochs, max_steps=max_steps)
    is_streams = isinstance(data, ClickStreams)
    collate_fn = data.collate if isinstance(data, ClickStreams) else collate
    loaders: list[DataLoader[Any]] = [DataLoader(rows, 256, collate_fn=collate_fn) for rows in (data.val, data.test)]
    trainer.fit(model, DataLoader(data.train, 256, shuffle=not is_streams, collate_fn=collate_fn), loaders)
    return trainer


def logits_of(model: L.LightningModule, rows: ctr_data.ClickRows) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(rows.numbers, rows.categories)
    return logits


@pytest.mark.usefixtures("one_worker")
def test_every_category_reads_its_own_table(generated: ClickData) -> None:
    model = built(generated)
    numbers, categories = generated.val.numbers[:5], generated.val.categories[:5]
    tables = {name.split(".")[-2]: table for name, table in model.state_dict().items() if name.startswith("ebc.")}
    whole = {name: table.local_shards()[0].tensor for name, table in tables.items()}
    bottom_of: Any = model.bottom
    top_of: Any = model.top
    for row in range(5):
        bottom = bottom_of(numbers[row])
        vectors = [bottom, *(whole[f"category{i}"][c] for i, c in enumerate(categories[row]))]
        dots = [vectors[i] @ vectors[j] for i in range(27) for j in range(i + 1, 27)]
        expected = top_of(torch.cat([bottom, torch.stack(dots)]))
        torch.testing.assert_close(model(numbers, categories)[row], expected.squeeze(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_worker")
def test_the_logged_figures_are_those_of_the_whole_sets(generated: ClickData) -> None:
    model = built(generated)
    trainer = fit(generated, model)
    for name, rows in (("val_auc", generated.val), ("test_auc", generated.test)):
        expected = roc_auc_score(rows.labels, logits_of(model, rows))
        assert float(trainer.callback_metrics[name]) == pytest.approx(expected, abs=1e-4)
    assert "train_loss" in trainer.callback_metrics


@pytest.mark.usefixtures("one_worker")
def test_training_changes_tables_and_dense_parameters_and_beats_guessing(generated: ClickData) -> None:
    model = built(generated)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = fit(generated, model, epochs=2)
    unchanged = [name for name, parameter in model.named_parameters() if torch.equal(parameter.detach(), before[name])]
    assert unchanged == []
    assert float(trainer.callback_metrics["test_auc"]) > 0.65


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("max_steps", [5, 32, 40])  # within, at the end of, and beyond the first epoch
def test_the_last_step_is_followed_by_a_measurement_wherever_it_is(generated: ClickData, max_steps: int) -> None:
    model = built(generated)
    trainer = fit(generated, model, epochs=3, max_steps=max_steps)
    assert trainer.global_step == max_steps
    expected = roc_auc_score(generated.test.labels, logits_of(model, generated.test))
    assert float(trainer.callback_metrics["test_auc"]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("one_worker")
def test_training_from_parquet_reaches_the_auc_of_the_rows_in_memory(generated: ClickData, tmp_path: Path) -> None:
    write_generated(10_000, seed=1, output=tmp_path / "folder", layout=Layout(3000, 1000))
    reached = []
    for data in (generated, load_streams(tmp_path / "folder", shuffle_rows=10_000)):
        trainer = fit(data, built(data), epochs=2)
        reached.append(float(trainer.callback_metrics["test_auc"]))
    # Both train on the same rows in different orders. The test set has 1,000 rows.
    assert reached[1] == pytest.approx(reached[0], abs=0.03)


# --- the script ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    """1,000 rows in Criteo's format; the first category decides the label."""
    chosen = np.random.default_rng(0).integers(0, 50, 1000)
    rows = ["\t".join([str(int(n > 25)), *["1"] * 13, f"{n:08x}", *["0000000a"] * 25]) for n in chosen]
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join(rows) + "\n")
    return path


def run(*command: str, cwd: Path, is_warm: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(cwd / ".cache")}
    if is_warm:
        return run_warm(command, environment, cwd, 150)
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=150, check=False, env=environment, cwd=cwd
    )


def test_plain_python_trains_as_one_worker_and_writes_its_metrics(clicks: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    done = run(str(SCRIPT), *SMALL, "--epochs=8", f"--data={clicks}", f"--output={output}", cwd=tmp_path, is_warm=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((output / "metrics.json").read_text())
    assert json.loads(done.stdout.strip().splitlines()[-1]) == metrics
    assert metrics["test_auc"] > 0.95  # only the tables can have learned this
    assert (metrics["rows"], metrics["steps"], metrics["best_auc"]) == (100, 8 * 13, None)
    assert str(clicks) in done.stdout  # names the loaded file


@pytest.mark.usefixtures("fork_server")
def test_parquet_folder_is_trained_and_measured_like_its_tsv(clicks: Path, tmp_path: Path) -> None:
    convert([clicks], tmp_path / "folder", Layout(300, 100))
    done = run(str(SCRIPT), *SMALL, "--epochs=8", f"--data={tmp_path / 'folder'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout.strip().splitlines()[-1])
    assert metrics["test_auc"] > 0.95
    assert (metrics["data"], metrics["rows"], metrics["steps"], metrics["best_auc"]) == ("folder", 100, 8 * 13, None)
    assert f"using 1,000 rows of {tmp_path / 'folder'} (clicks.tsv): 800 to train, the newest 100 to test" in done.stdout


@pytest.mark.on_demand
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("kind", ["tsv", "parquet"])
def test_two_workers_measure_the_same_as_one(clicks: Path, tmp_path: Path, kind: str) -> None:
    data = clicks
    if kind == "parquet":
        data = tmp_path / "folder"
        convert([clicks], data, Layout(300, 100))
    metrics = []
    # The batch size is per initial worker, so both train on the same global batches.
    for workers, batch_size in ((1, 64), (2, 32)):
        output = tmp_path / str(workers)
        done = run(
            *("-m", "lightning_dlrover.cli", "run", f"--workers={workers}:{workers}", f"--run-dir={tmp_path / 'runs'}"),
            *(f"--rdzv-id=dlrm-{workers}", str(SCRIPT), *SMALL, f"--batch-size={batch_size}", "--epochs=4"),
            *(f"--data={data}", f"--output={output}"),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        metrics.append(json.loads((output / "metrics.json").read_text()))
    one, two = metrics
    assert two["test_auc"] == pytest.approx(one["test_auc"], abs=0.002)
    assert two["steps"] == one["steps"] == 4 * 13


@pytest.mark.usefixtures("fork_server")
def test_missing_data_means_generated_rows_with_their_best_auc(tmp_path: Path) -> None:
    done = run(str(SCRIPT), *SMALL, "--rows=1000", "--max-steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "generating 1,000 rows in Criteo's schema" in done.stdout
    metrics = json.loads(done.stdout.strip().splitlines()[-1])
    assert (metrics["data"], metrics["rows"], metrics["steps"]) == ("generated", 100, 2)
    assert 0.5 < metrics["best_auc"] < 1.0


def test_without_torchrec_the_script_ends_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)  # simulates a missing package
    check_torchrec.cache_clear()  # another test has found it
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py"])
    assert train_dlrm.main() == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("train_dlrm: sharded embedding tables need torchrec")
    assert "pip install" in line


@pytest.mark.usefixtures("fork_server")
def test_until_ends_training_with_a_measurement(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    done = run(str(SCRIPT), *SMALL, f"--data={clicks}", f"--until={tmp_path / 'enough'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout.strip().splitlines()[-1])
    assert metrics["steps"] == 1
    assert 0.0 <= metrics["test_auc"] <= 1.0


def test_damaged_parquet_folder_ends_the_script_with_one_line_and_code_2(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    convert([clicks], tmp_path / "folder", Layout(300, 100))
    next((tmp_path / "folder" / "train").iterdir()).unlink()
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py", "--data", str(tmp_path / "folder")])
    assert train_dlrm.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train_dlrm: {tmp_path / 'folder' / 'train'} holds")
    assert line.endswith("write the folder again with examples/criteo_to_parquet.py")


def test_broken_data_ends_the_script_with_one_line_and_code_2(
    clicks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks.write_text(clicks.read_text() + "broken\n")
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py", "--data", str(clicks)])
    assert train_dlrm.main() == 2
    assert capsys.readouterr().err == (
        f"train_dlrm: {clicks}, line 1001: 1 columns, expected 40 separated by tabs, in 'broken'; "
        "correct or delete the line, or give another --data\n"
    )
