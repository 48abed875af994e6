"""The `algorithm` section: how rewards become a gradient."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting, PositiveFloat, PositiveInt
from roll_like.registry import ADVANTAGES, LOSSES

Statistics = Literal["none", "group", "batch", "running"]


class AdaptiveKLConfig(ConfigModel):
    """Moves the coefficient so that the divergence stays near a target (Ziegler et al. 2019)."""

    target: PositiveFloat = Field(description="Wanted mean estimate per trained token. Nats.")
    horizon: PositiveInt = Field(default=10000, description="Samples over which the coefficient adapts to the target.")


class KLConfig(ConfigModel):
    """A penalty for leaving the reference model."""

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
        if self.adaptive is not None and self.use == "none":
            raise ValueError("adaptive moves the coefficient of a penalty that is nowhere; set use: loss or reward")
        if self.adaptive is not None and self.coefficient == 0:
            raise ValueError("adaptive multiplies the coefficient, and 0 stays 0; start with coefficient: 0.001")
        return self


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
    high: PositiveFloat = Field(description="Upper bound: of ρ (k1), or of the divergence in nats (k2, k3).")
    low: PositiveFloat | None = Field(default=None, description="Lower bound of ρ (k1); none by default.")

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        if self.estimator == "k1" and self.high <= 1:
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
        for name in ("level", "cap") if self.type == "none" else ():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"found {name}: {value} with type: none, which has no importance weights; set type: truncated (or "
                    f"masked), or remove {name}{' (reject has a level of its own)' if name == 'level' else ''}"
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

    truncated: bool = Field(default=False, description="Leave out responses that were cut at the limit.")
    difficulty: DifficultyConfig | None = Field(
        default=None, description="Leave out groups outside of a band; none by default."
    )


class AdvantageShapingConfig(ConfigModel):
    """What happens to advantages after the estimator, in this order."""

    whiten: bool = Field(default=False, description="Mean 0 and variance 1 over the step's trained tokens.")
    clip: PositiveFloat | None = Field(default=None, description="Clip advantages to [−this, this]; not by default.")


#: What asks engines for the experts of each token.
ROUTER_REPLAY = "algorithm.router_replay"


class AlgorithmConfig(ConfigModel):
    """How rewards become a gradient."""

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
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Off-policy correction between engines."
    )
    router_replay: bool = Field(
        default=False,
        description="For mixtures of experts: compute each token in training with the experts that the inference "
        "engine computed it with (docs/moe.md).",
    )
