"""Tries a policy loss on random tokens, and reports what would train something else than meant.

    report = check_loss("my_loss", settings={"clip": 0.2})
    print(report)

The objective sums what a loss returns over micro-batches and ranks, with weights that it knows nothing of. A mean
within the loss, a statistic of the micro-batch, tokens that are skipped although they count: all of these train without
an error, and differ between one device and eight. Here the gradient of a batch is compared with that of its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from roll_like.algorithms.base import Algorithm
from roll_like.algorithms.lazy import torch
from roll_like.algorithms.losses.base import BatchTokens, LossInputs, PolicyLoss, TokenLosses
from roll_like.config.base import PluginConfig
from roll_like.errors import FOREIGN_ERRORS, ConfigError, RollLikeError, describe_error
from roll_like.registry import LOSSES

if TYPE_CHECKING:
    from torch import Tensor

#: Tokens of the sequences that are tried; those of 4 and more have two turns.
_LENGTHS = (1, 3, 5, 2, 7, 4)
#: The sequence whose advantage is 0.
_IDLE = 3
_SEEDS = range(4)
#: By how much gradients in float64 may differ, relative to the largest.
_EXACT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmReport:
    """What `check_loss` or `check_advantage` found.

    Attributes:
        name: The loss or the estimator.
        problems: What trains something else than meant.
        notes: What may be meant.
    """

    name: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        found = [f"problem: {each}" for each in self.problems] + [f"note: {each}" for each in self.notes]
        return "\n".join(
            [
                f"{self.name}: {len(self.problems) or 'no'} problem{'s' * (len(self.problems) != 1)}",
                *(f"  {each}" for each in found),
            ]
        )


def check_loss(
    loss: str | type[PolicyLoss] | PolicyLoss, *, settings: Mapping[str, Any] | None = None
) -> AlgorithmReport:
    """Try a loss on tokens of a few sequences: whole, in parts, in another order, with fillers, with extreme ratios.

    Args:
        loss: A registered name, a class, or an object.
        settings: Its settings, where it is no object.

    Raises:
        ConfigError: The settings are wrong.
        PluginError: There is no such loss.
    """
    made = _made(loss, settings)
    name = str(getattr(made.config, "type", type(made).__name__))
    problems: dict[str, None] = {}
    notes: dict[str, None] = {}
    old_matters = False
    try:
        for seed in _SEEDS:
            inputs = _inputs(seed)
            form = list(_form(made, inputs))
            problems |= dict.fromkeys(form)
            if form:
                continue  # what is compared below has no meaning then
            problems |= dict.fromkeys(_sums(made, inputs))
            problems |= dict.fromkeys(_declared(made, inputs))
            problems |= dict.fromkeys(_extremes(made, inputs))
            old_matters |= any(_depends(made, inputs, name) for name in ("old_logprobs_N", "behaviour_logprobs_N"))
            notes |= dict.fromkeys(_noted(made, inputs))
        if not problems and not old_matters and made.uses_old_policy(made.config):
            notes[
                "the gradient does not depend on old_logprobs_N; let uses_old_policy return False, and --check refuses "
                "old_logprobs: behaviour, which has no effect"
            ] = None
    except RollLikeError:
        raise
    except FOREIGN_ERRORS as error:
        problems[f"it raises {describe_error(error)}"] = None
    return AlgorithmReport(name=name, problems=tuple(problems), notes=tuple(notes))


def algorithm_settings(
    plugin: type[Algorithm], named: Any, settings: Mapping[str, Any] | None, what: str
) -> PluginConfig:
    """Return an algorithm's settings.

    Args:
        plugin: Its class.
        named: The name that it is registered under; anything else for what its settings have as `type`.
        settings: What differs from the defaults.
        what: The kind of algorithm, for messages.

    Raises:
        ConfigError: The settings are wrong.
    """
    kind = named if isinstance(named, str) else plugin.Config.model_fields["type"].default
    try:
        return plugin.Config.model_validate({"type": kind, **(settings or {})})
    except ConfigError as error:
        raise ConfigError(f"the settings of the {what} {kind!r} are wrong: {error.message}", fix=error.fix) from error


def _made(loss: str | type[PolicyLoss] | PolicyLoss, settings: Mapping[str, Any] | None) -> PolicyLoss:
    if isinstance(loss, PolicyLoss):
        return loss
    plugin: type[PolicyLoss] = LOSSES.get(loss) if isinstance(loss, str) else loss
    return plugin(algorithm_settings(plugin, loss, settings, "loss"))


def _inputs(seed: int) -> LossInputs:
    """Return tokens in float64, of policies that differ by up to three clip ranges in both directions."""
    draw = torch.Generator().manual_seed(seed)
    count = sum(_LENGTHS)

    def normal(scale: float, size: int = count) -> Tensor:
        return scale * torch.randn(size, generator=draw, dtype=torch.float64)

    old_N = -2.0 * torch.rand(count, generator=draw, dtype=torch.float64) - 0.1
    lengths = torch.tensor(_LENGTHS)
    sequence_N = torch.arange(len(_LENGTHS)).repeat_interleave(lengths)
    turns = [length for whole in _LENGTHS for length in ((whole // 2, whole - whole // 2) if whole >= 4 else (whole,))]
    advantages_S = normal(1.0, len(_LENGTHS))
    advantages_S[_IDLE] = 0.0
    return LossInputs(
        logprobs_N=(old_N + normal(0.3)).clamp(max=-1e-3).requires_grad_(),
        old_logprobs_N=old_N,
        behaviour_logprobs_N=old_N + normal(0.05),
        reference_logprobs_N=old_N + normal(0.2),
        # as of an estimator that tells tokens apart; and no two tokens weigh the same
        advantages_N=advantages_S[sequence_N] * (1.0 + 0.2 * torch.rand(count, generator=draw, dtype=torch.float64)),
        weights_N=(0.5 + torch.rand(count, generator=draw, dtype=torch.float64)) / count,
        sequence_N=sequence_N,
        sequences=len(_LENGTHS),
        turn_N=torch.arange(len(turns)).repeat_interleave(torch.tensor(turns)),
        turns=len(turns),
        entropy_N=torch.rand(count, generator=draw, dtype=torch.float64) + 0.1,
        draws_N=torch.rand(count, generator=draw, dtype=torch.float64),
    )


def _picked(inputs: LossInputs, sequences: Sequence[int]) -> LossInputs:
    """Return a micro-batch of some of the sequences, in the order that is given."""
    index_M = torch.cat([(inputs.sequence_N == each).nonzero().flatten() for each in sequences])
    changed: dict[str, Any] = {
        each.name: value[index_M]
        for each in fields(inputs)
        if isinstance(value := getattr(inputs, each.name), torch.Tensor)
    }
    place = {old: new for new, old in enumerate(sequences)}
    turns, changed["turn_N"] = torch.unique(changed["turn_N"], return_inverse=True)
    changed["logprobs_N"] = changed["logprobs_N"].detach().requires_grad_()
    changed["sequence_N"] = torch.tensor([place[int(each)] for each in changed["sequence_N"]])
    return replace(inputs, **changed, sequences=len(sequences), turns=len(turns))


def _bound(loss: PolicyLoss, parts: Sequence[LossInputs]) -> PolicyLoss:
    """Return the loss of an optimizer step whose micro-batches are these."""
    if not loss.needs_batch:
        return loss
    counted = [(part, part.weights_N != 0) for part in parts]
    arrays = {
        each.name: torch.cat([getattr(part, each.name).detach()[of_N] for part, of_N in counted])
        for each in fields(BatchTokens)
    }
    return loss.of_batch(BatchTokens(**arrays))


def _gradients(loss: PolicyLoss, parts: Sequence[LossInputs]) -> list[Tensor]:
    """Return the gradient in the log-probabilities of each micro-batch of one optimizer step."""
    bound = _bound(loss, parts)
    found = []
    for part in parts:
        total = (part.weights_N * bound(part).losses_N).sum()
        if not total.requires_grad:
            found.append(torch.zeros_like(part.logprobs_N))
            continue
        (gradient_N,) = torch.autograd.grad(total, part.logprobs_N, allow_unused=True)
        found.append(torch.zeros_like(part.logprobs_N) if gradient_N is None else gradient_N)
    return found


def _differ(one_N: Tensor, other_N: Tensor, tolerance: float = _EXACT) -> bool:
    scale = max(float(one_N.abs().max()), float(other_N.abs().max()), 1e-12)
    return bool((one_N - other_N).abs().max() > tolerance * scale)


def _form(loss: PolicyLoss, inputs: LossInputs) -> Iterator[str]:
    """Yield what is wrong with what it returns."""
    before = {each.name: getattr(inputs, each.name) for each in fields(inputs)}
    kept = {name: value.detach().clone() for name, value in before.items() if isinstance(value, torch.Tensor)}
    bound = _bound(loss, [inputs])
    result = bound(inputs)
    if not isinstance(result, TokenLosses):
        yield f"it returned {type(result).__name__}; TokenLosses(losses_N, metrics) was expected"
        return
    count = len(inputs.logprobs_N)
    if not isinstance(result.losses_N, torch.Tensor) or result.losses_N.shape != (count,):
        shape = tuple(getattr(result.losses_N, "shape", ()))
        yield f"losses_N has shape {shape} for {count} tokens; return one loss a token, and sum nothing: weights_N does"
        return
    changed = [name for name, value in kept.items() if not torch.equal(getattr(inputs, name).detach(), value)]
    if changed:
        yield f"it changes its inputs in place ({', '.join(changed)}); compute new tensors"
    if not torch.equal(bound(inputs).losses_N.detach(), result.losses_N.detach()):
        yield "two calls with the same inputs differ; take random numbers from inputs.draws_N"
    doubled = replace(inputs, weights_N=2 * inputs.weights_N)
    if not torch.equal(_bound(loss, [doubled])(doubled).losses_N.detach(), result.losses_N.detach()):
        yield "its losses depend on weights_N, which the objective multiplies them by; leave the weights out"
    for name, values in result.metrics.items():
        shape = tuple(getattr(values, "shape", ()))
        if shape != (count,):
            yield f"the metric {name!r} has shape {shape} for {count} tokens; one value a token was expected"
        elif not torch.as_tensor(values).detach().double().isfinite().all():
            yield f"the metric {name!r} is not finite"
    (gradient_N,) = _gradients(loss, [inputs])
    if not gradient_N.any():
        yield "its gradient in logprobs_N is 0 everywhere, so it trains nothing; remove a detach() or no_grad()"


def _sums(loss: PolicyLoss, inputs: LossInputs) -> Iterator[str]:
    """Yield ways to lay a batch out that change its gradient."""
    everything = range(inputs.sequences)
    (whole_N,) = _gradients(loss, [_picked(inputs, everything)])
    parts = _gradients(loss, [_picked(inputs, (0, 1, 2)), _picked(inputs, (3, 4, 5))])
    if _differ(torch.cat(parts), whole_N):
        yield (
            "the gradient depends on how the batch is cut into micro-batches; reduce over sequence_N or turn_N only "
            "(each is whole in a micro-batch), or take statistics of the batch in of_batch (needs_batch = True)"
        )
    order = (4, 2, 0, 5, 1, 3)
    (turned_N,) = _gradients(loss, [_picked(inputs, order)])
    place_N = torch.cat([(inputs.sequence_N == each).nonzero().flatten() for each in order])
    if _differ(turned_N, whole_N[place_N]):
        yield "the gradient depends on the order of the sequences"
    filled = _picked(inputs, everything)
    filler_N = filled.sequence_N == inputs.sequences - 1
    extreme_N = torch.where(filler_N, -30.0, filled.logprobs_N.detach()).requires_grad_()
    filled = replace(
        filled,
        logprobs_N=extreme_N,
        weights_N=filled.weights_N.masked_fill(filler_N, 0.0),
        advantages_N=filled.advantages_N.masked_fill(filler_N, 9.0),
    )
    (with_N,) = _gradients(loss, [filled])
    (without_N,) = _gradients(loss, [_picked(inputs, range(inputs.sequences - 1))])
    if with_N[filler_N].any() or _differ(with_N[~filler_N], without_N):
        yield "tokens of weight 0 (fillers of a micro-batch) change the gradient of the others"


def _declared(loss: PolicyLoss, inputs: LossInputs) -> Iterator[str]:
    """Yield what its class says of itself and is not so."""
    moving = [each for each in range(inputs.sequences) if each != _IDLE]
    (whole_N,) = _gradients(loss, [_picked(inputs, range(inputs.sequences))])
    (moving_N,) = _gradients(loss, [_picked(inputs, moving)])
    idle_N = inputs.sequence_N == _IDLE
    if not loss.zero_advantage_moves and (whole_N[idle_N].any() or _differ(whole_N[~idle_N], moving_N)):
        yield "tokens of advantage 0 change the gradient, and runs leave them out; set zero_advantage_moves = True"
    if not loss.uses_old_policy(loss.config) and _depends(loss, inputs, "old_logprobs_N"):
        yield "the gradient depends on old_logprobs_N, and uses_old_policy says that it does not; return True"
    on_policy_N = inputs.logprobs_N.detach()
    same = replace(
        inputs, old_logprobs_N=on_policy_N, behaviour_logprobs_N=on_policy_N, reference_logprobs_N=on_policy_N
    )
    (gradient_N,) = _gradients(loss, [same])
    if float(gradient_N[inputs.advantages_N > 0].sum()) > 0:
        yield "where old and new policy are equal, it makes tokens with positive advantages less likely; turn its sign"


def _depends(loss: PolicyLoss, inputs: LossInputs, name: str) -> bool:
    """Whether the gradient changes with an input."""
    (one_N,) = _gradients(loss, [inputs])
    moved: dict[str, Any] = {name: getattr(inputs, name) - 0.05}
    (other_N,) = _gradients(loss, [replace(inputs, **moved)])
    return _differ(one_N, other_N)


def _extremes(loss: PolicyLoss, inputs: LossInputs) -> Iterator[str]:
    """Yield policies so far apart, in float32 as in a run, that the loss is not finite."""
    for label, shift in (("e^200", 200.0), ("e^−200", -200.0)):
        far: dict[str, Any] = {
            each.name: value.detach().float() if value.is_floating_point() else value
            for each in fields(inputs)
            if isinstance(value := getattr(inputs, each.name), torch.Tensor)
        }
        far["old_logprobs_N"] = far["old_logprobs_N"] - max(shift, 0.0)
        far["logprobs_N"] = (far["logprobs_N"] - max(-shift, 0.0)).requires_grad_()
        apart = replace(inputs, **far)
        told = _bound(loss, [apart])(apart)
        (gradient_N,) = _gradients(loss, [apart])
        values = {"the loss": told.losses_N, "its gradient": gradient_N}
        values |= {f"the metric {name!r}": torch.as_tensor(each) for name, each in told.metrics.items()}
        wrong = [name for name, each in values.items() if not each.detach().double().isfinite().all()]
        if wrong:
            yield (
                f"where a token is {label} times as likely as before, there are infinities or NaN in "
                f"{' and '.join(wrong)}; bound the logarithm of the ratio (clamp it to ±20)"
            )


def _noted(loss: PolicyLoss, inputs: LossInputs) -> Iterator[str]:
    """Yield what is meant in some losses."""
    (gradient_N,) = _gradients(loss, [inputs])
    exact = _bound(loss, [inputs])(inputs).losses_N.dtype == torch.float64
    step, tolerance = (1e-6, 1e-4) if exact else (1e-2, 0.1)  # those that compute in float32 are measured coarsely
    if _differ(gradient_N, _measured(loss, inputs, step), tolerance):
        yield "the gradient is not the derivative of the loss: part of it is detached"
    if gradient_N[inputs.advantages_N < 0].sum() < 0:
        yield "tokens with negative advantages become more likely too"
    if _depends(loss, inputs, "behaviour_logprobs_N"):
        yield "the gradient depends on behaviour_logprobs_N, which the off-policy correction weighs tokens by already"
    alone = replace(inputs, reference_logprobs_N=None)
    try:
        _gradients(loss, [alone])
    except FOREIGN_ERRORS as error:
        yield f"it needs a reference model, and without one raises {describe_error(error)}"


def _measured(loss: PolicyLoss, inputs: LossInputs, step: float) -> Tensor:
    """Return the derivative of the objective in each log-probability, by central differences."""
    bound = _bound(loss, [inputs])
    own_N = inputs.logprobs_N.detach()

    def objective(logprobs_N: Tensor) -> float:
        tried = replace(inputs, logprobs_N=logprobs_N.requires_grad_())
        return (inputs.weights_N * bound(tried).losses_N).sum().item()

    slopes = []
    for token in range(len(own_N)):
        moved = torch.zeros_like(own_N)
        moved[token] = step
        slopes.append((objective(own_N + moved) - objective(own_N - moved)) / (2 * step))
    return torch.tensor(slopes, dtype=own_N.dtype)
