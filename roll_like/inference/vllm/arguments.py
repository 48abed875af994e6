"""From our configuration to vLLM's engine arguments."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from roll_like.errors import ConfigError
from roll_like.inference.interface import EngineSpec
from roll_like.inference.vllm.config import OWNED_ENGINE_ARGS, VLLMConfig

#: Tokens of one block of the key-value cache on CPU: the smallest that vLLM's CPU attention takes. Only
#: whole blocks are shared between the samples of a prompt, so that small ones share more of it.
CPU_BLOCK_TOKENS = 32
#: Tokens that one forward pass of vLLM takes on CPU, unless the context window is longer.
CPU_BATCH_TOKENS = 4096
WORKER_EXTENSION = "roll_like.inference.vllm.worker_extension.WorkerExtension"
#: Arguments that would break what this engine promises; the reason follows the name.
_FORBIDDEN = {
    "logprobs_mode": "log-probabilities are those of the sampling distribution, which training needs",
    "worker_extension_cls": "weight updates come in through it",
    "weight_transfer_config": "weights.push() uses it",
    "disable_log_stats": "nothing reads vLLM's statistics",
    "skip_tokenizer_init": "responses are decoded with the tokenizer",
    "load_format": "weights are loaded from model.path",
    "trust_remote_code": "it is set by `model.trust_remote_code`",
}


def engine_arguments(config: VLLMConfig, spec: EngineSpec) -> dict[str, Any]:
    """Return keyword arguments for `vllm.AsyncEngineArgs`.

    Raises:
        ConfigError: `inference.engine_args` has a name that vLLM does not know, or that is not the user's to set.
    """
    check_engine_args(config.engine_args)
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "tokenizer": spec.tokenizer_path,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": config.max_running,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "trust_remote_code": spec.trust_remote_code,
        "enable_prefix_caching": True,
        # of the distribution that tokens are drawn from, temperature applied
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": spec.weight_backend},
    }
    if spec.device == "cpu":
        arguments["block_size"] = CPU_BLOCK_TOKENS
        # A prompt that is computed in parts samples a token too early, which vLLM takes back by rewinding the
        # request's random generator; on CPU generators cannot be rewound, and the engine dies.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(spec.max_model_len, CPU_BATCH_TOKENS)
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = sleeps(config, spec)
    return {**arguments, **config.engine_args}


def sleeps(config: VLLMConfig, spec: EngineSpec) -> bool:
    """Return whether the engine frees its GPU memory while the trainer works."""
    return spec.shares_gpus and config.sleep is not False


def check_engine_args(chosen: dict[str, Any], section: str = "inference") -> None:
    """Check the names in a section's `engine_args` against those that the installed vLLM takes.

    Args:
        chosen: What the user set.
        section: `inference` or `judge`, for messages.

    Raises:
        ConfigError: Names the first wrong one, and the nearest right ones.
    """
    from vllm import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs) if field.init}
    for name in chosen:
        if name in OWNED_ENGINE_ARGS:
            raise ConfigError(
                f"{section}.engine_args: {name!r} is set by `{OWNED_ENGINE_ARGS[name].replace('inference', section)}`",
                fix="remove it from engine_args",
            )
        if name in _FORBIDDEN:
            raise ConfigError(
                f"{section}.engine_args: {name!r} cannot be changed: {_FORBIDDEN[name]}",
                fix="remove it from engine_args",
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see `vllm serve --help=all`"
            raise ConfigError(
                f"{section}.engine_args: the installed vLLM has no argument {name!r}; {hint}",
                fix="correct the name, or remove it",
            )
