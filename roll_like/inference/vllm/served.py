"""Which models and adapters the installed vLLM can serve, read from its source: importing it takes many seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from roll_like.inference.settings import package_folder

_MARK = "SupportsLoRA"


def adapter_layers(architecture: str) -> frozenset[str] | None:
    """Return names of layers that vLLM's model has, perhaps more; None for a model that takes no adapters.

    The engine itself says exactly which layers take one, when it has started.

    Args:
        architecture: As in `architectures` of a config.json.
    """
    place = _registered().get(architecture)
    if place is None:
        return None
    module, model = place
    if not _takes_adapters(module, model):
        return None
    parts = [module, *(found[0] for each in _language_models(module) if (found := _registered().get(each)) is not None)]
    return frozenset(name for part in parts for each in _with_imported(part) for name in _layer_names(each))


def knows(architecture: str) -> bool | None:
    """Return whether vLLM has a model of an architecture; None where it is not installed."""
    registered = _registered()
    return architecture in registered if registered else None


#: What vLLM compares with the names of models.
_NAMES_MODELS = {"model_type", "architectures", "arch"}


@cache
def guessing_models() -> frozenset[str]:
    """Return model types and architectures whose own layers can guess tokens; nothing where vLLM is not installed."""
    source = _parsed("config", "speculative")
    functions = [each for each in ast.walk(source) if isinstance(each, ast.FunctionDef)] if source else []
    return frozenset(
        constant.value
        for function in functions
        if function.name == "hf_config_override"
        for compared in ast.walk(function)
        if isinstance(compared, ast.Compare)
        and _NAMES_MODELS & set(ast.unparse(compared.left).replace("[", ".").split("."))
        for constant in ast.walk(compared)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    )


def _source(module: str) -> ast.Module | None:
    return _parsed("model_executor", "models", module)


@cache
def _parsed(*module: str) -> ast.Module | None:
    folder = package_folder("vllm")
    file = None if folder is None else folder.joinpath(*module).with_suffix(".py")
    return None if file is None or not file.is_file() else ast.parse(file.read_text(encoding="utf-8"))


def _registered() -> dict[str, tuple[str, str]]:
    """Return module and class of the models that generate text, by architecture."""
    found: dict[str, tuple[str, str]] = {}
    for statement in getattr(_source("registry"), "body", ()):
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and statement.targets[0].id in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
        ):
            found.update(ast.literal_eval(statement.value))
    return found


def _takes_adapters(module: str, model: str) -> bool:
    """Return whether a class, or one that it derives from, is marked as taking adapters."""
    tree = _source(module)
    if tree is None:
        return False
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name == model:
            bases = [base.id for base in statement.bases if isinstance(base, ast.Name)]
            return _MARK in bases or any(_takes_adapters(module, base) for base in bases)
        if isinstance(statement, ast.ImportFrom):
            for name in statement.names:
                if (name.asname or name.name) == model and (own := _sibling(statement)) is not None:
                    return _takes_adapters(own, name.name)
    return False


def _language_models(module: str) -> Iterator[str]:
    """Yield the architectures that a module has its language models built as."""
    tree = _source(module)
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "architectures" and isinstance(node.value, ast.List):
            yield from (str(each.value) for each in node.value.elts if isinstance(each, ast.Constant))


def _with_imported(module: str) -> Iterator[str]:
    """Yield a module and those of its folder that it imports from."""
    yield module
    for statement in getattr(_source(module), "body", ()):
        if isinstance(statement, ast.ImportFrom) and (own := _sibling(statement)) is not None:
            yield own


def _sibling(statement: ast.ImportFrom) -> str | None:
    """Return the module of the models' folder that is imported from; None for another place."""
    name = statement.module or ""
    if statement.level == 1:
        return name
    return name.removeprefix("vllm.model_executor.models.") if name.startswith("vllm.model_executor.models.") else None


def _layer_names(module: str) -> Iterator[str]:
    """Yield what is assigned a linear layer, and the names that such layers have in checkpoints."""
    tree = _source(module)
    for node in () if tree is None else ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        (target, *_), value = node.targets, node.value
        if isinstance(target, ast.Attribute) and isinstance(value, ast.Call):
            made = value.func.id if isinstance(value.func, ast.Name) else ""
            if made.endswith("Linear"):
                yield target.attr
        owner = target.value if isinstance(target, ast.Subscript) else target
        named = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if named == "packed_modules_mapping":
            yield from (
                leaf.value for leaf in ast.walk(value) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
            )
