// Questions to the server.

/** The answer as an object, or an Error with a sentence for people. */
export async function ask(name, params = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") query.append(key, one);
  }
  let answer;
  try {
    answer = await fetch(`/api/${name}?${query}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is postgrad view still running?");
  }
  if (answer.status === 401) throw new Error("A token is needed: open the address that postgrad view printed.");
  const body = await answer.json().catch(() => ({}));
  if (answer.status === 404) throw new Error("It is not there (any more).");
  if (!answer.ok) throw new Error(body.error || `The server answered ${answer.status}.`);
  return body;
}

/** Server-sent events until the signal: handlers by event name; `lost(true)` when the line breaks, `lost(false)` when it is back. */
export function listen(params, handlers, signal) {
  let source, timer;
  const connect = () => {
    source = new EventSource(`/api/live?${new URLSearchParams(params())}`);
    for (const [name, handler] of Object.entries(handlers)) {
      if (name !== "lost") source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    }
    source.onopen = () => handlers.lost && handlers.lost(false);
    source.onerror = () => {  // connect anew, so that the question names what is already here
      source.close();
      if (handlers.lost) handlers.lost(true);
      timer = setTimeout(connect, 1500);
    };
  };
  const leave = () => {
    source.close();
    clearTimeout(timer);
  };
  connect();
  // A browser has few connections to one host: pages that nobody looks at, or that it only puts aside, must not hold them.
  addEventListener("pagehide", leave, { signal });
  addEventListener("pageshow", (event) => event.persisted && connect(), { signal });
  document.addEventListener("visibilitychange", () => {
    leave();
    if (document.visibilityState === "visible") connect();
  }, { signal });
  signal.addEventListener("abort", leave);
}
