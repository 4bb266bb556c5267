"""An agent with the official client: two turns, the second one streamed."""

import json
import sys

from openai import OpenAI

problem = json.load(sys.stdin)
client = OpenAI(max_retries=0)  # OPENAI_BASE_URL and OPENAI_API_KEY
messages = list(problem["messages"])
first = client.chat.completions.create(
    model="policy", messages=messages, logprobs=True, max_tokens=8
)
reply = first.choices[0].message
messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "+1="}]
stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
last = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
logprobs = sum(entry.logprob for entry in first.choices[0].logprobs.content)
print(json.dumps({"reward": float(len(last)), "first_logprobs": logprobs}))
