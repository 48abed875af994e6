"""Compares exported models in vLLM with transformers, one forked process a family: all share one import of vLLM.

Run as a script (`FamilyServer` does): reads a request a line, `{"family": …, "directory": …, "settings": …}`, and
writes an answer a line: `exported` and `updated`, the largest differences in nats, and `spread`, the standard deviation
of the log-probabilities; or `stage` and `error`, and what came before.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

#: torchvision for vLLM's models of images (`make torchvision`).
TORCHVISION = Path(__file__).parents[2] / ".torchvision"
_SECONDS = 240
_PROMPT, _SAMPLED = 80, 8


class FamilyServer:
    """The process that has vLLM imported and forks."""

    def __init__(self) -> None:
        from roll_like.inference.vllm.arguments import vllm_environment
        from roll_like.inference.vllm.config import VLLMConfig

        own = Path(__file__).parents
        path = [str(own[2]), str(own[1]), str(own[0]), str(TORCHVISION), os.environ.get("PYTHONPATH", "")]
        environment = vllm_environment(VLLMConfig(), threads=1, device="cpu") | {"PYTHONPATH": os.pathsep.join(path)}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def compare(self, family: str, directory: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return a family's differences, or the stage that failed and why; what it printed is in `directory`/log."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"family": family, "directory": str(directory), "settings": settings}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def serve() -> None:
    """Answer requests until there are no more."""
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401 - for all that are forked
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # this is one already
    for line in sys.stdin:
        request = json.loads(line)
        directory = Path(request["directory"])
        pid = os.fork()
        if pid == 0:
            _answer(request["family"], directory, request["settings"])
        watch = os.pidfd_open(pid)
        if not select.select([watch], [], [], _SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(watch)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file = directory / "answer.json"
        died = {"stage": "process", "error": f"ended with {status}"}
        print(file.read_text(encoding="utf-8") if file.is_file() else json.dumps(died), flush=True)


def _answer(family: str, directory: Path, settings: Mapping[str, Any]) -> NoReturn:
    """Compare, in a process of its own."""
    stages = ["export"]
    code = 1
    try:
        log = os.open(directory / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        answer: dict[str, Any] = {}
        try:
            for stage, result in _compare(family, directory, settings):
                stages.append(stage)
                answer |= result
        except Exception as error:  # noqa: BLE001 - whatever vLLM says is the answer
            traceback.print_exc()
            answer |= {"stage": stages[-1], "error": f"{type(error).__name__}: {error}"}
        (directory / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _compare(family: str, directory: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each next stage, and what the one before has found."""
    import numpy as np
    import torch
    from all_families import make_model, save_model
    from tiny_model import make_tiny_tokenizer

    from roll_like.models.export import save_hf_directory
    from roll_like.models.lora import named_weights
    from roll_like.models.modules import load_causal_lm

    torch.set_num_threads(1)
    zero = tuple(settings.get("zero", ()))
    fresh = make_model(family, scale=2, **settings.get("config", {}))
    for name, tensor in fresh.state_dict().items():
        if zero and name.endswith(zero):
            tensor.zero_()
    base = save_model(fresh, directory / "base")
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings.get("entries", {})), encoding="utf-8")
    model = load_causal_lm(base, "float32").eval()
    prompt = np.random.default_rng(1).integers(3, 512, _PROMPT).tolist()
    _change(model, zero, seed=1)
    weights = ((weight.name, weight.merged(torch.float32)) for weight in named_weights(model))
    exported = save_hf_directory(weights, model.config, make_tiny_tokenizer(), directory / "model", base_dir=base)
    first = _greedy(model, prompt)
    _change(model, zero, seed=2)
    second = _greedy(model, prompt)  # before vLLM starts: it may compute with transformers' classes, and changes them

    yield "load", {}
    llm = _engine(exported, settings.get("engine", {}))
    yield "compute", {"spread": float(first[1].std())}
    yield "update", {"exported": _difference(llm, prompt, first)}
    found = _update(llm, model)
    yield "end", {"updated": _difference(llm, prompt, second), **found}


def _change(model: Any, zero: tuple[str, ...], seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if zero and name.endswith(zero):
                continue
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return a prompt with the most likely tokens after it, and the log-probability of each token but the first."""
    import torch

    tokens = torch.tensor(prompt)
    with torch.no_grad():
        for _ in range(_SAMPLED):
            logits_TV = model(input_ids=tokens[None], use_cache=False).logits[0]
            tokens = torch.cat([tokens, logits_TV[-1:].argmax(-1)])
        logprobs_TV = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return tokens.tolist(), logprobs_TV.gather(1, tokens[1:, None])[:, 0]


def _engine(path: Path, arguments: Mapping[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        **{
            "model": str(path),
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 2,
            "enforce_eager": True,
            "block_size": 32,
            "enable_chunked_prefill": False,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 64 << 20,
            "seed": 0,
            "worker_extension_cls": "roll_like.inference.vllm.worker_extension.WorkerExtension",
            "weight_transfer_config": {"backend": "shared_memory"},
            **arguments,
        }
    )


def _difference(llm: Any, prompt: list[int], expected: tuple[list[int], torch.Tensor]) -> float:
    """Return the largest difference of a log-probability: of a given text, and of tokens that vLLM chooses."""
    import torch
    from vllm import SamplingParams

    tokens, logprobs_T = expected
    greedy = SamplingParams(
        max_tokens=_SAMPLED, temperature=0, ignore_eos=True, prompt_logprobs=0, logprobs=0, detokenize=False
    )
    (output,) = llm.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)
    given = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
    (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    chosen = output.outputs[0].token_ids
    # in bfloat16 two tokens may be equally likely; what follows another token is no longer the same text
    alike = next((i + 1 for i in range(_SAMPLED) if chosen[i] != tokens[len(prompt) + i]), _SAMPLED)
    top = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs[:alike], chosen, strict=False)]
    asked = torch.tensor([*given, *top])
    found = torch.cat([logprobs_T, logprobs_T[-_SAMPLED:][:alike]])
    return float((asked - found).abs().max().nan_to_num(1e9))


def _update(llm: Any, model: Any) -> dict[str, list[str]]:
    """Send a model's weights, as a training rank does; return which are held with other numbers, or not read back."""
    from roll_like.inference.interface import Fingerprints
    from roll_like.inference.weight_transfer.fingerprint import fingerprint
    from roll_like.inference.weight_transfer.shared_memory import SharedMemory, as_payload, bucket_size, fill_bucket
    from roll_like.inference.weight_transfer.sync import compare_fingerprints
    from roll_like.models.checkpoint_names import checkpoint_tensors, tensor_groups
    from roll_like.models.modules import persistent_buffers

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    parameters |= dict(persistent_buffers(model))
    shapes = {name: tensor.shape for name, tensor in parameters.items()}
    tensors = [
        pair
        for group in tensor_groups(model, shapes)
        for pair in checkpoint_tensors(model, group, {name: parameters[name] for name in group.parameters})
    ]
    dtype = llm.llm_engine.model_config.dtype  # what a run sends them in
    tensors = [(name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in tensors]
    memory = SharedMemory(bucket_size(tensors))
    bucket = as_payload(fill_bucket(memory, tensors))
    for method, arguments in (
        ("init_weight_transfer_engine", ({},)),
        ("start_weight_update", ()),
        ("update_weights", (bucket,)),
        ("require_every_layer", ()),
        ("finish_weight_update", ()),
    ):
        llm.collective_rpc(method, args=arguments)
    memory.close()
    sent = {name: fingerprint(tensor, 1) for name, tensor in tensors}
    (held,) = llm.collective_rpc("weight_fingerprints", args=(list(sent), 1))
    drifted, unchecked = compare_fingerprints(sent, Fingerprints(tensors=held["tensors"], tied=held["tied"]))
    return {"drifted": drifted, "unchecked": unchecked}


if __name__ == "__main__":
    serve()
