"""vLLM's own server on what a run has trained."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

from roll_like.metrics.commands import refuse_used_port
from roll_like.serving.trained import TrainedModel

#: Module that registers the parser of tool calls; vLLM imports it.
TOOL_PARSER = "roll_like.serving.tool_parser"
#: Module that registers the parser of reasoning.
REASONING_PARSER = "roll_like.serving.reasoning_parser"
#: Options of vLLM's that take their place.
_OTHER_REASONING, _OTHER_WINDOW = "--reasoning-parser", "--max-model-len"
_STRUCTURED_OUTPUTS = "--structured-outputs-config"
#: vLLM's setting of its key-value cache on CPU, in GiB.
_CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"


def serve_command(model: TrainedModel, host: str, port: int, further: Sequence[str]) -> list[str]:
    """Return the command line of vLLM's server.

    Args:
        host: Address to listen on.
        port: TCP port to listen on.
        further: Options of `vllm serve`, which come last and so have the last word.
    """
    # `vllm serve` looks up the version of a package called vllm, and vLLM for CPUs is called otherwise
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.directory)]
    command += ["--served-model-name", model.name, "--host", host, "--port", str(port)]
    # of requests that say nothing: not what the starting model's authors suggest, such as a penalty of repetitions
    command += ["--generation-config", "vllm"]
    # calls of tools are read as in the run, in whatever format the model writes them
    command += ["--enable-auto-tool-choice"]
    if model.model_type == "gpt_oss":  # vLLM takes no other parser for it
        command += ["--tool-call-parser", "openai"]
    else:
        command += ["--tool-parser-plugin", TOOL_PARSER, "--tool-call-parser", "roll_like"]
        command += _reasoning(model, further)
    if model.window is not None and not _has(further, _OTHER_WINDOW):
        # what the model computes depends on it
        command += [_OTHER_WINDOW, str(model.window)]
    if model.sampling:
        command += ["--override-generation-config", json.dumps(dict(model.sampling))]
    if model.template_options:
        command += ["--default-chat-template-kwargs", json.dumps(dict(model.template_options))]
    return [*command, *further]


def _reasoning(model: TrainedModel, further: Sequence[str]) -> list[str]:
    """Return the options that divide reasoning from answers, where the model has tags that do."""
    tags = model.reasoning
    if (
        tags is None or tags.around or _has(further, _OTHER_REASONING)
    ):  # messages of several kinds: vLLM's own read them
        return []
    return [
        *("--reasoning-parser-plugin", REASONING_PARSER, "--reasoning-parser", "roll_like"),
        # what a request forces into a format is so from its first token on
        *(_STRUCTURED_OUTPUTS, json.dumps({"enable_in_reasoning": True})),
    ]


def _has(further: Sequence[str], option: str) -> bool:
    """Return whether an option, or a key of it, is among the further ones; vLLM takes underscores in names too."""
    return any(re.split("[=.]", one)[0].replace("_", "-") == option for one in further)


def serve_environment(model: TrainedModel, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the server: on CPU with the key-value cache that the run had, unless it names one."""
    if not model.on_cpu or model.kv_cache_gib is None or _CPU_CACHE in environment:
        return dict(environment)
    return {**environment, _CPU_CACHE: f"{max(1, round(model.kv_cache_gib))}"}


def serve(model: TrainedModel, host: str, port: int, further: Sequence[str]) -> None:
    """Become vLLM's server.

    Raises:
        ConfigError: Something else listens at the port.
    """
    refuse_used_port(host, port, command="serve")
    command = serve_command(model, host, port, further)
    print(f"{model.name} at http://{host}:{port}/v1 (Ctrl-C ends it)")
    if model.depends_on_window and model.window is None and not _has(further, _OTHER_WINDOW):
        print(f"what this model computes depends on its window; --vllm={_OTHER_WINDOW}=N sets that of its training")
    if REASONING_PARSER in command and _has(further, _STRUCTURED_OUTPUTS):
        hint = "without enable_in_reasoning: true, what a request forces into a format comes after reasoning"
        print(f"{_STRUCTURED_OUTPUTS} takes the place of this command's own; {hint}")
    if model.system_prompt is not None:
        print(f"trained with the system message: {model.system_prompt}")
    sys.stdout.flush()
    os.execve(command[0], command, serve_environment(model, os.environ))
