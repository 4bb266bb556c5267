"""The program of vf_sums.py: asks the model once."""

import json
import sys
import urllib.request

endpoint, secret, model, prompt = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
request = urllib.request.Request(f"{endpoint}/chat/completions", json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request, timeout=600).read())
