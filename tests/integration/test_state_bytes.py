"""What the plan says of a backend's memory is what the backend holds, and what DeepSpeed's own estimates say."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import on_ranks
from held_states import held_states

from roll_like.config.training import StateBytes, StateSizes, TrainingConfig
from roll_like.training.deepspeed import BUCKET_ELEMENTS, LIVE_PARAMETERS, DeepSpeedBackend

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("backend", "stage", "dtype", "optimizer"),
    [
        ("deepspeed", 1, "bfloat16", "adamw"),
        ("fsdp2", 3, "bfloat16", "adamw"),
        *(pytest.param("deepspeed", stage, "bfloat16", "adamw", marks=pytest.mark.slow) for stage in (0, 2, 3)),
        *(pytest.param("deepspeed", stage, "float32", "adamw", marks=pytest.mark.slow) for stage in (0, 1, 2, 3)),
        pytest.param("fsdp2", 3, "float32", "adamw", marks=pytest.mark.slow),
        *(pytest.param("deepspeed", stage, "bfloat16", "muon", marks=pytest.mark.slow) for stage in (0, 1, 3)),
        pytest.param("fsdp2", 3, "bfloat16", "muon", marks=pytest.mark.slow),
    ],
)
def test_states_are_what_the_backend_holds(backend: str, stage: int, dtype: str, optimizer: str) -> None:
    """Of one rank, after a backward pass: its bucket is as large as the module, and part of neither."""
    (found,) = on_ranks(held_states, backend, stage, dtype, optimizer, ranks=1)
    held, planned, parameters = found["held"], found["planned"], found["parameters"]
    assert held["weights"] == pytest.approx(planned["weights"], rel=0.01)
    bucket = parameters * (2 if dtype == "bfloat16" else 4) if backend == "deepspeed" and stage > 1 else 0
    expected = planned["gradients"] + planned["optimizer"]
    assert expected * 0.99 <= held["others"] <= expected * 1.01 + bucket


def states(stage: Any, ranks: int, parameters: int, largest: int) -> StateBytes:
    sizes = StateSizes(parameters=parameters, trained=parameters, largest=largest, layer=0, outside=0, width=2)
    return DeepSpeedBackend.state_bytes(TrainingConfig(zero_stage=stage, workers=ranks), sizes)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_states_are_those_of_deepspeeds_estimates(ranks: int) -> None:
    """Up to 16-bit gradients of stage 2: DeepSpeed says 2 bytes a parameter, and holds as many as its bucket has."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    parameters, largest = 7_615_616_512, 544_997_376
    _, theirs = estimate_zero2_model_states_mem_needs(parameters, num_gpus_per_node=ranks, cpu_offload=False)
    ours = states(2, ranks, parameters, largest)
    assert ours.weights + ours.gradients + ours.optimizer == pytest.approx(theirs - 2 * parameters / ranks, rel=1e-6)
    assert ours.buffers == 2 * (BUCKET_ELEMENTS + largest)

    _, theirs, of_largest = estimate_zero3_model_states_mem_needs(
        parameters, largest, num_gpus_per_node=ranks, cpu_offload=False, cpu_offload_params=False
    )
    ours = states(3, ranks, parameters, largest)
    assert ours.weights + ours.gradients + ours.optimizer == pytest.approx(theirs - of_largest, rel=1e-6)
    gathered = 2 * (LIVE_PARAMETERS + largest) if ranks > 1 else 0
    assert ours.buffers == 2 * (BUCKET_ELEMENTS + largest) + gathered
