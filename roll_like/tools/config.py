"""Tools in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from roll_like.config.base import ConfigModel


class CalculatorConfig(ConfigModel):
    """Arithmetic."""

    type: Literal["calculator"] = "calculator"


class SearchConfig(ConfigModel):
    """BM25 over a local corpus."""

    type: Literal["search"] = "search"
    corpus: Path = Field(
        description="JSON lines with `text` and perhaps `title`, or a text file with a blank line between passages."
    )
    results: int = Field(default=3, ge=1, description="Passages in one answer.")
    max_characters: int = Field(default=600, ge=1, description="Longest passage. Characters.")


class PythonConfig(ConfigModel):
    """Programs in the sandbox."""

    type: Literal["python"] = "python"
    wall_seconds: float = Field(default=10.0, gt=0, description="Limit of one program, waiting included. Seconds.")
    cpu_seconds: float = Field(default=8.0, gt=0, description="Processor time of one program. Seconds.")
    memory_mib: int = Field(default=256, ge=32, description="Memory of one program. MiB.")
    backend: str = Field(default="auto", description="Sandbox backend; auto takes the strongest that works here.")
    workers: int = Field(default=2, ge=1, description="Programs at a time.")


class FunctionConfig(ConfigModel):
    """A Python function."""

    type: Literal["function"] = "function"
    target: str = Field(pattern=r"^[\w.]+:\w+$", description="Where it is: `package.module:function`.")
    name: str | None = Field(default=None, description="Name of the tool; default: the function's.")


class McpConfig(ConfigModel):
    """The tools of an MCP server."""

    type: Literal["mcp"] = "mcp"
    name: str = Field(description="For messages.")
    command: str | None = Field(default=None, description="Program to start, which speaks MCP over stdio.")
    args: tuple[str, ...] = Field(default=(), description="Its arguments.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables for it, in addition to HOME, PATH and the like."
    )
    cwd: Path | None = Field(default=None, description="Its working directory.")
    url: str | None = Field(default=None, description="Address of a running server (streamable HTTP), instead.")
    headers: dict[str, str] = Field(default_factory=dict, description="HTTP headers, for example for authorization.")
    tools: tuple[str, ...] | None = Field(default=None, description="Tools to use; default: all.")
    prefix: str = Field(default="", description="Put before the names of its tools.")
    start_seconds: float = Field(default=120.0, gt=0, description="Longest start. Seconds.")
    call_seconds: float = Field(default=60.0, gt=0, description="Longest call. Seconds.")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server has either a `command` or a `url`")
        return self


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


ToolConfig: TypeAlias = Annotated[
    Annotated[CalculatorConfig, Tag("calculator")]
    | Annotated[SearchConfig, Tag("search")]
    | Annotated[PythonConfig, Tag("python")]
    | Annotated[FunctionConfig, Tag("function")]
    | Annotated[McpConfig, Tag("mcp")],
    Discriminator(
        _type_of,
        custom_error_type="unknown_tool",
        custom_error_message="unknown tool type; expected `type`: calculator, search, python, function or mcp",
    ),
]
