"""A profile file: engine arguments and variables that are known to work together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spark_appliance.model.cluster import EnvName, EnvValue, FlagName, Scalar
from spark_appliance.model.findings import Finding

_Count = Annotated[int, Field(ge=1, le=8)]


class PlainModel(BaseModel):
    """Sizes of a dense model that fits a node, for trying things out."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(description="Name used in messages.")
    heads: Annotated[int, Field(ge=1)] = Field(description="Attention heads.")
    max_context: Annotated[int, Field(ge=1)] = Field(description="Longest context, tokens.")
    weights_bytes: Annotated[int, Field(ge=1, le=10**13)] = Field(
        description="Bytes of all weights."
    )
    kv_bytes_per_token: Annotated[int, Field(ge=1)] = Field(
        description="KV cache bytes of one token over all ranks."
    )


class Profile(BaseModel):
    """A profile file, ``version: 1``."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, title="spark-appliance profile, version 1"
    )

    version: Literal[1] = Field(description="Version of this file format.")
    name: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", description="Name of the profile."
    )
    summary: str = Field(description="One line for listings.")
    nodes: Annotated[list[_Count], Field(min_length=1)] = Field(
        description="Numbers of nodes that the profile is for; TP is the number of nodes."
    )
    model: str | PlainModel = Field(
        description="Name of a known model (deepseek-v4.1-flash), or the sizes of another one."
    )
    engram_cache_gib: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = Field(
        0.0, description="Engram row cache of a node, GiB."
    )
    args: dict[FlagName, Scalar | None] = Field(
        description="SGLang flags without '--'; true: bare flag, false or null: left out."
    )
    env: dict[EnvName, EnvValue | None] = Field(
        default_factory=dict, description="Environment variables of the engine."
    )


def read_profile(data: Any) -> tuple[Profile | None, list[Finding]]:
    """Validate plain data; returns the profile, or None and what is wrong."""
    try:
        return Profile.model_validate(data), []
    except ValidationError as error:
        from spark_appliance.model.schema_errors import findings_of  # only on failure

        return None, findings_of(error, Profile)
