"""From our configuration to vLLM's environment variables and engine arguments. Imports neither torch nor vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.inference import OBJECT_STORE, SHARED_MEMORY
from roll_like.errors import ConfigError
from roll_like.inference.settings import fields_of, package_folder, require_known
from roll_like.inference.vllm.config import VLLMConfig, VLLMSettings
from roll_like.models.attention import keeps_states
from roll_like.models.vision import is_vision_model

if TYPE_CHECKING:
    from roll_like.inference.interface import AdapterSpec, EngineSpec, FrozenAdapter

#: Tokens of one block of the key-value cache on CPU: the smallest that vLLM's CPU attention takes. Only
#: whole blocks are shared between the samples of a prompt, so that small ones share more of it.
CPU_BLOCK_TOKENS = 32
#: Tokens that one forward pass of vLLM takes on CPU, unless the context window is longer.
CPU_BATCH_TOKENS = 4096
#: The same on GPUs, as vLLM sets it for an engine of its asynchronous interface.
GPU_BATCH_TOKENS = 2048
#: Where the names in `engine_args` are explained.
DOCUMENTED = "vLLM's documentation of AsyncEngineArgs"
WORKER_EXTENSION = "roll_like.inference.vllm.worker_extension.WorkerExtension"
#: A judge that is held to a schema may otherwise go on with white space until its tokens are used up.
STRUCTURED_OUTPUTS = {"backend": "xgrammar", "disable_any_whitespace": True}
#: In vLLM's additional configuration on CPU: whether what is kept of the vocabulary is told.
TELLS_KEPT = "roll_like_tells_kept"
#: What vLLM calls this package's 8-bit weights on CPU (`int8.py`).
INT8 = "roll_like_int8"
#: vLLM's names of `inference.quantization`.
QUANTIZATIONS = {"int8": INT8, "fp8": "fp8_per_channel"}
#: Graphs of passes that only decode: a small model generates several times as fast, without torch.compile's minutes.
DECODING_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
#: vLLM's number of the policy's adapter.
ADAPTER_ID = 1
#: Mappings of which this package sets some entries.
_JOINED = {"additional_config", "hf_overrides"}


def engine_arguments(config: VLLMConfig, spec: EngineSpec) -> dict[str, Any]:
    """Return keyword arguments for `vllm.AsyncEngineArgs`.

    Raises:
        ConfigError: `inference.engine_args` has a name that vLLM does not know.
    """
    arguments = {
        "enable_prefix_caching": True,
        **model_arguments(config, spec, "inference"),
        # of the distribution that tokens are drawn from, temperature applied
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        # what comes through Ray is in shared memory when it gets to vLLM's process
        "weight_transfer_config": {
            "backend": SHARED_MEMORY.name if spec.weight_backend == OBJECT_STORE.name else spec.weight_backend
        },
    }
    if spec.device != "cpu":
        arguments["enable_sleep_mode"] = config.sleeps(shares_gpus=spec.shares_gpus)
    if config.expert_parallel:
        arguments["enable_expert_parallel"] = True
    if spec.returns_routes:
        arguments["enable_return_routed_experts"] = True
    if spec.returns_kept:
        # the model runner of CPUs does not tell: `kept.py` makes it
        arguments |= (
            {"additional_config": {TELLS_KEPT: True}} if spec.device == "cpu" else {"return_sampling_mask": True}
        )
    if config.quantization is not None:
        arguments["quantization"] = QUANTIZATIONS[config.quantization]
    if config.speculative is not None:
        arguments |= {
            "speculative_config": config.speculative.engine_arguments(),
            "per_request_spec_decode_metrics": "summary",
        }
        # requests that a pass has no room for wait until others have ended, though they count as running
        room = config.max_running * config.tokens_per_pass
        if room > arguments.get("max_num_batched_tokens", GPU_BATCH_TOKENS):
            arguments["max_num_batched_tokens"] = room
    if spec.float32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if spec.adapter is not None:
        held: list[AdapterSpec | FrozenAdapter] = [spec.adapter, *spec.adapter.frozen]
        arguments |= {
            "structured_outputs_config": STRUCTURED_OUTPUTS,  # the base model may judge
            "enable_lora": True,
            "max_loras": len(held) + spec.adapter.named,
            "max_lora_rank": config.reserved_rank(max(each.rank for each in held)),
            "lora_target_modules": sorted({name for each in held for name in each.modules}),
        }
    return {**arguments, **config.engine_args, **_joined(arguments, config.engine_args)}


def _joined(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return mappings that both this package and `engine_args` give, with the entries of both.

    Raises:
        ConfigError: `engine_args` has something else there.
    """
    joined = {}
    for name in _JOINED & ours.keys() & given.keys():
        if not isinstance(given[name], Mapping):
            raise ConfigError(
                f"inference.engine_args.{name} is {given[name]!r}; a mapping was expected, to which "
                f"{', '.join(ours[name])} is added",
                fix="write it as a mapping, or leave it out",
            )
        joined[name] = {**given[name], **ours[name]}
    return joined


def model_arguments(config: VLLMSettings, spec: EngineSpec, section: str) -> dict[str, Any]:
    """Return the arguments that an engine and a judge's server have in common, without `engine_args`.

    Args:
        section: `inference` or `judge`, for messages.

    Raises:
        ConfigError: `engine_args` has a name that vLLM does not know; names the first, and the nearest right one.
    """
    require_known(section, "vLLM", config.engine_args, known_arguments(), DOCUMENTED)
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "tokenizer": spec.tokenizer_path,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": config.max_running,
        **_graphs(config, spec.device),
        "tensor_parallel_size": spec.tensor_parallel_size,
        "trust_remote_code": spec.trust_remote_code,
    }
    if is_vision_model(Path(spec.model_path)):
        arguments["limit_mm_per_prompt"] = {"video": 0}
    if keeps_states(Path(spec.model_path), trust_remote_code=spec.trust_remote_code):
        # vLLM keeps states of a beginning where prompts come in parts, which kills it on CPU (see below), and does not
        # clear those it gives to another request (vllm#56524). Training computes states in float32.
        arguments |= {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}
    if spec.tensor_parallel_size > 1:
        # in an actor vLLM would choose Ray, which takes the first bundles of the run's placement group: others' GPUs
        arguments["distributed_executor_backend"] = "mp"
    if spec.device != "cpu":
        return {**arguments, "gpu_memory_utilization": config.gpu_memory_utilization}
    return {
        **arguments,
        "block_size": CPU_BLOCK_TOKENS,
        # A prompt that is computed in parts samples a token too early, which vLLM takes back by rewinding the
        # request's random generator; on CPU generators cannot be rewound, and the engine dies.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(spec.max_model_len, CPU_BATCH_TOKENS),
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
    }


def _graphs(config: VLLMSettings, device: str) -> dict[str, Any]:
    """Return whether passes run from CUDA graphs, and which."""
    if device != "cpu" and config.decodes_from_graphs:
        return {"enforce_eager": False, "compilation_config": DECODING_GRAPHS}
    return {"enforce_eager": config.enforce_eager is not False}


def known_arguments() -> set[str]:
    """Return the fields of vLLM's engine arguments, read from its source."""
    folder = package_folder("vllm")
    files = [] if folder is None else [folder / "engine" / "arg_utils.py"]
    return fields_of((file for file in files if file.is_file()), {"EngineArgs", "AsyncEngineArgs"})


def vllm_environment(config: VLLMSettings, threads: int, device: str) -> dict[str, str]:
    """Return the variables that an engine's process needs from its first moment; who starts a run sets its log level.

    Args:
        config: The `inference` or `judge` section.
        device: `cpu` or `cuda`.
    """
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TOKENIZERS_PARALLELISM": "false",
        # a process title would overwrite the environment by which the guardian finds what a run has left
        "SPT_NOENV": "1",
    }
    if device != "cpu":
        return {
            **common,
            # CUDA IPC handles are pickled on their way from the frontend to the engine's process
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            **({"VLLM_BATCH_INVARIANT": "1"} if isinstance(config, VLLMConfig) and config.deterministic else {}),
            # A process that has only looked for GPUs cannot be forked to use one, and vLLM does not notice.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
    return {
        **common,
        # Binding would tie engines to the same first cores, however many run on the machine.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # Threads spin for about 50 µs before they sleep: long enough to bridge the gaps between the small
        # kernels of a decoding step (two thirds more tokens a second than sleeping at once, on two quiet
        # cores), too short to take the cores that another role computes on (libgomp's default of
        # milliseconds brings an engine to a standstill beside one).
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
        # By default vLLM on CPU puts the model into a third process, fed through shared memory that both
        # sides poll. On few cores the polling takes the cores that compute: with this, the engine's process
        # runs the model itself, and throughput equals that of `vllm.LLM` (benchmarks/rollout.py).
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # With enforce_eager vLLM still compiles a few helpers with torch.compile: 10 seconds, for no gain.
        **({} if config.enforce_eager is False else {"TORCHDYNAMO_DISABLE": "1"}),
    }
