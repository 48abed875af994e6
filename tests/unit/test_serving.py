"""Talking to what a run has trained, and serving it."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_folders import make_run

from roll_like import cli
from roll_like.errors import ConfigError
from roll_like.serving import serve
from roll_like.serving.chat import start_chat
from roll_like.serving.serve import serve_command, serve_environment
from roll_like.serving.trained import TrainedModel, trained_model

CONFIG = {
    "model": {"path": "x", "template_options": {"enable_thinking": False}},
    "data": {"sources": [{"path": "a", "system_prompt": "Be short."}, {"path": "b", "system_prompt": "Be short."}]},
    "rollout": {"temperature": 0.7, "top_p": 0.9, "max_response_tokens": 8},
    "resources": {"device": "cpu"},
    "inference": {"kv_cache_gib": 1.4},
}

CALLS = (
    *("--enable-auto-tool-choice", "--tool-parser-plugin", "roll_like.serving.tool_parser"),
    *("--tool-call-parser", "roll_like"),
)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs" / "sums", config=CONFIG)
    shutil.copytree(tiny_model, folder / "model")
    return folder


def test_a_run_is_found_by_name_folder_and_model(run: Path, tmp_path: Path) -> None:
    expected = TrainedModel(
        directory=run / "model",
        name="sums",
        template_options={"enable_thinking": False},
        system_prompt="Be short.",
        sampling={"temperature": 0.7, "top_p": 0.9},
        on_cpu=True,
        kv_cache_gib=1.4,
    )
    for given in ("sums", str(run), "runs/sums/model"):
        assert trained_model(given, Path("runs"), command="chat") == expected
    exported = shutil.copytree(run / "model", tmp_path / "exported")
    assert trained_model("exported", Path("runs"), command="chat") == TrainedModel(exported, "exported")


def test_data_with_several_system_messages_suggest_none(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["sources"][0]["system_prompt"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert trained_model("sums", Path("runs"), command="chat").system_prompt is None


def test_what_has_no_model_to_talk_to_says_why(run: Path) -> None:
    with pytest.raises(ConfigError, match="serve suns: there is no run in runs/suns"):
        trained_model("suns", Path("runs"), command="serve")
    with pytest.raises(ConfigError, match="nowhere holds no runs: start in the folder that has it"):
        trained_model("sums", Path("nowhere"), command="serve")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"pipeline": "reward_model"}))
    with pytest.raises(ConfigError, match="pipeline: reward_model gives scores, not texts"):
        trained_model("sums", Path("runs"), command="chat")
    shutil.rmtree(run / "model")
    with pytest.raises(ConfigError, match=r"there is no model in .*/runs/sums/model; .*\n.*checkpoint.export: true"):
        trained_model("sums", Path("runs"), command="chat")
    (run / "checkpoints" / "step_000020").mkdir(parents=True)
    export = f"roll-like export --checkpoint {run}/checkpoints/step_000020 -o {run}/model"
    with pytest.raises(ConfigError, match=export):
        trained_model("sums", Path("runs"), command="chat")


def test_the_servers_command_and_environment(run: Path) -> None:
    model = trained_model("sums", Path("runs"), command="serve")
    command = serve_command(model, "127.0.0.1", 8001, ["--max-model-len=64"])
    assert command == [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(run / "model")),
        *("--served-model-name", "sums", "--host", "127.0.0.1", "--port", "8001"),
        *("--generation-config", "vllm", *CALLS, "--override-generation-config", '{"temperature": 0.7, "top_p": 0.9}'),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}', "--max-model-len=64"),
    ]
    assert serve_environment(model, {"A": "b"}) == {"A": "b", "VLLM_CPU_KVCACHE_SPACE": "1"}
    assert serve_environment(model, {"VLLM_CPU_KVCACHE_SPACE": "9"}) == {"VLLM_CPU_KVCACHE_SPACE": "9"}
    assert serve_environment(TrainedModel(Path("x"), "x"), {}) == {}
    unsampled = serve_command(TrainedModel(Path("x"), "x"), "127.0.0.1", 8001, [])
    assert unsampled[-7:] == ["--generation-config", "vllm", *CALLS]  # without a penalty that the model's files suggest


def test_reasoning_is_divided_where_the_model_has_tags(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    model = TrainedModel(tmp_path, "x")
    plain = serve_command(model, "127.0.0.1", 8001, [])
    assert "--reasoning-parser" not in plain
    (tmp_path / "chat_template.jinja").write_text("{{ m.content.split('</think>')[-1] }}")
    options = [
        *("--reasoning-parser-plugin", "roll_like.serving.reasoning_parser", "--reasoning-parser", "roll_like"),
        *("--structured-outputs-config", '{"enable_in_reasoning": true}'),
    ]
    assert serve_command(model, "127.0.0.1", 8001, []) == [*plain, *options]
    for other in (["--reasoning-parser=qwen3"], ["--reasoning_parser", "qwen3"]):
        assert serve_command(model, "127.0.0.1", 8001, other) == [*plain, *other]
    # messages of several kinds, which vLLM's own parser divides
    (tmp_path / "chat_template.jinja").write_text("<|open|>think<|sep|> <|close|>think<|sep|>")
    assert serve_command(model, "127.0.0.1", 8001, []) == plain
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"content": "[THINK]"}, {"content": "[/THINK]"}]}')
    assert serve_command(model, "127.0.0.1", 8001, []) == [*plain, *options]


def test_tags_of_other_characters_are_found_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "\\u25c1think\\u25b7 \\u25c1/think\\u25b7"}')
    tags = TrainedModel(tmp_path, "x").reasoning
    assert tags is not None
    assert (tags.open, tags.close) == ("◁think▷", "◁/think▷")


def test_a_model_that_depends_on_its_window_gets_the_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_parameters": {"rope_type": "longrope"}}))
    model = trained_model("sums", Path("runs"), command="serve")
    assert model.depends_on_window
    assert model.window is None  # the run's configuration is not one that loads
    assert "--max-model-len" not in serve_command(model, "127.0.0.1", 8001, [])
    (run / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "pipeline": "rlvr",
                "name": "sums",
                "steps": 1,
                "model": {"path": "x"},
                "data": {"sources": [{"path": "a"}], "max_prompt_tokens": 30},
                "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 12},
                "rewards": {"use": [{"type": "exact_match"}]},
                "resources": {
                    "device": "cpu",
                    "devices_per_node": 1,
                    "device_mapping": {"training": "0", "inference": "0"},
                },
            }
        )
    )
    model = trained_model("sums", Path("runs"), command="serve")
    assert model.window == 42
    assert serve_command(model, "127.0.0.1", 8001, [])[-2:] == ["--max-model-len", "42"]
    assert serve_command(model, "127.0.0.1", 8001, ["--max-model-len=64"])[-1:] == ["--max-model-len=64"]
    for other in ("--max-model-len=64", "--max_model_len=64"):
        assert "42" not in serve_command(model, "127.0.0.1", 8001, [other])


def test_calls_of_gpt_oss_are_left_to_vllms_parser_which_takes_no_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    command = serve_command(TrainedModel(tmp_path, "x"), "127.0.0.1", 8001, [])
    assert command[-3:] == ["--enable-auto-tool-choice", "--tool-call-parser", "openai"]


def test_the_command_becomes_the_server(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(serve, "refuse_used_port", lambda *_, **__: None)
    assert cli.main(["serve", "sums", "--port", "8002", "--vllm=--max-model-len=64", "--vllm=--dtype=float32"]) == 0
    ((program, command, _),) = started
    assert program == sys.executable
    assert command[-2:] == ["--max-model-len=64", "--dtype=float32"]
    printed = capsys.readouterr().out
    assert "sums at http://127.0.0.1:8002/v1" in printed
    assert "trained with the system message: Be short." in printed


def test_own_options_of_structured_outputs_are_told_what_they_replace(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: None)
    monkeypatch.setattr(serve, "refuse_used_port", lambda *_, **__: None)
    (run / "model" / "chat_template.jinja").write_text("{{ m.content.split('</think>')[-1] }}")
    for option in ("--structured_outputs_config.backend=xgrammar", '--structured-outputs-config={"backend": "auto"}'):
        assert cli.main(["serve", "sums", f"--vllm={option}"]) == 0
        assert "without enable_in_reasoning: true" in capsys.readouterr().out
    assert cli.main(["serve", "sums"]) == 0
    assert "enable_in_reasoning" not in capsys.readouterr().out


def test_a_port_in_use_is_refused_before_vllm_starts(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the server was started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "sums", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err


def test_a_conversation_in_the_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAgain\n/new\nHi\n"))
    assert cli.main(["chat", "sums", "--temperature", "0", "--max-tokens", "5"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading == "sums, temperature 0; /new begins anew, Ctrl-D ends"
    answers = "\n".join(lines).split("> ")[1:]
    assert len(answers) == 6  # the last one is the end of the input
    assert answers[0] == answers[4] != ""


def test_a_conversation_has_the_window_of_the_run(run: Path) -> None:
    """As served: a short conversation would have LongRoPE's other factors."""
    from model_families import make_family

    waves = []
    for directory, window in ((run / "model", 64), (run / "model", None)):
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0}
        make_family(
            "phi3",
            original_max_position_embeddings=16,
            rope_parameters=rope | {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
        ).save_pretrained(directory)
        chat = start_chat(TrainedModel(directory, "x", window=window), sampling={}, max_tokens=1, system=None)
        rotary = chat.model.model.rotary_emb
        waves.append(rotary(torch.zeros(1, 4, 8), torch.arange(4)[None])[0])
    assert waves[0].shape == waves[1].shape
    assert not torch.allclose(waves[0], waves[1])


def test_turns_are_remembered_until_a_new_beginning(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained_model("sums", Path("runs"), command="chat")
    chat = start_chat(model, sampling=model.sampling, max_tokens=3, system="Be kind.")
    shown: list[list[dict[str, str]]] = []
    render = chat.renderer.render
    monkeypatch.setattr(
        chat.renderer,
        "render",
        lambda messages, tools: shown.append([dict(one) for one in messages]) or render(messages, tools),
    )
    first = chat.say("One")
    chat.say("Two")
    chat.begin()
    chat.say("Three")
    system = {"role": "system", "content": "Be kind."}
    assert shown == [
        [system, {"role": "user", "content": "One"}],
        [
            system,
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "Two"},
        ],
        [system, {"role": "user", "content": "Three"}],
    ]


def test_what_the_starting_models_authors_suggest_does_not_change_answers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationMixin

    used: list[list[str]] = []
    made = GenerationMixin._get_logits_processor

    def recorded(*arguments: Any, **more: Any) -> Any:
        processors = made(*arguments, **more)
        used.append([type(one).__name__ for one in processors])
        return processors

    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", recorded)
    model = trained_model("sums", Path("runs"), command="chat")
    path = run / "model" / "generation_config.json"
    plain = start_chat(model, sampling={"temperature": 0}, max_tokens=8, system=None).say("Hi")
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "repetition_penalty": 1.3, "top_k": 5, "suppress_tokens": [7]})
    )
    assert start_chat(model, sampling={"temperature": 0}, max_tokens=8, system=None).say("Hi") == plain
    start_chat(model, sampling=model.sampling, max_tokens=2, system=None).say("Hi")
    start_chat(model, sampling={}, max_tokens=2, system=None).say("Hi")
    assert used == [[], [], ["TemperatureLogitsWarper", "TopPLogitsWarper"], []]
