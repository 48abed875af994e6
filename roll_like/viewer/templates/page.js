"use strict";
// Shows what roll_like/viewer/page.py wrote into the page. Texts of a run go in by textContent only.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const made = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null));
  return node;
};
// `element("p.small.soft", { title: "…" }, "text")`: a tag with its classes, its other attributes, and its content
const element = (selector, attributes, ...children) => {
  const [tag, ...classes] = selector.split(".");
  return made(document.createElement(tag), { class: classes.join(" ") || null, ...attributes }, children);
};
const plain = (selector, ...children) => element(selector, {}, ...children);
const button = (label, onclick, attributes) => element("button", { type: "button", onclick, ...attributes }, label);
const toggle = (label, pressed, onclick, attributes) =>
  button(label, onclick, { "aria-pressed": String(pressed), ...attributes });
const fill = (id, ...children) => {
  byId(id).replaceChildren();
  made(byId(id), {}, children);
};
const svg = (tag, attributes, ...children) =>
  made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
// numbers that JSON has no form for are texts: NaN, Infinity, -Infinity
const number = (value) => (typeof value === "string" ? Number(value) : value);
const shown = (value, digits = 4) => {
  const found = number(value);
  return Number.isFinite(found) ? String(Number(found.toPrecision(digits))).replace("-", "−") : String(value);
};
const unique = (values) => [...new Set(values)].filter((one) => one !== null && one !== undefined && one !== "");
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const extent = (values) =>
  values
    .filter(Number.isFinite)
    .reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);

const hideTip = () => byId("tip")?.remove();
// a box of names and values beside a rectangle of the window
const showTip = (place, facts) => {
  hideTip();
  const tip = element(
    "div",
    { id: "tip", role: "tooltip" },
    plain(
      "dl",
      facts.map(([name, value]) => [plain("dt", name), plain("dd", value)]),
    ),
  );
  document.body.append(tip);
  const below = place.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(0, place.top - tip.offsetHeight - 6)}px`;
  tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
};

// ---- figures as text ---------------------------------------------------------------------------------

// at most seven characters
const brief = (value) => {
  const found = number(value),
    size = Math.abs(found);
  if (found === null || found === undefined) return "–";
  if (!Number.isFinite(found) || found === 0) return String(found === 0 ? 0 : found);
  const text =
    size >= 1e6 || size < 1e-4
      ? found.toExponential(1)
      : found.toFixed(size >= 1000 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 3 : 4);
  return text.replace("-", "−");
};
const duration = (seconds) => {
  const whole = Math.round(seconds),
    two = (value) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
};
const finite = (values) => values.map(number).filter(Number.isFinite);
const mean = (values) => {
  const found = finite(values);
  return found.length ? found.reduce((sum, one) => sum + one, 0) / found.length : values.length ? NaN : null;
};
// the lowest and the highest value, "" where they read the same
const range = (values) => {
  const [low, high] = extent(finite(values)).map(brief);
  return finite(values).length && low !== high ? `${low}–${high}` : "";
};
const meanAndRange = (values) => brief(mean(values)) + (range(values) ? ` (${range(values)})` : "");
const change = (ends) => {
  const both = ends.filter(([first, last]) => first !== null && last !== null);
  const difference = both.length ? mean(both.map(([first, last]) => number(last) - number(first))) : NaN;
  return Number.isFinite(difference) ? `${difference < 0 ? "−" : "+"}${brief(Math.abs(difference))}` : "";
};

// ---- curves ------------------------------------------------------------------------------------------

const NARROW = 460,
  WIDE = 940,
  LEFT = 50,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 22;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const colour = (index) => `var(--line-${index % 8})`;
const dash = (index) => DASHES[Math.floor(index / 8) % DASHES.length];
const ticks = (low, high, most, whole = false) => {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = Math.max(
    whole ? 1 : 0,
    [1, 2, 5, 10].map((one) => one * power).find((one) => (high - low) / one <= most),
  );
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * step; at += 1) found.push(at * step);
  return found;
};
// Limits of an axis; a series that has one value throughout is shown from 0, so that its size is seen.
const limits = (values) => {
  const [low, high] = extent(values);
  if (!(low <= high)) return [0, 1];
  if (high - low <= 1e-9 * Math.abs(high))
    return high === 0 ? [-0.05, 1] : [Math.min(0, 2 * high), Math.max(0, 2 * high)];
  const margin = 0.05 * (high - low);
  return [low - margin, high + margin];
};
const frame = (width, height, [x0, x1], [y0, y1]) => {
  const end = x1 > x0 ? x1 : x0 + 1,
    bottom = height - BOTTOM;
  const x = (step) => LEFT + ((step - x0 + (x1 > x0 ? 0 : 0.5)) / (end - x0)) * (width - LEFT - RIGHT);
  const y = (value) => bottom - ((value - y0) / (y1 - y0)) * (bottom - TOP);
  const axes = [
    ticks(y0, y1, 4).map((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 5, y: y(value) + 3.5, "text-anchor": "end" }, shown(value)),
    ]),
    ticks(x0, end, 5, true).map((step) =>
      svg("text", { x: x(step), y: bottom + 15, "text-anchor": "middle" }, shown(step, 9)),
    ),
    svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }),
  ];
  return { x, y, width, bottom, axes };
};
// a line that ends where a value is missing; a value between two such gets a mark
const path = ({ x, y }, steps, values) => {
  let text = "";
  const alone = [];
  values.forEach((value, at) => {
    if (value === null) return;
    const before = at > 0 && values[at - 1] !== null,
      after = at + 1 < values.length && values[at + 1] !== null;
    text += `${before ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    if (!before && !after) alone.push(at);
  });
  return [text, alone];
};
const nearest = (steps, wanted) => {
  let low = 0,
    high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle;
    else high = middle;
  }
  return Math.abs(steps[low] - wanted) <= Math.abs(steps[high] - wanted) ? low : high;
};
// shows what there is where the mouse points: facts(index of the nearest step of the longest line)
const pointed = (drawing, view, steps, facts) => {
  const rule = svg("line", { class: "rule", y1: TOP, y2: view.bottom, visibility: "hidden" });
  drawing.append(rule);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = nearest(steps.map(view.x), ((event.clientX - box.left) / box.width) * view.width);
    for (const end of ["x1", "x2"]) rule.setAttribute(end, view.x(steps[at]));
    rule.setAttribute("visibility", "visible");
    showTip({ left: event.clientX + 12, top: box.top, bottom: box.bottom }, facts(steps[at]));
  });
  drawing.addEventListener("pointerleave", () => {
    hideTip();
    rule.setAttribute("visibility", "hidden");
  });
};
const legend = (labels) =>
  plain(
    "div.legend",
    labels.map((label, index) =>
      plain(
        "span",
        svg(
          "svg",
          { viewBox: "0 0 20 6" },
          svg("line", {
            x1: 0,
            x2: 20,
            y1: 3,
            y2: 3,
            stroke: colour(index),
            "stroke-width": 3,
            "stroke-dasharray": dash(index),
          }),
        ),
        label,
      ),
    ),
  );
const figure = (panel, several, together) => {
  const lines = together && panel.mean ? [panel.mean] : panel.lines;
  const faint =
    together && panel.mean
      ? panel.lines
      : lines.filter((line) => line.faint && !several).map((line) => ({ x: line.faint[0], y: line.faint[1] }));
  const all = [...lines, ...faint];
  const marks = unique(panel.lines.flatMap((line) => line.lost));
  const xs = extent([...all.flatMap((line) => line.x), ...marks]);
  const values = all
    .flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])])
    .filter((one) => one !== null);
  const view = frame(NARROW, 230, xs, limits(values));
  const drawing = svg("svg", { viewBox: `0 0 ${NARROW} 230`, role: "img", "aria-label": panel.title }, view.axes);
  lines.forEach((line, index) => {
    if (line.low) {
      const edge = [
        ...line.x.map((step, at) => [step, line.high[at]]),
        ...line.x.map((step, at) => [step, line.low[at]]).reverse(),
      ];
      drawing.append(
        svg("polygon", {
          fill: colour(index),
          opacity: 0.18,
          points: edge.map(([step, value]) => `${view.x(step).toFixed(1)},${view.y(value).toFixed(1)}`).join(" "),
        }),
      );
    }
  });
  const draw = (line, index, attributes, marked) => {
    const [text, alone] = path(view, line.x, line.y);
    drawing.append(svg("path", { d: text, fill: "none", stroke: colour(index), ...attributes }));
    for (const at of marked ? line.y.keys() : alone) {
      if (line.y[at] !== null)
        drawing.append(svg("circle", { cx: view.x(line.x[at]), cy: view.y(line.y[at]), r: 2.5, fill: colour(index) }));
    }
  };
  faint.forEach((line, index) => draw(line, together ? 0 : index, { "stroke-width": 1, opacity: 0.4 }, false));
  lines.forEach((line, index) =>
    draw(line, index, { "stroke-width": 2, "stroke-dasharray": dash(index) }, panel.marked && line.x.length < 60),
  );
  for (const step of marks)
    drawing.append(
      svg(
        "text",
        { class: "lost", x: view.x(step), y: view.bottom - 2, "text-anchor": "middle" },
        "×",
        svg("title", {}, `step ${step}: not finite`),
      ),
    );
  for (const step of unique(panel.lines.flatMap((line) => line.idle))) {
    drawing.append(
      svg(
        "line",
        { class: "idle", x1: view.x(step), x2: view.x(step), y1: view.bottom - 7, y2: view.bottom },
        svg("title", {}, `step ${step}: no update`),
      ),
    );
  }
  if (values.length && values.every((value) => value === 0)) {
    drawing.append(svg("text", { x: NARROW / 2, y: 110, "text-anchor": "middle" }, "0 throughout"));
  }
  const longest = all.reduce((most, line) => (line.x.length > most.length ? line.x : most), []);
  if (longest.length) {
    pointed(drawing, view, longest, (step) => [
      ["step", shown(step, 9)],
      ...lines
        .filter((line) => line.x.length)
        .map((line) => {
          const at = nearest(line.x, step);
          const extra = line.low ? ` (${brief(line.low[at])}–${brief(line.high[at])})` : "";
          return [line.label, brief(line.y[at]) + extra];
        }),
    ]);
  }
  return plain(
    "figure",
    plain("h3", panel.title, panel.unit ? plain("span.soft.small", ` (${panel.unit})`) : null),
    drawing,
    plain(
      "figcaption",
      !several && lines.length > 1 ? legend(lines.map((line) => line.label)) : null,
      plain("code", unique(lines.map((line) => line.name)).join(", ")),
    ),
  );
};

// ---- overview ----------------------------------------------------------------------------------------

const overview = data.overview;
const runs = overview ? overview.runs : [];
const several = runs.length > 1;
let together = several && overview.together;
const head = (heads) =>
  plain("thead", plain("tr", ...heads.map(([text, kind]) => element("th", { class: kind }, text))));
const table = (heads, rows) => {
  const row = (cells) => plain("tr", ...cells.map((cell, index) => element("td", { class: heads[index][1] }, cell)));
  return plain("div.scroll", plain("table", head(heads), plain("tbody", rows.map(row))));
};
const code = (text) => plain("code", text);
const soft = (...content) => plain("p.soft.small", content);
const heading = (text) => plain("h2", text);
const status = (text) =>
  element("span", { class: `status ${["finished", "failed"].includes(text) ? text : ""}` }, text);
const endsOf = (name) => runs.map((run) => run.figures.before_after[name]).filter(Boolean);
const metric = (name) => overview.metrics[name];
const figuresOf = (key) => runs.map((run) => run.figures[key]).filter((one) => one !== null);
const count = (key) => runs.reduce((sum, run) => sum + run.figures[key], 0);

const facts = () => {
  const found = [
    several
      ? plural(runs.length, "run")
      : `${runs[0].figures.steps} of ${runs[0].figures.total_steps} steps in ${duration(runs[0].figures.seconds)}`,
  ];
  for (const [unit, key] of [
    ["samples", "samples_per_second"],
    ["tokens", "tokens_per_second"],
  ]) {
    if (figuresOf(key).some(Boolean)) found.push(`${meanAndRange(figuresOf(key))} ${unit}/s`);
  }
  if (count("steps_without_update")) found.push(`${plural(count("steps_without_update"), "step")} without an update`);
  return [...found, plural(count("warnings"), "warning")].join(" · ");
};
const runsTable = () =>
  table(
    [
      ["run", ""],
      ["seed", "number"],
      ["pipeline", ""],
      ["status", ""],
      ["steps", ""],
      ["best evaluation", "number"],
      ...overview.headlines.slice(0, 4).map((name) => [metric(name).label, "number"]),
      ["failures", "number"],
      ["warnings", "number"],
    ],
    runs.map((run) => [
      run.label,
      run.seed,
      code(run.figures.pipeline),
      run.status,
      `${run.figures.steps} of ${run.figures.total_steps} in ${duration(run.figures.seconds)}`,
      brief(run.figures.eval_best) + (run.figures.eval_best_step === 0 ? " (before training)" : ""),
      ...overview.headlines.slice(0, 4).map((name) => brief((run.figures.before_after[name] ?? [null, null])[1])),
      String(run.figures.failures),
      String(run.figures.warnings),
    ]),
  );
const card = (name) => {
  const ends = endsOf(name),
    [before, after] = [0, 1].map((side) => ends.map((end) => end[side]).filter((one) => one !== null));
  const unit = metric(name).unit && metric(name).unit !== metric(name).label ? ` (${metric(name).unit})` : "";
  return element(
    "div.card",
    { title: metric(name).description },
    plain("div.soft.small", metric(name).label + unit),
    plain("b", `${brief(mean(before))} → ${brief(mean(after))}`),
    several
      ? plain("div.small.soft", `${range(before) || brief(mean(before))} → ${range(after) || brief(mean(after))}`)
      : null,
    plain("div.small.soft", `${change(ends)} `, code(name)),
  );
};
const metricsTable = () => {
  const names = Object.keys(overview.metrics).filter((name) => endsOf(name).length);
  const told = (name) => [code(name), metric(name).unit];
  if (several && !together) {
    return table(
      [["metric", ""], ["unit", ""], ...runs.map((run) => [run.label, "number"])],
      names.map((name) => [
        ...told(name),
        ...runs.map((run) => (run.figures.before_after[name] ?? []).map(brief).join(" → ") || "–"),
      ]),
    );
  }
  const side = (name, index) =>
    meanAndRange(
      endsOf(name)
        .map((end) => end[index])
        .filter((one) => one !== null),
    );
  return table(
    [
      ["metric", ""],
      ["unit", ""],
      ["before", "number"],
      ["after", "number"],
      ["change", "number"],
      ["", "soft small"],
    ],
    names.map((name) => [...told(name), side(name, 0), side(name, 1), change(endsOf(name)), metric(name).description]),
  );
};
const differing = () =>
  table(
    [["key", ""], ...runs.map((run) => [run.label, "text"])],
    Object.entries(overview.differing).map(([key, values]) => [code(key), ...values]),
  );
const answers = () =>
  overview.answers.map(([before, after, ...labels]) => {
    const rows = [before, after].map((key) => data.rollouts.find((one) => one.key === key));
    if (!rows.every(Boolean)) return null;
    const shared = rows[0].prompt === rows[1].prompt;
    return plain(
      "article.sample",
      plain("h3.soft.small", "Prompt"),
      plain("pre", rows[0].prompt),
      shared && rows[0].reference !== undefined
        ? plain("p.small", plain("span.soft", "Reference answer: "), code(asText(rows[0].reference)))
        : null,
      plain(
        "div.pair",
        rows.map((row, index) =>
          plain(
            "div",
            plain(
              "h3.small",
              `${labels[index]} `,
              element("a", { href: `#${row.key}` }, row.id),
              plain(
                "span.soft",
                ` · reward ${brief(row.reward)}${row.tokens === undefined ? "" : `, ${row.tokens} tokens`}` +
                  `${row.stop_reason ? `, ended by ${row.stop_reason}` : ""}${row.answer === undefined ? "" : `, read as ${asText(row.answer)}`}`,
              ),
            ),
            shared || !index ? null : [soft("another prompt:"), plain("pre", row.prompt)],
            plain("pre.answer", row.text || "(empty)"),
          ),
        ),
      ),
    );
  });
const drawOverview = () => {
  const figures = overview.panels.filter((panel) => panel.lines.some((line) => line.x.length));
  const mode = (name, value) =>
    toggle(name, together === value, () => {
      together = value;
      drawOverview();
    });
  fill(
    "overview",
    plain(
      "p",
      unique(runs.map((run) => run.status)).map((one) => [status(one), " "]),
      plain("span.soft", "pipeline "),
      unique(runs.map((run) => run.figures.pipeline)).map((one) => [code(one), " "]),
      plain("span.soft", `· ${facts()}`),
    ),
    overview.began ? soft(overview.began) : null,
    several
      ? [
          heading("Runs"),
          runsTable(),
          overview.panels.some((panel) => panel.mean)
            ? plain("div.row.small", "shown: ", mode("mean and range", true), mode("each run", false))
            : null,
        ]
      : null,
    heading("Before and after"),
    soft(
      "Training metrics: means of the first and of the last three steps. Evaluations: the one before training and the last one.",
    ),
    overview.headlines.length
      ? plain("div.cards", overview.headlines.map(card))
      : soft("Nothing was measured at the start and at the end."),
    plain(
      "details",
      plain(
        "summary",
        `All compared metrics (${
          Object.values(runs.map((run) => run.figures.before_after).reduce((all, one) => ({ ...all, ...one }), {}))
            .length
        })`,
      ),
      metricsTable(),
    ),
    heading("Curves"),
    several
      ? [
          legend(
            together
              ? ["mean over the steps that all runs have; band: from the lowest to the highest; thin: each run"]
              : runs.map((run) => run.label),
          ),
        ]
      : null,
    soft(`Rewards of six steps and more are smoothed${several ? "" : "; the thin line behind is each step"}.`),
    plain(
      "div.figures",
      figures.map((panel) => figure(panel, several, together)),
    ),
    overview.answers.length
      ? [
          heading("Answers before and after"),
          soft(`Evenly spread over the tasks, whatever their rewards${several ? `; of ${runs[0].label}` : ""}.`),
          answers(),
        ]
      : null,
  );
};

// ---- timeline, events, configuration -----------------------------------------------------------------

const timeline = (run) => {
  const layers = run.timeline;
  if (!layers.length) return null;
  const steps = layers[0].x,
    totals = steps.map((_, at) => layers.reduce((sum, layer) => sum + layer.y[at], 0));
  const high = 1.35 * [...totals].sort((a, b) => a - b)[Math.floor(0.9 * (totals.length - 1))] || 1;
  const half = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) / 2 : 0.5;
  const view = frame(WIDE, 260, [steps[0] - half, steps[steps.length - 1] + half], [0, high]);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDE} 260`, role: "img", "aria-label": "time of a step" }, view.axes);
  const under = steps.map(() => 0);
  for (const layer of layers) {
    const lower = [...under];
    let edge = "";
    steps.forEach((step, at) => {
      under[at] = Math.min(high, under[at] + layer.y[at]);
      edge += `${at ? "L" : "M"}${view.x(step - half).toFixed(1)} ${view.y(under[at]).toFixed(1)}H${view.x(step + half).toFixed(1)}`;
    });
    steps
      .map((step, at) => [step, lower[at]])
      .reverse()
      .forEach(([step, value]) => {
        edge += `L${view.x(step + half).toFixed(1)} ${view.y(value).toFixed(1)}H${view.x(step - half).toFixed(1)}`;
      });
    drawing.append(svg("path", { d: `${edge}Z`, fill: layer.colour }));
  }
  for (const event of run.events.filter((one) => Number.isFinite(one.step) && !["started", "end"].includes(one.kind))) {
    const at = view.x(Math.max(steps[0] - half, Math.min(event.step + 0.5, steps[steps.length - 1] + half)));
    drawing.append(
      svg(
        "line",
        { class: "event", x1: at, x2: at, y1: TOP, y2: view.bottom },
        svg("title", {}, `step ${event.step}: ${event.text}`),
      ),
    );
  }
  pointed(drawing, view, steps, (step) => {
    const at = nearest(steps, step);
    return [
      ["step", shown(step, 9)],
      ...layers.filter((layer) => layer.y[at]).map((layer) => [layer.label, `${brief(layer.y[at])} s`]),
      ["all", `${brief(totals[at])} s`],
    ];
  });
  return plain(
    "figure.wide",
    several ? plain("h3", run.label) : null,
    drawing,
    plain(
      "figcaption.legend",
      layers.map((layer) => plain("span", element("i", { style: `background: ${layer.colour}` }), layer.label)),
      "seconds; dashed: warnings and recoveries",
    ),
  );
};
const phases = () => {
  const timed = runs.filter((run) => run.figures.step_seconds > 0);
  const found = unique(timed.flatMap((run) => Object.keys(run.figures.time)))
    .map((name) => ({
      name,
      part: !metric(name).phase,
      share: mean(timed.map((run) => (run.figures.time[name] ?? 0) / run.figures.step_seconds)),
      seconds: mean(timed.map((run) => (run.figures.time[name] ?? 0) / run.figures.steps)),
    }))
    .filter((one) => one.share > 0)
    .sort((a, b) => a.part - b.part || b.share - a.share);
  if (!found.length) return null;
  return [
    heading("Time of a step"),
    soft(
      `Slowest first, as shares of a step of ${meanAndRange(
        timed.map((run) => run.figures.step_seconds / run.figures.steps),
      )} s on average. Phases may overlap; indented ones are parts of others.`,
    ),
    table(
      [
        ["phase", ""],
        ["mean", "number"],
        ["share", "number"],
        ["", ""],
        ["", "soft small"],
      ],
      found.map((one) => [
        `${one.part ? "\u2003" : ""}${metric(one.name).label}`,
        `${one.seconds.toFixed(2)} s`,
        `${(100 * one.share).toFixed(1)} %`,
        plain(
          "span.track.bar",
          element("span.bar", {
            style: `width: ${Math.min(100, 100 * one.share).toFixed(1)}%; background: ${metric(one.name).colour ?? "var(--soft)"}`,
          }),
        ),
        metric(one.name).description,
      ]),
    ),
  ];
};
const profile = (run, one) => {
  const row = 18,
    left = 190,
    high = row * one.lanes.length + 24,
    at = (seconds) => left + ((WIDE - left - 8) * seconds) / one.seconds;
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDE} ${high}`,
    role: "img",
    "aria-label": `what worked in step ${one.step}`,
  });
  const names = unique(one.lanes.flatMap((lane) => lane.spans.map((span) => span[2])));
  one.lanes.forEach((lane, number) => {
    const y = row * number + 2;
    drawing.append(svg("text", { x: left - 6, y: y + 11, "text-anchor": "end", "font-size": 11 }, lane.label));
    for (const [began, ended, name] of lane.spans)
      drawing.append(
        svg(
          "rect",
          {
            x: at(began).toFixed(1),
            y,
            width: Math.max(0.6, at(ended) - at(began)).toFixed(1),
            height: row - 4,
            fill: `hsl(${(names.indexOf(name) * 67 + 210) % 360} 45% 55%)`,
          },
          svg("title", {}, `${name}: ${brief(ended - began)} s, from ${brief(began)} s on`),
        ),
      );
  });
  for (const share of [0, 0.25, 0.5, 0.75, 1])
    drawing.append(
      svg(
        "text",
        { x: at(share * one.seconds), y: high - 6, "text-anchor": share === 1 ? "end" : "middle", "font-size": 11 },
        `${brief(share * one.seconds)} s`,
      ),
    );
  return [
    heading(`Step ${one.step} in detail${several ? `, ${run.label}` : ""}`),
    one.waits.length
      ? plain(
          "ul",
          one.waits.map((wait) => plain("li", wait)),
        )
      : soft("Neither the trainer nor the engines waited for longer than a hundredth of the step."),
    plain("figure.wide", drawing),
    soft("The whole trace: open ", code(`profile/${one.trace}`), " of the run in ui.perfetto.dev."),
  ];
};
const drawTimeline = () =>
  fill(
    "timeline",
    heading("Steps"),
    runs.map(timeline),
    phases(),
    runs.map((run) => run.profiles.map((one) => profile(run, one))),
    heading("Failures, recoveries and warnings"),
    Object.keys(overview.failures).length
      ? plain(
          "p",
          Object.entries(overview.failures)
            .map(([name, one]) => `${name}: ${one}`)
            .join("; "),
        )
      : null,
    runs.map((run) => [
      several ? plain("h3", run.label) : null,
      run.earlier ? soft(`${run.earlier} earlier ones are in `, code("events.jsonl"), ".") : null,
      run.events.length
        ? table(
            [
              ["kind", ""],
              ["step", "number"],
              ["after", "number"],
              ["", "text"],
            ],
            run.events.map((one) => [one.kind, String(one.step), one.after, one.text]),
          )
        : soft("None."),
    ]),
  );
const drawConfiguration = () =>
  fill(
    "configuration",
    heading("Configuration"),
    several
      ? Object.keys(overview.differing).length
        ? [soft("Keys that differ between these runs:"), differing()]
        : soft("No key differs but names and folders.")
      : null,
    overview.config
      ? element(
          "details",
          several ? {} : { open: "" },
          plain("summary", code("config.yaml"), `, resolved${several ? `, of ${runs[0].label}` : ""}`),
          plain("pre", overview.config),
        )
      : soft("The folder has no ", code("config.yaml"), "."),
    soft(
      Object.entries(overview.versions)
        .map(([name, one]) => `${name} ${one}`)
        .join(" · "),
    ),
  );

// ---- the parts of the page ---------------------------------------------------------------------------

const PARTS = [
  ["overview", overview],
  ["rollouts", data.rollouts.length],
  ["timeline", overview],
  ["configuration", overview],
]
  .filter(([, there]) => there)
  .map(([name]) => name);
const show = (part) => {
  for (const name of PARTS) {
    byId(name).hidden = name !== part;
    byId(`to-${name}`).setAttribute("aria-pressed", String(name === part));
  }
};
