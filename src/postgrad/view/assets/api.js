// Requests to the server.

/** The address of a request; empty parameters are left out. */
export function address(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value])
      if (item !== null && item !== undefined && item !== "") query.append(key, item);
  }
  return `/api/${name}?${query}`;
}

/** The response as an object; throws an Error whose message is shown to the user. */
export async function request(name, params = {}, signal = undefined) {
  let response;
  try {
    response = await fetch(address(name, params), { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not respond. Is postgrad view still running?");
  }
  if (response.status === 401)
    throw new Error("A token is needed. Open the address that postgrad view printed.");
  const body = await response.json().catch(() => ({}));
  if (response.status === 404) throw new Error("Not found. It may have been deleted.");
  if (!response.ok) throw new Error(body.error || `The server returned status ${response.status}.`);
  return body;
}

/**
 * Receives server-sent events until the signal aborts. `handlers` maps event names to functions;
 * `disconnected(true)` is called when the connection breaks, `disconnected(false)` when it is back.
 */
export function listen(params, handlers, signal) {
  let source, timer;
  const connect = () => {
    source = new EventSource(`/api/live?${new URLSearchParams(params())}`);
    for (const [name, handler] of Object.entries(handlers)) {
      if (name !== "lost")
        source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    }
    source.onopen = () => handlers.disconnected && handlers.disconnected(false);
    source.onerror = () => {
      // a new request names the lines that the page already has
      source.close();
      if (handlers.disconnected) handlers.disconnected(true);
      timer = setTimeout(connect, 1500);
    };
  };
  const disconnect = () => {
    source.close();
    clearTimeout(timer);
  };
  connect();
  // A browser opens few connections to one host, so hidden pages must not keep theirs.
  addEventListener("pagehide", disconnect, { signal });
  addEventListener("pageshow", (event) => event.persisted && connect(), { signal });
  document.addEventListener(
    "visibilitychange",
    () => {
      disconnect();
      if (document.visibilityState === "visible") connect();
    },
    { signal },
  );
  signal.addEventListener("abort", disconnect);
}
