"""A resource server of NeMo Gym that cannot score, and says so as newer versions of NeMo Gym do."""

from __future__ import annotations

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class UnscoredResponse(BaseVerifyResponse):
    failure_reason: str


class BrokenServer(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> UnscoredResponse:
        return UnscoredResponse(**body.model_dump(), reward=0.0, failure_reason="the judge is away")
