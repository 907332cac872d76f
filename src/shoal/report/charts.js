// Line charts of the report and of the live page, drawn by uPlot.
//
// A chart is {title, x: {label, log}, y: {label, log, floor, text}, lines, marks}: a line is {name, style, points} with
// points [x, y, note], sorted by x; a mark is {x, text, style}, with the style of its line, or none for a fault.
// Colours come from the style sheet of the page.
"use strict";

const shoalCharts = (() => {
  const COLOURS = 7;
  const DASHES = [[], [7, 5], [2, 5, 7, 5]];
  const NEAR = 40; // pixels from the pointer to a point that it names

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (style) => css(style < 0 ? "--base" : `--s${style % COLOURS}`);
  const dash = (style) => (style < 0 ? [2, 5] : DASHES[Math.floor(style / COLOURS) % DASHES.length]);

  const small = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 4 });
  const large = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 4, notation: "compact" });
  const number = (value) => (Math.abs(value) >= 10000 ? large : small).format(value);

  function bytes(size) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let power = 0;
    for (; size >= 999.5 && power < units.length - 1; power += 1) size /= 1000;
    return `${power ? Number(size.toPrecision(3)) : Math.round(size)} ${units[power]}`;
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function swatch(style) {
    const look = style < 0 ? "base" : `s${style % COLOURS} d${Math.floor(style / COLOURS) % DASHES.length}`;
    const holder = document.createElement("template"); // which parses SVG as such
    holder.innerHTML = `<svg class="swatch" width="30" height="12" aria-hidden="true"><path d="M1,6H29"/></svg>`;
    holder.content.querySelector("path").setAttribute("class", `line ${look}`);
    return holder.content.firstChild;
  }

  // the place in a sorted line whose x is nearest
  function nearest(points, x) {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle;
      else high = middle;
    }
    return high >= 0 && Math.abs(points[high][0] - x) < Math.abs(points[low][0] - x) ? high : low;
  }

  const isRound = (value) => Math.abs(Math.log10(value) % 1) < 1e-9;

  function axis(side, label, size, log, text = number) {
    const filter = log && side !== 2 ? (_, splits) => splits.map((v) => (isRound(v) ? v : null)) : undefined;
    return {
      side,
      label,
      size,
      labelSize: label ? 24 : 0,
      gap: 6,
      font: "12px system-ui, sans-serif",
      labelFont: "12.5px system-ui, sans-serif",
      stroke: () => css("--soft"),
      grid: { stroke: () => css("--grid"), width: 1, show: side !== 2, ...(filter && { filter }) },
      ticks: { stroke: () => css("--rule"), width: 1, size: side === 2 ? 5 : 0 },
      values: (_, splits) => splits.map((value) => (value === null ? "" : text(value))),
    };
  }

  class Chart {
    constructor(holder, spec) {
      this.holder = holder;
      this.hidden = new Set();
      this.zoomed = false;
      this.chosen = null; // [line, place] under the pointer or the keyboard
      holder.classList.add("plot");
      holder.tabIndex = 0;
      holder.setAttribute("role", "group");
      holder.setAttribute("aria-roledescription", "chart");
      this.tip = element("div", "tip");
      this.tip.hidden = true;
      this.dot = element("div", "dot");
      this.dot.hidden = true;
      this.spoken = element("p", "unseen");
      this.spoken.setAttribute("aria-live", "polite");
      this.reset = element("button", "reset", "Show all");
      this.reset.type = "button";
      this.reset.hidden = true;
      this.reset.addEventListener("click", () => this.zoomOut());
      holder.append(this.reset, this.spoken);
      holder.addEventListener("keydown", (event) => this.key(event));
      holder.addEventListener("blur", () => this.leave());
      this.draw(spec);
      new ResizeObserver(() => this.resize()).observe(holder);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw(false));
    }

    // draw other points; the zoom stays
    update(spec) {
      const names = (lines) => lines.map((line) => `${line.style} ${line.name}`).join("\n");
      const same = names(spec.lines) === names(this.spec.lines) && Boolean(spec.y.log) === Boolean(this.spec.y.log);
      if (!same || spec.x.label !== this.spec.x.label) {
        this.plot.destroy();
        this.zoomed = false;
        this.draw(spec);
        return;
      }
      this.spec = spec;
      this.plot.setData(this.joined(), !this.zoomed);
      if (this.zoomed) this.plot.redraw(false);
      this.describe();
    }

    show(hidden) {
      this.hidden = hidden;
      this.spec.lines.forEach((line, i) => {
        const show = !hidden.has(line.name);
        if (this.plot.series[i + 1].show !== show) this.plot.setSeries(i + 1, { show });
      });
    }

    size() {
      const width = Math.max(200, Math.floor(this.holder.clientWidth));
      return { width, height: Math.round(Math.max(210, Math.min(300, width * 0.58))) };
    }

    resize() {
      if (!this.holder.clientWidth) return; // hidden
      const { width, height } = this.size();
      if (width !== this.plot.width || height !== this.plot.height) this.plot.setSize({ width, height });
    }

    joined() {
      const tables = this.spec.lines.map(({ points }) => [points.map((p) => p[0]), points.map((p) => p[1])]);
      return tables.length ? uPlot.join(tables) : [[]];
    }

    draw(spec) {
      this.spec = spec;
      const y = spec.y;
      const bounds = (u, low, high) => {
        if (low === null) return [0, 1];
        if (y.log) return [low / 1.2, high * 1.2];
        const from = y.floor ?? (low > 0 && low < high / 2 ? 0 : low);
        const room = (high - from || Math.abs(high) || 1) * 0.06;
        return [from === 0 || from === y.floor ? from : from - room, high + room];
      };
      const across = (u, low, high) => {
        if (low === null) return [0, 1];
        if (this.zoomed || spec.x.log) return low === high ? [low / 2, high * 2] : [low, high];
        return [Math.min(0, low), high > 0 ? high : 1];
      };
      const lines = spec.lines.map((line) => ({
        label: line.name,
        stroke: () => colour(line.style),
        width: 2,
        dash: dash(line.style),
        spanGaps: true,
        show: !this.hidden.has(line.name),
        points: { show: line.points.length <= 40, size: 6, fill: () => colour(line.style) },
      }));
      this.plot = new uPlot({
        ...this.size(),
        legend: { show: false },
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: true } },
        focus: { alpha: 0.2 },
        scales: {
          x: { time: false, distr: spec.x.log ? 3 : 1, log: 2, range: across },
          y: { distr: y.log ? 3 : 1, range: bounds },
        },
        axes: [axis(2, spec.x.label, 34), axis(3, "", 54, y.log, y.text)],
        series: [{}, ...lines],
        hooks: {
          draw: [(u) => this.drawMarks(u)],
          setCursor: [(u) => this.point(u)],
          setSelect: [(u) => { this.zoomed = u.select.width > 0 || this.zoomed; this.reset.hidden = !this.zoomed; }],
        },
      }, this.joined(), this.holder);
      this.plot.over.append(this.tip, this.dot);
      this.plot.over.addEventListener("mouseleave", () => this.leave());
      this.plot.over.addEventListener("dblclick", () => this.zoomOut());
      this.plot.ctx.canvas.setAttribute("aria-hidden", "true");
      this.describe();
    }

    describe() {
      const ends = this.spec.lines.filter((line) => line.points.length)
        .map((line) => `${line.name} ends at ${(this.spec.y.text ?? number)(line.points[line.points.length - 1][1])}`);
      const told = ends.length ? ends.join(", ") : "no measurements yet";
      const label = `${this.spec.title}, over ${this.spec.x.label}: ${told}. Arrow keys go from point to point.`;
      if (this.holder.getAttribute("aria-label") !== label) this.holder.setAttribute("aria-label", label);
    }

    drawMarks(u) {
      const { ctx, bbox } = u;
      const ratio = devicePixelRatio || 1;
      ctx.save();
      ctx.lineWidth = ratio;
      for (const mark of this.spec.marks ?? []) {
        const x = Math.round(u.valToPos(mark.x, "x", true));
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.strokeStyle = ctx.fillStyle = mark.style === undefined ? css("--fault") : colour(mark.style);
        ctx.setLineDash([3 * ratio, 3 * ratio]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(x - 5 * ratio, bbox.top);
        ctx.lineTo(x + 5 * ratio, bbox.top);
        ctx.lineTo(x, bbox.top + 8 * ratio);
        ctx.fill();
      }
      ctx.restore();
    }

    // name the mark or the point next to the pointer
    point(u) {
      const { left, top } = u.cursor;
      if (left === undefined || left < 0) return;
      const mark = (this.spec.marks ?? []).find((m) => Math.abs(u.valToPos(m.x, "x") - left) < 6);
      if (mark && top < u.over.clientHeight / 3) {
        this.say(u.valToPos(mark.x, "x"), 8, mark.text);
        this.dot.hidden = true;
        return;
      }
      const x = u.posToVal(left, "x");
      let best = null;
      let distance = NEAR * NEAR;
      this.spec.lines.forEach((line, i) => {
        if (!line.points.length || this.hidden.has(line.name)) return;
        const place = nearest(line.points, x);
        const dx = u.valToPos(line.points[place][0], "x") - left;
        const dy = u.valToPos(line.points[place][1], "y") - top;
        if (dx * dx + dy * dy < distance) [best, distance] = [[i, place], dx * dx + dy * dy];
      });
      if (best) this.choose(...best);
      else this.leave();
    }

    choose(i, place) {
      const line = this.spec.lines[i];
      const [x, y, note] = line.points[place];
      this.chosen = [i, place];
      const text = note || `${line.name}: ${number(y)} at ${number(x)} ${this.spec.x.label}`;
      const [left, top] = [this.plot.valToPos(x, "x"), this.plot.valToPos(y, "y")];
      this.dot.hidden = false;
      this.dot.style.transform = `translate(${left}px, ${top}px)`;
      this.dot.style.background = colour(line.style);
      this.say(left, top, text);
      if (this.spec.lines.length > 1) this.plot.setSeries(i + 1, { focus: true });
      return text;
    }

    say(left, top, text) {
      this.tip.textContent = text;
      this.tip.hidden = false;
      const width = this.plot.over.clientWidth;
      const own = this.tip.offsetWidth;
      const x = Math.max(0, Math.min(width - own, left - own / 2));
      const y = top > 60 ? top - this.tip.offsetHeight - 12 : top + 14;
      this.tip.style.transform = `translate(${x}px, ${y}px)`;
    }

    leave() {
      this.tip.hidden = this.dot.hidden = true;
      this.chosen = null;
      if (this.spec.lines.length > 1) this.plot.setSeries(null, { focus: false });
    }

    zoomOut() {
      this.zoomed = false;
      this.reset.hidden = true;
      this.plot.setData(this.joined(), true);
    }

    zoom(factor) {
      const { min, max } = this.plot.scales.x;
      const middle = this.chosen ? this.spec.lines[this.chosen[0]].points[this.chosen[1]][0] : (min + max) / 2;
      this.zoomed = true;
      this.reset.hidden = false;
      this.plot.setScale("x", { min: middle - (middle - min) * factor, max: middle + (max - middle) * factor });
    }

    key(event) {
      const shown = this.spec.lines.map((line, i) => [line, i])
        .filter(([line]) => line.points.length && !this.hidden.has(line.name)).map(([, i]) => i);
      if (!shown.length || event.target !== this.holder) return;
      let [line, place] = this.chosen ?? [shown[0], this.spec.lines[shown[0]].points.length];
      const x = this.spec.lines[line].points[Math.min(place, this.spec.lines[line].points.length - 1)][0];
      const turn = (by) => {
        line = shown[(shown.indexOf(line) + by + shown.length) % shown.length];
        place = nearest(this.spec.lines[line].points, x);
      };
      if (event.key === "ArrowLeft") place = Math.max(0, place - 1);
      else if (event.key === "ArrowRight") place = Math.min(this.spec.lines[line].points.length - 1, place + 1);
      else if (event.key === "ArrowUp") turn(-1);
      else if (event.key === "ArrowDown") turn(1);
      else if (event.key === "+") return this.zoom(0.5);
      else if (event.key === "-") return this.zoom(2);
      else if (event.key === "Escape") return this.zoomOut();
      else return;
      event.preventDefault();
      this.spoken.textContent = this.choose(line, place);
    }
  }

  // make each item of a legend a button that shows and hides its line in some charts
  function toggles(items, charts) {
    const hidden = new Set();
    for (const item of items) {
      const name = item.textContent;
      const button = element("button", "toggle");
      button.type = "button";
      button.append(...item.childNodes);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.setAttribute("aria-pressed", String(!hidden.has(name)));
        for (const chart of charts()) chart.show(hidden);
      });
      item.append(button);
    }
    return hidden;
  }

  const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, k: 1e3, M: 1e6 };

  function value(cell) {
    const text = cell.textContent.trim();
    const found = text.replace(/,/g, "").match(/^<?(-?[\d.]+(?:e[-+]?\d+)?)\s*(\w*)/);
    return found ? Number(found[1]) * (UNITS[found[2]] ?? 1) : text.toLowerCase();
  }

  // make the headers of a table buttons that sort its rows
  function sortable(table) {
    for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
      const button = element("button", "sort", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up > 0 ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [value(row.cells[column]), row]);
        const missing = (v) => v === "" || v === "\u2013";
        rows.sort(([a], [b]) => {
          if (missing(a) || missing(b)) return missing(a) - missing(b);
          return up * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
        });
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    }
  }

  return { Chart, bytes, element, number, sortable, swatch, toggles };
})();
