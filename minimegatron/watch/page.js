"use strict";
// The page of `minimegatron watch`. Once a second it asks for what is new in each run (`server.py`), and draws.
//
//   runs[k]    what is known of run k: its state, and curves {name: {at, mean, low, high}} in buckets of `width` steps
//   view       what is looked at: steps [first, end) (end 0: all), smoothing, axis, scale, the step under the cursor
//   charts     a card each; which there are follows from the names of the curves

const at = id => document.getElementById(id);
const runs = [], charts = new Map();
const view = {first: 0, end: 0, smooth: 0, axis: "step", logarithmic: false, cursor: null};

// ------------------------------------------------------------------------------------------------ words and numbers

const KNOWN = {  // curve -> title, unit, how a value is written, further curves of the same chart
  learning_rate: {title: "learning rate"},
  grad_norm: {title: "grad norm", unit: "before clipping"},
  tokens_per_second: {title: "tokens/s", unit: "all ranks"},
  elapsed_ms: {title: "step", unit: "ms"},
  tflops_per_gpu: {title: "TFLOP/s", unit: "a rank, model FLOPs"},
  mfu: {title: "MFU", write: v => (100 * v).toFixed(1) + " %"},
  peak_memory_bytes: {title: "memory of rank 0", unit: "peak; thin: now", write: bytes, also: ["memory_bytes"]},
  params_norm: {title: "norm of all weights"},
  "busiest expert": {title: "busiest expert", unit: "times the mean, worst layer"},
  skew_ms: {title: "skew of ranks", unit: "ms, own work of the slowest above the fastest"},
  epoch: {title: "epoch"},
  loss_scale: {title: "loss scale", quiet: true},
  num_zeros: {title: "zeros in the gradient"},
  skipped_iterations: {title: "skipped steps", quiet: true},
  nan_iterations: {title: "steps with NaN", quiet: true},
};
const HIDDEN = /^(time|consumed_samples|samples_per_second|counted_tokens|peak_tflops|memory_bytes)$/;

function short(v) {
  if (v === null || v === undefined || !isFinite(v)) return "–";
  const size = Math.abs(v);
  if (size >= 1e12) return v.toExponential(2);
  for (const [unit, n] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) if (size >= n) return +(v / (unit === "k" ? 1e3 : n)).toPrecision(4) + " " + unit;
  return size && size < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
}
function bytes(v) {
  if (v === null || v === undefined) return "–";
  const gib = Math.abs(v) >= 2 ** 30;
  return (v / 2 ** (gib ? 30 : 20)).toFixed(gib ? 2 : 1) + (gib ? " GiB" : " MiB");
}
function duration(s) {
  if (!isFinite(s)) return "–";
  if (s < 90) return Math.round(s) + " s";
  return s < 5400 ? Math.round(s / 60) + " min" : s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " days";
}
const seconds = s => s < 1 ? +(1000 * s).toPrecision(3) + " ms" : +s.toPrecision(3) + " s";
const count = n => Math.round(n).toLocaleString("en");
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const chip = k => make("span", {className: "chip", style: `background: var(--run${k})`});

function make(tag, values = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (name === "style") node.style.cssText = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
function hint(text, ...flags) {
  const box = make("p", {className: "hint"}, text + " ");
  flags.forEach(flag => box.append(make("code", {textContent: flag}), " "));
  return box;
}

// ------------------------------------------------------------------------------------------------ asking

async function ask(run, k) {
  const query = new URLSearchParams({
    generation: run.generation ?? 0, since: run.next ?? 0, width: run.width ?? 0, lines: run.seq ?? 0,
    points: document.querySelector(".card.large") ? 1500 : 500, first: view.first, end: view.end, smooth: view.smooth,
  });
  const asked = JSON.stringify([view.first, view.end, view.smooth, query.get("points")]);
  if (asked !== run.asked) query.set("width", 0);
  const answer = await fetch(`api/run/${k}?${query}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  const whole = found.generation !== run.generation;
  if (whole || found.since === 0) run.curves = {};
  for (const [name, fresh] of Object.entries(found.curves)) join(run.curves[name] ??= {at: [], mean: []}, fresh, found.since);
  if (whole) { run.lines = []; run.config = null; Object.assign(run, {model: found.model, run: found.run}); }
  const {model: _, run: __, curves: ___, lines, ...state} = found;
  run.lines = [...run.lines, ...lines].slice(-400);
  run.seq = run.lines.at(-1)?.seq ?? 0;
  Object.assign(run, state, {asked});
}

function join(curve, fresh, since) {  // replace what begins at `since` by the fresh buckets
  let kept = curve.at.length;
  while (kept && curve.at[kept - 1] >= since) kept--;
  const banded = fresh.low || curve.low;
  for (const key of banded ? ["low", "high"] : []) curve[key] = [...(curve[key] ?? curve.mean).slice(0, kept), ...(fresh[key] ?? fresh.mean)];
  curve.mean = [...curve.mean.slice(0, kept), ...fresh.mean];
  curve.at = [...curve.at.slice(0, kept), ...fresh.at];
}

let timer = null, asking = false, again = false;
async function update() {
  clearTimeout(timer);
  if (asking) { again = true; return; }
  asking = true;
  let wait = 1000;
  try {
    await Promise.all(runs.map(ask));
    trouble("");
    show();
    if (runs.some(run => run.read[0] > 0)) wait = 0;
    else if (runs.every(run => run.ended || run.age > 600)) wait = 4000;
  } catch (error) {
    trouble(error instanceof TypeError ? "minimegatron watch has ended, or cannot be reached." : error.message);
    wait = 3000;
  }
  asking = false;
  if (again) { again = false; wait = 0; }
  if (!document.hidden || wait === 0) timer = setTimeout(update, wait);
}
function trouble(text) { at("trouble").hidden = !text; at("trouble").textContent = text; }
document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });

// ------------------------------------------------------------------------------------------------ the head of the page

function show() {
  document.title = runs.map(run => `${run.name} ${run.iteration}`).join(" · ");
  at("runs").replaceChildren(...runs.map(head));
  tiles();
  makeCharts();
  redraw();
  planned();
  layers();
  timelines();
  experts();
  lines();
  configuration();
}

function head(run, k) {
  const share = run.train_iters ? run.iteration / run.train_iters : 0;
  const left = (run.train_iters - run.iteration) * (run.latest.train?.elapsed_ms ?? NaN) / 1000;
  const step = run.latest.train?.elapsed_ms / 1000 * (run.run?.training?.log_interval ?? 1) || 0;
  let state = run.read[0] > 0 ? `reading the log, ${Math.round(100 - 100 * run.read[0] / run.read[1])} %` : "training";
  if (state === "training" && run.ended) state = `ended ${duration(run.age)} ago`;
  else if (state === "training" && run.age > Math.max(60, 5 * step)) state = `no line for ${duration(run.age)}: it was ended, hangs, or this is a copy`;
  else if (state === "training" && isFinite(left)) state += `, ${duration(left)} left`;
  const text = [`step ${count(run.iteration)}` + (run.train_iters ? ` of ${count(run.train_iters)}` : ""), state];
  if (run.marks.length) text.push(`${run.marks.at(-1).what} at step ${count(run.marks.at(-1).at)}`);
  if (run.broken) text.push(`${run.broken} lines of the log are not readable`);
  if (run.not_finite) text.push(`${run.not_finite} numbers are not finite`);
  return make("div", {className: "run"}, chip(k), make("b", {textContent: run.name, title: run.path}),
    make("progress", {value: share, max: 1, title: `${Math.round(100 * share)} %`}), make("span", {className: "state", textContent: text.join(" · ")}));
}

function tiles() {
  const clip = run => run.run?.optimizer?.clip_grad;
  const peak = run => run.machine?.peak_tflops;
  const rows = [
    [name => name, null],
    ["learning rate", t => short(t.learning_rate)],
    ["grad norm, before clipping" + (clip(runs[0]) ? ` to ${clip(runs[0])}` : ""), t => short(t.grad_norm)],
    ["tokens/s", t => short(t.tokens_per_second)], ["samples/s", t => short(t.samples_per_second)],
    ["time of a step", t => seconds(t.elapsed_ms / 1000)], ["TFLOP/s a rank", t => short(t.tflops_per_gpu)],
    [peak(runs[0]) ? `MFU, of ${peak(runs[0])} TFLOP/s` : "MFU", t => t.mfu == null ? null : (100 * t.mfu).toFixed(1) + " %"],
    ["memory of rank 0, peak", t => bytes(t.peak_memory_bytes)],
    ["epoch", t => Object.values(t.epochs ?? {}).length ? short(Object.values(t.epochs)[0]) : null],
    ["tokens read", (t, run) => short(t.consumed_samples * (run.run?.data?.seq_length ?? NaN))],
  ];
  const losses = [...new Set(runs.flatMap(run => Object.keys(run.latest.train?.losses ?? {})))];
  const held = [...new Set(runs.flatMap(run => Object.keys(run.latest.validation?.losses ?? {})))];
  const found = [
    ...losses.map(name => [name, t => short(t.losses?.[name])]),
    ...held.map(name => [`${name}, validation`, (_, run) => short(run.latest.validation?.losses?.[name])]), ...rows.slice(1),
  ];
  at("tiles").replaceChildren(...found.flatMap(([of, is]) => {
    const values = runs.map((run, k) => [k, run.latest.train && is(run.latest.train, run)]).filter(([, v]) => v != null && v !== "–");
    return values.length ? [make("div", {className: "tile"}, make("div", {className: "of", textContent: of, title: of}), ...values.map(([k, v]) =>
      make("div", {className: "is"}, ...(runs.length > 1 ? [chip(k), " "] : []), v)))] : [];
  }));
}

// ------------------------------------------------------------------------------------------------ curves

function makeCharts() {
  const names = [...new Set(runs.flatMap(run => Object.keys(run.curves)))].filter(name => !HIDDEN.test(name) && !name.endsWith(" validation"));
  const losses = names.filter(name => !(name in KNOWN));
  for (const name of [...losses, ...Object.keys(KNOWN).filter(n => names.includes(n))]) {
    const {title = name.replaceAll("_", " "), unit = "", write = short, also = [], quiet} = KNOWN[name] ?? {};
    const held = `${name} validation`;
    const silent = quiet && runs.every(run => new Set(run.curves[name]?.mean).size < 2);
    if (charts.has(name)) { charts.get(name).card.hidden = silent; continue; }
    const canvas = make("canvas", {className: "curve", tabIndex: 0, role: "img"});
    const values = make("span", {className: "values"});
    const card = make("div", {className: "card", hidden: silent}, make("div", {className: "head"}, make("b", {textContent: title}), make("span", {className: "unit", textContent: unit}), values), canvas);
    const chart = {name, title, write, curves: [name, ...also, held], card, canvas, values, loss: /loss$/.test(name), shown: true};
    charts.set(name, chart);
    listen(chart);
    seen.observe(canvas);
  }
  const order = [...losses, ...Object.keys(KNOWN)];
  const wanted = [...charts.values()].sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name)).map(chart => chart.card);
  if (wanted.some((card, i) => at("charts").children[i] !== card)) at("charts").replaceChildren(...wanted);
}
const seen = new IntersectionObserver(entries => entries.forEach(entry => {
  const chart = [...charts.values()].find(c => c.canvas === entry.target);
  chart.shown = entry.isIntersecting;
  if (chart.shown) draw(chart);
}), {rootMargin: "200px"});

// Where a step is on the x axis: itself, or tokens and hours, which are curves of the log between whose points lie steps.
function along(run) {
  if (view.axis === "step") return step => step;
  const curve = run.curves[view.axis === "tokens" ? "consumed_samples" : "time"];
  if (!curve?.at.length) return () => NaN;
  const length = run.run?.data?.seq_length ?? 1, began = run.machine?.time ?? curve.mean[0];
  const edge = curve.high ?? curve.mean;
  const value = i => view.axis === "tokens" ? edge[i] * length : (edge[i] - began) / 3600;
  return step => {
    const i = lowest(curve.at, step);
    if (i >= curve.at.length) return value(curve.at.length - 1);
    if (i === 0 || curve.at[i] === step) return value(i);
    const part = (step - curve.at[i - 1]) / (curve.at[i] - curve.at[i - 1]);
    return value(i - 1) + part * (value(i) - value(i - 1));
  };
}
function lowest(list, wanted) {  // the first place with a value >= wanted
  let a = 0, b = list.length;
  while (a < b) { const mid = (a + b) >> 1; if (list[mid] < wanted) a = mid + 1; else b = mid; }
  return a;
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find(f => f * power >= rough) ?? 10), found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9 && found.length < 20; t += step) found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

function paper(canvas) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = "11px system-ui, sans-serif";
  return {g, width, height};
}

let frame = 0;
function redraw() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => charts.forEach(chart => chart.shown && !chart.card.hidden && draw(chart)));
}

function guides(chart) {  // horizontal lines: what a value is compared with
  return runs.flatMap((run, k) => {
    const clip = run.run?.optimizer?.clip_grad, time = run.predicted?.time;
    if (chart.name === "grad_norm" && clip) return [[k, clip, `clipped to ${clip}`]];
    if (chart.name === "elapsed_ms" && time) return [[k, 1000 * time.seconds, "predicted"]];
    if (chart.name === "tflops_per_gpu" && time) return [[k, time.tflops, "predicted"]];
    return [];
  });
}

function draw(chart) {
  const {g, width, height} = paper(chart.canvas);
  if (!width) return;
  const lines = runs.flatMap((run, k) => chart.curves.map((name, n) => {
    const curve = run.curves[name];
    if (!curve) return null;
    const place = along(run);
    return {k, n, curve, held: name.endsWith(" validation"), x: curve.at.map(place)};
  })).filter(Boolean);
  const xs = lines.flatMap(line => [line.x[0], line.x.at(-1)]).filter(isFinite);
  let low = Infinity, high = -Infinity;
  for (const {curve} of lines) for (const key of ["mean", "low", "high"]) for (const v of curve[key] ?? []) {
    if (v === null || (view.logarithmic && v <= 0)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  const lasts = [];
  chart.values.replaceChildren();
  if (!xs.length || low > high) { g.fillStyle = color("--soft"); g.fillText("no numbers yet", 10, 20); return; }
  for (const [, v] of guides(chart)) if (v < 4 * high && v > low / 4) { low = Math.min(low, v); high = Math.max(high, v); }
  const scale = view.logarithmic ? v => Math.log10(v) : v => v;
  let bottom = scale(low), top = scale(high);
  if (bottom === top) { const pad = view.logarithmic ? .5 : Math.abs(low) * .1 || 1; bottom -= pad; top += pad; }
  const pad = .06 * (top - bottom); bottom -= pad; top += pad;
  let left = Math.min(...xs), right = Math.max(...xs);
  if (view.axis === "step" && view.end) { left = view.first; right = Math.min(view.end, Math.max(...runs.map(run => run.iteration + 1))); }
  if (left === right) { left -= .5; right += .5; }
  const rows = view.logarithmic ? ticks(bottom, top, 5).map(t => 10 ** t) : ticks(bottom, top, 5), labels = rows.map(chart.write);
  const box = {left: Math.max(30, ...labels.map(text => g.measureText(text).width + 9)), right: width - 8, top: 6, bottom: height - 20};
  const X = x => box.left + (x - left) / (right - left) * (box.right - box.left);
  const Y = v => box.bottom - (scale(v) - bottom) / (top - bottom) * (box.bottom - box.top);
  chart.box = {...box, first: left, last: right};

  g.lineWidth = 1; g.fillStyle = color("--soft"); g.strokeStyle = color("--grid");
  g.textAlign = "right"; g.textBaseline = "middle";
  rows.forEach((t, i) => { line(g, box.left, Y(t), box.right, Y(t)); g.fillText(labels[i], box.left - 5, Y(t)); });
  g.textAlign = "center"; g.textBaseline = "top";
  for (const t of ticks(left, right, Math.max(3, width / 85))) if (X(t) < box.right - 8) g.fillText(short(t), Math.max(X(t), box.left + 4), box.bottom + 5);
  for (const [k, v, text] of guides(chart)) {
    if (Y(v) < box.top || Y(v) > box.bottom) continue;
    g.setLineDash([6, 4]); g.strokeStyle = color(`--run${k}`); line(g, box.left, Y(v), box.right, Y(v)); g.setLineDash([]);
    g.textAlign = "right"; g.fillStyle = color(`--run${k}`); g.fillText(text, box.right - 2, Y(v) + 2);
  }
  g.save(); g.beginPath(); g.rect(box.left, box.top, box.right - box.left, box.bottom - box.top); g.clip();
  runs.forEach((run, k) => run.marks.forEach(mark => {
    const x = X(along(run)(mark.at));
    g.strokeStyle = color(`--run${k}`); g.globalAlpha = .6; g.setLineDash([2, 3]); line(g, x, box.top, x, box.bottom); g.setLineDash([]); g.globalAlpha = 1;
  }));
  for (const {k, n, curve, held, x} of lines) {
    const ink = color(`--run${k}`), fits = v => v !== null && v !== undefined && !(view.logarithmic && v <= 0);
    g.strokeStyle = g.fillStyle = ink;
    if (curve.low && !held) {
      g.globalAlpha = .22;
      for (let i = 0; i < x.length; i++) {
        if (!fits(curve.low[i]) || !fits(curve.high[i])) continue;
        const a = X(x[i - 1] ?? x[i]), b = X(x[i]);
        g.fillRect(a, Y(curve.high[i]) - .5, Math.max(1, b - a + .3), Y(curve.low[i]) - Y(curve.high[i]) + 1);
      }
      g.globalAlpha = 1;
    }
    g.lineWidth = n === 1 && !held ? 1 : 1.7;
    if (held) g.setLineDash([5, 3]);
    g.beginPath();
    let pen = false;
    curve.mean.forEach((v, i) => { if (!fits(v)) { pen = false; return; } pen ? g.lineTo(X(x[i]), Y(v)) : g.moveTo(X(x[i]), Y(v)); pen = true; });
    g.stroke(); g.setLineDash([]);
    if (held || x.length < 40) curve.mean.forEach((v, i) => { if (fits(v) && (held ? x.length < 80 : true)) { g.beginPath(); g.arc(X(x[i]), Y(v), held ? 2.6 : 1.8, 0, 7); g.fill(); } });
    const i = view.cursor === null ? curve.at.length - 1 : Math.min(lowest(curve.at, view.cursor), curve.at.length - 1);
    lasts.push([k, held, n, curve.mean[i], x[i], curve.at[i], curve.low?.[i], curve.high?.[i]]);
    if (view.cursor !== null && fits(curve.mean[i])) { g.beginPath(); g.arc(X(x[i]), Y(curve.mean[i]), 3.2, 0, 7); g.fill(); }
  }
  if (view.cursor !== null) {
    const x = X(along(runs[0])(view.cursor));
    g.strokeStyle = color("--soft"); g.lineWidth = 1; line(g, x, box.top, x, box.bottom);
  }
  if (chart.drag) { g.fillStyle = color("--run0"); g.globalAlpha = .15; g.fillRect(Math.min(...chart.drag), box.top, Math.abs(chart.drag[1] - chart.drag[0]), box.bottom - box.top); g.globalAlpha = 1; }
  g.restore();
  const words = lasts.filter(([,, n, v]) => v !== null && (n !== 1 || chart.curves.length < 3 || !KNOWN[chart.name]?.also)).map(([k, held, , v]) => [k, (held ? "validation " : "") + chart.write(v)]);
  chart.values.replaceChildren(...words.flatMap(([k, text]) => [make("span", {className: "value", style: `color: var(--run${k})`, textContent: text}), " "]));
  chart.lasts = lasts;
  chart.canvas.setAttribute("aria-label", `${chart.title}: ${words.map(([k, text]) => `${runs[k].name} ${text}`).join(", ")} at step ${view.cursor ?? runs[0].iteration}; from ${chart.write(low)} to ${chart.write(high)}`);
}
function line(g, x0, y0, x1, y1) { g.beginPath(); g.moveTo(x0, y0); g.lineTo(x1, y1); g.stroke(); }

// ------------------------------------------------------------------------------------------------ mouse and keys

function stepAt(chart, px) {
  const {left, right, first, last} = chart.box, x = first + (px - left) / (right - left) * (last - first);
  if (view.axis === "step") return Math.round(x);
  const place = along(runs[0]);
  let a = 0, b = Math.max(...runs.map(run => run.iteration));
  while (a < b) { const mid = (a + b) >> 1; if (place(mid) < x) a = mid + 1; else b = mid; }
  return a;
}
function cursor(step, chart, event) {
  view.cursor = step === null ? null : Math.max(0, Math.min(step, Math.max(...runs.map(run => run.iteration))));
  redraw();
  if (!chart || step === null) { at("tip").hidden = true; return; }
  requestAnimationFrame(() => {
    const told = (chart.lasts ?? []).map(([k, held, , v, , step, low, high]) => `${runs.length > 1 ? runs[k].name + " " : ""}${held ? "validation " : ""}step ${count(step)}: ${chart.write(v)}` + (low != null && low !== high ? `  (${chart.write(low)} to ${chart.write(high)})` : ""));
    tip([chart.title, ...told].join("\n"), event);
  });
}
function tip(text, event) {
  const box = at("tip");
  box.textContent = text; box.hidden = !text;
  const x = event?.clientX ?? innerWidth / 2, y = event?.clientY ?? 80;
  box.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.offsetWidth - 8)) + "px";
  box.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.offsetHeight - 8)) + "px";
}
function look(first, end) {
  const last = Math.max(...runs.map(run => run.iteration)) + 1;
  if (end - first < 4) return;
  first = Math.max(0, Math.round(first));
  end = Math.round(end);
  Object.assign(view, first <= 1 && end >= last ? {first: 0, end: 0} : {first, end: Math.min(end, last)});
  at("whole").disabled = !view.end;
  update();
}
function enlarge(chart) {
  const large = chart.card.classList.contains("large");
  document.querySelectorAll(".card.large").forEach(card => card.classList.remove("large"));
  chart.card.classList.toggle("large", !large);
  update();
}
function listen(chart) {
  const {canvas} = chart;
  canvas.addEventListener("pointermove", event => {
    if (!chart.box) return;
    if (chart.drag) chart.drag[1] = event.offsetX;
    cursor(stepAt(chart, event.offsetX), chart, event);
  });
  canvas.addEventListener("pointerleave", () => { chart.drag = null; cursor(null); });
  canvas.addEventListener("pointerdown", event => { if (event.pointerType === "mouse" && event.button === 0) { chart.drag = [event.offsetX, event.offsetX]; canvas.setPointerCapture(event.pointerId); } });
  canvas.addEventListener("pointerup", () => {
    const drag = chart.drag; chart.drag = null;
    if (drag && Math.abs(drag[1] - drag[0]) > 6) look(...drag.map(px => stepAt(chart, px)).sort((a, b) => a - b));
  });
  canvas.addEventListener("dblclick", () => look(0, Infinity));
  canvas.addEventListener("blur", () => cursor(null));
  canvas.addEventListener("keydown", event => {
    const span = (view.end || Math.max(...runs.map(run => run.iteration)) + 1) - view.first, jump = Math.max(1, Math.round(span / (event.shiftKey ? 10 : 100)));
    const box = canvas.getBoundingClientRect(), where = {clientX: box.left + 60, clientY: box.bottom - 10};
    if (event.key === "ArrowLeft") cursor((view.cursor ?? view.first + span - 1) - jump, chart, where);
    else if (event.key === "ArrowRight") cursor((view.cursor ?? view.first) + jump, chart, where);
    else if (event.key === "Enter") enlarge(chart);
    else return;
    event.preventDefault(); event.stopPropagation();
  });
}
function next(select) { select.selectedIndex = (select.selectedIndex + 1) % select.options.length; select.dispatchEvent(new Event("change")); }
function zoom(factor, shift) {
  const last = Math.max(...runs.map(run => run.iteration)) + 1, end = view.end || last, span = end - view.first;
  const mid = (view.first + end) / 2 + shift * span, half = Math.max(4, span * factor) / 2;
  const first = Math.max(0, Math.min(mid - half, last - 2 * half));
  look(first, first + 2 * half);
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
  const keys = {
    s: () => next(at("smooth")), x: () => next(at("axis")), l: () => at("logarithmic").click(), d: () => at("theme").click(), "?": () => at("help").click(),
    "+": () => zoom(.5, 0), "=": () => zoom(.5, 0), "-": () => zoom(2, 0), ArrowLeft: () => zoom(1, -.25), ArrowRight: () => zoom(1, .25), Escape: () => look(0, Infinity),
  };
  if (!keys[event.key] || (event.target.id === "log" && event.key.startsWith("Arrow"))) return;
  keys[event.key]();
  event.preventDefault();
});
at("smooth").addEventListener("change", () => { view.smooth = +at("smooth").value; update(); });
at("axis").addEventListener("change", () => { view.axis = at("axis").value; redraw(); });
at("logarithmic").addEventListener("change", () => { view.logarithmic = at("logarithmic").checked; redraw(); });
at("whole").addEventListener("click", () => look(0, Infinity));
at("layer-kind").addEventListener("change", () => { drawn.layers = null; layers(); });
at("help").addEventListener("click", () => { at("keys").hidden = !at("keys").hidden; at("help").setAttribute("aria-expanded", String(!at("keys").hidden)); });
function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  at("theme").textContent = dark ? "light" : "dark";
  for (const key of Object.keys(drawn)) drawn[key] = null;
  if (runs.length && runs[0].read) show();
}
at("theme").addEventListener("click", () => {
  const dark = !document.documentElement.classList.contains("dark");
  try { localStorage.setItem("theme", dark ? "dark" : "light"); } catch { /* a browser that keeps nothing */ }
  theme(dark);
});
addEventListener("resize", () => { for (const key of Object.keys(drawn)) drawn[key] = null; if (runs.length && runs[0].read) show(); });

// A panel below the curves is drawn anew only when what it shows has changed.
const drawn = {planned: null, layers: null, timeline: null, experts: null, lines: null, config: null};
function changed(panel, ...what) {
  const key = JSON.stringify(what);
  if (drawn[panel] === key) return false;
  drawn[panel] = key;
  return true;
}
const titled = (run, k, ...nodes) => make("div", {}, ...(runs.length > 1 ? [make("h3", {}, chip(k), " " + run.name)] : []), ...nodes);

// ------------------------------------------------------------------------------------------------ the planner's figures

const OWNERS = ["parameters", "main parameters", "gradients", "moments", "communication", "activations", "workspace"];
const ownerColor = owner => `var(--c${(OWNERS.indexOf(owner.replace(" (host)", "")) + 8) % 8})`;
const total = owners => Object.values(owners).reduce((a, b) => a + b, 0);

function planned() {
  if (!changed("planned", runs.map(run => [run.predicted, run.latest.memory, run.latest.train?.memory_by_owner, short(run.latest.train?.elapsed_ms), bytes(run.latest.train?.peak_memory_bytes)]))) return;
  at("planned").replaceChildren(...runs.map((run, k) => {
    const nodes = [], told = run.predicted, train = run.latest.train;
    if (told?.pending) nodes.push(hint("The planner is computing what this run should take."));
    if (told?.error) nodes.push(hint(`No prediction: ${told.error}`));
    const rows = [];
    if (told?.time && train) rows.push(["step time", seconds(told.time.seconds), seconds(train.elapsed_ms / 1000), (train.elapsed_ms / 1000 / told.time.seconds).toFixed(2) + " x"], ["TFLOP/s a rank", short(told.time.tflops), short(train.tflops_per_gpu), (train.tflops_per_gpu / told.time.tflops).toFixed(2) + " x"]);
    if (rows.length) nodes.push(make("table", {}, make("tr", {}, ...["", `predicted (${told.time.cluster})`, "measured", "measured / predicted"].map(t => make("th", {textContent: t}))), ...rows.map(row => make("tr", {}, ...row.map(t => make("td", {textContent: t}))))));
    if (told?.why) nodes.push(hint(`Step time is not predicted: ${told.why}`));
    const bars = [];
    for (const [rank, memory] of Object.entries(told?.memory ?? {})) {
      bars.push([`rank ${rank} predicted`, memory.peak, memory.unknown.length ? `without ${memory.unknown.join(", ")}` : `fullest in ${memory.where}`]);
      const counted = run.latest.memory?.rows ?? [], i = counted.findIndex(row => row[0] === `rank ${rank} predicted`);
      if (i >= 0) bars.push(["counted", counted[i + 1][1], `step ${run.latest.memory.iteration}, fullest in ${counted[i + 1][3]}`]);
      else if (train?.memory_by_owner && rank === "0") bars.push(["between steps, measured", train.memory_by_owner, "what lasts from step to step"]);
    }
    const most = Math.max(1, ...bars.map(([, owners]) => total(owners)));
    if (bars.length) {
      nodes.push(make("h3", {textContent: "memory by owner, at the fullest moment of a step"}), make("div", {className: "bars"}, ...bars.flatMap(([label, owners, title]) => [
        make("span", {textContent: label}),
        make("div", {className: "bar", title, role: "img", "aria-label": `${label}: ${Object.entries(owners).map(([o, n]) => `${o} ${bytes(n)}`).join(", ")}`}, ...OWNERS.concat(Object.keys(owners).filter(o => !OWNERS.includes(o))).filter(o => owners[o]).map(owner => make("span", {style: `width: ${100 * owners[owner] / most}%; background: ${ownerColor(owner)}`, title: `${owner} ${bytes(owners[owner])}`}))),
        make("span", {className: "sum", textContent: bytes(total(owners)), title}),
      ])));
      const owners = [...new Set(bars.flatMap(([, o]) => Object.keys(o).filter(name => o[name])))];
      nodes.push(make("div", {className: "legend"}, ...owners.map(owner => make("span", {}, make("span", {className: "chip", style: `background: ${ownerColor(owner)}`}), ` ${owner}`))));
      if (!run.latest.memory) nodes.push(hint("Counted beside it, with", "--log-memory-interval N"));
    }
    if (train && !nodes.length) nodes.push(hint("Nothing is predicted (--no-plan)."));
    if (train) nodes.push(hint(`Rank 0 has held ${bytes(train.peak_memory_bytes)} at most: ${run.machine?.device === "cuda" ? "allocated on its GPU" : "the whole process on a CPU, with the interpreter and torch"}.`));
    return titled(run, k, ...nodes);
  }));
}

// ------------------------------------------------------------------------------------------------ layers, experts

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];  // viridis, five of its colours
function shade(part) {
  const x = Math.max(0, Math.min(1, part)) * (RAMP.length - 1), i = Math.min(RAMP.length - 2, Math.floor(x));
  return `rgb(${RAMP[i].map((c, j) => Math.round(c + (x - i) * (RAMP[i + 1][j] - c))).join()})`;
}
// rows [{name, cells: [{x0, x1, value}]}] with x in [0, 1]; colours follow the logarithm if `logs`
function heat(rows, write, logs, tell) {
  const height = Math.max(10, Math.min(18, 420 / rows.length)), canvas = make("canvas", {role: "img", style: `height: ${height * rows.length + 22}px`});
  const values = rows.flatMap(row => row.cells.map(cell => cell.value)).filter(v => v !== null && isFinite(v) && (!logs || v > 0));
  const scale = logs ? Math.log10 : v => v, low = scale(Math.min(...values)), high = scale(Math.max(...values));
  requestAnimationFrame(() => {
    const {g, width} = paper(canvas), left = Math.min(190, width * .34);
    g.textBaseline = "middle";
    rows.forEach((row, r) => {
      g.fillStyle = color("--soft"); g.textAlign = "right";
      if (height >= 10) g.fillText(row.name.replace(/^(decoder|embedding)\./, "").slice(-30), left - 6, (r + .5) * height);
      for (const {x0, x1, value} of row.cells) {
        if (value === null || (logs && value <= 0)) continue;
        g.fillStyle = shade(high > low ? (scale(value) - low) / (high - low) : .5);
        g.fillRect(left + x0 * (width - left), r * height, Math.max(1, (x1 - x0) * (width - left) + .4), height - 1);
      }
    });
    for (let i = 0; i < 100; i++) { g.fillStyle = shade(i / 99); g.fillRect(left + i, height * rows.length + 8, 1.5, 9); }
    g.fillStyle = color("--soft"); g.textAlign = "right"; g.fillText(write(Math.min(...values)), left - 6, height * rows.length + 13);
    g.textAlign = "left"; g.fillText(write(Math.max(...values)), left + 106, height * rows.length + 13);
    canvas.onpointermove = event => {
      const row = rows[Math.floor(event.offsetY / height)], x = (event.offsetX - left) / (width - left);
      const cell = row?.cells.find(c => c.x0 <= x && x < c.x1);
      tip(cell ? `${row.name}\n${tell(cell)}: ${write(cell.value)}` : "", event);
    };
    canvas.onpointerleave = () => tip("");
  });
  return canvas;
}

function layers() {
  const kind = at("layer-kind").value;
  if (!changed("layers", kind, view.first, view.end, runs.map(run => [run.generation, run.layers]))) return;
  const query = `first=${view.first}&end=${view.end}`;
  Promise.all(runs.map((run, k) => run.layers ? fetch(`api/run/${k}/layers/${kind}?${query}`).then(answer => answer.json()) : {})).then(found =>
    at("layers").replaceChildren(...runs.map((run, k) => titled(run, k, ...layersOf(found[k], kind))))).catch(() => { drawn.layers = null; });
}
function layersOf(found, kind) {
  const names = Object.keys(found).filter(name => found[name].at.length);
  if (!names.length) return [hint("Norms by layer are in logs of runs with", "--log-norms-interval N")];
  const steps = found[names[0]].at, begin = steps[0] - (steps[1] - steps[0] || 1), last = steps.at(-1);
  const rows = names.map(name => ({name, cells: found[name].at.map((step, i, all) => ({
    x0: ((i ? all[i - 1] : begin) - begin) / (last - begin), x1: (step - begin) / (last - begin), value: found[name].mean[i], step}))}));
  const canvas = heat(rows, short, true, cell => `step ${count(cell.step)}`);
  canvas.setAttribute("aria-label", `${kind} by layer: ` + rows.map(row => `${row.name} ${short(row.cells.at(-1).value)}`).join(", "));
  return [make("p", {className: "note", textContent: `steps ${count(steps[0])} to ${count(last)}; a colour is a norm, on a logarithmic scale`}), make("div", {className: "card"}, canvas)];
}

function experts() {
  const loads = runs.map(run => (run.latest.train?.experts ?? []).filter(layer => layer.tokens?.length));
  at("s-experts").hidden = !loads.some(l => l.length);
  if (at("s-experts").hidden || !changed("experts", loads)) return;
  at("experts").replaceChildren(...runs.map((run, k) => {
    const rows = loads[k].map(layer => {
      const mean = layer.tokens.reduce((a, b) => a + b, 0) / layer.tokens.length || 1, n = layer.tokens.length;
      return {name: `layer ${layer.layer}`, cells: layer.tokens.map((tokens, e) => ({x0: e / n, x1: (e + 1) / n, value: tokens / mean, expert: e}))};
    });
    if (!rows.length) return titled(run, k, hint("no experts"));
    return titled(run, k, make("p", {className: "note", textContent: `tokens of each expert in step ${count(run.iteration)}, over the mean of its layer`}), make("div", {className: "card"}, heat(rows, v => short(v) + " x", false, cell => `expert ${cell.expert}`)));
  }));
}

// ------------------------------------------------------------------------------------------------ a step, rank by rank

const passColor = name => ({forward: "--c0", F: "--c0", backward: "--c2", B: "--c2", W: "--c6", optimizer_step: "--c1"})[name] ?? "--c5";

function timelines() {
  runs.forEach((run, k) => {
    if (run.timeline !== null && run.timeline !== run.timelineAt && !run.fetching) {
      run.fetching = true;
      fetch(`api/run/${k}/timeline`).then(answer => answer.json()).then(found => { run.steps = found; run.timelineAt = found.iteration; drawn.timeline = null; timelines(); }).catch(() => null).finally(() => { run.fetching = false; });
    }
  });
  if (!changed("timeline", runs.map(run => [run.timelineAt, run.latest.stragglers]))) return;
  const flag = ["--log-timeline-interval N"];
  at("timeline").replaceChildren(...runs.map((run, k) => titled(run, k, ...(run.steps?.ranks ? pictured(run.steps) : [hint("A timeline is in logs of runs with", ...flag)]))));
  at("ranks").replaceChildren(...runs.map((run, k) => titled(run, k, ...skew(run))));
}

function outer(events) {  // [computing events that are in no other], by start
  let covered = -Infinity;
  return events.filter(e => e[1] === "compute").sort((a, b) => a[2] - b[2] || b[3] - a[3]).filter(e => { const end = e[2] + e[3]; if (end <= covered) return false; covered = end; return true; });
}

function pictured(step) {
  const ranks = step.ranks, lane = ranks.length > 32 ? 10 : ranks.length > 8 ? 16 : 26, end = Math.max(1e-9, ...ranks.map(r => Math.max(0, ...r.map(e => e[2] + e[3]))));
  const canvas = make("canvas", {role: "img", style: `height: ${lane * ranks.length + 20}px`, "aria-label": `timeline of step ${step.iteration} on ${ranks.length} ranks, ${seconds(end)}`});
  requestAnimationFrame(() => {
    const {g, width} = paper(canvas), left = 52, X = t => left + t / end * (width - left - 4);
    g.textBaseline = "middle";
    ranks.forEach((events, r) => {
      const y = r * lane, box = (e, top, height, ink, alpha = 1) => { g.globalAlpha = alpha; g.fillStyle = ink; g.fillRect(X(e[2]), y + top, Math.max(.6, X(e[2] + e[3]) - X(e[2]) - .3), height); g.globalAlpha = 1; };
      g.fillStyle = color("--soft"); g.textAlign = "right";
      if (lane > 10 || r % 4 === 0) g.fillText(`rank ${r}`, left - 6, y + lane / 2);
      for (const e of outer(events)) box(e, 1, lane - 2, color(passColor(e[0])), .75);
      for (const e of events) if (e[1] === "wait") box(e, 1, lane - 2, color("--back"), .72);
      for (const e of events) if (e[1] === "comm") box(e, lane * .62, lane * .26, color("--c3"));
    });
    g.fillStyle = color("--soft"); g.textAlign = "center";
    for (const t of ticks(0, end, width / 130)) g.fillText(seconds(t), Math.min(X(t), width - 22), lane * ranks.length + 10);
    canvas.onpointermove = event => {
      const rank = Math.floor(event.offsetY / lane), t = (event.offsetX - left) / (width - left - 4) * end;
      const under = (ranks[rank] ?? []).filter(e => e[2] <= t && t <= e[2] + e[3]).sort((a, b) => a[3] - b[3]).slice(0, 5);
      tip(under.length ? [`rank ${rank}, ${seconds(t)}`, ...under.map(e => `${e[0]}${e[4] ? " over " + e[4] : ""}: ${seconds(e[3])}`)].join("\n") : "", event);
    };
    canvas.onpointerleave = () => tip("");
  });
  const legend = [["forward", "--c0"], ["backward", "--c2"], ["optimizer", "--c1"], ["message", "--c3"], ["pale: waiting", "--grid"]];
  return [make("p", {className: "note", textContent: `step ${count(step.iteration)}, ${seconds(end)} from the first event to the last`}), make("div", {className: "card"}, canvas),
    make("div", {className: "legend"}, ...legend.map(([name, ink]) => make("span", {}, make("span", {className: "chip", style: `background: var(${ink})`}), ` ${name}`)))];
}

// How long each rank worked itself and how long it waited for others: who works longest and waits least is the slow one.
// `--log-straggler` writes means over steps, by section; without it the recorded step says it.
function skew(run) {
  const told = run.latest.stragglers;
  if (told) {
    const n = told.own_total_ms.length, rows = Object.entries(told.own_ms).filter(([, times]) => Math.max(...times) > 0.005 * told.step_ms);
    const cells = times => times.map((value, r) => ({x0: r / n, x1: (r + 1) / n, value, rank: r}));
    return [make("p", {className: "note", textContent: `mean of ${told.steps} steps up to ${count(told.iteration)}: own work of the slowest rank ${told.skew_ms.toFixed(1)} ms above the fastest, of ${told.step_ms.toFixed(1)} ms`}),
      ...told.slow.map(one => make("p", {className: "slow", textContent: `rank ${one.rank} on ${one.host} is slow in ${one.section}: ${one.excess_ms.toFixed(1)} ms a step more than its peers, ${one.when}`})),
      bars(told.own_total_ms.map((own, r) => ({rank: r, own: own / 1000, waiting: told.wait_total_ms[r] / 1000}))),
      make("h3", {textContent: "own work by section and rank, ms"}),
      make("div", {className: "card"}, heat(rows.map(([name, times]) => ({name, cells: cells(times)})), short, false, cell => `rank ${cell.rank}`))];
  }
  if (!run.steps?.ranks) return [hint("How long each rank works and waits is in logs of runs with", "--log-straggler", "--log-timeline-interval N")];
  if (run.steps.ranks.length < 2) return [hint("One rank waits for nobody.")];
  const ranks = run.steps.ranks.map((events, rank) => {
    const waits = events.filter(e => e[1] === "wait"), spans = outer(events), inside = waits.filter(w => spans.some(s => s[2] <= w[2] && w[2] + w[3] <= s[2] + s[3] + 1e-9));
    const sum = list => list.reduce((a, e) => a + e[3], 0);
    return {rank, waiting: sum(waits), own: sum(spans) - sum(inside)};
  });
  const median = ranks.map(r => r.own).sort((a, b) => a - b)[ranks.length >> 1], slow = ranks.reduce((a, b) => b.own > a.own ? b : a);
  return [make("p", {className: "note", textContent: `step ${count(run.steps.iteration)} alone: rank ${slow.rank} worked longest, ${seconds(slow.own)}, ${(slow.own / median).toFixed(2)} times the median`}), bars(ranks), hint("Means over steps, by section, with", "--log-straggler")];
}
function bars(ranks) {
  const most = Math.max(...ranks.map(r => r.own + r.waiting));
  return make("div", {className: ranks.length > 12 ? "bars dense" : "bars", title: "dark: own work, pale: waiting for others"}, ...ranks.map(r => make("div", {className: "row"}, make("span", {textContent: `rank ${r.rank}`}),
    make("div", {className: "bar", role: "img", "aria-label": `own work ${seconds(r.own)}, waiting ${seconds(r.waiting)}`}, make("span", {style: `width: ${100 * r.own / most}%; background: var(--c0)`}), make("span", {style: `width: ${100 * r.waiting / most}%; background: var(--c4); opacity: .35`})),
    make("span", {className: "sum", textContent: `${seconds(r.own)} + ${seconds(r.waiting)}`}))));
}

// ------------------------------------------------------------------------------------------------ text

function lines() {
  if (!changed("lines", runs.map(run => [run.generation, run.seq]))) return;
  const box = at("log"), below = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  const all = runs.flatMap((run, k) => run.lines.map(l => [l, k])).sort((a, b) => (a[0].time ?? 0) - (b[0].time ?? 0) || a[0].seq - b[0].seq).slice(-400);
  box.replaceChildren(...all.map(([l, k]) => make("li", {className: l.kind}, make("span", {}, ...(runs.length > 1 ? [chip(k), " "] : []), String(l.at)), make("span", {textContent: l.text}))));
  if (below) box.scrollTop = box.scrollHeight;
}

function configuration() {
  if (!changed("config", runs.map(run => run.generation))) return;
  Promise.all(runs.map((_, k) => fetch(`api/run/${k}/config`).then(answer => answer.json()))).then(configs => {
    const flat = configs.map(config => {
      const found = {};
      for (const [section, fields] of Object.entries(config)) if (fields && typeof fields === "object" && !Array.isArray(fields)) for (const [name, value] of Object.entries(fields)) found[`${section}.${name}`] = JSON.stringify(value);
      return found;
    });
    const names = [...new Set(flat.flatMap(Object.keys))], differ = names.filter(name => runs.length > 1 && flat[0][name] !== flat[1][name] && name !== "machine.time");
    const table = rows => make("div", {className: "scroll"}, make("table", {}, make("tr", {}, make("th", {textContent: "field"}), ...runs.map((run, k) => make("th", {}, chip(k), " " + run.name))), ...rows.map(name => make("tr", {}, make("td", {textContent: name}), ...flat.map(f => make("td", {textContent: f[name] ?? "–"}))))));
    const nodes = [];
    if (runs.length > 1) nodes.push(make("h3", {textContent: differ.length ? "what differs" : "nothing differs"}), ...(differ.length ? [table(differ)] : []));
    nodes.push(make("details", {}, make("summary", {textContent: `all ${names.length} fields`}), table(names)));
    at("config").replaceChildren(...nodes);
  }).catch(() => { drawn.config = null; });
}

// ------------------------------------------------------------------------------------------------ begin

(async () => {
  let kept = null;
  try { kept = localStorage.getItem("theme"); } catch { /* a browser that keeps nothing */ }
  theme(kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  try {
    const paths = await (await fetch("api/runs")).json();
    const parts = paths.map(path => path.split("/"));
    let depth = 1;  // as much of each path as tells them apart
    const name = p => p.slice(-depth).join("/");
    if (/^(run|log)\.jsonl$/.test(parts[0].at(-1)) && parts[0].length > 1) depth = 2;
    while (parts.length > 1 && name(parts[0]) === name(parts[1]) && depth < 9) depth++;
    paths.forEach((path, k) => runs.push({name: name(parts[k]), path, curves: {}, lines: [], marks: [], latest: {}}));
    update();
  } catch { trouble("minimegatron watch has ended, or cannot be reached."); }
})();
