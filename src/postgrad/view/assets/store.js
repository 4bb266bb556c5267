// The metric lines of a run as columns, growing by the live stream.

export class Store {
  constructor() {
    this.columns = {};
    this.count = 0;
    this.generation = -1;
    this.made = new Map();
  }

  /** Take an answer: all lines, or those from `from` on. */
  take(message) {
    if (message.from === 0) this.columns = {};
    this.generation = message.generation;
    for (const name of new Set([...Object.keys(this.columns), ...Object.keys(message.columns)])) {
      const column = (this.columns[name] ||= []);
      while (column.length < message.from) column.push(null);
      column.length = message.from;
      const fresh = message.columns[name];
      for (let i = message.from; i < message.count; i++) column.push(fresh ? fresh[i - message.from] : null);
    }
    this.count = message.count;
    this.made.clear();
  }

  names() {
    return Object.keys(this.columns).filter((name) => name !== "step" && name !== "time");
  }

  get began() {
    return this.columns.time ? this.columns.time.find((t) => t !== null) || 0 : 0;
  }

  /** {x: {step, time}, y} of one metric, without the lines that lack it. */
  series(name) {
    if (!this.made.has(name)) {
      const { step = [], time = [] } = this.columns, began = this.began;
      const out = { x: { step: [], time: [] }, y: [] };
      (this.columns[name] || []).forEach((value, i) => {
        if (value === null || step[i] === null) return;
        out.x.step.push(step[i]);
        out.x.time.push((time[i] || began) - began);
        out.y.push(value);
      });
      this.made.set(name, out);
    }
    return this.made.get(name);
  }

  last(name) {
    const { y } = this.series(name);
    return y.length ? y[y.length - 1] : null;
  }

  /** Seconds until `steps`, from the median of the last steps; null when it cannot be known. */
  left(steps) {
    const series = this.series("step_s").y.length ? this.series("step_s") : this.series("loss");
    const times = series.x.time.slice(-21), done = series.x.step[series.x.step.length - 1];
    const gaps = times.slice(1).map((t, i) => t - times[i]).sort((a, b) => a - b);
    return gaps.length && steps ? gaps[gaps.length >> 1] * Math.max(0, steps - done) : null;
  }
}
