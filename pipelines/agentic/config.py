"""The configuration of `pipeline: agentic`: a policy that acts over many turns, in environments and with tools."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like.builtin.pipelines.agentic.rules import AGENTIC_RULES
from roll_like.config.base import ConfigModel
from roll_like.config.policy_gradient import EvaluationSchedule, GroupRolloutConfig, PolicyGradientConfig
from roll_like.config.rules import POLICY_GRADIENT_RULES
from roll_like.config.run import NAME_PATTERN, Rule
from roll_like.config.sections import PositiveFloat, PositiveInt

#: First seed of evaluations: training counts up from 0, and few-shot examples are from beyond.
EVALUATION_SEED = 1_000_000


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
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="Further variables of the chat template, such as `enable_thinking: false`."
    )

    @property
    def groups(self) -> int:
        """Groups that one step trains on."""
        return self.groups_per_step

    @property
    def samples_per_group(self) -> int:
        """Episodes of each group."""
        return self.episodes_per_group

    @model_validator(mode="after")
    def _arithmetic(self) -> Self:
        self._refuse_wrong_product("episodes_per_step", self.episodes_per_step)
        return self


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

    @property
    def samples_per_group(self) -> int:
        """K of avg@k and pass@k."""
        return self.episodes_per_seed


class AgenticConfig(PolicyGradientConfig):
    """One agentic run: everything a YAML file may say."""

    rules: ClassVar[tuple[Rule, ...]] = (*POLICY_GRADIENT_RULES, *AGENTIC_RULES)

    pipeline: Literal["agentic"] = Field(default="agentic", description="This pipeline.")
    name: str = Field(default="agentic", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    rollout: EpisodeRolloutConfig = Field(
        description="What one step plays: `groups_per_step × episodes_per_group = episodes_per_step`."
    )
    environments: Annotated[tuple[EnvironmentConfig, ...], Field(min_length=1)] = Field(
        description="What the policy plays, weighted."
    )
    env_workers: EnvWorkersConfig = Field(
        default_factory=EnvWorkersConfig, description="The processes that environments live in."
    )
    proxy: ProxyConfig | None = Field(
        default=None, description="The server that answers programs; by default on this machine, at any free port."
    )
    evaluation: EpisodeEvaluationConfig | None = Field(
        default=None, description="How progress is measured, on seeds that are not trained on; none by default."
    )

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
        """The environments' processes."""
        return {"environment workers": self.env_workers.workers}
