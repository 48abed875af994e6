"""A taskset with a tool server."""

import verifiers.v1 as vf


class ShopToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str) -> str:
        """Return the price of an item."""
        return str(3 * len(item))


class ShopData(vf.TaskData):
    item: str


class ShopTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[ShopData, vf.State, ShopTaskConfig]):
    @classmethod
    def toolsets(cls, config: ShopTaskConfig) -> list[vf.Toolset]:
        return [ShopToolset(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(3 * len(self.data.item)) in trace.last_reply)


class ShopConfig(vf.TasksetConfig):
    task: ShopTaskConfig = ShopTaskConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    def load(self):
        for item in ("pear", "melon"):
            yield ShopTask(ShopData(prompt=f"What does a {item} cost?", item=item), self.config.task)


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    ShopToolset.run()
