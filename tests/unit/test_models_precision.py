"""`model.dtype: auto`, on CPUs with instructions for bfloat16 and on those without."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import MINIMAL, changed

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.models import precision


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("processor: 0\nflags\t\t: fpu sse2 avx2 fma\n", False),
        ("processor: 0\nflags\t\t: fpu avx2 avx512f avx512bw\n", True),
        ("processor: 0\nFeatures\t: fp asimd bf16\n", True),
        ("processor: 0\nFeatures\t: fp asimd\n", False),
        ("nothing that is known\n", True),
    ],
)
def test_what_a_cpu_says(cpuinfo: str, has: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert precision.cpu_has_bfloat16.__wrapped__(tmp_path / "cpuinfo") is has


def test_a_cpu_that_says_nothing(tmp_path: Path) -> None:
    assert precision.cpu_has_bfloat16.__wrapped__(tmp_path / "nowhere") is True


@pytest.mark.parametrize(
    ("dtype", "device", "native", "expected"),
    [
        ("auto", "cpu", True, "bfloat16"),
        ("auto", "cpu", False, "float32"),
        ("auto", "cuda", False, "bfloat16"),
        ("bfloat16", "cpu", False, "bfloat16"),
        ("float32", "cpu", True, "float32"),
    ],
)
def test_auto_is_what_the_hardware_does_well(
    dtype: str, device: str, native: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: native)
    changes = {"model__dtype": dtype, "resources__device": device, "training__workers": 2}
    config = RLVRConfig.model_validate(changed(MINIMAL, **changes))
    assert precision.precision_of(config) == expected
    assert precision.settled(config).model.dtype == expected
    assert precision.settled(config).model.path == config.model.path
