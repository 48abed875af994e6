"""The training service with tinker's own client, in an environment and a process of its own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from run_config import read_lines, run_here, write_run, write_sft_run
from tinker_console import Address, ClientError, Console, console, datum, needs_client
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll_like.builtin.pipelines.sft.pipeline import SFTPipeline
from roll_like.config.load import load_config
from roll_like.config.training import LoRAConfig
from roll_like.models.lora import add_adapters
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import read_groups_and_values
from roll_like.service.config import load_service_config
from roll_like.service.losses import service_loss
from roll_like.service.service import read_keys, serving

# its client's environment has a torch of its own, 1.3 GB
pytestmark = [pytest.mark.integration, pytest.mark.slow, needs_client]

#: A name that the cookbook has a renderer for.
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
LORA = {"rank": 8, "alpha": 16}
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
SEED = 7


@dataclass(frozen=True)
class Finished:
    """A run that has ended: its configuration, its folder, and its metrics."""

    config: Any
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")


def finished(file: Path) -> Finished:
    code, output = run_here(file)
    assert code == 0, output
    return Finished(load_config(file), file.parent / "runs" / "tiny")


@pytest.fixture(scope="module")
def supervised(warm_ray: None, tmp_path_factory: pytest.TempPathFactory, float_model: Path) -> Finished:
    """Four steps over all conversations, each with all of them."""
    folder = tmp_path_factory.mktemp("supervised")
    optimizer = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "max_grad_norm": 0.5}
    file = write_sft_run(
        folder,
        float_model,
        seed=SEED,
        data={"sources": [{"path": str(folder / "train.jsonl")}], "samples_per_step": 20, "max_tokens": 64},
        training={"optimizer": optimizer, "lora": LORA, "max_tokens_per_micro_batch": 256},
        evaluation=None,
        checkpoint={},
    )
    return finished(file)


@pytest.fixture(scope="module")
def rewarded(warm_ray: None, tmp_path_factory: pytest.TempPathFactory, float_model: Path) -> Finished:
    """One step of PPO's loss, with what it was computed of."""
    file = write_run(
        tmp_path_factory.mktemp("rewarded"),
        float_model,
        steps=1,
        seed=SEED,
        rollout={
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_response_tokens": 12,
            "save_tokens": True,
            "save_logprobs": True,
        },
        training={"optimizer": {"lr": 1e-3}, "lora": LORA, "max_tokens_per_micro_batch": 512},
        algorithm={
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
            "aggregation": "token_mean",
            "old_logprobs": "behaviour",
            "correction": {"type": "none"},
            "kl": {"use": "none"},
        },
        checkpoint={},
    )
    return finished(file)


@pytest.fixture(scope="module")
def service(
    supervised: Finished, rewarded: Finished, tmp_path_factory: pytest.TempPathFactory, float_model: Path
) -> Iterator[Address]:
    """A service; the runs that it is compared with have ended, because it takes both cores."""
    folder = tmp_path_factory.mktemp("service")
    config = {
        "output_dir": str(folder / "runs"),
        "seed": SEED,
        "model": {"path": str(float_model), "dtype": "float32"},
        "model_name": MODEL,
        "training": {"lora": LORA, "max_tokens_per_micro_batch": 512},
        "inference": {"type": "hf"},
        "resources": {
            "device": "cpu",
            "devices_per_node": 2,
            "device_mapping": {"training": "0", "inference": "1"},
        },
        "max_sequence_tokens": 512,
        "max_request_mib": 1,
        "max_models": 64,
        "port": 0,
    }
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(config))
    loaded = load_service_config(file)
    with serving(loaded) as running:
        yield Address(running.url, read_keys(loaded)[0])


@pytest.fixture(scope="module")
def client(service: Address) -> Iterator[Console]:
    with console(service) as made:
        yield made


class Plain:
    """The same in plain PyTorch: the model with adapters, its losses, and AdamW."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model)
        add_adapters(self.model, LoRAConfig(**LORA), seed=SEED)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.adam = torch.optim.AdamW(
            self.trained, lr=ADAM["learning_rate"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=1e-8, weight_decay=0.0
        )

    def logprobs(self, each: Mapping[str, Any]) -> Tensor:
        logits = self.model(torch.tensor([each["tokens"]])).logits[0]
        targets = torch.tensor(each["inputs"]["target_tokens"])
        found = logits.log_softmax(-1).gather(-1, targets.reshape(len(targets), -1))
        return found.reshape(targets.shape)

    def loss(self, data: Sequence[Mapping[str, Any]], name: str, settings: Mapping[str, float]) -> Tensor:
        total = torch.zeros(())
        for each in data:
            inputs = {key: torch.tensor(value) for key, value in each["inputs"].items() if key != "target_tokens"}
            total = total + service_loss(name, settings)(self.logprobs(each), inputs).sum()
        return total

    def step(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained, torch.inf))
        self.adam.step()
        self.adam.zero_grad()
        return norm


def sequences(count: int, seed: int = 0) -> list[list[int]]:
    draws = np.random.default_rng(seed)
    return [draws.integers(3, 512, int(length)).tolist() for length in draws.integers(6, 40, count)]


def sampled(seed: int = 1) -> list[Mapping[str, Any]]:
    """Sequences of which the second half was sampled, from a policy that is near."""
    draws, made = np.random.default_rng(seed), []
    for tokens in sequences(4, seed):
        given = np.arange(len(tokens) - 1) < len(tokens) // 2
        inputs = {
            "logprobs": np.where(given, 0.0, -6.3 + 0.3 * draws.standard_normal(len(given))),
            "advantages": np.where(given, 0.0, draws.standard_normal(len(given))),
        }
        made.append(datum(tokens, **{name: values.tolist() for name, values in inputs.items()}))
    return made


def with_mask(data: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {
            **each,
            "inputs": {**each["inputs"], "sequence_ratio_mask": np.sign(np.abs(each["inputs"]["advantages"])).tolist()},
        }
        for each in data
    ]


def candidates() -> list[Mapping[str, Any]]:
    """The three likeliest tokens of a teacher at each position."""
    draws = np.random.default_rng(5)
    made = []
    for tokens in sequences(2, 5):
        shape = (len(tokens) - 1, 3)
        weights = draws.dirichlet(np.ones(3), shape[0])
        made.append(datum(tokens, target_tokens=draws.integers(3, 512, shape).tolist(), weights=weights.tolist()))
    return made


WEIGHTED = [datum(tokens, weights=([0.0, 1.0, 0.5] * 20)[: len(tokens) - 1]) for tokens in sequences(5)]
CASES: list[tuple[str, dict[str, float], list[Mapping[str, Any]]]] = [
    ("cross_entropy", {}, WEIGHTED),
    ("cross_entropy", {}, candidates()),
    ("importance_sampling", {}, sampled()),
    ("ppo", {"clip_high_threshold": 1.1}, sampled()),
    ("cispo", {}, sampled()),
    ("dro", {"beta": 0.1}, sampled()),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, with_mask(sampled())),
]


def test_training_is_that_of_plain_pytorch(client: Console, float_model: Path) -> None:
    """Each loss, and the weights after each step: log-probabilities of all that was trained on so far."""
    client.do("create", model="plain", base_model=MODEL)
    plain = Plain(float_model)
    for number, (name, settings, data) in enumerate(CASES):
        # in two requests, which add up until the step
        found = [
            client.do("forward_backward", model="plain", data=part, loss=name, settings=settings)
            for part in (data[:1], data[1:])
        ]
        loss = plain.loss(data, name, settings)
        loss.backward()
        assert sum(each["metrics"]["loss:sum"] for each in found) == pytest.approx(loss.item(), rel=1e-5, abs=1e-5), (
            name
        )
        norm = plain.step()
        assert client.do("optim_step", model="plain", **ADAM)["grad_norm:mean"] == pytest.approx(norm, rel=1e-4), name
        told = client.do("forward", model="plain", data=data, loss=name, settings=settings)["logprobs"]
        with torch.no_grad():
            for logprobs, each in zip(told, data, strict=True):
                np.testing.assert_allclose(logprobs, plain.logprobs(each), atol=1e-5 * (number + 1))


def test_a_loss_that_the_client_computes(client: Console, float_model: Path) -> None:
    client.do("create", model="pairs", base_model=MODEL)
    plain, data = Plain(float_model), [datum(tokens) for tokens in sequences(4, 9)]
    sums = torch.stack([plain.logprobs(each).sum() for each in data])
    loss = -torch.nn.functional.logsigmoid(0.1 * (sums[::2] - sums[1::2])).sum()
    loss.backward()
    metrics = client.do("custom", model="pairs", data=data, beta=0.1)["metrics"]
    assert metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert metrics["paired"] == metrics["loss:sum"]
    assert client.do("optim_step", model="pairs", **ADAM)["grad_norm:mean"] == pytest.approx(plain.step(), rel=1e-4)


def test_a_custom_loss_of_a_choice_between_tokens(client: Console, float_model: Path) -> None:
    """Some tokens in one place: each position has as many targets, of which the loss looks at the last ones."""
    client.do("create", model="choice", base_model=MODEL)
    plain, draws = Plain(float_model), np.random.default_rng(2)
    words = draws.choice(512, 21, replace=False).tolist()
    data = [datum(tokens, target_tokens=[words] * (len(tokens) - 1)) for tokens in sequences(3, 11)]
    shares = draws.dirichlet(np.ones(21), len(data)).tolist()
    found = torch.stack([plain.logprobs(each)[-1].log_softmax(-1) for each in data])
    loss = torch.nn.functional.kl_div(found, torch.tensor(shares), reduction="sum")
    loss.backward()
    told = client.do("choice", model="choice", data=data, shares=shares)
    assert told["metrics"]["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert [np.shape(each) for each in told["logprobs"]] == [(len(each["tokens"]), 21) for each in data]
    assert client.do("optim_step", model="choice", **ADAM)["grad_norm:mean"] == pytest.approx(plain.step(), rel=1e-4)
    # targets that are fewer than the positions say which shape is wanted
    client.do("create", model="fewer", base_model=MODEL)
    few = [{**data[0], "inputs": {"target_tokens": words}}]
    with pytest.raises(ClientError, match=r"target_tokens has shape \[21\]; cross_entropy takes \[\d+\] or \[\d+, K\]"):
        client.do("choice", model="fewer", data=few, shares=shares[:1])


def test_requests_that_wait_in_line_are_done_in_order(client: Console, float_model: Path) -> None:
    """All are sent before the first is done, and two models take turns."""
    plain, other = Plain(float_model), Plain(float_model)
    for name in ("first", "second"):
        client.do("create", model=name, base_model=MODEL)
    for name, same, data in (("first", plain, WEIGHTED[:4]), ("second", other, WEIGHTED[1:5])):
        told = client.do("steps", model=name, data=data, loss="cross_entropy", count=5, params=ADAM, parts=2)
        for each in told:
            losses = [same.loss(part, "cross_entropy", {}) for part in (data[:2], data[2:])]
            sum(losses).backward()
            assert each["losses"] == pytest.approx([float(loss.detach()) for loss in losses], rel=1e-4)
            assert each["step"]["grad_norm:mean"] == pytest.approx(same.step(), rel=1e-3)


def test_a_batch_that_the_client_divides(client: Console) -> None:
    """It sends 1,024 sequences a request, the first of them last."""
    client.do("create", model="large", base_model=MODEL)
    data = [datum([20 + number % 400, 30, 40 + number % 7]) for number in range(1100)]
    whole = client.do("forward_backward", model="large", data=data, loss="cross_entropy")
    few = client.do("forward", model="large", data=data[-3:], loss="cross_entropy")
    assert len(whole["logprobs"]) == 1100
    np.testing.assert_allclose(whole["logprobs"][-3:], few["logprobs"], atol=1e-5)
    assert whole["metrics"]["loss:sum"] == pytest.approx(-np.sum(whole["logprobs"]), rel=1e-5)


def test_losses_are_those_of_a_supervised_run(client: Console, supervised: Finished) -> None:
    samples = SFTPipeline.trained_on(supervised.config).samples
    tokens = sum(int(each.loss_mask.sum()) for each in samples)
    data = [datum(each.token_ids.tolist(), weights=(each.loss_mask[1:] / tokens).tolist()) for each in samples]
    client.do("create", model="sft", base_model=MODEL)
    params = {"learning_rate": 3e-3, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 0.5}
    told = client.do("steps", model="sft", data=data, loss="cross_entropy", count=4, params=params)
    lines = supervised.lines
    assert [each["losses"][0] for each in told] == pytest.approx([line["train/loss"] for line in lines], abs=1e-5)
    norms = [each["step"]["grad_norm:mean"] for each in told]
    assert norms == pytest.approx([line["train/grad_norm"] for line in lines], rel=1e-3)


def test_losses_are_those_of_a_step_of_rlvr(client: Console, rewarded: Finished) -> None:
    groups, values = read_groups_and_values(tokens_stem(rewarded.folder, 1))
    assert values is not None
    played = [each.trajectory for group in groups for each in group.samples]
    count = sum(int(each.sampled.sum()) for each in played)
    data = [
        datum(
            each.token_ids.tolist(),
            logprobs=each.logprobs[1:].tolist(),
            advantages=advantages[1:].tolist(),
            weights=(each.sampled[1:] / count).tolist(),
        )
        for each, advantages in zip(played, values.advantages, strict=True)
    ]
    client.do("create", model="rlvr", base_model=MODEL)
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    found = client.do("forward_backward", model="rlvr", data=data, loss="ppo", settings=clip)
    (line,) = rewarded.lines
    assert found["metrics"]["loss:sum"] == pytest.approx(line["train/loss"], abs=1e-5)
    step = client.do("optim_step", model="rlvr", learning_rate=1e-3, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)
    assert step["grad_norm:mean"] == pytest.approx(line["train/grad_norm"], rel=1e-3)


def test_samples_are_of_the_weights_that_were_promised(client: Console, float_model: Path) -> None:
    client.do("create", model="moving", base_model=MODEL)
    prompt, data = [20, 21, 22, 23], [datum([20, 21, 22, 23] + [50] * 12)]
    client.do("sampler", name="before", model="moving")
    greedy = {"sampler": "before", "prompt": prompt, "max_tokens": 8, "temperature": 0.0}
    first = client.do("sample", **greedy)["samples"]
    for _ in range(8):
        client.do("forward_backward", model="moving", data=data, loss="cross_entropy")
        client.do("optim_step", model="moving", learning_rate=3e-2)
    client.do("sampler", name="after", model="moving")
    after = client.do("sample", **{**greedy, "sampler": "after"})["samples"]
    assert after[0]["tokens"] == [50] * 8
    again = client.do("sample", **greedy)["samples"]
    assert [each["tokens"] for each in again] == [each["tokens"] for each in first]
    # the trainer and the engine agree on the log-probabilities of what was sampled
    told = client.do("forward", model="moving", data=[datum(prompt + after[0]["tokens"])], loss="cross_entropy")
    np.testing.assert_allclose(told["logprobs"][0][3:], after[0]["logprobs"], atol=1e-4)
    np.testing.assert_allclose(
        client.do("logprobs", sampler="after", prompt=prompt)[1:], told["logprobs"][0][:3], atol=1e-4
    )


def test_seeds_and_stops(client: Console) -> None:
    client.do("sampler", name="base", base=MODEL)
    ask = {"sampler": "base", "prompt": [20, 21, 22], "count": 3, "max_tokens": 12}
    one, two, other = (client.do("sample", **ask, seed=seed)["samples"] for seed in (1, 1, 2))
    assert [each["tokens"] for each in one] == [each["tokens"] for each in two]
    assert [each["tokens"] for each in one] != [each["tokens"] for each in other]
    assert len({tuple(each["tokens"]) for each in one}) == 3
    stop = one[0]["tokens"][2]
    stopped = client.do("sample", **ask, seed=1, stop=[stop])["samples"][0]
    assert (stopped["tokens"], stopped["stop"]) == (one[0]["tokens"][:3], "stop")


def test_checkpoints(client: Console, float_model: Path) -> None:
    client.do("create", model="kept", base_model=MODEL)
    step = {"model": "kept", "data": WEIGHTED, "loss": "cross_entropy", "count": 2, "params": ADAM}
    client.do("steps", **step)
    path = client.do("save", model="kept", name="two")
    assert path.endswith("/weights/two")
    following = client.do("steps", **step)
    client.do("restore", model="again", path=path, optimizer=True)
    resumed = client.do("steps", **{**step, "model": "again"})
    assert [each["losses"] for each in resumed] == [pytest.approx(each["losses"], rel=1e-5) for each in following]
    client.do("restore", model="fresh", path=path, optimizer=False)
    fresh = client.do("steps", **{**step, "model": "fresh"})
    assert fresh[0]["losses"] == pytest.approx(following[0]["losses"], rel=1e-5)
    assert fresh[1]["losses"] != pytest.approx(following[1]["losses"], rel=1e-4)  # moments began anew
    with pytest.raises(ClientError, match="two"):
        client.do("save", model="kept", name="two")
    assert client.do("weights_info", path=path)["lora_rank"] == 8
    copied = client.do("copy", path=path)
    assert {path, copied} <= set(client.do("checkpoints"))
    client.do("delete", path=path)
    assert path not in client.do("checkpoints")
    with pytest.raises(ClientError, match="weights/two"):
        client.do("restore", model="gone", path=path, optimizer=True)


GOOD = [datum([20, 21, 22, 23, 24])]
RL = {"logprobs": [-6.0] * 4, "advantages": [1.0] * 4}
BAD: dict[str, dict[str, Any]] = {
    "target_tokens has shape": {"data": [{"tokens": [20, 21], "inputs": {"target_tokens": [20]}}]},
    "advantages.1. is nan": {
        "data": [datum([20, 21, 22, 23, 24], **{**RL, "advantages": [0.0, float("nan"), 0.0, 0.0]})],
        "loss": "ppo",
    },
    "token 512; the vocabulary is 0 to 511": {"data": [datum([20, 512, 22])]},
    "has 600 tokens; this model trains on sequences of 1 to 512": {"data": [datum([20] * 601)]},
    r"no loss_fn_inputs\['logprobs'\]": {"data": GOOD, "loss": "cispo"},
    "'dppo' is not served; use one of": {"data": GOOD, "loss": "dppo"},
    r"loss_fn_config has 'eps'": {"data": GOOD, "settings": {"eps": 0.2}},
}


def test_bad_requests_are_refused_and_nothing_is_lost(client: Console, service: Address) -> None:
    client.do("create", model="bad", base_model=MODEL)
    for data in (WEIGHTED, GOOD):  # a gradient that is to stay
        client.do("forward_backward", model="bad", data=data, loss="cross_entropy")
    for message, request in BAD.items():
        for verb in ("forward", "forward_backward"):
            with pytest.raises(ClientError, match=message) as refused:
                client.do(verb, **{"model": "bad", "loss": "cross_entropy", **request})
            assert refused.value.kind == "RequestFailedError"
    with pytest.raises(ClientError, match="base model 'Qwen/other' is not served"):
        client.do("create", model="other", base_model="Qwen/other")
    with pytest.raises(ClientError, match="rank of 64 is more than"):
        client.do("create", model="wide", base_model=MODEL, rank=64)
    with pytest.raises(ClientError, match="no-such"):
        client.do("sampler", name="none", path="tinker://no-such/sampler_weights/one")
    client.do("sampler", name="fine", base=MODEL)
    with pytest.raises(ClientError, match="token 600"):
        client.do("sample", sampler="fine", prompt=[600], max_tokens=2)
    with pytest.raises(ClientError, match="max_sequence_tokens"):
        client.do("sample", sampler="fine", prompt=[20], max_tokens=5000)

    client.do("create", model="good", base_model=MODEL)
    for data in (WEIGHTED, GOOD):
        client.do("forward_backward", model="good", data=data, loss="cross_entropy")
    norms = [client.do("optim_step", model=name, **ADAM)["grad_norm:mean"] for name in ("bad", "good")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def asked(
    address: Address, path: str, body: bytes | dict[str, Any], key: str | None = None, **headers: str
) -> tuple[int, str]:
    """Ask without the client: what it would never send."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"X-API-Key": address.key if key is None else key, "Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{address.url}/api/v1{path}", raw, sent)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


PROTO = {"Content-Type": "application/x-protobuf"}


def test_what_the_client_would_never_send(service: Address, client: Console) -> None:
    client.do("create", model="raw", base_model=MODEL)
    model = client.do("create", model="raw2", base_model=MODEL)["model_id"]
    assert asked(service, "/healthz", {}, key="")[0] == 401
    session = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
    assert asked(service, "/create_session", session, key="tml-other-key-1234")[0] == 401
    status, text = asked(service, "/create_session", b'{"tags": [], "sdk_ver')
    assert (status, "no JSON" in text) == (400, True), text
    # a body that was cut off, and an older client's JSON
    assert asked(service, "/forward_backward", b"\x0a\xff\xff\xff", **PROTO)[0] == 400
    status, text = asked(service, "/forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": {}})
    assert (status, "tinker 0.38" in text) == (400, True), text
    assert asked(service, "/forward_backward", b"0" * (2 << 20), **PROTO)[0] == 413
    assert asked(service, "/retrieve_future", {"request_id": "nobody:1"})[0] == 404
    status, text = asked(service, "/create_custom_loss", {})
    assert status == 404
    assert "forward_backward_custom" in text
    # and the model takes requests all the same
    assert client.do("forward", model="raw2", data=GOOD, loss="cross_entropy")["logprobs"]


@pytest.mark.slow
def test_the_cookbook_learns_conversations(service: Address, tmp_path: Path, float_model: Path) -> None:
    (tmp_path / "model").symlink_to(float_model)
    words = ("abc", "moon", "hello", "tea", "zebra", "quick", "dog", "river")
    with (tmp_path / "sl.jsonl").open("w") as rows:
        for word in words * 12:
            said = [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": f"{word} {word}"}]
            rows.write(json.dumps({"messages": said}) + "\n")
    options = {"learning_rate": 1e-2, "batch_size": 8, "max_length": 64, "max_steps": 12, "save_every": 5}
    service.run("recipes.py", "sl", str(tmp_path), json.dumps({"model_name": MODEL, "lora_rank": 8, **options}))
    losses = [line["train_mean_nll"] for line in read_lines(tmp_path / "sl" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1.0
