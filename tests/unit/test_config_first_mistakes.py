"""What new users write by mistake: the answer says what was found, what was expected and which key to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from roll_like import RLVRConfig, cli
from roll_like.check.machine import ranges
from roll_like.config.load import load_config
from roll_like.config.model import ModelConfig
from roll_like.config.training import OptimizerConfig
from roll_like.errors import ConfigError
from roll_like.run.folder import resolve_run_folder

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
        ("training.optimizer.lr=1", "training.optimizer.lr: found 1; expected a number less than 1"),
        ("training.optimizer.lr=5e5", "expected a number less than 1"),
        ("training.optimizer.lr=1%", "expected a number; write 0.01"),
        ("training.optimizer.lr=10^-5", "expected a number; write 1e-05"),
        ("training.optimizer.lr='0,0001'", "expected a number; write 0.0001"),
        ("training.optimizer.warmup_steps=0.1", "0.1 of the run's 10 optimizer updates are 1: write 1"),
        ("training.optimizer.warmup_ratio=0.1", "warmup_steps`, and it counts optimizer updates: the ratio"),
        ("training.optimizer.betas='(0.9, 0.95)'", "expected a list; write `[0.9, 0.95]`"),
        ("training.optimizer.betas=[0.9]", "training.optimizer.betas.1: missing: the list is too short"),
        ("training.optimizer.schedule=off", "found off, which YAML reads as false; expected 'constant', 'cosine' or"),
        ("steps=yes", "steps: found yes, which YAML reads as true; expected a whole number"),
        ("steps=true", "steps: found true; expected a whole number"),
        ("steps='1,000'", "steps: found '1,000'; expected a whole number; write 1000"),
        ("steps=10k", "expected a whole number; write 10000"),
        ("steps=None", "steps: found 'None'; expected a whole number"),
        ("steps=1:30", "steps: YAML reads 1:30 as 90"),
        ("seed=010", "seed: YAML reads 010 as 8"),
        ("rollout.temperature=80%", "expected a number; write 0.8"),
        ("training.lora=None", "expected a section of `key: value` lines; YAML's word for nothing is null"),
        (
            "model.tokenizer=None",
            "found 'None', which is a text; YAML's word for nothing is null; write null, or",
        ),
        ("model=Qwen/Qwen3-0.6B", "expected a section of `key: value` lines; write `path: Qwen/Qwen3-0.6B` below it"),
        ("training.optimizer='lr 1e-5'", "write `lr: 1e-5`, with a colon and a blank"),
        ("model=[{path: x}]", "remove the dash before its keys"),
        (
            "rewards.use={type: ifeval}",
            "expected a list; write a dash and a blank before the first key of each: `- t",
        ),
        ("metrics.trackers=none", "expected a list; for none write `[]`"),
        ("rollout.stop='###'", "expected a list; write `['###']`"),
        ("name=5", "name: found 5; expected text; write it in quotes: name='\"5\"'"),
        ("name=1.10", "name: found 1.1; expected text; write it in quotes: name='\"1.10\"'"),
        ("rollout.stop=[x, yes]", 'rollout.stop.1: found true; expected text; write it in quotes: "yes", and all of'),
        ("name=1e5 # no", "name: YAML reads # no as a comment, which leaves 1e5\n"),
        ("name=run #3", "name: YAML reads #3 as a comment, which leaves run\n"),
        ("data.sources=[] # none", "put all of it in quotes: data.sources='\"[] # none\"'"),
        ("name=a b", "expected letters, digits, `_`, `-` and `.` alone"),
        ("resources.device=CPU", "did you mean 'cpu'?"),
        ("pipeline=RLVR", "unknown pipeline 'RLVR'; did you mean 'rlvr'?"),
        ("algorithm.advantage=GRPO", "unknown advantage estimator 'GRPO'; did you mean 'grpo'?"),
        ("resources.device_mapping.training=[0, 1]", 'expected a device range like "0-3" or "5", found [0, 1]'),
        ("step=5", "step: unknown key; did you mean `steps`?"),
        ("+steps=5", "+steps: unknown key; did you mean `steps`?"),
        ("steps = 5", "without blanks around `=`\n  fix: write steps=5"),
        ("steps: 5", "fix: write steps=5"),
        ("data.sources=[a", "is not valid YAML: did not find expected ',' or ']'\n"),
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("name: 1.10", "name: found 1.1; expected text; write it in quotes: '1.10' "),
        ("name: 1e5", "name: found 100000.0; expected text; write it in quotes: '1e5' "),
        ("seed: 7\nname: ${seed}", "name: found 7; expected text; write it in quotes: '7' "),
        ("rollout: {seeded: yes}\nsteps: ${rollout.seeded}", "steps: found true; expected a whole number "),
        ("training.optimizer.lr: 1e-6", "a key stands below its section: `training: {optimizer: {lr: …}}` "),
        ("training: {optimizer.lr: 1e-6}", "a key stands below its section: `optimizer: {lr: …}` "),
    ],
)
def test_a_line_of_a_file_is_answered_with_the_line_to_write(line: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"extends: {QUICKSTART}\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert expected in str(caught.value)


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
        ("training.optimizer.lr=0.5", "training.optimizer.lr: found 0.5: Adam moves each weight by up to this much"),
        (
            "training.optimizer.muon={lr: 0.02}",
            "training.optimizer.muon.lr: found 0.02: with adjust_lr_fn: match_rms_adamw a matrix moves about as far",
        ),
        (
            "training.optimizer.muon={adjust_lr_fn: original}",
            "training.optimizer.muon.lr: found 6e-05, which is optimizer.lr: with adjust_lr_fn: original a weight",
        ),
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


def test_what_follows_from_a_mistake_is_not_told_beside_it(tmp_path: Path) -> None:
    text = QUICKSTART.read_text().replace("\nsteps:", "\nstep:").replace("  path: package", "  pth: package")
    (tmp_path / "c.yaml").write_text(text.replace("lr: 6.0e-5", "lr: abc").replace("\nrewards:", "\nrewardz:"))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml")
    told = [line.split(":")[0] for line in str(caught.value).splitlines()]
    # neither `model.path` nor `steps` nor `rewards` is said to be missing, and unknown keys come first
    assert told[1:] == ["  1. model.pth", "  2. step", "  3. rewardz", "  4. training.optimizer.lr"]


def test_a_folder_of_runs_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(QUICKSTART, ["output_dir=~/runs", "name=x"])
    assert isinstance(config, RLVRConfig)
    assert resolve_run_folder(config, None) == (tmp_path / "runs" / "x", False)


@pytest.mark.parametrize("what", ["missing.yaml", ""])
def test_a_file_that_cannot_be_read_is_named_with_its_folder(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--config", what or ".", "--check"]) == 2
    assert f"error: the configuration {tmp_path / what} cannot be read: " in capsys.readouterr().err


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
    assert told[0].startswith("  1. learning_rate: unknown key; here it is called `training.optimizer.lr`")
    assert told[1] == f"  2. model.dtype: found 'fp16'; {expected}"
    for make in (lambda: RLVRConfig(**values), lambda: RLVRConfig.model_validate(values)):
        with pytest.raises(ConfigError, match="3 problems in RLVRConfig") as caught:
            make()
        assert str(caught.value).splitlines()[1:] == told


def test_a_section_from_python() -> None:
    with pytest.raises(ConfigError, match=r"^dtype: found 'fp16'; .*; did you mean 'float16'"):
        ModelConfig(path="x", dtype="fp16")
    with pytest.raises(ConfigError, match=r"^weight_decy: unknown key; did you mean `weight_decay`\?"):
        OptimizerConfig.model_validate({"weight_decy": 1})
