"""`roll-like check-env --config`: each environment of a run is tried out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

from roll_like.agents.episode import EnvironmentSpec, VerifiersSpec
from roll_like.agents.verifiers_check import check_verifiers
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.agentic.environments import limits_of, specs_of
from roll_like.config.base import PipelineConfig
from roll_like.config.load import import_plugins
from roll_like.envs import EnvReport, check_env
from roll_like.envs.registration import make_any
from roll_like.errors import ConfigError
from roll_like.models.load import load_renderer
from roll_like.rollout.source import sampling_of


def tried_environments(config: PipelineConfig) -> Iterator[EnvReport]:
    """Try out what a run trains and evaluates on, programs excepted: what those play is theirs.

    Raises:
        ConfigError: It has no such environments.
        EnvError: One cannot be made.
    """
    if not isinstance(config, AgenticConfig):
        raise ConfigError(f"pipeline {config.pipeline!r} has no environments", fix="name a file of `pipeline: agentic`")
    import_plugins(config.import_)
    specs = specs_of([*config.environments, *config.evaluated])
    tried = [spec for spec in specs if isinstance(spec, EnvironmentSpec | VerifiersSpec)]
    if not tried:
        raise ConfigError("there are only programs in `environments`, and nothing to try", fix="start a run")
    for spec in tried:
        if isinstance(spec, EnvironmentSpec):
            yield check_env(partial(make_any, spec.env_id, **spec.kwargs))
        else:
            trial = check_verifiers(
                spec,
                load_renderer(config.model, images=True),
                sampling=sampling_of(config.rollout),
                limits=limits_of(config),
            )
            yield asyncio.run(trial)
