"""mini-swe-agent on this machine, without a container."""

from verifiers.v1.harnesses.mini_swe_agent import MiniSWEAgentHarness


class LocalSWEAgentHarness(MiniSWEAgentHarness):
    NEEDS_CONTAINER = False


__all__ = ["LocalSWEAgentHarness"]
