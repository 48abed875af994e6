"""The graph of imports: no circle of files. Who may import whom is in pyproject.toml, checked by `lint-imports`."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the files of a circle of imports, the first again at the end; none where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for type checking and inside functions count: a circle means that two files are one."""
    graph = grimp.build_graph("roll_like", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    parts = {"cli", "builtin.pipelines.rlvr.pipeline", "builtin.rewards.math", "builtin.envs.sokoban"}
    assert {f"roll_like.{part}" for part in parts} <= set(imports)
    assert circle(imports) == []


@pytest.mark.parametrize("length", [2, 3])
def test_a_circle_is_found(length: int) -> None:
    files = [f"file_{number}" for number in range(length)]
    imports = {file: {files[(number + 1) % length]} for number, file in enumerate(files)}
    assert set(circle(imports)) == set(files)
