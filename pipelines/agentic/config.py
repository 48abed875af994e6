"""The configuration of `pipeline: agentic`: a policy that acts over many turns, in environments and with tools."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from roll_like.config.base import ConfigModel, PositiveFloat, PositiveInt, Violation, repeated
from roll_like.config.containers import ContainerConfig
from roll_like.config.evaluation import EvaluationSchedule
from roll_like.config.named import NAME_PATTERN
from roll_like.config.resources import CriticResources
from roll_like.config.rewards import RETURN, OptionalRewardsConfig, is_meant_for, reported_name
from roll_like.config.rollout import GroupRolloutConfig
from roll_like.config.sampling import PolicyGradientConfig, RewardedRunConfig
from roll_like.registry import ADVANTAGES, PIPELINES
from roll_like.types import EVALUATION_SEED

#: Environment variables that a run sets for each episode of a program.
SET_FOR_PROGRAMS = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ROLL_LIKE_SEED", "ROLL_LIKE_TASK", "ROLL_LIKE_EPISODE")


class ProgramConfig(ConfigModel):
    """A program that plays episodes; it knows a base URL and a key, and asks there for the policy's turns."""

    command: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="The program and its arguments, such as `[python, agent.py]`; `python` is the run's own, or its "
        "container's."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables beside the run's own.")
    directory: str | None = Field(
        default=None,
        description="Where it is started; default: where the run was. With `runtime` a folder of the container; "
        "default: that of the image.",
    )
    runtime: ContainerConfig | None = Field(
        default=None, description="The container that it runs in; default: none, on the driver's machine as it is."
    )
    timeout_seconds: PositiveFloat = Field(
        default=300.0, description="Longest episode; a program that takes longer is ended and has failed. Seconds."
    )
    max_programs: PositiveInt = Field(default=16, description="How many may run at a time.")
    limit_reward: float | None = Field(
        default=0.0,
        description="Reward of an episode that reached a limit before its program posted one; null: it has failed.",
    )
    reasoning: Literal["apart", "content"] = Field(
        default="apart",
        description="Where answers have the policy's reasoning: apart, in `reasoning_content`, or in `content`, with "
        "its tags.",
    )
    models: tuple[str, ...] = Field(
        default=(),
        description="Names of models by which the program asks the policy; requests for others are refused. Default: "
        "any name.",
    )


class VerifiersConfig(ConfigModel):
    """An environment of the verifiers library, with an interpreter that has it (docs/verifiers.md)."""

    python: str = Field(
        default="python", description="The interpreter of an environment that has verifiers; not the run's own."
    )
    taskset: str | dict[str, Any] = Field(description="The taskset: its id, or `{id: …}` with its own options.")
    harness: str | dict[str, Any] | None = Field(
        default=None,
        description="What plays agents that have none of their own, in the same form; default: the taskset's own, or "
        "`bash`.",
    )
    runtime: str | dict[str, Any] = Field(
        default="subprocess",
        description="Where agents play that name none: its type, or `{type: …}` with its own options.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="What else is in verifiers' `env` section: `id`, agents by their names, `timeout`, `retries`, ….",
    )
    select: dict[str, Any] = Field(
        default_factory=dict, description="Which tasks are played, as verifiers' `select` section says; default: all."
    )
    held_out: Annotated[int, Field(ge=0)] = Field(
        default=0, description="So many of the first tasks are not trained on; evaluations play them."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables beside the run's own.")
    timeout_seconds: PositiveFloat = Field(
        default=900.0, description="Longest episode; one that takes longer is stopped and has failed. Seconds."
    )
    max_episodes: PositiveInt = Field(default=64, description="How many may be played at a time.")
    limit_reward: float | None = Field(
        default=0.0,
        description="Reward of an episode that a limit of `rollout` ended before verifiers scored it; null: it failed.",
    )

    @property
    def taskset_id(self) -> str:
        """The taskset's name."""
        return str(self.taskset.get("id", "")) if isinstance(self.taskset, dict) else self.taskset

    @property
    def sections(self) -> dict[str, Any]:
        """Verifiers' `env` section, but for what `seats` has."""
        return {"taskset": _of_form("id", self.taskset), **self.options}

    @property
    def seats(self) -> dict[str, Any]:
        """What every agent is given that has none of its own."""
        runtime = {"runtime": _of_form("type", self.runtime)}
        if "harness" not in self.model_fields_set:
            return runtime
        # `harness: null` in YAML means the one that is called so
        return {"harness": _of_form("id", "null" if self.harness is None else self.harness), **runtime}


def _of_form(key: str, value: str | dict[str, Any]) -> dict[str, Any]:
    """Return a section that may be written as the one value that it has to have."""
    return {key: value} if isinstance(value, str) else value


class EnvironmentConfig(ConfigModel):
    """One environment or program that the policy plays."""

    common: ClassVar[tuple[str, ...]] = ("id", "program", "weight")

    id: str | None = Field(
        default=None,
        description="Its id in Gymnasium's registry, such as `roll_like/FrozenLake-v0`. With `program` it gives the "
        "program its task and scores its answer.",
    )
    program: ProgramConfig | None = Field(
        default=None, description="A program that plays the episodes; without `id` it posts its own rewards."
    )
    verifiers: VerifiersConfig | None = Field(
        default=None, description="An environment of the verifiers library, instead of `id` and `program`."
    )
    name: str | None = Field(
        default=None,
        description="Name in metrics; default: its id without namespace and version, its taskset, or `program`.",
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
        named = self.id or (self.verifiers.taskset_id if self.verifiers is not None else "program")
        return self.name or named.rpartition("/")[2].rpartition(":")[2].rpartition("-v")[0] or named

    @property
    def played(self) -> tuple[object, ...]:
        """What episodes of it are like, whatever it is called and wherever they begin."""
        return self.id, self.kwargs, self.program, self.verifiers

    def violations(self, path: tuple[str | int, ...]) -> Iterator[Violation]:
        """Yield what cannot be played, or has no effect, in the section at a path."""
        if self.verifiers is not None:
            for name in ("id", "program"):
                if getattr(self, name) is not None:
                    yield Violation((*path, name), "`verifiers` says what is played here; remove one of the two")
        elif self.id is None and self.program is None:
            yield Violation(
                path, "none of `id`, `program` and `verifiers` is set; name an environment, or a program that plays"
            )
        if self.id is None and self.kwargs:
            where = "write them into verifiers.taskset" if self.verifiers is not None else "add it or remove them"
            yield Violation((*path, "kwargs"), f"these are an environment's options, and there is no `id`; {where}")
        if self.program is None:
            return
        if self.id is not None and self.program.changed("limit_reward"):
            yield Violation(
                (*path, "program", "limit_reward"),
                f"{self.id!r} scores every episode of this program, so this has no effect; remove it, or "
                "remove `id` and let the program post its rewards",
            )
        if self.program.runtime is not None:
            yield from self.program.runtime.violations((*path, "program", "runtime"))
        for name in sorted(self.program.env.keys() & set(SET_FOR_PROGRAMS)):
            yield Violation(
                (*path, "program", "env", name),
                "the run sets this for every episode; remove it, or give it another name",
            )


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


#: Keys of environments that have no effect in an evaluation, and why.
_SET_BY_EVALUATION = {
    "weight": "an evaluation runs every seed of each environment, so a weight has no effect; remove it",
    "seeds": "how many seeds are evaluated is set once, by evaluation.seeds; set that and remove this",
    "first_seed": "where evaluations begin is set once, by evaluation.first_seed; set that and remove this",
}


def _weighs(reward: Any, environment: str) -> bool:
    return getattr(reward, "weight", 1.0) != 0 and is_meant_for(reward, environment, environment)


@PIPELINES.register("agentic")
class AgenticConfig(RewardedRunConfig, PolicyGradientConfig):
    """One agentic run: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.agentic.pipeline:AgenticPipeline"
    takes_images: ClassVar[bool] = True

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
    resources: CriticResources

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

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        for path, environments in self._sections().items():
            for name in repeated(environment.label for environment in environments):
                yield Violation(path, f"two environments are called {name!r}; give each a `name` of its own")
            for index, environment in enumerate(environments):
                yield from environment.violations((*path, index))
        played = [environment for environments in self._sections().values() for environment in environments]
        if self.proxy is not None and all(one.program is None and one.verifiers is None for one in played):
            yield Violation(
                ("proxy",),
                "no environment has a `program` or `verifiers` that would use this server; remove it, or add one",
            )
        name = self.algorithm.advantage.type
        if ADVANTAGES.get(name).greedy_baseline:
            yield Violation(
                ("algorithm", "advantage", "type"),
                f"{name!r} compares with a greedy answer to the same prompt, and episodes have none; use grpo, rloo, "
                "gigpo or turn_returns",
            )
        yield from self._turns_fit()
        yield from self._evaluation_is_of_others()
        yield from self._rewards_fit()

    def _sections(self) -> dict[tuple[str, ...], tuple[EnvironmentConfig, ...]]:
        """Return the lists of environments by their keys."""
        sections: dict[tuple[str, ...], tuple[EnvironmentConfig, ...]] = {("environments",): self.environments}
        if self.evaluation is not None and self.evaluation.environments:
            sections["evaluation", "environments"] = self.evaluation.environments
        return sections

    def _turns_fit(self) -> Iterator[Violation]:
        rollout = self.rollout
        limits = {("rollout", "max_response_tokens"): rollout.max_response_tokens}
        if self.evaluation is not None and self.evaluation.max_response_tokens is not None:
            limits["evaluation", "max_response_tokens"] = self.evaluation.max_response_tokens
        for path, limit in limits.items():
            if limit >= rollout.max_episode_tokens:
                yield Violation(
                    path,
                    f"one turn of {limit} tokens would fill the whole conversation (rollout.max_episode_tokens: "
                    f"{rollout.max_episode_tokens}); raise that, or lower this",
                )

    def _evaluation_is_of_others(self) -> Iterator[Violation]:
        """Yield what is trained on too, and names that mean two things."""
        evaluation = self.evaluation
        if evaluation is None:
            return
        named = {environment.label: environment for environment in self.environments}
        for index, environment in enumerate(evaluation.environments):
            path = ("evaluation", "environments", index)
            if (other := named.get(environment.label)) is not None and other.played != environment.played:
                yield Violation(
                    (*path, "name"),
                    f"{environment.label!r} is also what an environment with other settings is called that is trained "
                    "on; give this one a `name` of its own",
                )
            for name in environment.changed(*_SET_BY_EVALUATION):
                yield Violation((*path, name), _SET_BY_EVALUATION[name])
        for environment in self.evaluated:
            for trained in self.environments:
                if trained.played != environment.played:
                    continue
                last = trained.first_seed + (trained.seeds or self.seeds_played)
                if trained.first_seed < evaluation.first_seed + evaluation.seeds and evaluation.first_seed < last:
                    yield Violation(
                        ("evaluation", "first_seed"),
                        f"the seeds {evaluation.first_seed} to {evaluation.first_seed + evaluation.seeds - 1} of "
                        f"{environment.label!r} are also trained on ({trained.first_seed} to {last - 1}); use others",
                    )

    def _rewards_fit(self) -> Iterator[Violation]:
        known = list(dict.fromkeys(environment.label for environment in (*self.environments, *self.evaluated)))
        yield from self.rewards.name_violations(known, known, "environment")
        for name in () if self.rewards.use else self.rewards.changed():
            yield Violation(
                ("rewards", name), "there are no rewards beside the environment's; add `rewards.use`, or remove this"
            )
        for index, reward in enumerate(self.rewards.use):
            if reported_name(reward) == RETURN:
                yield Violation(
                    ("rewards", "use", index),
                    f"the environment's own reward is called {RETURN!r}; give this one another `name`",
                )
        if self.rewards.use and self.rewards.environment_weight == 0:
            for environment in self.environments:
                if not any(_weighs(reward, environment.label) for reward in self.rewards.use):
                    yield Violation(
                        ("rewards", "environment_weight"),
                        f"0, and no reward with a weight scores {environment.label!r}, so nothing can be learned "
                        "there; add one to `rewards.use`, or raise this",
                    )
