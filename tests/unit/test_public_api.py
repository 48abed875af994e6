from __future__ import annotations

import ast
import importlib
import inspect
import json
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, get_args

import pytest

import roll_like
from roll_like import errors
from roll_like.config.base import ConfigModel
from roll_like.registry import PIPELINES, REGISTRIES, Registry

ROOT = Path(__file__).resolve().parents[2]
OURS = {"roll_like", "pipelines", "envs", "rewards"}
PUBLIC = set(roll_like.__all__)
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "mlflow", "matplotlib")
WRITTEN = [
    ROOT / "README.md",
    *(
        file
        for folder in ("docs", "examples")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in (".md", ".py", ".ipynb")
    ),
]
#: What the reference names, by the place that it is imported from.
DOCUMENTED = {
    name
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), flags=re.M)
}
ERRORS = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, errors.RollLikeError)]


def imported(name: str) -> Any:
    module, _, member = name.rpartition(".")
    return getattr(importlib.import_module(module), member)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_every_public_name_can_be_imported_and_no_other() -> None:
    assert len(roll_like.__all__) == len(PUBLIC)
    assert set(dir(roll_like)) >= PUBLIC
    for name in PUBLIC:
        exec(f"from roll_like import {name}", {})
    with pytest.raises(AttributeError, match="no_such_name"):
        roll_like.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_no_public_name_is_that_of_a_module() -> None:
    """An import of the module would take its place."""
    assert PUBLIC & {path.stem for path in (ROOT / "roll_like").iterdir()} == set()


def test_every_line_of_the_stub_shows_a_name_and_is_read() -> None:
    """A type checker takes only `import A as A` for public; what `__init__.py` did not read would not be found."""
    stub = ast.parse((ROOT / "roll_like" / "__init__.pyi").read_text(encoding="utf-8"))
    found = [(alias.name, alias.asname, node.module) for node in stub.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(name for name, _, _ in found) == sorted(PUBLIC)
    for name, shown_as, place in found:
        assert shown_as == name
        assert getattr(importlib.import_module(place), name) is getattr(roll_like, name)


def sections(annotation: Any) -> Iterator[type[ConfigModel]]:
    """Yield every configuration class that an annotation holds."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for part in get_args(annotation):
        yield from sections(part)


def test_the_root_exports_what_users_write_against_and_no_more() -> None:
    assert len(PUBLIC) <= 125


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_every_name_of_the_reference_can_be_imported_and_says_what_it_is(name: str) -> None:
    value = imported(name)
    if inspect.isclass(value) or inspect.isfunction(value):  # no alias
        assert value.__doc__


def test_every_section_of_a_built_in_pipeline_is_in_the_reference() -> None:
    found = {section for name in PIPELINES.names() for section in sections(PIPELINES.get(name))}
    ours = {section for section in found if section.__module__.startswith("roll_like.")}
    assert len(ours) > 50
    assert ours <= {value for value in map(imported, DOCUMENTED) if inspect.isclass(value)}


def test_every_error_and_registry_is_public() -> None:
    assert all(getattr(roll_like, error.__name__) is error for error in ERRORS)
    public = [value for value in map(partial(getattr, roll_like), PUBLIC) if isinstance(value, Registry)]
    assert {id(value) for value in public} == {id(value) for value in REGISTRIES}


def test_the_contributing_page_names_only_what_is_public() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    rows = page.partition("| to write | import from `roll_like` | and from |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[2:4]] for row in rows]
    ours = {name for own, _ in cells for name in own}
    assert len(ours) > 40
    assert ours <= PUBLIC
    others = {name for _, beside in cells for name in beside if not name.startswith("roll_like.")}
    assert others <= {name.rpartition(".")[2] for name in DOCUMENTED}


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_and_examples_import_what_is_in_the_reference(path: Path) -> None:
    """`cli`, a module, is the one exception, for calls of the program."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    elif path.suffix == ".md":
        text = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S))
    named = {
        f"{module}.{name}"
        for module, found in re.findall(r"^\s*from (roll_like[\w.]*) import (\([^)]*\)|.*)$", text, flags=re.M)
        for name in re.findall(r"\w+", found.partition(" as ")[0])
    }
    places = {name.rpartition(".")[2]: name for name in DOCUMENTED}
    for name in named - {"roll_like.cli"}:  # `roll_like.envs` also has what the root exports of it
        assert imported(name) is imported(places[name.rpartition(".")[2]])
    assert re.findall(r"^\s*import roll_like\..*$", text, flags=re.M) == []


def test_no_file_lies_at_the_root_of_the_package_but_these() -> None:
    allowed = {"__init__", "cli", "types", "values", "errors", "registry"}
    assert {path.stem for path in (ROOT / "roll_like").glob("*.py")} == allowed


def test_the_built_ins_are_reached_under_one_name_only() -> None:
    """Imported as `rewards` too, a module would register everything twice."""
    folders = ("roll_like", "pipelines", "envs", "rewards", "tests", "benchmarks", "scripts", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = {(file.name, name) for file in files for name in imports(file)}
    assert {(file, name) for file, name in found if name.partition(".")[0] in ("pipelines", "envs", "rewards")} == set()


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, roll_like; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code) == "[]"


def test_the_configuration_classes_load_nothing_heavy() -> None:
    configs = sorted(name for name in PUBLIC if name.endswith(("Config", "Source", "Data", "Error")) or name.isupper())
    code = f"import sys; from roll_like import {', '.join(configs)}; print([x for x in {HEAVY!r} if x in sys.modules])"
    assert run(code) == "[]"


def test_a_configuration_is_loaded_without_anything_heavy() -> None:
    """A misspelt key is reported in a second: what an editor, a notebook's first cell and a typo need."""
    names = ("rlvr_quickstart", "agentic_frozenlake", "online_dpo_quickstart", "sft_quickstart", "distill_quickstart")
    files = [str(ROOT / "configs" / f"{name}.yaml") for name in names]
    found = f"[(file, name) for file in {files!r} if load_config(file) for name in {HEAVY!r} if name in sys.modules]"
    assert run(f"import sys; from roll_like.config.load import load_config; print({found})") == "[]"


def test_every_package_that_is_imported_is_declared() -> None:
    files = [file for folder in OURS for file in (ROOT / folder).rglob("*.py")]
    # tests that `roll-like init` writes; it says how to install what they need
    files = [file for file in files if not file.match("starters/templates/*/test_*.py")]
    imported = {name.partition(".")[0] for file in files for name in imports(file)} - sys.stdlib_module_names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    declared = {normal(re.split(r"[^\w.-]", name)[0]) for name in wanted}
    # pydantic pins its core; vLLM's CPU build has a name of its own; torch's builds for GPUs bring Triton; what imports
    # verifiers runs where that is; megatron-core, an extra, is not installed beside the others
    given = {*OURS, "pydantic_core", "vllm", "triton", "verifiers", "openai", "megatron"}
    installed = packages_distributions()
    undeclared = {
        name for name in imported - given if not {normal(found) for found in installed.get(name, [name])} & declared
    }
    assert undeclared == set()


@cache
def imports(file: Path) -> tuple[str, ...]:
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_errors_keep_their_remedy_through_pickling_and_are_drawn(error: type[errors.RollLikeError]) -> None:
    found = pickle.loads(pickle.dumps(error("what was found", fix="what to change")))
    assert type(found) is error
    assert (found.message, found.fix) == ("what was found", "what to change")
    assert str(found) == "what was found\n  fix: what to change"
    drawn = inspect.getdoc(errors) or ""
    assert error.__name__ in drawn
    if error is not errors.RollLikeError:
        standard = next(base for base in error.__mro__ if base.__module__ == "builtins")
        assert f"{error.__name__:<18} ({standard.__name__})" in drawn
