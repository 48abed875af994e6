"""Full fine-tuning of one model through the training service, with tinker's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from run_config import read_lines, run_here, write_sft_run
from tinker_console import Address, ClientError, console, datum, needs_client
from transformers import AutoModelForCausalLM

from roll_like import cli
from roll_like.builtin.pipelines.sft.pipeline import SFTPipeline
from roll_like.config.load import load_config
from roll_like.service.config import load_service_config
from roll_like.service.service import read_keys, serving

pytestmark = [pytest.mark.integration, pytest.mark.slow, needs_client]

#: A name that the client knows.
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "max_grad_norm": 0.5}
ADAM = {"learning_rate": 1e-3, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 0.5}
PROMPT = [20, 21, 22, 23]


def test_a_whole_model_is_that_of_a_supervised_run(warm_ray: None, tmp_path: Path, float_model: Path) -> None:
    """The same losses, the same samples as the exported model, and one such model at a time."""
    file = write_sft_run(
        tmp_path,
        float_model,
        data={"sources": [{"path": str(tmp_path / "train.jsonl")}], "samples_per_step": 20, "max_tokens": 64},
        training={"optimizer": OPTIMIZER, "max_tokens_per_micro_batch": 256},
        evaluation=None,
        checkpoint={},
    )
    code, output = run_here(file)
    assert code == 0, output
    lines = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    samples = SFTPipeline.trained_on(load_config(file)).samples
    tokens = sum(int(each.loss_mask.sum()) for each in samples)
    data = [datum(each.token_ids.tolist(), weights=(each.loss_mask[1:] / tokens).tolist()) for each in samples]

    config = {
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(float_model), "dtype": "float32"},
        "model_name": MODEL,
        "training": {"max_tokens_per_micro_batch": 256},
        "inference": {"type": "hf"},
        "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}},
        "max_sequence_tokens": 128,
        "port": 0,
    }
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(config))
    loaded = load_service_config(tmp_path / "service.yaml")
    with serving(loaded) as running, console(Address(running.url, read_keys(loaded)[0])) as client:
        assert client.do("create", model="whole", base_model=MODEL, rank=0)["is_lora"] is False
        client.do("sampler", name="before", model="whole")
        trainer: Any = running.core._trainer
        told = []
        for step in range(4):
            found = client.do("forward_backward", model="whole", data=data, loss="cross_entropy")
            if step == 2:  # to disk and back, with a gradient
                running.core.state.thread.submit(trainer.park_idle, 0.0).result()
                assert not trainer.is_loaded(running.core.state.sessions[client.session].models[0])
            told.append((found["metrics"]["loss:sum"], client.do("optim_step", model="whole", **ADAM)))
        assert [loss for loss, _ in told] == pytest.approx([line["train/loss"] for line in lines], abs=1e-5)
        norms = [metrics["grad_norm:mean"] for _, metrics in told]
        assert norms == pytest.approx([line["train/grad_norm"] for line in lines], rel=1e-3)
        client.do("sampler", name="after", model="whole")
        greedy = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.0, "topk_sample_logprobs": 2}
        after, before = (client.do("sample", sampler=name, **greedy)["samples"][0] for name in ("after", "before"))
        path = client.do("save", model="whole", name="end")
        with pytest.raises(ClientError, match="this service has 1 models, and 1 is the most"):
            client.do("create", model="second", base_model=MODEL, rank=0)
        with pytest.raises(ClientError, match=r"its configuration has no training\.lora"):
            client.do("create", model="adapter", base_model=MODEL, rank=4)
    folder = loaded.directory / "models" / path.removeprefix("tinker://")
    assert cli.main(["export", "--checkpoint", str(folder), "-o", str(tmp_path / "exported")]) == 0
    for name, sample in ((tmp_path / "exported", after), (float_model, before)):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        with torch.no_grad():
            logprobs = model(torch.tensor([PROMPT + sample["tokens"]])).logits[0, 3:-1].log_softmax(-1)
        np.testing.assert_allclose(logprobs[range(8), sample["tokens"]], sample["logprobs"], atol=1e-4)
        np.testing.assert_allclose(logprobs.topk(2).values, np.asarray(sample["top"])[:, :, 1], atol=1e-4)
