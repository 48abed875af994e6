"""Tests that are Python text: assertions, and HumanEval's `check(candidate)`."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from roll_like.sandbox import AssertTest, CallTest, TestCase
from roll_like.sandbox.compare import short_repr

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def read_assertions(code: str, entry_point: str, entry_point_field: str, *, numpy: bool = False) -> str:
    """Return the code that tests a program, with the call of `check` that HumanEval leaves out.

    Args:
        entry_point: The function under test, "" for none.
        entry_point_field: Where that is looked for.
        numpy: Whether it may import NumPy.

    Raises:
        ValueError: It is no Python, asserts nothing when it is run, or imports what it may not.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests are not valid Python: {error}") from error
    _check_imports(tree, numpy)
    functions = {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}
    executed = list(_executed(tree.body))
    called = {node.func.id for node in executed if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if "check" in functions and "check" not in called:
        if not entry_point:
            raise ValueError(
                f"the tests define check(candidate), and no field {entry_point_field!r} names the function"
            )
        return f"{code.rstrip()}\n\ncheck({_bound(entry_point)})\n"
    if called & functions or any(isinstance(node, (ast.Assert, ast.Raise)) for node in executed):
        return code
    tests = sorted(name for name in functions if re.match(r"(?i)test", name))
    if tests:
        raise ValueError(
            f"the tests define {', '.join(tests[:3])} and call none, as a file for pytest or unittest, which is not "
            "run here; write the assertions outside of functions, or call the functions at the end"
        )
    raise ValueError(f"the tests assert nothing when they are run: {short_repr(code)}")


def resolve_entry_points(tests: Sequence[TestCase], program: str) -> tuple[TestCase, ...]:
    """Return the tests with methods of a class, `Solution` most often, for functions that only it has.

    LeetCode's problems are answered either way.
    """
    if not re.search(r"^class\b", program, re.MULTILINE):
        return tuple(tests)
    return tuple(_resolved(test, program) for test in tests)


def _resolved(test: TestCase, program: str) -> TestCase:
    if isinstance(test, CallTest):
        owner = _class_of(test.entry_point, program)
        return replace(test, entry_point=f"{owner}.{test.entry_point}") if owner else test
    if not isinstance(test, AssertTest):
        return test
    tree = ast.parse(test.code)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
    names -= {node.name for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)}
    owners = {name: owner for name in sorted(names) if (owner := _class_of(name, program))}
    return replace(test, code="".join(f"{name} = {owner}().{name}\n" for name, owner in owners.items()) + test.code)


def _class_of(name: str, program: str) -> str:
    """Return the class that has a method of the name where the module has none, "" for none.

    Hostile text is not parsed. Of several classes `Solution` is meant.
    """
    word = re.escape(name)
    defined = rf"^(?:async[ \t]+)?(?:def|class)[ \t]+{word}\b|^{word}[ \t]*[=:]"
    if re.search(defined, program, re.MULTILINE):
        return ""
    owners, current = set[str](), ""
    for match in re.finditer(rf"^class[ \t]+(\w+)|^[ \t]+(?:async[ \t]+)?def[ \t]+{word}\b", program, re.MULTILINE):
        current = match[1] or current
        if match[1] is None and current:
            owners.add(current)
    return owners.pop() if len(owners) == 1 else "Solution" if "Solution" in owners else ""


def _bound(name: str) -> str:
    """Return how a test says what an entry point means: `Solution.f` is a method of a `Solution()`."""
    return re.sub(r"^(\w+)\.", r"\1().", name)


def _executed(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes that run when a test is run: neither bodies of definitions, nor what is for a main program."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "__name__" in {
            name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)
        }:
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _check_imports(tree: ast.Module, numpy: bool) -> None:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."] if not node.level else ["." * node.level]
        for name in names:
            root = name.partition(".")[0]
            if root in {"pytest", "unittest"}:
                raise ValueError(f"the tests are for {root}, which is not run here; write them as assertions")
            if root == "numpy" and numpy:
                continue
            if root == "numpy":
                raise ValueError(f"the tests import {name}; set `numpy: true` of the reward `code` to allow it")
            if root not in sys.stdlib_module_names:
                raise ValueError(
                    f"the tests import {name}, and only the standard library can be imported; the program's own names "
                    "need no import"
                )
