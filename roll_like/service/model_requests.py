"""Requests about models: begin one, train it, end it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from roll_like.service.futures import Answer
from roll_like.service.hosted import HostedModel, ModelQueue, Session
from roll_like.service.losses import service_loss
from roll_like.service.protocol import AdapterBody, CreateModelBody, OptimStepBody
from roll_like.service.rank import AdapterRequest
from roll_like.service.state import ServiceState
from roll_like.service.trainer import ModelsTrainer
from roll_like.service.types import RequestError, TrainRequest
from roll_like.service.wire import written_outputs

R = TypeVar("R")


class ModelRequests:
    """Runs on the service's event loop."""

    def __init__(self, state: ServiceState, trainer: ModelsTrainer) -> None:
        self._state = state
        self._trainer = trainer

    def create(self, owner: str, body: CreateModelBody) -> str:
        """Begin a model, and return the id of the result."""
        state = self._state
        session = state.session(owner, body.session_id)
        model_id, request_id = new_model(body.session_id, body.model_seq_id)
        if request_id in state.futures:
            return request_id

        async def work() -> Answer:
            state.refuse_base(body.base_model)
            await self.begin(session, model_id, body.lora_config, body.user_metadata)
            return {"type": "create_model", "model_id": model_id}

        state.futures.start(request_id, session.session_id, work)
        return request_id

    async def begin(
        self, session: Session, model_id: str, wanted: AdapterBody | None, user_metadata: dict[str, Any] | None
    ) -> HostedModel:
        """Begin a model of a session: adapters, or a whole model where none are wanted.

        Raises:
            RequestError: The service has no such models, or no room for one more.
        """
        state = self._state
        rank, adapter = self._adapter(wanted)
        most = state.config.max_models if state.config.training.lora is not None else 1
        if len(state.models) >= most:
            raise RequestError(
                f"this service has {len(state.models)} models, and {most} is the most (max_models; one without "
                "training.lora)",
                fix="unload one: end the session of a client that has finished",
            )
        model = state.models[model_id] = HostedModel(
            model_id=model_id,
            session=session.session_id,
            lora_rank=rank,
            queue=ModelQueue(state.futures),
            user_metadata=user_metadata,
        )
        session.models.append(model_id)
        try:
            await state.on_ranks(self._trainer.create, model_id, adapter)
        except BaseException:
            await self.drop(model_id)
            raise
        return model

    def _adapter(self, wanted: AdapterBody | None) -> tuple[int | None, AdapterRequest | None]:
        """Return a model's rank, and its adapters; None for a whole model."""
        lora, whole = self._state.config.training.lora, wanted is None or wanted.rank == 0
        if lora is None and not whole:
            raise RequestError(
                "this service trains whole models: its configuration has no training.lora",
                fix="create the model with rank=0, or start the service with training.lora",
            )
        if lora is not None and whole:
            raise RequestError(
                "this service trains adapters: a rank of 0 asks for a whole model",
                fix="create the model with a rank, or start the service without training.lora",
            )
        if wanted is None or lora is None:
            return None, None
        if wanted.rank > lora.rank:
            raise RequestError(
                f"a rank of {wanted.rank} is more than this service has (training.lora.rank: {lora.rank})",
                fix=f"create the model with rank={lora.rank} or less, or start the service with more",
            )
        return wanted.rank, AdapterRequest(rank=wanted.rank, seed=wanted.seed)

    async def unload(self, owner: str, model_id: str) -> Answer:
        """Forget a model; what was saved of it stays."""
        model = self._state.model(owner, model_id)
        await self.drop(model.model_id)
        return {"type": "unload_model", "model_id": model_id}

    async def drop(self, model_id: str) -> None:
        """Forget a model, if it is there."""
        model = self._state.models.pop(model_id, None)
        if model is None:
            return
        model.queue.close()
        session = self._state.sessions.get(model.session)
        if session is not None:
            session.models.remove(model_id)
        await self._state.on_ranks(self._trainer.drop, model_id)

    def info(self, owner: str, model_id: str) -> Answer:
        """Return what there is to know of a model."""
        model, config = self._state.model(owner, model_id), self._state.config
        name = config.base_model
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": name,
            "is_lora": model.lora_rank is not None,
            "lora_rank": model.lora_rank,
            "model_data": {"model_name": name, "tokenizer_id": config.model.tokenizer or name},
        }

    def train(self, owner: str, request: TrainRequest) -> str:
        """Compute a loss, and add its gradient where that is wanted."""
        state = self._state
        model = state.model(owner, request.model_id)

        async def work() -> Answer:
            loss = service_loss(request.loss, request.settings)
            data = await state.in_files(request.read)
            loss.refuse(data, vocabulary=state.vocabulary, max_tokens=state.config.max_sequence_tokens)
            backward = not request.forward_only
            told = await state.on_ranks(self._trainer.train, model.model_id, loss, data, backward=backward)
            state.trained_tokens += sum(len(datum.tokens) for datum in data)
            metrics = {"loss:sum": float(np.sum([output.loss for output in told]))}
            return written_outputs([{"logprobs": output.logprobs} for output in told], metrics)

        return state.enqueue(model, request.seq_id, work)

    def optim_step(self, owner: str, body: OptimStepBody) -> str:
        """Move a model by the gradient that was added up."""
        model = self._state.model(owner, body.model_id)

        async def work() -> Answer:
            settings = body.settings()
            norm = await self._state.on_ranks(counted_move, model, self._trainer.step, settings)
            return {"metrics": {"grad_norm:mean": norm, "lr:mean": settings.lr}}

        return self._state.enqueue(model, body.seq_id, work)


def counted_move(model: HostedModel, work: Callable[..., R], *arguments: Any, **named: Any) -> R:
    """Have ranks change a model's weights. Counted on their thread: what they do next sees it."""
    model.updates += 1
    return work(model.model_id, *arguments, **named)


def new_model(session_id: str, number: int) -> tuple[str, str]:
    """Return the id of a session's model, as its client derives it too, and of the result of making it."""
    model_id = f"{session_id}:train:{number}"
    return model_id, f"{model_id}:0"
