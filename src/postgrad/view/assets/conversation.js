// A response of several turns as a conversation: who wrote what, tool calls, the reward per turn.
import { h } from "./dom.js";
import { number } from "./format.js";

// Columns that the conversation shows.
export const COLUMNS = ["messages", "turn_rewards", "turn_states", "environment"];
const SPEAKERS = { assistant: "policy", tool: "tool", prompt: "prompt" };
const TITLES = {
  policy: "Policy",
  tool: "Tool result",
  prompt: "Prompt",
  environment: "Environment",
};
// Tool calls within a turn. Formats without such marks are the whole turn.
const CALL =
  /<tool_call>[\s\S]*?(?:<\/tool_call>|$)|<function=[\s\S]*?(?:<\/function>|$)|```[\s\S]*?(?:```|$)/g;

/** The messages of a response with several turns or an environment; null for any other. */
export function parseMessages(row) {
  const messages = parse(row.others.messages);
  if (!Array.isArray(messages)) return null;
  return messages.length > 1 || (messages.length && row.others.environment) ? messages : null;
}

/** The columns that the page shows elsewhere, because the conversation does not. */
export function isShownHere(name, value) {
  if (name === "environment") return !parse(value)?.state; // the state that get_state() returned
  return COLUMNS.includes(name);
}

/** The question, the turns of the policy, and what tools or the environment answered to each. */
export function conversation(question, messages, row) {
  const rewards = row.others.turn_rewards;
  const all = question ? [{ role: "prompt", content: question }, ...messages] : messages;
  const numTurns = messages.filter((message) => message.role === "assistant").length;
  let turn = 0;
  const turns = all.map((message, i) => {
    const speaker = SPEAKERS[message.role] || "environment";
    if (speaker !== "policy") return said(speaker, TITLES[speaker], null, message.content);
    const calls = all[i + 1]?.role === "tool";
    const reward = Array.isArray(rewards) ? rewards[turn] : null;
    turn += 1;
    const title = `Policy, turn ${turn}${calls ? ", calls a tool" : ""}`;
    return said(speaker, title, reward, message.content, calls);
  });
  return h(
    "details",
    { class: "conversation", open: true },
    h("summary", {}, `Conversation, ${numTurns} turn${numTurns === 1 ? "" : "s"} of the policy`),
    turns,
    ending(parse(row.others.environment)),
  );
}

function said(speaker, title, reward, content, calls = false) {
  const text = String(content ?? "");
  return h(
    "div",
    { class: `turn said-by-${speaker}` },
    h(
      "div",
      { class: "speaker" },
      h("b", {}, title),
      typeof reward === "number"
        ? h("span", { class: `turnreward ${sign(reward)}` }, `reward ${number(reward)}`)
        : null,
    ),
    h("div", { class: "text" }, text ? (calls ? withCalls(text) : text) : "(empty)"),
  );
}

/** The text of a turn with its tool calls set apart. */
function withCalls(text) {
  const pieces = [];
  let end = 0;
  for (const match of text.matchAll(CALL)) {
    pieces.push(text.slice(end, match.index), h("code", { class: "call" }, match[0]));
    end = match.index + match[0].length;
  }
  if (!pieces.length) return h("code", { class: "call" }, text);
  return [...pieces, text.slice(end)];
}

function ending(episode) {
  if (typeof episode?.done !== "boolean") return null;
  const text = episode.done
    ? "The environment ended the episode here."
    : "The episode was not finished: the turns or the tokens were used up.";
  return h("p", { class: "dim" }, text);
}

function sign(value) {
  return value > 0 ? "plus" : value < 0 ? "minus" : "zero";
}

function parse(text) {
  if (typeof text !== "string") return null;
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
