"""Environment variables that vLLM reads while it is imported, before its first thread starts."""

from __future__ import annotations

from roll_like.inference.vllm.config import VLLMSettings


def vllm_environment(config: VLLMSettings, threads: int, device: str) -> dict[str, str]:
    """Return the variables that an engine's process needs from its first moment.

    Args:
        config: The `inference` or `judge` section.
        threads: Cores of the engine on CPU.
        device: `cpu` or `cuda`.
    """
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device != "cpu":
        # CUDA IPC handles are pickled on their way from the frontend to the engine's process
        return {**common, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
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
        **({"TORCHDYNAMO_DISABLE": "1"} if config.enforce_eager else {}),
    }
