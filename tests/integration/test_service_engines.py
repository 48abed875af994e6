"""The training service with vLLM, tinker's own client, and more models than fit in memory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
import yaml
from dashboards import asked_names
from faults import kill
from prometheus_client.parser import text_string_to_metric_families
from run_config import read_lines
from tinker_console import Address, ClientError, Console, console, datum, needs_client
from transformers import AutoModelForCausalLM

from roll_like.metrics.prometheus import TARGETS
from roll_like.rollout.engine_pool import EnginePool
from roll_like.service.config import load_service_config
from roll_like.service.core import ServiceCore
from roll_like.service.service import read_keys, serving

pytestmark = [pytest.mark.integration, pytest.mark.slow, needs_client]

#: A name that the cookbook has a renderer for.
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
RESOURCES = {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}}
PROMPT = [20, 21, 22, 23]


def served_config(folder: Path, model: Path, **changes: Any) -> Any:
    config = {
        "output_dir": str(folder / "runs"),
        "model": {"path": str(model), "dtype": "float32"},
        "model_name": MODEL,
        "training": {"lora": {"rank": 8, "alpha": 16}, "max_tokens_per_micro_batch": 2048},
        "inference": {"type": "vllm", "kv_cache_gib": 0.1, "max_running": 16},
        "resources": RESOURCES,
        "max_sequence_tokens": 1024,
        "max_loaded_models": 1,
        "max_loras": 2,
        "trackers": [{"type": "prometheus", "port": 0}],
        "port": 0,
        **changes,
    }
    (folder / "service.yaml").write_text(yaml.safe_dump(config))
    return load_service_config(folder / "service.yaml")


@dataclass(frozen=True)
class Service(Address):
    """A service, and what does its work in this process."""

    core: ServiceCore
    folder: Path

    @property
    def engines(self) -> EnginePool:
        return self.core._delivery._engines


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, float_model: Path) -> Iterator[Service]:
    config = served_config(tmp_path_factory.mktemp("service"), float_model)
    with serving(config) as running:
        yield Service(running.url, read_keys(config)[0], running.core, config.directory)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Console]:
    with console(service) as made:
        yield made


@pytest.fixture(scope="module")
def models(client: Console) -> dict[str, int]:
    """Three models, of which each has learned to repeat a token after the prompt; one is in memory at a time."""
    learned = {"fifty": 50, "sixty": 60, "seventy": 70}
    for name in learned:
        client.do("create", model=name, base_model=MODEL)
    for _ in range(8):
        for name, token in learned.items():
            data = [datum([*PROMPT, *[token] * 12])]
            client.do("forward_backward", model=name, data=data, loss="cross_entropy")
            for other in learned:  # the gradient is not lost while others are worked on
                client.do("forward", model=other, data=data, loss="cross_entropy")
            client.do("optim_step", model=name, learning_rate=3e-2)
    for name in learned:
        client.do("sampler", name=name, model=name)
    return learned


def greedy(sampler: str, tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"sampler": sampler, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0.0, **more}


def test_models_come_back_from_disk_as_they_went(client: Console, service: Service, models: dict[str, int]) -> None:
    trainer: Any = service.core._trainer
    assert sum(history.loaded for history in trainer._histories.values()) == 1
    # a model that was alone in memory learns the same
    with console(service) as other:
        other.do("create", model="alone", base_model=MODEL)
        for _ in range(8):
            data = [datum([*PROMPT, *[50] * 12])]
            other.do("forward_backward", model="alone", data=data, loss="cross_entropy")
            other.do("optim_step", model="alone", learning_rate=3e-2)
        data = [datum([*PROMPT, *[50] * 8])]
        found = [
            each.do("forward", model=name, data=data, loss="cross_entropy")["logprobs"]
            for each, name in ((client, "fifty"), (other, "alone"))
        ]
    np.testing.assert_array_equal(*found)


def test_three_adapters_are_sampled_at_once(client: Console, models: dict[str, int]) -> None:
    """Of which two are in the engine at a time; each sample is of the weights that were promised."""
    for _ in range(2):
        order = [*models] * 6
        found = client.do("sample_all", requests=[greedy(name, count=2) for name in order])
        for name, response in zip(order, found, strict=True):
            assert [each["tokens"] for each in response["samples"]] == [[models[name]] * 8] * 2, name
    for name, token in models.items():
        (sample,) = client.do("sample", **greedy(name))["samples"]
        told = client.do("forward", model=name, data=[datum([*PROMPT, *[token] * 8])], loss="cross_entropy")
        np.testing.assert_allclose(told["logprobs"][0][3:], sample["logprobs"], atol=1e-4)


def test_prometheus_reads_the_service_and_what_vllm_counts(client: Console, service: Service) -> None:
    client.do("sampler", name="scraped", base=MODEL)
    client.do("sample", **greedy("scraped", tokens=7))
    targets = json.loads((service.folder / TARGETS).read_text())
    [target] = [each for each in targets if each["labels"].get("job") != "ray"]
    wanted, samples = {"roll_like_service_sessions", *asked_names()["vllm"]}, dict[str, Any]()
    # its own figures come every ten seconds; an engine that is busy for seconds is left out
    deadline = time.monotonic() + 300
    while not wanted <= samples.keys() or samples["roll_like_service_sessions"].value < 1:
        assert time.monotonic() < deadline, f"not served: {wanted - samples.keys() or 'a session'}"
        time.sleep(0.5)
        with urlopen(f"http://{target['targets'][0]}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        samples = {sample.name: sample for family in families for sample in family.samples}
    generated = samples["vllm:generation_tokens_total"]
    assert generated.value >= 7
    ended = re.search(r'^vllm:request_success_total\{.*finished_reason="length".*\} (\S+)$', text, re.MULTILINE)
    assert ended is not None
    assert float(ended[1]) >= 1
    assert (generated.labels["run"], generated.labels["replica"]) == ("service", "0")


def test_the_likeliest_tokens_are_told(client: Console, float_model: Path) -> None:
    client.do("sampler", name="base", base=MODEL)
    asked = {"max_tokens": 5, "seed": 3, "topk_sample_logprobs": 4, "topk_prompt_logprobs": 2}
    response = client.do("sample", sampler="base", prompt=PROMPT, include_prompt_logprobs=True, **asked)
    (sample,) = response["samples"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(float_model)(torch.tensor([[*PROMPT, *sample["tokens"]]])).logits
    logprobs = logits[0].log_softmax(-1)
    assert response["top"][0] is None
    told = [*response["top"][1:], *sample["top"]]
    assert [len(each) for each in told] == [2] * 3 + [4] * 5
    for place, each in enumerate(told):
        values, tokens = logprobs[place].topk(len(each))
        np.testing.assert_allclose([value for _, value in each], values, atol=1e-4)
        assert [token for token, _ in each] == tokens.tolist()
    np.testing.assert_allclose(response["prompt_logprobs"][1:], logprobs[range(3), PROMPT[1:]].tolist(), atol=1e-4)
    with pytest.raises(ClientError, match="topk_sample_logprobs is 30; this service's engine tells 20 or less"):
        client.do("sample", **greedy("base", topk_sample_logprobs=30))


def test_an_engine_that_is_killed_loses_nothing(client: Console, service: Service, models: dict[str, int]) -> None:
    """While it samples with two adapters: the client waits, and gets what it was promised."""
    requests = [greedy(name, 100) for name in [*models] * 4]
    places = service.core.samples._sampler._places
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(client.do, "sample_all", requests=requests)
        until(lambda: any(place.running for place in places))
        time.sleep(0.3)
        kill(service.engines.cluster._actors[0])
        found = pending.result(timeout=200)
    until(lambda: service.engines._restarts == [1])
    for name, response in zip([*models] * 4, found, strict=True):
        assert response["samples"][0]["tokens"][:8] == [models[name]] * 8, name
    again = client.do("sample_all", requests=requests)
    tokens = [[response["samples"][0]["tokens"] for response in each] for each in (found, again)]
    assert tokens[0] == tokens[1]
    # prompts are scored by the adapter, and not by the model that the new engine has loaded
    told = client.do("logprobs", sampler="fifty", prompt=[*PROMPT, 50, 50])
    data = [datum([*PROMPT, 50, 50])]
    (trained,) = client.do("forward", model="fifty", data=data, loss="cross_entropy")["logprobs"]
    np.testing.assert_allclose(told[1:], trained, atol=1e-4)
    # and training goes on
    client.do("forward_backward", model="fifty", data=[datum([*PROMPT, 50])], loss="cross_entropy")
    assert client.do("optim_step", model="fifty", learning_rate=1e-3)["grad_norm:mean"] >= 0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_cookbook_raises_a_reward(service: Service, tmp_path: Path, float_model: Path) -> None:
    """Its loop of reinforcement learning, unchanged; the reward counts a letter."""
    (tmp_path / "model").symlink_to(float_model)
    with (tmp_path / "letters.jsonl").open("w") as rows:
        for number in range(400):
            rows.write(json.dumps({"question": f"Say the letter e, {number}.", "answer": "e"}) + "\n")
    options = {"learning_rate": 1e-2, "batch_size": 8, "group_size": 8, "max_tokens": 12, "max_steps": 30}
    options |= {"model_name": MODEL, "lora_rank": 8, "loss_fn": "importance_sampling", "save_every": 10}
    service.run("recipes.py", "letters", str(tmp_path), json.dumps(options), timeout=600)
    rewards = [line["reward/total"] for line in read_lines(tmp_path / "letters" / "metrics.jsonl")]
    assert len(rewards) == 30
    assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.04, rewards
