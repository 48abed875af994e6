"""What separates reasoning from the answer in a run's responses, as far as a configuration shows it."""

from __future__ import annotations

from collections.abc import Iterator

from roll_like.check.findings import Finding
from roll_like.config.sampling import SamplingRunConfig
from roll_like.data.chat import Renderer
from roll_like.errors import EnvError
from roll_like.types import THINK


def check_reasoning(config: SamplingRunConfig, renderer: Renderer) -> Iterator[Finding]:
    """Yield where responses are split, unless it is at the usual tags, and stop strings that leave no answer."""
    tags = renderer.reasoning
    if tags is None:
        return
    try:
        prompt = renderer.render([{"role": "user", "content": "."}], ())
    except EnvError:  # it wants messages of other roles, and says so where rows are checked
        prompt = ""
    opened = renderer.opens_reasoning(prompt)
    if opened or (tags.open, tags.close) != (THINK.open, THINK.close):
        begins = ", and the chat template opens reasoning in the prompt" if opened else ""
        yield Finding(
            "note",
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
