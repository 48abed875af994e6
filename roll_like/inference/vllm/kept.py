"""Which tokens `top_p`, `top_k` and `min_p` kept, told by vLLM on CPU.

Its model runner for GPUs (V2) tells them with `return_sampling_mask`; the one of CPUs (V1) does not, though scheduler
and outputs take them from either. Here they are read off the processed log-probabilities, which are −∞ for all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput, SamplingMaskLists
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from roll_like.inference.vllm.arguments import TELLS_KEPT

_load, _sample, _init = CPUModelRunner.load_model, CPUModelRunner.sample_tokens, Scheduler.__init__


def tell_kept_tokens() -> None:
    """Let vLLM's CPU engines that are made in this process from now on tell what they kept, where they are to."""
    if current_platform.is_cpu():
        CPUModelRunner.load_model, CPUModelRunner.sample_tokens = load_model, sample_tokens
        Scheduler.__init__ = init_scheduler


def load_model(self: Any, *args: Any, **options: Any) -> None:
    """Load the model, and look at what the sampler draws from. See `CPUModelRunner.load_model`."""
    _load(self, *args, **options)
    if not self.vllm_config.additional_config.get(TELLS_KEPT):
        return
    draw = self.sampler.sample

    def drawn(*args: Any, **options: Any) -> Any:
        sampled, logprobs = draw(*args, **options)
        self.kept_tokens = None if logprobs is None else kept_of(logprobs)
        return sampled, logprobs

    self.sampler.sample = drawn


def init_scheduler(self: Any, *args: Any, **options: Any) -> None:
    """Let the scheduler hand on what was kept, though the argument is refused on CPU. See `Scheduler`."""
    _init(self, *args, **options)
    self.return_sampling_mask |= bool(self.vllm_config.additional_config.get(TELLS_KEPT))


def sample_tokens(self: Any, grammar_output: Any) -> Any:
    """Sample, and tell what was kept. See `CPUModelRunner.sample_tokens`."""
    self.kept_tokens = None
    output = _sample(self, grammar_output)
    if isinstance(output, ModelRunnerOutput):
        output.sampling_masks = self.kept_tokens
    return output


def kept_of(logprobs_BV: torch.Tensor) -> SamplingMaskLists:
    """Return the tokens of each row that can be drawn; none where all can, which says the same in less."""
    kept_BV = logprobs_BV > -torch.inf
    kept_BV[kept_BV.all(1)] = False
    ids = torch.where(kept_BV)[1].to(torch.int32).numpy()
    return SamplingMaskLists(ids, np.concatenate([[0], np.cumsum(kept_BV.sum(1).numpy())]).astype(np.int64))
