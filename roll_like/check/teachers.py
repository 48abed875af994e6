"""Teachers: whether they are there, and have the student's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll_like.check.findings import Finding, failed
from roll_like.check.hub import localised
from roll_like.check.model import samples_fit
from roll_like.config.run import RunConfig
from roll_like.config.teachers import TeacherConfig, teacher_key, teacher_model
from roll_like.data.chat import Renderer
from roll_like.errors import RollLikeError
from roll_like.models.load import load_tokenizer, resolve_model
from roll_like.models.shape import ModelShape, load_model_shape
from roll_like.models.suited import refuse_unsuited
from roll_like.models.teachers import refuse_other_tokenizer


def teacher_findings(
    config: RunConfig,
    teachers: Mapping[str, TeacherConfig],
    renderer: Renderer | None,
    shape: ModelShape | None,
    *,
    top_k: int | None,
    top_k_key: str = "algorithm.top_k",
) -> Iterator[Finding]:
    """Yield what is wrong with teachers.

    Args:
        teachers: The section `teachers`.
        renderer: The student's tokenizer, where it can be had.
        shape: The student's sizes, where they are known.
        top_k: How many tokens teachers send; None for whole distributions.
    """
    for name, teacher in teachers.items():
        key = teacher_key(name)
        findings: list[Finding] = []
        model = localised(teacher_model(config.model, teacher), key, findings)
        yield from findings
        if model is None:
            continue
        try:
            path = resolve_model(model, key=key).path
            theirs = load_model_shape(path)
            refuse_unsuited(path, trust_remote_code=model.trust_remote_code)
            if teacher.other_tokenizer:
                load_tokenizer(model, key=key)
            elif renderer is not None:
                refuse_other_tokenizer(renderer.tokenizer, load_tokenizer(model, key=key), key=key, path=teacher.path)
        except RollLikeError as error:
            yield failed(key, error)
            continue
        yield from _sizes_fit(config, key, theirs, shape, top_k, top_k_key)


def _sizes_fit(
    config: RunConfig,
    key: str,
    theirs: ModelShape,
    ours: ModelShape | None,
    top_k: int | None,
    top_k_key: str,
) -> Iterator[Finding]:
    if top_k is None and ours is not None and theirs.vocab_size != ours.vocab_size:
        yield Finding.error(
            key,
            f"it has {theirs.vocab_size} logits a token and the student {ours.vocab_size}, so their whole "
            "distributions cannot be compared; set algorithm.top_k, which needs the same tokens only",
        )
    if top_k is not None and top_k > theirs.vocab_size:
        yield Finding.error(
            top_k_key,
            f"{top_k} is more than the {theirs.vocab_size} tokens of the teacher; lower it",
        )
    yield from samples_fit(config, theirs, key)
