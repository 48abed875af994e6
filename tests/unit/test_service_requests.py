"""What clients of a training service send and get, with a trainer and an engine that only note what they are asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from tinker_messages import read_message, train_message

from roll_like.errors import ConfigError, EngineError
from roll_like.inference.interface import GenerateRequest, Generation, PromptScores, TopLogprobs
from roll_like.service import core as core_module
from roll_like.service import hosted, weight_requests, wire
from roll_like.service.config import load_service_config
from roll_like.service.core import ServiceCore
from roll_like.service.objective import DatumOutput
from roll_like.service.protocol import OptimStepBody, parsed_body
from roll_like.service.server import KEY_HEADER, ServiceServer
from roll_like.service.service import read_keys
from roll_like.service.snapshots import Snapshot, SnapshotLoad
from roll_like.service.status import ServiceStatus
from roll_like.service.types import Datum, RequestError, SampledTokens, SampleResult
from roll_like.types import StopReason

KEY, OTHER = "tml-first-key", "tml-second-key"
FILE = {
    "model": {"path": "somewhere"},
    "model_name": "tiny",
    "training": {"lora": {"rank": 8}},
    "inference": {"type": "hf"},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}},
    "max_sequence_tokens": 32,
    "max_models": 2,
}


def config_of(folder: Path, **changes: Any) -> Any:
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump({**FILE, "output_dir": str(folder), **changes}))
    return load_service_config(path)


class NotingTrainer:
    """Notes what it is asked, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def _note(self, *what: Any) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    def create(self, model: str, adapter: Any) -> None:
        self._note("create", model, None if adapter is None else adapter.rank)

    def drop(self, model: str) -> None:
        self._note("drop", model)

    def train(self, model: str, losses: Any, data: Sequence[Datum], *, backward: bool) -> list[DatumOutput]:
        self._note("train", model, losses.name, [datum.tokens.tolist() for datum in data], backward)
        return [
            DatumOutput(index=index, loss=2.0, logprobs=np.full(datum.inputs["target_tokens"].shape, -0.5, np.float32))
            for index, datum in enumerate(data)
        ]

    def step(self, model: str, optimizer: Any) -> float:
        self._note("step", model, optimizer.lr, optimizer.max_grad_norm)
        return 1.5

    def save(self, model: str, directory: Path) -> None:
        self._note("save", model)
        (directory / "weights").write_text(model)

    def load(self, model: str, directory: Path, *, optimizer: bool) -> None:
        self._note("load", model, (directory / "weights").read_text(), optimizer)

    def snapshot(self, model: str, file: Path) -> None:
        self._note("snapshot", model)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name(f"{file.name}.rank_0.pt").write_text(model)

    def is_loaded(self, model: str) -> bool:
        return True

    def deliver(self, load: SnapshotLoad, *, model: str | None) -> None:
        file = load.snapshot.file
        self._note("push", model or (None if file is None else file.name))


class NotingSampler:
    """Pushes what is wanted, and echoes prompts."""

    def __init__(self, load: Callable[[SnapshotLoad], Awaitable[None]]) -> None:
        self.load = load
        self.requests: list[GenerateRequest] = []

    async def generate(self, snapshot: Snapshot, requests: Sequence[GenerateRequest], *, key: str) -> list[Generation]:
        await self.load(SnapshotLoad(snapshot=snapshot, name="policy"))
        self.requests += requests
        return [
            Generation(
                request_id=request.request_id,
                token_ids=request.prompt_ids,
                logprobs=np.full(len(request.prompt_ids), -1, np.float32),
                segments=(),
                text="",
                stop_reason=StopReason.STOP,
            )
            for request in requests
        ]

    async def score(self, snapshot: Snapshot, tokens: Any, top_k: int) -> PromptScores:
        places = np.arange(1, len(tokens))
        top = TopLogprobs(
            token_ids=10 * places[:, None] + np.arange(top_k), logprobs=np.zeros((len(places), top_k)) - places[:, None]
        )
        return PromptScores(logprobs=places.astype(np.float32), top=top if top_k else None)


class Client:
    """A client that speaks the protocol by hand."""

    def __init__(self, http: httpx.AsyncClient, trainer: NotingTrainer, core: ServiceCore) -> None:
        self.http, self.trainer, self.core = http, trainer, core
        self.sampler: Any = core.samples._sampler

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return await self.http.post(f"/api/v1/{path}", json={} if body is None else body, **more)

    async def begin(self) -> str:
        answer = await self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"})
        session: str = answer.json()["session_id"]
        return session

    async def model(self, session: str, number: int = 0, rank: int = 8) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": rank}}
        found: str = (await self.result(await self.post("create_model", body)))["model_id"]
        return found

    async def train(
        self, model: str, number: int, data: Sequence[Datum] | None = None, loss: str = "cross_entropy"
    ) -> Any:
        content = train_message(model, number, [datum(1, 2, 3)] if data is None else data, loss)
        headers = {"content-type": wire.CONTENT_TYPE}
        return await self.http.post("/api/v1/forward_backward", content=content, headers=headers)

    async def step(self, model: str, number: int, **settings: Any) -> httpx.Response:
        return await self.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": settings})

    async def result(self, answer: httpx.Response) -> Any:
        assert answer.status_code == 200, answer.text
        found = await self.post("retrieve_future", {"request_id": answer.json()["request_id"]})
        assert found.status_code == 200, found.text
        return found.json() if found.headers["content-type"].startswith("application/json") else found.content


def datum(*tokens: int, **inputs: Any) -> Datum:
    targets = np.asarray([*tokens[1:], 4])
    return Datum(tokens=np.asarray(tokens, np.int32), inputs={"target_tokens": targets, **inputs})


@asynccontextmanager
async def served(folder: Path, **changes: Any) -> AsyncIterator[Client]:
    config = config_of(folder, **changes)
    trainer: Any = NotingTrainer()
    sampler: Any = NotingSampler
    core = ServiceCore(config, trainer, trainer, sampler, vocabulary=100)
    server = ServiceServer(core, [KEY, OTHER], base_model="tiny", window=32, max_request_bytes=2**20)
    port = await server.start("127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers={KEY_HEADER: KEY}, limits=httpx.Limits(), timeout=60
        ) as http:
            yield Client(http, trainer, core)
    finally:
        await server.close()
        core.close()


def served_test(test: Callable[[Client], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def body() -> None:
            async with served(tmp_path) as client:
                await test(client)

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


@served_test
async def test_who_has_no_key_gets_401(client: Client) -> None:
    for headers in ({KEY_HEADER: ""}, {KEY_HEADER: "tml-wrong"}):
        answer = await client.http.get("/api/v1/healthz", headers=headers)
        assert answer.status_code == 401
        assert "API key" in answer.json()["detail"]
    assert (await client.http.get("/api/v1/healthz")).json() == {"status": "ok"}


def test_a_connection_that_breaks_inside_is_told_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> httpx.Response:
        async with served(tmp_path) as client:
            monkeypatch.setattr(client.core.state, "sessions_of", broken)
            return await client.http.get("/api/v1/sessions")

    def broken(_: str) -> None:
        raise ConnectionRefusedError("the tracker is gone")

    answer = asyncio.run(body())
    assert answer.status_code == 500
    assert answer.json() == {"detail": "ConnectionRefusedError: the tracker is gone"}
    assert "GET /api/v1/sessions failed" in caplog.text


@served_test
async def test_requests_of_a_model_are_done_in_the_order_of_their_numbers(client: Client) -> None:
    model = await client.model(await client.begin())
    late = await client.step(model, 3, learning_rate=0.5)
    second = await client.train(model, 2)
    assert [what[0] for what in client.trainer.asked] == ["create"]
    first = await client.train(model, 1, [datum(7, 8)])
    assert await client.result(late) == {"metrics": {"grad_norm:mean": 1.5, "lr:mean": 0.5}}
    assert [what[0] for what in client.trainer.asked[1:]] == ["train", "train", "step"]
    assert client.trainer.asked[1][3] == [[7, 8]]
    assert client.trainer.asked[3] == ("step", model, 0.5, float("inf"))
    # one that is sent again, because its answer was lost on its way, is done once
    again = await client.train(model, 1, [datum(7, 8)])
    assert again.json() == first.json()
    await client.result(second)
    assert len(client.trainer.asked) == 4


@served_test
async def test_a_loss_comes_back_with_the_shapes_of_its_targets(client: Client) -> None:
    model = await client.model(await client.begin())
    two = Datum(tokens=np.asarray([5, 6], np.int32), inputs={"target_tokens": np.asarray([[1, 2, 3], [4, 5, 6]])})
    answer = await client.train(model, 1, [datum(1, 2, 3), datum(4, 5, 6), two])
    message = read_message("ForwardBackwardOutput", await client.result(answer))
    assert dict(message.metrics) == {"loss:sum": 6.0}
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1]
    fields = [record.fields["logprobs"] for record in message.loss_fn_outputs]
    assert [list(field.trailing_shape) for field in fields] == [[], [3]]
    assert np.frombuffer(fields[0].offsets, np.int64).tolist() == [0, 12, 24]
    assert np.frombuffer(fields[1].data, np.float32).tolist() == [-0.5] * 6


WRONG = {
    "a token": ([datum(1, 2, 300)], "cross_entropy", "token 300"),
    "NaN": (
        [datum(1, 2, advantages=np.asarray([0.0, np.nan]), logprobs=np.zeros(2))],
        "importance_sampling",
        "advantages[1] is nan",
    ),
    "a shape": ([datum(1, 2, weights=np.ones(3))], "cross_entropy", "weights has shape [3]"),
    "too long": ([datum(*range(40))], "cross_entropy", "40 tokens"),
    "a loss": ([datum(1, 2)], "magic", "'magic' is not served"),
    "nothing": ([], "cross_entropy", "no data"),
}


@pytest.mark.parametrize("what", list(WRONG))
async def test_wrong_data_fail_one_request_and_the_next_goes_on(tmp_path: Path, what: str) -> None:
    data, loss, words = WRONG[what]

    async with served(tmp_path) as client:
        model = await client.model(await client.begin())
        refused = await client.result(await client.train(model, 1, data, loss))
        assert refused["category"] == "user"
        assert words in refused["error"]
        await client.result(await client.train(model, 2))
        assert [what[0] for what in client.trainer.asked] == ["create", "train"]


@served_test
async def test_wrong_settings_have_their_place_in_the_order_too(client: Client) -> None:
    model = await client.model(await client.begin())
    refused = await client.result(await client.step(model, 1, learning_rate=-1))
    assert "adam_params.learning_rate" in refused["error"]
    other = {"model_id": model, "seq_id": 2, "optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}
    assert "'dimuon' is not served" in (await client.result(await client.post("optim_step", other)))["error"]
    await client.result(await client.step(model, 3))
    assert client.trainer.asked[1:] == [("step", model, 1e-4, float("inf"))]


@served_test
async def test_what_fails_on_the_ranks_is_the_services_fault(client: Client) -> None:
    model = await client.model(await client.begin())
    client.trainer.error = EngineError("the trainer is out of memory", fix="lower something")
    failed = await client.result(await client.train(model, 1))
    assert failed == {"error": "the trainer is out of memory\n  fix: lower something", "category": "server"}
    client.trainer.error = None
    await client.result(await client.train(model, 2))


async def test_a_gap_in_a_models_requests_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "GAP_SECONDS", 0.05)

    async with served(tmp_path) as client:
        model = await client.model(await client.begin())
        early = await client.train(model, 2)
        await asyncio.sleep(0.06)
        client.core.state.models[model].queue.give_up_gaps()
        assert "waited" in (await client.result(early))["error"]
        await client.result(await client.train(model, 3))
        assert [what[0] for what in client.trainer.asked] == ["create", "train"]


@served_test
async def test_nothing_of_another_key_can_be_reached(client: Client) -> None:
    session = await client.begin()
    model = await client.model(session)
    future = (await client.train(model, 1)).json()
    theirs = {KEY_HEADER: OTHER}
    assert (await client.post("retrieve_future", future, headers=theirs)).status_code == 404
    assert (await client.post("get_info", {"model_id": model}, headers=theirs)).status_code == 404
    assert (await client.post("session_heartbeat", {"session_id": session}, headers=theirs)).status_code == 410
    content, kind = train_message(model, 2, [datum(1, 2)]), {"content-type": wire.CONTENT_TYPE}
    stranger = await client.http.post("/api/v1/forward_backward", content=content, headers={**kind, **theirs})
    assert stranger.status_code == 404
    assert (await client.http.get("/api/v1/training_runs", headers=theirs)).json()["training_runs"] == []
    assert (await client.post("unload_model", {"model_id": model})).json()["model_id"] == model


@served_test
async def test_models_are_refused_that_are_not_served(client: Client) -> None:
    session = await client.begin()

    async def create(number: int, **changes: Any) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4}}
        answer = await client.post("create_model", {**body, **changes})
        if answer.status_code != 200:
            detail: str = answer.json()["detail"]
            return detail
        error: str = (await client.result(answer)).get("error", "")
        return error

    assert "base model 'other' is not served" in await create(0, base_model="other")
    assert "rank of 16 is more" in await create(1, lora_config={"rank": 16})
    assert "trains adapters" in await create(2, lora_config={"rank": 0})
    assert "train_mlp=False is not served" in await create(3, lora_config={"rank": 4, "train_mlp": False})
    assert "'dimuon' is not served" in await create(4, optimizer_config={"type": "dimuon"})
    assert "magic: this key is not served" in await create(5, magic=1)
    assert [await create(6), await create(7)] == ["", ""]
    assert "this service has 2 models" in await create(8)


@served_test
async def test_weights_are_saved_loaded_listed_and_deleted(client: Client) -> None:
    session = await client.begin()
    model = await client.model(session)
    saved = {"model_id": model, "path": "one", "seq_id": 1, "user_metadata": {"a": "b"}}
    path = (await client.result(await client.post("save_weights", saved)))["path"]
    assert path == f"tinker://{model}/weights/one"
    twice = await client.result(await client.post("save_weights", {**saved, "seq_id": 2}))
    assert "overwrite=True" in twice["error"]
    again = await client.post("save_weights", {**saved, "seq_id": 3, "overwrite": True})
    assert (await client.result(again))["path"] == path
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    new = await client.result(await client.post("load_weights", body))
    assert new["model_id"] == f"{session}:train:1"
    assert client.trainer.asked[-2:] == [("create", new["model_id"], 8), ("load", new["model_id"], model, True)]
    info = (await client.post("weights_info", {"tinker_path": path})).json()
    assert (info["base_model"], info["is_lora"], info["lora_rank"]) == ("tiny", True, 8)
    copied = (await client.post("copy_weights", {"source_path": path})).json()["tinker_path"]
    assert (await client.post("weights_info", {"tinker_path": copied})).status_code == 200
    (listed,) = (await client.http.get(f"/api/v1/training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert (listed["checkpoint_id"], listed["checkpoint_type"], listed["tinker_path"]) == (
        "weights/one",
        "training",
        path,
    )
    assert listed["size_bytes"] > 0
    for wrong in (
        "../../etc",
        f"tinker://{model}/weights/../../../x",
        "tinker://..:/weights/x",
        f"tinker://{model}/weights/no",
    ):
        answer = await client.post("weights_info", {"tinker_path": wrong})
        assert answer.status_code == 400, wrong
    assert (await client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/one")).status_code == 204
    assert len((await client.http.get("/api/v1/checkpoints")).json()["checkpoints"]) == 1


@served_test
async def test_samples_are_of_the_weights_that_were_promised(client: Client) -> None:
    session = await client.begin()
    model = await client.model(session)
    params = {"max_tokens": 4, "seed": 5, "temperature": 0.5, "top_k": -1, "top_p": 1, "stop": [2, 9]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]}

    async def sample(sampler: str, number: int = 0, **more: Any) -> Any:
        body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": params}
        return await client.result(await client.post("asample", {**body, **more}))

    saved = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    early = (await client.result(await client.post("save_weights_for_sampler", saved)))["sampling_session_id"]
    found = read_message("SampleResponse", await sample(early, num_samples=2, prompt_logprobs=True))
    assert [np.frombuffer(each.tokens, np.int32).tolist() for each in found.sequences] == [[1, 2, 3]] * 2
    assert np.isnan(np.frombuffer(found.prompt_logprobs, np.float32)).tolist() == [True, False, False]
    assert client.trainer.asked[-1] == ("push", model)  # which has not moved since
    await client.result(await client.step(model, 2))
    await sample(early, 1)
    assert client.trainer.asked[-1] == ("push", "0-000001")
    first, second = client.sampler.requests[:2]
    assert first.seed != second.seed
    assert (first.sampling.stop_ids, first.sampling.stop, first.sampling.top_k) == ((2, 9), (), 0)
    base = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
    await sample((await client.post("create_sampling_session", base)).json()["sampling_session_id"])
    assert client.trainer.asked[-1] == ("push", None)
    found = read_message("SampleResponse", await sample(early, 4, topk_prompt_logprobs=2, prompt_logprobs_last_n=1))
    assert (found.topk_prompt_logprobs.k, found.topk_prompt_logprobs.length) == (2, 3)
    assert np.frombuffer(found.topk_prompt_logprobs.token_ids, np.int32).tolist() == [0, 0, 0, 0, 20, 21]
    assert np.frombuffer(found.topk_prompt_logprobs.logprobs, np.float32).tolist() == [-99999.0] * 4 + [-2, -2]
    assert found.prompt_logprobs == b""
    assert (
        "topk_prompt_logprobs is 30; this service's engine tells 20 or less"
        in (await sample(early, 2, topk_prompt_logprobs=30))["error"]
    )
    assert "target_prompt_logprobs is not served" in (await sample(early, 5, target_prompt_logprobs=[1]))["error"]
    assert "max_tokens is 99" in (await sample(early, 3, sampling_params={"max_tokens": 99}))["error"]


def text(*tokens: int, kind: str = "encoded_text") -> dict[str, Any]:
    return {"chunks": [{"type": kind, "tokens": list(tokens)}]}


WRONG_SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": text()}, "the prompt has 0 tokens; this service takes 1 to 31"),
    "a token of another vocabulary": ({"prompt": text(1, 100)}, "token 100; the vocabulary is 0 to 99"),
    "a token that is no int32": ({"prompt": text(1, 2**32 + 5)}, "prompt.chunks.0.tokens.1: Input should be less than"),
    "a negative token": ({"prompt": text(-1)}, "greater than or equal to 0"),
    "an image": ({"prompt": text(kind="image")}, "chunks of type 'image' are not served"),
    "a prompt that is too long": ({"prompt": text(*range(40))}, "the prompt has 40 tokens"),
    "no sample": ({"num_samples": 0}, "num_samples: Input should be greater than or equal to 1"),
    "a stop token": ({"sampling_params": {"stop": [500]}}, "stop has token 500; the vocabulary is 0 to 99"),
    "a temperature": ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    "a top_p": ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    "a key": ({"beam_width": 2}, "beam_width: this key is not served"),
    "a seed": ({"sampling_params": {"seed": -3}}, "sampling_params.seed"),
    "last tokens": ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n is 3; expected 1"),
}


async def test_wrong_samples_are_refused_and_the_next_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        made = {"session_id": await client.begin(), "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await client.post("create_sampling_session", made)).json()["sampling_session_id"]
        good = {"sampling_session_id": sampler, "prompt": text(1, 2, 3), "sampling_params": {"max_tokens": 4}}
        for number, (changes, words) in enumerate(WRONG_SAMPLES.values()):
            answer = await client.post("asample", {**good, "seq_id": number, **changes})
            if answer.status_code == 400:
                assert words in answer.json()["detail"]
            else:
                refused = await client.result(answer)
                assert (refused["category"], words in refused["error"]) == ("user", True), (words, refused)
        nested = await client.http.post("/api/v1/asample", content=b"[" * 100_000)
        assert (nested.status_code, "no JSON" in nested.json()["detail"]) == (400, True)
        assert isinstance(await client.result(await client.post("asample", {**good, "seq_id": 99})), bytes)


def test_checkpoints_of_a_service_that_has_ended_are_there_for_the_next(tmp_path: Path) -> None:
    async def body() -> None:
        async with served(tmp_path) as client:
            model = await client.model(await client.begin())
            saved = {"model_id": model, "path": "one", "seq_id": 1, "ttl_seconds": 3600}
            path = (await client.result(await client.post("save_weights", saved)))["path"]
        async with served(tmp_path) as client:
            change = f"/api/v1/training_runs/{model}/checkpoints/weights/one/ttl"
            assert (await client.http.put(change, json={"ttl_seconds": None})).status_code == 204
            (listed,) = (await client.http.get("/api/v1/checkpoints")).json()["checkpoints"]
            assert (listed["tinker_path"], listed["expires_at"]) == (path, None)
            body = {"session_id": await client.begin(), "model_seq_id": 0, "path": path, "optimizer": True}
            (file,) = tmp_path.glob("service/models/*/weights/one/state/weights")
            written = file.read_text()
            file.write_text(written[::-1])
            damaged = await client.result(await client.post("load_weights", {**body, "model_seq_id": 1}))
            assert (damaged["category"], "its checksum differs" in damaged["error"]) == ("server", True)
            assert client.core.state.models == {}
            client.trainer.asked.clear()
            file.write_text(written)
            new = (await client.result(await client.post("load_weights", body)))["model_id"]
            assert client.trainer.asked == [("create", new, 8), ("load", new, model, True)]

    asyncio.run(body())


@pytest.mark.parametrize("each", [5, pytest.param(125, marks=pytest.mark.slow)])
async def test_of_many_requests_at_once_none_is_lost_or_out_of_order(tmp_path: Path, each: int) -> None:
    clients = 8

    async with served(tmp_path, max_models=clients) as client:
        models = [await client.model(await client.begin()) for _ in range(clients)]

        async def ask(model: str, number: int) -> None:
            answer = await (client.step if number % 5 == 0 else client.train)(model, number)
            found = await client.result(answer)
            assert isinstance(found, dict) == (number % 5 == 0)

        async def ask_all(model: str) -> None:
            for last in range(5, each + 1, 5):  # five at a time, the last of them first
                await asyncio.gather(*(ask(model, last - back) for back in range(5)))

        await asyncio.gather(*map(ask_all, models))
        for model in models:
            asked = [what[0] for what in client.trainer.asked if what[1] == model]
            assert asked == ["create", *(["train"] * 4 + ["step"]) * (each // 5)]
        client.core.state.futures.tidy(kept_seconds=60)
        assert len(client.core.state.futures) == clients * (each + 1)
        client.core.state.futures.tidy(kept_seconds=0)
        assert len(client.core.state.futures) == 0


async def test_of_many_snapshots_the_last_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_requests, "KEPT_SNAPSHOTS", 2)

    async with served(tmp_path) as client:
        session = await client.begin()
        model = await client.model(session)
        for number in range(4):
            saved = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number}
            await client.result(await client.post("save_weights_for_sampler", saved))
        assert len(list(tmp_path.glob("service/snapshots/*/*.pt"))) == 2
        statuses = [(await client.http.get(f"/api/v1/samplers/{session}:sample:{n}")).status_code for n in range(4)]
        assert statuses == [404, 404, 200, 200]


@served_test
async def test_a_session_that_ends_leaves_nothing(client: Client) -> None:
    session = await client.begin()
    model = await client.model(session)
    await client.result(await client.train(model, 1))
    assert (await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})).status_code == 204
    status = client.core.status()
    assert (status.sessions, list(status.models), status.unfinished, len(client.core.state.futures)) == (0, [], 0, 0)
    assert client.trainer.asked[-1] == ("drop", model)
    assert (await client.post("session_heartbeat", {"session_id": session})).status_code == 410


@served_test
async def test_a_session_ends_although_ranks_die_meanwhile(client: Client) -> None:
    """None of its models stays: nobody would ever end them."""
    session = await client.begin()
    models = [await client.model(session, number) for number in range(2)]
    client.trainer.error = EngineError("rank 0 died twice")
    assert (await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})).status_code == 204
    client.trainer.error = None
    assert client.core.status().models == []
    assert [what[1] for what in client.trainer.asked if what[0] == "drop"] == models
    await client.model(await client.begin())


@served_test
async def test_an_answer_that_was_lost_on_its_way_is_there_when_the_client_is_back(client: Client) -> None:
    """As long as its session lives; a client that goes away while it waits misses what comes in then."""
    session = await client.begin()
    model = await client.model(session)
    asked = (await client.train(model, 2)).json()  # waits for the first
    with pytest.raises(httpx.ReadTimeout):
        await client.post("retrieve_future", asked, timeout=httpx.Timeout(60, read=0.1))
    await client.result(await client.train(model, 1))
    await client.core._tidy()
    assert (await client.post("retrieve_future", asked)).status_code == 200


async def test_a_client_that_died_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "TIDY_SECONDS", 0.01)

    shown: list[ServiceStatus] = []

    async with served(tmp_path, session_seconds=0.05) as client:
        await client.model(await client.begin())
        tidying = asyncio.create_task(client.core.tidy(shown.append))
        async with asyncio.timeout(60):
            while client.core.status().models:
                await asyncio.sleep(0.01)
        tidying.cancel()
        assert client.core.status().sessions == 0
        assert len(shown[0].models) == 1


@served_test
async def test_what_is_not_served_is_refused_by_name(client: Client) -> None:
    answer = await client.post("create_custom_loss", {})
    assert answer.status_code == 404
    assert "forward_backward_custom computes them in the client" in answer.json()["detail"]
    old = await client.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.7.0"})
    assert "install tinker 0.38" in old.json()["detail"]
    cut = await client.http.post("/api/v1/create_session", content=b'{"tags": [')
    assert (cut.status_code, "no JSON" in cut.json()["detail"]) == (400, True)
    kind = {"content-type": wire.CONTENT_TYPE}
    cut = await client.http.post(
        "/api/v1/forward_backward", content=train_message("m", 1, [datum(1, 2)])[:-3], headers=kind
    )
    assert (cut.status_code, "no ForwardBackwardRequest" in cut.json()["detail"]) == (400, True)
    large = await client.http.post("/api/v1/forward_backward", content=b"x" * (2**20 + 1), headers=kind)
    assert large.status_code == 413


def test_sparse_tensors_are_made_dense() -> None:
    message = wire._CLASSES["Tensor"](dtype=1, shape=[2, 3])
    message.sparse_csr.values = np.asarray([5, 7], np.float32).tobytes()
    message.sparse_csr.crow_indices = np.asarray([0, 1, 2]).tobytes()
    message.sparse_csr.col_indices = np.asarray([2, 0]).tobytes()
    assert wire._dense("x", message).tolist() == [[0, 0, 5], [7, 0, 0]]
    message.sparse_csr.col_indices = np.asarray([2, 3]).tobytes()
    with pytest.raises(RequestError, match="indices do not fit"):
        wire._dense("x", message)
    message.ClearField("sparse_csr")
    message.dense = b"12345"
    with pytest.raises(RequestError, match="5 bytes are no float32 values"):
        wire._dense("x", message)
    message.dense = b"12345678"
    with pytest.raises(RequestError, match=r"has 2 values, and its shape is \(2, 3\)"):
        wire._dense("x", message)


def test_samples_are_written_as_the_protocol_has_them() -> None:
    sample = SampledTokens(
        token_ids=np.asarray([3, 4], np.int32), logprobs=np.asarray([-1, -2], np.float32), stop_reason=StopReason.LENGTH
    )
    found = read_message("SampleResponse", wire.written_samples(SampleResult(samples=[sample], cached_prompt_tokens=7)))
    assert found.prompt_cache_hit_tokens == 7
    assert found.prompt_logprobs == b""
    (sequence,) = found.sequences
    assert sequence.stop_reason == 1
    assert np.frombuffer(sequence.logprobs, np.float32).tolist() == [-1, -2]


def test_a_gradient_clip_of_zero_does_not_clip() -> None:
    body = {"model_id": "m", "seq_id": 1, "adam_params": {"grad_clip_norm": 0.5, "beta2": 0.99}}
    settings = parsed_body(json.dumps(body).encode(), OptimStepBody).settings()
    assert (settings.max_grad_norm, settings.betas) == (0.5, (0.9, 0.99))


def test_keys_are_made_once_and_read_from_a_file(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.directory.mkdir()
    (key,) = read_keys(config)
    assert key.startswith("tml-")
    assert read_keys(config) == [key]
    assert (config.directory / "api_keys").stat().st_mode & 0o777 == 0o600
    named = config_of(tmp_path, api_keys=str(tmp_path / "keys"))
    for content in ("", "sk-12345678901\n", "tml-\n"):
        (tmp_path / "keys").write_text(content)
        with pytest.raises(ConfigError, match="an API key a line"):
            read_keys(named)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"optimizer": {"lr": 0.1}}}, "clients send the optimizer's settings"),
        ({"training": {"backend": "deepspeed", "zero_stage": 0}}, "cannot switch between models"),
        ({"training": {"lora": {"rank": 4, "dropout": 0.1}}}, "with and without dropout"),
        ({"inference": {"type": "hf", "max_model_len": 8}}, "cannot hold the longest sequence"),
        (
            {"resources": {"device": "cuda", "devices_per_node": 1, "device_mapping": {"training": 0, "inference": 0}}},
            "cannot share GPUs",
        ),
        ({"rollout": {}}, "rollout"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(tmp_path, **changes)
