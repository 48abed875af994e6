"""The trainer's side of a probe: log-probabilities of given tokens, as training computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from roll_like.cluster import Cluster
from roll_like.config.sampling import SamplingRunConfig
from roll_like.inference.weight_transfer.probe import LogprobProbe, probe_tokens, tolerance_of
from roll_like.models.load import load_tokenizer
from roll_like.models.precision import precision_of
from roll_like.training.interface import RankModel
from roll_like.training.layout import MicroBatch, micro_batches, per_sample
from roll_like.training.rank import TrainingRank
from roll_like.types import FloatArray, IntArray, TrainingSample


def weight_probe(config: SamplingRunConfig, trained: Cluster[TrainingRank]) -> LogprobProbe | None:
    """Return what engines and trainer are compared by; None for an engine that cannot be asked."""
    inference = config.inference
    if not inference.capabilities.prompt_logprobs:
        return None
    tokenizer = load_tokenizer(config.model)
    return LogprobProbe(
        tokens=probe_tokens(partial(tokenizer.encode, add_special_tokens=False), config.context_window),
        trainer=logprobs_on_ranks(trained),
        tolerance=tolerance_of(inference, precision_of(config)),
        every=inference.probe_every,
    )


def logprobs_on_ranks(trained: Cluster[TrainingRank]) -> Callable[[IntArray], FloatArray]:
    """Return what computes log-probabilities of given tokens on all ranks: those of a sharded model need each other."""

    def logprobs(tokens: IntArray) -> FloatArray:
        loss_mask = np.arange(len(tokens)) > 0
        sample = TrainingSample(group_id="probe", token_ids=tokens, prompt_length=1, loss_mask=loss_mask)
        ((batch,),) = micro_batches([sample], ranks=1, max_tokens=len(tokens), share_prompts=False)
        found = trained.everywhere(TrainingRank.ask, untempered_logprobs, batch)[0]
        return per_sample([sample], [[batch]], [[found]])[0][1:]

    return logprobs


@torch.no_grad()
def untempered_logprobs(objective: object, model: RankModel, batch: MicroBatch) -> FloatArray:
    """Return the log-probability of every target at temperature 1, without dropout, shape [N]. Called in a rank."""
    del objective  # its temperature is that of sampling
    with evaluating(model):
        logprobs_N: FloatArray = model(batch, 1.0)[0].float().cpu().numpy()
    return logprobs_N


@contextmanager
def evaluating(model: RankModel) -> Iterator[None]:
    """Switch dropout off."""
    training = model.module.training
    model.module.eval()
    try:
        yield
    finally:
        model.module.train(training)
