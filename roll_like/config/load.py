"""Load a configuration: YAML, what it extends, overrides, plugins, validation.

>>> config = load_config("configs/rlvr_quickstart.yaml", ["steps=5", "data.sources.0.weight=2"])
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll_like.config.base import ConfigModel, PipelineConfig
from roll_like.config.source import Source, read_source
from roll_like.errors import FOREIGN_ERRORS, ConfigError, PluginError, describe_error, shortened
from roll_like.registry import PIPELINES


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Return the validated configuration in `path`.

    Args:
        path: A YAML file.
        overrides: `key=value` with dotted keys; values are YAML. List items are numbered from 0.

    Raises:
        ConfigError: Everything that is wrong with it, in one message.
        PluginError: A module of `import:` cannot be imported, or the pipeline is unknown.
    """
    source = read_source(Path(path), overrides)
    import_plugins(source.values.get("import", ()))
    return _config_class(source).from_source(source)


def dump_config(config: ConfigModel) -> str:
    """Return the resolved configuration as YAML; loading it gives an equal configuration."""
    values = _without_interpolation(config.model_dump(mode="json", by_alias=True))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def import_plugins(modules: object) -> None:
    """Import the modules of `import:`, which register plugins. The working directory is searched last.

    Anything but a list of names is left for validation to refuse.

    Raises:
        PluginError: A module cannot be imported, with the reason.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    for module in modules if isinstance(modules, list | tuple) else ():
        if isinstance(module, str):
            _import(module)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except PluginError:
        raise
    except FOREIGN_ERRORS as error:
        raise _not_imported(module, error) from error


def _not_imported(module: str, error: BaseException) -> PluginError:
    if module.endswith(".py"):
        name = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        return PluginError(
            f"`import:` names the file {module!r}; expected the name of a module", fix=f"write import: [{name}]"
        )
    if isinstance(error, ModuleNotFoundError):
        return PluginError(
            f"`import:` names {module!r}, and there is no module {error.name!r}",
            fix="correct the name, install the package that holds it, or start in the folder that holds it",
        )
    return PluginError(
        shortened(f"`import:` names {module!r}, which fails while it is imported: {describe_error(error)}"),
        fix=f'correct the module; try: python -c "import {module}"',
    )


def _config_class(source: Source) -> type[PipelineConfig]:
    name = source.values.get("pipeline")
    if not isinstance(name, str):
        found = "is missing" if name is None else f"is {name!r}, which is not a name"
        if not source.values:
            found = "is missing, as all are: the file is empty"
        raise ConfigError(
            f"pipeline: the key {found} [{source.place_of(('pipeline',))}]; known pipelines: "
            f"{', '.join(PIPELINES.names()) or 'none is installed'}",
            fix="add a line such as `pipeline: rlvr`",
        )
    config: type[PipelineConfig] = PIPELINES.get(name)
    return config


def _without_interpolation(value: Any) -> Any:
    """Return `value` with `${` escaped, so that loading it again does not interpolate."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {key: _without_interpolation(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_interpolation(item) for item in value]
    return value
