"""Reinforcement learning on language models with Ray, vLLM and DeepSpeed.

Everything public is imported from here. A name is looked up when it is first used, so that `import roll_like` and a
worker process load only what they need; `__init__.pyi` shows the names to type checkers and editors.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Configuration class of each built-in pipeline, by the pipeline's registered name.
_CONFIGS = {
    "AgenticConfig": "agentic",
    "DPOConfig": "dpo",
    "DistillConfig": "distill",
    "OnPolicyDistillConfig": "on_policy_distill",
    "OnlineDPOConfig": "online_dpo",
    "RLVRConfig": "rlvr",
    "RewardModelRunConfig": "reward_model",
    "SFTConfig": "sft",
}
#: Every other name, by the module of this package that has it.
_MODULES = {
    "algorithms.advantages": "AdvantageEstimator GroupEstimator Rewards",
    "algorithms.advantages.base": "Groups TokenValues ValueFunction",
    "algorithms.distillation.base": "DistillationConfig DistillationLoss Outcomes",
    "algorithms.losses": "BatchTokens LossInputs PolicyLoss TokenLosses",
    "algorithms.preference.base": (
        "PairConfig PairInputs PairLosses PairedLoss UnpairedInputs UnpairedLoss UnpairedLosses"
    ),
    "builtin.pipelines.agentic.config": (
        "EnvWorkersConfig EnvironmentConfig EpisodeEvaluationConfig EpisodeRolloutConfig ProgramConfig ProxyConfig"
    ),
    "builtin.pipelines.distill.config": (
        "DistillationAlgorithmConfig DistillationDataConfig DistillationEvaluationConfig DistillationSource"
    ),
    "builtin.pipelines.dpo.config": (
        "LabelledDataConfig LabelledEvaluationConfig PreferenceAlgorithmConfig PreferenceDataConfig "
        "PreferenceDeviceMappingConfig PreferenceEvaluationConfig PreferenceReferenceConfig PreferenceResourcesConfig"
    ),
    "builtin.pipelines.on_policy_distill.config": "TeacherSignalConfig",
    "builtin.pipelines.online_dpo.config": "OnlineReferenceConfig OnlineRolloutConfig PairEvaluationConfig PairsConfig",
    "builtin.pipelines.reward_model.config": (
        "RewardModelAlgorithmConfig RewardModelDataConfig RewardModelEvaluationConfig"
    ),
    "builtin.pipelines.sft.config": "SFTDataConfig SFTEvaluationConfig",
    "check": "Report",
    "cluster": "Cluster ResourceManager",
    "config.algorithm": (
        "AdaptiveKLConfig AdvantageShapingConfig AlgorithmConfig CorrectionConfig DifficultyConfig KLConfig "
        "LengthPenaltyConfig MaskConfig NormaliseConfig OverlongConfig RejectConfig RewardShapingConfig"
    ),
    "config.base": "ConfigModel PipelineConfig PluginConfig PluginSetting",
    "config.inference": "EngineCapabilities EngineConfig JudgeConfig",
    "config.load": "dump_config load_config",
    "config.offline": "OfflineRunConfig RowsEvaluationConfig",
    "config.policy_gradient": "PolicyGradientConfig SamplingRunConfig",
    "config.prompts": "DomainConfig EvaluationConfig PromptConfig RolloutConfig",
    "config.rewards": "OptionalRewardsConfig RewardPoolConfig RewardsConfig",
    "config.run": "Rule RunConfig ScheduleConfig",
    "config.sections": (
        "CheckpointConfig CriticConfig DataConfig DataSource DeviceMappingConfig DeviceRange LoRAConfig MetricsConfig "
        "ModelConfig OptimizerConfig ReferenceConfig ResourcesConfig SamplingDeviceMappingConfig "
        "SamplingResourcesConfig TrainerConfig TrainerDeviceMappingConfig TrainerResourcesConfig TrainingConfig"
    ),
    "config.teachers": "TeacherConfig",
    "config.training_data": (
        "ConversationData ConversationSource LabelledData LabelledSource PairData PairSource ScoredPairData "
        "ScoredPairSource"
    ),
    "config.violations": "Finding Violation",
    "data.chat": "Renderer",
    "data.conversations": "load_conversations",
    "envs": (
        "AnsiText Commands DiscreteActions EnvReport FewShot FreeText History Instructions ScaledReward Success "
        "TextWrapper TokenLimit TurnLimit check_env make_env read_action read_tag write_action"
    ),
    "errors": (
        "CheckpointError ConfigError DataError EngineError EnvError GenerationError PluginError RefusedAnswerError "
        "ResourceError RewardError RollLikeError SandboxError WeightSyncError WorkerError"
    ),
    "inference.hf.config": "HFConfig",
    "inference.interface": (
        "EngineSpec FailedGeneration Fingerprints GenerateRequest Generation InferenceEngine JudgeServer PolledEngine "
        "Sampling"
    ),
    "inference.plugin": "EnginePlugin",
    "inference.vllm.config": "VLLMConfig",
    "inference.weight_transfer.fingerprint": "fingerprint",
    "inference.weight_transfer.interface": "WeightTransfer",
    "inference.weight_transfer.shared_memory": "BucketInfo read_bucket",
    "metrics.trackers": "MLflowConfig TensorBoardConfig TraceTracker Tracker WandbConfig",
    "offline.pipeline": "OfflinePipeline",
    "policy_gradient.pipeline": "PolicyGradientPipeline",
    "registry": (
        "ADVANTAGES DISTILLATION_LOSSES INFERENCE_ENGINES LOSSES PIPELINES PREFERENCE_LOSSES REWARDS TRACKERS "
        "TRAINING_BACKENDS"
    ),
    "rewards.base": "Completion Outcome Reward RewardCase RewardConfig RewardResult register_reward",
    "rewards.check": "RewardReport check_reward",
    "run.pipeline": "Pipeline",
    "run.state": "Evaluates RunContext RunState",
    "sandbox": "AssertTest CallTest CodeEvaluator CodeResult Limits StdioTest",
    "tools": "MalformedCall Tool ToolCall ToolError ToolOutcome Toolbox parse_tool_calls tool_from_function",
    "training.engine": "TrainingEngine",
    "training.interface": "Engine Objective RankModel RankSpec Share TrainingBackend Update",
    "training.language_model": "LanguageModelObjective",
    "training.layout": "MicroBatch micro_batches",
    "training.rank": "TrainingRank",
    "training.start": "rank_spec start_engine start_trainer",
    "types": (
        "Failure Group Message Part PolicySample RunResult Scored Segment StopReason Task TrainingSample Trajectory "
        "TurnRecord"
    ),
    "values": "Last Max Mean Metric Metrics Min Sum",
}
_PLACES = {name: f"roll_like.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted([*_CONFIGS, *_PLACES])  # noqa: PLE0605 - a list of strings, though computed


def __getattr__(name: str) -> Any:
    if name in _CONFIGS:
        from roll_like.registry import PIPELINES

        value = PIPELINES.get(_CONFIGS[name])
    elif name in _PLACES:
        value = getattr(importlib.import_module(_PLACES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
