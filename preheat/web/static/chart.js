// Draws <figure class="chart" data-runs="ID,ID" data-key="loss" data-x="step"> and keeps it up to date.
//
// Further attributes: data-title; data-names, a JSON list of the runs' names;
// data-smoothing, from 0 to 0.99; data-marks="off", without events. The server sends each curve in as many bins as the
// chart is wide, with the extremes of each, so that zooming reads the part that is shown in full. data-tools="off" leaves
// out smoothing, axis and scale, for small charts side by side.
"use strict";

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const prefix = document.body.dataset.prefix || "";
  const TITLES = {
    loss: "Training loss",
    validation_loss: "Validation loss",
    tokens_per_second: "Tokens per second",
    gradient_norm: "Gradient norm",
    lr: "Learning rate",
    memory: "Memory after each step",
    seconds: "Seconds per step",
  };
  const AXES = { step: "Steps", tokens: "Tokens", hours: "Hours of training" };
  const UPDATE_MS = 2000;
  const UNSEEN_UPDATE_MS = 30000;
  const COLOURS = 8;
  const TABLE_ROWS = 24;

  const create = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const draw = (parent, name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "style") element.style.cssText = value;
      else element.setAttribute(key, value);
    }
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const format = (value) => {
    if (value === null || value === undefined) return "not finite";
    const size = Math.abs(value);
    if (size >= 1e12) return value.toExponential(2);
    for (const [limit, unit] of [[1e9, " B"], [1e6, " M"]]) if (size >= limit) return `${+(value / limit).toPrecision(4)}${unit}`;
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size !== 0 && size < 1e-3) return value.toExponential(2);
    return String(+value.toPrecision(4));
  };
  const round = (value) => Math.round(value * 10) / 10;

  // Ticks at 1, 2 or 5 times a power of ten.
  const listTicks = (low, high, count) => {
    const raw = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(n * step);
    return ticks;
  };

  // Exponential moving average without the bias of its start; gaps stay gaps.
  const smooth = (values, weight) => {
    if (!weight) return values;
    let sum = 0;
    let total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };

  let charts = 0;
  // Events of runs, which all charts of a run mark, by path until the next change.
  const shared = new Map();

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.number = ++charts;
      this.ids = figure.dataset.runs.split(",").filter(Boolean);
      this.key = figure.dataset.key;
      this.axis = figure.dataset.x || "step";
      this.scale = 1;
      this.title = figure.dataset.title || TITLES[this.key] || this.key.replaceAll("_", " ").replaceAll("/", ": ");
      this.smoothing = Number(figure.dataset.smoothing || 0);
      this.isLog = false;
      this.range = null;
      this.curves = [];
      this.marks = [];
      this.hidden = new Set();
      this.names = null;
      this.loaded = 0;
      this.timer = 0;
      this.isInView = true;
      this.isStale = false;
      this.build();
      this.load();
    }

    build() {
      const { figure } = this;
      figure.replaceChildren();
      this.value = create("p", { class: "chart-value" });
      this.heading = create("h3", { id: `chart-${this.number}` }, this.title);
      figure.setAttribute("aria-labelledby", this.heading.id);
      this.legend = create("ul", { class: "legend" });
      this.svg = document.createElementNS(SVG, "svg");
      this.svg.setAttribute("tabindex", "0");
      this.svg.setAttribute("role", "img");
      this.table = create("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Values: ${this.title}` });
      this.details = create("details", {}, create("summary", {}, "Values as a table"), this.table);
      this.details.addEventListener("toggle", () => this.details.open && this.fillTable());
      figure.append(create("div", { class: "chart-title" }, this.heading, this.value), this.legend, this.svg, this.buildTools(), this.details);
      this.svg.addEventListener("keydown", (event) => this.press(event));
      this.svg.addEventListener("pointerdown", (event) => this.startSelection(event));
      this.svg.addEventListener("pointermove", (event) => this.point(event));
      this.svg.addEventListener("pointerup", (event) => this.endSelection(event));
      this.svg.addEventListener("pointercancel", () => this.cancelSelection());
      this.svg.addEventListener("pointerleave", () => this.leave());
      this.svg.addEventListener("dblclick", () => this.zoom(null));
      this.observer = new ResizeObserver(() => {
        if (Math.abs((this.width || 0) - figure.clientWidth) > 1) this.render();
      });
      this.observer.observe(figure);
      this.viewObserver = new IntersectionObserver((entries) => {
        this.isInView = entries.at(-1).isIntersecting;
        clearTimeout(this.timer);
        this.timer = 0;
        this.scheduleLoad();
      }, { rootMargin: "200px" });
      this.viewObserver.observe(figure);
    }

    buildTools() {
      const range = create("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(this.smoothing) });
      range.addEventListener("input", () => {
        this.smoothing = Number(range.value);
        this.render();
      });
      const axis = create("select", {}, ...Object.entries(AXES).map(([name, title]) => create("option", { value: name }, title)));
      axis.value = this.axis;
      axis.addEventListener("change", () => {
        this.axis = axis.value;
        this.range = null;
        this.load();
      });
      const log = create("input", { type: "checkbox" });
      log.addEventListener("change", () => {
        this.isLog = log.checked;
        this.render();
      });
      this.reset = create("button", { type: "button", hidden: "" }, "Show all");
      this.reset.addEventListener("click", () => this.zoom(null));
      const tools = create("div", { class: "chart-tools" });
      if (this.figure.dataset.tools !== "off") {
        tools.append(create("label", {}, "Smoothing", range), create("label", {}, "Over", axis), create("label", {}, log, "Log scale"));
      }
      tools.append(this.reset);
      return tools;
    }

    load() {
      clearTimeout(this.timer);
      this.timer = 0;
      this.loaded = Date.now();
      this.isStale = false;
      this.loading = this.readCurves();
    }

    async readCurves() {
      const query = new URLSearchParams({ key: this.key, x: this.axis, points: String(Math.min(1600, Math.max(200, Math.round(this.figure.clientWidth || 600)))) });
      if (this.range) {
        query.set("first", String(this.range[0]));
        query.set("last", String(this.range[1]));
      }
      const isShown = (this.request = Symbol("request"));
      try {
        const withMarks = this.ids.length === 1 && this.figure.dataset.marks !== "off";
        const events = withMarks ? this.fetchShared(`/api/runs/${this.ids[0]}/events`) : { events: [] };
        const paths = this.ids.map((id) => `/api/runs/${id}/curves?${query}`);
        const [{ events: marks }, ...curves] = await Promise.all([events, ...paths.map((path) => this.fetch(path))]);
        if (!this.names) this.names = await this.findNames();
        if (isShown !== this.request) return; // a later request was faster
        this.curves = curves;
        if (this.key === "memory") this.chooseUnit();
        this.marks = marks;
        this.error = "";
      } catch (error) {
        if (isShown !== this.request) return;
        this.error = error.message;
      }
      this.render();
    }

    // The unit of the largest value, so that axes have short numbers.
    chooseUnit() {
      const most = Math.max(0, ...this.curves.flatMap((curve) => curve.high || curve.mean));
      const unit = most >= 2 ** 30 ? "GiB" : "MiB";
      this.scale = unit === "GiB" ? 1 / 2 ** 30 : 1 / 2 ** 20;
      this.heading.textContent = `${this.title}, ${unit}`;
    }

    async fetch(path) {
      let answer;
      try {
        answer = await fetch(prefix + path, { headers: { accept: "application/json" } });
      } catch {
        throw new Error("The server does not answer.");
      }
      if (answer.ok) return answer.json();
      let text = `The server answers ${answer.status}.`;
      if ((answer.headers.get("content-type") || "").startsWith("application/json")) text = (await answer.json()).error;
      throw new Error(text);
    }

    fetchShared(path) {
      if (!shared.has(path)) {
        const answer = this.fetch(path);
        shared.set(path, answer);
        answer.catch(() => shared.delete(path));
      }
      return shared.get(path);
    }

    async findNames() {
      if (this.figure.dataset.names) return JSON.parse(this.figure.dataset.names);
      if (this.ids.length === 1) return [this.title];
      return Promise.all(this.ids.map(async (id) => (await this.fetch(`/api/runs/${id}`)).name));
    }

    // A change of a run that is shown: at once, but not more often than every two seconds, or every 30 out of view.
    update(ids) {
      if (ids && !ids.some((id) => this.ids.includes(id))) return;
      this.isStale = true;
      this.scheduleLoad();
    }

    scheduleLoad() {
      if (!this.isStale || this.timer) return;
      const next = this.loaded + (this.isInView ? UPDATE_MS : UNSEEN_UPDATE_MS);
      this.timer = setTimeout(() => {
        this.timer = 0;
        if (this.figure.isConnected) this.load();
      }, Math.max(0, next - Date.now()));
    }

    // Curves as they are drawn: [{name, colour, x, mean, low, high, smoothed, broken}].
    prepare() {
      return this.curves
        .map((curve, n) => {
          const scaled = (values) => values.map((value) => (value === null || (this.isLog && value <= 0) ? null : value * this.scale));
          const mean = scaled(curve.mean);
          return {
            number: n,
            name: this.names[n],
            colour: `var(--series-${(n % COLOURS) + 1})`,
            x: curve.x,
            // Of the whole run: the first and the last bin have their x in the middle, and events would be outside.
            first: Math.min(curve.first ?? curve.x[0], curve.x[0]),
            last: Math.max(curve.last ?? curve.x.at(-1), curve.x.at(-1)),
            mean,
            newest: scaled([curve.newest])[0],
            low: curve.low ? scaled(curve.low) : null,
            high: curve.high ? scaled(curve.high) : null,
            smoothed: smooth(mean, this.smoothing),
            broken: curve.broken,
          };
        })
        .filter((curve) => curve.x.length && !this.hidden.has(curve.number));
    }

    render() {
      const { svg } = this;
      this.width = this.figure.clientWidth;
      if (!this.width) return;
      const curves = this.prepare();
      this.drawn = curves;
      this.fillLegend();
      this.reset.hidden = !this.range;
      svg.replaceChildren();
      const height = Math.round(Math.min(300, Math.max(180, this.width * 0.42)));
      svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
      svg.style.height = `${height}px`;
      const values = curves.flatMap((curve) => [...(curve.low || curve.mean), ...(curve.high || [])]).filter((value) => value !== null);
      if (!values.length) {
        const text = this.error || (this.curves.length ? "Nothing is recorded yet." : "Loading …");
        draw(svg, "text", { x: this.width / 2, y: height / 2, "text-anchor": "middle" }, text);
        this.describe(text);
        this.place = null;
        return;
      }
      let low = values.reduce((a, b) => Math.min(a, b));
      let high = values.reduce((a, b) => Math.max(a, b));
      if (this.isLog) [low, high] = [Math.log10(low), Math.log10(high)];
      const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
      // Quantities that are never negative get no axis below zero.
      low = !this.isLog && low >= 0 && low < margin ? 0 : low - margin;
      high += margin;
      const first = this.range ? this.range[0] : curves.map((curve) => curve.first).reduce((a, b) => Math.min(a, b));
      let last = this.range ? this.range[1] : curves.map((curve) => curve.last).reduce((a, b) => Math.max(a, b));
      if (last <= first) last = first + 1;
      let ticks = listTicks(low, high, height / 45);
      const label = (tick) => format(this.isLog ? 10 ** tick : +tick.toPrecision(12));
      const left = 10 + 7 * Math.max(...ticks.map((tick) => label(tick).length));
      const right = this.width - 14;
      const top = 10;
      const bottom = height - 26;
      const place = (this.place = {
        first, last, left, right, top, bottom, height,
        x: (value) => round(left + ((value - first) / (last - first)) * (right - left)),
        y: (value) => round(bottom - (((this.isLog ? Math.log10(value) : value) - low) / (high - low)) * (bottom - top)),
        value: (x) => first + ((x - left) / (right - left)) * (last - first),
      });
      for (const tick of ticks) {
        const y = round(bottom - ((tick - low) / (high - low)) * (bottom - top));
        draw(svg, "line", { class: "grid", x1: left, x2: right, y1: y, y2: y });
        draw(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, label(tick));
      }
      draw(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
      ticks = listTicks(first, last, Math.max(2, (right - left) / 75));
      for (const tick of ticks) {
        const anchor = place.x(tick) > right - 24 ? "end" : place.x(tick) < left + 12 ? "start" : "middle";
        draw(svg, "text", { x: place.x(tick), y: height - 8, "text-anchor": anchor }, format(+tick.toPrecision(12)));
      }
      this.drawMarks(place);
      for (const curve of curves) this.drawCurve(curve, place);
      this.cross = draw(svg, "line", { class: "cross", x1: 0, x2: 0, y1: top, y2: bottom, visibility: "hidden" });
      this.selection = draw(svg, "rect", { class: "selection", x: 0, y: top, width: 0, height: bottom - top, visibility: "hidden" });
      const text = curves.map((curve) => {
        const n = curve.mean.findLastIndex((value) => value !== null);
        return `${curves.length > 1 ? `${curve.name}: ` : ""}${n < 0 ? "not finite" : format(curve.newest ?? curve.mean[n])}`;
      });
      this.describe(curves.length > 3 ? "" : text.join(", "), curves);
      if (this.details.open) this.fillTable();
    }

    describe(text, curves = []) {
      this.last = this.error && curves.length ? `${this.error} Shown as last read.` : text;
      this.value.textContent = this.last;
      const parts = curves.map((curve) => {
        const finite = curve.mean.filter((value) => value !== null);
        if (!finite.length) return `${curve.name}: no finite value`;
        return `${curves.length > 1 ? `${curve.name}: ` : ""}from ${format(finite[0])} to ${format(curve.newest ?? finite.at(-1))}`;
      });
      const help = "Zoom with plus and minus, move with the arrow keys, show all with 0.";
      this.svg.setAttribute("aria-label", `${this.title} over ${AXES[this.axis].toLowerCase()}. ${parts.join("; ") || text}. ${help}`);
    }

    drawCurve(curve, place) {
      const style = `stroke: ${curve.colour}`;
      const points = curve.x.map((x) => place.x(x));
      const isInside = points.map((x) => x >= place.left - 1 && x <= place.right + 1);
      const trace = (values) => {
        let path = "";
        let isOpen = false;
        values.forEach((value, n) => {
          if (value === null || !isInside[n]) isOpen = false;
          else {
            path += `${isOpen ? "L" : "M"}${points[n]} ${place.y(value)}`;
            isOpen = true;
          }
        });
        return path;
      };
      if (curve.low && curve.high) {
        let path = "";
        let start = 0;
        while (start < points.length) {
          let end = start;
          while (end < points.length && curve.low[end] !== null && curve.high[end] !== null && isInside[end]) end++;
          if (end > start) {
            const there = points.slice(start, end).map((x, n) => `${x} ${place.y(curve.high[start + n])}`);
            const back = points.slice(start, end).map((x, n) => `${x} ${place.y(curve.low[start + n])}`).reverse();
            path += `M${[...there, ...back].join("L")}Z`;
          }
          start = end + 1;
        }
        draw(this.svg, "path", { class: "band", d: path, style: `fill: ${curve.colour}` });
      } else if (this.smoothing) draw(this.svg, "path", { class: "raw", d: trace(curve.mean), style });
      draw(this.svg, "path", { class: "curve", d: trace(curve.smoothed), style });
      // Few values, as of evaluations, are points too; one alone would have no line.
      if (points.length <= 40) {
        points.forEach((x, n) => {
          if (curve.mean[n] !== null && isInside[n]) draw(this.svg, "circle", { cx: x, cy: place.y(curve.mean[n]), r: 2.5, style: `fill: ${curve.colour}` });
        });
      }
      for (const value of curve.broken) {
        const x = place.x(value);
        if (x < place.left || x > place.right) continue;
        const mark = draw(this.svg, "path", { class: "broken", d: `M${x - 4} ${place.top - 8}h8l-4 7z` });
        draw(mark, "title", {}, `Not finite at ${AXES[this.axis].toLowerCase()} ${format(value)}`);
      }
    }

    drawMarks(place) {
      this.shownMarks = [];
      const seen = new Set();
      for (const event of this.marks) {
        const at = event[this.axis];
        if (at === null || at < place.first || at > place.last) continue;
        const x = Math.round(place.x(at));
        const name = `${x} ${event.is_bad}`;
        this.shownMarks.push({ x, event });
        if (seen.has(name)) continue;
        seen.add(name);
        const length = event.is_bad ? place.bottom - place.top : 7;
        const mark = draw(this.svg, "line", { class: event.is_bad ? "mark bad" : "mark", x1: x, x2: x, y1: place.bottom - length, y2: place.bottom });
        draw(mark, "title", {}, `${event.kind}: ${event.text}`);
      }
    }

    fillLegend() {
      if (this.ids.length < 2 || !this.names) return;
      if (this.legend.children.length === this.ids.length) return;
      this.legend.replaceChildren(
        ...this.ids.map((id, n) => {
          const button = create("button", { type: "button", "aria-pressed": "true" }, this.names[n]);
          button.style.setProperty("--c", `var(--series-${(n % COLOURS) + 1})`);
          button.addEventListener("click", () => {
            if (this.hidden.has(n)) this.hidden.delete(n);
            else this.hidden.add(n);
            button.setAttribute("aria-pressed", String(!this.hidden.has(n)));
            this.render();
          });
          return create("li", {}, button);
        }),
      );
    }

    async complete() {
      if (this.isStale) this.load();
      let answer;
      do {
        answer = this.loading;
        await answer;
      } while (answer !== this.loading);
    }

    fillTable() {
      if (!this.drawn) return;
      const head = create("tr", {}, create("th", { class: "n", scope: "col" }, AXES[this.axis]), ...this.drawn.map((curve) => create("th", { class: "n", scope: "col" }, curve.name)));
      const all = [...new Set(this.drawn.flatMap((curve) => curve.x))].sort((a, b) => a - b);
      const rows = Math.min(TABLE_ROWS, all.length);
      const places = [...Array(rows).keys()].map((n) => all[rows > 1 ? Math.round((n * (all.length - 1)) / (rows - 1)) : 0]);
      const body = places.map((x) =>
        create(
          "tr",
          {},
          create("th", { class: "n", scope: "row" }, format(x)),
          ...this.drawn.map((curve) => {
            const n = this.findNearest(curve, x);
            return create("td", { class: "n" }, format(curve.mean[n]));
          }),
        ),
      );
      const caption = rows < all.length ? [create("caption", { class: "small" }, `${rows} of ${all.length.toLocaleString("en")} points`)] : [];
      this.table.replaceChildren(create("table", {}, ...caption, create("thead", {}, head), create("tbody", {}, ...body)));
    }

    findNearest(curve, x) {
      let low = 0;
      let high = curve.x.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (curve.x[middle] < x) low = middle + 1;
        else high = middle;
      }
      return low > 0 && x - curve.x[low - 1] < curve.x[low] - x ? low - 1 : low;
    }

    locate(event) {
      const box = this.svg.getBoundingClientRect();
      return ((event.clientX - box.left) * this.width) / box.width;
    }

    point(event) {
      if (!this.place || !this.drawn.length) return;
      const at = Math.min(this.place.right, Math.max(this.place.left, this.locate(event)));
      if (this.start !== undefined) {
        this.selection.setAttribute("visibility", "visible");
        this.selection.setAttribute("x", Math.min(at, this.start));
        this.selection.setAttribute("width", Math.abs(at - this.start));
      }
      const value = this.place.value(at);
      this.cross.setAttribute("visibility", "visible");
      this.cross.setAttribute("x1", at);
      this.cross.setAttribute("x2", at);
      const parts = this.drawn.slice(0, 4).map((curve) => {
        const n = this.findNearest(curve, value);
        const extremes = curve.low && curve.low[n] !== curve.high[n] ? ` (${format(curve.low[n])} to ${format(curve.high[n])})` : "";
        return `${this.drawn.length > 1 ? `${curve.name}: ` : ""}${format(curve.mean[n])}${extremes}`;
      });
      const mark = (this.shownMarks || []).find((shown) => Math.abs(shown.x - at) < 4);
      const where = `${AXES[this.axis].toLowerCase().replace(/s$/, "")} ${format(this.drawn[0].x[this.findNearest(this.drawn[0], value)])}`;
      this.value.textContent = `${where}: ${parts.join(", ")}${mark ? ` · ${mark.event.kind}: ${mark.event.text.slice(0, 120)}` : ""}`;
    }

    leave() {
      if (this.cross) this.cross.setAttribute("visibility", "hidden");
      this.value.textContent = this.last || "";
    }

    startSelection(event) {
      // A finger scrolls the page.
      if (!this.place || event.button !== 0 || event.pointerType === "touch") return;
      this.start = Math.min(this.place.right, Math.max(this.place.left, this.locate(event)));
      this.svg.setPointerCapture(event.pointerId);
    }

    endSelection(event) {
      if (this.start === undefined) return;
      const end = Math.min(this.place.right, Math.max(this.place.left, this.locate(event)));
      const start = this.start;
      this.cancelSelection();
      if (Math.abs(end - start) > 6) this.zoom([this.place.value(Math.min(start, end)), this.place.value(Math.max(start, end))]);
    }

    cancelSelection() {
      this.start = undefined;
      if (this.selection) this.selection.setAttribute("visibility", "hidden");
    }

    zoom(range) {
      const known = this.curves.filter((curve) => curve.first !== null);
      const first = known.length ? Math.min(...known.map((curve) => curve.first)) : 0;
      const last = known.length ? Math.max(...known.map((curve) => curve.last)) : 1;
      if (range) {
        const width = Math.min(range[1] - range[0], last - first);
        const start = Math.min(Math.max(range[0], first), last - width);
        range = [start, start + width];
        if (width >= (last - first) * 0.999 || width <= 0) range = null;
      }
      this.range = range;
      this.load();
    }

    press(event) {
      if (!this.place || event.ctrlKey || event.metaKey || event.altKey) return;
      // The range that was asked for last, which may not be drawn yet.
      const [first, last] = this.range || [this.place.first, this.place.last];
      const width = last - first;
      const moves = {
        "+": [first + width / 4, last - width / 4],
        "=": [first + width / 4, last - width / 4],
        "-": [first - width / 2, last + width / 2],
        ArrowLeft: [first - width / 4, last - width / 4],
        ArrowRight: [first + width / 4, last + width / 4],
        0: null,
        Home: null,
        Escape: null,
      };
      if (!(event.key in moves)) return;
      event.preventDefault();
      this.zoom(moves[event.key]);
    }
  }

  const drawn = new WeakMap();
  const start = (root) => {
    const figures = root.matches?.("figure.chart") ? [root] : root.querySelectorAll("figure.chart[data-runs]");
    for (const figure of figures) if (!drawn.has(figure)) drawn.set(figure, new Chart(figure));
  };
  document.body.addEventListener("preheat:change", (event) => {
    shared.clear();
    for (const figure of document.querySelectorAll("figure.chart[data-runs]")) drawn.get(figure)?.update(event.detail.ids);
  });
  // The page is about to be saved as a file, in which a closed table is opened without this script.
  document.addEventListener("preheat:save", (event) => {
    for (const figure of document.querySelectorAll("figure.chart[data-runs]")) {
      const chart = drawn.get(figure);
      if (!chart) continue;
      event.detail.tasks.push(chart.complete());
      event.detail.charts.push(chart);
    }
  });
  // Fragments that htmx brings may have charts.
  document.body.addEventListener("htmx:load", (event) => start(event.detail.elt));
  start(document.body);
})();
