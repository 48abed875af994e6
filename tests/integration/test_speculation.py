"""vLLM guesses tokens and checks several at once: what is sampled, and what is told of it, is as without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_thread import EngineThread, float_spec
from tiny_model import make_tiny_model

from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.models.modules import load_causal_lm

pytestmark = pytest.mark.integration

#: What follows the last tokens is the same everywhere, so that there is always something to guess.
PROMPT = np.tile(np.arange(20, 30, dtype=np.int32), 5)
#: A random model is nearly indifferent: only where its logits are divided by little are guesses accepted.
TEMPERATURES = (0.0, 0.02, 0.05, 0.7, 1.3)


def requests(count: int, tokens: int = 48) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_ids=PROMPT,
            sampling=Sampling(temperature=TEMPERATURES[index % len(TEMPERATURES)], max_tokens=tokens),
            seed=index if index % 2 else None,
            top_logprobs=2 if index % 3 else 0,
        )
        for index in range(count)
    ]


@torch.no_grad()
def expected(model: torch.nn.Module, asked: GenerateRequest, generation: Generation) -> torch.Tensor:
    """Return log-probabilities of the whole vocabulary in the place of each token, shape [R, V]."""
    tokens = torch.from_numpy(np.concatenate([asked.prompt_ids, generation.token_ids]).astype(np.int64))
    logits_RV = model(tokens[None]).logits[0, len(asked.prompt_ids) - 1 : -1].double()
    return torch.log_softmax(logits_RV / (asked.sampling.temperature or 1.0), -1)


def repeats(asked: GenerateRequest, generation: Generation) -> list[int | None]:
    """Return the token that followed the one before, where that was there earlier: what is guessed, roughly."""
    tokens = [*asked.prompt_ids.tolist(), *generation.token_ids.tolist()]
    found: list[int | None] = []
    for at in range(len(asked.prompt_ids), len(tokens)):
        earlier = [place for place in range(at - 1) if tokens[place] == tokens[at - 1]]
        found.append(tokens[earlier[-1] + 1] if earlier else None)
    return found


def check(path: Path, asked: Sequence[GenerateRequest], results: dict[str, Generation]) -> None:
    """Compare with a forward pass; over all random tokens, sums have the mean that the distribution gives them."""
    model = load_causal_lm(path, "float32")
    surprise = guessed = spread = guesses = 0.0
    for one in asked:
        generation = results[one.request_id]
        logprobs_RV = expected(model, one, generation)
        ids_R = torch.from_numpy(generation.token_ids.astype(np.int64))
        own_R = logprobs_RV.gather(1, ids_R[:, None])[:, 0]
        np.testing.assert_allclose(
            generation.logprobs, own_R.numpy(), atol=2e-4 if one.sampling.temperature > 0.1 else 5e-3
        )
        if one.top_logprobs:
            assert generation.top is not None
            best = logprobs_RV.topk(2).values.numpy()
            np.testing.assert_allclose(generation.top.logprobs, best, atol=5e-3)
        if one.sampling.temperature == 0:
            assert torch.equal(ids_R, logprobs_RV.argmax(-1))
            continue
        p_RV = logprobs_RV.exp()
        mean_R = (p_RV * logprobs_RV).sum(-1)
        surprise += float((own_R - mean_R).sum())
        spread += float((p_RV * (logprobs_RV - mean_R[:, None]) ** 2).sum())
        for place, guess in enumerate(repeats(one, generation)):
            if guess is not None:
                p = float(p_RV[place, guess])
                guessed += float(generation.token_ids[place] == guess) - p
                guesses += p * (1 - p)
    # five standard deviations: once in a million runs
    assert abs(surprise) < 5 * math.sqrt(spread)
    assert guesses > 1
    assert abs(guessed) < 5 * math.sqrt(guesses)


def test_samples_and_their_log_probabilities_are_the_policys(speculating: EngineThread, float_model: Path) -> None:
    asked = requests(60)
    results = speculating.generate(asked)
    check(float_model, asked, results)
    counted = [generation.speculation for generation in results.values()]
    assert all(each is not None and each.accepted <= each.tokens <= 4 * each.passes for each in counted)
    total = sum((each for each in counted if each is not None), start=type(counted[0])())
    assert 0 < total.accepted < total.tokens
    greedy = results["0"].speculation
    assert greedy is not None
    assert greedy.passes + greedy.accepted <= len(results["0"].token_ids)


def test_greedy_answers_are_those_without_guesses(speculating: EngineThread, vllm: EngineThread) -> None:
    asked = [each for each in requests(10) if each.sampling.temperature == 0]
    with_guesses, without = speculating.generate(asked), vllm.generate(asked)
    for name, generation in without.items():
        np.testing.assert_array_equal(with_guesses[name].token_ids, generation.token_ids)
        np.testing.assert_allclose(with_guesses[name].logprobs, generation.logprobs, atol=1e-4)
        assert generation.speculation is None


def test_given_tokens_are_scored(speculating: EngineThread, vllm: EngineThread) -> None:
    one, other = (engine.run(engine.engine.prompt_logprobs(PROMPT)) for engine in (speculating, vllm))
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft", "suffix"])
def test_a_draft_model_and_earlier_answers_guess(float_model: Path, tmp_path: Path, method: str) -> None:
    speculation = {"method": method}
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    else:  # the first layer of the policy: most of what it would say
        speculation["model"] = str(make_tiny_model(tmp_path / "draft", dtype="float32", layers=1))
    config = VLLMConfig(kv_cache_gib=0.1, max_running=16, speculative=speculation)
    with EngineThread(VLLMEngine(config, float_spec(float_model))) as engine:
        asked = requests(30)
        results = engine.generate(asked)
        check(float_model, asked, results)
        counted = results["0"].speculation
        assert counted is not None
        assert 0 < counted.accepted <= counted.tokens


@pytest.mark.slow
def test_as_many_run_as_may_however_much_is_guessed(float_model: Path) -> None:
    """Equal greedy requests go on together; a pass without room for all of them would leave the last ones out."""
    running, guesses, most = 64, 128, 400
    speculation = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": guesses}
    config = VLLMConfig(kv_cache_gib=0.3, max_running=running, speculative=speculation)
    with EngineThread(VLLMEngine(config, float_spec(float_model))) as engine:
        greedy = Sampling(temperature=0.0, max_tokens=most, stop_ids=())
        asked = [
            GenerateRequest(request_id=str(index), prompt_ids=PROMPT, sampling=greedy, seed=None)
            for index in range(running)
        ]
        engine.run(engine.engine.sleep())  # so that all begin together
        engine.run(engine.engine.submit(asked))
        engine.run(engine.engine.resume())
        first = engine.run(engine.engine.poll(60.0))
        assert first, "nothing ended within a minute"
        engine.run(engine.engine.abort([each.request_id for each in asked]))
        ended = [*first, *engine.collect(running - len(first)).values()]
    lengths = [len(each.token_ids) for each in ended]
    assert max(lengths) == most
    assert min(lengths) >= most - (guesses + 1), "one pass behind, at most"


@pytest.fixture
def sampler() -> Iterator[None]:
    """vLLM's check of guesses as an engine on CPU has it, in this process."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    from roll_like.inference.vllm.speculative import check_guesses_as_sampled

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
        check_guesses_as_sampled()
        yield


@pytest.mark.filterwarnings("ignore")  # of what vLLM's imports warn of
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_guess_is_accepted_as_often_as_it_would_be_sampled(sampler: None, temperature: float) -> None:
    """Of each of 20,000 requests two tokens are guessed: the first two tokens have the policy's distribution."""
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints, rejection_sample

    count, generator = 20_000, torch.Generator().manual_seed(0)
    logits_3V = torch.randn(3, 6, generator=generator)
    settings = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.full((count,), temperature),
        top_k=None,
        top_p=None,
        generators={index: torch.Generator().manual_seed(index) for index in range(count)},
    )
    until = 2 * torch.arange(1, count + 1, dtype=torch.int32)
    scaled = apply_sampling_constraints(logits_3V[:2].repeat(count, 1), until, settings)
    p_3V = torch.softmax(logits_3V / temperature, -1)
    bonus = torch.multinomial(p_3V[2], count, replacement=True, generator=generator).to(torch.int32)[:, None]
    guesses = p_3V[:2].argmax(-1).to(torch.int32)
    drawn = rejection_sample(guesses.repeat(count), [2] * count, 2, until, None, scaled, bonus, settings)
    accepted = drawn[:, 0] == guesses[0]
    for place, tokens in enumerate((drawn[:, 0], drawn[accepted, 1], drawn[accepted & (drawn[:, 1] == guesses[1]), 2])):
        found = torch.bincount(tokens.long(), minlength=6)
        mean = p_3V[place] * len(tokens)
        assert float(((found - mean) ** 2 / mean).sum()) < 30  # chi-square with 5 degrees of freedom: 1e-5
    assert (drawn[~accepted, 1:] == -1).all()
