"""A taskset of the package verifiers with a harness of its own: one question, one answer."""

import sys
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["SumsHarness", "SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def is_right(self, trace) -> float:
        return float(self.data.answer in trace.branches[-1].messages[-1].content)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content))


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            data = SumData(prompt=f"{number}+1=", answer=str(number + 1))
            yield SumTask(data, self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_MCP = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        program = str(Path(__file__).with_name("vf_program.py"))
        argv = [sys.executable, program, endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program(argv, {})
