"""Does what tests say with tinker's own client: a JSON object a line in, one a line out. Runs in .tinker.

Nothing of roll_like is imported here. `TINKER_BASE_URL` and `TINKER_API_KEY` say where the service is.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tinker
import torch
from tinker import types

warnings.filterwarnings("ignore", category=FutureWarning)


class Console:
    """One session, with clients by the names that tests give them."""

    def __init__(self) -> None:
        self.service = tinker.ServiceClient()
        self.trained: dict[str, Any] = {}
        self.samplers: dict[str, Any] = {}

    def capabilities(self) -> Any:
        return self.service.get_server_capabilities().model_dump()

    def create(self, model: str, base_model: str, rank: int = 8, seed: int | None = None) -> Any:
        made = self.service.create_lora_training_client(base_model=base_model, rank=rank, seed=seed).result()
        self.trained[model] = made
        return {"model_id": made.model_id, **made.get_info().model_dump()}

    def restore(self, model: str, path: str, optimizer: bool) -> Any:
        make = (
            self.service.create_training_client_from_state_with_optimizer
            if optimizer
            else self.service.create_training_client_from_state
        )
        self.trained[model] = make(path).result()
        return {"model_id": self.trained[model].model_id}

    def forward(self, **request: Any) -> Any:
        return self._computed("forward", **request)

    def forward_backward(self, **request: Any) -> Any:
        return self._computed("forward_backward", **request)

    def _computed(
        self, verb: str, model: str, data: Sequence[dict[str, Any]], loss: str, settings: dict[str, Any] | None = None
    ) -> Any:
        return _told(getattr(self.trained[model], verb)([_datum(each) for each in data], loss, settings).result())

    def custom(self, model: str, data: Sequence[dict[str, Any]], beta: float) -> Any:
        """A loss over pairs, as DPO has it, that the client computes."""

        def paired(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            sums = torch.stack([each.sum() for each in logprobs])
            loss = -torch.nn.functional.logsigmoid(beta * (sums[::2] - sums[1::2])).sum()
            return loss, {"paired": float(loss.detach())}

        return _told(self.trained[model].forward_backward_custom([_datum(each) for each in data], paired).result())

    def choice(self, model: str, data: Sequence[dict[str, Any]], shares: Sequence[Sequence[float]]) -> Any:
        """A loss over some tokens in the last place: how far their shares are from given ones."""

        def divergence(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            found = torch.stack([each[-1].log_softmax(-1) for each in logprobs])
            return torch.nn.functional.kl_div(found, torch.tensor(shares), reduction="sum"), {}

        return _told(self.trained[model].forward_backward_custom([_datum(each) for each in data], divergence).result())

    def optim_step(self, model: str, **params: float) -> Any:
        return self.trained[model].optim_step(types.AdamParams(**params)).result().metrics

    def steps(
        self,
        model: str,
        data: Sequence[dict[str, Any]],
        loss: str,
        count: int,
        params: dict[str, float],
        parts: int = 1,
    ) -> Any:
        """Submit all of them before the first is done; `parts` requests a step."""
        batch, client = [_datum(each) for each in data], self.trained[model]
        pending = []
        for _ in range(count):
            share = len(batch) // parts
            made = [client.forward_backward(batch[i * share : (i + 1) * share], loss) for i in range(parts)]
            pending.append((made, client.optim_step(types.AdamParams(**params))))
        return [
            {"losses": [each.result().metrics["loss:sum"] for each in made], "step": step.result().metrics}
            for made, step in pending
        ]

    def save(self, model: str, name: str, **options: Any) -> Any:
        return self.trained[model].save_state(name, **options).result().path

    def save_for_sampler(self, model: str, name: str) -> Any:
        return self.trained[model].save_weights_for_sampler(name).result().path

    def sampler(self, name: str, *, model: str | None = None, path: str | None = None, base: str | None = None) -> Any:
        if model is not None:
            self.samplers[name] = self.trained[model].save_weights_and_get_sampling_client().result()
        else:
            self.samplers[name] = self.service.create_sampling_client(model_path=path, base_model=base).result()
        return self.samplers[name].get_base_model()

    def sample(self, **request: Any) -> Any:
        return _sampled(self._submitted(**request).result())

    def sample_all(self, requests: list[dict[str, Any]]) -> Any:
        """Submit all of them before the first is done."""
        pending = [self._submitted(**request) for request in requests]
        return [_sampled(each.result()) for each in pending]

    def _submitted(self, sampler: str, prompt: list[int], count: int = 1, **params: Any) -> Any:
        names = ("include_prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs")
        more = {key: params.pop(key) for key in names if key in params}
        return self.samplers[sampler].sample(
            types.ModelInput.from_ints(prompt), count, types.SamplingParams(**params), **more
        )

    def logprobs(self, sampler: str, prompt: list[int]) -> Any:
        return self.samplers[sampler].compute_logprobs(types.ModelInput.from_ints(prompt)).result()

    def checkpoints(self) -> Any:
        return [
            each.tinker_path for each in self.service.create_rest_client().list_user_checkpoints().result().checkpoints
        ]

    def delete(self, path: str) -> Any:
        return self.service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()

    def copy(self, path: str) -> Any:
        rest = self.service.create_rest_client()
        return rest.copy_weights(path, destination_project_id="any").result()

    def weights_info(self, path: str) -> Any:
        return self.service.create_rest_client().get_weights_info_by_tinker_path(path).result().model_dump()


def _datum(values: dict[str, Any]) -> types.Datum:
    inputs = {
        name: torch.tensor(each, dtype=torch.int64 if name == "target_tokens" else torch.float32)
        for name, each in values["inputs"].items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(values["tokens"]), loss_fn_inputs=inputs)


def _sampled(response: types.SampleResponse) -> Any:
    return {
        "samples": [
            {
                "tokens": each.tokens,
                "logprobs": each.logprobs,
                "stop": each.stop_reason,
                "id": each.sequence_id,
                "top": each.topk_logprobs,
            }
            for each in response.sequences
        ],
        "prompt_logprobs": response.prompt_logprobs,
        "top": response.topk_prompt_logprobs,
    }


def _told(result: types.ForwardBackwardOutput) -> Any:
    return {
        "metrics": result.metrics,
        "logprobs": [each["logprobs"].to_numpy().tolist() for each in result.loss_fn_outputs],
    }


def answer(line: str, verbs: Callable[[str], Callable[..., Any]]) -> dict[str, Any]:
    """Return what a verb returned, or what it raised."""
    values = json.loads(line)
    try:
        return {"result": verbs(values.pop("verb"))(**values)}
    except Exception as error:  # noqa: BLE001 - the test gets it
        traceback.print_exc()
        return {"error": type(error).__name__, "message": str(error)}


def main() -> None:
    console = Console()
    print(json.dumps({"result": console.service.holder.get_session_id()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line, lambda verb: getattr(console, verb))), flush=True)
    console.service.close("success").result()


if __name__ == "__main__":
    main()
