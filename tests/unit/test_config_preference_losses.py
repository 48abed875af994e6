"""Every form of every preference loss can be written in a file, and changes what is measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from config_files import changed
from preference_samples import make_pairs, make_samples

from roll_like.algorithms.preference.base import MismatchedResponses, NLLAggregation
from roll_like.algorithms.preference.objective import preference_objective
from roll_like.algorithms.preference.paired import Divergence
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.config.load import load_config
from roll_like.registry import PREFERENCE_LOSSES

FILE: dict[str, Any] = {
    "pipeline": "dpo",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "pairs_per_step": 4, "max_tokens": 128},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}
MISMATCHED = MismatchedResponses(
    logprobs_M=torch.tensor([-3.0, -4.0]),
    reference_logprobs_M=torch.tensor([-5.0, -4.5]),
    tokens_M=torch.tensor([2, 3]),
)
#: Every setting of every loss, as a file says it.
SETTINGS: list[dict[str, Any]] = [
    *({"type": name} for name in PREFERENCE_LOSSES.names()),
    *({"type": "dpo", "divergence": name} for name in get_args(Divergence) if name != "alpha"),
    {"type": "dpo", "divergence": "alpha", "alpha": 0.3},
    {"type": "dpo", "label_smoothing": 0.2},
    {"type": "cpo", "label_smoothing": 0.2},
    {"type": "simpo", "label_smoothing": 0.2, "gamma": 0.3},
    {"type": "robust", "label_smoothing": 0.2},
    *({"type": name, "length_normalised": True} for name in ("apo_down", "apo_zero", "cpo", "dpo", "hinge", "kto")),
    {"type": "robust", "length_normalised": True},
    {"type": "ipo", "length_normalised": False},
    {"type": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.8},
    *({"type": "dpo", "nll_coefficient": 0.5, "nll_aggregation": how} for how in get_args(NLLAggregation)),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_every_form_of_every_loss_is_reached_from_a_file(settings: dict[str, Any], tmp_path: Path) -> None:
    """Written as YAML, loaded as `roll-like run` loads it, and measured: a number of its own."""
    plugin = PREFERENCE_LOSSES.get(settings["type"])
    reference = {"reference": {}} if plugin.needs_reference else {"reference": None}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(changed(FILE, algorithm={"loss": settings}, **reference)))
    loaded = load_config(file)
    assert isinstance(loaded, DPOConfig)
    assert {name: getattr(loaded.algorithm.loss, name) for name in settings} == settings
    chosen, rejected, reference_of = [-3.0, -9.0], [-8.0, -2.0], ([-4.0, -7.5], [-7.0, -3.0])
    found = {}
    for form, config_of_loss in (("written", loaded.algorithm.loss), ("default", plugin.Config())):
        loss = plugin(config_of_loss)
        inputs: Any = make_pairs(chosen, rejected, reference=reference_of, tokens=([2, 5], [3, 1]))
        if not plugin.paired:
            loss = loss.of_batch(MISMATCHED)
            inputs = make_samples(chosen, [True, False], reference=reference_of[0], tokens=[2, 5])
        found[form] = preference_objective(inputs, loss)[0].item()
    assert math.isfinite(found["written"])
    is_default = all(getattr(plugin.Config(), name) == value for name, value in settings.items())
    assert (found["written"] == pytest.approx(found["default"], abs=1e-9)) == is_default
