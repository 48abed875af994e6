"""Imports without garbage collection."""

from __future__ import annotations

import gc
import importlib

import pytest

from roll_like.models.imports import quick_imports


def test_the_collector_pauses_and_goes_on() -> None:
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError, match="roll_like_nothing"), quick_imports():
        importlib.import_module("roll_like_nothing")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with quick_imports(), quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_decorates_functions() -> None:
    @quick_imports()
    def enabled() -> bool:
        return gc.isenabled()

    assert (enabled(), gc.isenabled(), enabled()) == (False, True, False)
