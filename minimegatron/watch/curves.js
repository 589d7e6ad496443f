"use strict";
// Curves: a card each; which there are follows from the names in the log. All share one x axis, its part that is looked
// at, and a cursor, which mouse and keys move.

// ------------------------------------------------------------------------------------------------ curves

function makeCharts() {
  const names = [...new Set(runs.flatMap(run => Object.keys(run.curves)))].filter(
    name => !HIDDEN.test(name) && !name.endsWith(" validation"),
  );
  const losses = names.filter(name => !(name in KNOWN));
  for (const name of [...losses, ...Object.keys(KNOWN).filter(n => names.includes(n))]) {
    const {title = name.replaceAll("_", " "), unit = "", write = short, also = [], quiet} = KNOWN[name] ?? {};
    const held = `${name} validation`;
    const silent = quiet && runs.every(run => new Set(run.curves[name]?.mean).size < 2);
    if (charts.has(name)) {
      charts.get(name).card.hidden = silent;
      continue;
    }
    const canvas = make("canvas", {className: "curve", tabIndex: 0, role: "img"});
    const values = make("span", {className: "values"});
    const card = make(
      "div",
      {className: "card", hidden: silent},
      make(
        "div",
        {className: "head"},
        make("b", {textContent: title}),
        make("span", {className: "unit", textContent: unit}),
        values,
      ),
      canvas,
    );
    const chart = {
      name,
      title,
      write,
      curves: [name, ...also, held],
      card,
      canvas,
      values,
      loss: /loss$/.test(name),
      shown: true,
    };
    charts.set(name, chart);
    listen(chart);
    seen.observe(canvas);
  }
  const order = [...losses, ...Object.keys(KNOWN)];
  const wanted = [...charts.values()]
    .sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name))
    .map(chart => chart.card);
  if (wanted.some((card, i) => at("charts").children[i] !== card)) at("charts").replaceChildren(...wanted);
}
const seen = new IntersectionObserver(
  entries =>
    entries.forEach(entry => {
      const chart = [...charts.values()].find(c => c.canvas === entry.target);
      chart.shown = entry.isIntersecting;
      if (chart.shown) draw(chart);
    }),
  {rootMargin: "200px"},
);

// Where a step is on the x axis: itself, or tokens and hours, which are curves of the log between whose points lie steps.
function along(run) {
  if (view.axis === "step") return step => step;
  const curve = run.curves[view.axis === "tokens" ? "consumed_samples" : "time"];
  if (!curve?.at.length) return () => NaN;
  const length = run.run?.data?.seq_length ?? 1,
    began = run.machine?.time ?? curve.mean[0];
  const edge = curve.high ?? curve.mean;
  const value = i => (view.axis === "tokens" ? edge[i] * length : (edge[i] - began) / 3600);
  return step => {
    const i = lowest(curve.at, step);
    if (i >= curve.at.length) return value(curve.at.length - 1);
    if (i === 0 || curve.at[i] === step) return value(i);
    const part = (step - curve.at[i - 1]) / (curve.at[i] - curve.at[i - 1]);
    return value(i - 1) + part * (value(i) - value(i - 1));
  };
}
function lowest(list, wanted) {
  // the first place with a value >= wanted
  let a = 0,
    b = list.length;
  while (a < b) {
    const mid = (a + b) >> 1;
    if (list[mid] < wanted) a = mid + 1;
    else b = mid;
  }
  return a;
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find(f => f * power >= rough) ?? 10),
    found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9 && found.length < 20; t += step)
    found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

function paper(canvas) {
  const scale = devicePixelRatio || 1,
    width = canvas.clientWidth,
    height = canvas.clientHeight;
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

function guides(chart) {
  // horizontal lines: what a value is compared with
  return runs.flatMap((run, k) => {
    const clip = run.run?.optimizer?.clip_grad,
      time = run.predicted?.time;
    if (chart.name === "grad_norm" && clip) return [[k, clip, `clipped to ${clip}`]];
    if (chart.name === "elapsed_ms" && time) return [[k, 1000 * time.seconds, "predicted"]];
    if (chart.name === "tflops_per_gpu" && time) return [[k, time.tflops, "predicted"]];
    return [];
  });
}

function draw(chart) {
  const {g, width, height} = paper(chart.canvas);
  if (!width) return;
  const lines = runs
    .flatMap((run, k) =>
      chart.curves.map((name, n) => {
        const curve = run.curves[name];
        if (!curve) return null;
        const place = along(run);
        return {k, n, curve, held: name.endsWith(" validation"), x: curve.at.map(place)};
      }),
    )
    .filter(Boolean);
  const xs = lines.flatMap(line => [line.x[0], line.x.at(-1)]).filter(isFinite);
  let low = Infinity,
    high = -Infinity;
  for (const {curve} of lines)
    for (const key of ["mean", "low", "high"])
      for (const v of curve[key] ?? []) {
        if (v === null || (view.logarithmic && v <= 0)) continue;
        if (v < low) low = v;
        if (v > high) high = v;
      }
  const lasts = [];
  chart.values.replaceChildren();
  if (!xs.length || low > high) {
    g.fillStyle = color("--soft");
    g.fillText("no numbers yet", 10, 20);
    return;
  }
  for (const [, v] of guides(chart))
    if (v < 4 * high && v > low / 4) {
      low = Math.min(low, v);
      high = Math.max(high, v);
    }
  const scale = view.logarithmic ? v => Math.log10(v) : v => v;
  let bottom = scale(low),
    top = scale(high);
  if (bottom === top) {
    const pad = view.logarithmic ? 0.5 : Math.abs(low) * 0.1 || 1;
    bottom -= pad;
    top += pad;
  }
  const pad = 0.06 * (top - bottom);
  bottom -= pad;
  top += pad;
  let left = Math.min(...xs),
    right = Math.max(...xs);
  if (view.axis === "step" && view.end) {
    left = view.first;
    right = Math.min(view.end, Math.max(...runs.map(run => run.iteration + 1)));
  }
  if (left === right) {
    left -= 0.5;
    right += 0.5;
  }
  const unit = chart.write === bytes && !view.logarithmic ? 2 ** 20 : 1;
  const rows = ticks(bottom / unit, top / unit, 5).map(t => (view.logarithmic ? 10 ** t : t * unit)),
    labels = rows.map(chart.write);
  const box = {
    left: Math.max(30, ...labels.map(text => g.measureText(text).width + 9)),
    right: width - 8,
    top: 6,
    bottom: height - 20,
  };
  const X = x => box.left + ((x - left) / (right - left)) * (box.right - box.left);
  const Y = v => box.bottom - ((scale(v) - bottom) / (top - bottom)) * (box.bottom - box.top);
  chart.box = {...box, first: left, last: right};

  g.lineWidth = 1;
  g.fillStyle = color("--soft");
  g.strokeStyle = color("--grid");
  g.textAlign = "right";
  g.textBaseline = "middle";
  rows.forEach((t, i) => {
    line(g, box.left, Y(t), box.right, Y(t));
    g.fillText(labels[i], box.left - 5, Y(t));
  });
  g.textAlign = "center";
  g.textBaseline = "top";
  for (const t of ticks(left, right, Math.max(3, width / 85)))
    if (X(t) < box.right - 8) g.fillText(short(t), Math.max(X(t), box.left + 4), box.bottom + 5);
  for (const [k, v, text] of guides(chart)) {
    if (Y(v) < box.top || Y(v) > box.bottom) continue;
    g.setLineDash([6, 4]);
    g.strokeStyle = color(`--run${k}`);
    line(g, box.left, Y(v), box.right, Y(v));
    g.setLineDash([]);
    g.textAlign = "right";
    g.fillStyle = color(`--run${k}`);
    g.fillText(text, box.right - 2, Y(v) + 2);
  }
  g.save();
  g.beginPath();
  g.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  g.clip();
  runs.forEach((run, k) =>
    run.marks.forEach(mark => {
      const x = X(along(run)(mark.at));
      g.strokeStyle = color(`--run${k}`);
      g.globalAlpha = 0.6;
      g.setLineDash([2, 3]);
      line(g, x, box.top, x, box.bottom);
      g.setLineDash([]);
      g.globalAlpha = 1;
    }),
  );
  for (const {k, n, curve, held, x} of lines) {
    const ink = color(`--run${k}`),
      fits = v => v !== null && v !== undefined && !(view.logarithmic && v <= 0);
    g.strokeStyle = g.fillStyle = ink;
    if (curve.low && !held) {
      g.globalAlpha = 0.22;
      for (let i = 0; i < x.length; i++) {
        if (!fits(curve.low[i]) || !fits(curve.high[i])) continue;
        const a = X(x[i - 1] ?? x[i]),
          b = X(x[i]);
        g.fillRect(a, Y(curve.high[i]) - 0.5, Math.max(1, b - a + 0.3), Y(curve.low[i]) - Y(curve.high[i]) + 1);
      }
      g.globalAlpha = 1;
    }
    g.lineWidth = n === 1 && !held ? 1 : 1.7;
    if (held) g.setLineDash([5, 3]);
    g.beginPath();
    let pen = false;
    curve.mean.forEach((v, i) => {
      if (!fits(v)) {
        pen = false;
        return;
      }
      pen ? g.lineTo(X(x[i]), Y(v)) : g.moveTo(X(x[i]), Y(v));
      pen = true;
    });
    g.stroke();
    g.setLineDash([]);
    if (held || x.length < 40)
      curve.mean.forEach((v, i) => {
        if (fits(v) && (held ? x.length < 80 : true)) {
          g.beginPath();
          g.arc(X(x[i]), Y(v), held ? 2.6 : 1.8, 0, 7);
          g.fill();
        }
      });
    const i =
      view.cursor === null ? curve.at.length - 1 : Math.min(lowest(curve.at, view.cursor), curve.at.length - 1);
    lasts.push([k, held, n, curve.mean[i], x[i], curve.at[i], curve.low?.[i], curve.high?.[i]]);
    if (view.cursor !== null && fits(curve.mean[i])) {
      g.beginPath();
      g.arc(X(x[i]), Y(curve.mean[i]), 3.2, 0, 7);
      g.fill();
    }
  }
  if (view.cursor !== null) {
    const x = X(along(runs[0])(view.cursor));
    g.strokeStyle = color("--soft");
    g.lineWidth = 1;
    line(g, x, box.top, x, box.bottom);
  }
  if (chart.drag) {
    g.fillStyle = color("--run0");
    g.globalAlpha = 0.15;
    g.fillRect(Math.min(...chart.drag), box.top, Math.abs(chart.drag[1] - chart.drag[0]), box.bottom - box.top);
    g.globalAlpha = 1;
  }
  g.restore();
  const words = lasts
    .filter(([, , n, v]) => v !== null && (n !== 1 || chart.curves.length < 3 || !KNOWN[chart.name]?.also))
    .map(([k, held, , v]) => [k, (held ? "validation " : "") + chart.write(v)]);
  chart.values.replaceChildren(
    ...words.flatMap(([k, text]) => [
      make("span", {className: "value", style: `color: var(--run${k})`, textContent: text}),
      " ",
    ]),
  );
  chart.lasts = lasts;
  chart.canvas.setAttribute(
    "aria-label",
    `${chart.title}: ${words.map(([k, text]) => `${runs[k].name} ${text}`).join(", ")} at step ${view.cursor ?? runs[0].iteration}; from ${chart.write(low)} to ${chart.write(high)}`,
  );
}
function line(g, x0, y0, x1, y1) {
  g.beginPath();
  g.moveTo(x0, y0);
  g.lineTo(x1, y1);
  g.stroke();
}

// ------------------------------------------------------------------------------------------------ mouse and keys

function stepAt(chart, px) {
  const {left, right, first, last} = chart.box,
    x = first + ((px - left) / (right - left)) * (last - first);
  if (view.axis === "step") return Math.round(x);
  const place = along(runs[0]);
  let a = 0,
    b = Math.max(...runs.map(run => run.iteration));
  while (a < b) {
    const mid = (a + b) >> 1;
    if (place(mid) < x) a = mid + 1;
    else b = mid;
  }
  return a;
}
function cursor(step, chart, event) {
  view.cursor = step === null ? null : Math.max(0, Math.min(step, Math.max(...runs.map(run => run.iteration))));
  redraw();
  if (!chart || step === null) {
    at("tip").hidden = true;
    return;
  }
  requestAnimationFrame(() => {
    const told = (chart.lasts ?? []).map(
      ([k, held, , v, , step, low, high]) =>
        `${runs.length > 1 ? runs[k].name + " " : ""}${held ? "validation " : ""}step ${count(step)}: ${chart.write(v)}` +
        (low != null && low !== high ? `  (${chart.write(low)} to ${chart.write(high)})` : ""),
    );
    tip([chart.title, ...told].join("\n"), event);
  });
}
function tip(text, event) {
  const box = at("tip");
  box.textContent = text;
  box.hidden = !text;
  const x = event?.clientX ?? innerWidth / 2,
    y = event?.clientY ?? 80;
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
  canvas.addEventListener("pointerleave", () => {
    chart.drag = null;
    cursor(null);
  });
  canvas.addEventListener("pointerdown", event => {
    if (event.pointerType === "mouse" && event.button === 0) {
      chart.drag = [event.offsetX, event.offsetX];
      canvas.setPointerCapture(event.pointerId);
    }
  });
  canvas.addEventListener("pointerup", () => {
    const drag = chart.drag;
    chart.drag = null;
    if (drag && Math.abs(drag[1] - drag[0]) > 6) look(...drag.map(px => stepAt(chart, px)).sort((a, b) => a - b));
  });
  canvas.addEventListener("dblclick", () => look(0, Infinity));
  canvas.addEventListener("blur", () => cursor(null));
  canvas.addEventListener("keydown", event => {
    const span = (view.end || Math.max(...runs.map(run => run.iteration)) + 1) - view.first,
      jump = Math.max(1, Math.round(span / (event.shiftKey ? 10 : 100)));
    const box = canvas.getBoundingClientRect(),
      where = {clientX: box.left + 60, clientY: box.bottom - 10};
    if (event.key === "ArrowLeft") cursor((view.cursor ?? view.first + span - 1) - jump, chart, where);
    else if (event.key === "ArrowRight") cursor((view.cursor ?? view.first) + jump, chart, where);
    else if (event.key === "Enter") enlarge(chart);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}
function next(select) {
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  select.dispatchEvent(new Event("change"));
}
function zoom(factor, shift) {
  const last = Math.max(...runs.map(run => run.iteration)) + 1,
    end = view.end || last,
    span = end - view.first;
  const mid = (view.first + end) / 2 + shift * span,
    half = Math.max(4, span * factor) / 2;
  const first = Math.max(0, Math.min(mid - half, last - 2 * half));
  look(first, first + 2 * half);
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
  const keys = {
    s: () => next(at("smooth")),
    x: () => next(at("axis")),
    l: () => at("logarithmic").click(),
    d: () => at("theme").click(),
    "?": () => at("help").click(),
    "+": () => zoom(0.5, 0),
    "=": () => zoom(0.5, 0),
    "-": () => zoom(2, 0),
    ArrowLeft: () => zoom(1, -0.25),
    ArrowRight: () => zoom(1, 0.25),
    Escape: () => look(0, Infinity),
  };
  if (!keys[event.key] || (event.target.id === "log" && event.key.startsWith("Arrow"))) return;
  keys[event.key]();
  event.preventDefault();
});
at("smooth").addEventListener("change", () => {
  view.smooth = +at("smooth").value;
  update();
});
at("axis").addEventListener("change", () => {
  view.axis = at("axis").value;
  redraw();
});
at("logarithmic").addEventListener("change", () => {
  view.logarithmic = at("logarithmic").checked;
  redraw();
});
at("whole").addEventListener("click", () => look(0, Infinity));
at("layer-kind").addEventListener("change", () => {
  drawn.layers = null;
  layers();
});
at("help").addEventListener("click", () => {
  at("keys").hidden = !at("keys").hidden;
  at("help").setAttribute("aria-expanded", String(!at("keys").hidden));
});
function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  at("theme").textContent = dark ? "light" : "dark";
  for (const key of Object.keys(drawn)) drawn[key] = null;
  if (runs.length && runs[0].read) show();
}
at("theme").addEventListener("click", () => {
  const dark = !document.documentElement.classList.contains("dark");
  try {
    localStorage.setItem("theme", dark ? "dark" : "light");
  } catch {
    /* a browser that keeps nothing */
  }
  theme(dark);
});
addEventListener("resize", () => {
  for (const key of Object.keys(drawn)) drawn[key] = null;
  if (runs.length && runs[0].read) show();
});

// A panel below the curves is drawn anew only when what it shows has changed.
const drawn = {planned: null, layers: null, timeline: null, experts: null, lines: null, config: null};
function changed(panel, ...what) {
  const key = JSON.stringify(what);
  if (drawn[panel] === key) return false;
  drawn[panel] = key;
  return true;
}
const titled = (run, k, ...nodes) =>
  make("div", {}, ...(runs.length > 1 ? [make("h3", {}, chip(k), " " + run.name)] : []), ...nodes);
