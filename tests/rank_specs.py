"""What a training rank on CPU is told in tests where only its objective and its model matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_like.training.interface import RankSpec


def cpu_rank(objective: Any, model: Path | str, **changed: Any) -> RankSpec[Any]:
    """Return a spec in float32 with one thread, seed 0 and ten updates; `changed` are other fields of `RankSpec`."""
    fields = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "seed": 0,
        "total_updates": 10,
        "trust_remote_code": False,
        "window": 256,
    }
    return RankSpec(objective=objective, model_path=str(model), **fields | changed)
