"""A trained model to the hub of Hugging Face, with its card."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from roll_like.errors import ConfigError, DataError, HubError
from roll_like.models.card import CARD

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def push(directory: Path, repo: str, *, public: bool) -> str:
    """Upload a model's directory to a repository of the hub, which is made if there is none, and return its address.

    Args:
        repo: `OWNER/NAME`, or `NAME` for the token's own account.
        public: Whether a new repository is one that everyone may read; one that exists stays as it is.

    Raises:
        ConfigError: There is no token, the hub refuses it, or `repo` is no name of a repository.
        DataError: There is no card, or its header is not valid.
        HubError: The hub cannot be reached, or fails.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # of httpx or httpx2, whichever the hub's client is built on
    transport_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])
    refuse_bad_card(directory / CARD)
    if get_token() is None:
        raise ConfigError(f"push {repo}: there is no token for the hub", fix=_LOG_IN)
    api = HfApi(library_name="roll_like")
    try:
        made = api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=directory, commit_message=f"Upload {directory.parent.name}")
    except HFValidationError as error:
        raise ConfigError(
            f"push {repo}: {_first(error)}", fix="write OWNER/NAME, of letters, digits, -, _ and ."
        ) from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(f"push {repo}: {_first(error)}", fix="unset HF_HUB_OFFLINE") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in {401, 403}:
            raise ConfigError(f"push {repo}: the hub refuses the token ({_first(error)})", fix=_LOG_IN) from error
        raise HubError(f"push {repo}: the hub answers {status} ({_first(error)})", fix="try again later") from error
    except (transport_error, ConnectionError) as error:
        raise HubError(
            f"push {repo}: the hub at {api.endpoint} cannot be reached ({_first(error)})",
            fix="check the network, HF_ENDPOINT and proxies; what was uploaded is not uploaded again",
        ) from error
    except ValueError as error:  # what the hub says of the card's header
        raise DataError(f"push {repo}: {error}", fix=f"correct the header of {directory / CARD}") from error
    return str(made)


def refuse_bad_card(path: Path) -> None:
    """Refuse a card that the hub would.

    Raises:
        DataError: There is none, or its header is not valid.
    """
    import yaml
    from huggingface_hub import ModelCard

    if not path.is_file():
        raise DataError(f"{path.parent} has no model card ({CARD})", fix="export the model again, or write one")
    try:
        ModelCard.load(path)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise DataError(f"the header of {path} is not valid: {error}", fix="correct it") from error


def _first(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
