"""The configuration of `pipeline: agentic`: a policy that acts over many turns, in environments and with tools."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from roll_like.config.base import ConfigModel, PositiveFloat, PositiveInt, Violation
from roll_like.config.evaluation import EvaluationSchedule
from roll_like.config.resources import ResourcesConfig
from roll_like.config.rewards import RETURN, OptionalRewardsConfig, reported_name
from roll_like.config.rollout import GroupRolloutConfig
from roll_like.config.rules import POLICY_GRADIENT_RULES
from roll_like.config.rules_rewards import REWARD_RULES
from roll_like.config.run import NAME_PATTERN, Rule
from roll_like.config.sampling import PolicyGradientConfig, RewardedRunConfig
from roll_like.registry import ADVANTAGES, PIPELINES
from roll_like.types import EVALUATION_SEED


class ProgramConfig(ConfigModel):
    """A program that plays episodes; it knows a base URL and a key, and asks there for the policy's turns."""

    command: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="The program and its arguments, such as `[python, agent.py]`; `python` is the run's own."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables beside the run's own.")
    directory: str | None = Field(default=None, description="Where it is started; default: where the run was.")
    timeout_seconds: PositiveFloat = Field(
        default=300.0, description="Longest episode; a program that takes longer is ended and has failed. Seconds."
    )
    max_programs: PositiveInt = Field(default=16, description="How many may run at a time.")
    limit_reward: float | None = Field(
        default=0.0,
        description="Reward of an episode that reached a limit before its program posted one; null: it has failed.",
    )


class EnvironmentConfig(ConfigModel):
    """One environment or program that the policy plays."""

    id: str | None = Field(
        default=None,
        description="Its id in Gymnasium's registry, such as `roll_like/FrozenLake-v0`. With `program` it gives the "
        "program its task and scores its answer.",
    )
    program: ProgramConfig | None = Field(
        default=None, description="A program that plays the episodes; without `id` it posts its own rewards."
    )
    name: str | None = Field(
        default=None,
        description="Name in metrics; default: its id without namespace and version, or `program` where there is none.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="The environment's own options; names are checked."
    )
    weight: PositiveFloat = Field(default=1.0, description="Share of its groups among all, relative to the others.")
    first_seed: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Seed of the first group; groups count up from it. A group's episodes share one seed."
    )
    seeds: PositiveInt | None = Field(
        default=None, description="How many different seeds there are, after which they begin anew; default: no end."
    )

    @property
    def label(self) -> str:
        """Its `name`, or what its id calls it."""
        named = self.id or "program"
        return self.name or named.rpartition("/")[2].rpartition(":")[2].rpartition("-v")[0] or named

    @property
    def played(self) -> tuple[str | None, dict[str, Any], ProgramConfig | None]:
        """What episodes of it are like, whatever it is called and wherever they begin."""
        return self.id, self.kwargs, self.program


class EpisodeRolloutConfig(GroupRolloutConfig):
    """What one step plays: `groups_per_step × episodes_per_group = episodes_per_step`."""

    groups_key: ClassVar[str] = "groups_per_step"
    samples_key: ClassVar[str] = "episodes_per_group"
    product_key: ClassVar[str | None] = "episodes_per_step"

    groups_per_step: PositiveInt = Field(description="Groups that one step trains on; each begins from one seed.")
    episodes_per_group: PositiveInt = Field(description="Episodes of each group.")
    episodes_per_step: PositiveInt | None = Field(
        default=None, description="Their product. Optional; checked when written."
    )
    redundant_episodes: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Further episodes of each group; the first `episodes_per_group` that end well are kept."
    )
    max_turns: PositiveInt = Field(default=30, description="Turns of the policy after which an episode is cut.")
    max_response_tokens: PositiveInt = Field(default=256, description="Longer turns are cut. Tokens.")
    max_episode_tokens: PositiveInt = Field(
        default=4096, description="Longest conversation, everything in it included: the engines' window. Tokens."
    )

    @property
    def groups(self) -> int:
        """Groups that one step trains on."""
        return self.groups_per_step

    @property
    def samples_per_group(self) -> int:
        """Episodes of each group."""
        return self.episodes_per_group


class EnvWorkersConfig(ConfigModel):
    """The processes that environments live in."""

    workers: PositiveInt = Field(default=1, description="Processes; episodes are divided evenly among them.")
    deadline_seconds: PositiveFloat = Field(
        default=60.0, description="Longest `reset` or `step`; what takes longer is ended with its process. Seconds."
    )


class ProxyConfig(ConfigModel):
    """The server that answers programs."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; programs run on the driver's machine.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=0, description="Port to listen on; 0: any free one.")


class EpisodeRewardsConfig(OptionalRewardsConfig):
    """How episodes are scored beside their environments' own rewards; by default they are not.

    An episode's reward is environment_weight × return + Σ weight × reward.
    """

    environment_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="Factor of the environment's own rewards in the sum; with `use`."
    )


class EpisodeEvaluationConfig(EvaluationSchedule):
    """How progress is measured: episodes from fixed seeds, which training does not play."""

    samples_key: ClassVar[str] = "episodes_per_seed"

    environments: tuple[EnvironmentConfig, ...] = Field(
        default=(), description="Environments to measure on; default: those that are trained on."
    )
    seeds: PositiveInt = Field(default=32, description="Seeds of each environment.")
    first_seed: Annotated[int, Field(ge=0)] = Field(
        default=EVALUATION_SEED, description="The first of them; `first_seed` of an environment is not used here."
    )
    episodes_per_seed: PositiveInt = Field(default=4, description="k of avg@k and pass@k.")


#: Environment variables that a run sets for each episode of a program.
SET_FOR_PROGRAMS = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ROLL_LIKE_SEED", "ROLL_LIKE_TASK", "ROLL_LIKE_EPISODE")


def _sections(config: AgenticConfig) -> dict[tuple[str, ...], tuple[EnvironmentConfig, ...]]:
    """Return the lists of environments by their keys."""
    sections: dict[tuple[str, ...], tuple[EnvironmentConfig, ...]] = {("environments",): config.environments}
    if config.evaluation is not None and config.evaluation.environments:
        sections["evaluation", "environments"] = config.evaluation.environments
    return sections


def _something_is_played(config: AgenticConfig) -> Iterator[Violation]:
    for section, environments in _sections(config).items():
        for index, environment in enumerate(environments):
            path: tuple[str | int, ...] = (*section, index)
            if environment.id is None and environment.program is None:
                yield Violation(path, "neither `id` nor `program` is set; name an environment, or a program that plays")
            if environment.id is None and environment.kwargs:
                yield Violation(
                    (*path, "kwargs"), "these are an environment's options, and there is no `id`; add it or remove them"
                )


def _programs_fit(config: AgenticConfig) -> Iterator[Violation]:
    programs = False
    for section, environments in _sections(config).items():
        for index, environment in enumerate(environments):
            if (program := environment.program) is None:
                continue
            programs = True
            path: tuple[str | int, ...] = (*section, index, "program")
            if (
                environment.id is not None
                and program.limit_reward != type(program).model_fields["limit_reward"].default
            ):
                yield Violation(
                    (*path, "limit_reward"),
                    f"{environment.id!r} scores every episode of this program, so this has no effect; remove it, or "
                    "remove `id` and let the program post its rewards",
                )
            for name in sorted(program.env.keys() & set(SET_FOR_PROGRAMS)):
                yield Violation(
                    (*path, "env", name), "the run sets this for every episode; remove it, or give it another name"
                )
    if not programs and config.proxy is not None:
        yield Violation(
            ("proxy",),
            "no environment has a `program` that would use this server; remove the section, or add a `program`",
        )


def _environments_have_names(config: AgenticConfig) -> Iterator[Violation]:
    for path, section in _sections(config).items():
        names = [environment.label for environment in section]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Violation(path, f"two environments are called {name!r}; give each a `name` of its own")


def _no_name_means_two_things(config: AgenticConfig) -> Iterator[Violation]:
    trained = {environment.label: environment for environment in config.environments}
    for index, environment in enumerate(config.evaluation.environments if config.evaluation is not None else ()):
        other = trained.get(environment.label)
        if other is not None and other.played != environment.played:
            yield Violation(
                ("evaluation", "environments", index, "name"),
                f"{environment.label!r} is also what an environment with other settings is called that is trained on; "
                "give this one a `name` of its own",
            )


def _turns_fit(config: AgenticConfig) -> Iterator[Violation]:
    rollout = config.rollout
    limits = {("rollout", "max_response_tokens"): rollout.max_response_tokens}
    if config.evaluation is not None and config.evaluation.max_response_tokens is not None:
        limits["evaluation", "max_response_tokens"] = config.evaluation.max_response_tokens
    for path, limit in limits.items():
        if limit >= rollout.max_episode_tokens:
            yield Violation(
                path,
                f"one turn of {limit} tokens would fill the whole conversation (rollout.max_episode_tokens: "
                f"{rollout.max_episode_tokens}); raise that, or lower this",
            )


def _evaluation_is_of_other_seeds(config: AgenticConfig) -> Iterator[Violation]:
    evaluation = config.evaluation
    if evaluation is None:
        return
    for environment in config.evaluated:
        for trained in config.environments:
            if trained.played != environment.played:
                continue
            last = trained.first_seed + (trained.seeds or config.seeds_played)
            if trained.first_seed < evaluation.first_seed + evaluation.seeds and evaluation.first_seed < last:
                yield Violation(
                    ("evaluation", "first_seed"),
                    f"the seeds {evaluation.first_seed} to {evaluation.first_seed + evaluation.seeds - 1} of "
                    f"{environment.label!r} are also trained on ({trained.first_seed} to {last - 1}); use others",
                )


def _evaluation_plays_every_seed(config: AgenticConfig) -> Iterator[Violation]:
    why = {
        "weight": "an evaluation runs every seed of each environment, so a weight has no effect; remove it",
        "seeds": "how many seeds are evaluated is set once, by evaluation.seeds; set that and remove this",
        "first_seed": "where evaluations begin is set once, by evaluation.first_seed; set that and remove this",
    }
    for index, environment in enumerate(config.evaluation.environments if config.evaluation is not None else ()):
        for name, message in why.items():
            if getattr(environment, name) != type(environment).model_fields[name].default:
                yield Violation(("evaluation", "environments", index, name), message)


def _no_greedy_baseline(config: AgenticConfig) -> Iterator[Violation]:
    name = config.algorithm.advantage.type
    if ADVANTAGES.get(name).greedy_baseline:
        yield Violation(
            ("algorithm", "advantage", "type"),
            f"{name!r} compares with a greedy answer to the same prompt, and episodes have none; use grpo, rloo, "
            "gigpo or turn_returns",
        )


def _rewards_are_used(config: AgenticConfig) -> Iterator[Violation]:
    if config.rewards.use:
        return
    for name, field in type(config.rewards).model_fields.items():
        if getattr(config.rewards, name) != field.get_default(call_default_factory=True):
            yield Violation(
                ("rewards", name), "there are no rewards beside the environment's; add `rewards.use`, or remove this"
            )


def _rewards_fit(config: AgenticConfig) -> Iterator[Violation]:
    played = [environment.label for environment in (*config.environments, *config.evaluated)]
    known = list(dict.fromkeys(played))
    for index, reward in enumerate(config.rewards.use):
        if reported_name(reward) == RETURN:
            yield Violation(
                ("rewards", "use", index),
                f"the environment's own reward is called {RETURN!r}; give this one another `name`",
            )
        for name in getattr(reward, "sources", None) or ():
            if name not in known:
                yield Violation(
                    ("rewards", "use", index, "sources"),
                    f"no environment is called {name!r}; known: {', '.join(known)}",
                )
    if config.rewards.use and config.rewards.environment_weight == 0:
        for environment in config.environments:
            if not any(_weighs(reward, environment.label) for reward in config.rewards.use):
                yield Violation(
                    ("rewards", "environment_weight"),
                    f"0, and no reward with a weight scores {environment.label!r}, so nothing can be learned there; "
                    "add one to `rewards.use`, or raise this",
                )


def _weighs(reward: Any, environment: str) -> bool:
    sources = getattr(reward, "sources", None)
    return getattr(reward, "weight", 1.0) != 0 and (sources is None or environment in sources)


#: What to check between environments, rollout and evaluation.
_RULES = (
    _something_is_played,
    _programs_fit,
    _environments_have_names,
    _no_name_means_two_things,
    _turns_fit,
    _evaluation_is_of_other_seeds,
    _evaluation_plays_every_seed,
    _no_greedy_baseline,
    _rewards_are_used,
    _rewards_fit,
)


@PIPELINES.register("agentic")
class AgenticConfig(RewardedRunConfig, PolicyGradientConfig):
    """One agentic run: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.agentic.pipeline:AgenticPipeline"
    rules: ClassVar[tuple[Rule, ...]] = (*POLICY_GRADIENT_RULES, *_RULES, *REWARD_RULES)

    pipeline: Literal["agentic"] = Field(default="agentic", description="This pipeline.")
    name: str = Field(default="agentic", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    rollout: EpisodeRolloutConfig
    environments: Annotated[tuple[EnvironmentConfig, ...], Field(min_length=1)] = Field(
        description="What the policy plays, weighted."
    )
    env_workers: EnvWorkersConfig = Field(default_factory=EnvWorkersConfig)
    rewards: EpisodeRewardsConfig = Field(default_factory=EpisodeRewardsConfig)
    proxy: ProxyConfig | None = Field(
        default=None, description="The server that answers programs; by default on this machine, at any free port."
    )
    evaluation: EpisodeEvaluationConfig | None = Field(
        default=None, description="How progress is measured, on seeds that are not trained on; none by default."
    )

    # pydantic takes a field from the first base that has it
    resources: ResourcesConfig

    @property
    def evaluated(self) -> tuple[EnvironmentConfig, ...]:
        """The environments of the evaluation; none without one."""
        return () if self.evaluation is None else self.evaluation.environments or self.environments

    @property
    def seeds_played(self) -> int:
        """Most seeds that training takes of one environment."""
        return math.floor(self.rollout.groups * self.rollout.max_oversampling) * self.steps

    @property
    def longest_sample(self) -> int:
        """Longest conversation. Tokens."""
        return self.rollout.max_episode_tokens

    @property
    def longest_sample_terms(self) -> str:
        """The same by its key."""
        return f"rollout.max_episode_tokens = {self.longest_sample}"

    @property
    def longest_response(self) -> int:
        """Most sampled tokens of an episode whose history is never rewritten."""
        return min(self.rollout.max_turns * self.rollout.max_response_tokens, self.rollout.max_episode_tokens)

    @property
    def processes(self) -> dict[str, int]:
        """The environments' processes, and reward workers where there are some; a replay has none."""
        if self.replay is not None:
            return {}
        return {"environment workers": self.env_workers.workers, **super().processes}
