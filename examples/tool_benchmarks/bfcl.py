"""BFCL's command line, with one more model: what an OpenAI-compatible server at OPENAI_BASE_URL serves.

Python of an environment that has bfcl-eval: README.md.
"""

import os

from bfcl_eval.__main__ import cli
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING, ModelConfig
from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler


def add_served(model: str) -> None:
    """Add a model as `served`; its server is at OPENAI_BASE_URL."""
    MODEL_CONFIG_MAPPING["served"] = ModelConfig(
        model_name=model,
        display_name=model,
        url=os.environ["OPENAI_BASE_URL"],
        org="",
        license="",
        model_handler=OpenAICompletionsHandler,
        is_fc_model=True,  # tools go out and calls come back as the API has them
        underscore_to_dot=True,  # the handler writes math.hypot as math_hypot
    )


if __name__ == "__main__":
    add_served(os.environ["SERVED_MODEL"])
    cli()
