"""Rewards of answers and episodes: the processes of reward workers and of a judge model, and the driver's handles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from roll_like.cluster import Cluster, ResourceManager, thread_environment
from roll_like.cluster.address import free_port, node_address
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.cluster.spans import SPANS
from roll_like.config.evaluation import EvaluationConfig
from roll_like.config.inference import BASE
from roll_like.config.rewards import (
    BASE_JUDGE_VARIABLE,
    DEFAULT_POOL,
    JUDGE_URLS_VARIABLE,
    RewardPoolConfig,
)
from roll_like.config.sampling import PromptRunConfig, RewardedRunConfig
from roll_like.data.benchmark_tasks import benchmark_tasks
from roll_like.data.tasks import TaskOrder, TaskSet, load_tasks
from roll_like.errors import ConfigError
from roll_like.inference.interface import EngineSpec, JudgeServer
from roll_like.inference.plugin import EnginePlugin
from roll_like.models.load import load_renderer, resolve_model
from roll_like.models.of_run import JUDGE, judge_model
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.registry import CURRICULA, INFERENCE_ENGINES
from roll_like.rewards.base import RewardConfig
from roll_like.rewards.scorer import reward_name
from roll_like.rewards.worker import RewardWorker, notebook_rewards
from roll_like.rollout.benchmarks import BenchmarkEvaluator, benchmark_sampling
from roll_like.rollout.collection import SampleProgress, no_progress
from roll_like.rollout.curricula import CurriculumOrder
from roll_like.rollout.demonstrations import TaskDemonstrations, off_policy_answers
from roll_like.rollout.engine_pool import EnginePool
from roll_like.rollout.evaluate import Evaluator, evaluation_sampling
from roll_like.rollout.experience import ExperiencePool
from roll_like.rollout.judge import JudgeKeeper
from roll_like.rollout.reward_pools import RewardPool, RewardPools, RewardShare
from roll_like.rollout.router import Router
from roll_like.rollout.scheduler import GenerateScheduler, GroupPlan
from roll_like.rollout.source import GroupFilter, GroupSource, sampling_of
from roll_like.run.state import Evaluates
from roll_like.types import Group, Scored, Task

RewardedT = TypeVar("RewardedT", bound=RewardedRunConfig)
PromptT = TypeVar("PromptT", bound=PromptRunConfig)

if TYPE_CHECKING:
    from roll_like.policy_gradient.base_judge import BaseJudge

#: Added to the rewards' own limits before their worker is taken for dead: it has to start first. Seconds.
REWARD_GRACE = 60.0


class RewardWorkers(Generic[RewardedT]):
    """The reward workers of a run, and its judge model where it has one.

    Attributes:
        pools: They as one scorer; there is one from `start` on.
    """

    def __init__(self, config: RewardedT, resources: ResourceManager, stack: ExitStack) -> None:
        self._config = config
        self._resources = resources
        self._stack = stack
        self._wait_for_judge: Callable[[], object] = lambda: None
        self._keeper: JudgeKeeper | None = None
        self._base_judge: BaseJudge | None = None
        self.pools: RewardPools

    def start(self, gpu_sharing: GPUSharing | None = None) -> None:  # noqa: ARG002 - of the protocol
        """Start the processes. The judge loads its model from now on; on GPUs of other roles, before these start."""
        if self._config.replay is not None:  # what is replayed has its rewards
            return
        urls: list[str] = []
        if self._config.base_judges:
            from roll_like.policy_gradient.base_judge import BaseJudge

            host = node_address()
            self._base_judge = BaseJudge(load_renderer(self._config.model), host=host, port=free_port(host))
        judge = self._start_judge(urls)
        if judge is not None:
            urls += judge.everywhere(JudgeServer.url)
            self._wait_for_judge = judge.begin(JudgeServer.start)
            if self._config.starts_alone("judge"):
                self._wait_for_judge()
            self._keeper = JudgeKeeper(judge, self._resources.report)
            self._stack.callback(self._keeper.close)
        base = "" if self._base_judge is None else self._base_judge.url
        addresses = {JUDGE_URLS_VARIABLE: ",".join(urls), BASE_JUDGE_VARIABLE: base}
        self.pools = self._start_rewards({variable: address for variable, address in addresses.items() if address})

    def wait(self) -> None:
        """Wait until they can score.

        Raises:
            RollLikeError: A reward cannot be built, or the judge did not start.
        """
        if self._config.replay is not None:
            return
        self._wait_for_judge()
        if self._keeper is not None:
            self._keeper.start()
        self.pools.wait_until_ready()

    def router(self, inference: EnginePool) -> Router:
        """Return what sends requests to the engines; the base model judges through it, where it does.

        Raises:
            ConfigError: The judge's address cannot be listened on.
        """
        router = inference.router(self._config.inference, self._config.rollout)
        judge = self._base_judge
        if judge is not None:
            try:
                inference.runner.run(judge.start(router))
            except OSError as error:
                raise ConfigError(
                    f"the base model cannot answer at {judge.url}: {error}", fix="run it again"
                ) from error
            self._stack.callback(lambda: inference.runner.run(judge.close()))
        return router

    def _start_judge(self, urls: Sequence[str]) -> Cluster[JudgeServer] | None:
        """Start the judge's processes, or nothing where there is none; their models are loaded by `JudgeServer.start`.

        Args:
            urls: Where servers that are started later, in the place of others, are to answer.
        """
        config, resources, judge = self._config, self._config.resources, self._config.judge
        if judge is None:
            return None
        model = resolve_model(judge_model(config, judge), key=JUDGE)
        devices, device = resources.devices_of("judge"), resources.device
        share = len(devices) // judge.replicas
        spec = EngineSpec(
            model_path=str(model.path),
            tokenizer_path=str(model.tokenizer_path),
            dtype=judge.dtype,
            device=device,
            threads=share if device == "cpu" else 1,
            tensor_parallel_size=1 if device == "cpu" else share,
            max_model_len=judge.max_model_len,
            seed=config.seed,
            trust_remote_code=config.model.trust_remote_code,
        )
        plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(judge.type)
        cluster = Cluster(
            "judge",
            plugin.judge_server(),
            self._resources.place(devices, judge.replicas, "judge"),
            arguments=lambda rank: (judge, spec, resources.start_timeout_seconds, urls[rank] if urls else None),
            environment=lambda rank: {**thread_environment(spec.threads), **plugin.environment(judge, spec)},
        )
        self._stack.callback(cluster.close, JudgeServer.close)
        return cluster

    def _start_rewards(self, addresses: Mapping[str, str]) -> RewardPools:
        """Start the pools of reward workers: those of `rewards.pools`, and one for all other rewards.

        Args:
            addresses: Where judges answer, by the environment variable that says so.
        """
        config = self._config
        use = cast(Sequence[RewardConfig], config.scoring)
        pooled = {name for pool in config.rewards.pools.values() for name in pool.rewards}
        others = tuple(reward_name(reward) for reward in use if reward_name(reward) not in pooled)
        pools = dict(config.rewards.pools)
        if others:
            pools[DEFAULT_POOL] = RewardPoolConfig(rewards=others, workers=config.rewards.workers)
        shares = []
        for name, pool in pools.items():
            chosen = tuple(reward for reward in use if reward_name(reward) in pool.rewards)
            shares.append(RewardShare(chosen, self._start_pool(name, pool, chosen, addresses)))
        later = cast(Sequence[RewardConfig], config.policy_rewards)
        return RewardPools(shares, config.domain_rewards, self._keeper, later)

    def _start_pool(
        self, name: str, pool: RewardPoolConfig, rewards: tuple[RewardConfig, ...], addresses: Mapping[str, str]
    ) -> RewardPool:
        """Start one pool's workers; without devices of their own they have one thread each."""
        config, resources = self._config, self._resources
        section, plugins = config.rewards.model_copy(update={"use": rewards}), notebook_rewards(rewards)
        if pool.devices is None:
            placements, threads = resources.beside(pool.workers), 1
        else:
            placements = resources.place(pool.devices, pool.workers, f"rewards {name}")
            threads = len(pool.devices) // pool.workers
        hidden = {} if pool.devices is not None and config.resources.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        cluster = Cluster(
            name,
            RewardWorker,
            placements,
            arguments=lambda rank: (section, config.import_, plugins, config.domain_rewards),
            environment=lambda rank: {**thread_environment(threads), **hidden, **addresses},
            concurrency=section.groups_per_worker + 4,  # room to ask how it is, and to close it
        )
        self._stack.callback(cluster.close, RewardWorker.close)
        rewards_pool = RewardPool(
            cluster,
            limit_seconds=REWARD_GRACE + section.timeout_seconds * (section.retries + 1),
            groups_per_worker=section.groups_per_worker,
            report=resources.report,
        )
        SPANS.watch(rewards_pool)
        return rewards_pool


def with_curriculum(source: GroupSource, config: PromptRunConfig, tasks: Sequence[Task]) -> GroupSource:
    """Return a source of groups whose tasks a curriculum chooses, and which tells it how they ended.

    Args:
        source: Draws from a `TaskOrder`.
    """
    section = config.data.curriculum
    assert section is not None, "the caller has looked"
    order, accept = source.order, source.accept
    assert isinstance(order, TaskOrder), "prompts come from one"
    chosen = CurriculumOrder(order, CURRICULA.get(section.type)(section), tasks=tasks, seed=config.seed)

    def told(group: Group[Scored]) -> bool:
        chosen.ended(group)
        return accept(group)

    return replace(source, order=chosen, accept=told, figures=chosen.figures, begin_step=chosen.begin_step)


def tasks_of(config: PromptRunConfig) -> TaskSet:
    """Return the training tasks."""
    renderer = load_renderer(config.model, images=config.takes_images)
    return load_tasks(config.data.sources, renderer, config.data.max_prompt_tokens)


def demonstrations_of(
    config: PromptRunConfig, tasks: TaskSet, warn: Callable[[str], None]
) -> TaskDemonstrations | None:
    """Return the demonstrations of the training tasks, all of which have been read; None where there are none.

    Raises:
        DataError: A task has none that can be used, and that is refused.
    """
    section = config.given_answers
    if section is None:
        return None
    found = TaskDemonstrations(load_renderer(config.model), section, config.rollout.max_response_tokens)
    without = found.keep(tasks.tasks)  # rows that are streamed are read later
    if without:
        bad = found.problem(without[0])
        warn(
            f"{len(without)} of {len(tasks.tasks)} prompts are trained on without a demonstration, first "
            f"{without[0].origin}: {'' if bad is None else bad.message}"
        )
    return found


def experience_of(config: PromptRunConfig, tasks: TaskSet, warn: Callable[[str], None]) -> ExperiencePool | None:
    """Return the pool of right answers that join groups again; None where none do.

    Another run's answers are read before the first step, and not if a checkpoint brings some.
    """
    section = config.replayed_answers
    if section is None:
        return None
    pool = ExperiencePool(section, seed=config.seed)
    if section.initial is not None:
        known = {task.task_id: task for task in tasks.tasks}
        path, vocabulary = Path(section.initial), load_renderer(config.model).vocabulary
        pool.start_with(lambda: warn(pool.fill(path, known.get, vocabulary, routes=config.replays_routes)))
    return pool


class PromptWorkers(RewardWorkers[PromptT]):
    """Reward workers, and what samples answers to prompts with the engines."""

    _runner: DriverLoop
    _progress: SampleProgress
    _scheduler: GenerateScheduler

    def connect(self, inference: EnginePool, runner: DriverLoop, progress: SampleProgress = no_progress) -> None:
        """Sample with these engines, and have the answers scored here."""
        self._runner, self._progress = runner, progress
        self._scheduler = GenerateScheduler(self.router(inference), self.pools)

    def groups(self, warn: Callable[[str], None]) -> GroupSource:
        """Return where groups of answers come from; `warn` is told about prompts that are left out."""
        config = self._config
        tasks = tasks_of(config)
        for report in tasks.report:
            if report.left_out:
                warn(str(report))
        sampling = sampling_of(config.rollout)
        baseline = config.greedy_baseline
        demonstrations = demonstrations_of(config, tasks, warn)
        experience = experience_of(config, tasks, warn)
        plan = GroupPlan(
            samples_per_group=config.rollout.samples_per_group,
            redundant=config.rollout.redundant_samples,
            sampling=sampling,
            baseline=replace(sampling, temperature=0.0) if baseline else None,
            off_policy=off_policy_answers(demonstrations, config.given_answers, experience),
        )
        source = GroupSource(
            make_runner=partial(self._scheduler.runner, plan),
            engines=self._scheduler.engines,
            order=TaskOrder(tasks, seed=config.seed, shuffle=config.data.shuffle),
            accept=GroupFilter(
                config.rollout,
                needs_baseline=baseline,
                domains=config.domain_filters,
                of_steps=config.uses_steps,
            ),
            experience=experience,
        )
        return source if config.data.curriculum is None else with_curriculum(source, config, tasks.tasks)

    def evaluator(self, warn: Callable[[str], None]) -> Evaluates | None:
        """Return what measures the policy, or nothing where there is no `evaluation` section."""
        config, schedule = self._config, self._config.evaluation
        if schedule is None:
            return None
        renderer = load_renderer(config.model, images=config.takes_images)
        beside = {f"adapter/{name}": name for name in schedule.adapters}
        if schedule.base_model:
            beside["base"] = BASE
        found: dict[str, Evaluator] = {}
        if schedule.sources:
            tasks = load_tasks(schedule.sources, renderer, config.data.max_prompt_tokens, key="evaluation.sources")
            plan = GroupPlan(
                samples_per_group=schedule.samples_per_prompt,
                sampling=evaluation_sampling(schedule, config.rollout.max_response_tokens),
                urgent=True,
            )
            found[""] = self._evaluator(plan, islice(tasks, schedule.max_tasks), schedule, beside)
        for index, use in enumerate(schedule.benchmarks):
            asked = benchmark_tasks(use, renderer, f"evaluation.benchmarks.{index}")
            plan = GroupPlan(
                samples_per_group=use.sampling.samples_per_prompt,
                sampling=benchmark_sampling(use),
                urgent=True,
                stops_answers=True,
            )
            found[use.label] = self._evaluator(plan, asked, schedule, beside)
        return found[""] if list(found) == [""] else BenchmarkEvaluator(found, schedule, warn)

    def _evaluator(
        self, plan: GroupPlan, tasks: Iterable[Task], schedule: EvaluationConfig, beside: Mapping[str, str]
    ) -> Evaluator:
        config, make_runner = self._config, self._scheduler.runner
        return Evaluator(
            partial(make_runner, plan),
            tasks,
            schedule,
            beside={name: partial(make_runner, replace(plan, adapter=adapter)) for name, adapter in beside.items()},
            samples_per_group=plan.samples_per_group,
            max_failure_fraction=config.rollout.max_failure_fraction,
            seed=config.seed,
            runner=self._runner,
            progress=self._progress,
        )
