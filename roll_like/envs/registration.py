"""Environments by id: Gymnasium's registry, with plugins loaded and messages that help.

Installed packages bring environments in through the entry-point group `gymnasium.envs`: a module that
calls `gymnasium.register` when imported, or a function that does when called.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from importlib.metadata import entry_points
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, registry
from gymnasium.spaces import Discrete, Text

from roll_like.envs.images import is_image_space
from roll_like.envs.wrappers import AnyEnv
from roll_like.errors import FOREIGN_ERRORS, EnvError, PluginError, RollLikeError, describe_error
from roll_like.registry import did_you_mean

GROUP = "gymnasium.envs"
#: How many ids a message suggests.
_NEAREST = 3


def make_env(env_id: str, /, **kwargs: Any) -> AnyEnv:
    """Return the environment registered as `env_id`: observations are texts or images, actions texts.

    Args:
        env_id: Such as `roll_like/FrozenLake-v0`; `module:id` imports `module` first.
        kwargs: The environment's own options.

    Raises:
        EnvError: No such id, an option that the environment does not have, an environment that cannot be
            made, or spaces that are no text; the message names the nearest id or option, or the wrapper to use.
        PluginError: An installed package's environments cannot be imported.
    """
    env = make_any(env_id, **kwargs)
    problems = non_text_spaces(env)
    if problems:
        what, fix = " and ".join(problem for problem, _ in problems), "; ".join(fix for _, fix in problems)
        env.close()
        name = env_id.rpartition("-v")[0]
        ours = [known for known in registered("roll_like") if known.rpartition("-v")[0] == f"roll_like/{name}"]
        raise EnvError(
            f"environment {env_id!r} has {what}, expected text or images",
            fix=f"use {ours[0]!r}, or {fix}" if ours else fix,
        )
    return env


def make_any(env_id: str, /, **kwargs: Any) -> AnyEnv:
    """Return the environment registered as `env_id`, whatever its spaces are.

    Raises:
        EnvError, PluginError: As `make_env`.
    """
    spec = find(env_id)
    _check_options(spec, kwargs)
    try:
        # Gymnasium's passive checker repeats on every first step what `check_env` does once
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except RollLikeError:
        raise
    except gymnasium.error.Error as error:
        raise EnvError(f"environment {env_id!r} cannot be made: {error}") from error
    except (ImportError, TypeError, ValueError) as error:
        raise EnvError(
            f"environment {env_id!r} cannot be made with {kwargs}: {type(error).__name__}: {error}",
            fix=f"correct its kwargs; it takes {', '.join(env_options(spec)) or 'none'}",
        ) from error
    except FOREIGN_ERRORS as error:
        raise EnvError(f"environment {env_id!r} cannot be made: {describe_error(error)}") from error


def find(env_id: str) -> EnvSpec:
    """Return what is registered as `env_id`.

    Raises:
        EnvError: Nothing is; the message names the nearest ids.
        PluginError: An installed package's environments, or the module of `module:id`, cannot be imported.
    """
    load_plugins()
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            __import__(module)
    except ImportError as error:
        raise PluginError(
            f"the module {module!r} of environment {env_id!r} cannot be imported: {error}", fix="correct its name"
        ) from error
    except FOREIGN_ERRORS as error:
        raise PluginError(
            f"the module {module!r} of environment {env_id!r} fails while it is imported: {describe_error(error)}",
            fix="correct the module",
        ) from error
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        near = _nearest(name)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"{len(registry)} ids are registered"
        raise EnvError(
            f"unknown environment {env_id!r}; {hint}",
            fix=f"correct the id, or add the module that registers it to `import:`, "
            f"or install a package with an entry point in group {GROUP!r}",
        ) from error


def env_options(spec: EnvSpec) -> list[str]:
    """Return the names of an environment's options; `**` at the end where it takes any."""
    if spec.entry_point is None:
        return []
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    parameters = [each for each in inspect.signature(creator).parameters.values() if each.name != "self"]
    named = [each.name for each in parameters if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    return [*named, *("**" for each in parameters if each.kind is each.VAR_KEYWORD)]


@functools.cache
def load_plugins() -> None:
    """Import every installed package's environments, once.

    Raises:
        PluginError: One of them cannot be imported.
    """
    for point in entry_points(group=GROUP):
        try:
            found = point.load()
        except ImportError as error:
            raise PluginError(
                f"the entry point {point.name!r} of group {GROUP!r} cannot be imported: {error}",
                fix=f"reinstall or remove the package that declares {point.value!r}",
            ) from error
        if not isinstance(found, types.ModuleType):
            found()


def registered(namespace: str = "") -> list[str]:
    """Return every id, or those of a namespace such as `roll_like`, sorted."""
    load_plugins()
    return sorted(env_id for env_id, spec in registry.items() if not namespace or spec.namespace == namespace)


def non_text_spaces(env: AnyEnv) -> list[tuple[str, str]]:
    """Return, for each space that is neither text nor an image, what it is and which wrapper makes it text."""
    found = []
    unset = [name for name in ("observation", "action") if getattr(env, f"{name}_space", None) is None]
    if unset:
        what = f"no {' and no '.join(unset)} space"
        return [(what, f"set {' and '.join(f'self.{name}_space' for name in unset)} to roll_like.envs.FreeText()")]
    if not isinstance(env.observation_space, Text) and not is_image_space(env.observation_space):
        if "ansi" in (env.metadata.get("render_modes") or []):
            fix = "make it with render_mode='ansi' and wrap it in roll_like.envs.AnsiText"
        else:
            fix = "describe its observations in words, in a gymnasium.wrappers.TransformObservation"
            if "rgb_array" in (env.metadata.get("render_modes") or []):
                fix += "; or make it with render_mode='rgb_array' and wrap it in roll_like.envs.ImageText"
        found.append((f"the observation space {env.observation_space}", fix))
    if not isinstance(env.action_space, Text):
        if isinstance(env.action_space, Discrete):
            count = int(env.action_space.n)
            fix = f"wrap it in roll_like.envs.DiscreteActions with {count} names of actions"
        else:
            fix = "read the action out of the policy's answer, in a gymnasium.wrappers.TransformAction"
        found.append((f"the action space {env.action_space}", fix))
    return found


def _nearest(name: str) -> list[str]:
    """Return ids like `name`: by the whole id, then by what comes after the namespace."""
    lowered = {env_id.lower(): env_id for env_id in registry}
    near = difflib.get_close_matches(name.lower(), lowered, n=_NEAREST, cutoff=0.6)
    tails = {env_id.rpartition("/")[2].rpartition("-v")[0].lower(): env_id for env_id in registry}
    tail = name.rpartition("/")[2].rpartition("-v")[0].lower() or name.rpartition("/")[2].lower()
    found = [lowered[each] for each in near]
    found += [tails[each] for each in difflib.get_close_matches(tail, tails, n=_NEAREST, cutoff=0.6)]
    return list(dict.fromkeys(found))[:_NEAREST]


def _check_options(spec: EnvSpec, kwargs: dict[str, Any]) -> None:
    known = env_options(spec)
    if "**" in known:
        return
    for name in kwargs:
        # Gymnasium's own: of `gymnasium.make`, not of the environment
        if name not in {*known, "max_episode_steps"}:
            hint = did_you_mean(name, known, f"it takes {', '.join(known) or 'none'}")
            raise EnvError(
                f"environment {spec.id!r} has no option {name!r}; {hint}", fix=f"correct the key {name!r} of its kwargs"
            )
