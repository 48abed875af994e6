"""What advantage estimators and losses have in common: settings of their own."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from roll_like.config.base import PluginConfig


class Algorithm:
    """Base of estimators and losses, which a configuration chooses by name.

    A `Config` without a docstring gets the first paragraph of its class's: that is what the configuration pages show.

    Args:
        config: Its own settings, an instance of its `Config`.
    """

    Config: ClassVar[type[PluginConfig]] = PluginConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls).get("Config")
        if own is not None and not own.__doc__ and cls.__doc__:
            own.__doc__ = inspect.cleandoc(cls.__doc__).partition("\n\n")[0]
