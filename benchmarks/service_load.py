"""A training service under load: many requests at once from eight clients, two adapters, with sampling.

    python benchmarks/service_load.py                 # 1,000 requests
    python benchmarks/service_load.py --requests 5000

Shown: every request is answered, those of a model are done in order (the losses are those of a model that was asked one
request at a time), memory stays where it was, and what HTTP and the queues add to the trainer's own call.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import yaml
from common import ROOT, Options, finish, say

from roll_like.service.config import load_service_config
from roll_like.service.losses import service_loss
from roll_like.service.server import KEY_HEADER
from roll_like.service.service import RunningService, read_keys, serving
from roll_like.service.types import Datum
from roll_like.service.wire import CONTENT_TYPE

sys.path.insert(0, str(ROOT / "tests"))
from tinker_messages import read_message, train_message
from tiny_model import make_tiny_model

#: Connections to the service; half of them ask for one adapter, half for the other.
CLIENTS = 8
#: Every so many requests of a model there is an optimizer step, and a sampler of its own.
STEP, SAMPLER = 5, 50
PROMPT = [20, 21, 22, 23]


def datum(number: int) -> Datum:
    """Return a short sequence that is another one for each request."""
    tokens = np.asarray([*PROMPT, *(30 + (number * 7 + place) % 400 for place in range(12))], np.int32)
    return Datum(tokens=tokens[:-1], inputs={"target_tokens": tokens[1:].astype(np.int64)})


@dataclass
class Model:
    """A model, and what came of its requests.

    Attributes:
        model_id: Its name.
        session: Its session.
        losses: Of each `forward_backward`, by its number.
        sampled: Tokens of samples.
        refused: Answers that were errors.
    """

    model_id: str
    session: str
    losses: dict[int, float] = field(default_factory=dict)
    sampled: int = 0
    refused: list[str] = field(default_factory=list)
    sampler: str = ""


class Client:
    """Speaks the protocol."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def post(self, path: str, body: Any) -> Any:
        answer = await self._http.post(f"/api/v1/{path}", json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    async def result(self, asked: Any) -> Any:
        """Poll for a result."""
        while True:
            found = await self._http.post("/api/v1/retrieve_future", json={"request_id": asked["request_id"]})
            if found.status_code != 408:
                found.raise_for_status()
                return found.json() if found.headers["content-type"].startswith("application/json") else found.content

    async def begin(self) -> Model:
        session = (await self.post("create_session", {"sdk_version": "0.38.0"}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
        made = await self.result(await self.post("create_model", body))
        return Model(made["model_id"], session)

    async def train(self, model: Model, number: int) -> float:
        """Ask for a gradient, and return the loss."""
        body = train_message(model.model_id, number, [datum(number)], "cross_entropy")
        sent = await self._http.post("/api/v1/forward_backward", content=body, headers={"content-type": CONTENT_TYPE})
        sent.raise_for_status()
        found = await self.result(sent.json())
        if isinstance(found, dict):
            model.refused.append(found["error"])
            return float("nan")
        loss: float = read_message("ForwardBackwardOutput", found).metrics["loss:sum"]
        return loss

    async def ask(self, model: Model, number: int) -> None:
        """Send the request that has this number."""
        if number % SAMPLER == 0:
            body = {"model_id": model.model_id, "seq_id": number, "sampling_session_seq_id": number}
            found = await self.result(await self.post("save_weights_for_sampler", body))
            model.sampler = found.get("sampling_session_id", "")
        elif number % STEP == 0:
            body = {"model_id": model.model_id, "seq_id": number, "adam_params": {"learning_rate": 1e-3}}
            found = await self.result(await self.post("optim_step", body))
        else:
            model.losses[number] = await self.train(model, number)
            return
        if "error" in found:
            model.refused.append(found["error"])

    async def sample(self, model: Model, number: int) -> None:
        """Sample with the last weights that were promised."""
        if not model.sampler:
            return
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        body = {
            "sampling_session_id": model.sampler,
            "seq_id": number,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 8, "seed": number},
        }
        found = await self.result(await self.post("asample", body))
        if isinstance(found, dict):
            model.refused.append(found["error"])
        else:
            model.sampled += 1


async def load(clients: Sequence[Client], models: Sequence[Model], first: int, last: int) -> None:
    """Send the requests of all models at once: each client takes the next number, some ahead of others."""

    async def work(client: Client, model: Model, numbers: Any) -> None:
        for number in numbers:
            await asyncio.gather(client.ask(model, number), client.sample(model, number))

    numbers = [iter(range(first, last + 1)) for _ in models]
    await asyncio.gather(
        *(
            work(client, models[index % len(models)], numbers[index % len(models)])
            for index, client in enumerate(clients)
        )
    )


def memory_mib() -> float:
    """Return the memory of this process and all that it started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(each.memory_info().rss for each in processes if each.is_running()) / 2**20


async def milliseconds(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


async def measured(service: RunningService, key: str, requests: int, calls: int) -> dict[str, Any]:
    """Load a service, and return what was seen."""
    limits = httpx.Limits(max_connections=None)
    core = service.core
    async with httpx.AsyncClient(base_url=service.url, headers={KEY_HEADER: key}, timeout=120, limits=limits) as http:
        clients = [Client(http) for _ in range(CLIENTS)]
        models = [await clients[0].begin() for _ in range(2)]
        each = requests // len(models)
        warm = each // 4
        await load(clients, models, 1, warm)
        before = memory_mib()
        began = time.perf_counter()
        await load(clients, models, warm + 1, each)
        seconds = time.perf_counter() - began
        after = memory_mib()

        calm = await clients[0].begin()
        for number in range(1, each + 1):
            await clients[0].ask(calm, number)
        differences = [abs(model.losses[number] - loss) for model in models for number, loss in calm.losses.items()]

        numbers = itertools.count(each + 1)
        told = await milliseconds(lambda: clients[0].train(calm, next(numbers)), calls)
        loss, data = service_loss("cross_entropy", {}), [datum(each)]
        trainer = core._trainer

        async def bare() -> None:
            await core.state.on_ranks(trainer.train, calm.model_id, loss, data, backward=True)

        direct = await milliseconds(bare, calls)
    return {
        "requests": sum(len(model.losses) for model in models) + 2 * (each // STEP),
        "samples": sum(model.sampled for model in models),
        "lost": sum(each - each // STEP - len(model.losses) for model in models),
        "refused": sum(len(model.refused) for model in [*models, calm]),
        "largest_loss_difference": max(differences),
        "requests_per_second": (2 * (each - warm)) / seconds,
        "memory_before_mib": before,
        "memory_after_mib": after,
        "request_ms": told,
        "bare_call_ms": direct,
        "added_ms": told - direct,
    }


def parser() -> Options:
    arguments = Options(__doc__, requests=120, calls=5, engine="hf")
    arguments.add_argument("--requests", type=int, default=1000, help="requests of both models together")
    arguments.add_argument("--calls", type=int, default=100, help="calls whose time is measured")
    arguments.add_argument("--engine", default="vllm", help="inference.type")
    return arguments


def main() -> None:
    """Start a service with a tiny random model, load it, and print what was seen."""
    arguments = parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inference = {"type": arguments.engine, "max_running": 16}
        if arguments.engine == "vllm":
            inference["kv_cache_gib"] = 0.1
        config = {
            "output_dir": str(folder / "runs"),
            "model": {"path": str(make_tiny_model(folder / "model", dtype="float32")), "dtype": "float32"},
            "model_name": "tiny",
            "training": {"lora": {"rank": 8}},
            "inference": inference,
            "resources": {
                "device": "cpu",
                "devices_per_node": 2,
                "device_mapping": {"training": "0", "inference": "1"},
            },
            "max_sequence_tokens": 64,
            "port": 0,
        }
        (folder / "service.yaml").write_text(yaml.safe_dump(config))
        loaded = load_service_config(folder / "service.yaml")
        with serving(loaded) as service:
            say(f"serving at {service.url}")
            figures = asyncio.run(measured(service, read_keys(loaded)[0], arguments.requests, arguments.calls))
    finish(arguments, {"benchmark": "service_load", **figures})


if __name__ == "__main__":
    main()
