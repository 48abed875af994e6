"""What new users write by mistake: the answer says what was found, what was expected and which key to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from roll_like import RLVRConfig, cli
from roll_like.check.machine import ranges
from roll_like.config.sections import ModelConfig, OptimizerConfig
from roll_like.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "rlvr_quickstart.yaml"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=4294967296", "seed: found 4294967296; expected a number less than 4294967296"),
        ("steps=1e26", "steps: found 1e+26; expected a smaller number"),
        ("steps=1000000000000", "steps: found 1000000000000; expected a number less than or equal to 1000000000"),
        ("rollout.temperature=1e9", "expected a number less than or equal to 100"),
        (
            "algorithm.kl.coefficient=0.1",
            "there is no KL penalty with use: none, so this has no effect; set algorithm.",
        ),
        (
            "pipeline=grpo",
            "'grpo' is an advantage estimator: `pipeline: rlvr` (or agentic) with `algorithm.advantage: ",
        ),
        ("pipeline=kto", "'kto' is a preference loss: `pipeline: dpo` (or online_dpo) with `algorithm.loss: kto`"),
        ("algorithm.loss=grpo", "unknown policy loss 'grpo'; 'grpo' is an advantage estimator: "),
        ("algorithm.advantage=ppo", "'ppo' is a policy loss: `pipeline: rlvr` (or agentic) with `algorithm.loss: ppo`"),
        ("model.dtype=fp16", "expected 'auto', 'float32', 'bfloat16' or 'float16'; did you mean 'float16'?"),
        ("resources.device=gpu", "resources.device: found 'gpu'; expected 'cpu' or 'cuda'; did you mean 'cuda'?"),
        ("model.dtype=bloat16", "did you mean 'bfloat16'?"),
        ("rewards.use=ifeval", "rewards.use: found 'ifeval'; expected a list; write `[ifeval]`"),
        ("rewards.use=[]", "rewards.use: found []; expected a list of 1 or more"),
        ("num_generations=8", "here it is called `rollout.samples_per_prompt`"),
        ("per_device_train_batch_size=8", "here it is called `training.max_tokens_per_micro_batch`"),
        ("training.learning_rate=8", "here it is called `training.optimizer.lr`"),
        ("logging_steps=8", "there is no such setting: every step is logged"),
        ("actor_rollout_ref.rollout.n=8", "that is a section of verl; docs/coming_from.md says"),
    ],
)
def test_a_mistake_is_explained_in_a_few_lines(
    override: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--config", str(QUICKSTART), "--check", override]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) <= 3


@pytest.mark.parametrize("key", ["num_generations", "vllm_importance_sampling_cap", "kl_coef"])
def test_a_setting_that_only_other_pipelines_have_is_named(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--config", str(QUICKSTART.with_name("sft_quickstart.yaml")), "--check", f"{key}=8"]) == 2
    assert (
        f"{key}: unknown key; this pipeline has no such setting; those that have it call it `"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.optimizer.lr=1000", "training.optimizer.lr: found 1000: Adam moves each weight by up to this much"),
        ("rollout.temperature=20", "rollout.temperature: found 20: tokens are drawn almost at random"),
        ("evaluation.every=1000", "evaluation.every: the run has 10 steps, fewer than 1000"),
    ],
)
def test_a_verdict_counts_warnings(override: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--config", str(QUICKSTART), "--check", override]) == 0
    shown = capsys.readouterr()
    assert f"warning: {expected}" in shown.err
    assert "no error, and 1 warning: see above" in shown.out


def test_a_run_to_continue_is_looked_for_in_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "--config", str(QUICKSTART), "--check", "--resume", "nosuch", f"output_dir={tmp_path}"]
    assert cli.main(command) == 2
    assert f"--resume nosuch: there is no run in {tmp_path / 'nosuch'}" in capsys.readouterr().err


def test_devices_are_listed_as_ranges() -> None:
    assert [ranges([]), ranges([3]), ranges([5, 4, 0, 1, 9])] == ["", "3", "0-1, 4-5, 9"]


def test_python_says_what_yaml_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = {"learning_rate": 1e-5, "steps": 0, "model": {"path": "x", "dtype": "fp16"}}
    values = yaml.safe_load(QUICKSTART.read_text()) | mistakes
    file = tmp_path / "mistakes.yaml"
    file.write_text(yaml.safe_dump(values))
    assert cli.main(["run", "--config", str(file)]) == 2
    told = [line.split(" [")[0] for line in capsys.readouterr().err.splitlines()[1:]]
    expected = "expected 'auto', 'float32', 'bfloat16' or 'float16'; did you mean 'float16'?"
    assert told[0] == f"  1. model.dtype: found 'fp16'; {expected}"
    for make in (lambda: RLVRConfig(**values), lambda: RLVRConfig.model_validate(values)):
        with pytest.raises(ConfigError, match="3 problems in RLVRConfig") as caught:
            make()
        assert str(caught.value).splitlines()[1:] == told


def test_a_section_from_python() -> None:
    with pytest.raises(ConfigError, match=r"^dtype: found 'fp16'; .*; did you mean 'float16'"):
        ModelConfig(path="x", dtype="fp16")
    with pytest.raises(ConfigError, match=r"^weight_decy: unknown key; did you mean `weight_decay`\?"):
        OptimizerConfig.model_validate({"weight_decy": 1})
