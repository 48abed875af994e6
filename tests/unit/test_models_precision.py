"""`model.dtype: auto`: what a CPU computes fastest in, as measured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from config_files import MINIMAL, changed

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.models import precision


@pytest.mark.parametrize(
    ("dtype", "device", "speed", "expected", "shown"),
    [
        ("auto", "cpu", 2.0, "bfloat16", "auto is bfloat16 here: bfloat16 measured 2 times"),
        ("auto", "cpu", 1.0, "bfloat16", "auto is bfloat16 here: bfloat16 measured 1 times"),
        ("auto", "cpu", 0.23, "float32", "auto is float32 here: bfloat16 measured 0.23 times"),
        ("auto", "cuda", 0.1, "bfloat16", None),
        ("bfloat16", "cpu", 0.1, "bfloat16", None),
        ("float32", "cpu", 2.0, "float32", None),
    ],
)
def test_auto_is_what_the_hardware_does_well(
    dtype: str, device: str, speed: float, expected: str, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "bfloat16_speed", lambda: speed)
    changes = {"model__dtype": dtype, "resources__device": device, "training__workers": 2}
    config = RLVRConfig.model_validate(changed(MINIMAL, **changes))
    assert precision.precision_of(config) == expected
    assert precision.settled(config).model.dtype == expected
    assert precision.settled(config).model.path == config.model.path
    why = precision.auto_precision(config)
    assert why == (None if shown is None else f"model.dtype: {shown} as fast as float32")


def test_a_cpu_without_its_own_bfloat16_measures_slower() -> None:
    limited = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    program = "from roll_like.models.precision import slow_bfloat16; print(slow_bfloat16())"
    found = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | limited, capture_output=True, text=True, check=True
    )
    assert found.stdout == "True\n"
