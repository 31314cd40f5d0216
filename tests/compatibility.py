"""Features of Lightning scripts in jobs that change: the source of docs/reference/compatibility.md and compatibility_models.md.

`python -m tests.compatibility` writes both pages. A test compares them, and checks that each named test exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.versions import Result, results

__all__ = ["FOLDER", "ROWS", "Row", "render"]

FOLDER = Path(__file__).parent.parent / "docs" / "reference"

Verdict = Literal["works", "refused", "warned"]

_E2E = "tests/e2e"
_UNIT = "tests"
_FEATURES = f"{_E2E}/test_features.py"
_TABLE = f"{_E2E}/test_table_of_features.py::test_resized_run_ends_as_the_undisturbed_one"
_PARTS = "tests/e2e/test_shares_in_parts.py::test_shares_that_no_longer_fit_after_losses_end_as_the_undisturbed_run"
_STRANGERS = "tests/strangers/test_strangers.py::test_changes_leave_the_result_as_it_is"
_MISMATCH = f"{_E2E}/test_mismatches.py::test_different_collectives_end_with_both_places"
_OPTIMIZERS = f"{_UNIT}/tables/test_table_optimizers.py"


@dataclass(frozen=True)
class Row:
    """One feature."""

    group: str
    feature: str
    verdict: Verdict
    test: str  # path::function, with [parameter] if a single case shows it
    note: str = ""


def _rows(group: str, *rows: tuple[str, Verdict, str] | tuple[str, Verdict, str, str]) -> list[Row]:
    return [Row(group, *row) for row in rows]


ROWS: list[Row] = [
    *_rows(
        "Packages and start",
        (
            "`import lightning` and `import pytorch_lightning`, in any order",
            "works",
            f"{_E2E}/test_package_jobs.py::test_job_of_pytorch_lightning_after_lightning",
        ),
        (
            "`pytorch_lightning` where `lightning` is not installed",
            "works",
            f"{_E2E}/test_package_jobs.py::test_job_of_pytorch_lightning_alone_survives_changes",
        ),
        (
            "Two packages of different releases",
            "refused",
            f"{_UNIT}/test_packages.py::test_strategy_refuses_a_trainer_of_another_release",
        ),
        (
            "A release of torch, Lightning or torchrec without a private name in use",
            "refused",
            f"{_UNIT}/live/test_lightning_names.py::test_strategy_refuses_a_release_without_a_name",
        ),
        ('`strategy="dlrover"`', "works", f"{_UNIT}/test_packages.py::test_trainer_takes_strategy_by_name_and_by_instance"),
        ("A subclass of `DLRoverStrategy`", "works", f"{_UNIT}/test_packages.py::test_strategy_of_the_users_own_is_taken"),
        (
            "LightningCLI: YAML, `class_path`, `trainer_defaults` with a name or a `class_path`",
            "works",
            f"{_UNIT}/test_lightning_cli.py::test_trainer_defaults_hold_a_name_or_a_class_path",
            "jsonargparse refuses an instance in `trainer_defaults`, of any strategy",
        ),
        ("LightningCLI with YAML in a job", "works", f"{_STRANGERS}[cli]"),
        (
            "`dlrover run -m MODULE`; a user without a name or a home; variables of other launchers and schedulers",
            "works",
            f"{_E2E}/test_surroundings.py::test_module_trains_for_a_user_without_name_and_home_beside_variables_of_others",
        ),
        (
            "A default process group that the script has made before",
            "warned",
            f"{_FEATURES}::test_scripts_process_group_is_replaced_and_its_handler_of_sigterm_is_called_beside_ours",
            "the groups of the job's rounds take its place",
        ),
        (
            "A handler of SIGTERM, set before or while training",
            "works",
            f"{_FEATURES}::test_scripts_process_group_is_replaced_and_its_handler_of_sigterm_is_called_beside_ours",
            "it is called, and the worker hands over",
        ),
        (
            "`Trainer(devices=...)` and `num_nodes` of another number",
            "warned",
            f"{_E2E}/test_arguments.py::test_number_of_devices_without_effect_is_named",
        ),
        (
            "Arguments of `DLRoverStrategy` that cannot be meant",
            "refused",
            f"{_UNIT}/test_strategy.py::test_an_argument_that_cannot_be_meant_is_refused",
        ),
        (
            "`python script.py` without a job, with `validate`, `test` and `predict`",
            "works",
            f"{_UNIT}/test_strategy.py::test_plain_script_validates_tests_and_predicts",
        ),
    ),
    *_rows(
        "Data",
        (
            "`batch_sampler=BatchSampler(...)`",
            "works",
            f"{_FEATURES}::test_workers_agree_across_growth_loss_and_move_of_rank_0_with[batch_sampler]",
        ),
        (
            "Batch samplers of the user's own, `batch_size=None`, `DataLoader.__iter__` overridden",
            "refused",
            f"{_UNIT}/checks/test_loader_checks.py::test_loader_that_cannot_be_split_is_refused_with_advice",
        ),
        (
            "`trainer.test` or `trainer.validate` with such a loader, after `fit`",
            "warned",
            f"{_UNIT}/live/test_users_loaders.py::test_test_loader_that_cannot_be_split_does_not_end_a_job_that_has_trained",
            "each worker computes all of its batches",
        ),
        (
            "A validation loader that cannot be split, also where a validation is first due epochs later",
            "refused",
            f"{_FEATURES}::test_data_that_cannot_be_split_are_refused_at_the_start[late_validation]",
            "before training",
        ),
        (
            "Streams of Parquet files with shuffling, `num_workers` and validation",
            "works",
            f"{_E2E}/test_schedules.py::test_every_sample_is_trained_on_exactly_once[0]",
        ),
        (
            "Streams of CSV, TSV, lines and tar archives",
            "works",
            f"{_UNIT}/data/test_files.py::test_columns_are_read_from_every_row",
        ),
        (
            "A checkpoint of a stream's epoch, resumed by plain Lightning",
            "works",
            f"{_UNIT}/data/test_plain_lightning.py::test_plain_lightning_goes_on_from_a_jobs_checkpoint[0]",
        ),
        (
            "A stream in a DataLoader with `shuffle=True`",
            "refused",
            f"{_UNIT}/data/test_stream.py::test_shuffled_dataloader_of_a_stream_is_refused_with_the_right_option",
        ),
        (
            "`IterableDataset` with and without `state_dict`",
            "works",
            f"{_E2E}/test_iterables.py::test_each_row_is_trained_once_while_workers_come_and_go[stateful]",
            "every worker reads all rows",
        ),
        (
            "`IterableDataset` that splits itself by rank",
            "refused",
            f"{_E2E}/test_iterables.py::test_dataset_that_splits_itself_by_rank_ends_the_job_before_its_first_step",
        ),
        (
            "`IterableDataset` with `batch_size=None`",
            "refused",
            f"{_FEATURES}::test_data_that_cannot_be_split_are_refused_at_the_start[own_batches]",
        ),
        (
            "`IterableDataset` together with another training loader",
            "refused",
            f"{_UNIT}/live/test_sampler.py::test_iterable_dataset_beside_another_loader_is_refused",
        ),
        (
            "Samplers that follow the rank",
            "refused",
            f"{_FEATURES}::test_data_that_cannot_be_split_are_refused_at_the_start[rank_aware]",
        ),
        (
            "`use_distributed_sampler=False` with a sampler of the user's own",
            "refused",
            f"{_FEATURES}::test_data_that_cannot_be_split_are_refused_at_the_start[split_by_user]",
        ),
        (
            "`use_distributed_sampler=False` with torch's samplers",
            "works",
            f"{_UNIT}/checks/test_loader_checks.py::test_samplers_of_torch_are_those_of_all_workers",
        ),
        (
            "A loader other than a `DataLoader`",
            "refused",
            f"{_FEATURES}::test_data_that_cannot_be_split_are_refused_at_the_start[list]",
        ),
        (
            "`training_step(self, dataloader_iter)`",
            "refused",
            f"{_FEATURES}::test_data_that_cannot_be_split_are_refused_at_the_start[dataloader_iter]",
        ),
        (
            "A sampler of the user's own",
            "works",
            f"{_FEATURES}::test_a_sampler_of_the_users_own_decides_the_order_across_resizes",
        ),
        (
            "`in_order=False`",
            "works",
            f"{_UNIT}/live/test_sampler.py::test_batches_come_in_order_though_the_user_does_not_ask_for_it",
            "batches come in order",
        ),
        (
            "Several training loaders, the first one shorter",
            "works",
            f"{_FEATURES}::test_shorter_first_loader_does_not_end_changes_or_recovery[max_size_cycle]",
        ),
        (
            "Several training loaders with uneven shares",
            "warned",
            f"{_UNIT}/live/test_sampler.py::test_loss_weighs_by_the_first_loader_that_takes_part",
            "one weight for all of them",
        ),
        (
            "One `global_batch_size` for loaders of unlike batch sizes",
            "refused",
            f"{_UNIT}/live/test_sampler.py::test_one_global_batch_size_for_unlike_loaders_is_refused",
        ),
        (
            "A batch size that the script divides by the number of workers",
            "works",
            f"{_FEATURES}::test_data_is_prepared_once_and_a_batch_that_the_script_divides_stays_whole",
            "in its hooks by `trainer.world_size`, or by the process group's size",
        ),
        (
            "`prepare_data` of module and datamodule",
            "works",
            f"{_FEATURES}::test_data_is_prepared_once_and_a_batch_that_the_script_divides_stays_whole",
            "once on each host; once in the job with `prepare_data_per_node=False`",
        ),
        (
            "Loaders made again in each epoch, with other lengths; a seed per worker",
            "works",
            f"{_FEATURES}::test_workers_with_seeds_of_their_own_share_one_order",
        ),
        (
            "A DataLoader of graphs, which wraps its iterator, with loader workers",
            "works",
            f"{_UNIT}/live/test_sampler.py::test_loader_that_wraps_its_iterator_is_resharded_and_closed",
            "refused if the loader workers cannot be found in it",
        ),
        (
            "A dataset that training writes to, with `num_workers=0`",
            "works",
            f"{_UNIT}/live/test_settings.py::test_planner_gives_no_loader_workers_to_a_dataset_that_training_may_write_to",
        ),
        (
            "`shuffle=True` with a `generator`",
            "works",
            f"{_UNIT}/live/test_sampler.py::test_a_generator_of_the_users_seeds_the_order",
            "it seeds the order",
        ),
        (
            "`seed_everything(workers=True)`",
            "works",
            f"{_UNIT}/live/test_sampler.py::test_lightning_seeds_workers_of_any_loader",
        ),
        (
            "Reading attributes of `trainer.train_dataloader`",
            "works",
            f"{_UNIT}/live/test_sampler.py::test_user_code_reads_its_loader",
        ),
        ("Setting them", "refused", f"{_UNIT}/live/test_sampler.py::test_a_change_that_would_have_no_effect_is_an_error"),
        ("A joiner with other data", "refused", f"{_FEATURES}::test_joiner_with_other_data_is_refused_and_the_job_goes_on"),
        (
            "First workers with other data than each other",
            "refused",
            f"{_FEATURES}::test_first_workers_with_other_data_are_refused",
        ),
        ("Random augmentation", "works", f"{_UNIT}/live/test_data_fingerprint.py::test_random_augmentation_is_not_compared"),
        (
            "`LightningDataModule` with `state_dict` and `reload_dataloaders_every_n_epochs`",
            "works",
            f"{_STRANGERS}[datamodule]",
        ),
    ),
    *_rows(
        "Callbacks and schedules",
        ("EarlyStopping, ModelCheckpoint by metric and by steps", "works", f"{_TABLE}[monitors]"),
        (
            "ReduceLROnPlateau on a metric that is not logged in each epoch, `reload_dataloaders_every_n_epochs=2`",
            "works",
            f"{_TABLE}[plateau]",
        ),
        ("GradientAccumulationScheduler", "works", f"{_TABLE}[accumulation_scheduler]"),
        ("WeightAveraging, EMAWeightAveraging", "works", f"{_TABLE}[weight_averaging]"),
        ("An EMA callback that swaps weights in validation", "works", f"{_STRANGERS}[ema]"),
        ("StochasticWeightAveraging", "works", f"{_TABLE}[swa]"),
        (
            "BaseFinetuning",
            "works",
            f"{_TABLE}[finetuning]",
            "the model is wrapped again when layers are unfrozen; stock DDP does not reduce their gradients",
        ),
        ("ModelPruning", "works", f"{_TABLE}[pruning]"),
        ("Values that `on_train_epoch_start` sets by the epoch", "works", f"{_TABLE}[epoch_hooks]"),
        ("Timer, `val_check_interval` as a time", "works", f"{_TABLE}[clock]"),
        ("Objects in checkpoints: scalers, enums, dataclasses, partials", "works", f"{_TABLE}[objects]"),
        (
            "Objects in checkpoints that cannot be pickled",
            "refused",
            f"{_E2E}/test_resume.py::test_state_that_cannot_be_sent_refuses_joiners_alone",
            "joiners are; the job continues",
        ),
        (
            "A learning rate by `trainer.world_size`",
            "refused",
            f"{_FEATURES}::test_joiner_with_another_learning_rate_is_refused",
            "the joiner is",
        ),
        (
            "`Tuner.lr_find`, LearningRateFinder",
            "works",
            f"{_E2E}/test_arguments.py::test_search_for_a_rate_is_no_part_of_the_job",
        ),
        (
            "`on_exception`, OnExceptionCheckpoint at a planned leave",
            "works",
            f"{_FEATURES}::test_checkpoint_of_a_lost_rank_0_is_written_by_the_next",
            "not called",
        ),
        (
            "`trainer.should_stop` on some workers only",
            "works",
            f"{_E2E}/test_mismatches.py::test_all_stop_soon_after_one_asks_for_it",
            "all stop after the next vote",
        ),
    ),
    *_rows(
        "Optimization",
        (
            "GAN: several optimizers, growth and loss",
            "works",
            f"{_FEATURES}::test_growth_keeps_models_that_leave_parameters_out[gan]",
        ),
        ("GAN with `toggle_optimizer`", "works", f"{_STRANGERS}[gan]"),
        (
            "Parameters that a step leaves out",
            "works",
            f"{_FEATURES}::test_growth_keeps_models_that_leave_parameters_out[unused]",
        ),
        (
            "`find_unused_parameters`, `static_graph` of the user's",
            "works",
            f"{_UNIT}/live/test_unused_parameters.py::test_users_own_choice_is_kept",
        ),
        (
            "`toggle_optimizer` and accumulation by hand, with losses",
            "works",
            f"{_FEATURES}::test_frozen_halves_and_manual_windows_survive_losses",
        ),
        (
            "LBFGS and other optimizers that evaluate several times",
            "works",
            f"{_FEATURES}::test_optimizers_that_evaluate_several_times_are_redone",
        ),
        ("Schedule-free optimizers", "works", f"{_STRANGERS}[schedule_free]"),
        (
            "Buffers that the forward pass changes (BatchNorm, queues, averages), with losses",
            "works",
            f"{_FEATURES}::test_buffers_see_each_batch_once[buffered]",
            "up to 64 MiB each",
        ),
        (
            "`Embedding(max_norm=...)` and whatever else lets replicas drift apart",
            "refused",
            f"{_FEATURES}::test_an_embedding_with_max_norm_is_named_at_the_start_and_ends_its_job",
            'unless `DLRoverStrategy(on_drift="repair")`',
        ),
        (
            "Gradient accumulation and clipping",
            "works",
            f"{_FEATURES}::test_accumulation_and_clipping_match_an_unresized_run",
        ),
        (
            "Automatic optimization, shares that do not fit into memory",
            "works",
            f"{_PARTS}[plain]",
            "in parts, which BatchNorm sees",
        ),
        ("... with accumulation and clipping", "works", f"{_PARTS}[accumulation]"),
        ("... with `16-mixed` and a GradScaler", "works", f"{_PARTS}[scaled]"),
        ("... with logged values of steps and epochs, torchmetrics", "works", f"{_PARTS}[logged]"),
        ("... with batches of dictionaries, named tuples and texts", "works", f"{_PARTS}[dictionaries]"),
        (
            "Manual optimization, shares that do not fit into memory; `max_share` with it",
            "refused",
            "tests/e2e/test_shares_in_parts.py::test_share_that_cannot_be_computed_in_parts_is_refused",
        ),
        (
            "Collectives in `training_step`, as of contrastive losses, with `max_share`",
            "refused",
            "tests/e2e/test_shares_in_parts.py::test_collective_of_the_users_is_refused_in_a_part",
            "in a part",
        ),
        (
            "Reentrant activation checkpointing with parameters that some steps leave out",
            "refused",
            "tests/live/test_unused_parameters.py::test_search_that_fails_in_reentrant_checkpoints_is_refused_in_words",
            "with `use_reentrant=False` as the next move",
        ),
        (
            "`loss.backward()`, `ZeroRedundancyOptimizer`, BatchNorm on one sample",
            "refused",
            f"{_FEATURES}::test_script_that_cannot_be_right_is_refused",
        ),
        (
            "DDP communication hooks with a state (PowerSGD, post-localSGD)",
            "refused",
            f"{_UNIT}/checks/test_script_checks.py::test_hook_with_a_state_is_refused",
        ),
        (
            "`torch.cuda.make_graphed_callables`",
            "refused",
            f"{_UNIT}/checks/test_script_checks.py::test_module_with_torchs_graphed_forward_is_refused",
        ),
        (
            '`precision="bf16-mixed"`, BatchNorm',
            "works",
            f"{_FEATURES}::test_workers_agree_across_growth_loss_and_move_of_rank_0_with[bf16]",
        ),
        ("`static_graph=True`", "works", f"{_TABLE}[static_graph]"),
        ("`gradient_as_bucket_view=True`, weights in `channels_last`", "works", f"{_TABLE}[channels_last]"),
        ("`torch.compile` of a part of the model", "works", f"{_TABLE}[compiled]"),
        (
            "A compiled function with a collective",
            "works",
            f"{_UNIT}/test_compiled_models.py::test_graph_with_a_collective_is_compiled_again_for_the_next_round",
            "it is compiled again after each change",
        ),
        (
            "`torch.compile` with `DLRoverCallback`",
            "works",
            f"{_UNIT}/test_compiled_models.py::test_callback_leaves_compilation_alone",
        ),
        (
            "Tables: SGD, Adagrad, parameter groups, schedules, frozen tables",
            "works",
            f"{_OPTIMIZERS}::test_tables_end_as_with_the_ordinary_optimizer",
        ),
        (
            "Tables: data-parallel ones with any optimizer",
            "works",
            f"{_OPTIMIZERS}::test_whole_tables_are_trained_by_any_optimizer",
        ),
        (
            "Tables: Adam on CPU, momentum, weight decay, no optimizer",
            "refused",
            f"{_OPTIMIZERS}::test_optimizer_without_a_kernel_is_refused",
        ),
        (
            'Tables: `precision="16-mixed"`',
            "refused",
            f"{_OPTIMIZERS}::test_scaled_gradients_are_refused",
        ),
        ("Tables: `sync_batchnorm`", "works", f"{_OPTIMIZERS}::test_sync_batchnorm_holds_beside_tables"),
        (
            "Tables: weights from `load_from_checkpoint`, `load_state_dict`, an assignment, a stock `.ckpt` or `init_fn`",
            "works",
            f"{_UNIT}/live/test_first_weights.py::test_given_weights_train_as_with_stock_lightning",
        ),
        (
            "Tables: one collection in two places",
            "works",
            f"{_UNIT}/live/test_first_weights.py::test_collection_at_two_paths_stays_one_in_every_state",
        ),
        (
            "Tables: a subclass of a collection, a parameter shared with another module",
            "refused",
            f"{_UNIT}/tables/test_sharded_tables.py::test_subclass_of_a_collection_is_refused_by_name",
        ),
    ),
    *_rows(
        "Metrics and logs",
        (
            "Logging without `sync_dist`: mean, sum, max, min; callbacks that monitor it",
            "works",
            f"{_FEATURES}::test_script_for_one_device_means_the_same_with_three",
        ),
        ("torchmetrics objects, logged", "works", f"{_TABLE}[torchmetrics]"),
        (
            "torchmetrics objects of a worker that leaves",
            "works",
            f"{_UNIT}/live/test_epoch_metrics.py::test_metric_of_a_leaver_is_merged",
        ),
        (
            "... whose states have no reduction",
            "warned",
            f"{_UNIT}/live/test_epoch_metrics.py::test_metric_that_cannot_be_merged_is_named",
        ),
        ("A loss at an epoch's end", "works", f"{_FEATURES}::test_loss_at_an_epochs_end_keeps_its_metrics"),
        ("Logs and metrics of a step that is done again", "works", f"{_FEATURES}::test_redone_steps_count_once"),
        (
            "CSVLogger, TensorBoardLogger, TQDM bar when rank 0 moves",
            "works",
            f"{_E2E}/test_logger_jobs.py::test_logs_stay_in_one_version_when_rank_0_moves",
        ),
        (
            "A logger of the user's own with `state_dict`",
            "works",
            f"{_UNIT}/live/test_loggers.py::test_logger_of_the_users_own_gets_its_state",
        ),
        (
            "Wandb, MLflow, Comet",
            "works",
            f"{_UNIT}/live/test_lightning_names.py::test_private_names_in_source_exist",
            "not run against their servers",
        ),
    ),
    *_rows(
        "Validation, checkpoints, several fits",
        (
            "A loss in validation: modes, averaged weights, patience, checkpoints, metrics",
            "works",
            f"{_FEATURES}::test_validation_goes_on_after_losses[validated]",
        ),
        (
            "`self.all_gather` and `sync_dist` on each step in `validation_step`",
            "works",
            f"{_FEATURES}::test_validation_goes_on_after_losses[gathering]",
        ),
        (
            "A checkpoint that rank 0 was writing when it was lost",
            "works",
            f"{_FEATURES}::test_checkpoint_of_a_lost_rank_0_is_written_by_the_next",
            "not with AsyncCheckpointIO",
        ),
        (
            "Checkpoints at a URL",
            "works",
            f"{_E2E}/test_resume.py::test_checkpoint_is_found_again_at_a_url_and_with_objects[url]",
        ),
        (
            "Hyperparameters of any class",
            "works",
            f"{_E2E}/test_resume.py::test_checkpoint_is_found_again_at_a_url_and_with_objects[objects]",
        ),
        (
            "A recorded checkpoint that cannot be read",
            "refused",
            f"{_E2E}/test_resume.py::test_job_does_not_begin_anew_when_its_checkpoint_is_gone",
        ),
        (
            "A checkpoint of an epoch's end",
            "works",
            f"{_E2E}/test_resume.py::test_checkpoint_of_an_epochs_end_resumes_with_the_next_epoch",
        ),
        (
            "Several fits, k-fold",
            "works",
            f"{_FEATURES}::test_later_fits_survive_losses_and_end_right",
            "workers join the first one only",
        ),
        ("k-fold as a script", "works", f"{_STRANGERS}[kfold]"),
        ("`predict` and `test` after `fit`", "works", f"{_STRANGERS}[predictions]"),
        (
            "Code after `fit` that raises",
            "works",
            f"{_E2E}/test_dlrover_run.py::test_failure_after_fit_fails_the_job",
            "exit code 1",
        ),
        (
            "A worker killed before the first batch",
            "works",
            f"{_E2E}/test_job_control.py::test_worker_killed_before_the_first_batch_is_replaced",
        ),
    ),
    *_rows(
        "Collectives that differ between workers",
        ("A barrier, broadcast or reduction on one worker", "refused", f"{_MISMATCH}[barrier_alone]"),
        ("`save_checkpoint` on one worker", "refused", f"{_MISMATCH}[checkpoint_alone]"),
        ("`self.all_gather` of different shapes", "refused", f"{_MISMATCH}[gather_shapes]"),
        ("torchmetrics' `compute` on one worker", "refused", f"{_MISMATCH}[torchmetrics]"),
        ("`torch.distributed` on one worker", "refused", f"{_MISMATCH}[raw_against_gradients]"),
        ("Gradients that one worker does not reduce", "refused", f"{_MISMATCH}[no_sync]"),
        ("Validation on one worker", "refused", f"{_MISMATCH}[validation]"),
        ("An epoch that ends earlier on one worker", "refused", f"{_MISMATCH}[stop_iteration]"),
    ),
    *_rows(
        "GPUs",
        ("Gradients after an aborted reduction", "works", f"{_UNIT}/test_gpu.py::test_gradients_of_an_ended_round_are_refused"),
        (
            '`precision="16-mixed"` after a missed update',
            "works",
            f"{_UNIT}/test_gpu.py::test_missed_update_brings_state_and_scale_to_the_own_device",
        ),
        (
            '`process_group_backend="nccl"`',
            "works",
            "tests/rdzv/transport/test_backends.py::test_script_of_stock_ddp_keeps_gloo_for_the_cpu",
            "together with gloo",
        ),
        (
            "Unknown backends",
            "refused",
            "tests/rdzv/group/test_world.py::test_unknown_backend_is_refused",
        ),
        (
            "More workers per node than GPUs, with NCCL",
            "refused",
            f"{_UNIT}/test_own_device.py::test_worker_without_a_gpu_of_its_own_is_refused",
        ),
        (
            "`devices=1` with several workers per node",
            "works",
            f"{_UNIT}/test_own_device.py::test_workers_of_a_node_have_different_gpus",
        ),
        (
            "Workers that share a device through gloo",
            "works",
            f"{_E2E}/test_gpu_jobs.py::test_workers_of_one_device_survive_changes",
        ),
    ),
    *_rows(
        "Whole scripts, resized 1-3-2 and killed once",
        ("Autoencoder", "works", f"{_STRANGERS}[autoencoder]"),
        ("Image classifier", "works", f"{_STRANGERS}[image_classifier]"),
        ("Fine-tuning", "works", f"{_STRANGERS}[finetuning]"),
        ("Transformer language model", "works", f"{_STRANGERS}[transformer_lm]"),
        ("DeepFM", "works", f"{_STRANGERS}[deepfm]"),
        ("Wide and deep, manual optimization", "works", f"{_STRANGERS}[wide_deep]"),
        ("DLRM with torchrec", "works", f"{_STRANGERS}[dlrm]"),
        ("Time series", "works", f"{_STRANGERS}[timeseries]"),
        ("Tabular library with its own `pytorch_lightning` Trainer", "works", f"{_STRANGERS}[tabular]"),
        ("StochasticWeightAveraging", "works", f"{_STRANGERS}[swa]"),
        ("Batches without labels: skipped by None, or a loss of zero", "works", f"{_STRANGERS}[unlabelled]"),
        ("A batch divided by the number of devices, in loaders of each epoch", "works", f"{_STRANGERS}[batch_per_worker]"),
        ("A study of several fits that catches an exception of a callback", "works", f"{_STRANGERS}[study]"),
        ("A shuffled stream of Parquet files with other types", "works", f"{_STRANGERS}[warehouse]"),
    ),
]


OF_MODELS = (
    "Optimization",
    "Collectives that differ between workers",
    "GPUs",
    "Whole scripts, resized 1-3-2 and killed once",
)
"""Groups of the second page."""

LEGEND = """
*Works*: the result is that of an undisturbed run.
*Refused*: the error gives the reason and the next step, when the Trainer starts or where the script does it.
*Warned*: one line in the log.
"""
MARK = "<!-- Written by `python -m tests.compatibility` from the table in that file. -->"


def render(rows: list[Row], tested: list[Result]) -> dict[str, str]:
    """Return the pages by the names of their files."""
    groups = list(dict.fromkeys(row.group for row in rows))
    scripts = [
        "# What scripts may contain",
        MARK,
        "Features of Lightning scripts, each tried in jobs whose workers join, leave and die.",
        "[compatibility_models.md](compatibility_models.md) has optimization, collectives, GPUs, whole scripts and versions.",
        LEGEND.rstrip(),
        *(line for group in groups if group not in OF_MODELS for line in _table(group, rows)),
    ]
    models = [
        "# What models may contain",
        MARK,
        "Optimization, collectives, GPUs and whole scripts, each tried in jobs whose workers join, leave and die.",
        "[compatibility.md](compatibility.md) has packages, data, callbacks, metrics and validation.",
        LEGEND.rstrip(),
        *(line for group in OF_MODELS for line in _table(group, rows)),
        "",
        "## Versions",
        "`make test-versions` runs a core of the tests with each row's versions, on CPU.",
        "",
        "| environment | Python | torch | Lightning | torchrec | passed | on |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {r.name} | {r.python} | {r.torch} | {r.lightning} | {r.torchrec or '-'} | {r.passed} of {r.of} | {r.date} |"
            for r in tested
        ),
    ]
    pages = {"compatibility.md": scripts, "compatibility_models.md": models}
    return {name: "\n".join(lines) + "\n" for name, lines in pages.items()}


def _table(group: str, rows: list[Row]) -> list[str]:
    lines = ["", f"## {group}"]
    if group == "GPUs":
        lines += ["The tests run on the CPU in their place; [gpu.md](../guide/gpu.md) has what ran on one.", ""]
    lines += ["| feature | | shown by |", "| --- | --- | --- |"]
    for row in (row for row in rows if row.group == group):
        verdict = f"{row.verdict}: {row.note}" if row.note else row.verdict
        lines.append(f"| {row.feature} | {verdict} | `{row.test}` |")
    return lines


if __name__ == "__main__":
    for name, text in render(ROWS, results()).items():
        (FOLDER / name).write_text(text)
