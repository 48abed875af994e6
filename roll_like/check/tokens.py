"""The tokens of a model: whether it knows those of its tokenizer, which end a response, and which its reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from roll_like.check.findings import Finding
from roll_like.config.run import RunConfig
from roll_like.config.sampling import SamplingRunConfig
from roll_like.data.chat import Renderer
from roll_like.errors import EnvError
from roll_like.models.ends import EndToken, end_tokens
from roll_like.models.load import MODEL, TOKENIZER
from roll_like.types import THINK

#: A conversation with all that templates write around texts.
_CONVERSATION = (
    {"role": "user", "content": "."},
    {"role": "assistant", "content": "."},
    {"role": "user", "content": "."},
)


def check_tokens(config: RunConfig, renderer: Renderer, ends: Sequence[EndToken] | None) -> Iterator[Finding]:
    """Yield tokens that the model does not have, and what is wrong with those that end a response.

    Args:
        ends: What `ends_of` returns.
    """
    yield from _beyond_the_embedding(config, renderer)
    if ends is None:
        return
    if not ends and isinstance(config, SamplingRunConfig) and not config.rollout.stop:
        yield Finding.warning(
            "rollout.stop",
            "nothing ends a response but its limit of tokens: neither the chat template nor the tokenizer nor "
            "generation_config.json names a token; name strings here, or set eos_token in the tokenizer's files",
        )
    for end in ends:
        if _is_text(renderer, end):
            yield Finding.warning(
                MODEL,
                f"{end.text!r} ({end.token_id}), with which {' and '.join(end.sources)} says that a response ends, is "
                "an ordinary token of the tokenizer: responses break off wherever they have it; correct eos_token_id "
                "there",
            )


def ends_of(config: RunConfig, renderer: Renderer, path: Path | None) -> tuple[EndToken, ...] | None:
    """Return what ends the responses of a run; None where none is sampled, or the model is out of reach."""
    if path is None or not isinstance(config, SamplingRunConfig) or config.replay is not None:
        return None
    return end_tokens(renderer, path)


def _beyond_the_embedding(config: RunConfig, renderer: Renderer) -> Iterator[Finding]:
    rows = renderer.vocabulary
    if rows is None:
        return
    beyond = sorted((int(token_id), str(token)) for token, token_id in renderer.tokenizer.get_vocab().items())
    beyond = [each for each in beyond if each[0] >= rows]
    if not beyond:
        return
    key = MODEL if config.model.tokenizer is None else TOKENIZER
    named = ", ".join(f"{token!r} ({token_id})" for token_id, token in beyond[:3]) + (", …" if len(beyond) > 3 else "")
    found = f"{len(beyond)} tokens of the tokenizer have no row in the embedding, which has {rows}: {named}"
    needed = {token_id for token_id, _ in beyond} & {*renderer.end_ids, *_template_ids(renderer)}
    if needed:
        yield Finding.error(
            key,
            f"{found}; the chat template writes {len(needed)} of them, or they end a response. Set model.tokenizer to "
            "the tokenizer that the model was trained with, or give the model rows for them (transformers: "
            "resize_token_embeddings(len(tokenizer)), save_pretrained)",
        )
    else:
        yield Finding(
            "note", key, f"{found}; none is needed to write conversations, and texts that have one are refused"
        )


def _template_ids(renderer: Renderer) -> set[int]:
    """Return the tokens that the template writes; nothing where it refuses such a conversation."""
    try:
        texts = [renderer.render(_CONVERSATION[:length], ()) for length in (1, 3)]
    except EnvError:
        return set()
    return {int(token_id) for ids in renderer.encode_pieces([(text, True) for text in texts]) for token_id in ids}


def _is_text(renderer: Renderer, end: EndToken) -> bool:
    """Whether an end token is one that texts are made of, and none that was added for a purpose."""
    tokenizer = renderer.tokenizer
    return end.token_id < len(tokenizer) and end.token_id not in tokenizer.added_tokens_decoder


def check_reasoning(config: SamplingRunConfig, renderer: Renderer) -> Iterator[Finding]:
    """Yield where responses are split, unless it is at the usual tags, and stop strings that leave no answer."""
    tags = renderer.reasoning
    if tags is None:
        return
    try:
        prompt = renderer.render([{"role": "user", "content": "."}], ())
    except EnvError:  # it wants messages of other roles, and says so where rows are checked
        prompt = ""
    after = renderer.reasoning_after(prompt)
    opened = after is not None and after.opened
    if opened or (tags.open, tags.close) != (THINK.open, THINK.close):
        begins = ", and the chat template opens reasoning in the prompt" if opened else ""
        yield Finding.note(
            "model.reasoning",
            f"reasoning is what stands in {tags.open} … {tags.close}{begins}; rewards score what follows it",
        )
    evaluation = config.evaluation.stop if config.evaluation is not None else ()
    for key, stop in (("rollout.stop", config.rollout.stop), ("evaluation.stop", evaluation)):
        ending = next((string for string in stop if string in tags.close or tags.close in string), None)
        if ending is not None:
            yield Finding(
                "error" if opened else "warning",
                key,
                f"{ending!r} ends a response where its reasoning ends ({tags.close}), so it has no answer to score; "
                "remove it, or set model.reasoning: null if all of a response is the answer",
            )
