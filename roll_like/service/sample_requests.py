"""Requests for samples, and for log-probabilities of prompts, with the weights of sampling sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from roll_like.inference.interface import GenerateRequest, PromptScores, Sampling, derived_seed
from roll_like.service.futures import Answer
from roll_like.service.hosted import Sampler, Session, sampler_name
from roll_like.service.protocol import SampleBody, SamplingSessionBody
from roll_like.service.sampler import SnapshotSampler
from roll_like.service.snapshots import UNTRAINED, Snapshot
from roll_like.service.state import ServiceState
from roll_like.service.types import PromptLogprobs, RequestError, SampledTokens, SampleResult
from roll_like.service.weight_requests import KEPT_SNAPSHOTS
from roll_like.service.wire import written_samples
from roll_like.types import IntArray, StopReason


class SampleRequests:
    """Runs on the service's event loop."""

    def __init__(self, state: ServiceState, sampler: SnapshotSampler) -> None:
        self._state = state
        self._sampler = sampler

    # ---- sampling sessions ---------------------------------------------------------------------

    def create_sampler(self, owner: str, body: SamplingSessionBody) -> Answer:
        """Begin a sampling session with a checkpoint's weights, or with those of the model before any training."""
        state = self._state
        session = state.session(owner, body.session_id)
        sampler_id = sampler_name(body.session_id, body.sampling_session_seq_id)
        state.refuse_base(body.base_model)
        if sampler_id not in session.samplers:
            snapshot = UNTRAINED
            if body.model_path is not None:
                stored = state.shelf.find(body.model_path, "sampler_weights")
                state.refuse_base(stored.base_model)
                snapshot = Snapshot(file=state.shelf.folder(stored) / "weights", saved=stored.time)
            elif body.base_model is None:
                raise RequestError("expected base_model or model_path")
            session.samplers[sampler_id] = Sampler(sampler_id, snapshot, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def sampler(self, owner: str, sampler_id: str) -> tuple[Session, Sampler]:
        """Return a sampling session.

        Raises:
            KeyError: There is none of this owner.
        """
        session = self._state.sessions.get(sampler_id.partition(":")[0])
        if session is None or session.owner != owner or sampler_id not in session.samplers:
            raise KeyError(
                f"there is no sampler {sampler_id}: its session has ended, or {KEPT_SNAPSHOTS} later ones were made in "
                "this session; save weights for samplers by a name to keep them"
            )
        session.seen = time.monotonic()
        return session, session.samplers[sampler_id]

    def describe(self, owner: str, sampler_id: str) -> Answer:
        """Return what there is to know of a sampling session."""
        _, sampler = self.sampler(owner, sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": self._state.config.base_model,
            "model_path": sampler.model_path,
        }

    def join(self, owner: str, sampler_id: str) -> Answer:
        """Number a further client of a sampling session."""
        _, sampler = self.sampler(owner, sampler_id)
        sampler.clients += 1
        return {"type": "join_sampling_session", "client_counter": sampler.clients}

    # ---- samples -------------------------------------------------------------------------------

    def sample(self, owner: str, body: SampleBody) -> tuple[str, list[str]]:
        """Sample; return the id of the result, and one of each sample."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise RequestError("expected sampling_session_id and seq_id; other samples are not served")
        session, sampler = self.sampler(owner, body.sampling_session_id)
        request_id = f"{sampler.sampler_id}:{body.seq_id}"
        names = [f"{request_id}:{number}" for number in range(body.num_samples)]
        futures = self._state.futures
        if request_id not in futures:
            futures.start(request_id, session.session_id, lambda: self._sample(sampler.snapshot, body, names))
        return request_id, names

    async def _sample(self, snapshot: Snapshot, body: SampleBody, names: Sequence[str]) -> Answer:
        config = self._state.config
        body.refuse(top_logprobs=config.inference.capabilities.top_logprobs)
        tokens = body.prompt.tokens
        self._refuse_prompt(tokens, body)
        params = body.sampling_params
        sampling = Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            max_tokens=params.max_tokens or config.max_sequence_tokens - len(tokens),
            stop=params.stop_strings,
            stop_ids=params.stop_ids,
        )
        requests = [
            GenerateRequest(
                request_id=name,
                prompt_ids=tokens,
                sampling=sampling,
                seed=derived_seed(params.seed, number),
                top_logprobs=body.topk_sample_logprobs,
            )
            for number, name in enumerate(names)
        ]
        found = await self._sampler.generate(snapshot, requests, key=names[0])
        self._state.sampled_tokens += sum(len(each.token_ids) for each in found)
        samples = [
            SampledTokens(
                token_ids=each.token_ids,
                logprobs=each.logprobs,
                stop_reason=StopReason.STOP if each.stop_reason is StopReason.STOP else StopReason.LENGTH,
                top=each.top,
            )
            for each in found
        ]
        prompt = await self._score(snapshot, tokens, body)
        return written_samples(
            SampleResult(samples=samples, prompt=prompt, cached_prompt_tokens=found[0].cached_prompt_tokens)
        )

    async def _score(self, snapshot: Snapshot, tokens: IntArray, body: SampleBody) -> PromptLogprobs | None:
        """Return what is told of the prompt's tokens; None where nothing is wanted."""
        top_k = body.topk_prompt_logprobs
        if not (body.prompt_logprobs or top_k):
            return None
        scores = PromptScores(logprobs=np.zeros(0, np.float32))
        if len(tokens) > 1:
            scores = await self._sampler.score(snapshot, tokens, top_k)
        last = len(tokens) if body.prompt_logprobs_last_n is None else body.prompt_logprobs_last_n
        return PromptLogprobs.of(scores, last=last, top_k=top_k, told=bool(body.prompt_logprobs))

    def _refuse_prompt(self, tokens: IntArray, body: SampleBody) -> None:
        window, vocabulary = self._state.config.max_sequence_tokens, self._state.vocabulary
        if not 0 < len(tokens) < window:
            raise RequestError(f"the prompt has {len(tokens)} tokens; this service takes 1 to {window - 1}")
        if len(tokens) + (body.sampling_params.max_tokens or 1) > window:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {body.sampling_params.max_tokens}, together "
                f"more than max_sequence_tokens: {window}"
            )
        wrong = (tokens < 0) | (tokens >= vocabulary)
        if wrong.any():
            raise RequestError(f"the prompt has token {int(tokens[wrong][0])}; the vocabulary is 0 to {vocabulary - 1}")
        for token in body.sampling_params.stop_ids or ():
            if not 0 <= token < vocabulary:
                raise RequestError(f"stop has token {token}; the vocabulary is 0 to {vocabulary - 1}")
        if body.prompt_logprobs_last_n is not None and not 0 < body.prompt_logprobs_last_n < len(tokens):
            raise RequestError(
                f"prompt_logprobs_last_n is {body.prompt_logprobs_last_n}; expected 1 to {len(tokens) - 1}"
            )
