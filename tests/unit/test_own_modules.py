"""Modules that a test wrote are forgotten after it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from own_modules import own_modules


@pytest.mark.parametrize("again", [False, True])
def test_modules_that_a_test_wrote_are_forgotten(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the module that was the newest before is imported again."""
    (tmp_path / "written_by_a_test.py").touch()
    path, newest = list(sys.path), list(sys.modules)[-1]
    with own_modules(tmp_path):
        sys.path.insert(0, str(tmp_path))
        importlib.invalidate_caches()
        importlib.import_module("written_by_a_test")
        if again:
            monkeypatch.setitem(sys.modules, newest, sys.modules.pop(newest))  # it comes last now
    assert "written_by_a_test" not in sys.modules
    assert newest in sys.modules
    assert sys.path == path
