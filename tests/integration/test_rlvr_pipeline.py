"""The whole pipeline on real Ray, vLLM and DeepSpeed: it learns, scales out, exports and tidies up."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from dashboards import asked_names
from hygiene import nothing_left
from prometheus_client.parser import text_string_to_metric_families
from run_config import read_lines, run_here, start_run, wait_for, write_run

from roll_like.cluster.cluster import ClusterHandle
from roll_like.training.rank import TrainingRank

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]

SOURCES = [Path(__file__).resolve().parents[2] / folder for folder in ("roll_like", "pipelines")]
VLLM = {"type": "vllm", "kv_cache_gib": 0.2, "max_running": 32}
ENGINES = pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])


def test_a_trivial_reward_is_learned(tmp_path: Path, tiny_model: Path) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=10,
        model={"path": str(tiny_model), "dtype": "bfloat16"},
        inference=VLLM,
        rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_response_tokens": 12},
        training={"zero_stage": 1, "optimizer": {"lr": 8.0e-3}, "max_tokens_per_micro_batch": 2048},
        evaluation={"sources": [{"path": str(tmp_path / "eval.jsonl")}], "samples_per_prompt": 2},
        checkpoint={"every": 5, "keep": 1, "export": True},
        metrics={"trackers": [{"type": "mlflow"}, {"type": "prometheus", "port": 0}], "console": "plain"},
    )
    run = tmp_path / "runs" / "tiny"
    with nothing_left():
        process = start_run(config)
        wait_for(process, "step  1/10")
        [target] = json.loads((run / "prometheus.json").read_text())
        asked, scraped, served = asked_names(), "", set[str]()
        while not (asked["roll_like"] | asked["vllm"]) <= served:  # an engine that is busy for seconds is left out
            with urlopen(f"http://{target['targets'][0]}/metrics", timeout=60) as answer:
                scraped = answer.read().decode()
            families = text_string_to_metric_families(scraped)
            served = {sample.name for family in families for sample in family.samples}
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert 'vllm:generation_tokens_total{engine="0"' in scraped
    assert not (run / "prometheus.json").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.1
    assert summary["eval_after"] > summary["eval_before"] + 0.1
    assert summary["steps"] == 10
    steps = read_lines(run / "metrics.jsonl")
    assert all(abs(step["mismatch/logprob_difference"]) < 0.1 for step in steps)
    assert all(step["staleness/max"] == 0 for step in steps)
    # the first push comes before the first step; the second and the eleventh are probed
    assert [number for number, step in enumerate(steps, 1) if "sync/probe" in step] == [1, 10]
    assert all(0 < step["sync/probe"] < 0.1 for step in (steps[0], steps[-1]))
    roles = ("trainer", "inference", "rewards")
    assert all(0.1 < step[f"memory/{role}_gib"] < 8 for step in steps for role in roles)
    for name in ("time/generate", "time/train", "time/sync", "throughput/tokens_per_second", "train/entropy"):
        assert all(step[name] > 0 for step in steps), name
    assert (run / "curves.png").stat().st_size > 10_000
    check_export(run / "model")


def check_export(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    assert "eval/avg" in (directory / "README.md").read_text()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say something about the number 33."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.count("e") / max(len(text), 1) > 0.3, text


@pytest.mark.slow
@ENGINES
def test_two_replicas_two_ranks_zero_3_with_reference(tmp_path: Path, tiny_model: Path, engine: str) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=2,
        model={"path": str(tiny_model), "dtype": "bfloat16"},
        inference={**(VLLM if engine == "vllm" else {"type": "hf"}), "replicas": 2},
        training={"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 512},
        algorithm={"kl": {"use": "loss", "coefficient": 0.01}, "updates_per_step": 2, "advantage": "rloo"},
        reference={"workers": 2},
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [step["train/updates"] for step in steps] == [2, 2]
    # the first update starts at the reference, the later ones have left it
    assert steps[-1]["train/kl"] > 0
    assert all(step["mismatch/logprob_difference"] < 0.1 for step in steps)
    assert 0 < steps[0]["sync/probe"] < 0.1


def test_four_calls_from_the_command_to_the_ranks(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_run(tmp_path, tiny_model, steps=1, checkpoint={"at_end": False, "export": False})
    stacks = []
    everywhere = ClusterHandle.everywhere

    def recorded(cluster: ClusterHandle[Any], method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is TrainingRank.optimizer_step:
            files = [(Path(frame.filename), frame.function) for frame in inspect.stack()]
            stacks.append([call for file, call in files if any(file.is_relative_to(folder) for folder in SOURCES)])
        return everywhere(cluster, method, *args, **kwargs)

    monkeypatch.setattr(ClusterHandle, "everywhere", recorded)
    code, output = run_here(config)
    assert code == 0, output
    # as docs/architecture.md counts them; `main` calls a command
    assert stacks == [["train_step", "run", "launch", "_run", "main"]]


@ENGINES
def test_groups_zero_variance_are_replaced(tmp_path: Path, tiny_model: Path, engine: str) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=1,
        model={"path": str(tiny_model), "dtype": "bfloat16"},
        inference=VLLM if engine == "vllm" else {"type": "hf"},
        rollout={
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_response_tokens": 3,
            "drop_zero_variance_groups": True,
            "max_oversampling": 3.0,
        },
        algorithm={"kl": {"use": "reward", "coefficient": 0.01}, "advantage": "reinforce_plus_plus"},
        reference={},
        rewards={"use": [{"type": "has_letter_e"}]},
        checkpoint={"at_end": False, "export": False},
    )
    code, output = run_here(config)
    assert code == 0, output
    (step,) = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert step["rollout/groups/accepted"] <= 4
    assert step["rollout/groups/accepted"] + step["rollout/groups/rejected"] <= 12
    assert step["rollout/groups/rejected"] > 0


@pytest.mark.parametrize("estimator", ["grpo_process", pytest.param("gae", marks=pytest.mark.slow)])
def test_scores_of_steps_are_learned_from(tmp_path: Path, tiny_model: Path, estimator: str) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=8,
        inference={"type": "hf"},
        rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_response_tokens": 12},
        training={"optimizer": {"lr": 8.0e-3}, "max_tokens_per_micro_batch": 2048},
        algorithm={"advantage": {"type": estimator}},
        rewards={"use": [{"type": "letter_e_by_step"}]},
        checkpoint={"at_end": False, "export": False},
        **({"critic": PPO["critic"]} if estimator == "gae" else {}),
    )
    code, output = run_here(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert steps[-1]["rollout/reward/mean"] > steps[0]["rollout/reward/mean"] + 0.05
    (first, *_) = read_lines(next((tmp_path / "runs" / "tiny" / "rollouts").glob("*1.jsonl")))
    assert first["step_scores"]["letter_e_by_step"][-1]["end"] == len(first["text"])


PPO = {
    "algorithm": {
        "advantage": {"type": "gae", "lam": 0.95},
        "advantage_shaping": {"whiten": True},
        "reward_shaping": {"normalise": {"std": "running"}},
        "kl": {"use": "reward", "coefficient": 0.01, "adaptive": {"target": 0.001, "horizon": 100}},
    },
    "reference": {},
    "critic": {"optimizer": {"lr": 1.0e-2}, "max_tokens_per_micro_batch": 512, "warmup_steps": 1},
}


@pytest.mark.slow
def test_ppo_resumes_with_its_critic(tmp_path: Path, tiny_model: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    code, output = run_here(write_run(whole, tiny_model, steps=4, **PPO))
    assert code == 0, output
    config = write_run(halves, tiny_model, steps=4, **PPO)
    with nothing_left():
        code, output = run_here(config, "steps=2")
        assert code == 0, output
        code, output = run_here(config, "--resume")
        assert code == 0, output
    expected, found = (read_lines(folder / "runs" / "tiny" / "metrics.jsonl") for folder in (whole, halves))
    assert [step["train/updates"] for step in expected] == [0, 1, 1, 1]  # the critic warms up in the first
    for name in (
        "critic/loss",
        "critic/explained_variance",
        "critic/grad_norm",
        "train/loss",
        "train/kl_coefficient",
        "reward/shaped",
        "rollout/reward/mean",
    ):
        assert [step.get(name) for step in found] == [step.get(name) for step in expected], name
    # another critic, or an empty one, would have given other numbers
    assert len({step["critic/loss"] for step in expected}) == 4
    assert (halves / "runs" / "tiny" / "checkpoints" / "step_000004" / "critic").is_dir()


@pytest.mark.slow
def test_remax_on_vllm_with_two_reward_pools(tmp_path: Path, tiny_model: Path) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=2,
        model={"path": str(tiny_model), "dtype": "bfloat16"},
        inference=VLLM,
        rollout={"prompts_per_step": 8, "samples_per_prompt": 1, "max_response_tokens": 12},
        algorithm={"advantage": "remax", "loss": "reinforce"},
        rewards={
            "use": [{"type": "letter_e"}, {"type": "has_letter_e", "weight": 0.5}],
            "pools": {"slow": {"rewards": ["has_letter_e"], "workers": 2, "devices": "0-1"}},
        },
        checkpoint={"at_end": False, "export": False},
    )
    code, output = run_here(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    # the greedy samples are generated, but not trained on
    assert [step["rollout/samples"] for step in steps] == [8, 8]
    assert all(step["rollout/tokens"] > step["train/tokens"] for step in steps)
    assert all(step["advantage/std"] > 0 for step in steps)
    for step in steps:  # one pool each; their results add up
        parts = step["rollout/reward/letter_e"] + 0.5 * step["rollout/reward/has_letter_e"]
        assert step["rollout/reward/mean"] == pytest.approx(parts)
