// The metrics of a run as columns; the live stream appends to them.

export class Store {
  constructor() {
    this.columns = new Map(); // name -> values; names such as `constructor` are data
    this.count = 0;
    this.generation = -1;
    this.cache = new Map();
  }

  /** Adds the lines of a response: all lines, or those from `from` on. */
  add(message) {
    if (message.from === 0) this.columns = new Map();
    this.generation = message.generation;
    const added = new Map(Object.entries(message.columns));
    for (const name of new Set([...this.columns.keys(), ...added.keys()])) {
      if (!this.columns.has(name)) this.columns.set(name, []);
      const column = this.columns.get(name);
      while (column.length < message.from) column.push(null);
      column.length = message.from;
      const fresh = added.get(name);
      for (let i = message.from; i < message.count; i++)
        column.push(fresh ? fresh[i - message.from] : null);
    }
    this.count = message.count;
    this.cache.clear();
  }

  names() {
    return [...this.columns.keys()].filter((name) => name !== "step" && name !== "time");
  }

  get startTime() {
    return (this.columns.get("time") || []).find((t) => t !== null) || 0;
  }

  /**
   * Whether each line is of a "validation" or of a "step"; "" for one without a number. The line of
   * a validation may also have metrics with other names, such as watch/reward_rise.
   */
  lineKinds() {
    const key = "kinds of lines";
    if (!this.cache.has(key)) {
      const kinds = Array(this.count).fill("");
      for (const name of this.names()) {
        const isValidation = name.startsWith("validation/");
        this.columns.get(name).forEach((value, i) => {
          if (value === null) return;
          if (isValidation || !kinds[i]) kinds[i] = isValidation ? "validation" : "step";
        });
      }
      this.cache.set(key, kinds);
    }
    return this.cache.get(key);
  }

  /**
   * {x: {step, time}, y, gaps} of one metric, without the lines that lack it.
   * gaps[i]: whether a line of the same kind lacks the metric, or has NaN, before point i.
   */
  series(name) {
    if (!this.cache.has(name)) {
      const step = this.columns.get("step") || [],
        time = this.columns.get("time") || [],
        startTime = this.startTime;
      const out = { x: { step: [], time: [] }, y: [], gaps: [] };
      const kinds = this.lineKinds();
      let gap = false,
        ownKind = null; // that of the first line with the metric
      (this.columns.get(name) || []).forEach((value, i) => {
        if (value === null || step[i] === null) {
          if (kinds[i] === ownKind) gap = true;
          return;
        }
        ownKind ||= kinds[i];
        out.gaps.push(gap);
        gap = false;
        out.x.step.push(step[i]);
        out.x.time.push((time[i] || startTime) - startTime);
        out.y.push(value);
      });
      this.cache.set(name, out);
    }
    return this.cache.get(name);
  }

  last(name) {
    const { y } = this.series(name);
    return y.length ? y[y.length - 1] : null;
  }

  /** Seconds until step `steps`, from the median of the last steps; null if unknown. */
  secondsLeft(steps) {
    const series = this.series("step_s").y.length ? this.series("step_s") : this.series("loss");
    const times = series.x.time.slice(-21),
      lastStep = series.x.step[series.x.step.length - 1];
    const gaps = times
      .slice(1)
      .map((t, i) => t - times[i])
      .sort((a, b) => a - b);
    return gaps.length && steps ? gaps[gaps.length >> 1] * Math.max(0, steps - lastStep) : null;
  }
}
