"""Named plugins: pipelines, rewards, estimators, losses, inference engines, training backends, trackers, callbacks.

A plugin registers itself with a decorator (`@register_reward("name")`) when its module is imported. Modules are found
through an entry-point group of an installed package, built-in pipelines, rewards, engines and training backends
included, or imported by a run's `import:`.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from roll_like.errors import FOREIGN_ERRORS, PluginError, describe_error

T = TypeVar("T")


def likely(word: str, known: Collection[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that a word may stand for, the likeliest first.

    One that differs in case, blanks, dots, dashes and underscores alone is it.

    >>> likely("Dr. GRPO", ["grpo", "dr_grpo"]), likely("bloat16", ["bfloat16", "float32"])
    (['dr_grpo'], ['bfloat16'])
    """
    same = [name for name in known if _letters(name) == _letters(word)]
    return same[:1] or difflib.get_close_matches(word, known, n=count, cutoff=cutoff)


def did_you_mean(word: str, known: Collection[str], otherwise: str | None = None, *, count: int = 1) -> str:
    """Return a question that names what an unknown word resembles; else `otherwise`, or all that is known."""
    near = likely(word, known, count=count, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise or f"known: {', '.join(known)}"


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


class Registry(Generic[T]):
    """A name → plugin table, filled lazily on the first look-up.

    Args:
        kind: What a plugin is, in words, for messages ("reward").
        group: Entry-point group whose modules register plugins when imported.
        builtins: Modules of this package that register plugins when imported.
        setting: What a configuration says to use one, with `{}` for its name.
    """

    def __init__(self, kind: str, *, group: str, builtins: tuple[str, ...] = (), setting: str = "") -> None:
        self.kind = kind
        self.group = group
        self.setting = setting
        self._builtins = builtins
        self._plugins: dict[str, T] = {}
        self._loaded = False
        self._broken: PluginError | None = None

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds its argument as `name`.

        Raises:
            PluginError: `name` is taken by something defined elsewhere.
        """

        def add(plugin: T) -> T:
            known = self._plugins.get(name)
            if known is not None and _origin(known) != _origin(plugin):
                raise PluginError(
                    f"{self.kind} {name!r} is registered twice: by {_origin(known)} and by {_origin(plugin)}",
                    fix="register one of them under another name",
                )
            self._plugins[name] = plugin
            return plugin

        return add

    def get(self, name: str) -> T:
        """Return the plugin called `name`.

        Raises:
            PluginError: No such plugin; the message suggests the nearest names.
        """
        if name not in self._plugins:
            self._load()
        if name not in self._plugins and self._broken is not None:
            raise self._broken  # the name may be in what could not be imported
        if name not in self._plugins:
            raise PluginError(
                f"unknown {self.kind} {name!r}; {self._hint(name)}",
                fix=f"correct the name, or add the module that registers it to `import:`, "
                f"or install a package with an entry point in group {self.group!r}",
            )
        return self._plugins[name]

    def _hint(self, name: str) -> str:
        """Return what may be meant by a name that is unknown here."""
        for other in REGISTRIES:
            if other.setting and other is not self and name in other.names():
                article = "an" if other.kind[0] in "aeiou" else "a"
                return f"{name!r} is {article} {other.kind}: {other.setting.format(name)}"
        return did_you_mean(name, self.names(), count=3)

    def names(self) -> list[str]:
        """Return every registered name, sorted; without those in what could not be imported."""
        self._load()
        return sorted(self._plugins)

    def broken(self) -> PluginError | None:
        """Return the first entry point that could not be imported; None where all could be."""
        self._load()
        return self._broken

    def origin(self, name: str) -> str:
        """Return where the plugin called `name` is defined: `module.Class`."""
        return _origin(self.get(name))

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for module in self._builtins:
            importlib.import_module(module)
        for point in entry_points(group=self.group):
            try:
                point.load()
            except FOREIGN_ERRORS as error:
                why = str(error) if isinstance(error, ImportError) else describe_error(error)
                broken = PluginError(
                    f"the entry point {point.name!r} of group {self.group!r} cannot be imported: {why}",
                    fix=f"reinstall or remove the package that declares {point.value!r}",
                )
                broken.__cause__ = error
                self._broken = self._broken or broken


def _origin(plugin: Any) -> str:
    return f"{getattr(plugin, '__module__', '?')}.{getattr(plugin, '__qualname__', repr(plugin))}"


#: Configuration classes; each names the class that runs it (`PipelineConfig.implementation`).
PIPELINES: Registry[Any] = Registry("pipeline", group="roll_like.pipelines", setting="`pipeline: {}`")
REWARDS: Registry[Any] = Registry("reward", group="roll_like.rewards", setting="`rewards.use: [{}]`")
ADVANTAGES: Registry[Any] = Registry(
    "advantage estimator",
    group="roll_like.advantages",
    builtins=("roll_like.algorithms.advantages",),
    setting="`pipeline: rlvr` (or agentic) with `algorithm.advantage: {}`",
)
LOSSES: Registry[Any] = Registry(
    "policy loss",
    group="roll_like.losses",
    builtins=("roll_like.algorithms.losses",),
    setting="`pipeline: rlvr` (or agentic) with `algorithm.loss: {}`",
)
PREFERENCE_LOSSES: Registry[Any] = Registry(
    "preference loss",
    group="roll_like.preference_losses",
    builtins=("roll_like.algorithms.preference",),
    setting="`pipeline: dpo` (or online_dpo) with `algorithm.loss: {}`",
)
DISTILLATION_LOSSES: Registry[Any] = Registry(
    "distillation loss",
    group="roll_like.distillation_losses",
    builtins=("roll_like.algorithms.distillation",),
    setting="`pipeline: distill` with `algorithm.loss: {}`",
)
CURRICULA: Registry[Any] = Registry(
    "curriculum",
    group="roll_like.curricula",
    builtins=("roll_like.rollout.curricula",),
    setting="`pipeline: rlvr` with `data.curriculum: {}`",
)
INFERENCE_ENGINES: Registry[Any] = Registry("inference engine", group="roll_like.inference_engines")
TRAINING_BACKENDS: Registry[Any] = Registry("training backend", group="roll_like.training_backends")
TRACKERS: Registry[Any] = Registry(
    "metrics tracker",
    group="roll_like.trackers",
    builtins=tuple(f"roll_like.metrics.{module}" for module in ("trackers", "prometheus", "dashboards")),
)
CALLBACKS: Registry[Any] = Registry(
    "callback", group="roll_like.callbacks", builtins=("roll_like.metrics.callbacks",), setting="`callbacks: [{}]`"
)

#: Every registry of this module.
REGISTRIES = tuple(value for value in [*globals().values()] if isinstance(value, Registry))
