"""An agent of the framework smolagents, which writes Python and runs it."""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel

problem = json.load(sys.stdin)
model = OpenAIModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
result = agent.run(problem["messages"][-1]["content"])
print(json.dumps({"reward": float(str(result) == problem["ground_truth"])}))
