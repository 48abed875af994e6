"""How plugins of installed packages are found: an engine and a training backend by entry points of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_like.errors import PluginError
from roll_like.registry import Registry

PLUGINS = """
from roll_like.registry import INFERENCE_ENGINES, TRAINING_BACKENDS

@INFERENCE_ENGINES.register("parrot")
class Parrot:
    pass

@TRAINING_BACKENDS.register("plain")
class Plain:
    pass
"""
ENTRY_POINTS = (
    "[roll_like.inference_engines]\nparrot = users_plugins\n[roll_like.training_backends]\nplain = users_plugins\n"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A user's package as it lies in site-packages."""
    (tmp_path / "users_plugins.py").write_text(PLUGINS)
    metadata = tmp_path / "users_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: users-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def test_a_users_package_adds_an_engine_and_a_training_backend(package: Path) -> None:
    check = (
        "import sys; from roll_like.registry import INFERENCE_ENGINES as engines, TRAINING_BACKENDS as backends; "
        "print(engines.names(), backends.names(), backends.origin('plain')); "
        "print([name for name in ('torch', 'vllm', 'deepspeed', 'transformers') if name in sys.modules])"
    )
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.splitlines() == [
        "['hf', 'parrot', 'sglang', 'vllm'] ['deepspeed', 'fsdp2', 'megatron', 'plain'] users_plugins.Plain",
        "[]",
    ]


def test_a_broken_package_does_not_hide_plugins_of_others(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[object] = Registry("thing", group="things")

    class Point:
        def __init__(self, name: str) -> None:
            self.name = self.value = name

        def load(self) -> None:
            if self.name != "good":
                raise ImportError(f"No module named {self.name!r}")
            registry.register("good")(object)

    monkeypatch.setattr("roll_like.registry.entry_points", lambda group: [Point("bad"), Point("good"), Point("worse")])
    assert registry.get("good") is object
    assert registry.names() == ["good"]
    for _ in range(2):
        with pytest.raises(PluginError, match="the entry point 'bad' of group 'things' cannot be imported: No module"):
            registry.get("bad")
    assert "'bad'" in str(registry.broken())
