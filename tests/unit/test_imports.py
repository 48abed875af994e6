"""The graph of imports: no circle of files. Who may import whom is in pyproject.toml, checked by `lint-imports`."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import roll_like

ROOT_FILES = {"__init__.py", "__init__.pyi", "cli.py", "errors.py", "py.typed", "registry.py", "types.py", "values.py"}


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


def files_at_the_root(package: Path) -> set[str]:
    return {path.name for path in package.iterdir() if path.is_file()}


def test_the_root_of_the_package_holds_no_further_file() -> None:
    """A new module belongs into the folder of its layer; what every layer uses is in these files."""
    assert files_at_the_root(Path(roll_like.__file__).parent) == ROOT_FILES


def test_a_further_file_at_the_root_is_found(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "helpers.py").touch()
    assert files_at_the_root(tmp_path) == {"helpers.py"}
