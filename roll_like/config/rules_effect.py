"""Rules against settings without effect: each says why the setting would change nothing, and what to do instead.

What is refused differs from its default, so that a resolved configuration, which names every key, is still accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.config.base import Violation
from roll_like.config.run import RunConfig
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig


def schedule_reaches_its_end(config: RunConfig) -> Iterator[Violation]:
    """Yield a final learning rate that a constant schedule never goes to."""
    for section, trained in config.trained.items():
        if trained.optimizer.schedule == "constant" and trained.optimizer.min_lr_ratio:
            yield Violation(
                (section, "optimizer", "min_lr_ratio"),
                "a constant schedule keeps the peak learning rate to the end, so this has no effect; remove it, or set "
                "schedule: cosine (or linear)",
            )


def prompts_are_shared_anyway(config: RunConfig) -> Iterator[Violation]:
    """Yield `share_prompts: false` where rows are always packed with their common prompts."""
    if not config.training.share_prompts:
        yield Violation(
            ("training", "share_prompts"),
            f"pipeline: {getattr(config, 'pipeline', None)} lays out its rows itself and computes a common prompt once "
            "(gradients are the same), so false has no effect; remove it",
        )


def oversampling_replaces_something(config: SamplingRunConfig) -> Iterator[Violation]:
    """Yield room for further groups where no group is ever turned down."""
    rollout = config.rollout
    filters = [rollout.drop_zero_variance_groups]
    filters += [bool(domain.drop_zero_variance_groups) for domain in getattr(config, "domains", {}).values()]
    if rollout.max_oversampling != 1.0 and not any(filters):
        yield Violation(
            ("rollout", "max_oversampling"),
            f"{rollout.max_oversampling:g} makes room for groups that replace others, and no filter turns one down; "
            "remove it, or set drop_zero_variance_groups: true",
        )


def correction_corrects_something(config: PolicyGradientConfig) -> Iterator[Violation]:
    """Yield an importance correction whose weights are 1 by construction."""
    algorithm = config.algorithm
    correction, default = algorithm.correction, type(algorithm.correction)()
    if algorithm.old_logprobs != "behaviour" or correction.type == "none":
        return
    changed = [name for name in type(default).model_fields if getattr(correction, name) != getattr(default, name)]
    for name in changed:
        yield Violation(
            ("algorithm", "correction", name),
            "with old_logprobs: behaviour the old policy is the one that sampled, so each importance weight "
            "π_old/μ is 1 and `correction` has no effect; remove it, or set old_logprobs: recompute",
        )


def sampling_is_not_truncated(config: SamplingRunConfig) -> Iterator[Violation]:
    """Yield sampling from less than the distribution that the trainer computes."""
    for name, whole in (("top_p", 1.0), ("top_k", 0)):
        value = getattr(config.rollout, name)
        if value != whole:
            yield Violation(
                ("rollout", name),
                f"{value:g} leaves tokens out when answers are sampled, and the trainer computes probabilities over "
                "the whole vocabulary: importance ratios and KL terms would compare different distributions, and no "
                f"weight corrects for tokens that are never sampled; set it to {whole:g}. For less exploration lower "
                "rollout.temperature, which the trainer follows (evaluation.top_p may be below 1)",
            )


def evaluation_goes_through_everything(config: RunConfig) -> Iterator[Violation]:
    """Yield weights of sources that an evaluation goes through once each."""
    for section in ("evaluation", "pair_evaluation"):
        for index, source in enumerate(getattr(getattr(config, section, None), "sources", ())):
            if source.weight != 1.0:
                yield Violation(
                    (section, "sources", index, "weight"),
                    "an evaluation goes through every row once, so a weight has no effect; remove it (the weights of "
                    "data.sources have one)",
                )


def gpus_are_used(config: RunConfig) -> Iterator[Violation]:
    """Yield what a run on CPU says of GPUs."""
    resources = config.resources
    for key in ("gpu", "gpu_memory_gib", "cpus_per_device"):
        if resources.device == "cpu" and getattr(resources, key) != type(resources).model_fields[key].default:
            yield Violation(("resources", key), "resources.device is cpu, so this has no effect; remove it")


def kl_penalty_is_somewhere(config: PolicyGradientConfig) -> Iterator[Violation]:
    """Yield settings of a KL penalty that is nowhere."""
    kl = config.algorithm.kl
    if kl.use != "none":
        return
    for name in ("coefficient", "estimator"):
        if getattr(kl, name) != type(kl).model_fields[name].default:
            yield Violation(
                ("algorithm", "kl", name),
                "there is no KL penalty with use: none, so this has no effect; set algorithm.kl.use: loss or reward, "
                "or remove it",
            )


#: Settings without effect in any run.
EFFECT_RULES = (gpus_are_used, schedule_reaches_its_end, evaluation_goes_through_everything)

#: Settings without effect in a run that trains a policy on groups of its samples.
POLICY_EFFECT_RULES = (correction_corrects_something, sampling_is_not_truncated, kl_penalty_is_somewhere)
