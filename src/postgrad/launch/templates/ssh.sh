#!/usr/bin/env bash
# Run on the first host. All hosts see the current folder under the same path.
set -euo pipefail
{% if job.setup %}
{{ job.setup }}
{% endif %}
# Nodes that know the token may join and run code. The file is readable by its owner only.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.ray-token"
(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")
others=({{ job.hosts[1:] | map("quote") | join(" ") }})
enter="cd \"$PWD\" && {% if job.setup %}{{ job.setup | replace('"', '\\"') }} && {% endif %}RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=\"$RAY_AUTH_TOKEN_PATH\""
stop() {
  ray stop
  for host in "${others[@]}"; do ssh "$host" "$enter ray stop" || true; done
  rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap stop EXIT
address={{ job.hosts[0] | quote }}
{{ head }}
for host in "${others[@]}"; do
  ssh "$host" "$enter {{ worker }}"
done
{{ wait }}
{{ command }}
