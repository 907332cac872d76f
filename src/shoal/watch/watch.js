// The live page: follows the run by server-sent events, keeps its frames, and shows the latest or the one chosen with
// the slider. Every text from the run is set as text, never as HTML.
"use strict";

{
  const byId = (id) => document.getElementById(id);
  const { Chart, bytes, element, number, sortable, swatch, toggles } = shoalCharts;
  const STATES = ["computing", "sending", "waiting", "done", "joining", "silent", "dead"];
  const GLYPHS = { computing: "●", sending: "↑", waiting: "…", done: "✓", joining: "○", silent: "?", dead: "✕" };
  const [STATE, STEP, STEPS, LOSS, RATE, WAIT, BYTES, AWAITS] = [0, 1, 2, 3, 4, 5, 6, 7];
  const MOST_FRAMES = 1200; // then every second one goes
  const CALM = matchMedia("(prefers-reduced-motion: reduce)").matches;

  let runs = [];
  let shown = -1; // the run whose workers are shown; -1: the latest
  let place = -1; // the frame that is shown; -1: the latest
  let over = "time";
  let ended = false;
  let playing = 0;
  const charts = {};
  let hidden = new Set();
  let legendOf = "";

  const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const current = () => runs[shown < 0 ? runs.length - 1 : shown];
  const seconds = (run, t) => `${number(t)} ${run.virtual ? "virtual s" : "s"}`;

  function nodeName(run, rank) {
    if (rank < run.workers) return `worker ${rank}`;
    return run.servers > 1 ? `server ${rank - run.workers}` : "server";
  }

  // -- the stream -------------------------------------------------------------------------------

  function follow() {
    const stream = new EventSource("events");
    stream.addEventListener("all", (event) => {
      const all = JSON.parse(event.data);
      runs = all.runs;
      byId("output").replaceChildren();
      print(all.lines);
      draw();
    });
    stream.addEventListener("run", (event) => {
      const { index, ...run } = JSON.parse(event.data);
      runs[index] = run;
      if (shown < 0) place = -1;
      draw();
    });
    stream.addEventListener("frame", (event) => {
      const { index, frame, ...head } = JSON.parse(event.data);
      const run = Object.assign(runs[index], head);
      keep(run, frame);
      draw();
    });
    stream.addEventListener("lines", (event) => print(JSON.parse(event.data)));
    stream.addEventListener("end", () => { ended = true; stream.close(); draw(); });
    stream.addEventListener("error", () => {
      if (!ended) phase("connection lost; this page shows what it had", "broken");
    });
  }

  function keep(run, frame) {
    const last = run.frames.at(-1);
    if (last && frame.t <= last.t) run.frames[run.frames.length - 1] = frame;
    else run.frames.push(frame);
    if (run.frames.length > MOST_FRAMES) {
      run.frames = run.frames.filter((_, i) => (run.frames.length - 1 - i) % 2 === 0);
      if (place >= 0) place = Math.floor(place / 2);
    }
  }

  function print(lines) {
    if (!lines.length) return;
    const output = byId("output");
    const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
    for (const [name, line] of lines) output.append(`${name} | ${line}\n`);
    while (output.childNodes.length > 300) output.firstChild.remove();
    output.hidden = false;
    byId("no-output").hidden = true;
    if (atEnd) output.scrollTop = output.scrollHeight;
  }

  // -- the page ---------------------------------------------------------------------------------

  let waiting = false;
  function draw() { // once for all changes that come together
    if (waiting) return;
    waiting = true;
    (document.hidden ? setTimeout : requestAnimationFrame)(() => { waiting = false; drawNow(); }, 500);
  }

  function drawNow() {
    const run = current();
    if (!run) return phase("waiting for a run", "");
    const frame = run.frames.at(place) ?? { t: 0, nodes: [], text: "" };
    const isLatest = place < 0 || place >= run.frames.length - 1;
    document.title = `${run.name} · ${run.phase}`;
    set(byId("name"), run.name);
    set(byId("facts"), facts(run));
    const isLive = !run.over && !ended;
    phase(isLive || run.over ? run.phase : "no longer connected", run.phase === "running" && isLive ? "running" : "");
    set(byId("text"), isLatest && run.verdict ? "" : frame.text);
    byId("text").hidden = !byId("text").textContent;
    const pays = isLatest && run.verdict ? run.verdict : frame.pays ?? "";
    byId("pays").hidden = !pays;
    set(byId("pays").lastElementChild, pays);
    drawChoice();
    drawNodes(run, frame);
    drawCurves(run);
    drawFaults(run, frame);
    drawPlayer(run, frame, isLatest);
  }

  function phase(text, className) {
    set(byId("phase"), text);
    byId("phase").className = `phase ${className}`;
  }

  function facts(run) {
    const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
    const parts = [count(run.workers, "worker"), run.servers ? count(run.servers, "server") : ""];
    return [...parts, run.facts, run.virtual ? "virtual time" : ""].filter(Boolean).join(" · ");
  }

  function drawChoice() {
    const select = byId("run");
    byId("choice").hidden = runs.length < 2;
    const names = ["the latest", ...runs.map((run) => run.name)];
    if (select.options.length !== names.length) {
      select.replaceChildren(...names.map((name, i) => new Option(name, String(i - 1))));
      select.value = String(shown);
    }
  }

  // -- the workers ------------------------------------------------------------------------------

  function drawNodes(run, frame) {
    const list = byId("nodes");
    const total = run.workers + run.servers;
    if (list.children.length !== total) list.replaceChildren(...Array.from({ length: total }, cell));
    list.className = `nodes ${total > 128 ? "crowd" : total > 16 ? "many" : ""}`;
    const counts = new Map(STATES.map((state) => [state, 0]));
    for (let rank = 0; rank < total; rank += 1) {
      const node = frame.nodes[rank] ?? ["joining", 0, null, null, null, null, 0, ""];
      counts.set(node[STATE], (counts.get(node[STATE]) ?? 0) + 1);
      fill(list.children[rank], run, rank, node, total);
    }
    set(byId("nodes-title"), run.servers ? "Workers and servers" : "Workers");
    drawStates(counts);
    if (byId("table-details").open) drawTable(run, frame);
  }

  function cell() {
    const item = document.createElement("li");
    const who = element("div", "who");
    const glyph = element("span", "glyph");
    glyph.setAttribute("aria-hidden", "true");
    who.append(glyph, element("span", "label"), element("span", "state"));
    const bar = element("div", "bar");
    bar.append(element("i"));
    item.append(who, element("p", "figures"), bar);
    return item;
  }

  const word = (run, rank, state) => (rank >= run.workers && state === "computing" ? "updating" : state);

  function fill(item, run, rank, node, total) {
    const state = STATES.includes(node[STATE]) ? node[STATE] : "computing";
    const [who, figures, bar] = item.children;
    const [glyph, label, told] = who.children;
    if (item.className !== state) item.className = state;
    set(glyph, GLYPHS[state]);
    set(label, total > 16 && rank < run.workers ? `${rank}` : nodeName(run, rank));
    set(told, word(run, rank, state));
    const text = describe(run, rank, node);
    set(figures, text);
    const spoken = `${nodeName(run, rank)}: ${word(run, rank, state)}. ${text}`;
    if (total > 16 && item.title !== spoken) item.title = spoken;
    const done = node[STEPS] ? Math.min(1, node[STEP] / node[STEPS]) : 0;
    bar.hidden = !node[STEPS] || rank >= run.workers;
    bar.firstChild.style.transform = `scaleX(${done})`;
  }

  function describe(run, rank, node) {
    const parts = [];
    const isServer = rank >= run.workers;
    if (node[STATE] === "joining") return "has not reported yet";
    parts.push(isServer ? `version ${number(node[STEP])}`
      : `step ${number(node[STEP])}${node[STEPS] >= node[STEP] ? ` of ${number(node[STEPS])}` : ""}`);
    if (node[LOSS] !== null && !isServer) parts.push(`loss ${number(node[LOSS])}`);
    if (node[RATE] && !isServer) parts.push(`${number(Math.round(node[RATE]))} samples/s`);
    if (node[WAIT] !== null && !isServer && run.workers > 1) parts.push(`${Math.round(100 * node[WAIT])} % waiting`);
    if (node[AWAITS] && node[STATE] === "waiting" && !isServer) parts.push(`waits for ${node[AWAITS]}`);
    return parts.join(" · ");
  }

  function drawStates(counts) {
    const list = byId("states");
    if (!list.children.length) {
      for (const state of STATES) {
        const item = element("li", state);
        const glyph = element("span", `glyph ${state}`, GLYPHS[state]);
        glyph.setAttribute("aria-hidden", "true");
        item.append(glyph, element("span"));
        list.append(item);
      }
    }
    STATES.forEach((state, i) => {
      const item = list.children[i];
      const number = counts.get(state) ?? 0;
      set(item.lastChild, `${number} ${state}`);
      item.lastChild.className = number ? "" : "none";
      item.hidden = !number && (state === "silent" || state === "done");
    });
  }

  function drawTable(run, frame) {
    const body = byId("table").tBodies[0];
    const total = frame.nodes.length;
    while (body.rows.length > total) body.deleteRow(-1);
    while (body.rows.length < total) {
      const row = body.insertRow();
      row.append(element("th"));
      row.cells[0].scope = "row";
      row.dataset.rank = body.rows.length - 1;
      for (let i = 0; i < 7; i += 1) row.insertCell();
    }
    for (const row of body.rows) {
      const rank = Number(row.dataset.rank);
      const node = frame.nodes[rank];
      const shownAs = (value, text) => (value === null ? "\u2013" : text(value));
      [nodeName(run, rank), word(run, rank, node[STATE]), number(node[STEP]), shownAs(node[LOSS], number),
        shownAs(node[RATE], (v) => number(Math.round(v))), shownAs(node[WAIT], (v) => `${Math.round(100 * v)}`),
        bytes(node[BYTES]), node[AWAITS]].forEach((text, i) => set(row.cells[i], text));
    }
  }

  // -- the curves -------------------------------------------------------------------------------

  const styleOf = (i) => (runs[i].name.split(" ")[0] === "single" && runs.length > 1 ? -1 : i);

  function drawCurves(run) {
    const virtual = runs.every((one) => one.virtual);
    const label = over === "time" ? (virtual ? "virtual seconds" : "seconds") : "samples of all workers";
    const lines = (points) => runs.map((one, i) => ({ name: one.name, style: styleOf(i), points: points(one) }));
    const frames = (key, text) => lines((one) => {
      const points = [];
      for (const frame of one.frames) {
        const [x, y] = [over === "time" ? frame.t : frame.samples, frame[key]];
        if (y === null || y === undefined || (points.length && x <= points.at(-1)[0])) continue;
        points.push([x, y, `${one.name}: ${text(y)} after ${seconds(one, frame.t)}, ${number(frame.samples)} samples`]);
      }
      return points;
    });
    const scores = lines((one) => one.points.filter((p) => p.test_accuracy !== null).map((p) => [
      over === "time" ? p.seconds : p.samples, p.test_accuracy,
      `${one.name}: ${p.test_accuracy.toFixed(2)} % after ${seconds(one, p.seconds)}, ${number(p.samples)} samples`,
    ]));
    const marks = run.marks.map((mark) => ({ x: over === "time" ? mark.t : samplesAt(run, mark.t), text: mark.text }));
    const chart = (id, title, drawn, instead, y = {}) => {
      const known = drawn.some((line) => line.points.some((point) => point[1] !== 0 || id !== "bytes"));
      byId(id).hidden = !known;
      set(byId(`no-${id}`), known ? "" : instead);
      const spec = { title, x: { label }, y, lines: drawn, marks };
      if (known && charts[id]) charts[id].update(spec);
      else if (known) charts[id] = new Chart(byId(id), spec);
    };
    chart("loss", "Training loss", frames("loss", (y) => `loss ${number(y)}`), noLoss(run));
    chart("accuracy", "Test accuracy, %", scores, noAccuracy(run));
    chart("bytes", "Bytes sent", frames("bytes", bytes), "Nothing sent so far.", { floor: 0, text: bytes });
    const staleness = frames("staleness", (y) => `${number(y)} versions behind`);
    chart("staleness", "Staleness", staleness, noStaleness(run), { floor: 0 });
    drawLegend();
  }

  const OWN_LOOP = "A script with its own loop tells it with training.report";

  function noLoss(run) {
    return run.phase === "starting" ? "Not known yet." : `Not known. ${OWN_LOOP}(loss).`;
  }

  function noAccuracy(run) {
    const test = `${OWN_LOOP}(test_accuracy=…).`;
    if (run.over) return `Not known. ${test}`;
    return `Not known yet. Copies of the model are tested after training, so that tests take none of its time. ${test}`;
  }

  function noStaleness(run) {
    return run.servers ? "No update so far." : "Not counted: this strategy has no server.";
  }

  function samplesAt(run, t) {
    let found = 0;
    for (const frame of run.frames) if (frame.t <= t) found = frame.samples;
    return found;
  }

  function drawLegend() {
    const list = byId("legend");
    list.hidden = runs.length < 2;
    const names = runs.map((run) => run.name).join("\n");
    if (names === legendOf) return;
    legendOf = names;
    list.replaceChildren(...runs.map((run, i) => {
      const item = element("li");
      item.append(swatch(styleOf(i)), run.name);
      return item;
    }));
    hidden = toggles([...list.children], () => Object.values(charts));
    for (const chart of Object.values(charts)) chart.show(hidden);
  }

  // -- faults and the slider --------------------------------------------------------------------

  function drawFaults(run, frame) {
    const marks = run.marks.filter((mark) => mark.t <= frame.t || place < 0);
    const list = byId("faults");
    byId("no-faults").hidden = marks.length > 0;
    for (const id of ["no-faults", "no-output"]) set(byId(id), run.over ? "None." : "None so far.");
    const told = marks.map((mark) => `${mark.t} ${mark.text}`).join("\n");
    if (list.dataset.told === told) return;
    list.dataset.told = told;
    list.replaceChildren(...marks.map((mark) => {
      const item = element("li");
      item.append(element("b", "", `after ${seconds(run, mark.t)}`), element("span", "", mark.text));
      return item;
    }));
  }

  function drawPlayer(run, frame, isLatest) {
    byId("player").hidden = run.frames.length < 2;
    const slider = byId("slider");
    slider.max = String(Math.max(0, run.frames.length - 1));
    slider.value = String(place < 0 ? run.frames.length - 1 : place);
    const end = run.frames.at(-1)?.t ?? 0;
    const live = !run.over && !ended;
    const told = isLatest && live ? `live, ${seconds(run, end)}` : `${number(frame.t)} of ${seconds(run, end)}`;
    set(byId("moment"), told);
    slider.setAttribute("aria-valuetext", told);
    byId("latest").disabled = place < 0;
    set(byId("play"), playing ? "Pause" : "Replay");
    byId("play").setAttribute("aria-pressed", String(Boolean(playing)));
  }

  function pause() {
    clearInterval(playing);
    playing = 0;
  }

  function play() {
    if (playing) { pause(); return draw(); }
    const run = current();
    if (place < 0 || place >= run.frames.length - 1) place = 0;
    const each = CALM ? 1000 : Math.max(50, Math.min(400, 20000 / run.frames.length)); // about 20 s in all
    playing = setInterval(() => {
      place += 1;
      if (place >= current().frames.length - 1) { place = -1; pause(); }
      draw();
    }, each);
    draw();
  }

  byId("slider").addEventListener("input", (event) => {
    pause();
    place = Number(event.target.value);
    if (place >= current().frames.length - 1) place = -1;
    draw();
  });
  byId("play").addEventListener("click", play);
  byId("latest").addEventListener("click", () => { pause(); place = -1; draw(); });
  byId("run").addEventListener("change", (event) => { pause(); shown = Number(event.target.value); place = -1; draw(); });
  byId("table-details").addEventListener("toggle", draw);
  for (const radio of document.querySelectorAll("input[name=axis]")) {
    radio.addEventListener("change", () => { over = radio.value; draw(); });
  }
  sortable(byId("table"));
  follow();
}
