"""The engine's choice of experts in training: the layers of a mixture, the rows of a batch, engines, and episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_families
import torch
from chat_templates import renderer
from config_files import changed
from engine_thread import float_spec
from model_families import make_family
from sglang_engine import stand_in
from torch import Tensor, nn

from roll_like.agents.conversation import Conversation
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.model import check_routes
from roll_like.data.routes import continued, joined_routes, known_routes, route_dtype, unknown
from roll_like.errors import ConfigError, EngineError, GenerationError
from roll_like.inference.interface import EngineSpec, GenerateRequest, Generation, InferenceEngine, Sampling
from roll_like.inference.routes import told_routes
from roll_like.inference.vllm.arguments import engine_arguments, known_arguments
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.plugin import VLLMPlugin
from roll_like.models.modules import load_causal_lm
from roll_like.models.renames import recompute_activations
from roll_like.models.router import UNKNOWN, RouterReplay
from roll_like.models.shape import Experts
from roll_like.registry import INFERENCE_ENGINES
from roll_like.training.backbone import use_row_attention
from roll_like.training.layout import micro_batches, per_sample
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.types import RouteArray, StopReason, TrainingSample

KEY = "algorithm.router_replay"
EXPERTS, LAYERS, ACTIVE = 4, 2, 2
SIZES = Experts(layers=LAYERS, choice=EXPERTS, active=ACTIVE)
#: Families that score, weigh and scale their experts differently; the first layer of the last one has none.
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss", "deepseek_v3")


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens[None], use_cache=False).logits[0]
    return found


def random_routes(tokens: int, seed: int) -> RouteArray:
    random = np.random.default_rng(seed)
    chosen = [random.permutation(EXPERTS)[:ACTIVE] for _ in range(tokens * LAYERS)]
    return np.array(chosen, np.uint8).reshape(tokens, LAYERS, ACTIVE)


TOKENS = torch.arange(3, 23)


# ---- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_given_experts_are_used_and_own_ones_change_nothing(name: str) -> None:
    model = make_family(name).requires_grad_(False)
    plain = logits_of(model, TOKENS)
    router = RouterReplay(model, KEY)
    with router.record() as found:
        torch.testing.assert_close(logits_of(model, TOKENS), plain, atol=0, rtol=0)
    dense = 1 if name == "deepseek_v3" else 0
    assert sorted(found) == list(range(dense, LAYERS))
    own = torch.full((len(TOKENS), LAYERS, ACTIVE), UNKNOWN)
    for layer, experts in found.items():
        own[:, layer] = experts
    router.give(own)
    torch.testing.assert_close(logits_of(model, TOKENS), plain, atol=1e-6, rtol=1e-6)
    assert router.disagreement() == (0.0, len(TOKENS) * (LAYERS - dense) * ACTIVE)

    given = torch.from_numpy(random_routes(len(TOKENS), 0).astype(np.int64))
    router.give(given)
    with router.record() as used:
        changed = logits_of(model, TOKENS)
    assert float((changed - plain).abs().max()) > 0.01
    for layer, experts in used.items():
        assert torch.equal(experts, given[:, layer])
    # what is unknown is chosen by the layers: here in all but the first, whose inputs are as before
    given[:, dense + 1 :] = UNKNOWN
    router.give(given)
    logits_of(model, TOKENS)
    agreed = (given[:, dense, :, None] == found[dense][:, None, :]).any(-1)
    assert router.disagreement() == pytest.approx((1 - float(agreed.float().mean()), agreed.numel()))
    router.give(torch.full_like(given, UNKNOWN))
    torch.testing.assert_close(logits_of(model, TOKENS), plain, atol=0, rtol=0)
    router.give(None)
    torch.testing.assert_close(logits_of(model, TOKENS), plain, atol=0, rtol=0)


def by_hand(block: Any, hidden_TD: Tensor, chosen_TK: Tensor) -> Tensor:
    """What a layer of Qwen3-MoE computes with given experts, an expert and a token at a time."""
    probabilities_TE = torch.softmax(hidden_TD @ block.gate.weight.T, -1)
    rows = []
    for hidden_D, probabilities_E, chosen_K in zip(hidden_TD, probabilities_TE, chosen_TK, strict=True):
        weights_K = probabilities_E[chosen_K] / probabilities_E[chosen_K].sum()
        outputs = []
        for expert, weight in zip(chosen_K, weights_K, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ hidden_D).chunk(2)
            outputs.append(weight * (block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up)))
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


def test_outputs_and_gradients_are_those_computed_by_hand() -> None:
    """Also of the router: its gradient goes through the probabilities of the given experts."""
    model = make_family("qwen3_moe", norm_topk_prob=True)
    router, block = RouterReplay(model, KEY), model.model.layers[1].mlp
    generator = torch.Generator().manual_seed(0)
    hidden, weights = (torch.randn(6, 32, generator=generator) for _ in range(2))
    given = torch.from_numpy(random_routes(6, 1).astype(np.int64))
    router.give(given)
    output = block(hidden[None])[0]
    expected = by_hand(block, hidden, given[:, 1])
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    parameters = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    mine = torch.autograd.grad((output * weights).sum(), parameters)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters)
    for one, other in zip(mine, theirs, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_model_without_experts_or_with_another_way_to_choose_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"{KEY}: LlamaForCausalLM has no layers with experts"):
        RouterReplay(make_family("llama"), KEY)
    model = make_family("qwen3_moe")
    router = RouterReplay(model, KEY)
    gate = model.model.layers[0].mlp.gate
    gate.forward = lambda hidden: (None, torch.ones(hidden.shape[-2], 2), torch.zeros(hidden.shape[-2], 2).long())
    router.give(torch.full((len(TOKENS), LAYERS, ACTIVE), UNKNOWN))
    with pytest.raises(EngineError, match=r"chose among its 4 experts with 0 calls of torch\.topk"):
        logits_of(model, TOKENS)


# ---- rows ------------------------------------------------------------------------------------------


def samples() -> list[TrainingSample]:
    """Two prompts with three responses each; what a group shares has the same routes."""
    random = np.random.default_rng(0)
    made = []
    for group, length in enumerate((9, 5)):
        prompt, routes = random.integers(3, 64, length), random_routes(length, group)
        for number, response in enumerate((7, 1, 4)):
            tokens = np.concatenate([[7], prompt[1:], random.integers(3, 64, response)]).astype(np.int32)
            own = np.concatenate([random_routes(1, 99), routes[1:], random_routes(response, 10 * group + number + 5)])
            own[-1] = unknown(own)
            if number == 2:
                own[length + 1] = unknown(own)
            made.append(
                TrainingSample(
                    group_id=str(group),
                    token_ids=tokens,
                    prompt_length=length,
                    loss_mask=np.arange(len(tokens)) >= length,
                    routes=own,
                )
            )
    return made


def alone(model: Any, router: RouterReplay, sample: TrainingSample) -> Tensor:
    """Log-probabilities of a sample's sampled tokens, in a sequence of its own."""
    assert sample.routes is not None
    routes = sample.routes.astype(np.int64)
    routes[sample.routes == unknown(sample.routes)] = UNKNOWN
    router.give(torch.from_numpy(routes[:-1]))
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    logprobs = torch.log_softmax(logits_of(model, tokens[:-1]).float(), -1)
    return logprobs.gather(1, tokens[1:, None])[:, 0][sample.loss_mask[1:]]


LAYOUTS = {
    "dense": {"share_prompts": False},
    "dense, shared prompts": {"share_prompts": True},
    "dense, packed": {"share_prompts": True, "packing": True},
    "varlen, shared prompts": {"share_prompts": True, "joined": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_of_a_row_has_its_own_routes(layout: str) -> None:
    """Log-probabilities and gradients are those of separate sequences, also where activations are computed again."""
    given, model, reference = samples(), make_family("qwen3_moe"), make_family("qwen3_moe")
    watched = RouterReplay(reference, KEY)
    expected = [alone(reference, watched, sample) for sample in given]
    sum((each.square().sum() for each in expected), torch.zeros(())).backward()

    attention = "varlen" if "varlen" in layout else "dense"
    use_row_attention(model, attention, row_sharing="training.share_prompts")  # type: ignore[arg-type]
    recompute_activations(model)
    model.train()
    policy = PolicyModule(model, chunk_tokens=64, chunk_vocab=64)
    policy.router = RouterReplay(model, KEY)
    (batches,) = micro_batches(given, ranks=1, max_tokens=40, **LAYOUTS[layout])  # type: ignore[arg-type]
    found = []
    for batch in batches:
        logprobs, _ = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        logprobs.square().sum().backward()
        found.append(logprobs.detach().numpy())
    for sample, mine, theirs in zip(given, per_sample(given, [batches], [found]), expected, strict=True):
        np.testing.assert_allclose(mine[sample.loss_mask], theirs.detach().numpy(), atol=2e-5)
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        largest = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4 * largest + 1e-6, rtol=0, msg=name)

    # without routes the model chooses: these samples would be computed differently
    unrouted = [replace(sample, routes=None) for sample in given]
    (batches,) = micro_batches(unrouted, ranks=1, max_tokens=400, **LAYOUTS[layout])  # type: ignore[arg-type]
    with torch.no_grad():
        chosen = [policy(*tensors_of(batch, torch.device("cpu")), 1.0)[0].numpy() for batch in batches]
    moved = [
        np.abs(mine[sample.loss_mask] - theirs.detach().numpy()).max()
        for sample, mine, theirs in zip(given, per_sample(given, [batches], [chosen]), expected, strict=True)
    ]
    assert max(moved) > 0.01


# ---- arrays ----------------------------------------------------------------------------------------


def test_routes_of_growing_and_of_joined_sequences() -> None:
    first = known_routes(np.array([[[0, 1]], [[2, 3]]]), 4, 3)
    assert first.dtype == np.uint8
    assert first.tolist() == [[[0, 1]], [[2, 3]], [[255, 255]]]
    later = known_routes(np.array([[[3, 3]], [[3, 3]], [[1, 2]], [[0, 2]]]), 4, 5)
    grown = continued(first, later)
    assert grown is not None
    assert grown[:, 0].tolist() == [[0, 1], [2, 3], [1, 2], [0, 2], [255, 255]]
    assert continued(None, later) is later
    joined = joined_routes([(None, 1), (first, 3)])
    assert joined is not None
    assert joined[:, 0].tolist() == [[255, 255], [0, 1], [2, 3], [255, 255]]
    assert joined_routes([(None, 2)]) is None
    assert route_dtype(256) == np.uint16
    with pytest.raises(ValueError, match="expected at most 3 tokens and experts below 4"):
        known_routes(np.array([[[4, 1]]]), 4, 3)


def test_a_conversation_keeps_the_routes_that_its_tokens_were_sampled_with() -> None:
    """A later turn's engine computes what came before again; a rewritten history begins anew."""
    conversation = Conversation(renderer("chatml"))
    prompt = conversation.start([{"role": "user", "content": "Which way?"}])

    def turn(number: int) -> RouteArray:
        seen = len(conversation.tokens)
        routes = known_routes(np.full((seen + 2, LAYERS, ACTIVE), number), EXPERTS, seen + 3)
        conversation.sampled([40, 41, 42], [-1.0] * 3, routes=routes)
        return routes

    first = turn(1)
    seen = len(conversation.observe([{"role": "user", "content": "You hit a wall."}]))
    second = turn(2)
    (segment,) = conversation.copy().segments()
    assert segment.routes is not None
    assert len(segment.routes) == len(segment.token_ids) == seen + 3
    known = len(prompt) + 2
    np.testing.assert_array_equal(segment.routes[:known], first[:known])
    np.testing.assert_array_equal(segment.routes[known:], second[known:])


# ---- configuration ---------------------------------------------------------------------------------


def test_the_check_refuses_models_and_engines_without_routes(moe: Path, tiny_model: Path) -> None:
    def found(model: Path, kind: str) -> list[str]:
        values = changed(model={"path": str(model)}, inference={"type": kind}, algorithm={"router_replay": True})
        config = RLVRConfig.from_values(values)
        return [str(finding) for finding in check_routes(config, config.model)]

    assert found(moe, "hf") == []
    (refused,) = found(moe, "vllm")
    assert refused.startswith(
        "error: algorithm.router_replay: inference.type: vllm cannot tell which experts a token was computed with: "
        "vLLM tells them with its second model runner, which has no CPU version"
    )
    (refused,) = found(tiny_model, "hf")
    assert refused.startswith(f"error: algorithm.router_replay: the model {tiny_model} is no mixture of experts")
    assert VLLMPlugin.routes_obstacle(VLLMConfig(), device="cuda") is None
    ngram, suffix = (VLLMConfig(speculative={"method": method}) for method in ("ngram", "suffix"))
    assert VLLMPlugin.routes_obstacle(ngram, device="cuda") is None
    obstacle = VLLMPlugin.routes_obstacle(suffix, device="cuda")
    assert obstacle is not None
    assert obstacle.endswith("has no inference.speculative.method: suffix")


# ---- engines ---------------------------------------------------------------------------------------


def request(name: str = "one", tokens: int = 6) -> GenerateRequest:
    prompt = np.arange(20, 40, dtype=np.int32)
    return GenerateRequest(request_id=name, prompt_ids=prompt, sampling=Sampling(max_tokens=tokens), seed=3)


def spec(path: Path, **changes: Any) -> EngineSpec:
    return replace(float_spec(path), **{"returns_routes": True, **changes})


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_families.make_family("qwen3_moe", tmp_path_factory.mktemp("moe"))


async def sample(engine: InferenceEngine) -> dict[str, Generation]:
    """A short answer, and a long one that goes on after an update."""
    finished: dict[str, Generation] = {}

    async def until(name: str) -> None:
        while name not in finished:
            results = await engine.poll(20.0)
            assert results, "nothing finished within 20 s"
            for each in results:
                assert isinstance(each, Generation), each
                finished[each.request_id] = each

    await engine.start()
    try:
        await engine.submit([request(), request("long", 100)])
        await until("one")
        await engine.start_weight_update()
        await engine.finish_weight_update(1)
        await engine.resume()
        await until("long")
    finally:
        await engine.close()
    return finished


@pytest.mark.parametrize("kind", ["hf", "sglang"])
async def test_engines_tell_the_experts_of_prompt_and_response(kind: str, moe: Path) -> None:
    """Those that one forward pass over both chooses; also after an update, which computes again what came before."""
    with stand_in():
        engine: type[InferenceEngine] = INFERENCE_ENGINES.get(kind).engine()
        finished = await sample(engine(INFERENCE_ENGINES.get(kind).Config(max_running=2), spec(moe)))
    model = load_causal_lm(moe, "float32")
    router = RouterReplay(model, KEY)
    assert len(finished["long"].segments) == 2
    for generation in finished.values():
        tokens = torch.from_numpy(np.concatenate([request().prompt_ids, generation.token_ids]).astype(np.int64))
        with torch.no_grad(), router.record() as chosen:
            logits_of(model, tokens[:-1])
        routes = generation.routes
        assert routes is not None
        assert routes.shape == (len(tokens), 2, 2)
        assert (routes[-1] == 255).all()
        for layer, experts in chosen.items():
            np.testing.assert_array_equal(np.sort(routes[:-1, layer]), np.sort(experts.numpy()))


def test_engines_must_tell_the_experts_of_all_tokens_but_the_last() -> None:
    found = random_routes(25, 0)
    routes = told_routes(found, request(), 6, StopReason.LENGTH, SIZES)
    assert routes is not None
    np.testing.assert_array_equal(routes[:25], found)
    assert (routes[25] == 255).all()
    assert told_routes(found, request(), 6, StopReason.LENGTH, None) is None
    assert told_routes(None, request(), 6, StopReason.ABORTED, SIZES) is None
    for missing in (None, found[:24]):
        with pytest.raises(GenerationError, match="for request one; 25 tokens were computed"):
            told_routes(missing, request(), 6, StopReason.STOP, SIZES)


def test_vllm_is_asked_for_them(moe: Path) -> None:
    arguments = engine_arguments(VLLMConfig(), spec(moe, device="cuda"))
    assert arguments["enable_return_routed_experts"] is True
    assert arguments["enable_prefix_caching"] is True  # which vLLM asks for
    assert "enable_return_routed_experts" in known_arguments()
    assert "enable_return_routed_experts" not in engine_arguments(VLLMConfig(), spec(moe, returns_routes=False))
