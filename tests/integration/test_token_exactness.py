"""What the trainer sees is what the engine saw, token for token, whatever the chat template does.

Real vLLM samples the turns of real episodes under every chat template at hand; every request is recorded on its way
into the engine, and the real trainer computes the log-probabilities of what comes out at the other end.

    .venv/bin/pytest -s tests/integration/test_token_exactness.py       # prints the table of docs/token_exactness.md
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from chat_templates import FETCHED, REAL, WRITTEN, renderer
from engine_thread import EngineThread
from fake_policy import Unqueued
from seen_sequences import Compared, Recorder, table
from talkative_environment import TALKING, LocalPool, Talking
from talkative_model import make_talkative_model
from tiny_model import make_tiny_tokenizer

import roll_like.agents.episode as episode_module
from roll_like.agents.conversation import Conversation
from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits
from roll_like.algorithms.kl import KLController
from roll_like.cluster import ResourceManager
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.inference.interface import EngineSpec, GenerateRequest, Generation, Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.policy_gradient.advantages import Advantages
from roll_like.registry import ADVANTAGES
from roll_like.rollout.collection import collect_batch
from roll_like.rollout.router import Router
from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import RankSpec
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.start import start_engine
from roll_like.types import Group, PolicySample, Scored, Segment

pytestmark = pytest.mark.integration

GROUPS, MEMBERS = 4, 2
LIMITS = EpisodeLimits(turns=5, tokens=900)
SAMPLING = Sampling(max_tokens=14)
#: Templates that stand for the others by day: a real one, another kind of tokenizer, and each way to be awkward.
BY_DAY = {
    "Qwen3",
    "chatml",
    "drops reasoning",
    "moves system messages",
    "no special token",
    "opens reasoning",
    "sentencepiece",
    "wants tool calls",
}
#: Ids below this mean something in every tokenizer; the smallest has few others.
COMMON_IDS = 420


def templates() -> dict[str, Renderer]:
    """Every template at hand, by name; one that drops reasoning does so up to a token that the model likes."""
    found = {name: renderer(name) for name in (*WRITTEN, "sentencepiece")}
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = WRITTEN["drops reasoning"].replace("</think>", "|")
    found["drops reasoning"] = Renderer(tokenizer)
    fetched = [name for name, (folder, _) in REAL.items() if (FETCHED / folder / "tokenizer.json").is_file()]
    return {**{name: renderer(name) for name in fetched}, **found}


def liked_ids(found: Mapping[str, Renderer]) -> tuple[set[int], set[int]]:
    """Ids that end a turn under some template, and those that mark the end of reasoning."""
    ends = {token_id for render in found.values() for token_id in render.end_ids}
    marks = {int(found["drops reasoning"].encode("|")[0])}
    for name in ("Qwen3", "Qwen3, thinking off"):
        if name in found:
            marks.add(int(found[name].encode("</think>")[0]))
    return ends, marks


class Speaker(Unqueued):
    """Samples the turns under one template: ids of their own, and texts by the template's own tokenizer."""

    def __init__(self, router: Router, template: str, render: Renderer) -> None:
        super().__init__()
        self._router, self._template, self._render = router, template, render

    async def generate(self, request: GenerateRequest, affinity_key: Any, urgent: bool = False) -> Generation:
        named = replace(request, request_id=f"{self._template}/{request.request_id}")
        generation = await self._router.generate(named, (self._template, affinity_key), urgent)
        text = self._render.tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=True)
        return replace(generation, text=str(text))


async def play(engine: Any, found: Mapping[str, Renderer]) -> tuple[Recorder, dict[str, list[Group[Scored]]]]:
    """Play episodes under all templates at the same time."""
    recorder = Recorder(engine)
    router = Router([recorder], max_running=1000, max_in_flight=1000, retries=0)
    plan = EpisodePlan(
        episodes_per_group=MEMBERS,
        sampling=SAMPLING,
        limits=LIMITS,
    )

    async def under(name: str) -> list[Group[Scored]]:
        # this template refuses a tool's answer where no tool was called in structure
        spec = EnvironmentSpec(name="talking", env_id=TALKING, kwargs={"tools": name != "wants tool calls"})
        manager = EnvManager(Speaker(router, name, found[name]), LocalPool(), [spec], found[name], retries=0)
        tasks = (episode_task(spec, seed) for seed in itertools.count())
        collected = await collect_batch(manager.runner(plan, 0), tasks, groups=GROUPS)
        assert not collected.failures, collected.failures
        return list(collected.groups)

    groups = await asyncio.gather(*(under(name) for name in found))
    return recorder, dict(zip(found, groups, strict=True))


def to_train_on(groups: Sequence[Group[Scored]]) -> list[PolicySample]:
    """What a run trains on."""
    algorithm = AlgorithmConfig.model_validate({"advantage": "gigpo"})
    estimator = ADVANTAGES.get("gigpo")(algorithm.advantage)
    assigner = Advantages(estimator, algorithm, KLController(algorithm.kl), None, max_response_tokens=64)
    return assigner.assign(groups).samples


class Retokenising(Conversation):
    """What must be found: sampled tokens are decoded, and their text tokenised again."""

    def sampled(
        self,
        token_ids: Any,
        logprobs: Any,
        segments: Any = (),
        *,
        message: Any = None,
        routes: Any = None,
        kept: Any = None,
    ) -> None:
        assert routes is None
        assert kept is None
        again = self.renderer.encode(self.renderer.decode(token_ids))
        kept = np.resize(np.asarray(logprobs, np.float32), len(again))
        segment = Segment(start=0, end=len(again), policy_version=segments[0].policy_version if segments else 0)
        super().sampled(again, kept, (segment,), message=message)


def with_glue(sample: PolicySample) -> PolicySample:
    """What must be found: the token behind the first turn counts as the turn's, where there is one."""
    end = int(np.flatnonzero(sample.turns == sample.turns[sample.prompt_length])[-1]) + 1
    loss_mask, turns = sample.loss_mask.copy(), sample.turns.copy()
    loss_mask[end:][:1], turns[end:][:1] = True, turns[end - 1]
    return replace(sample, loss_mask=loss_mask, turns=turns)


@dataclass(frozen=True)
class Rig:
    """Both engines, holding the same weights."""

    templates: dict[str, Renderer]
    engine: EngineThread
    trainer: TrainingEngine[Any]

    def compare(
        self, names: Collection[str], spoil: Callable[[PolicySample], PolicySample] = lambda sample: sample
    ) -> dict[str, Compared]:
        """Play under these templates, spoil what is trained on, and compare what the engine and the trainer saw."""
        recorder, groups = self.engine.run(play(self.engine.engine, {name: self.templates[name] for name in names}))
        samples = {name: [spoil(sample) for sample in to_train_on(groups[name])] for name in names}
        computed = iter(self.trainer.logprobs([one for each in samples.values() for one in each]))
        return {
            name: Compared.of(recorder.episodes(name), groups[name], each, list(itertools.islice(computed, len(each))))
            for name, each in samples.items()
        }


@pytest.fixture(scope="module")
def rig(resources: ResourceManager, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    found = templates()
    ends, marks = liked_ids(found)
    path = make_talkative_model(
        tmp_path_factory.mktemp("talkative"),
        vocabulary=max(len(render.tokenizer) for render in found.values()),
        spoken={*range(COMMON_IDS), *ends, *marks},
        favoured=ends | marks,
        ends=ends,
    )
    make_tiny_tokenizer().save_pretrained(path)
    same: dict[str, Any] = {"model_path": str(path), "dtype": "float32", "device": "cpu", "threads": 2, "seed": 0}
    spec = EngineSpec(**same, tokenizer_path=str(path), tensor_parallel_size=1, max_model_len=1024)
    trainer: RankSpec[Any] = RankSpec(
        **same,
        objective=LanguageModelObjective(settings=TrainingConfig()),
        total_updates=1,
        trust_remote_code=False,
        window=1024,
    )
    devices = DeviceRange.model_validate("0-1")
    with ExitStack() as stack:
        starting = stack.enter_context(ThreadPoolExecutor(1))
        engine = EngineThread(VLLMEngine(VLLMConfig(kv_cache_gib=0.3, max_running=256), spec))
        started = starting.submit(engine.__enter__)  # both starts are mostly imports, on a core each
        stack.callback(lambda: engine.__exit__(None, None, None))
        training = start_engine("training", trainer, resources, devices, stack=stack)
        started.result()
        gymnasium.register(TALKING, entry_point=Talking, disable_env_checker=True, order_enforce=False)
        stack.callback(lambda: gymnasium.registry.pop(TALKING))
        yield Rig(found, engine, training)


@pytest.fixture(scope="module")
def compared(rig: Rig, request: pytest.FixtureRequest) -> dict[str, Compared]:
    by_day = "not slow" in request.config.option.markexpr
    results = rig.compare([name for name in rig.templates if name in BY_DAY or not by_day])
    print("\n".join(["", *table(results)]))
    return results


def test_the_trainer_sees_what_the_engine_saw(compared: dict[str, Compared]) -> None:
    assert {name: one.wrong() for name, one in compared.items()} == {name: [] for name in compared}


def test_the_episodes_held_what_is_hard(compared: dict[str, Compared]) -> None:
    for name, one in compared.items():
        assert one.turns > 3 * one.episodes, name
        assert one.afresh > 0 < one.limited, name
        assert 0 < one.unended < one.turns, name
    keeping = {"SmolLM2", "Qwen2.5", "chatml", "trims", "no special token", "sentencepiece"} & set(compared)
    assert {name: compared[name].cuts for name in keeping} == dict.fromkeys(keeping, 0)
    cutting = {"drops reasoning", "opens reasoning", "ignores answers", "repeats answers", "moves system messages"}
    cutting |= {"Qwen3", "Qwen3, thinking off"}
    assert all(compared[name].cuts for name in cutting & set(compared))


def test_tokenising_again_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_module, "Conversation", Retokenising)
    results = rig.compare([name for name in ("SmolLM2", "Qwen3", "chatml", "sentencepiece") if name in rig.templates])
    print("\n".join(["", "Sampled tokens decoded and tokenised again:", "", *table(results)]))
    found = {
        "the trainer sees other tokens than the engine",
        "a prompt neither extends the tokens before it nor was counted",
        "log-probabilities differ",
    }
    for name, one in results.items():
        assert found <= set(one.wrong()), name
        assert one.unlike > one.turns / 2, name


def test_a_loss_on_glue_is_found(rig: Rig) -> None:
    (result,) = rig.compare(["chatml"], with_glue).values()
    assert {
        "the trainer sees other tokens than the engine",
        "not every sampled token is trained on, or others are",
    } <= set(result.wrong())
    assert result.beginnings == result.sequences  # what the engine was sent is still right
