"""Names of settings in other tools (TRL, verl, OpenRLHF, ROLL, transformers), and what they are called here."""

from __future__ import annotations

from collections.abc import Collection

_SAMPLES = ("rollout.prompts_per_step", "rollout.groups_per_step", "data.samples_per_step", "data.pairs_per_step")
_GROUP = ("rollout.samples_per_prompt", "rollout.episodes_per_group")
_PROMPT = ("data.max_prompt_tokens", "data.max_tokens")
_RESPONSE = ("rollout.max_response_tokens",)
_KL = ("algorithm.kl.coefficient",)
_LR = ("training.optimizer.lr",)
_MODEL = ("model.path",)
_DTYPE = ("model.dtype",)
_LOSS = ("algorithm.loss",)
_MICRO = ("training.max_tokens_per_micro_batch",)
_REPLICAS = ("inference.replicas",)
_GPUS = ("resources.devices_per_node",)
_SAVE, _EVALUATE, _EPOCHS = ("checkpoint.every",), ("evaluation.every",), ("epochs", "pairs.epochs", "steps")
_TRACKERS, _REWARDS, _ROWS = ("metrics.trackers",), ("rewards.use",), ("data.sources",)
_ENGINES = ("resources.device_mapping.inference", "resources.device_mapping")

#: Name elsewhere → names here; which of them there is depends on the pipeline.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "learning_rate": _LR,
    "actor_learning_rate": _LR,
    "critic_learning_rate": ("critic.optimizer.lr",),
    "lr_scheduler_type": ("training.optimizer.schedule",),
    "warmup_ratio": ("training.optimizer.warmup_steps",),
    "num_warmup_steps": ("training.optimizer.warmup_steps",),
    "max_norm": ("training.optimizer.max_grad_norm",),
    "clip_grad": ("training.optimizer.max_grad_norm",),
    "model_name_or_path": _MODEL,
    "model_name": _MODEL,
    "pretrain": _MODEL,
    "torch_dtype": _DTYPE,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "attn_implementation": ("training.attention",),
    "batch_size": _SAMPLES,
    "train_batch_size": _SAMPLES,
    "rollout_batch_size": _SAMPLES,
    "gen_batch_size": _SAMPLES,
    "per_device_train_batch_size": _MICRO,
    "micro_train_batch_size": _MICRO,
    "gradient_accumulation_steps": _MICRO,
    "ppo_micro_batch_size_per_gpu": _MICRO,
    "ppo_max_token_len_per_gpu": _MICRO,
    "num_generations": _GROUP,
    "group_size": _GROUP,
    "n_samples_per_prompt": _GROUP,
    "num_return_sequences_in_group": _GROUP,
    "rollouts_per_example": _GROUP,
    "max_tokens": _RESPONSE,
    "max_new_tokens": _RESPONSE,
    "max_completion_length": _RESPONSE,
    "max_response_length": _RESPONSE,
    "response_length": _RESPONSE,
    "generate_max_len": _RESPONSE,
    "rollout_data_dir": ("rollout.save_tokens",),
    "max_prompt_length": _PROMPT,
    "prompt_length": _PROMPT,
    "prompt_max_len": _PROMPT,
    "max_length": _PROMPT,
    "max_seq_length": _PROMPT,
    "max_len": _PROMPT,
    "train_files": _ROWS,
    "dataset_name": _ROWS,
    "prompt_data": _ROWS,
    "dataset": _ROWS,
    "val_files": ("evaluation.sources",),
    "max_steps": ("steps", "pairs.steps"),
    "total_steps": ("steps", "pairs.steps"),
    "total_training_steps": ("steps", "pairs.steps"),
    "num_train_epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "num_episodes": _EPOCHS,
    "ppo_epochs": ("algorithm.updates_per_step",),
    "num_iterations": ("algorithm.updates_per_step",),
    "ppo_mini_batch_size": ("algorithm.updates_per_step",),
    "beta": (*_KL, *_LOSS),
    "kl_coef": _KL,
    "init_kl_coef": _KL,
    "kl_loss_coef": _KL,
    "use_kl_loss": ("algorithm.kl.use",),
    "use_kl_in_reward": ("algorithm.kl.use",),
    "kl_estimator": ("algorithm.kl.estimator",),
    "entropy_coef": ("algorithm.entropy_coefficient",),
    "entropy_coeff": ("algorithm.entropy_coefficient",),
    "clip_ratio": _LOSS,
    "eps_clip": _LOSS,
    "epsilon": _LOSS,
    "loss_type": _LOSS,
    "policy_loss": _LOSS,
    "loss_agg_mode": ("algorithm.aggregation",),
    "adv_estimator": ("algorithm.advantage",),
    "advantage_estimator": ("algorithm.advantage",),
    "scale_rewards": ("algorithm.advantage",),
    "mask_truncated_completions": ("algorithm.mask.truncated",),
    "use_vllm": ("inference.type",),
    "vllm_num_engines": _REPLICAS,
    "num_infer": _REPLICAS,
    "tensor_parallel_size": _ENGINES,
    "tensor_model_parallel_size": _ENGINES,
    "vllm_tensor_parallel_size": _ENGINES,
    "max_num_seqs": ("inference.max_running",),
    "num_gpus_per_node": _GPUS,
    "n_gpus_per_node": _GPUS,
    "nnodes": ("resources.nodes",),
    "num_nodes": ("resources.nodes",),
    "deepspeed": ("training.zero_stage",),
    "ulysses_sequence_parallel_size": ("training.sequence_parallel",),
    "peft_config": ("training.lora",),
    "lora_r": ("training.lora.rank", "training.lora"),
    "lora_rank": ("training.lora.rank", "training.lora"),
    "lora_alpha": ("training.lora.alpha", "training.lora"),
    "load_in_4bit": ("training.lora.quantization", "training.lora"),
    "bnb_4bit_quant_type": ("training.lora.quantization", "training.lora"),
    "enable_rollout_routing_replay": ("algorithm.router_replay",),
    "use_rollout_routing_replay": ("algorithm.router_replay",),
    "enable_expert_parallel": ("inference.expert_parallel",),
    "expert_parallel_size": ("inference.expert_parallel",),
    "expert_model_parallel_size": ("training.expert_parallel",),
    "save_steps": _SAVE,
    "save_freq": _SAVE,
    "save_total_limit": ("checkpoint.keep",),
    "max_actor_ckpt_to_keep": ("checkpoint.keep",),
    "eval_steps": _EVALUATE,
    "test_freq": _EVALUATE,
    "reward_funcs": _REWARDS,
    "reward_fn": _REWARDS,
    "reward_model": _REWARDS,
    "custom_reward_function": _REWARDS,
    "remote_rm_url": _REWARDS,
    "report_to": _TRACKERS,
    "logger": _TRACKERS,
    "use_wandb": _TRACKERS,
    "run_name": ("name",),
    "experiment_name": ("name",),
    "exp_name": ("name",),
}

#: What needs no setting here, and why.
NEEDLESS = {
    "logging_steps": "every step is logged",
    "dataloader_num_workers": "rows are read before the first step",
    "remove_unused_columns": "rewards get all columns of a row in `completion.metadata`",
    "use_remove_padding": "samples are packed into rows without padding",
    "param_offload": "`training.offload` says what moves to host memory",
    "optimizer_offload": "`training.offload` says what moves to host memory",
}

#: Sections of other tools, and the tool.
OTHER_SECTIONS = {
    "actor_rollout_ref": "verl",
    "custom_reward_function": "verl",
    "trainer": "verl",
    "actor_train": "ROLL",
    "actor_infer": "ROLL",
    "train_env_manager": "ROLL",
}


def translated(key: str, known: Collection[str]) -> str | None:
    """Return what to write for a setting of another tool; None for what is of none.

        >>> translated("num_generations", ["rollout.samples_per_prompt"])
        'here it is called `rollout.samples_per_prompt`'
        >>> translated("logging_steps", [])
        'there is no such setting: every step is logged'

    Args:
        key: Its name there.
        known: All keys of the configuration.
    """
    if key in NEEDLESS:
        return f"there is no such setting: {NEEDLESS[key]}"
    names = [name for name in OTHER_NAMES.get(key, ()) if name in known]
    if names:
        return f"here it is called {' or '.join(f'`{name}`' for name in names[:2])}"
    if key in OTHER_SECTIONS:
        return f"that is a section of {OTHER_SECTIONS[key]}; docs/coming_from.md says what its settings are called here"
    return None
