"""Running totals of vLLM's own statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class EngineStats:
    """What an engine has done since it started, and what it holds now."""

    running: int = 0
    waiting: int = 0
    tokens_generated: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    kv_cache_usage: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return them by name, with the share of prompt tokens that the prefix cache spared."""
        rate = self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        return {
            "running": float(self.running),
            "waiting": float(self.waiting),
            "tokens_generated": float(self.tokens_generated),
            "prompt_tokens": float(self.prompt_tokens),
            "cached_prompt_tokens": float(self.cached_prompt_tokens),
            "prefix_cache_hit_rate": rate,
            "preemptions": float(self.preemptions),
            "kv_cache_usage": self.kv_cache_usage,
        }


def stat_logger(totals: EngineStats) -> Callable[[Any, int], Any]:
    """Return a factory for vLLM's `stat_loggers` that adds to `totals`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class TotalsLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,  # noqa: ARG002 - vLLM passes it by name
            engine_idx: int = 0,  # noqa: ARG002
        ) -> None:
            if scheduler_stats is not None:
                totals.running = scheduler_stats.num_running_reqs
                totals.waiting = scheduler_stats.num_waiting_reqs
                totals.kv_cache_usage = scheduler_stats.kv_cache_usage
                totals.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
                totals.cached_prompt_tokens += scheduler_stats.prefix_cache_stats.hits
            if iteration_stats is not None:
                totals.tokens_generated += iteration_stats.num_generation_tokens
                totals.preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            pass

    return TotalsLogger
