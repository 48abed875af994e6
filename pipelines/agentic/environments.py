"""How episodes are played: the processes that environments live in, and the driver's handles on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from roll_like.agents.agent_program import AgentPrograms
from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.env_worker import EnvPool, EnvWorker, notebook_environments
from roll_like.agents.episode import (
    EnvironmentSpec,
    EpisodeLimits,
    EpisodeSpec,
    ProgramSpec,
    VerifiersSpec,
)
from roll_like.agents.episode_order import EpisodeOrder, SeedRange
from roll_like.agents.episode_rewards import EpisodeRewards
from roll_like.agents.proxy import Proxy
from roll_like.agents.verifiers_episodes import VerifiersEnvironments
from roll_like.builtin.pipelines.agentic.config import AgenticConfig, EnvironmentConfig, ProxyConfig
from roll_like.cluster import Cluster, thread_environment
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError
from roll_like.models.load import load_renderer
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.reward_workers import RewardWorkers
from roll_like.rollout.collection import SampleProgress, no_progress
from roll_like.rollout.engine_pool import EnginePool
from roll_like.rollout.evaluate import Evaluator, evaluation_sampling
from roll_like.rollout.router import Router
from roll_like.rollout.source import GroupFilter, GroupSource, sampling_of
from roll_like.run.state import Evaluates


class EnvironmentWorkers(RewardWorkers[AgenticConfig]):
    """The environment workers of a run, and its reward workers where it has rewards beside the environments' own."""

    _workers: Cluster[EnvWorker]
    _runner: DriverLoop
    _progress: SampleProgress
    _manager: EnvManager

    def start(self, gpu_sharing: GPUSharing | None = None) -> None:
        super().start(gpu_sharing)
        if self._config.replay is not None:
            return
        entries = (*self._config.environments, *self._config.evaluated)
        notebook = notebook_environments(entry.id for entry in entries if entry.id is not None)
        self._workers = Cluster(
            "environments",
            EnvWorker,
            self._resources.beside(self._config.env_workers.workers),
            arguments=lambda rank: (self._config.import_, notebook),
            environment=lambda rank: {**thread_environment(1), "CUDA_VISIBLE_DEVICES": ""},
            concurrency=self._config.rollout.max_in_flight + 8,  # every episode may wait for its environment
        )
        self._stack.callback(self._workers.close, EnvWorker.shut_down)

    def wait(self) -> None:
        """Wait until they can host environments and score episodes.

        Raises:
            PluginError: A module of `import` cannot be imported there.
            RollLikeError: A reward cannot be built, or the judge did not start.
        """
        if self._config.replay is None:
            self._workers.everywhere(EnvWorker.hosted)
        super().wait()

    def connect(self, inference: EnginePool, runner: DriverLoop, progress: SampleProgress = no_progress) -> None:
        """Play episodes with these engines in these environments.

        Raises:
            ConfigError: The address that programs are to be answered at cannot be listened on.
        """
        config = self._config
        router = self.router(inference)
        environments = EnvPool(
            self._workers, deadline_seconds=config.env_workers.deadline_seconds, report=self._resources.report
        )
        renderer = load_renderer(config.model, images=True)
        specs = specs_of([*config.environments, *config.evaluated])
        programs = verifiers = None
        if any(isinstance(spec, ProgramSpec | VerifiersSpec) for spec in specs):
            proxy = self._started_proxy(router, renderer, runner)
            programs = AgentPrograms(proxy, environments)
            verifiers = VerifiersEnvironments(proxy, limits_of(config), self._resources.report)
            self._stack.callback(lambda: runner.run(verifiers.close()))
            runner.run(verifiers.start(spec for spec in specs if isinstance(spec, VerifiersSpec)))
        rewards = None
        if config.rewards.use:
            rewards = EpisodeRewards(self.pools, environment_weight=config.rewards.environment_weight)
        self._runner, self._progress = runner, progress
        self._manager = EnvManager(
            router,
            environments,
            specs,
            renderer,
            retries=config.rollout.retries,
            programs=programs,
            verifiers=verifiers,
            rewards=rewards,
        )

    def groups(self, warn: Callable[[str], None]) -> GroupSource:  # noqa: ARG002 - of the protocol
        """Return where groups of episodes come from."""
        config = self._config
        order = EpisodeOrder(
            [
                (spec_of(one), one.weight, SeedRange(first=one.first_seed, count=one.seeds))
                for one in config.environments
            ]
        )
        plan = EpisodePlan(
            episodes_per_group=config.rollout.episodes_per_group,
            redundant=config.rollout.redundant_episodes,
            sampling=sampling_of(config.rollout),
            limits=limits_of(config),
        )
        return GroupSource(
            make_runner=partial(self._manager.runner, plan),
            engines=self._manager.engines,
            order=order,
            accept=GroupFilter(config.rollout, of_steps=config.uses_steps),
        )

    def evaluator(self, warn: Callable[[str], None]) -> Evaluates | None:  # noqa: ARG002 - of the protocol
        """Return what measures the policy on fixed seeds, or nothing where there is no `evaluation` section."""
        config, schedule = self._config, self._config.evaluation
        if schedule is None:
            return None
        seeds = range(schedule.first_seed, schedule.first_seed + schedule.seeds)
        plan = EpisodePlan(
            episodes_per_group=schedule.episodes_per_seed,
            sampling=evaluation_sampling(schedule, config.rollout.max_response_tokens),
            limits=limits_of(config),
            urgent=True,
        )
        return Evaluator(
            partial(self._manager.runner, plan),
            [episode_task(spec, seed) for spec in specs_of(config.evaluated) for seed in seeds],
            schedule,
            samples_per_group=schedule.samples_per_group,
            max_failure_fraction=config.rollout.max_failure_fraction,
            seed=config.seed,
            runner=self._runner,
            progress=self._progress,
        )

    def _started_proxy(self, router: Router, renderer: Renderer, runner: DriverLoop) -> Proxy:
        address = self._config.proxy or ProxyConfig()
        proxy = Proxy(router, renderer, host=address.host, port=address.port)
        try:
            runner.run(proxy.start())
        except OSError as error:
            raise ConfigError(
                f"programs cannot be answered at {address.host}:{address.port}: {error}",
                fix="correct proxy.host and proxy.port; port 0 takes a free one",
            ) from error
        self._stack.callback(lambda: runner.run(proxy.close()))
        return proxy


def environment_spec_of(environment: EnvironmentConfig) -> EnvironmentSpec | None:
    """Return the environment of an entry, as workers host it, or nothing where a program does without."""
    if environment.id is None:
        return None
    return EnvironmentSpec(name=environment.label, env_id=environment.id, kwargs=environment.kwargs)


def spec_of(environment: EnvironmentConfig) -> EpisodeSpec:
    """Return an entry as episodes know it."""
    hosted, program, verifiers = environment_spec_of(environment), environment.program, environment.verifiers
    if verifiers is not None:
        return VerifiersSpec(
            name=environment.label,
            python=str(Path(verifiers.python).expanduser()),
            config=verifiers.sections,
            seats=verifiers.seats,
            select=verifiers.select,
            held_out=verifiers.held_out,
            env=verifiers.env,
            timeout_seconds=verifiers.timeout_seconds,
            max_episodes=verifiers.max_episodes,
            limit_reward=verifiers.limit_reward,
        )
    if program is not None:
        return ProgramSpec(
            name=environment.label,
            command=program.command,
            env=program.env,
            directory=program.directory,
            container=program.runtime,
            timeout_seconds=program.timeout_seconds,
            max_programs=program.max_programs,
            environment=hosted,
            limit_reward=program.limit_reward,
            reasoning_apart=program.reasoning == "apart",
            models=program.models,
        )
    assert hosted is not None, "refused by a rule"
    return hosted


def specs_of(environments: Sequence[EnvironmentConfig]) -> list[EpisodeSpec]:
    """Return each entry once."""
    return list({environment.label: spec_of(environment) for environment in environments}.values())


def limits_of(config: AgenticConfig) -> EpisodeLimits:
    """Return where an episode ends at the latest."""
    return EpisodeLimits(turns=config.rollout.max_turns, tokens=config.rollout.max_episode_tokens)
