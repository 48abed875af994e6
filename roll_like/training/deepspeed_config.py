"""From our configuration to DeepSpeed's."""

from __future__ import annotations

import math
from typing import Any

from roll_like.config.sections import DeepSpeedConfig, OptimizerConfig, Precision


def deepspeed_config(config: DeepSpeedConfig, dtype: Precision) -> dict[str, Any]:
    """Return the dictionary that `deepspeed.initialize` takes.

    Micro-batches and the loss are normalised by us: DeepSpeed sees one micro-batch at a time and is
    told where an optimizer step ends.
    """
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.offload == "optimizer_and_parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
    elif dtype == "float16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 12}
    if dtype != "float32" and config.zero_stage > 0:
        # many small micro-batches would lose bits in a 16-bit sum; stage 0 has no such option
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Return the learning rate of the 0-based optimizer step `update`.

    A pure function of the step: a resumed run needs no scheduler state.

        >>> [learning_rate(OptimizerConfig(lr=1.0, warmup_steps=2), update, 10) for update in range(3)]
        [0.5, 1.0, 1.0]
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(total_updates - config.warmup_steps, 1)
    progress = min((update - config.warmup_steps) / decay_steps, 1.0)
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
