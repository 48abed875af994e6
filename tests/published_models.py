"""A Hugging Face cache with the config.json of published models, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from roll_like.models.shape import PUBLISHED

SHAPES = Path(__file__).parent / "data" / "shapes"


def cache_published_models(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Fill `folder/hub` with them, as models of Qwen, and let it be the cache."""
    for published in (*SHAPES.iterdir(), *PUBLISHED.iterdir()):
        model = folder / "hub" / f"models--Qwen--{published.name}"
        snapshot = model / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        shutil.copy(published / "config.json", snapshot)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("0" * 40)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
