"""The `iterations` section of `pipeline: dpo`: pairs that the policy samples itself, and the rules that go with it.

What samples and judges is the machinery of the pipelines over prompts. It takes a `PromptConfig`, so `prompts_of` makes
one out of a preference run's configuration, and the rules of such configurations hold for it. What they say of
`data.sources`, `rollout.max_response_tokens` and so on is told with the keys that stand in this section.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from roll_like.config.base import ConfigModel
from roll_like.config.plan import RolePlan
from roll_like.config.policy_gradient import GroupRolloutConfig
from roll_like.config.prompts import EvaluationConfig, PromptConfig, RewardsConfig, RolloutConfig
from roll_like.config.rules import SAMPLING_RULES
from roll_like.config.rules_rewards import RLVR_RULES
from roll_like.config.run import Rule, RunConfig
from roll_like.config.sections import (
    DataConfig,
    DeviceMappingConfig,
    HardwareConfig,
    InferenceConfig,
    JudgeServerConfig,
    PositiveFloat,
    PositiveInt,
    ResourcesConfig,
    VLLMConfig,
)
from roll_like.config.violations import Violation
from roll_like.registry import PREFERENCE_LOSSES

if TYPE_CHECKING:
    from roll_like.builtin.pipelines.dpo.config import DPOConfig


class IterationRolloutConfig(GroupRolloutConfig):
    """What one iteration samples: `prompts_per_iteration × samples_per_prompt` answers."""

    groups_key: ClassVar[str] = "prompts_per_iteration"
    samples_key: ClassVar[str] = "samples_per_prompt"

    prompts_per_iteration: PositiveInt = Field(description="Groups of answers that one iteration samples.")
    samples_per_prompt: PositiveInt = Field(description="Answers of each group.")

    @property
    def groups(self) -> int:
        """Groups that one iteration samples."""
        return self.prompts_per_iteration

    @property
    def samples_per_group(self) -> int:
        """Answers of each group."""
        return self.samples_per_prompt


class IterationsConfig(ConfigModel):
    """Pairs out of the policy's own answers: sample groups, judge them, pair better with worse, train, and again."""

    prompts: DataConfig = Field(description="What the policy answers.")
    rollout: IterationRolloutConfig = Field(
        description="What one iteration samples: `prompts_per_iteration × samples_per_prompt` answers."
    )
    rewards: RewardsConfig = Field(description="How answers are judged.")
    judge: JudgeServerConfig | None = Field(
        default=None, description="A model that judges, for `llm_judge` rewards; none by default."
    )
    inference: InferenceConfig = Field(default_factory=VLLMConfig, description="The engine that samples.")
    pairing: Literal["best_worst", "random", "all"] = Field(
        default="best_worst",
        description="Which answers of a group become pairs: the best with the worst, two at random whose rewards "
        "differ enough, or all that do.",
    )
    min_margin: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Smallest difference of the rewards of a pair; equal ones never make a pair. Units of the reward.",
    )
    truncated: Literal["keep", "never_chosen", "drop"] = Field(
        default="keep",
        description="Answers that the token limit cut: paired by their rewards like others, never the chosen one of a "
        "pair, or in no pair.",
    )
    epochs: PositiveFloat | None = Field(
        default=None, description="Passes over the pairs of one iteration; or set `steps`. Default: one."
    )
    steps: PositiveInt | None = Field(default=None, description="Steps of one iteration; or set `epochs`.")
    evaluation: EvaluationConfig | None = Field(
        default=None, description="How progress is measured by rewards, on prompts that are not trained on."
    )

    def steps_for(self, pairs: int, pairs_per_step: int) -> int:
        """Return how many steps an iteration lasts that has so many pairs."""
        return self.steps or max(1, math.ceil((self.epochs or 1) * pairs / pairs_per_step))


class SampledPromptsConfig(PromptConfig):
    """The part of a preference run that samples and judges, as pipelines over prompts know it."""

    rules: ClassVar[tuple[Rule, ...]] = ()  # the preference run's own rules ask them


def prompts_of(config: DPOConfig) -> SampledPromptsConfig:
    """Return what samples and judges in a preference run, for all that takes a configuration over prompts.

    Args:
        config: A configuration with `iterations` and with devices for the engines.
    """
    section, device_mapping = config.iterations, config.resources.device_mapping
    assert section is not None, "the caller asked"
    assert device_mapping.inference is not None, "a rule says so"
    rollout = section.rollout
    return SampledPromptsConfig(
        **{field.alias or name: getattr(config, name) for name, field in RunConfig.model_fields.items()},
        steps=config.steps or 1,
        data=section.prompts,
        rollout=RolloutConfig(
            **{name: getattr(rollout, name) for name in GroupRolloutConfig.model_fields},
            prompts_per_step=rollout.prompts_per_iteration,
            samples_per_prompt=rollout.samples_per_prompt,
        ),
        rewards=section.rewards,
        judge=section.judge,
        inference=section.inference,
        evaluation=section.evaluation,
        resources=ResourcesConfig(
            **{name: getattr(config.resources, name) for name in HardwareConfig.model_fields},
            device_mapping=DeviceMappingConfig(
                training=device_mapping.training, inference=device_mapping.inference, judge=device_mapping.judge
            ),
        ),
    )


#: Where sections of a configuration over prompts stand in a preference run's.
_MOVED = {name: name for name in ("rollout", "rewards", "judge", "inference", "evaluation")} | {"data": "prompts"}
_FIELDS: dict[str, type[ConfigModel]] = {
    "data": DataConfig,
    "rollout": RolloutConfig,
    "rewards": RewardsConfig,
    "judge": JudgeServerConfig,
    "inference": VLLMConfig,
    "evaluation": EvaluationConfig,
}
_KEYS = re.compile(
    r"(?<![\w.])(?:"
    + "|".join(rf"{name}(?=\.(?:{'|'.join(section.model_fields)})\b)" for name, section in _FIELDS.items())
    + ")"
)


def in_iterations(text: str) -> str:
    """Return a text with the keys that stand under `iterations` named so.

    >>> in_iterations("lower data.max_prompt_tokens, not resources.device_mapping.inference")
    'lower iterations.prompts.max_prompt_tokens, not resources.device_mapping.inference'
    """
    moved = _KEYS.sub(lambda match: f"iterations.{_MOVED[match[0]]}", text)
    return moved.replace("prompts_per_step", "prompts_per_iteration")


def sampling_roles(config: DPOConfig) -> tuple[RolePlan, ...]:
    """Return where engines, judge and reward pools sit; nothing of a run on given pairs."""
    if config.iterations is None or config.resources.device_mapping.inference is None:
        return ()
    return tuple(
        replace(
            role,
            workers_key=f"iterations.{role.workers_key}",
            devices_key=role.devices_key if role.devices_key[0] == "resources" else ("iterations", *role.devices_key),
        )
        for role in prompts_of(config).further_roles
    )


def _pairs_have_one_origin(config: DPOConfig) -> Iterator[Violation]:
    given, sampled = bool(config.data.sources), config.iterations is not None
    if sampled and not PREFERENCE_LOSSES.get(config.algorithm.loss.type).paired:
        yield Violation(
            ("algorithm", "loss", "type"),
            f"`iterations` makes pairs, and {config.algorithm.loss.type!r} learns from single answers; use a loss on "
            "pairs, such as dpo",
        )
    if given == sampled:
        found = "both are set" if given else "neither is set"
        yield Violation(
            ("data", "sources"),
            f"pairs are given (`data.sources`) or sampled by the policy (`iterations`), and {found}; set one of them",
        )
    if sampled and config.epochs is not None:
        yield Violation(
            ("epochs",),
            "passes over pairs that are not there before the run cannot be counted; set `steps` for the whole run, "
            "and iterations.epochs or iterations.steps for one iteration",
        )
    if config.iterations is not None and config.iterations.epochs is not None and config.iterations.steps is not None:
        yield Violation(
            ("iterations", "steps"), "an iteration lasts a number of `steps`, or of `epochs`, and both are set; set one"
        )


def _engines_have_devices(config: DPOConfig) -> Iterator[Violation]:
    device_mapping = config.resources.device_mapping
    if config.iterations is not None:
        if device_mapping.inference is None:
            yield Violation(
                ("resources", "device_mapping", "inference"),
                "the engines that sample for `iterations` need devices; set it to the devices of `training` (they take "
                "turns) or to devices of their own",
            )
        return
    for role in ("inference", "judge"):
        if getattr(device_mapping, role) is not None:
            yield Violation(
                ("resources", "device_mapping", role),
                "these devices would stay idle, because nothing is sampled from given pairs; remove the key, or set "
                "`iterations` instead of `data.sources`",
            )


def _sampling_can_work(config: DPOConfig) -> Iterator[Violation]:
    if config.iterations is None or config.resources.device_mapping.inference is None:
        return
    prompts = prompts_of(config)
    for rule in (*SAMPLING_RULES, *RLVR_RULES):
        for violation in rule(prompts):
            section, *rest = violation.path
            if section in _MOVED:
                yield Violation(("iterations", _MOVED[str(section)], *rest), in_iterations(violation.message))
            elif section == "resources":
                yield Violation(violation.path, in_iterations(violation.message))


def _groups_make_pairs(config: DPOConfig) -> Iterator[Violation]:
    if config.iterations is None:
        return
    rollout, prompts = config.iterations.rollout, config.iterations.prompts
    path, size = ("iterations", "rollout"), rollout.samples_per_prompt
    if size < 2:
        yield Violation(
            (*path, "samples_per_prompt"), "a pair takes two answers to one prompt; set it to 2 or more (8 is usual)"
        )
    if rollout.temperature == 0:
        yield Violation(
            (*path, "temperature"), "0 is greedy: all answers to a prompt are equal, so there is no pair; use 1.0"
        )
    if rollout.max_in_flight < size:
        yield Violation(
            (*path, "max_in_flight"),
            f"{rollout.max_in_flight} samples at a time cannot hold one group of {size}; set it to {size} or more",
        )
    longest = prompts.max_prompt_tokens + rollout.max_response_tokens
    if config.data.max_tokens < longest:
        yield Violation(
            ("data", "max_tokens"),
            f"{config.data.max_tokens} tokens cannot hold the longest sampled answer with its prompt "
            f"(iterations.prompts.max_prompt_tokens + iterations.rollout.max_response_tokens = "
            f"{prompts.max_prompt_tokens} + {rollout.max_response_tokens} = {longest}); set it to {longest} or more",
        )


def _reference_knows_the_pairs(config: DPOConfig) -> Iterator[Violation]:
    reference = config.reference
    if reference is None or not PREFERENCE_LOSSES.get(config.algorithm.loss.type).needs_reference:
        return
    if reference.refresh == "never":
        if config.iterations is not None and reference.mode == "precomputed":
            yield Violation(
                ("reference", "mode"),
                "`precomputed` asks the reference model before the first step, and sampled pairs do not exist then; "
                "set reference.mode: cluster (a frozen starting policy answers in each step), or reference.refresh: "
                "iteration (compare with the policy at the start of each iteration)",
            )
        return
    if config.iterations is None:
        yield Violation(
            ("reference", "refresh"),
            "given pairs have no iterations at which the reference could be refreshed; remove the key",
        )
    if reference.mode != "precomputed":
        yield Violation(
            ("reference", "mode"),
            f"with refresh: iteration the policy itself answers before an iteration's first step, and "
            f"{reference.mode!r} would answer with the starting policy; set mode: precomputed, or refresh: never",
        )
    if reference.path is not None:
        yield Violation(
            ("reference", "path"),
            "with refresh: iteration the reference is the policy at the start of each iteration, and no other model; "
            "remove the path, or set refresh: never and mode: cluster",
        )


#: What a preference run has to keep to because of `iterations`, or of its absence.
ITERATION_RULES = (
    _pairs_have_one_origin,
    _engines_have_devices,
    _sampling_can_work,
    _groups_make_pairs,
    _reference_knows_the_pairs,
)
