"""Load a configuration: YAML, what it extends, overrides, plugins, validation.

>>> config = load_config("configs/rlvr_quickstart.yaml", ["steps=5", "data.sources.0.weight=2"])
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from roll_like.config.base import ConfigModel, PipelineConfig, PluginConfig
from roll_like.config.run import RunConfig
from roll_like.config.source import Source, read_source
from roll_like.errors import FOREIGN_ERRORS, ConfigError, PluginError, describe_error, shortened
from roll_like.registry import (
    DISTILLATION_LOSSES,
    LOSSES,
    PIPELINES,
    PREFERENCE_LOSSES,
    REGISTRIES,
    TRAINING_BACKENDS,
    Registry,
)

RunConfigT = TypeVar("RunConfigT", bound=RunConfig)


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
    search_working_directory()
    for module in modules if isinstance(modules, list | tuple) else ():
        if isinstance(module, str):
            _import(module)


def search_working_directory() -> None:
    """Have modules of the working directory found, after all others."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def importing_plugins(config: RunConfigT) -> RunConfigT:
    """Return the configuration with an `import` of every module whose plugins a program had registered by itself.

    Workers are other processes: they know the plugins that they import. Of `__main__`, a script or a notebook, those
    that workers use are sent: rewards to reward workers (`notebook_rewards`), environments to theirs
    (`notebook_environments`), losses and training backends to training ranks (`notebook_plugins`). Others, such as
    callbacks, stay in the driver.
    """
    modules = {plugin.__module__ for _, _, plugin in _plugins(config)}
    # those of this package are found through entry points
    others = sorted(one for one in modules if one.partition(".")[0] not in ("__main__", "roll_like"))
    missing = tuple(one for one in others if one not in config.import_)
    return config.model_copy(update={"import_": (*config.import_, *missing)}) if missing else config


#: A plugin that is sent to another process: the entry-point group of its registry, its name, and itself.
SentPlugin: TypeAlias = tuple[str, str, Any]


def notebook_plugins(config: ConfigModel) -> tuple[SentPlugin, ...]:
    """Return the losses and training backends that are defined in `__main__`: training ranks cannot import them.

    cloudpickle, as Ray uses it, sends what `__main__` defines by value, and with it what it refers to. Plugins that
    ranks do not use stay out: a callback may hold a lock or a client, which cannot be sent.
    """
    return tuple(
        (registry.group, name, plugin)
        for registry, name, plugin in _plugins(config)
        if registry in _OF_RANKS and plugin.__module__ == "__main__"
    )


def register_sent(plugins: Sequence[SentPlugin]) -> None:
    """Register what `notebook_plugins` found, in the process that it was sent to."""
    registries = {registry.group: registry for registry in REGISTRIES}
    for group, name, plugin in plugins:
        registries[group].register(name)(plugin)


#: Registries of what training ranks use.
_OF_RANKS = (LOSSES, PREFERENCE_LOSSES, DISTILLATION_LOSSES, TRAINING_BACKENDS)


def _sections(value: Any) -> Iterator[ConfigModel]:
    if isinstance(value, ConfigModel):
        yield value
        value = [getattr(value, name) for name in type(value).model_fields]
    elif isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for part in value:
        yield from _sections(part)


def _plugins(config: ConfigModel) -> Iterator[tuple[Registry[Any], str, Any]]:
    for section in _sections(config):
        backend = getattr(section, "backend", None)
        if backend in TRAINING_BACKENDS.names():
            yield TRAINING_BACKENDS, backend, TRAINING_BACKENDS.get(backend)
        if not isinstance(section, PluginConfig):
            continue
        for registry in REGISTRIES:
            if section.type in registry.names():
                plugin = registry.get(section.type)
                if isinstance(section, getattr(plugin, "Config", ())):
                    yield registry, section.type, plugin


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
