"""The private names of Lightning that a live fit depends on exist in the installed release, and one file uses them."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_dlrover
from lightning_dlrover.live import lightning_names
from lightning_dlrover.packages import PACKAGES, submodule

NAMES: dict[str, tuple[str, ...]] = {
    "trainer": (
        *("_accelerator_connector", "_checkpoint_connector", "_last_val_time", "_logger_connector", "_results"),
        "_val_check_time_interval",
    ),
    "trainer._accelerator_connector": ("_devices_flag", "use_distributed_sampler"),
    "trainer._checkpoint_connector": ("_loaded_checkpoint",),
    "trainer._logger_connector": ("_callback_metrics", "_first_loop_iter", "_logged_metrics", "_progress_bar_metrics"),
    "trainer.fit_loop": (
        *("_can_stop_early", "_combined_loader", "_data_fetcher", "_last_train_dl_reload_epoch", "_should_accumulate"),
        *("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"),
    ),
    "trainer.fit_loop._combined_loader": ("_mode", "_spec"),
    "loops.fetchers._PrefetchDataFetcher()": ("_start_profiler", "_stop_profiler"),
    "trainer.fit_loop.epoch_loop": (
        *("_build_kwargs", "_results", "_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"),
        *("_should_check_val_fx", "_broadcast_sigterm_tensor"),
    ),
    "trainer.fit_loop.epoch_loop.automatic_optimization": (
        *("_make_closure", "_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"),
    ),
    "trainer.fit_loop.epoch_loop.manual_optimization": (
        *("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"),
    ),
    "trainer.fit_loop.epoch_loop.val_loop": (
        *("_combined_loader", "_data_fetcher", "_is_sequential", "_last_val_dl_reload_epoch", "_logged_outputs"),
        *("_evaluation_step", "_module_mode", "_results", "_store_dataloader_outputs"),
        *("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"),
    ),
    "trainer.lightning_module": ("_on_before_batch_transfer", "_param_requires_grad_state"),
    "callbacks.ModelCheckpoint()": (
        *("_every_n_train_steps", "_last_checkpoint_saved", "_last_global_step_saved", "_last_time_checked"),
        *("_defer_save_until_validation", "_monitor_candidates", "_train_time_interval"),
    ),
    "callbacks.StochasticWeightAveraging(0.1)": ("n_averaged",),
    "callbacks.WeightAveraging()": ("_latest_update_epoch",),
    "callbacks.BackboneFinetuning()": ("_restarting",),
    "callbacks.Timer()": ("_start_time",),
    "callbacks.LearningRateFinder()": (
        *("_attr_name", "_early_exit", "_max_lr", "_min_lr", "_mode", "_num_training_steps", "_update_attr"),
    ),
    "tuner.lr_finder": ("_LRFinder", "_determine_lr_attr_name"),
    'tuner.lr_finder._LRFinder("linear", 0.1, 1.0, 1)': ("_total_batch_idx",),
    "utilities.exceptions": ("_TunerExitException",),
    "trainer.call": ("_call_callback_hooks", "_call_callbacks_load_state_dict", "_call_lightning_module_hook"),
    "trainer.connectors.logger_connector.result": ("_Metadata", "_ResultMetric", "_Sync"),
    "strategies.DDPStrategy()": (
        *("_configure_launcher", "_ddp_comm_hook", "_ddp_comm_state", "_ddp_comm_wrapper", "_ddp_kwargs"),
        *("_forward_redirection", "_layer_sync", "_lightning_module", "_process_group_backend", "_setup_model"),
    ),
    "overrides.distributed": ("_register_ddp_comm_hook",),
    "utilities.signature_utils": ("is_param_in_hook_signature",),
    "plugins.io.AsyncCheckpointIO()": ("_executor",),
    "loops.fetchers": ("_DataFetcher", "_DataLoaderIterDataFetcher"),
    "loops.evaluation_loop": ("_EvaluationLoop",),
    "loops.training_epoch_loop": ("_TrainingEpochLoop",),
    'loggers.CSVLogger("logs")': ("_experiment", "_version"),
    'loggers.TensorBoardLogger("logs")': ("_version",),
}
"""The names by their holder: a part of a Trainer after a fit, an object made anew, or a module of the package."""

IN_SOURCE: dict[str, tuple[str, ...]] = {
    "loggers.WandbLogger": ("_id", "_wandb_init"),
    "loggers.MLFlowLogger": ("_experiment_id", "_run_id"),
    "loggers.CometLogger": ("_experiment", "_experiment_key", "_project_name"),
    "loggers.LitLogger": ("_name", "_version"),
    "strategies.DDPStrategy": ("_pl_static_graph_delay_done",),
}
"""Names in the source of classes: of loggers that need a library of their own, and an attribute that a step sets."""

IS_OLD = importlib.metadata.version("pytorch-lightning").startswith("2.5.")

SINCE_2_6 = {
    *("trainer._last_val_time", "trainer._val_check_time_interval", "callbacks.WeightAveraging()._latest_update_epoch"),
    *("loggers.LitLogger._name", "loggers.LitLogger._version", "strategies.DDPStrategy._pl_static_graph_delay_done"),
}
"""Names of features that came with Lightning 2.6."""

OF_OTHERS = {
    *("_persistent_workers", "_pin_memory_thread_done_event", "_shutdown", "_shutdown_workers", "_worker_result_queue"),
    "_workers_status",
    *("_C", "_apply", "_check_reducer_finalized", "_execution_engine", "_get_iterator", "_iterator", "_parameters"),
    *("_pytree", "_set_params_and_buffers_to_ignore_for_model", "_sync_buffers", "_current_graph_task_id"),
    *(
        "_mark_worker_as_unavailable",
        "_persistent_workers",
        "_remove_worker_pids",
        "_shutdown_workers",
        "_worker_pids_set",
        "_workers",
        "_workers_done_event",
    ),
    *("_computed", "_num_samples", "_defaults", "_forward_cache", "_reductions", "_update_count"),
    *("_SubParsersAction", "_current_frames", "_exit", "_getframe"),
    *("_dlrover_agreed", "_dlrover_drops", "_dlrover_step"),
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
        val_check_interval=1 if IS_OLD else "00:00:01:00",
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


def expected(path: str, names: tuple[str, ...]) -> list[str]:
    """Names that the installed release must have."""
    return [name for name in names if not (IS_OLD and f"{path}.{name}" in SINCE_2_6)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("path", NAMES)
def test_private_names_exist(package: str, path: str) -> None:
    if names := expected(path, NAMES[path]):
        holder = holder_of(package, path)
        assert [name for name in names if not hasattr(holder, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("path", IN_SOURCE)
def test_private_names_in_source_exist(package: str, path: str) -> None:
    if names := expected(path, IN_SOURCE[path]):
        module, _, kind = path.rpartition(".")
        source = inspect.getsource(getattr(submodule(package, module), kind))
        assert [name for name in names if f"self.{name}" not in source] == []


# --- one file -----------------------------------------------------------------------------------------------------------------


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private attributes, except those of `self`, and private names that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            is_inherited = ast.unparse(node.value) == "super()"
            if node.attr.startswith("_") and not node.attr.startswith("__") and not is_own and not is_inherited:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("lightning.", "pytorch_lightning")):
            yield from (each.name for each in node.names if each.name.startswith("_"))


def private_texts(tree: ast.AST) -> set[str]:
    """Private names as texts, as `getattr` takes them."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if text.startswith("_") and not text.startswith("__") and text.isidentifier()}


def test_every_private_name_is_in_the_lists_above() -> None:
    tree = ast.parse(inspect.getsource(lightning_names))
    listed = {name for found in (*NAMES.values(), *IN_SOURCE.values()) for name in found}
    assert {*private_names(tree)} | private_texts(tree) <= listed | OF_OTHERS


def own_names(tree: ast.AST) -> set[str]:
    """Private functions, classes, and attributes that a file of ours defines or sets."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def test_other_files_use_no_private_name_of_lightning() -> None:
    listed = {name for found in (*NAMES.values(), *IN_SOURCE.values()) for name in found if name.startswith("_")}
    package = Path(lightning_dlrover.__path__[0])
    own = {name for file in package.rglob("*.py") for name in own_names(ast.parse(file.read_text()))}
    for file in sorted(package.rglob("*.py")):
        room = file.relative_to(package).parts[0]
        # The rendezvous and the nodes cannot import Lightning. The tables have torchrec's private names, in two files.
        if room in ("components", "rdzv", "tables") or file.name == "lightning_names.py":
            continue
        tree = ast.parse(file.read_text())
        used = {*private_names(tree)}
        assert not (used - own - OF_OTHERS), file
        assert not (used & listed), file
        assert not (private_texts(tree) & listed - {"_version", "_id", "_experiment_key"}), file
