"""Preference losses against other libraries: values, gradients and figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import liger_preference_reference as liger
import numpy as np
import pytest
import torch
import trl_preference_reference as trl
from algorithm_samples import same_cases
from conformance import Row
from hypothesis import given
from hypothesis import strategies as st
from preference_cases import Responses, figures, head_cases, loss_and_gradient, loss_and_head_gradients, responses

from roll_like.builtin.pipelines.dpo.labelled_data import LabelledSample
from roll_like.builtin.pipelines.dpo.labelled_objective import labelled_step

any_responses = responses()
#: TRL computes the alpha divergence in float32, whose exponentials of far log-ratios are too coarse.
near = responses(distances=(0.02, 0.1))
heads = head_cases()
short_heads = head_cases(distances=(0.02, 0.1), longest=2)


def of_trl(name: str, label: str, theirs: Callable[[Responses], Any], cases: Any = any_responses, **ours: Any) -> Row:
    return Row(
        "preference", name, f"TRL {label}", partial(loss_and_gradient, name, **ours), theirs, cases, gradient=True
    )


def of_dpo_trainer(name: str, *losses: str, label: str = "", cases: Any = any_responses, **settings: Any) -> Row:
    """A row of `DPOTrainer`; `theirs` are its settings, the rest is ours and, where the name is the same, theirs."""
    theirs = settings.pop("theirs", {})
    shared = {key: settings[key] for key in ("beta", "label_smoothing") if key in settings}
    return of_trl(
        name,
        f"DPOTrainer {label or losses[0]}",
        lambda case: trl.dpo_loss(case, *losses, **shared, **theirs),
        cases,
        **settings,
    )


def of_liger(name: str, label: str, theirs: Callable[[Any], Any], cases: Any = heads, **ours: Any) -> Row:
    return Row(
        "preference",
        name,
        f"liger-kernel {label}",
        partial(loss_and_head_gradients, name, **ours),
        theirs,
        cases,
        gradient=True,
    )


def of_liger_dpo(name: str, loss_type: str, *, label: str = "", theirs: Any = None, **settings: Any) -> Row:
    shared = {key: settings[key] for key in ("beta", "label_smoothing") if key in settings}
    return of_liger(
        name,
        f"dpo, {label or loss_type}",
        lambda case: liger.dpo_loss(case, loss_type=loss_type, **shared, **(theirs or {})),
        **settings,
    )


MEANS: dict[str, Any] = {"length_normalised": True, "theirs": {"average_log_prob": True}}
LIKELIHOOD: dict[str, Any] = {"nll_coefficient": 0.7, "theirs": {"weights": [1.0, 0.7]}}

ROWS = [
    of_dpo_trainer("dpo", "sigmoid", beta=0.3),
    of_dpo_trainer("dpo", "sigmoid", "sft", label="sigmoid and sft", beta=0.3, **LIKELIHOOD),
    of_dpo_trainer("dpo", "sigmoid_norm", beta=0.9, length_normalised=True),
    of_dpo_trainer(
        "dpo",
        "sigmoid",
        label="forward_kl",
        beta=0.3,
        divergence="forward_kl",
        cases=near,
        theirs={"divergence": ("forward_kl", 0.0)},
    ),
    of_dpo_trainer(
        "dpo",
        "sigmoid",
        label="js_divergence",
        beta=0.3,
        divergence="js",
        theirs={"divergence": ("js_divergence", 0.0)},
    ),
    # theirs is 1 − α of the paper
    of_dpo_trainer(
        "dpo",
        "sigmoid",
        label="alpha_divergence, of 1 − α",
        beta=0.3,
        divergence="alpha",
        alpha=0.3,
        cases=near,
        theirs={"divergence": ("alpha_divergence", 0.7), "dtype": torch.float32},
    ),
    # its DPOTrainer knows no label smoothing; CPO is DPO whose reference is uniform
    of_trl(
        "dpo",
        "CPOTrainer, of log-ratios, label smoothing",
        partial(trl.cpo_loss_of_log_ratios, loss_type="sigmoid", beta=0.3, label_smoothing=0.2),
        beta=0.3,
        label_smoothing=0.2,
    ),
    of_liger_dpo("dpo", "sigmoid", beta=0.3),
    of_liger_dpo("dpo", "sigmoid", label="average_log_prob", beta=0.9, **MEANS),
    of_liger_dpo(
        "dpo",
        "sigmoid",
        label="sigmoid and NLL",
        beta=0.3,
        nll_coefficient=0.7,
        theirs={"compute_nll_loss": True, "alpha": 0.7},
    ),
    of_dpo_trainer("ipo", "ipo", beta=0.3),
    of_trl(
        "ipo",
        "CPOTrainer, of log-ratios, sums",
        partial(trl.cpo_loss_of_log_ratios, loss_type="ipo", beta=0.3),
        beta=0.3,
        length_normalised=False,
    ),
    of_dpo_trainer("hinge", "hinge", beta=0.3),
    of_liger_dpo("hinge", "hinge", beta=0.3),
    of_liger_dpo("hinge", "hinge", label="hinge, average_log_prob", beta=0.9, **MEANS),
    of_dpo_trainer("robust", "robust", beta=0.3, label_smoothing=0.2),
    of_liger_dpo("robust", "robust", beta=0.3, label_smoothing=0.2),
    of_liger_dpo("robust", "robust", label="robust, average_log_prob", beta=0.9, label_smoothing=0.2, **MEANS),
    of_dpo_trainer("sppo", "sppo_hard", beta=0.3),
    # its gradient grows with the log-ratio, whose sums over many tokens are too coarse in float32
    of_liger_dpo("sppo", "sppo_hard", beta=1.0, cases=short_heads),
    of_dpo_trainer("apo_zero", "apo_zero", beta=0.3),
    of_liger_dpo("apo_zero", "apo_zero", beta=0.3),
    of_liger_dpo("apo_zero", "apo_zero", label="apo_zero, average_log_prob", beta=0.9, **MEANS),
    of_dpo_trainer("apo_down", "apo_down", beta=0.3),
    of_liger_dpo("apo_down", "apo_down", beta=0.3),
    of_liger_dpo("apo_down", "apo_down", label="apo_down, average_log_prob", beta=0.9, **MEANS),
    of_trl(
        "cpo",
        "CPOTrainer sigmoid",
        partial(trl.cpo_loss, loss_type="sigmoid", beta=0.3, nll=0.7, label_smoothing=0.2),
        beta=0.3,
        nll_coefficient=0.7,
        label_smoothing=0.2,
    ),
    of_liger(
        "cpo",
        "cpo",
        partial(liger.free_loss, name="cpo", beta=0.3, alpha=0.7, label_smoothing=0.2),
        beta=0.3,
        nll_coefficient=0.7,
        label_smoothing=0.2,
    ),
    of_liger(
        "cpo",
        "cpo, average_log_prob",
        partial(liger.free_loss, name="cpo", beta=0.9, average_log_prob=True),
        beta=0.9,
        length_normalised=True,
    ),
    of_trl(
        "simpo",
        "CPOTrainer simpo",
        partial(trl.cpo_loss, loss_type="simpo", beta=1.3, gamma=0.4, label_smoothing=0.2),
        beta=1.3,
        gamma=0.4,
        label_smoothing=0.2,
    ),
    of_trl(
        "simpo",
        "CPOTrainer simpo and NLL",
        partial(trl.cpo_loss, loss_type="simpo", beta=1.3, gamma=0.4, nll=0.7),
        beta=1.3,
        gamma=0.4,
        nll_coefficient=0.7,
    ),
    of_liger(
        "simpo",
        "simpo",
        partial(liger.free_loss, name="simpo", beta=1.3, gamma=0.4, alpha=0.7, label_smoothing=0.2),
        beta=1.3,
        gamma=0.4,
        nll_coefficient=0.7,
        label_smoothing=0.2,
    ),
    of_trl("orpo", "ORPOTrainer", partial(trl.orpo_loss, beta=0.3), beta=0.3),
    of_liger("orpo", "orpo", partial(liger.free_loss, name="orpo", beta=0.3), beta=0.3),
    of_trl(
        "kto",
        "KTOTrainer kto",
        partial(trl.kto_loss, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7),
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
    ),
    of_liger("kto", "kto", partial(liger.kto_loss, beta=0.3), beta=0.3),
    of_liger(
        "kto",
        "kto, average_log_prob",
        partial(liger.kto_loss, beta=0.9, average_log_prob=True),
        beta=0.9,
        length_normalised=True,
    ),
]

#: Ours by the name that `DPOTrainer` logs.
FIGURES = {
    "rewards/chosen": "preference/reward_chosen",
    "rewards/rejected": "preference/reward_rejected",
    "rewards/margins": "preference/reward_margin",
    "rewards/accuracies": "preference/accuracy",
    "logps/chosen": "preference/logprob_chosen",
    "logps/rejected": "preference/logprob_rejected",
}


def figure(name: str, case: Responses) -> list[float]:
    return [figures("dpo", case, beta=0.3)[name]]


def figure_of_trl(name: str, case: Responses) -> list[float]:
    return [trl.dpo_figures(case, "sigmoid", beta=0.3)[name]]


FIGURE_ROWS = [
    Row(
        "figure", ours, f"TRL DPOTrainer {theirs}", partial(figure, ours), partial(figure_of_trl, theirs), any_responses
    )
    for theirs, ours in FIGURES.items()
]


@pytest.mark.parametrize("row", [*ROWS, *FIGURE_ROWS], ids=str)
@given(data=st.data())
@same_cases
def test_values_gradients_and_figures(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))


@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=2, max_size=9, unique=True))
def test_the_baseline_has_the_same_answers_after_the_same_prompts(prompts: list[str]) -> None:
    rows = [(prompt, f"{at}" * (at % 3 + 1) + ".") for at, prompt in enumerate(prompts)]
    samples = [
        LabelledSample(
            token_ids=np.array([ord(letter) for letter in prompt + answer], np.int32),
            loss_mask=np.arange(len(prompt + answer)) >= len(prompt),
            origin=prompt,
            desirable=True,
        )
        for prompt, answer in rows
    ]
    made = labelled_step(samples, max_tokens=99, baseline=True).mismatched
    texts = [("".join(map(chr, each.token_ids)), each.prompt_length) for each in made]
    assert sorted((text[:end], text[end:]) for text, end in texts) == sorted(trl.kto_mismatched(rows, len(rows)))
