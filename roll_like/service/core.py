"""What a service does, without HTTP: every request of the protocol is a method."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from roll_like.config.load import dump_config
from roll_like.errors import RollLikeError
from roll_like.inference.interface import GenerateRequest, Sampling, derived_seed
from roll_like.service.checkpoints import CONFIG, STATE, CheckpointShelf, StoredCheckpoint, expiry
from roll_like.service.config import ServiceConfig
from roll_like.service.delivery import WeightDelivery
from roll_like.service.futures import Answer, Futures
from roll_like.service.hosted import HostedModel, ModelQueue, Sampler, Session
from roll_like.service.losses import service_loss
from roll_like.service.protocol import (
    AdapterBody,
    CopyBody,
    CreateModelBody,
    LoadBody,
    OptimStepBody,
    SampleBody,
    SamplingSessionBody,
    SaveBody,
    SaveForSamplerBody,
    SessionBody,
)
from roll_like.service.rank import AdapterRequest
from roll_like.service.sampler import UNTRAINED, Snapshot, SnapshotSampler
from roll_like.service.status import ModelLine, Rates, ServiceStatus
from roll_like.service.trainer import ModelsTrainer
from roll_like.service.types import RequestError, SampledTokens, SampleResult, TrainRequest
from roll_like.service.wire import written_outputs, written_samples
from roll_like.types import FloatArray, IntArray, StopReason

_log = logging.getLogger(__name__)

R = TypeVar("R")
#: Weights for samplers that no checkpoint has, which a session may have at a time; the oldest go first.
KEPT_SNAPSHOTS = 16
#: How often sessions, results and checkpoints are looked at that have had their time. Seconds.
TIDY_SECONDS = 5.0


class ServiceCore:
    """Sessions, models, samplers, results and checkpoints; runs on one event loop.

    Args:
        config: The service's configuration.
        trainer: The ranks.
        delivery: Trainer to engines.
        sampler: Makes the engines' side, given what sends a snapshot's weights.
        vocabulary: Tokens are below this.
    """

    def __init__(
        self,
        config: ServiceConfig,
        trainer: ModelsTrainer,
        delivery: WeightDelivery,
        sampler: Callable[[Callable[[Snapshot], Awaitable[None]]], SnapshotSampler],
        *,
        vocabulary: int,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._delivery = delivery
        self._sampler = sampler(self._push)
        self._vocabulary = vocabulary
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, HostedModel] = {}
        self.futures = Futures()
        self.shelf = CheckpointShelf(config.directory / "models")
        self._trained_tokens = self._sampled_tokens = 0
        self._rates = Rates()
        self._snapshots = config.directory / "snapshots"
        # what ranks do comes one after the other, in the order in which it was asked for
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._files = ThreadPoolExecutor(2, thread_name_prefix="checkpoints")

    # ---- sessions ------------------------------------------------------------------------------

    def create_session(self, owner: str, body: SessionBody) -> Answer:
        """Begin a session of an API key's owner."""
        session = Session(
            session_id=str(uuid.uuid4()),
            owner=owner,
            user_metadata=body.user_metadata,
            display_name=body.display_name,
        )
        self._sessions[session.session_id] = session
        return {"type": "create_session", "session_id": session.session_id}

    def session(self, owner: str, session_id: str) -> Session:
        """Return a session, and note that its client lives.

        Raises:
            KeyError: There is none of this owner.
        """
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise KeyError(f"there is no session {session_id}; it may have ended")
        session.seen = time.monotonic()
        return session

    def sessions(self, owner: str) -> list[Session]:
        """Return the sessions of an owner."""
        return [session for session in self._sessions.values() if session.owner == owner]

    async def end_session(self, owner: str, session_id: str) -> None:
        """End a session: its models are unloaded, and what it waits for is dropped."""
        await self._end(self.session(owner, session_id))

    async def _end(self, session: Session) -> None:
        self._sessions.pop(session.session_id, None)
        self.futures.drop(session.session_id)
        for model_id in session.models:
            await self._unload(model_id)
        await self._in_files(shutil.rmtree, self._snapshots / session.session_id, True)

    def owns(self, owner: str) -> Callable[[str], bool]:
        """Return what says whether a session is an owner's."""

        def is_own(session_id: str) -> bool:
            session = self._sessions.get(session_id)
            return session is not None and session.owner == owner

        return is_own

    # ---- models --------------------------------------------------------------------------------

    def model(self, owner: str, model_id: str) -> HostedModel:
        """Return a model, and note that its client lives.

        Raises:
            KeyError: There is none of this owner.
        """
        model = self._models.get(model_id)
        if model is None or not self.owns(owner)(model.session):
            raise KeyError(f"there is no model {model_id}; it may have been unloaded")
        self.session(owner, model.session)
        model.last_request = datetime.now(UTC)
        return model

    def models(self, owner: str) -> list[HostedModel]:
        """Return the models of an owner that are loaded."""
        return [model for model in self._models.values() if self.owns(owner)(model.session)]

    def create_model(self, owner: str, body: CreateModelBody) -> str:
        """Begin a model, and return the id of the result."""
        session = self.session(owner, body.session_id)
        model_id, request_id = _new_model(body.session_id, body.model_seq_id)
        if request_id in self.futures:
            return request_id

        async def work() -> Answer:
            self._refuse_base(body.base_model)
            rank, adapter = self._adapter(body.lora_config)
            await self._begin(session, model_id, rank, adapter, body.user_metadata)
            return {"type": "create_model", "model_id": model_id}

        self.futures.start(request_id, session.session_id, work)
        return request_id

    def _adapter(self, wanted: AdapterBody | None) -> tuple[int | None, AdapterRequest | None]:
        """Return a model's rank, and its adapters; None for a whole model."""
        lora, whole = self._config.training.lora, wanted is None or wanted.rank == 0
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

    async def _begin(
        self,
        session: Session,
        model_id: str,
        rank: int | None,
        adapter: AdapterRequest | None,
        user_metadata: dict[str, Any] | None,
    ) -> HostedModel:
        most = self._config.max_models if self._config.training.lora is not None else 1
        if len(self._models) >= most:
            raise RequestError(
                f"{len(self._models)} models are loaded, and this service loads {most} at a time (max_models; one "
                "without training.lora)",
                fix="unload one: end the session of a client that has finished",
            )
        model = self._models[model_id] = HostedModel(
            model_id=model_id,
            session=session.session_id,
            lora_rank=rank,
            queue=ModelQueue(self.futures),
            user_metadata=user_metadata,
        )
        session.models.append(model_id)
        try:
            await self._on_ranks(self._trainer.create, model_id, adapter)
        except BaseException:
            await self._unload(model_id)
            raise
        return model

    async def unload(self, owner: str, model_id: str) -> Answer:
        """Forget a model; what was saved of it stays."""
        model = self.model(owner, model_id)
        await self._unload(model.model_id)
        return {"type": "unload_model", "model_id": model_id}

    async def _unload(self, model_id: str) -> None:
        model = self._models.pop(model_id, None)
        if model is None:
            return
        model.queue.close()
        session = self._sessions.get(model.session)
        if session is not None:
            session.models.remove(model_id)
        await self._on_ranks(self._trainer.drop, model_id)

    def info(self, owner: str, model_id: str) -> Answer:
        """Return what there is to know of a model."""
        model = self.model(owner, model_id)
        name = self._config.base_model
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": name,
            "is_lora": model.lora_rank is not None,
            "lora_rank": model.lora_rank,
            "model_data": {"model_name": name, "tokenizer_id": self._config.model.tokenizer or name},
        }

    def _refuse_base(self, name: str | None) -> None:
        if name is not None and name != self._config.base_model:
            raise RequestError(f"the base model {name!r} is not served; this service has {self._config.base_model!r}")

    # ---- training ------------------------------------------------------------------------------

    def _enqueue(self, model: HostedModel, number: int, work: Callable[[], Awaitable[Answer]]) -> str:
        """Take a request of a model in its place, and return the id of its result; a repeated one is the same."""
        request_id = f"{model.model_id}:{number}"
        if request_id not in self.futures:
            if number < 1:
                raise RequestError(f"seq_id is {number}; requests of a model are numbered from 1")
            self.futures.open(request_id, model.session)
            try:
                model.queue.put(number, request_id, work)
            except RequestError as error:
                self.futures.refuse(request_id, error)
        return request_id

    def refuse(self, owner: str, model_id: str, number: int, error: RequestError) -> str:
        """Give a request its place, where nothing is done but refuse it."""

        async def work() -> Answer:
            raise error

        return self._enqueue(self.model(owner, model_id), number, work)

    def train(self, owner: str, request: TrainRequest) -> str:
        """Compute a loss, and add its gradient where that is wanted."""
        model = self.model(owner, request.model_id)

        async def work() -> Answer:
            loss = service_loss(request.loss, request.settings)
            data = await self._in_files(request.read)
            loss.refuse(data, vocabulary=self._vocabulary, max_tokens=self._config.max_sequence_tokens)
            backward = not request.forward_only
            told = await self._on_ranks(self._trainer.train, model.model_id, loss, data, backward=backward)
            self._trained_tokens += sum(len(datum.tokens) for datum in data)
            metrics = {"loss:sum": float(np.sum([output.loss for output in told]))}
            return written_outputs([{"logprobs": output.logprobs} for output in told], metrics)

        return self._enqueue(model, request.seq_id, work)

    def optim_step(self, owner: str, body: OptimStepBody) -> str:
        """Move a model by the gradient that was added up."""
        model = self.model(owner, body.model_id)

        async def work() -> Answer:
            settings = body.settings()
            norm = await self._on_ranks(self._moved, model, self._trainer.step, settings)
            return {"metrics": {"grad_norm:mean": norm, "lr:mean": settings.lr}}

        return self._enqueue(model, body.seq_id, work)

    @staticmethod
    def _moved(model: HostedModel, work: Callable[..., R], *arguments: Any, **named: Any) -> R:
        """Have ranks change a model's weights. Counted on their thread: what they do next sees it."""
        model.updates += 1
        return work(model.model_id, *arguments, **named)

    # ---- weights -------------------------------------------------------------------------------

    def save(self, owner: str, body: SaveBody) -> str:
        """Write a model and its optimizer."""
        model = self.model(owner, body.model_id)

        async def work() -> Answer:
            about = self._about(model, body, "weights", body.path or f"{body.seq_id:06d}")
            path = await self._on_ranks(
                self.shelf.write,
                about,
                lambda folder: self._write(model, folder),
                overwrite=body.overwrite,
            )
            return {"type": "save_weights", "path": path}

        return self._enqueue(model, body.seq_id, work)

    def _write(self, model: HostedModel, folder: Path) -> None:
        self._trainer.save(model.model_id, folder / STATE)
        (folder / CONFIG).write_text(dump_config(self._config))

    def save_for_sampler(self, owner: str, body: SaveForSamplerBody) -> str:
        """Write a model's weights for samplers: by a name, or for a sampling session of its own."""
        model = self.model(owner, body.model_id)
        session = self.session(owner, model.session)

        async def work() -> Answer:
            kind = "save_weights_for_sampler"
            if body.path is not None:
                about = self._about(model, body, "sampler_weights", body.path)
                path = await self._on_ranks(
                    self.shelf.write,
                    about,
                    lambda folder: self._trainer.snapshot(model.model_id, folder / "weights"),
                    overwrite=body.overwrite,
                )
                return {"type": kind, "path": path}
            if body.sampling_session_seq_id is None:
                raise RequestError("expected path, or sampling_session_seq_id")
            sampler_id = _sampler_id(session.session_id, body.sampling_session_seq_id)
            file = self._snapshots / session.session_id / f"{model.model_id.rpartition(':')[2]}-{body.seq_id:06d}"
            snapshot = await self._on_ranks(self._snapshot, model, file)
            session.samplers[sampler_id] = Sampler(sampler_id, snapshot)
            session.ephemeral.append(sampler_id)
            await self._prune(session)
            return {"type": kind, "sampling_session_id": sampler_id}

        return self._enqueue(model, body.seq_id, work)

    def _snapshot(self, model: HostedModel, file: Path) -> Snapshot:
        self._trainer.snapshot(model.model_id, file)
        return Snapshot(file=file, model_id=model.model_id, updates=model.updates)

    async def _prune(self, session: Session) -> None:
        while len(session.ephemeral) > KEPT_SNAPSHOTS:
            old = session.samplers.pop(session.ephemeral.pop(0))
            if old.snapshot.file is not None:
                await self._in_files(_delete_files, old.snapshot.file)

    def _about(self, model: HostedModel, body: SaveBody, kind: Any, name: str) -> StoredCheckpoint:
        return StoredCheckpoint(
            model_id=model.model_id,
            kind=kind,
            name=name,
            time=datetime.now(UTC),
            base_model=self._config.base_model,
            lora_rank=model.lora_rank,
            updates=model.updates,
            user_metadata=body.user_metadata,
            expires_at=expiry(body.ttl_seconds),
        )

    def load(self, owner: str, body: LoadBody) -> str:
        """Load a checkpoint into a model, or into a new one."""
        if body.model_id is not None and body.seq_id is not None:
            model = self.model(owner, body.model_id)

            async def into_model() -> Answer:
                await self._load(model, body)
                return {"type": "load_weights", "path": body.path, "model_id": model.model_id}

            return self._enqueue(model, body.seq_id, into_model)
        assert body.session_id is not None, "a rule of the body"
        assert body.model_seq_id is not None, "a rule of the body"
        session = self.session(owner, body.session_id)
        model_id, request_id = _new_model(body.session_id, body.model_seq_id)
        if request_id in self.futures:
            return request_id

        async def into_new() -> Answer:
            self._refuse_base(body.base_model)
            stored = self.shelf.find(body.path, "weights")
            wanted = None if stored.lora_rank is None else AdapterBody(rank=stored.lora_rank)
            rank, adapter = self._adapter(wanted)
            new = await self._begin(session, model_id, rank, adapter, body.user_metadata)
            try:
                await self._load(new, body)
            except BaseException:
                await self._unload(model_id)
                raise
            return {"type": "load_weights", "path": body.path, "model_id": model_id}

        self.futures.start(request_id, session.session_id, into_new)
        return request_id

    async def _load(self, model: HostedModel, body: LoadBody) -> None:
        stored = self.shelf.find(body.path, "weights")
        self._refuse_base(stored.base_model)
        if stored.lora_rank != model.lora_rank:
            raise RequestError(
                f"{body.path} has adapters of rank {stored.lora_rank}, and the model has {model.lora_rank}; create a "
                "model from the checkpoint with create_training_client_from_state"
            )
        folder = self.shelf.folder(stored) / STATE
        await self._on_ranks(self._moved, model, self._trainer.load, folder, optimizer=body.optimizer)

    def weights_info(self, path: str) -> Answer:
        """Return what a checkpoint is of."""
        stored = self.shelf.find(path)
        lora = stored.lora_rank is not None
        return {
            "base_model": stored.base_model,
            "is_lora": lora,
            "lora_rank": stored.lora_rank,
            **({"train_unembed": False, "train_mlp": True, "train_attn": True} if lora else {}),
        }

    async def copy(self, body: CopyBody) -> Answer:
        """Copy a checkpoint; the copy belongs to a model of its own, which cannot be trained."""
        stored = self.shelf.find(body.source_path)
        copied = stored.model_copy(
            update={
                "model_id": f"{uuid.uuid4()}:copy:0",
                "time": datetime.now(UTC),
                "expires_at": expiry(body.ttl_seconds),
            }
        )
        source = self.shelf.folder(stored)
        path = await self._in_files(self.shelf.write, copied, lambda folder: shutil.copytree(source, folder))
        return {"tinker_path": path}

    # ---- samples -------------------------------------------------------------------------------

    def create_sampler(self, owner: str, body: SamplingSessionBody) -> Answer:
        """Begin a sampling session with a checkpoint's weights, or with those of the model before any training."""
        session = self.session(owner, body.session_id)
        sampler_id = _sampler_id(body.session_id, body.sampling_session_seq_id)
        self._refuse_base(body.base_model)
        if sampler_id not in session.samplers:
            snapshot = UNTRAINED
            if body.model_path is not None:
                stored = self.shelf.find(body.model_path, "sampler_weights")
                self._refuse_base(stored.base_model)
                snapshot = Snapshot(file=self.shelf.folder(stored) / "weights")
            elif body.base_model is None:
                raise RequestError("expected base_model or model_path")
            session.samplers[sampler_id] = Sampler(sampler_id, snapshot, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def sampler(self, owner: str, sampler_id: str) -> tuple[Session, Sampler]:
        """Return a sampling session.

        Raises:
            KeyError: There is none of this owner.
        """
        session = self._sessions.get(sampler_id.partition(":")[0])
        if session is None or session.owner != owner or sampler_id not in session.samplers:
            raise KeyError(
                f"there is no sampler {sampler_id}: its session has ended, or {KEPT_SNAPSHOTS} later ones were made in "
                "this session; save weights for samplers by a name to keep them"
            )
        session.seen = time.monotonic()
        return session, session.samplers[sampler_id]

    def describe_sampler(self, owner: str, sampler_id: str) -> Answer:
        """Return what there is to know of a sampling session."""
        _, sampler = self.sampler(owner, sampler_id)
        return {"sampler_id": sampler_id, "base_model": self._config.base_model, "model_path": sampler.model_path}

    def join_sampler(self, owner: str, sampler_id: str) -> Answer:
        """Number a further client of a sampling session."""
        _, sampler = self.sampler(owner, sampler_id)
        sampler.clients += 1
        return {"type": "join_sampling_session", "client_counter": sampler.clients}

    def sample(self, owner: str, body: SampleBody) -> tuple[str, list[str]]:
        """Sample; return the id of the result, and one of each sample."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise RequestError("expected sampling_session_id and seq_id; other samples are not served")
        session, sampler = self.sampler(owner, body.sampling_session_id)
        request_id = f"{sampler.sampler_id}:{body.seq_id}"
        names = [f"{request_id}:{number}" for number in range(body.num_samples)]
        if request_id not in self.futures:
            self.futures.start(request_id, session.session_id, lambda: self._sample(sampler.snapshot, body, names))
        return request_id, names

    async def _sample(self, snapshot: Snapshot, body: SampleBody, names: Sequence[str]) -> Answer:
        body.refuse()
        tokens = body.prompt.tokens
        self._refuse_prompt(tokens, body)
        params = body.sampling_params
        sampling = Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            max_tokens=params.max_tokens or self._config.max_sequence_tokens - len(tokens),
            stop=params.stop_strings,
            stop_ids=params.stop_ids,
        )
        requests = [
            GenerateRequest(
                request_id=name,
                prompt_ids=tokens,
                sampling=sampling,
                seed=derived_seed(params.seed, number),
            )
            for number, name in enumerate(names)
        ]
        found = await self._sampler.generate(snapshot, requests, key=names[0])
        self._sampled_tokens += sum(len(each.token_ids) for each in found)
        logprobs = await self._prompt_logprobs(snapshot, tokens, body) if body.prompt_logprobs else None
        return written_samples(
            SampleResult(
                samples=[
                    SampledTokens(
                        token_ids=each.token_ids,
                        logprobs=each.logprobs,
                        stop_reason=StopReason.STOP if each.stop_reason is StopReason.STOP else StopReason.LENGTH,
                    )
                    for each in found
                ],
                prompt_logprobs=logprobs,
                cached_prompt_tokens=found[0].cached_prompt_tokens,
            )
        )

    async def _prompt_logprobs(self, snapshot: Snapshot, tokens: IntArray, body: SampleBody) -> FloatArray:
        found = np.full(len(tokens), np.nan, np.float32)
        if len(tokens) > 1:
            found[1:] = await self._sampler.prompt_logprobs(snapshot, tokens)
        if body.prompt_logprobs_last_n is not None:
            found[: len(tokens) - body.prompt_logprobs_last_n] = np.nan
        return found

    def _refuse_prompt(self, tokens: IntArray, body: SampleBody) -> None:
        window = self._config.max_sequence_tokens
        if not 0 < len(tokens) < window:
            raise RequestError(f"the prompt has {len(tokens)} tokens; this service takes 1 to {window - 1}")
        if len(tokens) + (body.sampling_params.max_tokens or 1) > window:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {body.sampling_params.max_tokens}, together "
                f"more than max_sequence_tokens: {window}"
            )
        wrong = (tokens < 0) | (tokens >= self._vocabulary)
        if wrong.any():
            raise RequestError(
                f"the prompt has token {int(tokens[wrong][0])}; the vocabulary is 0 to {self._vocabulary - 1}"
            )
        if body.prompt_logprobs_last_n is not None and not 0 < body.prompt_logprobs_last_n < len(tokens):
            raise RequestError(
                f"prompt_logprobs_last_n is {body.prompt_logprobs_last_n}; expected 1 to {len(tokens) - 1}"
            )

    async def _push(self, snapshot: Snapshot) -> None:
        """Send the weights of a snapshot to the engines."""
        model = self._models.get(snapshot.model_id or "")
        if model is not None and model.updates == snapshot.updates:
            # the model may move before the ranks come to this; then they read what they wrote
            await self._on_ranks(self._push_present, model, snapshot)
        else:
            await self._on_ranks(self._trainer.push, self._delivery.send, file=snapshot.file)

    def _push_present(self, model: HostedModel, snapshot: Snapshot) -> None:
        unmoved = model.updates == snapshot.updates and model.model_id in self._models
        chosen = model.model_id if unmoved else None
        self._trainer.push(self._delivery.send, model=chosen, file=snapshot.file)

    def catch_up(self) -> None:
        """Send engines that were replaced what the others have; called on another thread than the loop's."""
        self._thread.submit(self._catch_up).result()

    def _catch_up(self) -> None:
        held = self._sampler.held
        if held is not None:  # else they get what all get next
            with self._delivery.to_stale() as send:
                if send is not None:
                    self._trainer.push(send, file=held.file)

    # ---- housekeeping --------------------------------------------------------------------------

    async def tidy(self, show: Callable[[ServiceStatus], None]) -> None:
        """Look, again and again, for what has had its time: sessions of dead clients, results, checkpoints.

        Args:
            show: Takes what is going on, on another thread.
        """
        while True:
            try:
                await self._in_files(show, self.status())
                await asyncio.sleep(TIDY_SECONDS)
                await self._tidy()
            except (OSError, RollLikeError):
                _log.exception("tidying failed; it is tried again")
                await asyncio.sleep(TIDY_SECONDS)

    async def _tidy(self) -> None:
        self.futures.tidy()
        for model in self._models.values():
            model.queue.give_up_gaps()
        until = time.monotonic() - self._config.session_seconds
        for session in [each for each in self._sessions.values() if each.seen < until]:
            await self._end(session)
        await self._in_files(self.shelf.all)

    def status(self) -> ServiceStatus:
        """Return what is going on, with rates since the last call."""
        trained, sampled = self._rates.of(self._trained_tokens, self._sampled_tokens)
        return ServiceStatus(
            name=self._config.name,
            base_model=self._config.base_model,
            sessions=len(self._sessions),
            models=[
                ModelLine(model=each.model_id, rank=each.lora_rank, updates=each.updates, queued=len(each.queue))
                for each in self._models.values()
            ],
            unfinished=self.futures.unfinished,
            train_tokens_per_second=trained,
            sampled_tokens_per_second=sampled,
            requests=self.futures.finished,
            failed=self.futures.failed,
        )

    async def _on_ranks(self, work: Callable[..., R], *arguments: Any, **named: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*arguments, **named))

    async def _in_files(self, work: Callable[..., R], *arguments: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._files, work, *arguments)

    def close(self) -> None:
        """Let go of threads."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._files.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self._snapshots, ignore_errors=True)


def _new_model(session_id: str, number: int) -> tuple[str, str]:
    """Return the id of a session's model, as its client derives it too, and of the result of making it."""
    model_id = f"{session_id}:train:{number}"
    return model_id, f"{model_id}:0"


def _sampler_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def _delete_files(prefix: Path) -> None:
    for file in prefix.parent.glob(f"{prefix.name}.rank_*.pt"):
        file.unlink(missing_ok=True)
