"""What a check of a loss finds: nothing in those that are built in, and every planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from roll_like import LOSSES, LossInputs, PluginConfig, PolicyLoss, TokenLosses
from roll_like.algorithms.loss_check import check_loss
from roll_like.algorithms.losses.base import BatchTokens, policy_ratio
from roll_like.cli import main
from roll_like.errors import ConfigError, PluginError


def surrogate(inputs: LossInputs) -> torch.Tensor:
    return -policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N) * inputs.advantages_N


class Planted(PolicyLoss):
    """A loss that is what a function says."""

    class Config(PluginConfig):
        type: Literal["planted"] = "planted"
        scale: float = 1.0

    of: Callable[[LossInputs], Any] = staticmethod(surrogate)

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        found = type(self).of(inputs)
        return found if isinstance(found, TokenLosses) else TokenLosses(self.config.scale * found, {})


def planted(of: Callable[[LossInputs], Any], **flags: Any) -> type[Planted]:
    return type("OfTest", (Planted,), {"of": staticmethod(of), **flags})


@pytest.mark.parametrize("name", LOSSES.names())
def test_built_in_losses_have_no_problem(name: str) -> None:
    report = check_loss(name)
    assert report.problems == (), str(report)
    assert not any("uses_old_policy" in note for note in report.notes)
    detached = {"cispo", "dppo_kl", "dppo_tv", "gspo", "topr", "vespo"}
    assert any("part of it is detached" in note for note in report.notes) == (name in detached)


def test_a_right_loss() -> None:
    report = check_loss(Planted, settings={"scale": 2.0})
    assert (report.name, report.problems, report.notes) == ("planted", (), ())
    assert str(report) == "planted: no problems"
    assert check_loss(Planted(Planted.Config())).problems == ()


def in_place(inputs: LossInputs) -> torch.Tensor:
    inputs.advantages_N.mul_(2.0)
    return surrogate(inputs)


def standardised(inputs: LossInputs) -> torch.Tensor:
    advantages_N = (inputs.advantages_N - inputs.advantages_N.mean()) / inputs.advantages_N.std()
    return -policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N) * advantages_N


def first_counts_twice(inputs: LossInputs) -> torch.Tensor:
    return surrogate(inputs) * torch.where(inputs.sequence_N == 0, 2.0, 1.0)


FAULTS: dict[str, tuple[Callable[[LossInputs], Any], str]] = {
    "a number": (lambda inputs: surrogate(inputs).mean(), "return one loss a token, and sum nothing"),
    "a tuple": (lambda inputs: TokenLosses(torch.stack([surrogate(inputs)] * 2, -1), {}), "has shape (22, 2) for 22"),
    "a metric of the batch": (
        lambda inputs: TokenLosses(surrogate(inputs), {"train/own": inputs.advantages_N.mean()}),
        "the metric 'train/own' has shape () for 22 tokens",
    ),
    "a metric that is infinite": (
        lambda inputs: TokenLosses(surrogate(inputs), {"train/own": inputs.advantages_N / 0.0}),
        "the metric 'train/own' is not finite",
    ),
    "divided by the tokens": (lambda inputs: surrogate(inputs) / len(inputs.logprobs_N), "is cut into micro-batches"),
    "a statistic of the micro-batch": (standardised, "is cut into micro-batches"),
    "places": (first_counts_twice, "depends on the order of the sequences"),
    "in place": (in_place, "changes its inputs in place (advantages_N)"),
    "detached": (lambda inputs: surrogate(inputs).detach(), "its gradient in logprobs_N is 0 everywhere"),
    "another sign": (lambda inputs: -surrogate(inputs), "makes tokens with positive advantages less likely"),
    "random": (lambda inputs: surrogate(inputs) * torch.rand(len(inputs.logprobs_N)), "take random numbers from"),
    "no bound": (
        lambda inputs: -(inputs.logprobs_N - inputs.old_logprobs_N).exp() * inputs.advantages_N,
        "times as likely as before, there are infinities or NaN in the loss and its gradient",
    ),
    "zero advantages": (
        lambda inputs: surrogate(inputs) - 0.1 * inputs.logprobs_N,
        "set zero_advantage_moves = True",
    ),
    "weights twice": (lambda inputs: surrogate(inputs) * inputs.weights_N, "its losses depend on weights_N"),
    "a metric without a bound": (
        lambda inputs: TokenLosses(
            surrogate(inputs), {"train/own": (inputs.logprobs_N.detach() - inputs.old_logprobs_N).exp()}
        ),
        "there are infinities or NaN in the metric 'train/own'",
    ),
    "means of advantages that differ": (
        lambda inputs: surrogate(inputs) * torch.linspace(1, 2, len(inputs.logprobs_N)),
        "is cut into micro-batches",
    ),
    "an error": (lambda inputs: surrogate(inputs)[99], "it raises IndexError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    of, message = FAULTS[fault]
    assert any(message in problem for problem in check_loss(planted(of)).problems), str(check_loss(planted(of)))


def test_fillers_that_count() -> None:
    """A mean over the sequences of a micro-batch counts those of weight 0."""

    def of(inputs: LossInputs) -> torch.Tensor:
        return surrogate(inputs) / inputs.sequences

    assert any("weight 0" in problem for problem in check_loss(planted(of)).problems)


def test_what_a_class_says_of_itself() -> None:
    moving = planted(FAULTS["zero advantages"][0], zero_advantage_moves=True)
    assert check_loss(moving).problems == ()
    blind = planted(surrogate, uses_old_policy=classmethod(lambda cls, config: False))
    assert any("uses_old_policy says that it does not" in problem for problem in check_loss(blind).problems)
    float32 = planted(lambda inputs: surrogate(inputs).float())
    assert (check_loss(float32).problems, check_loss(float32).notes) == ((), ())

    def pull(inputs: LossInputs) -> Any:
        reference: Any = inputs.reference_logprobs_N
        return surrogate(inputs) + 100 * (inputs.logprobs_N - reference) ** 2

    pulled = planted(pull, zero_advantage_moves=True)
    assert check_loss(pulled).problems == ()
    assert any("it needs a reference model, and without one raises TypeError" in n for n in check_loss(pulled).notes)
    absolute = planted(
        lambda inputs: -policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N) * inputs.advantages_N.abs()
    )
    assert "tokens with negative advantages become more likely too" in check_loss(absolute).notes
    reinforce = planted(lambda inputs: -inputs.advantages_N * inputs.logprobs_N)
    (note,) = check_loss(reinforce).notes
    assert "does not depend on old_logprobs_N" in note


def test_a_statistic_of_the_whole_batch_is_right_in_of_batch() -> None:
    class Whitened(Planted):
        needs_batch = True
        zero_advantage_moves = True
        mean = 0.0

        def of_batch(self, batch: BatchTokens) -> PolicyLoss:
            bound = Whitened(self.config)
            bound.mean = batch.advantages_N.mean().item()
            return bound

        def __call__(self, inputs: LossInputs) -> TokenLosses:
            ratio_N = policy_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
            return TokenLosses(-ratio_N * (inputs.advantages_N - self.mean), {})

    report = check_loss(Whitened)
    assert not any("micro-batches" in problem or "weight 0" in problem for problem in report.problems), str(report)


def test_wrong_settings_and_names() -> None:
    with pytest.raises(ConfigError, match="the settings of the loss 'ppo' are wrong"):
        check_loss("ppo", settings={"clip": 1})
    with pytest.raises(PluginError, match="no_such_loss"):
        check_loss("no_such_loss")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-loss", "ppo", "clip_low=0.1"]) == 0
    assert capsys.readouterr().out == "ppo: no problems\n"
    assert main(["check-advantage", "gae", "lam=0.9"]) == 0
    assert capsys.readouterr().out == "gae: no problems\n"
