// Formats numbers, times and paths.

/** At most four significant digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(value * 100).toFixed(digits)}%`;
}

/** 1 h 02 min, 3 min 05 s, 12 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const days = Math.floor(whole / 86400),
    hours = Math.floor(whole / 3600) % 24,
    minutes = Math.floor(whole / 60) % 60;
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  if (minutes) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  return seconds < 10 && seconds > 0 && !Number.isInteger(seconds)
    ? `${seconds.toFixed(1)} s`
    : `${whole} s`;
}

/** The time since a moment, such as "3 minutes ago". */
export function age(time) {
  if (!time) return "–";
  const seconds = Date.now() / 1000 - time;
  if (seconds < 60) return "just now";
  for (const [size, word] of [
    [86400, "day"],
    [3600, "hour"],
    [60, "minute"],
  ]) {
    const count = Math.floor(seconds / size);
    if (count) return `${count} ${word}${count > 1 ? "s" : ""} ago`;
  }
  return "just now";
}

export function moment(time) {
  return time
    ? new Date(time * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" })
    : "–";
}

/** The last parts of an absolute path. */
export function shortPath(path) {
  const parts = path.split("/").filter(Boolean);
  const useful = parts.filter((part) => part !== "policy" && part !== "checkpoints");
  return path.startsWith("/") && useful.length > 2 ? `…/${useful.slice(-2).join("/")}` : path;
}
