"""Requests about weights: save them, load them, copy them."""

from __future__ import annotations

import shutil
import uuid
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from roll_like.config.load import dump_config
from roll_like.run.checkpoint import read_checkpoint, save_checkpoint
from roll_like.service.checkpoints import CONFIG, STATE, StoredCheckpoint, expiry
from roll_like.service.futures import Answer
from roll_like.service.hosted import HostedModel, Sampler, Session, sampler_name
from roll_like.service.model_requests import ModelRequests, counted_move, new_model
from roll_like.service.protocol import AdapterBody, CopyBody, LoadBody, SaveBody, SaveForSamplerBody
from roll_like.service.snapshots import Snapshot, delete_files
from roll_like.service.state import ServiceState
from roll_like.service.trainer import ModelsTrainer
from roll_like.service.types import RequestError

#: Weights for samplers that no checkpoint has, which a session may have at a time; the oldest go first.
KEPT_SNAPSHOTS = 16


class WeightRequests:
    """Runs on the service's event loop."""

    def __init__(self, state: ServiceState, trainer: ModelsTrainer, models: ModelRequests) -> None:
        self._state = state
        self._trainer = trainer
        self._models = models

    # ---- saving --------------------------------------------------------------------------------

    def save(self, owner: str, body: SaveBody) -> str:
        """Write a model and its optimizer."""
        state = self._state
        model = state.model(owner, body.model_id)

        async def work() -> Answer:
            about = self._about(model, body, "weights", body.path or f"{body.seq_id:06d}")
            path = await state.on_ranks(
                state.shelf.write,
                about,
                lambda folder: self._write(model, folder),
                overwrite=body.overwrite,
            )
            return {"type": "save_weights", "path": path}

        return state.enqueue(model, body.seq_id, work)

    def _write(self, model: HostedModel, folder: Path) -> None:
        folder.mkdir()
        save_checkpoint(
            folder / STATE, model.updates, partial(self._trainer.save, model.model_id), {}, score=None, healthy=True
        )
        (folder / CONFIG).write_text(dump_config(self._state.config))

    def save_for_sampler(self, owner: str, body: SaveForSamplerBody) -> str:
        """Write a model's weights for samplers: by a name, or for a sampling session of its own."""
        state, kind = self._state, "save_weights_for_sampler"
        model = state.model(owner, body.model_id)
        session = state.session(owner, model.session)

        async def work() -> Answer:
            if body.path is not None:
                about = self._about(model, body, "sampler_weights", body.path)
                path = await state.on_ranks(
                    state.shelf.write,
                    about,
                    lambda folder: self._trainer.snapshot(model.model_id, folder / "weights"),
                    overwrite=body.overwrite,
                )
                return {"type": kind, "path": path}
            if body.sampling_session_seq_id is None:
                raise RequestError("expected path, or sampling_session_seq_id")
            sampler_id = sampler_name(session.session_id, body.sampling_session_seq_id)
            file = state.snapshots / session.session_id / f"{model.model_id.rpartition(':')[2]}-{body.seq_id:06d}"
            snapshot = await state.on_ranks(self._snapshot, model, file)
            session.samplers[sampler_id] = Sampler(sampler_id, snapshot)
            session.ephemeral.append(sampler_id)
            await self._prune(session)
            return {"type": kind, "sampling_session_id": sampler_id}

        return state.enqueue(model, body.seq_id, work)

    def _snapshot(self, model: HostedModel, file: Path) -> Snapshot:
        self._trainer.snapshot(model.model_id, file)
        return Snapshot(file=file, model_id=model.model_id, updates=model.updates)

    async def _prune(self, session: Session) -> None:
        while len(session.ephemeral) > KEPT_SNAPSHOTS:
            old = session.samplers.pop(session.ephemeral.pop(0))
            if old.snapshot.file is not None:
                await self._state.in_files(delete_files, old.snapshot.file)

    def _about(self, model: HostedModel, body: SaveBody, kind: Any, name: str) -> StoredCheckpoint:
        return StoredCheckpoint(
            model_id=model.model_id,
            kind=kind,
            name=name,
            time=datetime.now(UTC),
            base_model=self._state.config.base_model,
            lora_rank=model.lora_rank,
            updates=model.updates,
            user_metadata=body.user_metadata,
            expires_at=expiry(body.ttl_seconds),
        )

    # ---- loading -------------------------------------------------------------------------------

    def load(self, owner: str, body: LoadBody) -> str:
        """Load a checkpoint into a model, or into a new one."""
        state = self._state
        if body.model_id is not None and body.seq_id is not None:
            model = state.model(owner, body.model_id)

            async def into_model() -> Answer:
                await self._load(model, body)
                return {"type": "load_weights", "path": body.path, "model_id": model.model_id}

            return state.enqueue(model, body.seq_id, into_model)
        assert body.session_id is not None, "a rule of the body"
        assert body.model_seq_id is not None, "a rule of the body"
        session = state.session(owner, body.session_id)
        model_id, request_id = new_model(body.session_id, body.model_seq_id)
        if request_id in state.futures:
            return request_id

        async def into_new() -> Answer:
            state.refuse_base(body.base_model)
            stored = state.shelf.find(body.path, "weights")
            wanted = None if stored.lora_rank is None else AdapterBody(rank=stored.lora_rank)
            new = await self._models.begin(session, model_id, wanted, body.user_metadata)
            try:
                await self._load(new, body)
            except BaseException:
                await self._models.drop(model_id)
                raise
            return {"type": "load_weights", "path": body.path, "model_id": model_id}

        state.futures.start(request_id, session.session_id, into_new)
        return request_id

    async def _load(self, model: HostedModel, body: LoadBody) -> None:
        state = self._state
        stored = state.shelf.find(body.path, "weights")
        state.refuse_base(stored.base_model)
        if stored.lora_rank != model.lora_rank:
            raise RequestError(
                f"{body.path} has adapters of rank {stored.lora_rank}, and the model has {model.lora_rank}; create a "
                "model from the checkpoint with create_training_client_from_state"
            )
        folder = state.shelf.folder(stored) / STATE
        await state.in_files(read_checkpoint, folder)  # compares checksums
        await state.on_ranks(counted_move, model, self._trainer.load, folder, optimizer=body.optimizer)

    # ---- checkpoints ---------------------------------------------------------------------------

    def info(self, path: str) -> Answer:
        """Return what a checkpoint is of."""
        stored = self._state.shelf.find(path)
        lora = stored.lora_rank is not None
        return {
            "base_model": stored.base_model,
            "is_lora": lora,
            "lora_rank": stored.lora_rank,
            **({"train_unembed": False, "train_mlp": True, "train_attn": True} if lora else {}),
        }

    async def copy(self, body: CopyBody) -> Answer:
        """Copy a checkpoint; the copy belongs to a model of its own, which cannot be trained."""
        shelf = self._state.shelf
        stored = shelf.find(body.source_path)
        copied = stored.model_copy(
            update={
                "model_id": f"{uuid.uuid4()}:copy:0",
                "time": datetime.now(UTC),
                "expires_at": expiry(body.ttl_seconds),
            }
        )
        source = shelf.folder(stored)
        path = await self._state.in_files(shelf.write, copied, lambda folder: shutil.copytree(source, folder))
        return {"tinker_path": path}
