"""The `algorithm` section: how rewards become a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting, PositiveFloat, PositiveInt, Violation
from roll_like.config.resources import ResourcesConfig
from roll_like.config.rollout import AsyncSchedule, GroupRolloutConfig
from roll_like.config.training import CriticConfig, ReferenceConfig, TrainingConfig
from roll_like.registry import ADVANTAGES, LOSSES

Statistics = Literal["none", "group", "batch", "running"]


class AdaptiveKLConfig(ConfigModel):
    """Moves the coefficient so that the divergence stays near a target (Ziegler et al. 2019)."""

    target: PositiveFloat = Field(description="Wanted mean estimate per trained token. Nats.")
    horizon: PositiveInt = Field(default=10000, description="Samples over which the coefficient adapts to the target.")


class KLConfig(ConfigModel):
    """A penalty for leaving the reference model."""

    common: ClassVar[tuple[str, ...]] = ("use", "coefficient")

    use: Literal["none", "loss", "reward"] = Field(default="none", description="Where the penalty goes.")
    estimator: Literal["k1", "abs", "k2", "k3"] = Field(
        default="k3",
        description="k1: log-ratio; abs: its absolute value; k2: half its square; k3: unbiased and positive "
        "(Schulman 2020).",
    )
    straight_through: bool = Field(
        default=False,
        description="Give every estimator the gradient of k2, which is that of the divergence. With `use: loss`.",
    )
    importance_weight: bool = Field(
        default=False,
        description="Multiply the estimate by π/π_old, with its gradient, which makes k1 and k3 and their gradients "
        "unbiased for samples of the old policy (DeepSeek-V3.2). With `use: loss`.",
    )
    coefficient: Annotated[float, Field(ge=0)] = Field(default=0.001, description="Weight of the penalty.")
    adaptive: AdaptiveKLConfig | None = Field(
        default=None, description="Lets the coefficient follow a target; fixed by default."
    )

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.straight_through and self.use == "reward":
            raise ValueError(
                "straight_through chooses a gradient, and a penalty in the reward has none; set use: loss, or remove it"
            )
        if self.straight_through and self.estimator == "k2":
            raise ValueError("straight_through gives the gradient of k2, which k2 has anyway; remove it")
        if self.importance_weight:
            self._weight_makes_sense()
        if self.adaptive is not None and self.use == "none":
            raise ValueError("adaptive moves the coefficient of a penalty that is nowhere; set use: loss or reward")
        if self.adaptive is not None and self.coefficient == 0:
            raise ValueError("adaptive multiplies the coefficient, and 0 stays 0; start with coefficient: 0.001")
        return self

    def _weight_makes_sense(self) -> None:
        if self.use == "reward":
            raise ValueError(
                "importance_weight corrects a gradient for samples of an older policy, and a penalty in the reward has "
                "no gradient; set use: loss, or remove it"
            )
        if self.straight_through:
            raise ValueError(
                "importance_weight and straight_through both decide the gradient of the penalty; remove one"
            )
        if self.estimator in ("k2", "abs"):
            raise ValueError(
                f"importance_weight makes an unbiased estimate unbiased for older samples too, and {self.estimator} is "
                "biased in any case; set estimator: k3 (or k1), or remove it"
            )


class RejectConfig(ConfigModel):
    """Leaves out tokens or sequences that the trainer's policy holds for too different from what was sampled."""

    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1",
        description="What is bounded: the ratio ρ = π/μ itself (k1), half its squared logarithm (k2), or "
        "ρ − 1 − log ρ (k3).",
    )
    level: Literal["token", "turn_mean", "turn_max", "sequence_mean", "sequence_max"] = Field(
        default="sequence_mean",
        description="Each token on its own, or turns or whole sequences by the mean or the largest value of their "
        "tokens.",
    )
    advantages: Literal["all", "negative"] = Field(
        default="all",
        description="Reject whatever the advantage, or only where it is negative, which pushes unlikely tokens further "
        "down (DeepSeek-V3.2).",
    )
    high: PositiveFloat | None = Field(
        default=None,
        description="Upper bound: of ρ (k1), or of the divergence in nats (k2, k3); with k1 may be left out.",
    )
    low: PositiveFloat | None = Field(default=None, description="Lower bound of ρ (k1); none by default.")

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        if self.high is None and (self.estimator != "k1" or self.low is None):
            raise ValueError(
                "there is no bound, so nothing is rejected; set high" + " or low" * (self.estimator == "k1")
            )
        if self.estimator == "k1" and self.high is not None and self.high <= 1:
            raise ValueError(f"with k1, high bounds the ratio, which is 1 without mismatch; found {self.high:g}")
        if self.estimator != "k1" and self.low is not None:
            raise ValueError(f"{self.estimator} is at least 0 and has no lower bound; remove low, or use estimator: k1")
        if self.low is not None and self.low >= 1:
            raise ValueError(f"low bounds the ratio, which is 1 without mismatch; set it below 1, found {self.low:g}")
        return self


class CorrectionConfig(ConfigModel):
    """Corrects for the difference between the inference engine's and the trainer's log-probabilities."""

    type: Literal["none", "truncated", "masked"] = Field(
        default="truncated",
        description="Importance weights cut at `cap`; or masked: 0 outside of [`floor`, `cap`] (IcePop); or none.",
    )
    level: Literal["token", "turn", "turn_geometric", "sequence", "geometric"] = Field(
        default="token",
        description="Whose weight: the token's; the whole sequence's; the geometric mean over the sequence; or one of "
        "these two of each turn.",
    )
    cap: PositiveFloat = Field(default=2.0, description="Largest importance weight.")
    floor: PositiveFloat | None = Field(
        default=None, description="Smallest weight that counts, with `type: masked`; none by default."
    )
    reject: RejectConfig | None = Field(
        default=None, description="Also leave out what differs too much; nothing by default."
    )

    @model_validator(mode="after")
    def _bounds_are_read(self) -> Self:
        if self.type != "masked" and self.floor is not None:
            raise ValueError("floor is read with type: masked only; set that, or remove floor")
        for name in self.changed("level", "cap") if self.type == "none" else ():
            raise ValueError(
                f"found {name}: {getattr(self, name)} with type: none, which has no importance weights; set type: "
                f"truncated (or masked), or remove {name}"
                + (" (reject has a level of its own)" if name == "level" else "")
            )
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"the band [{self.floor:g}, {self.cap:g}] is empty; set floor below cap")
        return self


class NormaliseConfig(ConfigModel):
    """Standardises rewards; mean and standard deviation may come from different samples."""

    mean: Statistics = Field(
        default="none", description="Subtract the mean of the group, of the step, or of all steps so far."
    )
    std: Statistics = Field(default="none", description="Divide by the standard deviation of the same choices.")


class OverlongConfig(ConfigModel):
    """A soft punishment for responses near the limit (DAPO, arXiv:2503.14476, equation 13)."""

    buffer_tokens: PositiveInt = Field(
        description="The punishment grows from 0 to `penalty` over the last so many tokens before "
        "`rollout.max_response_tokens`."
    )
    penalty: PositiveFloat = Field(default=1.0, description="Taken from the reward of a response at the limit.")


class TruncatedConfig(ConfigModel):
    """Reward of responses that were cut."""

    factor: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Multiply its reward by this; 0: such a response gets nothing."
    )
    reward: float | None = Field(default=None, allow_inf_nan=False, description="Replaces its reward by this one.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.factor is None) == (self.reward is None):
            raise ValueError("set one of the two: factor, which its reward is multiplied by, or reward, in its place")
        return self


class LengthPenaltyConfig(ConfigModel):
    """A preference for short responses."""

    type: Literal["linear", "group"] = Field(
        default="linear",
        description="linear: in proportion to the length. group: by the length's place between the group's shortest "
        "and longest response (Kimi k1.5, arXiv:2501.12599).",
    )
    coefficient: PositiveFloat = Field(
        description="linear: taken from the reward of a response of `rollout.max_response_tokens`. group: a response's "
        "reward changes by +half to −half of this."
    )


class RewardShapingConfig(ConfigModel):
    """What happens to rewards before advantages, in this order."""

    truncated: TruncatedConfig | None = Field(
        default=None,
        description="Reward of responses that were cut: by the token limit, episodes also by `rollout.max_turns` or "
        "the environment (`truncated`); as scored by default.",
    )
    overlong: OverlongConfig | None = Field(
        default=None, description="Soft punishment near the limit; none by default."
    )
    length_penalty: LengthPenaltyConfig | None = Field(
        default=None, description="Preference for short responses; none by default."
    )
    normalise: NormaliseConfig = Field(default_factory=NormaliseConfig, description="Standardise rewards.")
    clip: PositiveFloat | None = Field(default=None, description="Clip rewards to [−this, this]; not by default.")


class DifficultyConfig(ConfigModel):
    """Leaves out groups that are too easy, too hard or too uniform, by their rewards before shaping."""

    of: Literal["mean", "std"] = Field(description="Figure of the group's rewards that has to lie in the band.")
    low: float = Field(description="Least value that is trained on.")
    high: float = Field(description="Largest value that is trained on.")

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"the band is empty: low is {self.low:g}, high is {self.high:g}; set low below high")
        return self


class MaskConfig(ConfigModel):
    """Which samples are scored and compared, but not trained on."""

    truncated: bool = Field(
        default=False,
        description="Leave out responses that were cut: by the token limit, episodes also by `rollout.max_turns` or "
        "the environment (`truncated`).",
    )
    difficulty: DifficultyConfig | None = Field(
        default=None, description="Leave out groups outside of a band; none by default."
    )
    samples_per_group: PositiveInt | None = Field(
        default=None,
        description="Leave out all but the first so many samples of each group. The others are compared with them, and "
        "vote in the reward `consensus`; by default none is left out.",
    )


class AdvantageShapingConfig(ConfigModel):
    """What happens to advantages after the estimator, in this order."""

    whiten: bool = Field(default=False, description="Mean 0 and variance 1 over the step's trained tokens.")
    clip: PositiveFloat | None = Field(default=None, description="Clip advantages to [−this, this]; not by default.")


#: What asks engines for the experts of each token.
ROUTER_REPLAY = "algorithm.router_replay"


class AlgorithmConfig(ConfigModel):
    """How rewards become a gradient."""

    common: ClassVar[tuple[str, ...]] = ("advantage", "loss", "kl", "updates_per_step")

    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    advantage: Annotated[PluginConfig, PluginSetting(ADVANTAGES)] = Field(
        default_factory=lambda: ADVANTAGES.get("grpo").Config(), description="Advantage estimator."
    )
    advantage_shaping: AdvantageShapingConfig = Field(
        default_factory=AdvantageShapingConfig, description="What happens to advantages after the estimator."
    )
    mask: MaskConfig = Field(default_factory=MaskConfig)
    loss: Annotated[PluginConfig, PluginSetting(LOSSES)] = Field(
        default_factory=lambda: LOSSES.get("ppo").Config(), description="Policy loss."
    )
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "token_sum_norm"] = Field(
        default="token_mean",
        description="How token losses are weighted; all use the global batch as denominator. token_sum_norm divides by "
        "samples × max_response_tokens (Dr. GRPO).",
    )
    updates_per_step: PositiveInt = Field(default=1, description="Optimizer steps over one step's samples.")
    old_logprobs: Literal["auto", "recompute", "behaviour"] = Field(
        default="auto",
        description="Old policy of the ratio. auto: the current one with a single update (no extra pass), else "
        "recompute. behaviour: what the inference engine reported.",
    )
    kl: KLConfig = Field(default_factory=KLConfig, description="Penalty for leaving the reference model.")
    entropy_coefficient: Annotated[float, Field(ge=0)] = Field(default=0.0, description="Weight of an entropy bonus.")
    observation_coefficient: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Weight of the cross-entropy on what the policy reads between its turns (ECHO); 0.1 is usual. "
        "With `pipeline: agentic`.",
    )
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Off-policy correction between engines."
    )
    router_replay: bool = Field(
        default=False,
        description="For mixtures of experts: compute each token in training with the experts that the inference "
        "engine computed it with (docs/moe.md).",
    )

    def violations(self, rollout: GroupRolloutConfig, longest_response: int) -> Iterator[Violation]:
        """Yield settings that cannot work together, or have no effect."""
        if LOSSES.get(self.loss.type).needs_ratio and self.updates_per_step == 1 and self.old_logprobs != "behaviour":
            yield Violation(
                ("algorithm", "old_logprobs"),
                f"{self.loss.type} weighs sequences by the ratio to the policy that sampled, but with one update the "
                "old policy is the current one and every ratio is 1; set old_logprobs: behaviour",
            )
        correction = self.correction
        if self.old_logprobs == "behaviour" and correction.type != "none":
            for name in correction.changed():
                yield Violation(
                    ("algorithm", "correction", name),
                    "with old_logprobs: behaviour the old policy is the one that sampled, so each importance weight "
                    "π_old/μ is 1 and `correction` has no effect; remove it, or set old_logprobs: recompute",
                )
        for name in self.kl.changed("coefficient", "estimator", "importance_weight") if self.kl.use == "none" else ():
            yield Violation(
                ("algorithm", "kl", name),
                "there is no KL penalty with use: none, so this has no effect; set algorithm.kl.use: loss or reward, "
                "or remove it",
            )
        yield from self._mask_violations(rollout)
        yield from self._shaping_violations(rollout, longest_response)
        if isinstance(rollout.schedule, AsyncSchedule):
            yield from self._staleness_violations(rollout.schedule)

    def _mask_violations(self, rollout: GroupRolloutConfig) -> Iterator[Violation]:
        trained, sampled = self.mask.samples_per_group, rollout.samples_per_group
        if trained is not None and trained >= sampled:
            yield Violation(
                ("algorithm", "mask", "samples_per_group"),
                f"groups have {sampled} samples (rollout.{rollout.samples_key}), so none would be left out; set it "
                f"below {sampled}, or remove it",
            )

    def _shaping_violations(self, rollout: GroupRolloutConfig, longest_response: int) -> Iterator[Violation]:
        shaping, key = self.reward_shaping, ("algorithm", "reward_shaping")
        if rollout.samples_per_group == 1:
            for name in ("mean", "std"):
                if getattr(shaping.normalise, name) == "group":
                    yield Violation(
                        (*key, "normalise", name),
                        "a group of one has no statistics of its own; use batch or running, or more "
                        f"{rollout.samples_key}",
                    )
            if shaping.length_penalty is not None and shaping.length_penalty.type == "group":
                yield Violation(
                    (*key, "length_penalty", "type"),
                    f"a group of one has no shortest and longest response; use linear, or more {rollout.samples_key}",
                )
        if shaping.overlong is not None and shaping.overlong.buffer_tokens > longest_response:
            yield Violation(
                (*key, "overlong", "buffer_tokens"),
                f"{shaping.overlong.buffer_tokens} tokens before the limit is before the start: a sample has at most "
                f"{longest_response} sampled tokens; set it to that or less",
            )
        yield from self._sign_violations()
        whole = shaping.clip is not None or {shaping.normalise.mean, shaping.normalise.std} != {"none"}
        if self.advantage.type == "grpo_process" and whole:
            yield Violation(
                key,
                "grpo_process compares scores of steps, and normalise and clip change the reward as a whole; remove "
                "them (it standardises by itself; advantage_shaping.clip clips advantages)",
            )
        if self.advantage.type == "gdpo":
            why = "gdpo standardises every configured reward on its own and never looks at their sum"
            if self.kl.use == "reward":
                yield Violation(("algorithm", "kl", "use"), f"{why}, so a penalty in the reward is lost; set use: loss")
            if whole:
                yield Violation(key, f"{why}, so normalise and clip have no effect; remove them")

    def _sign_violations(self) -> Iterator[Violation]:
        """Yield what takes rewards below 0, where the estimator has no meaning for them."""
        if not ADVANTAGES.get(self.advantage.type).nonnegative_rewards:
            return
        shaping, key = self.reward_shaping, ("algorithm", "reward_shaping")
        below: dict[tuple[str, ...], bool] = {
            ("algorithm", "kl", "use"): self.kl.use == "reward",
            (*key, "truncated", "reward"): shaping.truncated is not None and (shaping.truncated.reward or 0) < 0,
            (*key, "overlong"): shaping.overlong is not None,
            (*key, "length_penalty"): shaping.length_penalty is not None,
            (*key, "normalise", "mean"): shaping.normalise.mean != "none",
        }
        for path in (path for path, takes in below.items() if takes):
            yield Violation(
                path,
                f"this takes rewards below 0, and {self.advantage.type} divides by a group's mean reward, which has to "
                f"be a probability of being right; remove it{', or set use: loss' * (path[-1] == 'use')}, or use "
                "advantage: grpo",
            )

    def _staleness_violations(self, schedule: AsyncSchedule) -> Iterator[Violation]:
        """Yield a loss that takes samples of older policies for the current policy's own."""
        old = f"with rollout.schedule: async samples are up to {schedule.max_staleness} versions old, and"
        if self.old_logprobs == "behaviour" and not LOSSES.get(self.loss.type).uses_old_policy(self.loss):
            yield Violation(
                ("algorithm", "old_logprobs"),
                f"{old} `behaviour` leaves their correction to the loss's ratio, which {self.loss.type} does not use; "
                "set auto with algorithm.correction.type: truncated (or masked)",
            )
        if self.correction.type == "none" and self.old_logprobs != "behaviour":
            yield Violation(
                ("algorithm", "correction", "type"),
                f"{old} `none` treats them as the current policy's own, which is biased; set truncated (or masked), or "
                "algorithm.old_logprobs: behaviour",
            )

    def update_violations(self, rollout: GroupRolloutConfig, training: TrainingConfig) -> Iterator[Violation]:
        """Yield a step that cannot be divided into equal updates, or updates among ranks."""
        updates, what = self.updates_per_step, rollout.groups_key.removesuffix("_per_step")
        if rollout.groups % updates:
            near = [n for n in range(1, rollout.groups + 1) if rollout.groups % n == 0]
            yield Violation(
                ("algorithm", "updates_per_step"),
                f"{rollout.groups} {what} cannot be divided into {updates} equal "
                f"updates; use one of {', '.join(map(str, near))}, or change rollout.{rollout.groups_key}",
            )
            return
        samples = rollout.groups // updates * (self.mask.samples_per_group or rollout.samples_per_group)
        yield from training.ranks_have_work(samples, "update", "samples", f"more {what} or samples per update")

    def model_violations(
        self, reference: ReferenceConfig | None, critic: CriticConfig | None, resources: ResourcesConfig
    ) -> Iterator[Violation]:
        """Yield models beside the policy that are needed and not there, or there and not needed."""
        use, name = self.kl.use, self.advantage.type
        needed = ADVANTAGES.get(name).needs_critic
        if use != "none" and reference is None:
            yield Violation(
                ("algorithm", "kl", "use"),
                f"{use!r} compares with a reference model, but there is no `reference` section; "
                "add `reference: {}`, or set algorithm.kl.use: none",
            )
        if use == "none" and reference is not None:
            yield Violation(
                ("reference",),
                "a reference model would be loaded and never used, because algorithm.kl.use is none; "
                "remove the section, or set algorithm.kl.use: loss (or reward)",
            )
        if needed and critic is None:
            yield Violation(
                ("algorithm", "advantage", "type"),
                f"{name!r} compares rewards with the values of a critic, but there is no `critic` section; add "
                "`critic: {}`, or use an estimator without one (grpo, rloo, reinforce_plus_plus)",
            )
        if not needed and critic is not None:
            yield Violation(
                ("critic",),
                f"a critic would be trained and never used, because algorithm.advantage {name!r} needs none; remove "
                "the section, or use algorithm.advantage: gae",
            )
        further = {
            "reference": (reference, "and a KL term"),
            "critic": (critic, "and an advantage estimator that learns values"),
        }
        for role, (section, also) in further.items():
            if section is None and resources.own_devices(role) is not None:
                yield Violation(
                    ("resources", "device_mapping", role),
                    f"these devices would stay idle, because there is no `{role}` section; remove the key, "
                    f"or add `{role}: {{}}` {also}",
                )
