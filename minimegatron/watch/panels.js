"use strict";
// What is below the curves: the planner's figures, layers and experts, a step rank by rank, the log, the configuration.
// A panel is drawn anew only when what it shows has changed (`changed` in curves.js). Last, the page begins.

// ------------------------------------------------------------------------------------------------ the planner's figures

const OWNERS = ["parameters", "main parameters", "gradients", "moments", "communication", "activations", "workspace"];
const ownerColor = owner => `var(--c${(OWNERS.indexOf(owner.replace(" (host)", "")) + 8) % 8})`;
const total = owners => Object.values(owners).reduce((a, b) => a + b, 0);

function planned() {
  if (
    !changed(
      "planned",
      runs.map(run => [
        run.predicted,
        run.latest.memory,
        run.latest.train?.memory_by_owner,
        short(run.latest.train?.elapsed_ms),
        bytes(run.latest.train?.peak_memory_bytes),
      ]),
    )
  )
    return;
  at("planned").replaceChildren(
    ...runs.map((run, k) => {
      const nodes = [],
        told = run.predicted,
        train = run.latest.train;
      if (told?.pending) nodes.push(hint("The planner is computing what this run should take."));
      if (told?.error) nodes.push(hint(`No prediction: ${told.error}`));
      const rows = [];
      if (told?.time && train)
        rows.push(
          [
            "step time",
            seconds(told.time.seconds),
            seconds(train.elapsed_ms / 1000),
            (train.elapsed_ms / 1000 / told.time.seconds).toFixed(2) + " x",
          ],
          [
            "TFLOP/s a rank",
            short(told.time.tflops),
            short(train.tflops_per_gpu),
            (train.tflops_per_gpu / told.time.tflops).toFixed(2) + " x",
          ],
        );
      if (rows.length)
        nodes.push(
          make(
            "table",
            {},
            make(
              "tr",
              {},
              ...["", `predicted (${told.time.cluster})`, "measured", "measured / predicted"].map(t =>
                make("th", {textContent: t}),
              ),
            ),
            ...rows.map(row => make("tr", {}, ...row.map(t => make("td", {textContent: t})))),
          ),
        );
      if (told?.why) nodes.push(hint(`Step time is not predicted: ${told.why}`));
      const bars = [];
      for (const [rank, memory] of Object.entries(told?.memory ?? {})) {
        bars.push([
          `rank ${rank} predicted`,
          memory.peak,
          memory.unknown.length ? `without ${memory.unknown.join(", ")}` : `fullest in ${memory.where}`,
        ]);
        const counted = run.latest.memory?.rows ?? [],
          i = counted.findIndex(row => row[0] === `rank ${rank} predicted`);
        if (i >= 0)
          bars.push([
            "counted",
            counted[i + 1][1],
            `step ${run.latest.memory.iteration}, fullest in ${counted[i + 1][3]}`,
          ]);
        else if (train?.memory_by_owner && rank === "0")
          bars.push(["between steps, measured", train.memory_by_owner, "what lasts from step to step"]);
      }
      const most = Math.max(1, ...bars.map(([, owners]) => total(owners)));
      if (bars.length) {
        nodes.push(
          make("h3", {textContent: "memory by owner, at the fullest moment of a step"}),
          make(
            "div",
            {className: "bars"},
            ...bars.flatMap(([label, owners, title]) => [
              make("span", {textContent: label}),
              make(
                "div",
                {
                  className: "bar",
                  title,
                  role: "img",
                  "aria-label": `${label}: ${Object.entries(owners)
                    .map(([o, n]) => `${o} ${bytes(n)}`)
                    .join(", ")}`,
                },
                ...OWNERS.concat(Object.keys(owners).filter(o => !OWNERS.includes(o)))
                  .filter(o => owners[o])
                  .map(owner =>
                    make("span", {
                      style: `width: ${(100 * owners[owner]) / most}%; background: ${ownerColor(owner)}`,
                      title: `${owner} ${bytes(owners[owner])}`,
                    }),
                  ),
              ),
              make("span", {className: "sum", textContent: bytes(total(owners)), title}),
            ]),
          ),
        );
        const owners = [...new Set(bars.flatMap(([, o]) => Object.keys(o).filter(name => o[name])))];
        nodes.push(
          make(
            "div",
            {className: "legend"},
            ...owners.map(owner =>
              make(
                "span",
                {},
                make("span", {className: "chip", style: `background: ${ownerColor(owner)}`}),
                ` ${owner}`,
              ),
            ),
          ),
        );
        if (!run.latest.memory) nodes.push(hint("Counted beside it, with", "--log-memory-interval N"));
      }
      if (train && !nodes.length) nodes.push(hint("Nothing is predicted (--no-plan)."));
      if (train)
        nodes.push(
          hint(
            `Rank 0 has held ${bytes(train.peak_memory_bytes)} at most: ${run.machine?.device === "cuda" ? "allocated on its GPU" : "the whole process on a CPU, with the interpreter and torch"}.`,
          ),
        );
      return titled(run, k, ...nodes);
    }),
  );
}

// ------------------------------------------------------------------------------------------------ layers, experts

const RAMP = [
  [68, 1, 84],
  [59, 82, 139],
  [33, 145, 140],
  [94, 201, 98],
  [253, 231, 37],
]; // viridis, five of its colours
function shade(part) {
  const x = Math.max(0, Math.min(1, part)) * (RAMP.length - 1),
    i = Math.min(RAMP.length - 2, Math.floor(x));
  return `rgb(${RAMP[i].map((c, j) => Math.round(c + (x - i) * (RAMP[i + 1][j] - c))).join()})`;
}
// rows [{name, cells: [{x0, x1, value}]}] with x in [0, 1]; colours follow the logarithm if `logs`
function heat(rows, write, logs, tell) {
  const height = Math.max(10, Math.min(18, 420 / rows.length)),
    canvas = make("canvas", {role: "img", style: `height: ${height * rows.length + 22}px`});
  const values = rows
    .flatMap(row => row.cells.map(cell => cell.value))
    .filter(v => v !== null && isFinite(v) && (!logs || v > 0));
  const scale = logs ? Math.log10 : v => v,
    low = scale(Math.min(...values)),
    high = scale(Math.max(...values));
  requestAnimationFrame(() => {
    const {g, width} = paper(canvas),
      left = Math.min(190, width * 0.34);
    g.textBaseline = "middle";
    rows.forEach((row, r) => {
      g.fillStyle = color("--soft");
      g.textAlign = "right";
      if (height >= 10)
        g.fillText(row.name.replace(/^(decoder|embedding)\./, "").slice(-30), left - 6, (r + 0.5) * height);
      for (const {x0, x1, value} of row.cells) {
        if (value === null || (logs && value <= 0)) continue;
        g.fillStyle = shade(high > low ? (scale(value) - low) / (high - low) : 0.5);
        g.fillRect(left + x0 * (width - left), r * height, Math.max(1, (x1 - x0) * (width - left) + 0.4), height - 1);
      }
    });
    for (let i = 0; i < 100; i++) {
      g.fillStyle = shade(i / 99);
      g.fillRect(left + i, height * rows.length + 8, 1.5, 9);
    }
    g.fillStyle = color("--soft");
    g.textAlign = "right";
    g.fillText(write(Math.min(...values)), left - 6, height * rows.length + 13);
    g.textAlign = "left";
    g.fillText(write(Math.max(...values)), left + 106, height * rows.length + 13);
    canvas.onpointermove = event => {
      const row = rows[Math.floor(event.offsetY / height)],
        x = (event.offsetX - left) / (width - left);
      const cell = row?.cells.find(c => c.x0 <= x && x < c.x1);
      tip(cell ? `${row.name}\n${tell(cell)}: ${write(cell.value)}` : "", event);
    };
    canvas.onpointerleave = () => tip("");
  });
  return canvas;
}

function layers() {
  const kind = at("layer-kind").value;
  if (
    !changed(
      "layers",
      kind,
      view.first,
      view.end,
      runs.map(run => [run.generation, run.layers]),
    )
  )
    return;
  const query = `first=${view.first}&end=${view.end}`;
  Promise.all(
    runs.map((run, k) =>
      run.layers ? fetch(`api/run/${k}/layers/${kind}?${query}`).then(answer => answer.json()) : {},
    ),
  )
    .then(found => at("layers").replaceChildren(...runs.map((run, k) => titled(run, k, ...layersOf(found[k], kind)))))
    .catch(() => {
      drawn.layers = null;
    });
}
function layersOf(found, kind) {
  const names = Object.keys(found).filter(name => found[name].at.length);
  if (!names.length) return [hint("Norms by layer are in logs of runs with", "--log-norms-interval N")];
  const steps = found[names[0]].at,
    begin = steps[0] - (steps[1] - steps[0] || 1),
    last = steps.at(-1);
  const rows = names.map(name => ({
    name,
    cells: found[name].at.map((step, i, all) => ({
      x0: ((i ? all[i - 1] : begin) - begin) / (last - begin),
      x1: (step - begin) / (last - begin),
      value: found[name].mean[i],
      step,
    })),
  }));
  const canvas = heat(rows, short, true, cell => `step ${count(cell.step)}`);
  canvas.setAttribute(
    "aria-label",
    `${kind} by layer: ` + rows.map(row => `${row.name} ${short(row.cells.at(-1).value)}`).join(", "),
  );
  return [
    make("p", {
      className: "note",
      textContent: `steps ${count(steps[0])} to ${count(last)}; a colour is a norm, on a logarithmic scale`,
    }),
    make("div", {className: "card"}, canvas),
  ];
}

function experts() {
  const loads = runs.map(run => (run.latest.train?.experts ?? []).filter(layer => layer.tokens?.length));
  at("s-experts").hidden = !loads.some(l => l.length);
  if (at("s-experts").hidden || !changed("experts", loads)) return;
  at("experts").replaceChildren(
    ...runs.map((run, k) => {
      const rows = loads[k].map(layer => {
        const mean = layer.tokens.reduce((a, b) => a + b, 0) / layer.tokens.length || 1,
          n = layer.tokens.length;
        return {
          name: `layer ${layer.layer}`,
          cells: layer.tokens.map((tokens, e) => ({x0: e / n, x1: (e + 1) / n, value: tokens / mean, expert: e})),
        };
      });
      if (!rows.length) return titled(run, k, hint("no experts"));
      return titled(
        run,
        k,
        make("p", {
          className: "note",
          textContent: `tokens of each expert in step ${count(run.iteration)}, over the mean of its layer`,
        }),
        make(
          "div",
          {className: "card"},
          heat(
            rows,
            v => short(v) + " x",
            false,
            cell => `expert ${cell.expert}`,
          ),
        ),
      );
    }),
  );
}

// ------------------------------------------------------------------------------------------------ a step, rank by rank

const passColor = name =>
  ({forward: "--c0", F: "--c0", backward: "--c2", B: "--c2", W: "--c6", optimizer_step: "--c1"})[name] ?? "--c5";

function timelines() {
  runs.forEach((run, k) => {
    if (run.timeline !== null && run.timeline !== run.timelineAt && !run.fetching) {
      run.fetching = true;
      fetch(`api/run/${k}/timeline`)
        .then(answer => answer.json())
        .then(found => {
          run.steps = found;
          run.timelineAt = found.iteration;
          drawn.timeline = null;
          timelines();
        })
        .catch(() => null)
        .finally(() => {
          run.fetching = false;
        });
    }
  });
  if (
    !changed(
      "timeline",
      runs.map(run => [run.timelineAt, run.latest.stragglers]),
    )
  )
    return;
  const flag = ["--log-timeline-interval N"];
  at("timeline").replaceChildren(
    ...runs.map((run, k) =>
      titled(
        run,
        k,
        ...(run.steps?.ranks ? pictured(run.steps) : [hint("A timeline is in logs of runs with", ...flag)]),
      ),
    ),
  );
  at("ranks").replaceChildren(...runs.map((run, k) => titled(run, k, ...skew(run))));
}

function outer(events) {
  // [computing events that are in no other], by start
  let covered = -Infinity;
  return events
    .filter(e => e[1] === "compute")
    .sort((a, b) => a[2] - b[2] || b[3] - a[3])
    .filter(e => {
      const end = e[2] + e[3];
      if (end <= covered) return false;
      covered = end;
      return true;
    });
}

function covered(events) {
  // seconds in which at least one of the events was going on
  let sum = 0,
    until = -Infinity;
  for (const [, , start, length] of events.sort((a, b) => a[2] - b[2])) {
    sum += Math.max(0, start + length - Math.max(start, until));
    until = Math.max(until, start + length);
  }
  return sum;
}

function pictured(step) {
  const ranks = step.ranks,
    lane = ranks.length > 32 ? 10 : ranks.length > 8 ? 16 : 26,
    end = Math.max(1e-9, ...ranks.map(r => Math.max(0, ...r.map(e => e[2] + e[3]))));
  const canvas = make("canvas", {
    role: "img",
    style: `height: ${lane * ranks.length + 20}px`,
    "aria-label": `timeline of step ${step.iteration} on ${ranks.length} ranks, ${seconds(end)}`,
  });
  requestAnimationFrame(() => {
    const {g, width} = paper(canvas),
      left = 52,
      X = t => left + (t / end) * (width - left - 4);
    g.textBaseline = "middle";
    ranks.forEach((events, r) => {
      const y = r * lane,
        box = (e, top, height, ink, alpha = 1) => {
          g.globalAlpha = alpha;
          g.fillStyle = ink;
          g.fillRect(X(e[2]), y + top, Math.max(0.6, X(e[2] + e[3]) - X(e[2]) - 0.3), height);
          g.globalAlpha = 1;
        };
      g.fillStyle = color("--soft");
      g.textAlign = "right";
      if (lane > 10 || r % 4 === 0) g.fillText(`rank ${r}`, left - 6, y + lane / 2);
      for (const e of outer(events)) box(e, 1, lane - 2, color(passColor(e[0])), 0.75);
      for (const e of events) if (e[1] === "wait") box(e, 1, lane - 2, color("--back"), 0.72);
      for (const e of events) if (e[1] === "comm") box(e, lane * 0.62, lane * 0.26, color("--c3"));
    });
    g.fillStyle = color("--soft");
    g.textAlign = "center";
    for (const t of ticks(0, end, width / 130))
      g.fillText(seconds(t), Math.min(X(t), width - 22), lane * ranks.length + 10);
    canvas.onpointermove = event => {
      const rank = Math.floor(event.offsetY / lane),
        t = ((event.offsetX - left) / (width - left - 4)) * end;
      const under = (ranks[rank] ?? [])
        .filter(e => e[2] <= t && t <= e[2] + e[3])
        .sort((a, b) => a[3] - b[3])
        .slice(0, 5);
      tip(
        under.length
          ? [
              `rank ${rank}, ${seconds(t)}`,
              ...under.map(e => `${e[0]}${e[4] ? " over " + e[4] : ""}: ${seconds(e[3])}`),
            ].join("\n")
          : "",
        event,
      );
    };
    canvas.onpointerleave = () => tip("");
  });
  const legend = [
    ["forward", "--c0"],
    ["backward", "--c2"],
    ["optimizer", "--c1"],
    ["message", "--c3"],
    ["pale: waiting", "--grid"],
  ];
  return [
    make("p", {
      className: "note",
      textContent: `step ${count(step.iteration)}, ${seconds(end)} from the first event to the last`,
    }),
    make("div", {className: "card"}, canvas),
    make(
      "div",
      {className: "legend"},
      ...legend.map(([name, ink]) =>
        make("span", {}, make("span", {className: "chip", style: `background: var(${ink})`}), ` ${name}`),
      ),
    ),
  ];
}

// How long each rank worked itself and how long it waited for others: who works longest and waits least is the slow one.
// `--log-straggler` writes means over steps, by section; without it the recorded step says it.
function skew(run) {
  const told = run.latest.stragglers;
  if (told) {
    const n = told.own_total_ms.length,
      rows = Object.entries(told.own_ms).filter(([, times]) => Math.max(...times) > 0.005 * told.step_ms);
    const cells = times => times.map((value, r) => ({x0: r / n, x1: (r + 1) / n, value, rank: r}));
    return [
      make("p", {
        className: "note",
        textContent: `mean of ${told.steps} steps up to ${count(told.iteration)}: own work of the slowest rank ${told.skew_ms.toFixed(1)} ms above the fastest, of ${told.step_ms.toFixed(1)} ms`,
      }),
      ...told.slow.map(one =>
        make("p", {
          className: "slow",
          textContent: `rank ${one.rank} on ${one.host} is slow in ${one.section}: ${one.excess_ms.toFixed(1)} ms a step more than its peers, ${one.when}`,
        }),
      ),
      bars(told.own_total_ms.map((own, r) => ({rank: r, own: own / 1000, waiting: told.wait_total_ms[r] / 1000}))),
      make("h3", {textContent: "own work by section and rank, ms"}),
      make(
        "div",
        {className: "card"},
        heat(
          rows.map(([name, times]) => ({name, cells: cells(times)})),
          short,
          false,
          cell => `rank ${cell.rank}`,
        ),
      ),
    ];
  }
  if (!run.steps?.ranks)
    return [
      hint(
        "How long each rank works and waits is in logs of runs with",
        "--log-straggler",
        "--log-timeline-interval N",
      ),
    ];
  if (run.steps.ranks.length < 2) return [hint("One rank waits for nobody.")];
  const ranks = run.steps.ranks.map((events, rank) => {
    const waits = events.filter(e => e[1] === "wait"),
      waiting = covered(waits);
    return {rank, waiting, own: covered([...outer(events), ...waits]) - waiting};
  });
  const median = ranks.map(r => r.own).sort((a, b) => a - b)[(ranks.length - 1) >> 1],
    slow = ranks.reduce((a, b) => (b.own > a.own ? b : a));
  return [
    make("p", {
      className: "note",
      textContent: `step ${count(run.steps.iteration)} alone: rank ${slow.rank} worked longest, ${seconds(slow.own)}, ${(slow.own / median).toFixed(2)} times the median`,
    }),
    bars(ranks),
    hint("Means over steps, by section, with", "--log-straggler"),
  ];
}
function bars(ranks) {
  const most = Math.max(...ranks.map(r => r.own + r.waiting));
  return make(
    "div",
    {className: ranks.length > 12 ? "bars dense" : "bars", title: "dark: own work, pale: waiting for others"},
    ...ranks.map(r =>
      make(
        "div",
        {className: "row"},
        make("span", {textContent: `rank ${r.rank}`}),
        make(
          "div",
          {className: "bar", role: "img", "aria-label": `own work ${seconds(r.own)}, waiting ${seconds(r.waiting)}`},
          make("span", {style: `width: ${(100 * r.own) / most}%; background: var(--c0)`}),
          make("span", {style: `width: ${(100 * r.waiting) / most}%; background: var(--c4); opacity: .35`}),
        ),
        make("span", {className: "sum", textContent: `${seconds(r.own)} + ${seconds(r.waiting)}`}),
      ),
    ),
  );
}

// ------------------------------------------------------------------------------------------------ text

function lines() {
  if (
    !changed(
      "lines",
      runs.map(run => [run.generation, run.seq]),
    )
  )
    return;
  const box = at("log"),
    below = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  const all = runs
    .flatMap((run, k) => run.lines.map(l => [l, k]))
    .sort((a, b) => (a[0].time ?? 0) - (b[0].time ?? 0) || a[0].seq - b[0].seq)
    .slice(-400);
  box.replaceChildren(
    ...all.map(([l, k]) =>
      make(
        "li",
        {className: l.kind},
        make("span", {}, ...(runs.length > 1 ? [chip(k), " "] : []), String(l.at)),
        make("span", {textContent: l.text}),
      ),
    ),
  );
  if (below) box.scrollTop = box.scrollHeight;
}

function configuration() {
  if (
    !changed(
      "config",
      runs.map(run => run.generation),
    )
  )
    return;
  Promise.all(runs.map((_, k) => fetch(`api/run/${k}/config`).then(answer => answer.json())))
    .then(configs => {
      const flat = configs.map(config => {
        const found = {};
        for (const [section, fields] of Object.entries(config))
          if (fields && typeof fields === "object" && !Array.isArray(fields))
            for (const [name, value] of Object.entries(fields)) found[`${section}.${name}`] = JSON.stringify(value);
        return found;
      });
      const names = [...new Set(flat.flatMap(Object.keys))],
        differ = names.filter(name => runs.length > 1 && flat[0][name] !== flat[1][name] && name !== "machine.time");
      const table = rows =>
        make(
          "div",
          {className: "scroll"},
          make(
            "table",
            {},
            make(
              "tr",
              {},
              make("th", {textContent: "field"}),
              ...runs.map((run, k) => make("th", {}, chip(k), " " + run.name)),
            ),
            ...rows.map(name =>
              make(
                "tr",
                {},
                make("td", {textContent: name}),
                ...flat.map(f => make("td", {textContent: f[name] ?? "–"})),
              ),
            ),
          ),
        );
      const nodes = [];
      if (runs.length > 1)
        nodes.push(
          make("h3", {textContent: differ.length ? "what differs" : "nothing differs"}),
          ...(differ.length ? [table(differ)] : []),
        );
      nodes.push(make("details", {}, make("summary", {textContent: `all ${names.length} fields`}), table(names)));
      at("config").replaceChildren(...nodes);
    })
    .catch(() => {
      drawn.config = null;
    });
}

// ------------------------------------------------------------------------------------------------ begin

(async () => {
  let kept = null;
  try {
    kept = localStorage.getItem("theme");
  } catch {
    /* a browser that keeps nothing */
  }
  theme(kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  try {
    const paths = await (await fetch("api/runs")).json();
    const parts = paths.map(path => path.split("/"));
    let depth = 1; // as much of each path as tells them apart
    const name = p => p.slice(-depth).join("/");
    if (/^(run|log)\.jsonl$/.test(parts[0].at(-1)) && parts[0].length > 1) depth = 2;
    while (parts.length > 1 && name(parts[0]) === name(parts[1]) && depth < 9) depth++;
    paths.forEach((path, k) => runs.push({name: name(parts[k]), path, curves: {}, lines: [], marks: [], latest: {}}));
    update();
  } catch {
    trouble("minimegatron watch has ended, or cannot be reached.");
  }
})();
