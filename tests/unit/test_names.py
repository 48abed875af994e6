"""A public name means one thing in `roll_like`, `pipelines`, `rewards` and `envs`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("roll_like", "pipelines", "rewards", "envs")
#: What creates a type variable: a name inside one module, by convention the same in many.
TYPE_VARIABLES = {"TypeVar", "ParamSpec"}
#: Backends, or pipelines, that each have a function with the same job; `main` is a command's.
SHARED_FUNCTIONS = {
    "engine_arguments": "of SGLang and of vLLM",
    "known_arguments": "of SGLang and of vLLM",
    "main": "what runs as `python -m` or as a child process",
    "start_reference": "of pipelines that sample, and of those on preference data",
}


def sources(root: Path = ROOT) -> Iterator[tuple[str, ast.Module]]:
    """Yield each file of the packages; `roll_like/builtin` links to the three others."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            file = path.relative_to(root)
            if file.parts[:2] != ("roll_like", "builtin"):
                yield str(file), ast.parse(path.read_text(encoding="utf-8"))


def types(statement: ast.stmt) -> set[str]:
    """Return the class or the type alias that a statement of a module defines."""
    if isinstance(statement, ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation) == "TypeAlias":
        targets, value = [statement.target], statement.value
    else:
        return set()
    if isinstance(value, ast.Call) and ast.unparse(value.func) in TYPE_VARIABLES:
        return set()
    names = {each.id for each in targets if isinstance(each, ast.Name)}
    return {name for name in names if name[0].isupper() and not name.isupper()}


def functions(statement: ast.stmt) -> set[str]:
    """Return the function that a statement of a module defines."""
    return {statement.name} if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) else set()


def repeated(names: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the names of several files."""
    return {name: files for name, files in sorted(names.items()) if len(files) > 1}


@cache
def collected(root: Path = ROOT) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the files that define each public type, and each public function."""
    of_types, of_functions = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for file, module in sources(root):
        for find, found in ((types, of_types), (functions, of_functions)):
            # once per file: overloads, and definitions that depend on what is installed
            for name in {name for statement in module.body for name in find(statement) if not name.startswith("_")}:
                found[name].append(file)
    return of_types, of_functions


def test_a_type_has_a_name_of_its_own() -> None:
    """Rename the newer one: to the field's term for what it is, with what tells it from the other."""
    of_types, _ = collected()
    assert len(of_types) > 500
    assert repeated(of_types) == {}


def test_a_function_has_a_name_of_its_own() -> None:
    _, of_functions = collected()
    assert set(repeated(of_functions)) == set(SHARED_FUNCTIONS)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("class Row: ...", {"Row"}),
        ("def outer():\n    class Row: ...", set()),
        ("class Outer:\n    class Row: ...", {"Outer"}),
        ("Row: TypeAlias = dict[str, int]", {"Row"}),
        ("Row = dict[str, int]", {"Row"}),
        ("RowT = TypeVar('RowT')", set()),
        ("ROWS = 5", set()),
        ("rows: int = 5", set()),
    ],
)
def test_classes_and_aliases_of_a_module_count(text: str, names: set[str]) -> None:
    assert {name for statement in ast.parse(text).body for name in types(statement)} == names


def test_a_second_definition_is_found_with_both_files(tmp_path: Path) -> None:
    for file in ("roll_like/data/rows.py", "rewards/rows.py", "roll_like/builtin/rewards/rows.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("class Row: ...\n\n\nclass _Own: ...\n\n\ndef read(): ...\n", encoding="utf-8")
    files = ["roll_like/data/rows.py", "rewards/rows.py"]
    assert [repeated(each) for each in collected(tmp_path)] == [{"Row": files}, {"read": files}]
