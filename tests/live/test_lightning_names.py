"""The private names of Lightning that a live fit depends on exist in the installed release, and only `live/` uses them."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_dlrover
from lightning_dlrover.lightning_compat import PACKAGES, default_package, submodule
from lightning_dlrover.live import private_api
from lightning_dlrover.live.private_api import NAMES, later_names
from lightning_dlrover.private_names import MissingNamesError, missing_names


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Import both packages: their releases are asked for, and other test files may not have done it."""
    for package in PACKAGES:
        importlib.import_module(package)


INSTANCES: dict[str, str] = {
    "trainer.trainer:Trainer": "trainer",
    "trainer.setup": "trainer",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector": "trainer._accelerator_connector",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector": "trainer._checkpoint_connector",
    "trainer.connectors.logger_connector.logger_connector:_LoggerConnector": "trainer._logger_connector",
    "loops.training_epoch_loop:_TrainingEpochLoop": "trainer.fit_loop.epoch_loop",
    "loops.optimization.automatic:_AutomaticOptimization": "trainer.fit_loop.epoch_loop.automatic_optimization",
    "loops.optimization.manual:_ManualOptimization": "trainer.fit_loop.epoch_loop.manual_optimization",
    "loops.evaluation_loop:_EvaluationLoop": "trainer.fit_loop.epoch_loop.val_loop",
    "loops.fetchers:_DataFetcher": "loops.fetchers._PrefetchDataFetcher()",
    "utilities.combined_loader:CombinedLoader": "trainer.fit_loop._combined_loader",
    "core:LightningModule": "trainer.lightning_module",
    "callbacks:ModelCheckpoint": "callbacks.ModelCheckpoint()",
    "callbacks:StochasticWeightAveraging": "callbacks.StochasticWeightAveraging(0.1)",
    "callbacks:WeightAveraging": "callbacks.WeightAveraging()",
    "callbacks:BackboneFinetuning": "callbacks.BackboneFinetuning()",
    "callbacks:Timer": "callbacks.Timer()",
    "callbacks:LearningRateFinder": "callbacks.LearningRateFinder()",
    "tuner.lr_finder:_LRFinder": 'tuner.lr_finder._LRFinder("linear", 0.1, 1.0, 1)',
    "plugins.io:AsyncCheckpointIO": "plugins.io.AsyncCheckpointIO()",
    "loggers:CSVLogger": 'loggers.CSVLogger("logs")',
    "loggers:TensorBoardLogger": 'loggers.TensorBoardLogger("logs")',
}
"""Objects with the names of a class: parts of a Trainer after a fit, and objects made anew."""

LISTED = {name for found in NAMES.values() for name in found} | {holder.partition(":")[2] for holder in NAMES}

OF_OTHERS = {
    *("_persistent_workers", "_pin_memory_thread_done_event", "_shutdown", "_shutdown_workers", "_worker_result_queue"),
    *("_index_queues", "_prefetch_factor", "_try_put_index", "_worker_info", "_workers_status"),
    *("_buffers", "_foreach_copy_", "_sync"),
    *("_C", "_apply", "_check_reducer_finalized", "_execution_engine", "_get_iterator", "_iterator", "_parameters"),
    *("_pytree", "_set_params_and_buffers_to_ignore_for_model", "_sync_buffers", "_current_graph_task_id"),
    *("_mark_worker_as_unavailable", "_remove_worker_pids", "_worker_pids_set", "_workers", "_workers_done_event"),
    *("_computed", "_num_samples", "_defaults", "_forward_cache", "_reductions", "_update_count"),
    *(
        "_SubParsersAction",
        "_actions",
        "_choices_actions",
        "_current_frames",
        "_exit",
        "_getframe",
        "_new_shared",
        "_run_module_as_main",
    ),
    *("_embedding_bag_backward", "_local_scalar_dense", "_sparse_coo_tensor_with_dims_and_tensors", "_unique2"),
    *("_dlrover_agreed", "_dlrover_drops", "_dlrover_step"),
    "_sync",  # a key in the saved state of a logged value
}
"""Names of torch, torchmetrics and Python, and attributes that we set on objects of theirs."""


class Parabola:
    """The hooks of a module that a fit needs. The class for each package is derived from it and the package's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.weight * batch).square().sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], 0.1)


@cache
def fitted(package: str) -> Any:
    """Return a Trainer that has trained for a step and validated by its clock."""
    root: Any = submodule(package, "trainer")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = root.Trainer(
        accelerator="cpu",
        max_steps=1,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        val_check_interval="00:00:01:00" if not later_names(package) else 1,
        check_val_every_n_epoch=None,
        barebones=False,
        **quiet,
    )
    module: Any = type("Module", (Parabola, submodule(package, "core").LightningModule), {})()
    samples: Any = torch.ones(2, 1)
    trainer.fit(module, DataLoader(samples), DataLoader(samples))
    return trainer


def holder_of(package: str, path: str) -> Any:
    if path == "trainer" or path.startswith(("trainer.fit_loop", "trainer._", "trainer.lightning_module")):
        return eval(path, {"trainer": fitted(package)})
    if "(" not in path:
        return submodule(package, path)
    home, _, made = path.partition("(")
    module, _, kind = home.rpartition(".")
    return eval(f"{kind}({made}", vars(submodule(package, module)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("holder", INSTANCES)
def test_private_names_exist(package: str, holder: str) -> None:
    later = later_names(package)
    needed = [name for name in NAMES[holder] if f"{holder}.{name}" not in later]
    if needed and holder not in later:
        instance = holder_of(package, INSTANCES[holder])
        assert [name for name in needed if not hasattr(instance, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_private_names_in_source_exist(package: str) -> None:
    assert missing_names(NAMES, package, later_names(package)) == []


def test_missing_names_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    fit_loop = submodule(PACKAGES[0], "loops.fit_loop")
    monkeypatch.delattr(fit_loop._FitLoop, "_should_accumulate")
    monkeypatch.delattr(fit_loop, "_select_data_fetcher")
    monkeypatch.setitem(NAMES, "loops.fit_loop", ("_select_data_fetcher",))
    private_api.check.cache_clear()
    with pytest.raises(MissingNamesError) as refused:
        private_api.check(PACKAGES[0])
    private_api.check.cache_clear()
    release = importlib.metadata.version("lightning")
    assert str(refused.value).startswith(
        f"lightning {release} lacks lightning.pytorch.loops.fit_loop._FitLoop._should_accumulate, "
        "lightning.pytorch.loops.fit_loop._select_data_fetcher, which lightning-dlrover"
    )


@pytest.mark.parametrize("installed", ["2.5.6", "2.6.6"])
def test_names_of_later_features_are_needed_since_their_release(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = PACKAGES[0]
    monkeypatch.setattr(importlib.import_module("lightning.pytorch"), "__version__", installed)
    monkeypatch.delattr(submodule(package, "callbacks"), "WeightAveraging", raising=False)
    private_api.check.cache_clear()
    try:
        if installed.startswith("2.5"):
            private_api.check(package)
        else:
            with pytest.raises(MissingNamesError, match=r"callbacks\.WeightAveraging"):
                private_api.check(package)
    finally:
        private_api.check.cache_clear()


def test_strategy_refuses_a_release_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(submodule(default_package(), "loops.fit_loop")._FitLoop, "_should_accumulate")
    private_api.check.cache_clear()
    with pytest.raises(MissingNamesError, match="_should_accumulate"):
        lightning_dlrover.DLRoverStrategy()
    private_api.check.cache_clear()


# --- the files that use them --------------------------------------------------------------------------------------------------


def is_named(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private attributes, except those of `self`, and private names that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = is_named(node.value, "self", "cls")
            is_inherited = isinstance(node.value, ast.Call) and is_named(node.value.func, "super")
            if node.attr.startswith("_") and not node.attr.startswith("__") and not is_own and not is_inherited:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("lightning.", "pytorch_lightning")):
            yield from (each.name for each in node.names if each.name.startswith("_"))


def private_texts(tree: ast.AST) -> set[str]:
    """Private names as texts, as `getattr` takes them."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if text.startswith("_") and not text.startswith("__") and text.isidentifier()}


def own_names(tree: ast.AST) -> set[str]:
    """Private functions, classes, and attributes that a file of ours defines or sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_named(node.value, "self"):
            found.add(node.attr)
    return found


def test_private_names_of_lightning_are_used_in_live_alone_and_are_all_in_the_list() -> None:
    listed = {name for name in LISTED if name.startswith("_")}
    package = Path(lightning_dlrover.__path__[0])
    trees = {file: ast.parse(file.read_text()) for file in sorted(package.rglob("*.py"))}
    own = {name for tree in trees.values() for name in own_names(tree)}
    for file, tree in trees.items():
        room = file.relative_to(package).parts[0]
        # The rendezvous and the nodes cannot import Lightning. The tables have torchrec's private names, in two files.
        if room in ("components", "rdzv", "tables"):
            continue
        used = {*private_names(tree)}
        if room == "live":  # the strategy checks the list before a fit begins
            assert used - own - OF_OTHERS <= LISTED, file
            if file.name in ("lightning_adapter.py", "private_api.py"):
                assert used | private_texts(tree) <= LISTED | OF_OTHERS
            continue
        assert not (used - own - OF_OTHERS), file
        assert not (used & listed), file
        assert not (private_texts(tree) & listed - {"_version", "_id", "_experiment_key"}), file
