"""Models whose rotary frequencies depend on a pass's length compute each sequence alike, whatever is beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import make_family
from rank_specs import cpu_rank

from roll_like.config.training import TrainingConfig
from roll_like.models.renames import cache_argument, cache_of
from roll_like.models.rotary import fix_frequencies
from roll_like.training.language_model import LanguageModelObjective, prepared
from roll_like.training.layout import micro_batches
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.types import TrainingSample

ORIGINAL = 16
SHORT, LONG = [1.0, 1.0, 1.0, 1.0], [1.5, 4.0, 7.0, 10.0]
LENGTHS = (10, 40, ORIGINAL)


def phi(short: list[float], long: list[float]) -> Any:
    """A tiny model with LongRoPE."""
    factors = {"short_factor": short, "long_factor": long, "original_max_position_embeddings": ORIGINAL, "factor": 16.0}
    return make_family(
        "phi3",
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )


def samples() -> list[TrainingSample]:
    return [
        TrainingSample(
            group_id=str(length),
            token_ids=np.random.default_rng(length).integers(3, 64, length).astype(np.int32),
            prompt_length=2,
            loss_mask=np.arange(length) >= 2,
        )
        for length in LENGTHS
    ]


def in_rows(model: Any, settings: TrainingConfig, window: int, budget: int) -> list[torch.Tensor]:
    """Each sample's log-probabilities as a rank computes them, in micro-batches of `budget` tokens."""
    objective: LanguageModelObjective[Any, Any] = LanguageModelObjective(settings=settings, packing=True)
    model = prepared(model, cpu_rank(objective, Path("unused"), window=window), settings)
    policy = PolicyModule(model, chunk_tokens=64, chunk_vocab=512)
    found = [torch.zeros(length) for length in LENGTHS]
    joined = settings.attention == "varlen"
    (batches,) = micro_batches(samples(), ranks=1, max_tokens=budget, share_prompts=True, packing=True, joined=joined)
    for batch in batches:
        with torch.no_grad():
            logprobs_N, _ = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        for sample, token, value in zip(batch.sample_ids, batch.target_ids, logprobs_N, strict=True):
            found[sample][token] = value
    return found


def alone(model: Any) -> list[torch.Tensor]:
    """The same as transformers computes them, one sample at a time."""
    found = []
    for sample in samples():
        tokens = torch.from_numpy(sample.token_ids).long()
        with torch.no_grad():
            logprobs_TV = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen_T = torch.nn.functional.pad(logprobs_TV.gather(1, tokens[1:, None])[:, 0], (1, 0))
        found.append(chosen_T * torch.from_numpy(sample.loss_mask))
    return found


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("budget", [40, 200])
def test_every_sample_has_the_frequencies_of_the_window(attention: Any, budget: int) -> None:
    settings = TrainingConfig(attention=attention)
    always_long = alone(phi(LONG, LONG))
    assert float((alone(phi(SHORT, LONG))[0] - always_long[0]).abs().max()) > 0.1
    found = in_rows(phi(SHORT, LONG), settings, window=ORIGINAL + 1, budget=budget)
    for ours, theirs in zip(found, always_long, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_window_of_the_original_length_keeps_the_short_factors() -> None:
    model = phi(SHORT, LONG)
    fix_frequencies(model, ORIGINAL)
    within = [index for index, length in enumerate(LENGTHS) if length <= ORIGINAL]
    ours, theirs = alone(model), alone(phi(SHORT, SHORT))
    for index in within:
        torch.testing.assert_close(ours[index], theirs[index], atol=1e-6, rtol=0)


def test_a_token_that_is_decoded_alone_has_the_frequencies_of_the_window() -> None:
    """Where transformers would take the short factors for early tokens, and keep keys that were made with them."""
    model, tokens = phi(SHORT, LONG), torch.arange(3, 23)[None]
    fix_frequencies(model, ORIGINAL + 8)
    with torch.no_grad():
        expected = phi(LONG, LONG)(input_ids=tokens, use_cache=False).logits[0]
        cache, steps = None, []
        for at in range(tokens.shape[1]):
            output = model(input_ids=tokens[:, at : at + 1], **cache_argument(model, cache), use_cache=True)
            cache = cache_of(output)
            steps.append(output.logits[0, 0])
    torch.testing.assert_close(torch.stack(steps), expected, atol=1e-4, rtol=0)


def test_other_models_are_left_as_they_are() -> None:
    model = make_family("llama")
    fix_frequencies(model, 8)
    assert not any(module._forward_hooks for module in model.modules())
