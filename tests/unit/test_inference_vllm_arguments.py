"""What vLLM is started with. vLLM itself is not imported."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_specs import engine_spec
from guessing_models import make_eagle3_head
from transformers import GraniteMoeHybridConfig, LlamaConfig

import roll_like
from roll_like.config.base import Finding
from roll_like.config.resources import ResourcesConfig
from roll_like.errors import GenerationError
from roll_like.inference.vllm.arguments import (
    DECODING_GRAPHS,
    engine_arguments,
    known_arguments,
    vllm_environment,
)
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.inference.vllm.plugin import VLLMPlugin
from roll_like.inference.vllm.served import guessing_models

SPEC = engine_spec("/models/policy", dtype="bfloat16", device="cuda", max_model_len=4096)


@pytest.mark.parametrize(("gpus", "backend"), [(1, None), (2, "mp"), (8, "mp")])
def test_an_engine_of_several_gpus_has_processes_of_its_own(gpus: int, backend: str | None) -> None:
    """Without the argument vLLM takes Ray in an actor, and with it GPUs of other replicas."""
    arguments = engine_arguments(VLLMConfig(), dataclasses.replace(SPEC, tensor_parallel_size=gpus))
    assert arguments["tensor_parallel_size"] == gpus
    assert arguments.get("distributed_executor_backend") == backend


def test_experts_are_divided_where_that_is_asked_for() -> None:
    two = dataclasses.replace(SPEC, tensor_parallel_size=2)
    assert engine_arguments(VLLMConfig(expert_parallel=True), two)["enable_expert_parallel"] is True
    assert "enable_expert_parallel" not in engine_arguments(VLLMConfig(), two)
    assert "enable_expert_parallel" in known_arguments()


def test_the_cache_has_a_share_of_a_gpu_or_a_size_on_cpu() -> None:
    on_gpu = engine_arguments(VLLMConfig(gpu_memory_utilization=0.5), SPEC)
    assert on_gpu["gpu_memory_utilization"] == 0.5
    assert "kv_cache_memory_bytes" not in on_gpu
    on_cpu = engine_arguments(VLLMConfig(kv_cache_gib=0.25), dataclasses.replace(SPEC, device="cpu"))
    assert on_cpu["kv_cache_memory_bytes"] == 2**28
    assert "gpu_memory_utilization" not in on_cpu


def test_beginnings_of_prompts_are_kept_but_for_layers_with_a_state(tmp_path: Path) -> None:
    """vLLM keeps their states where prompts may come in parts, which kills it on a CPU; states are in float32."""
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "llama")
    GraniteMoeHybridConfig(num_hidden_layers=1).save_pretrained(tmp_path / "granite")
    for name, kept, dtype in (("llama", True, None), ("granite", False, "float32")):
        for device in ("cpu", "cuda"):
            spec = dataclasses.replace(SPEC, model_path=str(tmp_path / name), device=device)
            arguments = engine_arguments(VLLMConfig(), spec)
            assert arguments["enable_prefix_caching"] is kept
            assert arguments.get("mamba_ssm_cache_dtype") == dtype
        chosen = VLLMConfig(engine_args={"mamba_ssm_cache_dtype": "bfloat16"})
        assert engine_arguments(chosen, spec)["mamba_ssm_cache_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("device", "eager", "expected"),
    [
        ("cuda", None, (False, DECODING_GRAPHS)),
        ("cuda", True, (True, None)),
        ("cuda", False, (False, None)),
        ("cpu", None, (True, None)),
        ("cpu", False, (False, None)),
    ],
)
def test_decoding_runs_from_cuda_graphs_by_default(device: str, eager: bool | None, expected: tuple[bool, Any]) -> None:
    spec = dataclasses.replace(SPEC, device=device)
    found = engine_arguments(VLLMConfig(enforce_eager=eager), spec)
    assert (found["enforce_eager"], found.get("compilation_config")) == expected
    assert ("TORCHDYNAMO_DISABLE" in vllm_environment(VLLMConfig(enforce_eager=eager), 1, device)) is (
        device == "cpu" and expected[0]
    )
    given = {"compilation_config": {"mode": 3}}
    found = engine_arguments(VLLMConfig(enforce_eager=eager, engine_args=given), spec)
    assert found["compilation_config"] == given["compilation_config"]


def test_a_model_that_guesses_runs_without_graphs() -> None:
    draft = {"method": "draft", "model": "/models/small"}
    assert engine_arguments(VLLMConfig(speculative=draft), SPEC)["enforce_eager"] is True
    assert engine_arguments(VLLMConfig(speculative=draft, enforce_eager=False), SPEC)["enforce_eager"] is False
    assert engine_arguments(VLLMConfig(speculative={"method": "ngram"}), SPEC)["enforce_eager"] is False


def test_processes_on_gpus_are_never_forked() -> None:
    """CUDA cannot be used in a fork of a process that has looked for GPUs; vLLM asks whether it was used there."""
    assert vllm_environment(VLLMConfig(), 1, "cuda")["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_who_starts_a_run_says_what_vllm_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert vllm_environment(VLLMConfig(), 1, "cpu")["VLLM_LOGGING_LEVEL"] == "ERROR"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert vllm_environment(VLLMConfig(), 1, "cuda")["VLLM_LOGGING_LEVEL"] == "INFO"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_guardian_finds_vllms_processes(device: str) -> None:
    """Their titles leave the environment in /proc as it is: the mark of the run that they belong to."""
    show = (
        "import os, pathlib, setproctitle; setproctitle.setproctitle('VLLM::EngineCore' * 40); "
        "print('ROLL_LIKE_MARK=here' in pathlib.Path('/proc/self/environ').read_text())"
    )
    added = vllm_environment(VLLMConfig(), 1, device)
    for environment, found in (({}, "False"), (added, "True")):
        marked = {"PATH": os.environ["PATH"], "ROLL_LIKE_MARK": "here", **environment}
        done = subprocess.run([sys.executable, "-c", show], env=marked, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == found


def test_code_in_vllms_workers_asks_the_model_runner_for_the_model_only() -> None:
    """Of what it reads of a worker, vLLM's runners on CPU and on GPU (V1 and V2) both have `get_model` alone."""
    folder = Path(roll_like.__file__).parent / "inference" / "vllm"
    asked = {
        node.attr
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "model_runner"
    }
    assert asked == {"get_model"}


@pytest.mark.parametrize(
    ("package", "way_out"),
    [("flashinfer", "; or set VLLM_USE_FLASHINFER_SAMPLER=0"), ("xgrammar", "as requirements/gpu.txt and cpu.txt do")],
)
def test_a_package_that_vllm_misses_is_to_be_installed(package: str, way_out: str) -> None:
    async def fail() -> None:
        raise ModuleNotFoundError(f"No module named '{package}'")

    with pytest.raises(GenerationError) as caught:
        asyncio.run(VLLMEngine(VLLMConfig(), SPEC)._load(fail()))
    error = caught.value
    assert f"No module named '{package}'" in error.message
    assert error.fix is not None
    assert error.fix.endswith(way_out)


def test_batch_invariance_is_an_environment_variable() -> None:
    config = VLLMConfig(deterministic=True)
    assert vllm_environment(config, 1, "cuda")["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in vllm_environment(VLLMConfig(), 1, "cuda")


def test_guesses_and_8_bits_are_arguments_that_vllm_knows() -> None:
    draft = {"method": "draft", "model": "/models/small", "num_speculative_tokens": 3}
    arguments = engine_arguments(VLLMConfig(speculative=draft, quantization="fp8"), SPEC)
    assert arguments["speculative_config"] == {**draft, "method": "draft_model"}
    assert arguments["quantization"] == "fp8_per_channel"
    new = arguments.keys() - engine_arguments(VLLMConfig(enforce_eager=True), SPEC).keys()
    assert new == {"speculative_config", "per_request_spec_decode_metrics", "quantization"}
    assert new <= known_arguments()


@pytest.mark.parametrize(
    ("device", "running", "speculative", "tokens"),
    [
        ("cpu", 128, {"method": "ngram"}, 4096),
        ("cpu", 64, {"method": "ngram", "num_speculative_tokens": 128}, 64 * 129),
        ("cpu", 1000, {"method": "draft", "model": "/models/small"}, 1000 * 6),
        ("cuda", 128, {"method": "ngram"}, None),
        ("cuda", 128, {"method": "suffix"}, 128 * 17),
    ],
)
def test_a_pass_has_room_for_what_is_guessed_of_all_that_run(
    device: str, running: int, speculative: dict[str, Any], tokens: int | None
) -> None:
    """The router gives an engine as many as it may run; vLLM would pass over those whose guesses have no room."""
    config = VLLMConfig(max_running=running, speculative=speculative)
    arguments = engine_arguments(config, dataclasses.replace(SPEC, device=device))
    assert arguments["max_num_seqs"] == running
    assert arguments.get("max_num_batched_tokens") == tokens


def test_a_pass_that_was_made_too_small_for_guesses_is_told() -> None:
    def found(**settings: Any) -> list[Finding]:
        config = VLLMConfig(engine_args={"max_num_batched_tokens": 600}, **settings)
        resources = ResourcesConfig(device="cuda", devices_per_node=1)
        return [each for each in VLLMPlugin.check(config, resources) if each.level == "warning"]

    (warning,) = found(speculative={"method": "ngram"})
    assert warning.key == "inference.engine_args.max_num_batched_tokens"
    assert "600 tokens hold 120 requests with their guesses" in warning.message
    assert "(it is 640 then)" in warning.message
    assert found() == []


def test_a_head_is_no_draft_and_a_draft_no_head(tmp_path: Path, tiny_model: Path) -> None:
    head = make_eagle3_head(tmp_path / "head")

    def found(method: str, model: Path) -> list[str]:
        config = VLLMConfig(speculative={"method": method, "model": str(model)})
        resources = ResourcesConfig(device="cpu", devices_per_node=2)
        return [each.message for each in VLLMPlugin.check(config, resources) if each.level == "error"]

    assert found("eagle3", head) == found("draft", tiny_model) == []
    (message,) = found("eagle3", tiny_model)
    assert "holds no EAGLE-3 head (fc.weight); use method: draft" in message
    (message,) = found("draft", head)
    assert "holds an EAGLE-3 head; use method: eagle3" in message


def test_models_whose_own_layers_guess_are_read_in_vllm() -> None:
    known = guessing_models()
    assert {"deepseek_v3", "Glm4MoeForCausalLM", "MiMoV2ForCausalLM"} <= known
    assert not {"model_type", "text_config", "llama", "Qwen3ForCausalLM"} & known


def test_a_draft_model_and_arctic_inference_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = ResourcesConfig(device="cpu", devices_per_node=2)

    def found(**speculation: str) -> list[str]:
        config = VLLMConfig(speculative=speculation)
        return [each.key for each in VLLMPlugin.check(config, on_cpu) if each.level == "error"]

    assert found(method="draft", model=str(tmp_path)) == ["inference.speculative.model"]
    (tmp_path / "config.json").write_text("{}")
    assert found(method="draft", model=str(tmp_path)) == found(method="ngram") == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert found(method="suffix") == ["inference.speculative.method"]
