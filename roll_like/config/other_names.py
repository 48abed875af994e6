"""Names of settings in other tools (TRL, verl, OpenRLHF, ROLL, transformers), and what they are called here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
_ENGINES = ("inference.replicas", "resources.device_mapping.inference")

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
    "batch_size": (*_SAMPLES, "rollout.episodes_per_step"),
    "train_batch_size": (*_SAMPLES, "algorithm.updates_per_step"),
    "rollout_batch_size": (*_SAMPLES, "rollout.episodes_per_step"),
    "gen_batch_size": _SAMPLES,
    "per_device_train_batch_size": (*_MICRO, "data.samples_per_step"),
    "micro_train_batch_size": _MICRO,
    "gradient_accumulation_steps": ("algorithm.updates_per_step", *_MICRO, "data.samples_per_step"),
    "ppo_micro_batch_size_per_gpu": _MICRO,
    "ppo_max_token_len_per_gpu": _MICRO,
    "num_generations": _GROUP,
    "group_size": (*_GROUP, "evaluation.episodes_per_seed"),
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
    "max_epochs": ("epochs", "pairs.epochs"),
    "num_episodes": _EPOCHS,
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
    "loss_type": (*_LOSS, "algorithm.aggregation"),
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
    "chat_template_kwargs": ("model.template_options",),
    "reward_weights": ("rewards.use.0.weight",),
    "generation_batch_size": ("rollout.samples_per_step",),
    "steps_per_generation": ("algorithm.updates_per_step",),
    "importance_sampling_level": ("algorithm.loss.type",),
    "epsilon_high": ("algorithm.loss.clip_high",),
    "delta": ("algorithm.loss.dual_clip",),
    "vllm_importance_sampling_correction": ("algorithm.correction.type",),
    "vllm_importance_sampling_mode": ("algorithm.correction.type", "algorithm.correction.level"),
    "vllm_importance_sampling_clip_max": ("algorithm.correction.cap",),
    "vllm_importance_sampling_clip_min": ("algorithm.correction.floor",),
    "vllm_mode": ("resources.device_mapping",),
    "vllm_gpu_memory_utilization": ("inference.gpu_memory_utilization",),
    "vllm_max_model_length": ("inference.max_model_len",),
    "vllm_enable_sleep_mode": ("inference.sleep",),
    "lora_dropout": ("training.lora.dropout",),
    "lora_target_modules": ("training.lora.target_modules",),
    "use_rslora": ("training.lora.rslora",),
    "assistant_only_loss": ("data.train_on",),
    "completion_only_loss": ("data.train_on",),
    "f_divergence_type": ("algorithm.loss.divergence",),
    "f_alpha_divergence_coef": ("algorithm.loss.alpha",),
    "loss_weights": ("algorithm.loss.nll_coefficient",),
    "precompute_ref_log_probs": ("reference.mode",),
    "center_rewards_coefficient": ("algorithm.center_coefficient",),
    "margin": ("data.sources.0.margin_field",),
    "enable_gradient_checkpointing": ("training.gradient_checkpointing",),
    "prompt_key": ("data.sources.0.prompt_field",),
    "reward_fn_key": ("data.sources.0.domain",),
    "lr_warmup_steps": ("training.optimizer.warmup_steps",),
    "grad_clip": ("training.optimizer.max_grad_norm",),
    "clip_ratio_low": ("algorithm.loss.clip_low",),
    "clip_ratio_high": ("algorithm.loss.clip_high",),
    "clip_ratio_c": ("algorithm.loss.dual_clip",),
    "loss_mode": ("algorithm.loss.type",),
    "kl_loss_type": ("algorithm.kl.estimator",),
    "target_kl": ("algorithm.kl.adaptive.target",),
    "norm_adv_by_std_in_grpo": ("algorithm.advantage.type",),
    "max_num_gen_batches": ("rollout.max_oversampling",),
    "rollout_is": ("algorithm.correction.level",),
    "rollout_is_threshold": ("algorithm.correction.cap",),
    "rollout_rs": ("algorithm.correction.reject",),
    "bypass_mode": ("algorithm.old_logprobs",),
    "cliprange_value": ("critic.value_clip",),
    "critic_warmup": ("critic.warmup_steps",),
    "strategy": ("training.backend",),
    "free_cache_engine": ("inference.sleep",),
    "engine_kwargs": ("inference.engine_args",),
    "num_workers": ("rewards.workers",),
    "val_before_train": ("evaluation.before",),
    "trainer_mode": ("rollout.schedule.type",),
    "max_assistant_turns": ("rollout.max_turns",),
    "tool_config_path": ("environments.0.kwargs",),
    "default_agent_loop": ("environments.0.id", "environments.0.program"),
    "input_key": ("data.sources.0.prompt_field",),
    "label_key": ("data.sources.0.answer_field",),
    "prompt_data_probs": ("data.sources.0.weight",),
    "reward_pretrain": ("rewards.use.0.path", "critic.path"),
    "train_max_tokens_per_gpu": _MICRO,
    "lambd": ("algorithm.advantage.lam",),
    "policy_loss_type": ("algorithm.loss.type",),
    "eps_clip_low_high": ("algorithm.loss.clip_low", "algorithm.loss.clip_high", "algorithm.loss.dual_clip"),
    "kl_target": ("algorithm.kl.adaptive.target",),
    "kl_horizon": ("algorithm.kl.adaptive.horizon",),
    "entropy_loss_coef": ("algorithm.entropy_coefficient",),
    "overlong_buffer_len": ("algorithm.reward_shaping.overlong.buffer_tokens",),
    "overlong_penalty_factor": ("algorithm.reward_shaping.overlong.penalty",),
    "reward_clip_range": ("algorithm.reward_shaping.clip",),
    "dynamic_filtering": ("rollout.drop_zero_variance_groups", "rollout.max_oversampling"),
    "dynamic_filtering_reward_range": ("algorithm.mask.difficulty",),
    "enable_vllm_is_correction": ("algorithm.correction.type",),
    "vllm_is_truncated_threshold": ("algorithm.correction.cap",),
    "critic_pretrain": ("critic.path",),
    "freezing_actor_steps": ("critic.warmup_steps",),
    "lr_scheduler": ("training.optimizer.schedule",),
    "l2": ("training.optimizer.weight_decay",),
    "adam_offload": ("training.offload",),
    "actor_num_nodes": ("resources.device_mapping.training",),
    "actor_num_gpus_per_node": ("training.workers",),
    "colocate_all_models": ("resources.device_mapping",),
    "vllm_enable_sleep": ("inference.sleep",),
    "deepspeed_enable_sleep": ("training.sleep",),
    "async_train": ("rollout.schedule.type",),
    "async_queue_size": ("rollout.schedule.ahead",),
    "eval_dataset": ("evaluation.sources.0.path",),
    "eval_n_samples_per_prompt": ("evaluation.samples_per_prompt",),
    "eval_temperature": ("evaluation.temperature",),
    "max_ckpt_num": ("checkpoint.keep",),
    "save_path": ("output_dir", "name"),
    "use_tensorboard": _TRACKERS,
    "micro_batch_size": _MICRO,
    "max_seq_len": ("rollout.max_episode_tokens",),
    "max_concurrent": ("rollout.max_in_flight",),
    "num_batches_ahead": ("rollout.schedule.ahead",),
    "vllm_importance_sampling_cap": ("algorithm.correction.cap",),
    "vllm_server_host": ("resources.device_mapping.inference",),
    "vllm_server_port": ("resources.device_mapping.inference",),
    "max_ckpt_to_keep": ("checkpoint.keep",),
    "norm_mean_type": ("algorithm.reward_shaping.normalise.mean",),
    "norm_std_type": ("algorithm.reward_shaping.normalise.std",),
    "reward_clip": ("algorithm.reward_shaping.clip",),
    "whiten_advantages": ("algorithm.advantage_shaping.whiten",),
    "advantage_clip": ("algorithm.advantage_shaping.clip",),
    "pg_clip_low": ("algorithm.loss.clip_low",),
    "pg_clip_high": ("algorithm.loss.clip_high",),
    "dual_clip_loss": ("algorithm.loss.dual_clip",),
    "importance_sampling": ("algorithm.loss.type",),
    "use_topr_loss": ("algorithm.loss.type",),
    "add_token_level_kl": ("algorithm.kl.use",),
    "max_len_mask": ("algorithm.mask.truncated",),
    "difficulty_mask": ("algorithm.mask.difficulty.of",),
    "difficulty_low_threshold": ("algorithm.mask.difficulty.low",),
    "difficulty_high_threshold": ("algorithm.mask.difficulty.high",),
    "is_use_additional_prompts": ("rollout.drop_zero_variance_groups",),
    "max_additional_running_prompts": ("rollout.max_oversampling",),
    "max_running_requests": ("inference.max_running",),
    "async_generation_ratio": ("rollout.schedule.type", "rollout.schedule.ahead"),
    "weight_type": ("algorithm.correction.level",),
    "upper_bound": ("algorithm.correction.cap",),
    "filters": ("algorithm.correction.reject",),
    "enable_old_logprobs_recompute": ("algorithm.old_logprobs",),
    "strategy_name": ("training.backend", "inference.type"),
    "lora_target": ("training.lora.target_modules",),
    "disable_gradient_checkpointing": ("training.gradient_checkpointing",),
    "tag_included": ("data.sources.0.domain",),
    "track_with": _TRACKERS,
    "tracker_kwargs": _TRACKERS,
    "rollout_mock": ("rollout.save_tokens", "rollout.schedule.type"),
    "num_env_groups": ("rollout.groups_per_step", "evaluation.seeds"),
    "num_groups_partition": ("environments.0.weight",),
    "custom_envs": ("environments.0.kwargs",),
    "max_actions_per_traj": ("rollout.max_turns",),
    "sequence_length": ("rollout.max_episode_tokens",),
    "step_reward_gamma": ("algorithm.advantage.gamma",),
    "n": (*_GROUP, "evaluation.samples_per_prompt"),
}

_ONCE = "each sample is trained on once in a step, which `algorithm.updates_per_step` divides into updates"
_RESUME = "`--resume` of `roll-like run` continues a run"
#: What needs no setting here, and why.
NEEDLESS = {
    "num_iterations": _ONCE,
    "ppo_epochs": _ONCE,
    "max_epochs": _ONCE,
    "load_checkpoint": _RESUME,
    "resume_mode": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "mask_env_responses": "only sampled tokens are ever trained",
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
    "val_env_manager": "ROLL",
    "train_infer_correction": "ROLL",
    "rollout_correction": "verl",
    "filter_groups": "verl",
    "kl_ctrl": "verl",
    "reward": "verl",
}


#: What is to be said of a setting whose values mean something else here.
REMARKS = {"warmup_ratio": "it counts optimizer updates: the ratio times their number, which --check prints"}


def translated(key: str, known: Collection[str]) -> str | None:
    """Return what to write for a setting of another tool; None for what is of none.

        >>> translated("num_generations", ["rollout.samples_per_prompt"])
        'here it is called `rollout.samples_per_prompt`'
        >>> translated("logging_steps", [])
        'there is no such setting: every step is logged'
        >>> translated("kl_coef", ["data.samples_per_step"])
        'this pipeline has no such setting; those that have it call it `algorithm.kl.coefficient`'

    Args:
        key: Its name there.
        known: All keys of the configuration.
    """
    names = OTHER_NAMES.get(key, ())
    here = [name for name in dict.fromkeys(_known(name, known) for name in names) if name]
    if here:
        remark = f", and {REMARKS[key]}" if key in REMARKS else ""
        return f"here it is called {_either(here)}{remark}"
    if key in NEEDLESS:
        return f"there is no such setting: {NEEDLESS[key]}"
    if key in OTHER_SECTIONS:
        return f"that is a section of {OTHER_SECTIONS[key]}; docs/coming_from.md says what its settings are called here"
    if names:
        return f"this pipeline has no such setting; those that have it call it {_either(names)}"
    return None


def _either(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names[:2])


def _known(name: str, known: Collection[str]) -> str:
    """Return a key, or the section that it would be in; nothing where the configuration has neither."""
    while name not in known and name.count(".") > 1:
        name = name.rpartition(".")[0]
    return name if name in known else ""
