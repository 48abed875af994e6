"""Rules between the `algorithm` section and the others: what an algorithm needs, and what would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.config.base import Violation
from roll_like.config.resources import DeviceRange
from roll_like.config.sampling import PolicyGradientConfig
from roll_like.config.training import ReferenceSection, TrainingConfig
from roll_like.registry import ADVANTAGES


def _kl_has_its_reference(config: PolicyGradientConfig) -> Iterator[Violation]:
    use = config.algorithm.kl.use
    if use != "none" and config.reference is None:
        yield Violation(
            ("algorithm", "kl", "use"),
            f"{use!r} compares with a reference model, but there is no `reference` section; "
            "add `reference: {}`, or set algorithm.kl.use: none",
        )
    if use == "none" and config.reference is not None:
        yield Violation(
            ("reference",),
            "a reference model would be loaded and never used, because algorithm.kl.use is none; "
            "remove the section, or set algorithm.kl.use: loss (or reward)",
        )
    if config.reference is None and config.resources.device_mapping.reference is not None:
        yield Violation(
            ("resources", "device_mapping", "reference"),
            "these devices would stay idle, because there is no `reference` section; remove the key, "
            "or add `reference: {}` and a KL term",
        )


def adapter_off_means_something(
    reference: ReferenceSection | None, training: TrainingConfig, devices: DeviceRange | None
) -> Iterator[Violation]:
    """Yield what does not go with `reference.mode: adapter_off`.

    Args:
        reference: The `reference` section.
        training: The `training` section.
        devices: `resources.device_mapping.reference`.
    """
    if reference is None or reference.mode != "adapter_off":
        return
    if training.lora is None:
        yield Violation(
            ("reference", "mode"),
            "'adapter_off' uses the trainer with its adapters switched off, and it has none; add `training.lora: {}`, "
            "or use mode: cluster",
        )
    if reference.path is not None:
        yield Violation(
            ("reference", "path"),
            f"{reference.path} would never be loaded: without adapters the trainer is model.path; remove the key, or "
            "use mode: cluster",
        )
    for key in ("workers", "max_tokens_per_micro_batch"):
        if getattr(reference, key) != type(reference).model_fields[key].default:
            yield Violation(
                ("reference", key),
                f"the trainer's own ranks are the reference, so training.{key} holds; remove the key, or use mode: "
                "cluster",
            )
    if devices is not None:
        yield Violation(
            ("resources", "device_mapping", "reference"),
            "these devices would stay idle, because the trainer is its own reference; remove the key, or use "
            "reference.mode: cluster",
        )


def _adapters_can_be_switched_off(config: PolicyGradientConfig) -> Iterator[Violation]:
    yield from adapter_off_means_something(config.reference, config.training, config.resources.device_mapping.reference)


def groups_can_be_compared(config: PolicyGradientConfig) -> Iterator[Violation]:
    """Yield groups that leave nothing to compare a sample with."""
    rollout, name = config.rollout, config.algorithm.advantage.type
    estimator = ADVANTAGES.get(name)
    least = estimator.minimum_samples_per_prompt
    size, key = rollout.samples_per_group, rollout.samples_key
    if size < least:
        yield Violation(
            ("rollout", key),
            f"algorithm.advantage {name!r} compares a sample with {estimator.compares_with}, and a group of "
            f"{_number(size)} has nothing to compare with: every advantage would be 0; set "
            f"{key} to {least} or more (8 is usual), or use algorithm.advantage: reinforce_plus_plus",
        )
    if size == 1 and rollout.drop_zero_variance_groups:
        yield Violation(
            ("rollout", "drop_zero_variance_groups"),
            f"a group of one always has equal rewards, so every group would be dropped; set {key} to 2 or "
            "more, or drop_zero_variance_groups: false",
        )
    if rollout.temperature == 0:
        yield Violation(
            ("rollout", "temperature"),
            "0 is greedy: nothing is explored and all samples of a prompt are equal, so every advantage would be 0; "
            "use 1.0 for training (evaluation.temperature may be 0)",
        )
    if rollout.max_in_flight < size:
        yield Violation(
            ("rollout", "max_in_flight"),
            f"{rollout.max_in_flight} samples at a time cannot hold one group of {size}; set it to {size} or more",
        )


def _number(count: int) -> str:
    return "one" if count == 1 else str(count)


def _estimator_has_its_critic(config: PolicyGradientConfig) -> Iterator[Violation]:
    name = config.algorithm.advantage.type
    needed, critic = ADVANTAGES.get(name).needs_critic, config.critic
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


def _shaping_has_an_effect(config: PolicyGradientConfig) -> Iterator[Violation]:
    algorithm, rollout = config.algorithm, config.rollout
    shaping = algorithm.reward_shaping
    if rollout.samples_per_group == 1:
        for key in ("mean", "std"):
            if getattr(shaping.normalise, key) == "group":
                yield Violation(
                    ("algorithm", "reward_shaping", "normalise", key),
                    f"a group of one has no statistics of its own; use batch or running, or more {rollout.samples_key}",
                )
        if shaping.length_penalty is not None and shaping.length_penalty.type == "group":
            yield Violation(
                ("algorithm", "reward_shaping", "length_penalty", "type"),
                f"a group of one has no shortest and longest response; use linear, or more {rollout.samples_key}",
            )
    if shaping.overlong is not None and shaping.overlong.buffer_tokens > config.longest_response:
        yield Violation(
            ("algorithm", "reward_shaping", "overlong", "buffer_tokens"),
            f"{shaping.overlong.buffer_tokens} tokens before the limit is before the start: a sample has at most "
            f"{config.longest_response} sampled tokens; set it to that or less",
        )
    if algorithm.advantage.type == "gdpo":
        why = "gdpo standardises every configured reward on its own and never looks at their sum"
        if algorithm.kl.use == "reward":
            yield Violation(("algorithm", "kl", "use"), f"{why}, so a penalty in the reward is lost; set use: loss")
        if shaping.clip is not None or {shaping.normalise.mean, shaping.normalise.std} != {"none"}:
            yield Violation(
                ("algorithm", "reward_shaping"), f"{why}, so normalise and clip have no effect; remove them"
            )


def _loss_means_something(config: PolicyGradientConfig) -> Iterator[Violation]:
    algorithm = config.algorithm
    single = algorithm.updates_per_step == 1 and algorithm.old_logprobs != "behaviour"
    if algorithm.loss.type == "topr" and single:
        yield Violation(
            ("algorithm", "old_logprobs"),
            "topr tapers by the ratio to the policy that sampled, but with one update the old policy is the current "
            "one and every ratio is 1; set old_logprobs: behaviour",
        )


#: What to check between the `algorithm` section and the others.
ALGORITHM_RULES = (
    _kl_has_its_reference,
    groups_can_be_compared,
    _adapters_can_be_switched_off,
    _estimator_has_its_critic,
    _shaping_has_an_effect,
    _loss_means_something,
)
