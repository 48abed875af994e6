"""Environment variables that vLLM reads while it is imported, before its first thread starts."""

from __future__ import annotations


def vllm_environment(threads: int, device: str) -> dict[str, str]:
    """Return the variables that an engine's process needs from its first moment.

    Args:
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
        # Spinning threads of one role would take the cores that another role computes on.
        "OMP_WAIT_POLICY": "PASSIVE",
        # By default vLLM on CPU puts the model into a third process, fed through shared memory that both
        # sides poll. On few cores the polling takes the cores that compute: with this, the engine's process
        # runs the model itself, and throughput equals that of `vllm.LLM` (benchmarks/rollout.py).
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The few helpers that vLLM compiles with torch.compile take 10 seconds and gain nothing on CPU.
        "TORCHDYNAMO_DISABLE": "1",
    }
