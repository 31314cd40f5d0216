"""The benchmark of co-location keeps cores and GPUs busier than other policies, and refuses bad traces by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from colocation_mixes import MIXES
from colocation_rehearsal import GPU_KINDS, rehearse
from gavel_traces import TraceError, default_folder, read_pairs

needs_traces = pytest.mark.skipif(
    not default_folder().is_dir(), reason=f"no traces in {default_folder()}: set DLROVER_SHARED_DATA to the data's folder"
)


@needs_traces
def test_memory_lets_all_measured_pairs_share_a_device() -> None:
    pairs = read_pairs(default_folder(), "k80")
    for a, b in pairs.speeds:
        assert sum(pairs.jobs[n].profiles["k80"].memory_bytes for n in (a, b)) <= pairs.device.memory_bytes


@pytest.mark.parametrize("mix", MIXES)
def test_no_other_policy_keeps_the_cores_busier_where_jobs_behave_as_their_profiles_say(mix: str) -> None:
    ours = rehearse(MIXES[mix], "complementary").now
    least = {"fifo": 0.99, "rmixer": 0.99, "random_sets": 1.05}
    if mix == "input":
        least = dict.fromkeys(least, 1.1)
    for policy, ratio in least.items():
        assert rehearse(MIXES[mix], policy, at_once=2 if policy == "random_sets" else 0).now >= ratio * ours, policy


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("mix", ["balanced", "compute", "input", "gpu"])
def test_queue_on_a_gpu_and_cores_ends_before_one_on_the_gpu_alone(mix: str, is_cold: bool) -> None:
    both = rehearse(MIXES[mix], "complementary", kinds=GPU_KINDS, with_gpu=True, is_cold=is_cold)
    gpu_alone = rehearse(MIXES[mix], "complementary", kinds=GPU_KINDS, with_gpu=True, with_cores=False, is_cold=is_cold)
    assert both.now <= 1.01 * gpu_alone.now
    assert both.num_started["cpu"] > 0 or mix == "compute" or is_cold
    if not is_cold:
        assert both.now <= 1.01 * rehearse(MIXES[mix], "rmixer_mixed", kinds=GPU_KINDS, with_gpu=True).now


ALONE = "device,job,num_devices,steps_per_s\nk80,A (batch size 2),1,4\nk80,B,1,2\n"
PAIRS = "device,job_a,num_devices_a,job_b,num_devices_b,steps_per_s_a,steps_per_s_b\n"


@pytest.mark.parametrize(
    "alone, pairs, message",
    [
        (ALONE, PAIRS + "k80,A (batch size 2),1,B,1,2,x\n", r"pair_throughputs.csv:2: 'x' is no finite number"),
        (ALONE, PAIRS + "k80,A (batch size 2),1,C,1,2,1\n", r"pair_throughputs.csv:2: no throughput of 'C' alone"),
        (ALONE, PAIRS + "k80,A (batch size 2),1,B\n", r"pair_throughputs.csv:2: the row has more or fewer values"),
        (ALONE, PAIRS, "has no pair on one k80"),
    ],
)
def test_bad_pairs_are_refused_with_their_line(tmp_path: Path, alone: str, pairs: str, message: str) -> None:
    (tmp_path / "throughputs.csv").write_text(alone)
    (tmp_path / "pair_throughputs.csv").write_text(pairs)
    with pytest.raises(TraceError, match=message):
        read_pairs(tmp_path, "k80")
