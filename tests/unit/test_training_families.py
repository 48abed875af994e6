"""Rows of several samples give what transformers gives for each alone, for many families of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from all_families import make_model
from model_families import ATTENDING, CAPPED, CHANGED_LOGITS, RECURRENT, UNDIVIDED, WINDOW, WINDOWED, make_family
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend

from roll_like.config.run import ALWAYS_SHARED
from roll_like.errors import ConfigError
from roll_like.models.attention import AttentionLayers
from roll_like.models.logits import logit_transform, refuse_other_logits
from roll_like.models.modules import load_causal_lm
from roll_like.models.renames import recompute_activations
from roll_like.training import flex, sequences, varlen
from roll_like.training.attention import explicit_attention, use_dense_attention
from roll_like.training.backbone import joins_rows, probe_attention, use_row_attention
from roll_like.training.joined import KERNELS, joined_attention, use_joined_attention
from roll_like.training.layout import micro_batches
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.training.segments import RowSegments, Scores, segment_mask
from roll_like.types import PLAIN_LOGITS, TrainingSample

#: Log-probabilities of the targets, [N], and the gradient of their weighted sum in each parameter.
Computed = tuple[torch.Tensor, dict[str, torch.Tensor]]


def samples_of(prompts: Sequence[int], *, head: int = 0) -> list[TrainingSample]:
    """Three responses to each of some prompts, all longer than the window but one; prompts begin with `head` tokens."""
    random = np.random.default_rng(0)
    common = random.integers(3, 64, head)
    samples = []
    for group, length in enumerate(prompts):
        prompt = np.concatenate([common, random.integers(3, 64, length)])
        for response in (7 + group, 1, 5):
            tokens = np.concatenate([prompt, random.integers(3, 64, response)]).astype(np.int32)
            samples.append(
                TrainingSample(
                    group_id=str(group),
                    token_ids=tokens,
                    prompt_length=len(prompt),
                    loss_mask=np.arange(len(tokens)) >= len(prompt),
                )
            )
    return samples


FORMS: dict[str, tuple[list[TrainingSample], dict[str, Any]]] = {
    "a prompt's responses share a row": (samples_of([9, 6]), {"share_prompts": True}),
    "groups with a common beginning share a row": (
        samples_of([6, 3], head=5),
        {"share_prompts": True, "packing": True},
    ),
    "each alone": (samples_of([9]), {"share_prompts": False}),
}


#: Of which the others are parts.
WHOLE_FORM = "groups with a common beginning share a row"


def families_and_forms(families: Sequence[str], by_day: Sequence[str] = (WHOLE_FORM,)) -> list[Any]:
    """Parameters of tests: one form by day, and all of them of one family."""
    return [
        pytest.param(family, form, marks=[] if form in by_day or (by_day and family == "llama") else [pytest.mark.slow])
        for family in families
        for form in FORMS
    ]


def weight_of(sample: int, token: int) -> float:
    return float(np.sin(3 * sample + token))


def alone(model: Any, samples: Sequence[TrainingSample]) -> Computed:
    """What transformers computes, one sample at a time, without padding or masks of ours."""
    found, loss = [], torch.zeros(())
    for index, sample in enumerate(samples):
        tokens = torch.from_numpy(sample.token_ids).long()[None]
        logprobs_LV = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
        at = np.flatnonzero(sample.loss_mask)
        chosen = logprobs_LV[at - 1, tokens[0, at]]
        weights = torch.tensor([weight_of(index, int(token)) for token in at])
        found.append(chosen.detach())
        loss = loss + (chosen * weights).sum()
    loss.backward()
    return torch.cat(found), gradients(model)


def in_rows(model: Any, samples: Sequence[TrainingSample], layout: dict[str, Any]) -> Computed:
    """What the trainer computes, in the order of `alone`."""
    policy = PolicyModule(model, chunk_tokens=64, chunk_vocab=512)
    found, loss = {}, torch.zeros(())
    (batches,) = micro_batches(samples, ranks=1, max_tokens=256, **layout)
    for batch in batches:
        logprobs, _ = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        places = list(zip(batch.sample_ids.tolist(), batch.target_ids.tolist(), strict=True))
        found.update(zip(places, logprobs.detach(), strict=True))
        loss = loss + (logprobs * torch.tensor([weight_of(*place) for place in places])).sum()
    loss.backward()
    return torch.stack([found[place] for place in sorted(found)]), gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of every parameter; zeros where it had no part in the result."""
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
    }


def error(ours: Computed, theirs: Computed) -> tuple[float, float]:
    """The largest difference of log-probabilities, in nats, and of gradients, as a share of the largest gradient."""
    largest = max(float(each.abs().max()) for each in theirs[1].values())
    of_gradients = max(float((ours[1][name] - theirs[1][name]).abs().max()) for name in theirs[1])
    return float((ours[0] - theirs[0]).abs().max()), of_gradients / largest


def compared(family: str, form: str, prepare: Callable[[Any], None], **changes: Any) -> tuple[float, float]:
    samples, layout = FORMS[form]
    model = make_family(family, **changes)
    prepare(model)
    layout = {**layout, "joined": joins_rows(model)}
    return error(in_rows(model, samples, layout), alone(make_family(family, **changes), samples))


def for_rows(model: Any) -> None:
    use_row_attention(model, row_sharing="training.share_prompts")


def joined(model: Any) -> None:
    use_row_attention(model, "varlen", row_sharing="training.share_prompts")


@pytest.mark.parametrize(("family", "form"), families_and_forms(ATTENDING))
def test_rows_equal_transformers_on_each_sample(family: str, form: str) -> None:
    logprobs, gradient = compared(family, form, for_rows)
    assert logprobs < 1e-5
    assert gradient < 1e-5


@pytest.mark.parametrize("masked_queries", [512, 3])
@pytest.mark.parametrize(("family", "form"), families_and_forms(ATTENDING))
def test_joined_rows_equal_transformers_on_each_sample(
    family: str, form: str, masked_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without masks, and with blocks of queries that are shorter than a sample."""
    monkeypatch.setattr(varlen, "MASKED_QUERIES", masked_queries)
    monkeypatch.setattr(RowSegments, "mask", lambda *_: pytest.fail("a mask was made"))
    logprobs, gradient = compared(family, form, joined)
    assert logprobs < 1e-5
    assert gradient < 1e-5


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *((family, {"window": None}) for family in WINDOWED),
        ("gemma2", {"softcap": None}),
        ("gpt_oss", {"sinks_H": None}),
    ],
)
def test_joined_rows_without_windows_bounds_or_sinks_would_not_pass(
    family: str, change: dict[str, None], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = varlen._blocks
    monkeypatch.setattr(varlen, "_blocks", lambda *tensors: blocks(*tensors[:-1], replace(tensors[-1], **change)))
    assert all(compared(family, form, joined)[0] > 0.01 for form in FORMS)


def test_joined_rows_whose_samples_see_each_other_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_row_sequences", lambda segments: [(len(segments), [(0, len(segments))])])
    with pytest.raises(ConfigError, match="lets a sample see other samples of its row"):
        joined(make_family("llama"))
    monkeypatch.setattr("roll_like.training.backbone.probe_attention", lambda *_, **__: [])
    assert compared("llama", "a prompt's responses share a row", joined)[0] > 0.1


@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.parametrize("groups", [1, 4])
def test_long_sequences_are_computed_each_by_itself(groups: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H100, where cuDNN's kernel is called for each, with lengths that are rounded up; one shares a prompt."""
    monkeypatch.setattr(varlen, "LONG_BACKENDS", [SDPBackend.MATH])
    monkeypatch.setattr(varlen, "LENGTH_STEP", step)
    called: list[int] = []
    product = varlen.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        varlen.functional,
        "scaled_dot_product_attention",
        lambda query, *tensors, **more: called.append(query.shape[2]) or product(query, *tensors, **more),
    )
    segments_BL = torch.tensor([[0] * 9 + [-1] * 3, [0] * 3 + [1] * 5 + [2] * 4])
    positions_BL = torch.tensor([list(range(12)), [*range(8), *range(3, 7)]])
    segments = RowSegments(segments_BL, positions_BL)
    generator = torch.Generator().manual_seed(0)
    shapes = ((21, 4, 8), (21, groups, 8), (21, groups, 8))
    joined = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    expected = varlen.varlen_attention(*joined, segments, Scores(scale=0.3))
    called.clear()
    gathered = [segments.sequences.gathered(each) for each in joined[1:]]
    found = varlen._long_sequences(joined[0], *gathered, segments.sequences, 0.3)
    assert called == ([9, 8, 7] if step == 1 else [16, 8, 8])
    torch.testing.assert_close(found, expected)
    for one, two in zip(
        torch.autograd.grad(found.square().sum(), joined),
        torch.autograd.grad(expected.square().sum(), joined),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def test_long_sequences_ask_for_cudnn_where_masks_must_not_get_it() -> None:
    """Ranks turn it off for all else (`TrainingRank.start`)."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with torch.nn.attention.sdpa_kernel(varlen.LONG_BACKENDS, set_priority=True):
            assert torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.mark.parametrize(
    ("tokens", "capability", "width", "prompt", "chosen"),
    [
        (9000, (9, 0), 128, 0, True),
        (9000, (10, 0), 64, 0, True),
        (7000, (9, 0), 128, 0, False),  # 3,500 tokens a sequence
        (9000, (8, 0), 128, 0, False),
        (9000, (9, 0), 256, 0, False),
        (18000, (9, 0), 128, 1000, True),  # responses that share a prompt: 11 % more keys than tokens
        (18000, (9, 0), 128, 3000, False),  # 33 %
    ],
)
def test_cudnn_is_for_long_sequences_that_share_little(
    tokens: int, capability: tuple[int, int], width: int, prompt: int, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    segments_BL = torch.zeros(2, tokens // 2, dtype=torch.long)
    if prompt:
        segments_BL[:, prompt : tokens // 4], segments_BL[:, tokens // 4 :] = 1, 2
    rows = RowSegments(segments_BL, torch.arange(tokens // 2).expand(2, -1).contiguous())
    query_THD = torch.empty(tokens, 1, width)
    assert varlen.cudnn_computes(query_THD, query_THD, rows.sequences) is chosen


@pytest.mark.parametrize(
    ("version", "capability", "against", "chosen"),
    [
        (91700, (9, 0), "", "cudnn"),
        (91501, (10, 0), "", "cudnn"),
        (91500, (9, 0), "", "varlen"),
        (None, (9, 0), "", "varlen"),
        (91700, (8, 0), "", "varlen"),
        (91700, (9, 0), "1", "varlen"),
    ],
)
@pytest.mark.parametrize("joining", [False, True])
def test_automatic_attention_is_cudnn_where_torch_prefers_it(
    version: int | None,
    capability: tuple[int, int],
    against: str,
    chosen: str,
    joining: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", against)
    for attention, expected in (("auto", chosen), ("varlen", "varlen"), ("cudnn", "cudnn")):
        model = make_family("llama").to(torch.bfloat16)
        use_row_attention(model, attention, row_sharing=None, device="cuda", joining=joining)  # type: ignore[arg-type]
        assert joined_attention(model.base_model) == expected


@pytest.mark.parametrize("attention", ["varlen", "flex"])
@pytest.mark.parametrize("family", RECURRENT)
def test_layers_with_a_state_are_refused_with_joined_rows(family: str, attention: Any) -> None:
    with pytest.raises(ConfigError, match=rf"training.attention: {attention} joins rows, and the state of"):
        use_row_attention(make_family(family), attention, row_sharing=None)


def test_what_auto_stands_for_is_named_as_auto() -> None:
    with pytest.raises(
        ConfigError, match=r"training.attention: auto \(varlen here\) joins rows.*(?s:.*)fix: .*backend"
    ):
        use_row_attention(make_family(RECURRENT[0]), "auto", row_sharing=None, joining=True)


#: One without and one with windows, those with bounds and sinks; the others ask of it what these do.
FLEX = ("llama", "mistral", *CAPPED)
OTHERS = tuple(name for name in ATTENDING if name not in FLEX)


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own definition of flex attention, with its backward pass: only a check of the device is in the way."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_warn_once", lambda *_, **__: None)  # that it is not compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's compiler
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize(("family", "form"), families_and_forms(FLEX) + families_and_forms(OTHERS, by_day=()))
def test_flex_attention_equals_transformers_on_each_sample(
    family: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, bounded scores and sinks too."""

    def with_flex(model: Any) -> None:
        use_row_attention(model, "flex", row_sharing="training.share_prompts")
        monkeypatch.setattr(RowSegments, "mask", lambda *_: pytest.fail("a mask was made"))

    logprobs, gradient = compared(family, form, with_flex)
    assert logprobs < 1e-5
    assert gradient < 1e-5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's compiler
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("change", [{"window": None}, {"softcap": None}, {"sinks_H": None}])
def test_flex_attention_without_windows_bounds_or_sinks_would_not_pass(
    change: dict[str, None], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = {"window": "mistral", "softcap": "gemma2", "sinks_H": "gpt_oss"}[next(iter(change))]
    kernel = KERNELS["flex"]

    def changed(*tensors: Any) -> torch.Tensor:
        return kernel(*tensors[:-1], replace(tensors[-1], **change))

    monkeypatch.setitem(KERNELS, "flex", changed)
    logprobs, _ = compared(family, "each alone", lambda model: use_joined_attention(model, "flex"))
    assert logprobs > 0.01


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.slow
def test_flex_attention_never_goes_on_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes eight variants by default, and would compute the ninth with T × T scores in memory."""
    variants = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=variants))
    compiled = flex._compiled
    compiled.cache_clear()
    monkeypatch.setattr(flex, "_compiled", lambda function, _: compiled(function, "cuda"))
    monkeypatch.setattr(flex_attention, "_warn_once", lambda *_, **__: pytest.fail("it is not compiled"))
    for width in range(16, 28):
        segments = RowSegments(torch.tensor([[0, 0, 1, 1, 1, 2]]), torch.tensor([[0, 1, 2, 3, 4, 2]]))
        tensors = [torch.randn(6, 2, width) for _ in range(3)]
        for window in (None, 2):
            found = KERNELS["flex"](*tensors, segments, Scores(scale=0.25, window=window))
            expected = explicit_attention(
                *(each.transpose(0, 1)[None] for each in tensors), segments.mask(window), 0.25
            )
            torch.testing.assert_close(found, expected[0].transpose(0, 1))
    assert variants.frame_count > 16
    compiled.cache_clear()


@pytest.mark.parametrize(
    ("family", "dtype", "device", "expected"),
    [
        ("mistral", torch.bfloat16, "cuda", "varlen"),
        ("mistral", torch.bfloat16, "cpu", None),
        ("mistral", torch.float32, "cuda", None),
        ("gemma2", torch.bfloat16, "cuda", "flex"),
        ("gpt_oss", torch.bfloat16, "cuda", "flex"),
        ("qwen3_next", torch.bfloat16, "cuda", None),
    ],
)
def test_auto_joins_rows_on_gpus(
    family: str, dtype: torch.dtype, device: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for triton, chosen in ((object(), expected), (None, None if expected == "flex" else expected)):
        monkeypatch.setattr("roll_like.training.backbone.find_spec", lambda _, triton=triton: triton)
        model = make_family(family).to(dtype)
        use_row_attention(model, "auto", row_sharing=None, device=device)
        assert joined_attention(model) == chosen
        assert joins_rows(model) is (chosen is not None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"head_dim": 264}, "flex"), ({"head_dim": 12}, "flex"), ({"attention_dropout": 0.1}, None)],
)
def test_auto_leaves_wide_heads_to_flex_and_dropout_to_masks(
    changes: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_like.training.backbone.find_spec", lambda _: object())
    model = make_family("llama", **changes).to(torch.bfloat16)
    use_row_attention(model, "auto", row_sharing=None, device="cuda")
    assert joined_attention(model) == expected


def test_dropped_attention_weights_are_refused_with_joined_rows() -> None:
    model = make_family("llama", attention_dropout=0.1).train()
    with pytest.raises(ConfigError, match=r"config.json has attention_dropout: 0.1"):
        use_row_attention(model, "varlen", row_sharing=None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", WINDOWED)
def test_one_mask_for_all_layers_would_not_pass(family: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees it when a layer with a window sees the whole row, also that of one sample."""
    monkeypatch.setattr(RowSegments, "mask", lambda self, window=None: segment_mask(self.segment_ids_BL))
    logprobs, gradient = compared(family, form, for_rows)
    assert logprobs > 0.1
    assert gradient > 0.01


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_windows_counted_by_places_in_the_row_would_not_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(segments: RowSegments, window: int | None = None) -> torch.Tensor:
        mask = segment_mask(segments.segment_ids_BL)
        return mask if window is None else mask & ~torch.ones_like(mask).tril(-window)

    monkeypatch.setattr(RowSegments, "mask", by_place)
    monkeypatch.setattr("roll_like.training.backbone.probe_attention", lambda *_, **__: [])
    shared, packed, single = (compared(family, form, for_rows)[0] for form in FORMS)
    assert min(shared, packed) > 0.1
    assert single < 1e-5


@pytest.mark.parametrize("family", ATTENDING)
def test_a_causal_mask_would_not_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(segments: RowSegments, window: int | None = None) -> torch.Tensor:
        mask = segments.segment_ids_BL.new_ones(segments.segment_ids_BL.shape[1:] * 2).bool().tril()[None, None]
        return mask.expand(len(segments.segment_ids_BL), -1, -1, -1) & segments._near(window or 1000)

    monkeypatch.setattr(RowSegments, "mask", causal)
    with pytest.raises(ConfigError, match="lets a sample see other samples of its row"):
        make_ready(family)
    assert compared(family, "a prompt's responses share a row", use_dense_attention)[0] > 0.1


def make_ready(family: str, **changes: Any) -> Any:
    model = make_family(family, **changes)
    for_rows(model)
    return model


@pytest.mark.parametrize("family", CAPPED)
def test_torchs_attention_would_drop_bounds_and_sinks(family: str) -> None:
    def with_torch(model: Any) -> None:
        model.config._attn_implementation_internal = "sdpa"

    try:
        lost = compared(family, "each alone", with_torch, sliding_window=64)[0]
    except ValueError as error:  # transformers 5.24 refuses bounds itself
        lost = 1.0 if "does not support `softcap`" in str(error) else 0.0
    assert lost > 0.01
    assert compared(family, "each alone", for_rows, sliding_window=64)[0] < 1e-5


@pytest.mark.parametrize(
    ("family", "prepare"),
    [
        *((family, for_rows) for family in ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss")),
        *((family, joined) for family in ("llama", "mistral", "gemma3_text")),
    ],
)
def test_checkpointed_layers_know_the_rows(family: str, prepare: Callable[[Any], None]) -> None:
    def checkpointed(model: Any) -> None:
        prepare(model)
        recompute_activations(model)
        model.train()
        assert model.base_model.layers[0].gradient_checkpointing

    logprobs, gradient = compared(family, "a prompt's responses share a row", checkpointed)
    assert logprobs < 1e-5
    assert gradient < 1e-5


def test_layers_with_a_state_run_one_sample_a_row() -> None:
    samples, layout = samples_of([9, 6]), {"share_prompts": False}
    model = make_family(UNDIVIDED)
    use_row_attention(model, row_sharing=None)
    logprobs, gradient = error(in_rows(model, samples, layout), alone(make_family(UNDIVIDED), samples))
    assert logprobs < 1e-5
    assert gradient < 1e-5


def test_layers_with_a_state_are_refused_where_samples_share_a_row() -> None:
    model = make_family(UNDIVIDED)
    with pytest.raises(ConfigError, match=r"layers of the type linear_attention.* training.share_prompts") as said:
        for_rows(model)
    assert said.value.fix == "set training.share_prompts: false"
    with pytest.raises(ConfigError) as said:
        use_row_attention(model, row_sharing=ALWAYS_SHARED)
    assert said.value.fix == "set model.path to a model without such layers"


@pytest.mark.parametrize("family", RECURRENT)
def test_layers_with_a_state_would_leak(family: str) -> None:
    assert compared(family, "a prompt's responses share a row", use_dense_attention)[0] > 0.01


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", RECURRENT)
def test_layers_with_a_state_begin_each_sample_anew(family: str, form: str, checkpointing: bool) -> None:
    def prepare(model: Any) -> None:
        use_row_attention(model, row_sharing=ALWAYS_SHARED)  # as with pairs
        if checkpointing:
            recompute_activations(model)
            model.train()

    logprobs, gradient = compared(family, form, prepare)
    assert logprobs < 1e-5
    assert gradient < 1e-5


@pytest.mark.parametrize("family", RECURRENT)
def test_a_state_that_is_not_begun_anew_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.training.backbone.begin_states_anew", lambda model, count: None)
    with pytest.raises(ConfigError, match="lets a sample see other samples of its row"):
        for_rows(make_family(family))


def test_layers_with_a_state_of_an_unknown_kind_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model that brings code of its own under a known `model_type`."""
    model = make_family("bamba")
    monkeypatch.setattr("torch.nn.Conv1d", torch.nn.Conv2d)  # what it begins with is no convolution that is known
    with pytest.raises(ConfigError, match=r"has 0 layers of a known kind that keep a state, and config.json has 1"):
        for_rows(model)


def test_samples_of_rows_are_rows() -> None:
    """A prompt of two tokens with responses of two and of three; a row of one sample, and padding."""
    segments = torch.tensor([[0, 0, 1, 1, 2, 2, 2], [0, 1, 1, -1, -1, -1, -1]])
    samples = sequences.Sequences.of(segments).as_rows()
    assert samples.tokens_SK.tolist() == [[0, 1, 2, 3, -1], [0, 1, 4, 5, 6], [7, 8, 9, -1, -1]]
    assert samples.own_SK.int().tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_layers_that_attend_in_other_ways_are_refused() -> None:
    with pytest.raises(ConfigError, match="of the type chunked_attention"):
        make_ready("llama4_text")


def test_layers_with_a_bias_of_their_own_are_refused() -> None:
    model = make_model("doge").eval()
    for attention in ("dense", "varlen"):
        with pytest.raises(ConfigError, match="layers of the model add a bias of their own"):
            use_row_attention(model, attention, row_sharing="training.share_prompts")


def test_a_model_that_counts_positions_by_itself_is_refused() -> None:
    model = make_family("llama")
    model.base_model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {"position_ids": torch.arange(args[0].shape[1])[None]}), with_kwargs=True
    )
    with pytest.raises(ConfigError, match="LlamaModel does not compute tokens for the positions that it is given"):
        for_rows(model)


def test_a_window_that_a_layer_does_not_ask_for_is_noticed() -> None:
    model = make_family("llama")
    model.config.sliding_window = WINDOW
    use_dense_attention(model)
    with pytest.raises(ConfigError, match=r"0 attention layers of LlamaModel asked .* config.json has 2"):
        probe_attention(model.base_model, AttentionLayers.of(model.config))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "changes"), CHANGED_LOGITS.items())
def test_scaled_and_bounded_logits_equal_those_of_transformers(
    family: str, changes: dict[str, float], form: str
) -> None:
    refuse_other_logits(make_family(family, **changes))
    logprobs, gradient = compared(family, form, for_rows, **changes)
    assert logprobs < 1e-5
    assert gradient < 1e-5


@pytest.mark.parametrize(("family", "changes"), CHANGED_LOGITS.items())
def test_logits_without_the_models_scale_or_bound_are_noticed(
    family: str, changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll_like.training.policy.logit_transform", lambda _: PLAIN_LOGITS)
    monkeypatch.setattr("roll_like.models.logits.logit_transform", lambda _: PLAIN_LOGITS)
    with pytest.raises(ConfigError, match="does to the products of its output layer what training does not know"):
        refuse_other_logits(make_family(family, **changes))
    assert compared(family, "each alone", for_rows, **changes)[0] > 0.01


@pytest.mark.parametrize("family", [*ATTENDING, *RECURRENT])
def test_logits_of_other_families_are_the_output_layers(family: str) -> None:
    model = make_family(family)
    assert logit_transform(model.config) == PLAIN_LOGITS
    refuse_other_logits(model.to(torch.bfloat16))
    refuse_other_logits(make_family(family, tie_word_embeddings=True))


def test_a_bound_of_the_usual_size_is_noticed_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family("gemma2", final_logit_softcapping=30.0).to(torch.bfloat16)
    refuse_other_logits(model)
    monkeypatch.setattr("roll_like.models.logits.logit_transform", lambda _: PLAIN_LOGITS)
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM .* logits differ by \d+% of the largest"):
        refuse_other_logits(model)


def test_logits_that_cannot_be_compared_are_refused() -> None:
    model = make_family("llama")
    model.forward = lambda input_ids, use_cache: model.base_model(input_ids).logits_of_its_own
    with pytest.raises(
        ConfigError, match=r"the logits of LlamaForCausalLM cannot be compared [^!]*'logits_of_its_own'"
    ):
        refuse_other_logits(model)
    assert model.base_model(torch.zeros(1, 2).long()).last_hidden_state.shape == (1, 2, 32)


@torch.no_grad()
def test_time_steps_are_bounded_as_the_configuration_says(tmp_path: Path) -> None:
    """transformers bounds those of Nemotron-H by `time_step_min`; engines do not (transformers#48989)."""
    model = make_family("nemotron_h")
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.fill_(-9.0)  # steps of about 0.0001
    model.save_pretrained(tmp_path)
    tokens = torch.arange(3, 23)[None]
    theirs = model(tokens).logits
    for mixer in model.modules():
        if hasattr(mixer, "time_step_limit"):
            mixer.time_step_limit = (0.0, float("inf"))
    ours = load_causal_lm(tmp_path, "float32")(tokens).logits
    torch.testing.assert_close(ours, model(tokens).logits)
    assert float((ours - theirs).abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["bloom", "openai-gpt", "prophetnet"])
def test_a_model_that_takes_no_rows_is_refused_by_its_type(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"\(model_type {family}\) cannot be given rows of samples") as caught:
        for_rows(make_model(family))
    assert "set model.path to a model whose attention layers" in str(caught.value)
