"""Ranks that train several models over one base: the numbers of each are those of a model trained alone, by peft."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from peft import PeftModel
from rank_specs import cpu_rank
from transformers import AutoModelForCausalLM

from roll_like import cli
from roll_like.config.load import dump_config
from roll_like.config.training import LoRAConfig, OptimizerConfig
from roll_like.errors import EngineError
from roll_like.run.checkpoint import save_checkpoint
from roll_like.service.checkpoints import StoredCheckpoint
from roll_like.service.config import ServiceConfig, ServiceTrainingConfig
from roll_like.service.losses import service_loss
from roll_like.service.objective import RequestObjective, datum_batches, in_order
from roll_like.service.rank import AdapterRequest, ModelsRank, TrainShare
from roll_like.service.types import Datum

pytestmark = pytest.mark.integration
LORA = LoRAConfig(rank=8, alpha=16)
DATA = [
    Datum(
        tokens=np.arange(start, start + length, dtype=np.int32),
        inputs={
            "target_tokens": np.arange(start + 1, start + length + 1),
            "weights": np.linspace(0.5, 1.5, length, dtype=np.float32),
        },
    )
    for start, length in ((5, 7), (40, 3), (100, 12))
]
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.01, "max_grad_norm": float("inf")}


def step_settings(lr: float, **changed: Any) -> OptimizerConfig:
    return OptimizerConfig.model_construct(lr=lr, **SETTINGS | changed)


def started(rank: int, ranks: int, address: tuple[str, int], model: str, folder: str, lora: LoRAConfig | None) -> Any:
    settings = ServiceTrainingConfig(lora=lora, workers=ranks, max_tokens_per_micro_batch=16)
    worker = ModelsRank(cpu_rank(RequestObjective(settings=settings), model), rank, ranks)
    worker.start(address)
    worker.prepare(f"{folder}/untrained")
    return worker


def train(worker: ModelsRank, model: str, *, backward: bool = True, data: Any = DATA) -> list[np.ndarray]:
    layout = worker._objective.layout(worker.world_size)
    share = TrainShare(
        model=model,
        losses=service_loss("cross_entropy", {}),
        backward=backward,
        batches=datum_batches(data, layout)[worker.rank],
    )
    return [(output.index, output.loss, output.logprobs) for output in worker.train(share)]


def to_disk_and_back(worker: ModelsRank, model: str, folder: str) -> None:
    """Have a model on disk only for a while, with its gradient and its moments."""
    worker.keep_model(model, f"{folder}/{model}-on-disk")
    worker.drop(model)
    with pytest.raises(EngineError, match=f"no model '{model}'"):
        worker.switch(model)
    worker.take_model(model, f"{folder}/{model}-on-disk")


def two_models(rank: int, ranks: int, address: tuple[str, int], model: str, folder: str) -> Any:
    """Train two adapters of different ranks by turns, one of them with gradients of two requests a step."""
    worker = started(rank, ranks, address, model, folder, LORA)
    worker.create("first", AdapterRequest(rank=8))
    worker.create("second", AdapterRequest(rank=4, seed=7))
    found: dict[str, Any] = {"first": [], "second": [], "norms": []}
    for step in range(3):
        found["first"].append(train(worker, "first"))
        found["second"].append(train(worker, "second", data=DATA[:1]))
        to_disk_and_back(worker, "first", folder)
        train(worker, "second", data=DATA[1:])
        to_disk_and_back(worker, "second", folder)
        norm = worker.step("second", step_settings(2e-2, max_grad_norm=0.5))
        found["norms"].append((norm, worker.step("first", step_settings(1e-2))))
        if step == 1:
            worker.snapshot("first", f"{folder}/kept")
            worker.save_model("second", folder)
    found["last"] = train(worker, "first", backward=False)
    worker.cover(f"{folder}/kept")
    found["sent"] = {name: tensor.clone() for name, tensor in worker.full_weights()}
    worker.uncover()
    found["after"] = train(worker, "first", backward=False)
    moved = train(worker, "second", backward=False)
    worker.load_model("second", folder, optimizer=True)
    found["loaded"] = train(worker, "second", data=DATA[:1])
    train(worker, "second", data=DATA[1:])
    worker.step("second", step_settings(2e-2, max_grad_norm=0.5))
    found["again"], found["moved"] = train(worker, "second", backward=False), moved
    worker.close()
    return found


def alone(path: Path, *, rank: int, lr: float, clip: float, adapters: Mapping[str, torch.Tensor] | None) -> Any:
    """The same with transformers, peft and torch."""
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        torch.manual_seed(0)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=LORA.alpha, target_modules=sorted(names)), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if adapters is not None and "lora_A" in name:
            parameter.data.copy_(adapters[name])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01)
    steps, weights = [], []
    for _ in range(3):
        steps.append(0.0)
        for datum in DATA:
            steps[-1] += nll(model, datum, backward=True)
        norm = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return {"losses": steps, "norm": float(norm), "last": sum(nll(model, each) for each in DATA), "weights": weights}


def nll(model: Any, datum: Datum, *, backward: bool = False) -> float:
    logits = model(torch.from_numpy(datum.tokens).long()[None]).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"]).long()
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]
    loss = -(logprobs * torch.from_numpy(datum.inputs["weights"])).sum()
    if backward:
        loss.backward()
    return float(loss.detach())


def losses(outputs: Any) -> float:
    return sum(loss for _, loss, _ in outputs)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_model_is_what_it_would_be_alone(float_model: Path, tmp_path: Path, ranks: int) -> None:
    found = on_ranks(two_models, str(float_model), str(tmp_path), ranks=ranks)
    expected = alone(float_model, rank=8, lr=1e-2, clip=1e9, adapters=None)
    told = [[output for rank in found for output in rank["first"][step]] for step in range(3)]
    np.testing.assert_allclose([losses(outputs) for outputs in told], expected["losses"], rtol=1e-5)
    assert [sorted(index for index, _, _ in outputs) for outputs in told] == [[0, 1, 2]] * 3
    last = [output for rank in found for output in rank["last"]]
    np.testing.assert_allclose(losses(last), expected["last"], rtol=1e-5)
    assert found[0]["norms"][2][1] == pytest.approx(expected["norm"], rel=1e-4)
    # what was sent is the snapshot of the second step, and the model of the third is back
    sent, kept = found[0]["sent"], expected["weights"][1]
    name = "model.layers.0.self_attn.q_proj"
    product = kept[f"{name}.lora_B.default.weight"] @ kept[f"{name}.lora_A.default.weight"] * (LORA.alpha / LORA.rank)
    torch.testing.assert_close(sent[f"{name}.weight"], kept[f"{name}.base_layer.weight"] + product, rtol=0, atol=1e-6)
    for rank in found:
        for (_, loss, logprobs), (_, again, same) in zip(rank["last"], rank["after"], strict=True):
            assert loss == again
            np.testing.assert_array_equal(logprobs, same)
        # a checkpoint has the optimizer too: the same step leads to the same model
        for (_, loss, logprobs), (_, again, same) in zip(rank["moved"], rank["again"], strict=True):
            assert loss == again
            np.testing.assert_array_equal(logprobs, same)


def lower_rank(rank: int, ranks: int, address: tuple[str, int], model: str, folder: str) -> Any:
    worker = started(rank, ranks, address, model, folder, LORA)
    worker.create("low", AdapterRequest(rank=4, seed=7))
    named = {name: each.detach().full_tensor().clone() for name, each in worker._backend._trained().items()}
    found = [train(worker, "low")]
    for _ in range(2):
        worker.step("low", step_settings(2e-2, max_grad_norm=0.5))
        found.append(train(worker, "low"))
    rows = {name: each.detach().full_tensor().clone() for name, each in worker._backend._trained().items()}
    save_checkpoint(
        Path(folder, "state"), 2, lambda state: worker.save_model("low", str(state)), {}, score=None, healthy=True
    )
    worker.close()
    return named, found, rows


def test_an_adapter_of_a_lower_rank_is_one_of_that_rank(float_model: Path, tmp_path: Path) -> None:
    ((begun, outputs, ended),) = on_ranks(lower_rank, str(float_model), str(tmp_path), ranks=1)
    of_peft = {name.removeprefix("causal_lm."): each[:4] for name, each in begun.items() if "lora_A" in name}
    expected = alone(float_model, rank=4, lr=2e-2, clip=0.5, adapters=of_peft)
    np.testing.assert_allclose([losses(each) for each in outputs], expected["losses"], rtol=1e-5)
    for name, each in ended.items():
        beyond = each[4:] if "lora_A" in name else each[:, 4:]
        assert not beyond.any(), name
    # and so it is exported
    config = ServiceConfig(
        model={"path": str(float_model), "dtype": "float32"},
        training={"lora": LORA.model_dump()},
        inference={"type": "hf"},
        resources={"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}},
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    about = StoredCheckpoint(
        model_id="m", kind="weights", name="n", time=datetime.now(UTC), base_model="tiny", lora_rank=4, updates=2
    )
    (tmp_path / "checkpoint.json").write_text(about.model_dump_json())
    assert cli.main(["export", "--checkpoint", str(tmp_path), "-o", str(tmp_path / "model")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert sum(nll(exported, each) for each in DATA) == pytest.approx(losses(outputs[2]), rel=1e-5)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32), tmp_path / "model" / "adapter"
    )
    assert adapted.peft_config["default"].r == 4
    assert sum(nll(adapted, each) for each in DATA) == pytest.approx(losses(outputs[2]), rel=1e-5)


def whole_model(rank: int, ranks: int, address: tuple[str, int], model: str, folder: str) -> Any:
    worker = started(rank, ranks, address, model, folder, None)
    worker.create("whole", None)
    found, norms = [train(worker, "whole")], []
    norms.append(worker.step("whole", step_settings(1e-2)))
    found.append(train(worker, "whole"))
    to_disk_and_back(worker, "whole", folder)
    norms.append(worker.step("whole", step_settings(1e-2)))
    found.append(train(worker, "whole", backward=False))
    worker.drop("whole")
    worker.create("new", None)
    found.append(train(worker, "new", backward=False))
    worker.close()
    return found, norms


def test_a_whole_model_is_trained_and_the_next_one_begins_anew(float_model: Path, tmp_path: Path) -> None:
    (((first, second, third, anew), norms),) = on_ranks(whole_model, str(float_model), str(tmp_path), ranks=1)
    assert losses(anew) == losses(first)
    model = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01)
    for told, norm in zip((first, second), norms, strict=True):
        assert losses(told) == pytest.approx(sum(nll(model, each, backward=True) for each in DATA), rel=1e-5)
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert losses(third) == pytest.approx(sum(nll(model, each) for each in DATA), rel=1e-5)
    assert in_order([[]]) == []
