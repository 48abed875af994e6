"""vLLM guesses tokens and checks several at once: what is sampled, and what is told of it, is as without."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_thread import EngineThread, float_spec
from guessing_models import make_eagle3_head, make_guessing_model
from test_adapter_sync import AdapterTrainer
from test_weight_sync import Float32Head, Trainer, sync_of
from tiny_model import make_tiny_model
from torch import Tensor, nn

from roll_like.config.inference import BASE, POLICY
from roll_like.inference.interface import GenerateRequest, Generation, Guesses, Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.inference.weight_transfer.int8 import quantise_rows
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.models.checkpoint_names import converted
from roll_like.models.modules import load_causal_lm

pytestmark = pytest.mark.integration

#: Of given tokens, shape [T], the logits after each, shape [T, V].
Logits = Callable[[Tensor], Tensor]

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
def expected(logits_of: Logits, asked: GenerateRequest, generation: Generation) -> torch.Tensor:
    """Return log-probabilities of the whole vocabulary in the place of each token, shape [R, V]."""
    tokens = torch.from_numpy(np.concatenate([asked.prompt_ids, generation.token_ids]).astype(np.int64))
    logits_RV = logits_of(tokens)[len(asked.prompt_ids) - 1 : -1].double()
    return torch.log_softmax(logits_RV / (asked.sampling.temperature or 1.0), -1)


def repeats(asked: GenerateRequest, generation: Generation) -> list[int | None]:
    """Return the token that followed the one before, where that was there earlier: what is guessed, roughly."""
    tokens = [*asked.prompt_ids.tolist(), *generation.token_ids.tolist()]
    found: list[int | None] = []
    for at in range(len(asked.prompt_ids), len(tokens)):
        earlier = [place for place in range(at - 1) if tokens[place] == tokens[at - 1]]
        found.append(tokens[earlier[-1] + 1] if earlier else None)
    return found


def check(
    logits_of: Logits,
    asked: Sequence[GenerateRequest],
    results: dict[str, Generation],
    error: float = 5e-5,
    rounded: float = 0.0,
) -> float:
    """Compare with a forward pass; over all random tokens, sums have the mean that the distribution gives them.

    Return the variance of how often tokens are those that were guessed: above 1, enough were guessed to compare.

    Args:
        logits_of: The forward pass.
        asked: What was asked for.
        results: The samples.
        error: By how much logits of the engine may be off.
        rounded: Share of logits that may be further off, where activations are rounded: one that is half-way between
            two steps goes up here and down there.
    """
    surprise = guessed = spread = guesses = 0.0
    off: list[np.ndarray] = []
    for one in asked:
        generation = results[one.request_id]
        logprobs_RV = expected(logits_of, one, generation)
        ids_R = torch.from_numpy(generation.token_ids.astype(np.int64))
        own_R = logprobs_RV.gather(1, ids_R[:, None])[:, 0]
        scale = one.sampling.temperature or 1.0
        off.append(scale * np.abs(generation.logprobs - own_R.numpy()))
        if one.top_logprobs:
            assert generation.top is not None
            off.append(scale * np.abs(generation.top.logprobs - logprobs_RV.topk(2).values.numpy()).flatten())
        if one.sampling.temperature == 0:
            off.append((logprobs_RV.amax(-1) - own_R).numpy())
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
    # of a log-probability: that of its logit, and that of the sum over all
    assert np.quantile(np.concatenate(off), 1 - rounded) <= 2 * error
    # five standard deviations: once in a million runs
    assert abs(surprise) < 5 * math.sqrt(spread)
    assert abs(guessed) <= 5 * math.sqrt(guesses)
    return guesses


def of_model(model: Any) -> Logits:
    """A forward pass of a model of transformers."""
    return lambda tokens: model(tokens[None]).logits[0]


def accepted(results: dict[str, Generation]) -> int:
    """Return how many guesses were accepted; some were rejected too."""
    counted = [generation.speculation for generation in results.values()]
    total = sum((each for each in counted if each is not None), start=Guesses())
    assert None not in counted
    assert total.accepted < total.tokens
    return total.accepted


def test_samples_and_their_log_probabilities_are_the_policys(speculating: EngineThread, float_model: Path) -> None:
    asked = requests(60)
    results = speculating.generate(asked)
    assert check(of_model(load_causal_lm(float_model, "float32")), asked, results) > 1
    counted = [generation.speculation for generation in results.values()]
    assert all(each is not None and each.accepted <= each.tokens <= 4 * each.passes for each in counted)
    assert accepted(results) > 0
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


def speculation(method: str, folder: Path) -> dict[str, str]:
    """Return the engine's section; of the policy a draft has the first layer, which is most of what it would say."""
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    made = {"draft": partial(make_tiny_model, dtype="float32", layers=1), "eagle3": make_eagle3_head}.get(method)
    return {"method": method} if made is None else {"method": method, "model": str(made(folder / "draft"))}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft", "suffix", "eagle3"])
def test_a_draft_model_and_earlier_answers_guess(float_model: Path, tmp_path: Path, method: str) -> None:
    config = VLLMConfig(kv_cache_gib=0.1, max_running=16, speculative=speculation(method, tmp_path))
    with EngineThread(VLLMEngine(config, float_spec(float_model))) as engine:
        asked = requests(30)
        results = engine.generate(asked)
        assert check(of_model(load_causal_lm(float_model, "float32")), asked, results) > 1
        assert accepted(results) > 0


class ByTensors(Trainer):
    """One that sends tensors as checkpoints have them: of each expert."""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from converted(self.model, super().full_weights())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "error"), [("glm4_moe", 5e-5), ("deepseek_v3", 0.03)])
def test_the_models_own_layers_guess(tmp_path: Path, family: str, error: float) -> None:
    """vLLM's latent attention on CPU is as far off without guesses."""
    policy = make_guessing_model(tmp_path / "policy", family)
    trainer = ByTensors(policy, "float32")
    config = VLLMConfig(kv_cache_gib=0.1, max_running=16, speculative={"method": "mtp"})
    with EngineThread(VLLMEngine(config, float_spec(policy))) as engine:
        sync = sync_of(trainer, engine)
        with torch.no_grad():
            for weight in (trainer.model.model.embed_tokens.weight, trainer.model.lm_head.weight):
                weight.copy_(weight.flip(0).clone())
        sync.push()
        # they read the embeddings and the output head that the engine was sent
        greedy = [replace(each, sampling=replace(each.sampling, temperature=0.0)) for each in requests(20)]
        counted = [each.speculation for each in engine.generate(greedy).values()]
        assert sum(each.accepted for each in counted if each) > 0.75 * sum(each.tokens for each in counted if each)
        follows(engine, trainer, sync, {POLICY: trainer.logits_of}, error=error)


def in_8_bits(values: Tensor) -> Tensor:
    """Return what is left of the rows of a tensor in 8 bits."""
    numbers, scale = quantise_rows(values.reshape(-1, values.shape[-1]))
    return (numbers * scale).reshape(values.shape)


class Int8Trainer(Trainer):
    """One whose weights the engine quantises, and activations, token by token; the output head stays."""

    def logits_of(self, tokens_T: Tensor) -> Tensor:
        model = copy.deepcopy(self.model)
        for layer in model.model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data = in_8_bits(layer.weight.data)
                layer.register_forward_pre_hook(lambda _, inputs: (in_8_bits(inputs[0]),))
        return of_model(model)(tokens_T)


def follows(
    engine: EngineThread, trainer: Any, sync: WeightSync, logits_of: Mapping[str, Logits], **tolerance: float
) -> list[Generation]:
    """Compare after a sync that changes nothing, after which guesses are accepted as before, and after one that does.

    Args:
        engine: It guesses.
        trainer: It has the weights.
        sync: It sends them.
        logits_of: Forward passes by the adapter that they are of; requests to all of them run together.
        tolerance: Of `check`.
    """
    everything = []
    for changed in (False, True):
        if changed:
            trainer.change(seed=1)
        sync.push()
        asked = [replace(one, adapter=name) for one, name in zip(requests(40), itertools.cycle(logits_of))]
        results = engine.generate(asked)
        of = {name: [one for one in asked if one.adapter == name] for name in logits_of}
        assert sum(check(logits, of[name], results, **tolerance) for name, logits in logits_of.items()) > 1
        assert accepted(results) > 0 or changed
        everything += results.values()
    return everything


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "eagle3"])
def test_the_policy_with_8_bit_weights_checks_guesses(float_model: Path, tmp_path: Path, method: str) -> None:
    trainer = Int8Trainer(float_model, "float32")
    config = VLLMConfig(
        kv_cache_gib=0.1, max_running=16, speculative=speculation(method, tmp_path), quantization="int8"
    )
    with EngineThread(VLLMEngine(config, float_spec(float_model))) as engine:
        follows(
            engine, trainer, sync_of(trainer, engine, int8=True), {POLICY: trainer.logits_of}, error=5e-3, rounded=0.01
        )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "eagle3", "mtp"])
def test_a_head_in_float32_checks_guesses(tiny_model: Path, tmp_path: Path, method: str) -> None:
    policy = make_guessing_model(tmp_path / "policy") if method == "mtp" else tiny_model
    trainer = Float32Head(policy, "bfloat16")
    config = VLLMConfig(kv_cache_gib=0.1, max_running=16, speculative=speculation(method, tmp_path))
    spec = replace(float_spec(policy), dtype="bfloat16", float32_head=True)
    with EngineThread(VLLMEngine(config, spec)) as engine:
        sync = sync_of(trainer, engine, by_value=True, sync="delta", full_every=5)
        # a token may go to other experts where two are nearly equal
        rounded = 0.02 if method == "mtp" else 0.0
        found = follows(engine, trainer, sync, {POLICY: trainer.logits_of}, error=0.01, rounded=rounded)
    # logits of this size would be multiples of 1 / 512 in bfloat16
    tops = [each.top.logprobs for each in found if each.request_id == "10" and each.top is not None]
    steps = np.concatenate([512 * (top[:, 0] - top[:, 1]) for top in tops])
    assert float(np.abs(steps - np.rint(steps)).mean()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "eagle3"])
def test_policy_and_base_model_check_guesses_side_by_side(float_model: Path, tmp_path: Path, method: str) -> None:
    trainer = AdapterTrainer(float_model)
    trainer.change(seed=0)
    config = VLLMConfig(kv_cache_gib=0.1, max_running=16, speculative=speculation(method, tmp_path))
    with EngineThread(VLLMEngine(config, replace(float_spec(float_model), adapter=trainer.spec))) as engine:
        of = {POLICY: of_model(trainer.merged), BASE: of_model(trainer.base)}
        follows(engine, trainer, trainer.sync(engine), of)


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

    from roll_like.inference.vllm.cpu_kernels import check_guesses_as_sampled

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
