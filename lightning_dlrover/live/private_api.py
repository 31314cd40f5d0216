"""The private names of Lightning that this package depends on, by their holder.

Only files of `live/` use them, and the strategy that overrides some. A test finds those that are used and missing here.

`check` finds those that an installed release lacks; the tests look for each in `lightning` and in `pytorch_lightning`.
"""

from __future__ import annotations

import functools

from lightning_dlrover.lightning_compat import DISTRIBUTIONS, release
from lightning_dlrover.private_names import check_names, minor

CALLBACK_FIELDS: dict[str, tuple[str, ...]] = {
    "ModelCheckpoint": ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"),
    "StochasticWeightAveraging": ("n_averaged",),  # it reads its own state only when averaging begins
    "WeightAveraging": ("_latest_update_epoch",),
}
"""Fields of Lightning's callbacks that affect joint decisions of all workers, and that `state_dict` leaves out."""

CALLBACK_CLOCKS: dict[str, tuple[str, ...]] = {"ModelCheckpoint": ("_last_time_checked",)}
"""Readings of `time.monotonic`, sent as ages because the clocks of hosts differ."""

CANDIDATES = "_monitor_candidates"
"""Method in which a `ModelCheckpoint` reads the logged values before it saves."""

LOGGER_NAMES: dict[str, tuple[str, ...]] = {
    "CSVLogger": ("_version",),
    "TensorBoardLogger": ("_version",),
    "WandbLogger": ("_id",),
    "MLFlowLogger": ("_run_id", "_experiment_id"),
    "CometLogger": ("_experiment_key", "_project_name"),
    "LitLogger": ("_name", "_version"),
}
"""Attributes with which each of Lightning's loggers names its run. Other loggers may have `_version`."""

RESTARTS = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")
"""Flags of loops, and of callbacks that fine-tune, which the load of a checkpoint sets."""

NAMES: dict[str, tuple[str, ...]] = {
    "trainer.trainer:Trainer": (
        *("_accelerator_connector", "_checkpoint_connector", "_data_connector", "_logger_connector", "_results"),
        "_signal_connector",
    ),
    "trainer.setup": ("_val_check_time_interval",),  # an attribute of the Trainer, as is `_last_val_time`
    "trainer.connectors.accelerator_connector:_AcceleratorConnector": ("_devices_flag", "use_distributed_sampler"),
    "trainer.connectors.checkpoint_connector:_CheckpointConnector": (
        *("_loaded_checkpoint", "dump_checkpoint", "restore_callbacks", "restore_datamodule", "restore_loops"),
        *("restore_model", "restore_training_state"),
    ),
    "trainer.connectors.data_connector": ("_InfiniteBarrier",),
    "trainer.connectors.logger_connector.logger_connector:_LoggerConnector": (
        *("_callback_metrics", "_first_loop_iter", "_logged_metrics", "_progress_bar_metrics"),
    ),
    "trainer.connectors.logger_connector.result": ("_Metadata", "_ResultMetric", "_Sync"),
    "trainer.call": (
        *("_call_callback_hooks", "_call_callbacks_load_state_dict", "_call_lightning_datamodule_hook"),
        "_call_lightning_module_hook",
    ),
    "loops.fit_loop:_FitLoop": (
        *("_can_stop_early", "_combined_loader", "_data_fetcher", "_data_source", "_last_train_dl_reload_epoch"),
        *("_last_val_time", "_should_accumulate", *RESTARTS),
    ),
    "loops.training_epoch_loop:_TrainingEpochLoop": (
        *("_broadcast_sigterm_tensor", "_build_kwargs", "_results", "_should_check_val_fx"),
        *RESTARTS,
    ),
    "loops.optimization.automatic:_AutomaticOptimization": ("_make_closure", *RESTARTS),
    "loops.optimization.automatic:Closure": ("_zero_grad_fn",),
    "loops.optimization.manual:_ManualOptimization": RESTARTS,
    "loops.evaluation_loop:_EvaluationLoop": (
        *("_combined_loader", "_data_fetcher", "_data_source", "_evaluation_step", "_is_sequential"),
        *("_last_val_dl_reload_epoch", "_logged_outputs", "_module_mode", "_results", "_store_dataloader_outputs"),
        *RESTARTS,
    ),
    "loops.fetchers": ("_DataFetcher", "_DataLoaderIterDataFetcher"),
    "loops.fetchers:_DataFetcher": ("_start_profiler", "_stop_profiler"),
    "loops.fetchers:_PrefetchDataFetcher": ("prefetch_batches",),
    "utilities.combined_loader:CombinedLoader": ("_mode", "_spec"),
    "core:LightningModule": ("_on_before_batch_transfer", "_param_requires_grad_state"),
    "callbacks:ModelCheckpoint": (
        *("_every_n_train_steps", "_last_checkpoint_saved", "_last_global_step_saved", "_last_time_checked"),
        *("_defer_save_until_validation", CANDIDATES, "_train_time_interval"),
    ),
    "callbacks:StochasticWeightAveraging": ("n_averaged",),
    "callbacks:WeightAveraging": ("_latest_update_epoch",),
    "callbacks:BackboneFinetuning": ("_restarting",),
    "callbacks:Timer": ("_start_time",),
    "callbacks:LearningRateFinder": (
        *("_attr_name", "_early_exit", "_max_lr", "_min_lr", "_mode", "_num_training_steps", "_update_attr"),
    ),
    "tuner.lr_finder": ("_LRFinder", "_determine_lr_attr_name"),
    "tuner.lr_finder:_LRFinder": ("_total_batch_idx",),
    "utilities.exceptions": ("_TunerExitException",),
    "utilities.signature_utils": ("is_param_in_hook_signature",),
    "strategies:DDPStrategy": (
        *("_configure_launcher", "_ddp_comm_hook", "_ddp_comm_state", "_ddp_comm_wrapper", "_ddp_kwargs"),
        *("_forward_redirection", "_layer_sync", "_lightning_module", "_pl_static_graph_delay_done"),
        *("_process_group_backend", "_setup_model"),
    ),
    "overrides.distributed": ("_register_ddp_comm_hook",),
    "plugins.io:AsyncCheckpointIO": ("_executor",),
    "loggers:CSVLogger": ("_experiment", *LOGGER_NAMES["CSVLogger"]),
    "loggers:TensorBoardLogger": LOGGER_NAMES["TensorBoardLogger"],
    "loggers:WandbLogger": ("_wandb_init", *LOGGER_NAMES["WandbLogger"]),
    "loggers:MLFlowLogger": ("_mlflow_client", *LOGGER_NAMES["MLFlowLogger"]),
    "loggers:CometLogger": ("_experiment", *LOGGER_NAMES["CometLogger"]),
    "loggers:LitLogger": LOGGER_NAMES["LitLogger"],
}
"""The names by their holder, as `check_names` takes them, below the package."""

_SINCE_2_6 = frozenset(
    {
        *("callbacks:WeightAveraging", "loggers:LitLogger"),
        *("trainer.setup._val_check_time_interval", "loops.fit_loop:_FitLoop._last_val_time"),
        "strategies:DDPStrategy._pl_static_graph_delay_done",
    }
)
"""Holders, and names of holders, of features that came with Lightning 2.6."""


def later_names(package: str) -> frozenset[str]:
    """Return the holders and names that came after the installed release of a package, as `check_names` takes them."""
    return _SINCE_2_6 if minor(release(package)) == "2.5" else frozenset()


@functools.cache
def check(package: str) -> None:
    """Raise `MissingNamesError` if the installed release of a package lacks one of the names."""
    check_names(DISTRIBUTIONS[package], NAMES, package, later_names(package))
