"""Labels of single answers: whether there are both kinds, and how much each weighs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll_like.algorithms.preference.unpaired import KTOLoss
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.dpo.labelled_data import Preference, labelled_samples
from roll_like.check.findings import Finding
from roll_like.data.samples import SampleSet
from roll_like.registry import PREFERENCE_LOSSES

#: What λ_D·n_D should be of λ_U·n_U, by the authors of `kto` (arXiv:2402.01306, section 4.2).
BALANCE = (1.0, 4 / 3)


def label_findings(config: DPOConfig, loaded: Mapping[str, SampleSet[Preference]]) -> Iterator[Finding]:
    """Yield what is odd about the labels of a run that learns from single answers.

    Args:
        loaded: What could be read of `data` and `evaluation`.
    """
    loss = PREFERENCE_LOSSES.get(config.algorithm.loss.type)
    if loss.paired:
        return
    for section, found in loaded.items():
        prompts = {each.token_ids[: each.first_trained].tobytes() for each in labelled_samples(found)}
        if loss.needs_batch and len(prompts) == 1:
            yield Finding.error(
                f"{section}.sources",
                f"all answers have one prompt, and {config.algorithm.loss.type!r} compares with answers to other "
                "prompts; add rows with other prompts",
            )
    if "data" in loaded:
        yield from _both_kinds(config, loaded["data"])


def _both_kinds(config: DPOConfig, data: SampleSet[Preference]) -> Iterator[Finding]:
    labels = [[each.desirable for each in labelled_samples(source.items)] for source in data.sources]
    desirable, total = sum(map(sum, labels)), sum(map(len, labels))
    if desirable in (0, total):
        label, missing = ("true", "false") if desirable else ("false", "true")
        yield Finding.error(
            "data.sources",
            f"all {total} answers have the label {label}, and {config.algorithm.loss.type!r} learns from the "
            f"difference between desirable and undesirable answers; add rows with the label {missing}, or correct "
            "label_field" + (", or teach the answers by pipeline: sft" if desirable else ""),
        )
        return
    if config.data.type == "labels":
        yield Finding.note("data.sources", f"{desirable} answers are desirable and {total - desirable} undesirable")
    weights = [source.weight for source in data.sources]
    shares = [weight * sum(each) / len(each) for weight, each in zip(weights, labels, strict=True)]
    yield from _balance(config, float(sum(shares) / sum(weights)))


def _balance(config: DPOConfig, share: float) -> Iterator[Finding]:
    """Yield weights that make one kind count for much more than the other.

    Args:
        share: Share of desirable answers in what steps are drawn from, between 0 and 1.
    """
    loss = config.algorithm.loss
    if not isinstance(loss, KTOLoss.Config):
        return
    desirable, undesirable = loss.desirable_weight * share, loss.undesirable_weight * (1 - share)
    low, high = BALANCE
    if low * 0.99 <= desirable / undesirable <= high * 1.01:
        return
    if share < 0.5:
        key, bounds = "desirable_weight", (low * undesirable / share, high * undesirable / share)
    else:
        key, bounds = "undesirable_weight", (desirable / high / (1 - share), desirable / low / (1 - share))
    yield Finding.warning(
        f"algorithm.loss.{key}",
        f"{share:.0%} of the answers are desirable; with weights of {loss.desirable_weight:g} and "
        f"{loss.undesirable_weight:g} they count {desirable / undesirable:.2g} times as much as the undesirable ones, "
        f"and 1 to 4/3 times is recommended; set it to between {bounds[0]:.2g} and {bounds[1]:.2g}",
    )
