"use strict";
// What comes from the run is put in as text, everywhere: nothing here makes HTML of a string.

const SILENT_S = 15; // three beats of the server
const QUIET_S = 30; // without an event: a run that works has a sample every few seconds
const FAULTS = 20; // that are listed
const $ = (selector) => document.querySelector(selector);

let shown = null; // the newest message
let heard = 0; // when the server was last heard, by this machine's clock, in ms
let ahead = 0; // what the server's clock is ahead of this one, in s
let stream = null;
let over = false; // the server has said that it ends

// ------------------------------------------------------------------------------------------------------------ numbers

const known = (value) => value !== null && value !== undefined;
// Numbers that are not finite are words: nan, inf, -inf.
const written = (value, how) => (typeof value === "number" ? how(value) : String(value));
const fixed = (value, digits) => written(value, (x) => x.toFixed(digits));
const grouped = (value, digits = 0) => written(value, (x) =>
  x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const percent = (share, digits = 0) => written(share, (x) => `${(100 * x).toFixed(digits)} %`);

function exponent(value) {
  return written(value, (x) => x.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2"));
}

function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const pad = (number) => String(number).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

function size(bytes) {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} GiB`;
}

// --------------------------------------------------------------------------------------------------------------- text

// Only what changed is touched: a selection stays, and a screen reader says nothing twice.
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function show(node, text) {
  node.hidden = !text;
  say(node, text || "");
}

function sized(parent, count, make) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(make());
}

function element(name, className) {
  const node = document.createElement(name);
  if (className) node.className = className;
  return node;
}

// A cell is a text, or {text, below, share, kind}: a smaller text under it, a bar of a share, a class.
function fillCell(cell, value) {
  const { text, below, share, kind } = typeof value === "object" ? value : { text: value };
  sized(cell, 3, () => element(["span", "small", "span"][cell.children.length]));
  const [main, small, bar] = cell.children;
  main.className = kind || "";
  say(main, text);
  show(small, below);
  bar.className = "share";
  bar.hidden = typeof share !== "number";
  if (!bar.hidden) bar.style.setProperty("--share", `${100 * share}%`);
}

function fillTable(section, rows, numbers) {
  section.hidden = rows.length === 0;
  const body = section.querySelector("tbody");
  sized(body, rows.length, () => element("tr"));
  rows.forEach((row, place) => {
    const line = body.children[place];
    sized(line, row.length, () => {
      const first = line.children.length === 0;
      const cell = element(first ? "th" : "td", numbers.includes(line.children.length) ? "number" : "");
      if (first) cell.scope = "row";
      return cell;
    });
    row.forEach((value, column) => fillCell(line.children[column], value));
  });
}

// ------------------------------------------------------------------------------------------------------------- curves

const drawn = (name, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
};

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push(n * step);
  return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function described(name, points) {
  if (points.length === 0) return "";
  const values = points.map(([, value]) => value), last = points.length - 1;
  return `${name}: ${values[0].toFixed(2)} at step ${Math.round(points[0][0])}, ${values[last].toFixed(2)} at step ` +
    `${Math.round(points[last][0])}, lowest ${Math.min(...values).toFixed(2)}, highest ${Math.max(...values).toFixed(2)}.`;
}

function draw(figure, line, dots, names) {
  const all = [...line, ...dots], svg = figure.querySelector("svg");
  figure.hidden = all.length === 0;
  if (figure.hidden) return;
  figure.querySelector(".dots").hidden = dots.length === 0;
  svg.setAttribute("aria-label", [described(names[0], line), described(names[1], dots)].filter(Boolean).join(" "));
  const width = svg.clientWidth, height = svg.clientHeight, left = 38, right = 12, top = 10, bottom = 22;
  if (width === 0) return; // not laid out
  const steps = all.map(([step]) => step), first = Math.min(...steps), last = Math.max(...steps);
  // A loss falls from far above in its first steps: those may run out at the top, or the rest would be a flat line.
  const settled = all.filter(([step]) => step >= first + 0.05 * (last - first)).map(([, value]) => value);
  const least = Math.min(...all.map(([, value]) => value)), most = Math.max(...settled);
  const margin = 0.05 * (most - least) || 0.5, low = least - margin, high = most + margin;
  const x = (step) => left + (step - first) / (last - first || 1) * (width - left - right);
  const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
  const parts = [];
  const marks = ticks(low, high, 6);
  for (const value of marks.found) {
    parts.push(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    const text = drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" });
    text.textContent = value.toFixed(marks.digits);
    parts.push(text);
  }
  for (const [step, anchor] of first === last ? [[first, "start"]] : [[first, "start"], [last, "end"]]) {
    const text = drawn("text", { x: x(step), y: height - 5, "text-anchor": anchor });
    text.textContent = (anchor === "start" ? "step " : "") + Math.round(step).toLocaleString("en");
    parts.push(text);
  }
  parts.push(drawn("polyline", { points: line.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
  for (const [step, value] of dots) parts.push(drawn("circle", { cx: x(step), cy: y(value), r: 4 }));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
}

function drawAll() {
  if (shown === null) return;
  const curves = shown.curves;
  $("#curves").hidden = Object.values(curves).every((points) => points.length === 0);
  draw($("#losses"), curves.loss, curves.held_out, ["Loss", "Held-out loss"]);
  draw($("#taus"), curves.acceptance, curves.tau, ["Estimated acceptance length", "True acceptance length"]);
}

// -------------------------------------------------------------------------------------------------------------- state

function factsOf(state) {
  const facts = [];
  const add = (name, value, how, below) => known(value) && facts.push([name, how(value), below || ""]);
  const after = (steps) => (known(steps) ? `step ${grouped(steps)}` : "");
  add("Loss", state.loss, (x) => fixed(x, 4));
  add("τ estimate", state.acceptance, (x) => fixed(x, 2));
  add("True τ", state.true_tau, (x) => fixed(x, 2), after(state.true_tau_steps));
  add("Held-out loss", state.held_out_loss, (x) => fixed(x, 4), after(state.held_out_steps));
  add("Learning rate", state.lr, exponent);
  add("Gradient norm", state.grad_norm, (x) => written(x, (norm) => String(Number(norm.toPrecision(3)))));
  add("Epoch", state.epoch, String);
  add("Tokens/s", state.tokens_per_s, (x) => grouped(x));
  add("Blocks/s", state.blocks_per_s, (x) => grouped(x, 1));
  add("MFU", state.mfu, (x) => percent(x, 1));
  add("Queue", state.queue_bytes, size, known(state.queue_limit_bytes) ? `of ${size(state.queue_limit_bytes)}` : "");
  add("Host memory", state.host_bytes, size);
  add("Saved", state.saved_steps, (x) => `step ${grouped(x)}`);
  return facts;
}

function fillFacts(facts) {
  $("#numbers").hidden = facts.length === 0;
  sized($("#facts"), facts.length, () => {
    const group = element("div"), value = element("dd");
    value.append(element("span"), " ", element("small"));
    group.append(element("dt"), value);
    return group;
  });
  facts.forEach(([name, text, below], place) => {
    const [term, value] = $("#facts").children[place].children;
    say(term, name);
    say(value.children[0], text);
    say(value.children[1], below);
  });
}

function render() {
  const { state, title, note } = shown;
  const run = state.run || title;
  say($("#run"), run);
  show($("#from"), title === run ? "" : `seen as ${title}`);
  if ($("#outcome").textContent !== state.outcome) $("#stages details").open = state.outcome === "starting";
  say($("#outcome"), state.outcome);
  $("#outcome").className = state.outcome;
  show($("#message"), state.message);
  $("#message").className = state.outcome;
  show($("#note"), note);
  $("#progress").hidden = !state.total_steps;
  if (state.total_steps) {
    const done = state.step || 0, share = Math.min(1, done / state.total_steps);
    say($("#steps"), `step ${grouped(done)} of ${grouped(state.total_steps)} (${percent(share)})`);
    $("#bar").max = state.total_steps;
    $("#bar").value = done;
  }
  fillFacts(factsOf(state));
  show($("#bottleneck"), state.bottleneck);
  drawAll();
  fillTable($("#roles"), Object.entries(state.roles).map(([name, role]) => [
    { text: name, below: role.device },
    { text: String(role.state), kind: role.state === "running" || role.state === "failed" || role.state === "hung" ? role.state : "" },
    known(role.busy_share) ? { text: percent(role.busy_share), share: role.busy_share } : "",
    known(role.wait_share) ? { text: percent(role.wait_share), below: role.waits_for && `for ${role.waits_for}` } : "",
  ]), [2, 3]);
  fillTable($("#gpus"), state.gpus.map((gpu) => [
    { text: String(gpu.device), below: gpu.name },
    known(gpu.memory_used_bytes) ? {
      text: `${size(gpu.memory_used_bytes)} of ${known(gpu.memory_total_bytes) ? size(gpu.memory_total_bytes) : "?"}`,
      share: gpu.memory_total_bytes ? gpu.memory_used_bytes / gpu.memory_total_bytes : null,
    } : "",
    known(gpu.utilisation) ? { text: percent(gpu.utilisation), share: gpu.utilisation } : "",
  ]), [1, 2]);
  const faults = [...state.faults].reverse();
  fillTable($("#faults"), faults.slice(0, FAULTS).map((fault) => [
    typeof fault.t === "number" ? new Date(1000 * fault.t).toLocaleTimeString("en-GB") : "",
    fault.message || String(fault.event),
  ]), []);
  show($("#more-faults"), faults.length > FAULTS ? `The run's events.jsonl has those before, ${grouped(faults.length - FAULTS)} at least.` : "");
  fillTable($("#stages"), state.stages.map((stage) => [String(stage.name), `${fixed(stage.s, 1)} s`]), [1]);
  tick();
}

// What passes by itself: how long the run has been going, and for how long it has said nothing.
function tick() {
  if (shown === null) return;
  const { state } = shown, now = Date.now() / 1000 + ahead;
  const underWay = state.outcome === "starting" || state.outcome === "running";
  const end = underWay && !over ? now : state.last_t;
  const silent = underWay && !over && known(state.last_t) && now - state.last_t > QUIET_S;
  say($("#elapsed"), known(state.started_t) && known(end) ? `${underWay ? "for" : "after"} ${clock(end - state.started_t)}` : "");
  say($("#silence"), silent ? `silent for ${clock(now - state.last_t)}` : "");
  show($("#eta"), known(state.eta_s) ? `${clock(state.eta_s)} left` : "");
  const share = state.total_steps ? `${percent((state.step || 0) / state.total_steps)} ` : "";
  document.title = `${share}${state.outcome} · ${state.run || shown.title} · paceline`;
}

// --------------------------------------------------------------------------------------------------------- connection

function connection(text, lost) {
  $("#connection").classList.toggle("lost", lost);
  say($("#connection"), text);
}

const GONE = "The connection is lost: what is below is the last that came. Trying again …";

function connect() {
  if (over || stream !== null) return;
  stream = new EventSource(`events${location.search}`);
  const listen = (name, react) => stream.addEventListener(name, (event) => {
    heard = Date.now();
    connection("Live", false);
    react(event.data);
  });
  listen("state", (data) => {
    const { age, run } = JSON.parse(data);
    shown = run;
    ahead = run.now + age - Date.now() / 1000;
    render();
  });
  listen("beat", () => {});
  listen("end", () => {
    over = true;
    disconnect();
    connection("`paceline watch --web` has ended: what is below is the last that it saw.", true);
    tick();
  });
  stream.addEventListener("error", () => {
    if (over || stream === null) return;
    const refused = stream.readyState === EventSource.CLOSED;
    connection(refused ? "This page's address is not valid any more: open the one that `paceline watch --web` prints now." : GONE, true);
    if (refused) over = true;
  });
  heard = Date.now();
}

function disconnect() {
  if (stream !== null) stream.close();
  stream = null;
}

// A browser has few connections to a server: tabs that nobody sees leave them to others.
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
addEventListener("resize", drawAll);
addEventListener("pageshow", () => connect());
addEventListener("pagehide", () => disconnect());
setInterval(() => {
  if (stream !== null && Date.now() - heard > 1000 * SILENT_S) {
    connection(GONE, true);
    disconnect();
    connect();
  }
  tick();
}, 1000);
if (!document.hidden) connect();
