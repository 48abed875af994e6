"""What the pipelines share whose policy samples: their keys, and what follows from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

from pydantic import Field

from roll_like.config.algorithm import AlgorithmConfig, DifficultyConfig
from roll_like.config.base import PluginConfig, Steps, Violation
from roll_like.config.benchmarks import BenchmarkSampling, BenchmarkUse
from roll_like.config.data import DataConfig, DataSource
from roll_like.config.demonstrations import DemonstrationsConfig, ExperienceReplayConfig
from roll_like.config.evaluation import EvaluationConfig, EvaluationSchedule
from roll_like.config.inference import (
    InferenceConfig,
    JudgeServerConfig,
    adapter_violations,
    default_engine,
    engine_violations,
    head_violations,
    pause_violations,
    window_violations,
)
from roll_like.config.resources import CriticResources, RolePlan, SamplingResources
from roll_like.config.rewards import (
    BASE_JUDGE_URL,
    DomainConfig,
    RewardsConfig,
    by_policy,
    is_meant_for,
    is_relative,
    reported_name,
)
from roll_like.config.rollout import (
    AnswerRolloutConfig,
    AsyncSchedule,
    GroupRolloutConfig,
    ReplaySchedule,
    RolloutConfig,
)
from roll_like.config.run import RunConfig
from roll_like.config.training import CriticConfig, ReferenceConfig, TrainerConfig, budget_violations
from roll_like.errors import ConfigError
from roll_like.registry import ADVANTAGES
from roll_like.types import Origin


class SamplingRunConfig(RunConfig):
    """What runs have in common whose policy samples groups with inference engines of its own."""

    steps: Steps = Field(description="Steps to train.")
    rollout: GroupRolloutConfig
    inference: InferenceConfig = Field(default_factory=default_engine, description="The engine that samples.")
    resources: SamplingResources
    evaluation: EvaluationSchedule | None

    @property
    def total_steps(self) -> int:
        return self.steps

    @property
    def replay(self) -> ReplaySchedule | None:
        """The recorded rollouts that the run trains on; None where it samples its own."""
        schedule = self.rollout.schedule
        return schedule if isinstance(schedule, ReplaySchedule) else None

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the policy in one step."""
        return 1

    @property
    def may_send_adapters(self) -> bool:
        """Whether engines may be sent adapters alone: the base that they load is the one that the trainer has."""
        lora = self.training.lora
        return lora is not None and lora.quantization is None and self.inference.sends_adapters is not False

    @property
    def given_answers(self) -> DemonstrationsConfig | None:
        """How answers that rows give are learned from beside the policy's own; None where they are not."""
        return None

    @property
    def replayed_answers(self) -> ExperienceReplayConfig | None:
        """How right answers of earlier steps join groups again; None where they do not."""
        return None

    @property
    def off_policy_origins(self) -> frozenset[Origin]:
        """What joins groups beside the policy's samples."""
        given = self.given_answers
        joins = {
            Origin.DEMONSTRATION: given is not None and given.off_policy is not None,
            Origin.REPLAYED: self.replayed_answers is not None,
        }
        return frozenset(origin for origin, does in joins.items() if does)

    @property
    def replays_routes(self) -> bool:
        """Whether engines tell the experts of each token, for training to use the same ones."""
        return False

    @property
    def replays_kept(self) -> bool:
        """Whether engines tell what tokens were drawn from, for training to normalise over the same tokens."""
        return False

    @property
    def unbounded_sampling(self) -> tuple[str, ...]:
        """Keys that would bound what tokens are drawn from, of what is sampled at random without a bound."""
        sections: dict[str, GroupRolloutConfig | EvaluationSchedule | BenchmarkSampling]
        sections = {"rollout": self.rollout, **self.evaluated_sampling}
        return tuple(
            f"{key}.top_k" for key, section in sections.items() if section.top_k == 0 and section.temperature > 0
        )

    @property
    def evaluated_sampling(self) -> dict[str, EvaluationSchedule | BenchmarkSampling]:
        """How evaluated samples are drawn, by the key that says so."""
        return {} if self.evaluation is None else {"evaluation": self.evaluation}

    @property
    def adapter_keys(self) -> tuple[str, ...]:
        """Keys that need an engine with the base model beside the policy's adapter."""
        return ()

    @property
    def frozen_adapters(self) -> dict[str, str]:
        """Directories of adapters that engines hold beside the policy's, by name."""
        return {}

    @property
    def engine_adapters(self) -> int:
        """Adapters that an engine has room for, where it is sent them alone: the policy's, and those beside it."""
        return 1 + len(self.frozen_adapters)

    @property
    def models_aside(self) -> int | None:
        """Models that the trainer keeps beside the one that it works on; None where there is always the same one."""
        return None

    @property
    @abstractmethod
    def longest_response(self) -> int:
        """Most tokens that the policy samples in one answer, or in all turns of one episode."""

    @property
    def longest_evaluated(self) -> tuple[int, str] | None:
        """As `longest_sample`, of the evaluation, with its terms; None where that is no longer."""
        return None

    @property
    def context_window(self) -> int:
        """Window of the inference engines, in tokens."""
        evaluated = self.longest_evaluated
        needed = max(self.longest_sample, 0 if evaluated is None else evaluated[0])
        return self.inference.max_model_len or needed

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """Where the workers of each role are: trainer and engines; a replay has no engines."""
        if self.replay is not None:
            return super().roles
        trainer, *others = super().roles
        return (trainer, self.resources.role("inference", self.inference.replicas, "inference.replicas"), *others)

    @property
    def uses_steps(self) -> bool:
        """Whether scores of steps are learned from, not rewards alone."""
        return False

    @property
    def processes(self) -> dict[str, int]:
        """Worker processes without a device of their own, by what they are."""
        return {}

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        domains = getattr(self, "domains", {}).values()
        yield from self.rollout.replacement_violations(bool(domain.drop_zero_variance_groups) for domain in domains)
        yield from self.rollout.flight_violations()
        if self.replay is None:
            engine, lora, window = self.inference, self.training.lora, self.inference.max_model_len
            yield from window_violations(window, self.longest_sample, self.longest_sample_terms, "sample")
            if self.longest_evaluated is not None:
                yield from window_violations(window, *self.longest_evaluated, "evaluated sample")
            yield from engine_violations(engine, self.resources)
            yield from head_violations(engine, self.model.head_dtype)
            sampled = {"rollout": self.rollout, "evaluation": self.evaluation}
            yield from engine.sampling_violations(
                {key: section.min_p for key, section in sampled.items() if section is not None}
            )
            if engine.wants_seeds and not self.rollout.seeded:
                yield Violation(
                    ("inference", "deterministic"),
                    "samples without seeds differ from run to run whatever the kernels compute; set rollout.seeded: "
                    "true, or remove this",
                )
            yield from adapter_violations(engine, lora, self.adapter_keys, alone=self.may_send_adapters)
        elif self.evaluation is not None:
            yield Violation(
                ("evaluation",),
                "an evaluation samples with inference engines, and a replay starts none; set evaluation: null, or "
                "rollout.schedule: {type: sync}",
            )


class RewardedRunConfig(SamplingRunConfig):
    """A run whose samples are scored by reward workers."""

    #: Whether trainers compute rewards of the policy (`RewardConfig.by_policy`).
    rewards_by_policy: ClassVar[bool] = False

    rewards: RewardsConfig
    judge: JudgeServerConfig | None = Field(
        default=None, description="A model that judges, for rewards `llm_judge` and `rubric`; none by default."
    )

    @property
    def base_judges(self) -> tuple[str, ...]:
        """Keys of the judges that are the base model in the policy's engines, of each reward once."""
        asking = self.rewards.asking(BASE_JUDGE_URL)
        return tuple(dict.fromkeys(".".join(map(str, path[:-1])) for path in asking))

    @property
    def unbounded_sampling(self) -> tuple[str, ...]:
        """The same, and judges in the policy's engines that do not answer greedily; they have no bound to set."""
        judges = (
            ".".join(map(str, (*path, "temperature")))
            for path, judge in self.rewards.asking(BASE_JUDGE_URL).items()
            if judge.temperature > 0
        )
        return (*super().unbounded_sampling, *judges)

    @property
    def adapter_keys(self) -> tuple[str, ...]:
        return (*super().adapter_keys, *self.base_judges)

    def evaluating(self, model: str) -> Self:
        """Return the same configuration for another model.

        Raises:
            ConfigError: There is no `evaluation` section, or the model that training starts from judges.
        """
        for key in self.base_judges:
            raise ConfigError(
                f"{key}: `url: {BASE_JUDGE_URL}` is the model that training starts from, which is "
                "not loaded to evaluate another one",
                fix="give the address of an endpoint, or `url: judge` with a `judge` section",
            )
        return super().evaluating(model)

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """The same, with the judge, and reward pools that have devices of their own."""
        resources, roles = self.resources, [*super().roles]
        if self.replay is not None:
            return tuple(roles)
        if self.judge is not None:
            roles.append(resources.role("judge", self.judge.replicas, "judge.replicas"))
        for name, pool in self.rewards.pools.items():
            if pool.devices is not None:
                key, path = f"rewards.pools.{name}.workers", ("rewards", "pools", name, "devices")
                roles.append(resources.role(f"rewards {name}", pool.workers, key, pool.devices, path))
        return tuple(roles)

    @property
    def processes(self) -> dict[str, int]:
        """The reward workers; none without rewards, and in a replay."""
        if self.replay is not None:
            return {}
        pools = self.rewards.pools.values()
        pooled = {name for pool in pools for name in pool.rewards}
        others = any(reported_name(reward) not in pooled for reward in self.scoring)
        workers = sum(pool.workers for pool in pools) + self.rewards.workers * others
        return {**super().processes, **({"reward workers": workers} if workers else {})}

    @property
    def domain_rewards(self) -> dict[str, tuple[str, ...]]:
        """The names of the rewards of each domain that names its own."""
        return {}

    @property
    def scoring(self) -> tuple[PluginConfig, ...]:
        """Everything that reward workers score answers with: the rewards, and what an evaluation adds to them."""
        return tuple(reward for reward in self.rewards.use if not by_policy(reward))

    @property
    def policy_rewards(self) -> tuple[PluginConfig, ...]:
        """The rewards that trainers compute."""
        return self.rewards.of_policy

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        yield from self.rewards.violations()
        yield from self.rewards.policy_violations(self.pipeline, takes=self.rewards_by_policy)
        yield from self.rewards.judge_violations(self.judge, self.resources)
        if self.base_judges and self.inference.max_model_len is None:
            yield Violation(
                ("inference", "max_model_len"),
                f"the judge `url: {BASE_JUDGE_URL}` reads prompt and answer in a prompt of its own, longer than the "
                f"longest sample ({self.context_window} tokens); set a window for that and the judge's `max_tokens`",
            )


class PromptRunConfig(RewardedRunConfig):
    """A run whose policy answers prompts, and whose answers get rewards."""

    data: DataConfig
    rollout: AnswerRolloutConfig
    domains: dict[str, DomainConfig] = Field(
        default_factory=dict,
        description="How the tasks of each domain (`data.sources[].domain` or `domain_field`) are scored and chosen. "
        "Domains that are not named here are scored by every reward whose `sources` and `domains` fit.",
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="How progress is measured on tasks that are not trained on; none by default."
    )

    def evaluating(self, model: str) -> Self:
        """Return the same configuration for another model, measured alone.

        Raises:
            ConfigError: There is no `evaluation` section.
        """
        config = super().evaluating(model)
        assert config.evaluation is not None
        alone = config.evaluation.model_copy(update={"base_model": False, "adapters": {}})
        return config.model_copy(update={"evaluation": alone})

    @property
    def adapter_keys(self) -> tuple[str, ...]:
        evaluation, asked = self.evaluation, dict[str, bool]()
        if evaluation is not None:
            asked = {"evaluation.base_model": evaluation.base_model, "evaluation.adapters": bool(evaluation.adapters)}
        return (*(key for key, value in asked.items() if value), *super().adapter_keys)

    @property
    def frozen_adapters(self) -> dict[str, str]:
        """Directories of the adapters that evaluation measures beside the policy, by name."""
        return {} if self.evaluation is None else self.evaluation.adapters

    @property
    def longest_sample(self) -> int:
        """Longest prompt plus longest response. Tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def longest_sample_terms(self) -> str:
        """The same as a sum of keys."""
        return (
            f"data.max_prompt_tokens + rollout.max_response_tokens = {self.data.max_prompt_tokens} + "
            f"{self.rollout.max_response_tokens} = {self.longest_sample}"
        )

    @property
    def longest_response(self) -> int:
        """Longest response. Tokens."""
        return self.rollout.max_response_tokens

    @property
    def longest_evaluated(self) -> tuple[int, str] | None:
        """Longest prompt plus longest evaluated response, where that has a limit of its own."""
        if self.evaluation is None:
            return None
        longest, benchmarks = 0, self.evaluation.longest_of_benchmarks
        if self.evaluation.max_response_tokens is not None:
            longest = self.data.max_prompt_tokens + self.evaluation.max_response_tokens
        if benchmarks > longest:
            return benchmarks, f"evaluation.benchmarks: max_prompt_tokens + max_response_tokens = {benchmarks}"
        return (longest, f"data.max_prompt_tokens + evaluation.max_response_tokens = {longest}") if longest else None

    @property
    def greedy_baseline(self) -> bool:
        """Whether each group needs a greedy answer to compare with."""
        return False

    @property
    def domain_rewards(self) -> dict[str, tuple[str, ...]]:
        """The names of the rewards of each domain that names its own; each benchmark is one."""
        of_benchmarks = {use.domain: tuple(map(reported_name, use.rewards())) for use in self.benchmarks}
        own = {name: domain.rewards for name, domain in self.domains.items() if domain.rewards is not None}
        return {**own, **of_benchmarks}

    @property
    def evaluated_sampling(self) -> dict[str, EvaluationSchedule | BenchmarkSampling]:
        """How answers to the evaluation's own tasks, where it has some, and to each benchmark are drawn, by key."""
        own = super().evaluated_sampling if self.evaluation is not None and self.evaluation.sources else {}
        return {**own, **{f"evaluation.benchmarks.{index}": use.sampling for index, use in enumerate(self.benchmarks)}}

    @property
    def benchmarks(self) -> tuple[BenchmarkUse, ...]:
        """The benchmarks that are measured."""
        return () if self.evaluation is None else self.evaluation.benchmarks

    @property
    def scoring(self) -> tuple[PluginConfig, ...]:
        """The rewards, and the graders of benchmarks."""
        return (*super().scoring, *(grader for use in self.benchmarks for grader in use.rewards()))

    @property
    def domain_difficulty(self) -> dict[str, DifficultyConfig]:
        """The difficulty band of each domain that has its own."""
        return {name: domain.difficulty for name, domain in self.domains.items() if domain.difficulty is not None}

    @property
    def domain_filters(self) -> dict[str, bool]:
        """Of each domain that says so itself, whether its groups with zero reward variance are replaced."""
        settings = {name: domain.drop_zero_variance_groups for name, domain in self.domains.items()}
        return {name: setting for name, setting in settings.items() if setting is not None}

    @property
    def sources(self) -> list[DataSource]:
        """The sources of the data, and of its evaluation."""
        return [*self.data.sources, *(() if self.evaluation is None else self.evaluation.sources)]

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.data.curriculum is not None:
            why = None
            if not self.rewards.use:
                why = "a curriculum goes by how often tasks are solved, which rewards tell, and this run has none"
            elif self.replay is not None:
                why = "a replay trains on recorded groups, whatever their tasks, so this has no effect"
            if why is not None:
                yield Violation(("data", "curriculum"), f"{why}; remove it")
        if self.rewards.use:
            yield from self.rewards.source_violations(self.sources, self.domains)
            for name, domain in self.domains.items():
                yield from domain.violations(name, self.sources, self.rewards, self.rollout)


class PolicyGradientConfig(SamplingRunConfig):
    """What runs have in common that move the policy by the rewards of its samples."""

    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig | None = Field(default=None, description="Needed by KL terms; none by default.")
    critic: CriticConfig | None = Field(
        default=None, description="Needed by advantage estimators that learn values; none by default."
    )
    resources: CriticResources

    @property
    def updates_per_step(self) -> int:
        return self.algorithm.updates_per_step

    @property
    def domain_difficulty(self) -> dict[str, DifficultyConfig]:
        """The difficulty band of each domain that has its own."""
        return {}

    @property
    def replays_routes(self) -> bool:
        """Whether `algorithm.router_replay` is on."""
        return self.algorithm.router_replay

    @property
    def replays_kept(self) -> bool:
        """Whether `top_p`, `top_k` or `min_p` leaves tokens out: ratios compare probabilities among the others."""
        return bool(self.rollout.truncation)

    @property
    def trained(self) -> dict[str, TrainerConfig]:
        """The policy, and a critic where there is one."""
        return super().trained if self.critic is None else {**super().trained, "critic": self.critic}

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """The same, with reference model and critic, where they have ranks of their own."""
        reference = self.reference if self.reference is not None and self.reference.mode == "cluster" else None
        found = [
            self.resources.role(name, section.workers, f"{name}.workers")
            for name, section in {"reference": reference, "critic": self.critic}.items()
            if section is not None
        ]
        return (*super().roles, *found)

    @property
    def uses_steps(self) -> bool:
        """Whether the advantage estimator uses scores of steps."""
        uses: bool = ADVANTAGES.get(self.algorithm.advantage.type).uses_steps
        return uses

    @property
    def compares_groups(self) -> bool:
        """Whether advantages compare the samples of a group by their rewards."""
        return True

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        algorithm, reference, longest = self.algorithm, self.reference, self.longest_sample
        yield from algorithm.violations(self.rollout, self.longest_response)
        yield from algorithm.update_violations(self.rollout, self.training)
        yield from algorithm.model_violations(reference, self.critic, self.resources)
        if self.given_answers is not None:
            yield from self.given_answers.violations(algorithm, self.steps)
        if self.replayed_answers is not None:
            yield from self.replayed_answers.violations(algorithm)
            if self.replay is not None:
                yield Violation(
                    ("experience_replay",),
                    "a replay trains on the groups that were recorded, with what joined them then; remove the section",
                )
        if self.compares_groups:
            yield from self.rollout.comparison_violations(algorithm.advantage)
        yield from self.rollout.ratio_violations()
        fewer_bits = self.inference.approximates
        if fewer_bits and algorithm.correction.type == "none" and algorithm.old_logprobs != "behaviour":
            yield Violation(
                ("algorithm", "correction", "type"),
                f"the engine samples with {fewer_bits}, which is another policy than the one "
                "that is trained, and `none` treats its samples as the trained policy's own, which is biased; set "
                "truncated (or masked), or algorithm.old_logprobs: behaviour",
            )
        if isinstance(self.rollout.schedule, AsyncSchedule):
            yield from pause_violations(self.inference, self.resources)
        for key, section in self.trained.items():
            yield from section.budget_violations(key, longest, self.longest_sample_terms)
        if self.training.compile and self.replays_routes:
            yield Violation(
                ("training", "compile"),
                "layers are not compiled together with algorithm.router_replay; remove one of the two",
            )
        if reference is not None:
            yield from reference.violations(self.training, self.resources.own_devices("reference"), self.steps)
            if reference.mode == "cluster":
                budget = reference.max_tokens_per_micro_batch
                yield from budget_violations(("reference",), budget, longest, self.longest_sample_terms)
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            yield Violation(
                ("critic", "warmup_steps"),
                f"the policy does not learn in the first {self.critic.warmup_steps} steps, and the run has "
                f"{self.steps}; set it below steps",
            )


class PromptConfig(PromptRunConfig, PolicyGradientConfig):
    """The same, where rewards become the gradient."""

    rewards_by_policy: ClassVar[bool] = True

    rollout: RolloutConfig
    # pydantic takes a field from the first base that has it
    resources: CriticResources

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.algorithm.observation_coefficient:
            yield Violation(
                ("algorithm", "observation_coefficient"),
                "an answer has one turn, after which the policy reads nothing, so this has no effect; remove it, or "
                "use pipeline: agentic",
            )
        if self.policy_rewards:
            yield from self._policy_reward_violations(self.policy_rewards[0].type)
        yield from self._off_policy_reward_violations()
        replayed = self.replayed_answers
        if replayed is not None and replayed.initial is not None and any(each.streaming for each in self.data.sources):
            yield Violation(
                ("experience_replay", "initial"),
                "answers of another run are matched with all rows at the start, and a streamed source is read row by "
                "row; set data.sources[].streaming: false, or remove initial",
            )

    def _off_policy_reward_violations(self) -> Iterator[Violation]:
        """Yield rewards that off-policy answers do not get, or that would not be those of the policy's samples."""
        sections = {Origin.DEMONSTRATION: "demonstrations.off_policy", Origin.REPLAYED: "experience_replay"}
        joining = [name for origin, name in sections.items() if origin in self.off_policy_origins]
        for index, reward in enumerate(self.rewards.use if joining else ()):
            if by_policy(reward):
                why = "is computed for the policy's samples alone, so that the others of their group would lack it"
            elif is_relative(reward):
                why = "compares the samples of a group, so that answers which are not the policy's would change theirs"
            else:
                continue
            if self._scores_training(reward):
                yield Violation(
                    ("rewards", "use", index),
                    f"{reward.type!r} {why}; use rewards that score each answer alone, such as math or exact_match, "
                    f"or remove {' and '.join(joining)} (demonstrations.sft needs no rewards)",
                )

    def _scores_training(self, reward: PluginConfig) -> bool:
        """Return whether a reward may score tasks that are trained on."""
        for source in self.data.sources:
            domain = source.domain_label  # None: rows say it
            own = None if domain is None else self.domain_rewards.get(domain)
            if own is not None:
                scores = reported_name(reward) in own
            elif domain is None:
                meant = getattr(reward, "sources", None)
                scores = meant is None or source.label in meant
            else:
                scores = is_meant_for(reward, source.label, domain)
            if scores:
                return True
        return False

    def _policy_reward_violations(self, name: str) -> Iterator[Violation]:
        """Yield what needs rewards before the policy has given its own."""
        extra = max(getattr(reward, "extra_tokens", 0) for reward in self.policy_rewards)
        if extra and not list(self.training.budget_violations("training", self.longest_sample, "")):
            terms = f"{self.longest_sample_terms} tokens of a sample and {extra} (max_answer_tokens) behind it"
            yield from self.training.budget_violations("training", self.longest_sample + extra, terms)
        late = f"before the trainer has computed {name!r}"
        dropping: dict[tuple[str, ...], bool | None] = {("rollout",): self.rollout.drop_zero_variance_groups}
        dropping |= {("domains", name): domain.drop_zero_variance_groups for name, domain in self.domains.items()}
        for path in (path for path, drops in dropping.items() if drops):
            yield Violation(
                (*path, "drop_zero_variance_groups"),
                f"groups are dropped {late}, so those that differ in it alone would be; remove it",
            )
        if self.data.curriculum is not None:
            yield Violation(("data", "curriculum"), f"a curriculum goes by rewards {late}; remove it")
        if self.greedy_baseline:
            yield Violation(
                ("algorithm", "advantage", "type"),
                f"{self.algorithm.advantage.type!r} compares with a greedy answer, which gets no {name!r}; use grpo",
            )
        for index, source in enumerate(() if self.evaluation is None else self.evaluation.sources):
            label, domain = source.label, source.domain_label
            own = None if domain is None else self.domain_rewards.get(domain)
            scores = domain is None or any(
                reported_name(reward) in own if own is not None else is_meant_for(reward, label, domain)
                for reward in self.scoring
            )
            if not scores:
                yield Violation(
                    ("evaluation", "sources", index),
                    f"{name!r} is computed while training, so nothing scores {label!r}; add a reward with "
                    f"`sources: [{label}]`, such as math or exact_match, or remove the evaluation",
                )

    @property
    def greedy_baseline(self) -> bool:
        """Whether the advantage estimator compares with a greedy answer."""
        greedy: bool = ADVANTAGES.get(self.algorithm.advantage.type).greedy_baseline
        return greedy
