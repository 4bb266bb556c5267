"""An agent with the official client and the Responses API: a tool call, then a streamed turn."""

import json
import sys

from openai import OpenAI

problem = json.load(sys.stdin)
client = OpenAI(max_retries=0)  # OPENAI_BASE_URL and OPENAI_API_KEY
items = list(problem["messages"])
parameters = {"type": "object", "properties": {}}
tools = [{"type": "function", "name": "look", "parameters": parameters}]
first = client.responses.create(
    model="policy", input=items, tools=tools, include=["message.output_text.logprobs"]
)
logprobs: list[float] = []
for item in first.output:
    if item.type == "message":
        logprobs += [entry.logprob for part in item.content for entry in part.logprobs]
items += first.output
(call,) = [item for item in first.output if item.type == "function_call"]
items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
stream = client.responses.create(model="policy", input=items, tools=tools, stream=True)
last = [event.response for event in stream if event.type == "response.completed"]
reward = float(last[0].output_text == "42")
print(json.dumps({"reward": reward, "first_logprobs": sum(logprobs)}))
