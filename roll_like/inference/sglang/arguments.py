"""From our configuration to SGLang's environment variables and arguments. Imports neither torch nor SGLang."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.errors import GenerationError
from roll_like.inference.settings import fields_of, package_folder, require_known
from roll_like.inference.sglang.config import SGLangConfig

if TYPE_CHECKING:
    from roll_like.inference.interface import EngineSpec

#: What the extra `sglang` of pyproject.toml installs: the version whose calls the tests know.
TESTED = "0.5.23"
#: Where the names in `engine_args` are explained.
DOCUMENTED = "SGLang's documentation of server arguments"
#: What SGLang calls inside its schedulers to load a bucket.
LOADER = "roll_like.inference.sglang.loader.load_bucket"
INSTALL = f'install it into an environment of its own: pip install "roll-like[sglang]" (sglang {TESTED})'


def installed_version() -> str | None:
    """Return the version of the package `sglang`; None if it is not installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def require_version() -> None:
    """Raise if SGLang is missing, or is older than the calls of this engine.

    Raises:
        GenerationError: Says what was found and what to install.
    """
    found = installed_version()
    if found is None:
        raise GenerationError("the package sglang is not installed here, and inference.type is sglang", fix=INSTALL)
    if not can_serve(found):
        raise GenerationError(
            f"sglang {found} is installed, and this engine is written for {TESTED}, whose weight updates are sessions",
            fix=INSTALL,
        )


def can_serve(found: str) -> bool:
    """Return whether a version is at least `TESTED` and of the same series.

    >>> [can_serve(version) for version in ("0.5.22", "0.5.23", "0.5.24.post1", "0.6.0")]
    [False, True, True, False]
    """
    numbers, tested = ([int(digits) for digits in re.findall(r"\d+", text)[:3]] for text in (found, TESTED))
    return numbers[:2] == tested[:2] and numbers >= tested


def engine_arguments(config: SGLangConfig, spec: EngineSpec) -> dict[str, Any]:
    """Return keyword arguments for `sglang.srt.entrypoints.engine.Engine`, which are those of its `ServerArgs`.

    Raises:
        ConfigError: `inference.engine_args` has a name that SGLang does not know; names the first, and the nearest.
    """
    require_known("inference", "SGLang", config.engine_args, known_arguments(), DOCUMENTED)
    arguments: dict[str, Any] = {
        "model_path": spec.model_path,
        "tokenizer_path": spec.tokenizer_path,
        "dtype": spec.dtype,
        "context_length": spec.max_model_len,
        "max_running_requests": config.max_running,
        "mem_fraction_static": config.mem_fraction_static,
        "tp_size": spec.tensor_parallel_size,
        "trust_remote_code": spec.trust_remote_code,
        "random_seed": spec.seed,
        "enable_deterministic_inference": config.deterministic,
        "custom_weight_loader": [LOADER],
        "weight_version": "0",
        "sampling_defaults": "openai",  # not those of the model's generation_config.json
        "log_level": "error",
    }
    if config.expert_parallel:
        arguments["ep_size"] = spec.tensor_parallel_size
    if spec.returns_routes:
        arguments["enable_return_routed_experts"] = True
    if spec.float32_head:
        arguments["enable_fp32_lm_head"] = True
    if not config.cuda_graphs:
        arguments |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    if config.sleeps(shares_gpus=spec.shares_gpus):
        # the backup makes `resume` possible without an update
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return {**arguments, **config.engine_args}


def known_arguments() -> set[str]:
    """Return the fields of the installed SGLang's `ServerArgs`."""
    folder = package_folder("sglang")
    return set() if folder is None else server_args_fields(folder)


def server_args_fields(package: Path) -> set[str]:
    """Return the fields of `ServerArgs` in an SGLang package: annotations of the classes that it is assembled from."""
    return fields_of((package / "srt" / "arg_groups" / "fields").glob("*.py"))


def sglang_environment() -> dict[str, str]:
    """Return the variables that an engine's process needs from its first moment."""
    return {
        # log-probabilities of the distribution that tokens are drawn from, temperature applied
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
