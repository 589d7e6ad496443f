"use strict";
// The page of `minimegatron watch`: once a second it asks for what is new in each run (`server.py`), and draws.
//
//   runs[k]    what is known of run k: its state, and curves {name: {at, mean, low, high}} in buckets of `width` steps
//   view       what is looked at: steps [first, end) (end 0: all), smoothing, axis, scale, the step under the cursor
//
// Here: words and numbers, asking, the head of the page. `curves.js` draws curves, `panels.js` what is below them.

const at = id => document.getElementById(id);
const runs = [],
  charts = new Map();
const view = {first: 0, end: 0, smooth: 0, axis: "step", logarithmic: false, cursor: null};

// ------------------------------------------------------------------------------------------------ words and numbers

const KNOWN = {
  // curve -> title, unit, how a value is written, further curves of the same chart
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
  for (const [unit, n] of [
    ["G", 1e9],
    ["M", 1e6],
    ["k", 1e4],
  ])
    if (size >= n) return +(v / (unit === "k" ? 1e3 : n)).toPrecision(4) + " " + unit;
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
  return s < 5400
    ? Math.round(s / 60) + " min"
    : s < 172800
      ? (s / 3600).toFixed(1) + " h"
      : (s / 86400).toFixed(1) + " days";
}
const seconds = s => (s < 1 ? +(1000 * s).toPrecision(3) + " ms" : +s.toPrecision(3) + " s");
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
    generation: run.generation ?? 0,
    since: run.next ?? 0,
    width: run.width ?? 0,
    lines: run.seq ?? 0,
    points: document.querySelector(".card.large") ? 1500 : 500,
    first: view.first,
    end: view.end,
    smooth: view.smooth,
  });
  const asked = JSON.stringify([view.first, view.end, view.smooth, query.get("points")]);
  if (asked !== run.asked) query.set("width", 0);
  const answer = await fetch(`api/run/${k}?${query}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  const whole = found.generation !== run.generation;
  if (whole || found.since === 0) run.curves = {};
  for (const [name, fresh] of Object.entries(found.curves))
    join((run.curves[name] ??= {at: [], mean: []}), fresh, found.since);
  if (whole) {
    run.lines = [];
    run.config = null;
    Object.assign(run, {model: found.model, run: found.run});
  }
  const {model: _, run: __, curves: ___, lines, ...state} = found;
  run.lines = [...run.lines, ...lines].slice(-400);
  run.seq = run.lines.at(-1)?.seq ?? 0;
  Object.assign(run, state, {asked});
}

function join(curve, fresh, since) {
  // replace what begins at `since` by the fresh buckets
  let kept = curve.at.length;
  while (kept && curve.at[kept - 1] >= since) kept--;
  const banded = fresh.low || curve.low;
  for (const key of banded ? ["low", "high"] : [])
    curve[key] = [...(curve[key] ?? curve.mean).slice(0, kept), ...(fresh[key] ?? fresh.mean)];
  curve.mean = [...curve.mean.slice(0, kept), ...fresh.mean];
  curve.at = [...curve.at.slice(0, kept), ...fresh.at];
}

let timer = null,
  asking = false,
  again = false;
async function update() {
  clearTimeout(timer);
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  let wait = 1000;
  try {
    await Promise.all(runs.map(ask));
    trouble("");
    show();
    if (runs.some(run => run.read[0] > 0)) wait = 400;
    else if (runs.every(run => run.ended || run.age > 600)) wait = 4000;
  } catch (error) {
    trouble(error instanceof TypeError ? "minimegatron watch has ended, or cannot be reached." : error.message);
    wait = 3000;
  }
  asking = false;
  if (again) {
    again = false;
    wait = 0;
  }
  if (!document.hidden || wait === 0) timer = setTimeout(update, wait);
}
function trouble(text) {
  at("trouble").hidden = !text;
  at("trouble").textContent = text;
}
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) update();
});

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
  const left = ((run.train_iters - run.iteration) * (run.latest.train?.elapsed_ms ?? NaN)) / 1000;
  const step = (run.latest.train?.elapsed_ms / 1000) * (run.run?.training?.log_interval ?? 1) || 0;
  let state =
    run.read[0] > 0 ? `reading the log, ${Math.round(100 - (100 * run.read[0]) / run.read[1])} %` : "training";
  if (state === "training" && run.ended) state = `ended ${duration(run.age)} ago`;
  else if (state === "training" && run.age > Math.max(60, 5 * step))
    state = `no line for ${duration(run.age)}: it was ended, hangs, or this is a copy`;
  else if (state === "training" && isFinite(left)) state += `, ${duration(left)} left`;
  const text = [`step ${count(run.iteration)}` + (run.train_iters ? ` of ${count(run.train_iters)}` : ""), state];
  if (run.marks.length) text.push(`${run.marks.at(-1).what} at step ${count(run.marks.at(-1).at)}`);
  if (run.broken) text.push(`${run.broken} lines of the log are not readable`);
  if (run.not_finite) text.push(`${run.not_finite} numbers are not finite`);
  return make(
    "div",
    {className: "run"},
    chip(k),
    make("b", {textContent: run.name, title: run.path}),
    make("progress", {value: share, max: 1, title: `${Math.round(100 * share)} %`}),
    make("span", {className: "state", textContent: text.join(" · ")}),
  );
}

function tiles() {
  const clip = run => run.run?.optimizer?.clip_grad;
  const peak = run => run.machine?.peak_tflops;
  const rows = [
    [name => name, null],
    ["learning rate", t => short(t.learning_rate)],
    ["grad norm, before clipping" + (clip(runs[0]) ? ` to ${clip(runs[0])}` : ""), t => short(t.grad_norm)],
    ["tokens/s", t => short(t.tokens_per_second)],
    ["samples/s", t => short(t.samples_per_second)],
    ["time of a step", t => seconds(t.elapsed_ms / 1000)],
    ["TFLOP/s a rank", t => short(t.tflops_per_gpu)],
    [
      peak(runs[0]) ? `MFU, of ${peak(runs[0])} TFLOP/s` : "MFU",
      t => (t.mfu == null ? null : (100 * t.mfu).toFixed(1) + " %"),
    ],
    ["memory of rank 0, peak", t => bytes(t.peak_memory_bytes)],
    ["epoch", t => (Object.values(t.epochs ?? {}).length ? short(Object.values(t.epochs)[0]) : null)],
    ["tokens read", (t, run) => short(t.consumed_samples * (run.run?.data?.seq_length ?? NaN))],
  ];
  const losses = [...new Set(runs.flatMap(run => Object.keys(run.latest.train?.losses ?? {})))];
  const held = [...new Set(runs.flatMap(run => Object.keys(run.latest.validation?.losses ?? {})))];
  const found = [
    ...losses.map(name => [name, t => short(t.losses?.[name])]),
    ...held.map(name => [`${name}, validation`, (_, run) => short(run.latest.validation?.losses?.[name])]),
    ...rows.slice(1),
  ];
  at("tiles").replaceChildren(
    ...found.flatMap(([of, is]) => {
      const values = runs
        .map((run, k) => [k, run.latest.train && is(run.latest.train, run)])
        .filter(([, v]) => v != null && v !== "–");
      return values.length
        ? [
            make(
              "div",
              {className: "tile"},
              make("div", {className: "of", textContent: of, title: of}),
              ...values.map(([k, v]) =>
                make("div", {className: "is"}, ...(runs.length > 1 ? [chip(k), " "] : []), v),
              ),
            ),
          ]
        : [];
    }),
  );
}
