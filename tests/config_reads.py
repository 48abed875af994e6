"""Which keys of which configuration class the code reads, by following types from annotations.

Each expression has a set of classes that its value may be of, or may hold: containers count as what is in them. That
set comes from annotations of parameters, attributes, properties and return values, and from what is assigned.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from pydantic import BaseModel

import roll_like
from roll_like.config.base import PluginConfig

Classes: TypeAlias = frozenset[type]
Scope: TypeAlias = dict[str, Classes]

NONE: Classes = frozenset()
VALIDATORS = {"field_validator", "model_validator"}
#: Modules that only run.
ONLY_RUN = ("__main__", "_main", "assert_process")
#: Imports of what belongs to processes of vLLM, to machines with GPUs, or to what `make megatron` installs.
ELSEWHERE = re.compile(r"^(?:from|import) (?:vllm|triton|megatron)\b", re.MULTILINE)
#: Attributes by which plugins reach their settings.
SETTINGS = {"config", "_config", "settings", "_settings"}


def modules() -> Iterator[ModuleType]:
    """Import and yield each module of the package that this process can import, its built-in plugins included."""
    for found in pkgutil.walk_packages(roll_like.__path__, "roll_like."):
        if found.name.endswith(ONLY_RUN) or "verifiers_harnesses." in found.name:
            continue
        spec = importlib.util.find_spec(found.name)
        assert spec is not None
        assert spec.origin is not None
        if ELSEWHERE.search(Path(spec.origin).read_text(encoding="utf-8")):
            continue
        try:
            yield importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if ELSEWHERE.match(f"import {error.name}") is None:
                raise


@dataclass
class Code:
    """One module: its tree, and the names that annotations may use."""

    tree: ast.Module
    names: dict[str, Any]


def code_of(module: ModuleType) -> Code:
    """Parse a module; names that are imported for type checkers only are imported too."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    names = {**vars(typing), **vars(module)}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                _import_into(names, statement)
    return Code(tree, names)


def _import_into(names: dict[str, Any], statement: ast.stmt) -> None:
    """Run an import; what cannot be imported in this process is `Any`, as it has no settings of ours."""
    try:
        exec(ast.unparse(statement), names)
    except ModuleNotFoundError as error:
        if ELSEWHERE.match(f"import {error.name}") is None:
            raise
        assert isinstance(statement, (ast.Import, ast.ImportFrom))
        names.update({alias.asname or alias.name: Any for alias in statement.names})


def classes_in(annotation: Any) -> Classes:
    """Return our classes, and models, that a value with this annotation may be of or may hold."""
    if isinstance(annotation, typing.TypeVar):
        return classes_in(annotation.__bound__)
    origin = typing.get_origin(annotation)  # `Reader[Pair]` is both
    parts = [*typing.get_args(annotation), *([origin] if isinstance(origin, type) and origin is not annotation else [])]
    found = {part for each in parts if each is not typing.Generic for part in classes_in(each)}
    if isinstance(annotation, type) and (
        annotation.__module__.startswith("roll_like") or issubclass(annotation, BaseModel)
    ):
        found.add(annotation)
        # a generic model's fields are those of what it parametrises
        origin = getattr(annotation, "__pydantic_generic_metadata__", {}).get("origin")
        found |= set() if origin is None else {origin}
    return frozenset(found)


@dataclass
class Reads:
    """Follows types through the code and notes which fields are read."""

    fields: set[tuple[type, str]] = field(default_factory=set)
    _attributes: dict[tuple[type, str], Classes] = field(default_factory=dict)
    _plugins: dict[type, Classes] = field(default_factory=dict)

    def follow(self, codes: Mapping[str, Code]) -> None:
        """Go through all modules twice: first for what attributes hold, then for what is read of them."""
        for code in codes.values():
            for name in code.names:
                self._note_plugin(code.names[name])
        for _ in range(2):
            for name, code in codes.items():
                if not name.rpartition(".")[2].startswith("rules"):
                    self._block(code.tree.body, {}, code, None)

    def _note_plugin(self, found: Any) -> None:
        config = getattr(found, "Config", None) if isinstance(found, type) else None
        if isinstance(config, type) and issubclass(config, PluginConfig):
            for base in found.__mro__[:-1]:
                self._plugins[base] = self._plugins.get(base, NONE) | {config}
            for related, configs in list(self._plugins.items()):
                if issubclass(found, related):
                    self._plugins[related] = configs | {config}

    # statements

    def _block(self, body: list[ast.stmt], scope: Scope, code: Code, owner: type | None) -> None:
        for statement in body:
            self._statement(statement, scope, code, owner)

    def _statement(self, node: ast.stmt, scope: Scope, code: Code, owner: type | None) -> None:
        if isinstance(node, ast.ClassDef):
            found = code.names.get(node.name) if owner is None else getattr(owner, node.name, None)
            self._block(node.body, dict(scope), code, found if isinstance(found, type) else None)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            self._assignment(node, scope, code, owner)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._function(node, scope, code, owner)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._bind(node.target, self._of(node.iter, scope, code), scope, code)
            self._block([*node.body, *node.orelse], scope, code, owner)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                value = self._of(item.context_expr, scope, code)
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, value, scope, code)
            self._block(node.body, scope, code, owner)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self._statement(child, scope, code, owner)
                elif isinstance(child, ast.expr):
                    self._of(child, scope, code)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    self._block(child.body, scope, code, owner)

    def _assignment(self, node: ast.Assign | ast.AnnAssign, scope: Scope, code: Code, owner: type | None) -> None:
        value = NONE if node.value is None else self._of(node.value, scope, code)
        if isinstance(node, ast.AnnAssign):
            value |= self._annotated(node.annotation, code)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if owner is not None and isinstance(target, ast.Name):
                self._attributes[owner, target.id] = self._attributes.get((owner, target.id), NONE) | value
            self._bind(target, value, scope, code)

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, code: Code, owner: type | None
    ) -> None:
        if any(name in ast.unparse(decorator) for decorator in node.decorator_list for name in VALIDATORS):
            return  # what a validator reads is only checked
        inner = dict(scope)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in [*arguments, *filter(None, [node.args.vararg, node.args.kwarg])]:
            inner[argument.arg] = self._annotated(argument.annotation, code)
        if owner is not None and arguments and arguments[0].arg in ("self", "cls"):
            inner[arguments[0].arg] = frozenset({owner})
        self._block(node.body, inner, code, None)

    def _bind(self, target: ast.expr, value: Classes, scope: Scope, code: Code) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = scope.get(target.id, NONE) | value
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._bind(part, value, scope, code)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, value, scope, code)
        elif isinstance(target, ast.Attribute):
            for owner in self._of(target.value, scope, code):
                self._attributes[owner, target.attr] = self._attributes.get((owner, target.attr), NONE) | value
        else:
            self._of(target, scope, code)

    def _annotated(self, annotation: ast.expr | None, code: Code) -> Classes:
        if annotation is None:
            return NONE
        text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
        try:
            return classes_in(eval(str(text), code.names))
        except (NameError, TypeError, AttributeError):
            return NONE

    # expressions

    def _of(self, node: ast.expr, scope: Scope, code: Code) -> Classes:
        """Return what an expression may be of, and note what it reads."""
        if isinstance(node, ast.Name):
            if node.id in scope:
                return scope[node.id]
            found = code.names.get(node.id)
            return frozenset({found}) if isinstance(found, type) else NONE
        if isinstance(node, ast.Attribute):
            return self._taken(self._of(node.value, scope, code), node.attr)
        if isinstance(node, ast.Call):
            return self._called(node, scope, code)
        if isinstance(node, ast.Lambda):
            return self._of(node.body, {**scope, **{each.arg: NONE for each in node.args.args}}, code)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inner = dict(scope)
            for part in node.generators:
                self._bind(part.target, self._of(part.iter, inner, code), inner, code)
                for condition in part.ifs:
                    self._of(condition, inner, code)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return frozenset().union(*(self._of(part, inner, code) for part in parts))
        if isinstance(node, ast.NamedExpr):
            value = self._of(node.value, scope, code)
            self._bind(node.target, value, scope, code)
            return value
        found = [self._of(child, scope, code) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FormattedValue):
                self._of(child.value, scope, code)
        return frozenset().union(*found)

    def _taken(self, owners: Classes, name: str) -> Classes:
        found: Classes = NONE
        for owner in owners:
            if issubclass(owner, BaseModel) and name in owner.model_fields:
                self.fields.add((owner, name))
                found |= classes_in(owner.model_fields[name].annotation)
            if getattr(owner, "_is_protocol", False):
                self.fields.add((owner, name))  # of whatever class has all of its members
            if name in SETTINGS and owner in self._plugins:
                found |= self._plugins[owner]
            for base in owner.__mro__:
                found |= self._attributes.get((base, name), NONE)
            # of a subclass of `Workers[AgenticConfig]` what is bound to the parameter is an `AgenticConfig`
            given = classes_in(owner.__orig_bases__[0]) if "__orig_bases__" in vars(owner) else NONE
            bounds = tuple(each for each in found if not getattr(each, "_is_protocol", False))
            found |= {each for each in given if issubclass(each, bounds)}
            member = inspect.getattr_static(owner, name, None)
            if isinstance(member, property):
                member = member.fget
            elif isinstance(member, staticmethod | classmethod):
                member = member.__func__
            if isinstance(member, FunctionType):
                found |= returned(member, owner)
        return found

    def _called(self, node: ast.Call, scope: Scope, code: Code) -> Classes:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        given = frozenset().union(*(self._of(each, scope, code) for each in arguments))
        if isinstance(node.func, ast.Name):
            name = node.func.id
            if name == "getattr" and isinstance(node.args[1], ast.Constant):
                return self._taken(self._of(node.args[0], scope, code), str(node.args[1].value)) | given
            if name == "cast" and len(node.args) == 2:
                return self._annotated(node.args[0], code) | given
            known = code.names.get(name)
            if isinstance(known, FunctionType):
                return returned(known)
        found = self._of(node.func, scope, code) | given  # `sorted(configs)` holds what it was given
        if isinstance(node.func, ast.Attribute):
            owners = self._of(node.func.value, scope, code)
            found |= frozenset(owner for owner in owners if not hasattr(owner, node.func.attr))  # `configs.values()`
        return found


def returned(function: FunctionType, owner: type | None = None) -> Classes:
    """Return what a function's result may be of."""
    annotation = inspect.get_annotations(function).get("return")
    if annotation in ("Self", typing.Self) and owner is not None:
        return frozenset({owner})
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, {**vars(typing), **function.__globals__})
        except (NameError, TypeError, AttributeError):
            return NONE
    return classes_in(annotation)


def reads() -> Reads:
    """Return every field of a configuration class that the package reads."""
    found = Reads()
    found.follow({module.__name__: code_of(module) for module in modules()})
    return found
