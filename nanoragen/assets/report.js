"use strict";
// Draws what report.py put into #data. Every text goes in as text, colours come from the style sheet (so dark mode needs no redraw).
const data = JSON.parse(document.getElementById("data").textContent);
const DASH = { dash: "6 4" };
const REGIME = { "diverse": "var(--c2)", "template collapse": "var(--c1)", "compressed": "var(--c0)", "low-entropy collapse": "var(--c4)" };
const color = (n) => `var(--c${n % 6})`;
const mix = (share, hot, cold) => `color-mix(in oklab, ${hot} ${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%, ${cold})`;

function el(parent, tag, attributes = {}, text = null) {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function draw(parent, tag, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function canvas(box, height) { // an svg as wide as its box, told to screen readers by the section's title and sentences
  const key = box.closest("section").id;
  const width = Math.max(260, box.clientWidth);
  const labels = { role: "img", "aria-labelledby": `${key}-title`, "aria-describedby": `${key}-here` };
  return [draw(box, "svg", { viewBox: `0 0 ${width} ${height}`, height, ...labels }), width];
}

// ---- numbers -------------------------------------------------------------------------------------------------------

function show(v, percent = false) {
  if (v === null || v === undefined) return "\u2013";
  if (percent) return `${+(100 * v).toFixed(1)}%`;
  if (v !== 0 && (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3)) return v.toExponential(2);
  return String(+v.toPrecision(4));
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * power >= raw * 0.999) * power;
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(i * step);
  return out;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && v !== undefined) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low > high) return [0, 1];
  if (low === high) { const pad = Math.abs(low) / 10 || 1; return [low - pad, high + pad]; }
  return [low, high];
}

function room([low, high]) { const pad = (high - low) * 0.06; return [low - pad, high + pad]; }

// ---- parts of charts -------------------------------------------------------------------------------------------------

function frame(svg, width, height, xs, ys, spec, xticks, left = 48) {
  const right = width - 10, top = 26, bottom = height - 34;
  const x = (v) => left + ((v - xs[0]) / (xs[1] - xs[0])) * (right - left);
  const y = (v) => bottom - ((v - ys[0]) / (ys[1] - ys[0])) * (bottom - top);
  for (const t of ticks(ys[0], ys[1], 4)) {
    draw(svg, "line", { x1: left, x2: right, y1: y(t), y2: y(t), style: "stroke: var(--grid)" });
    draw(svg, "text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, show(t, spec.percent));
  }
  for (const [v, label] of xticks) {
    draw(svg, "line", { x1: x(v), x2: x(v), y1: bottom, y2: bottom + 4, style: "stroke: var(--line)" });
    draw(svg, "text", { x: x(v), y: bottom + 17, "text-anchor": "middle" }, label);
  }
  draw(svg, "line", { x1: left, x2: right, y1: bottom, y2: bottom, style: "stroke: var(--line)" });
  draw(svg, "text", { x: 0, y: 11 }, spec.y);
  draw(svg, "text", { x: right, y: height - 3, "text-anchor": "end" }, spec.xlabel ?? "step");
  return { x, y, left, right, top, bottom };
}

function steps(low, high, width) { // ticks of whole steps
  return ticks(low, high, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger).map((t) => [t, String(t)]);
}

function legend(box, entries) { // [name, colour, style]
  const list = el(box, "ul", { class: "legend" });
  for (const [name, paint, style] of entries) {
    const item = el(list, "li");
    const svg = draw(item, "svg", { viewBox: "0 0 26 12", "aria-hidden": "true" });
    if (style === "block") draw(svg, "rect", { x: 5, y: 0, width: 16, height: 12, style: `fill: ${paint}` });
    else if (style === "dots") draw(svg, "circle", { cx: 13, cy: 6, r: 5, style: `fill: ${paint}; stroke: var(--text)` });
    else draw(svg, "line", { x1: 0, x2: 26, y1: 6, y2: 6, "stroke-dasharray": DASH[style] || "none", style: `stroke: ${paint}; stroke-width: 2.5` });
    item.append(name);
  }
}

function tip(box, text, left, top) {
  let node = box.querySelector(".tip");
  if (text === null) return node && node.remove();
  node = node || el(box, "div", { class: "tip", "aria-hidden": "true" });
  node.textContent = text;
  const space = box.clientWidth - node.offsetWidth;
  node.style.left = `${Math.max(0, Math.min(space, left + 12))}px`;
  node.style.top = `${top}px`;
}

function numbers(box, head, rows) { // the chart as a table, filled when it is opened
  const details = el(box, "details");
  el(details, "summary", {}, "The numbers");
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const table = el(el(details, "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The numbers" }), "table");
    const add = (cells, tag) => { const row = el(table, "tr"); for (const c of cells) el(row, tag, {}, c); };
    add(head, "th");
    for (const row of rows()) add(row, "td");
  });
}

// ---- the charts ------------------------------------------------------------------------------------------------------

function lines(box, spec) {
  legend(box, spec.series.map((s) => [s.name, color(s.color), s.style]));
  const height = 260, [svg, width] = canvas(box, height);
  const all = [...new Set(spec.series.flatMap((s) => s.x))].sort((a, b) => a - b);
  let xs = extent(all), ys = spec.range;
  if (spec.labels) xs = [-0.3, spec.labels.length - 0.7];
  if (!ys) {
    ys = room(extent(spec.series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]).concat(spec.zero ? [0] : [])));
    if (spec.zero && ys[0] < 0 && !spec.series.some((s) => s.y.some((v) => v < 0))) ys[0] = 0;
  } else ys = [Math.min(ys[0], ...spec.series.flatMap((s) => s.y)), Math.max(ys[1], ...spec.series.flatMap((s) => s.y))];
  const xticks = spec.labels ? spec.labels.map((l, i) => [i, l]) : steps(xs[0], xs[1], width);
  const at = frame(svg, width, height, xs, ys, spec, xticks);
  const clamp = (v) => at.y(Math.min(ys[1], Math.max(ys[0], v)));
  for (const s of spec.series) if (s.low && s.style === "line") { // bands lie under all lines
    const have = s.x.map((_, i) => i).filter((i) => s.low[i] !== null && s.high[i] !== null);
    const edge = (list, key) => list.map((i) => `${at.x(s.x[i])},${clamp(s[key][i])}`).join(" ");
    draw(svg, "polygon", { points: `${edge(have, "high")} ${edge(have.reverse(), "low")}`, style: `fill: ${color(s.color)}; opacity: 0.16` });
  }
  for (const s of spec.series) {
    const paint = color(s.color);
    if (s.style === "dots") {
      s.x.forEach((x, i) => {
        if (s.y[i] === null) return;
        if (s.low && s.low[i] !== null && s.high[i] !== null)
          draw(svg, "line", { x1: at.x(x), x2: at.x(x), y1: clamp(s.low[i]), y2: clamp(s.high[i]), style: `stroke: ${paint}; stroke-width: 2` });
        draw(svg, "circle", { cx: at.x(x), cy: at.y(s.y[i]), r: s.x.length > 40 ? 2.5 : 5, style: `fill: ${paint}; stroke: var(--back); stroke-width: 1.5` });
      });
      continue;
    }
    let path = "", pen = false; // a null lifts the pen; a number between two of them is a dot
    s.x.forEach((x, i) => {
      if (s.y[i] === null) { pen = false; return; }
      path += `${pen ? "L" : "M"}${at.x(x).toFixed(1)} ${at.y(s.y[i]).toFixed(1)}`;
      if (!pen && (i + 1 === s.x.length || s.y[i + 1] === null)) draw(svg, "circle", { cx: at.x(x), cy: at.y(s.y[i]), r: 3, style: `fill: ${paint}` });
      pen = true;
    });
    draw(svg, "path", { d: path, fill: "none", "stroke-linejoin": "round", "stroke-dasharray": DASH[s.style] || "none", style: `stroke: ${paint}; stroke-width: 2` });
  }
  const rule = draw(svg, "line", { y1: at.top, y2: at.bottom, style: "stroke: var(--muted)", visibility: "hidden" });
  const table = spec.series.map((s) => new Map(s.x.map((x, i) => [x, i])));
  const label = (x) => (spec.labels ? spec.labels[x] : `step ${x}`);
  const value = (s, i) => show(s.y[i], spec.percent) + (s.low && s.low[i] !== null && s.high[i] !== null ? ` (${show(s.low[i], spec.percent)} to ${show(s.high[i], spec.percent)})` : "");
  hover(box, svg, width, (px) => {
    rule.setAttribute("visibility", px === null ? "hidden" : "visible");
    if (px === null) return tip(box, null);
    let near = all[0];
    for (const x of all) if (Math.abs(at.x(x) - px) < Math.abs(at.x(near) - px)) near = x;
    rule.setAttribute("x1", at.x(near));
    rule.setAttribute("x2", at.x(near));
    const found = spec.series.flatMap((s, n) => (table[n].has(near) ? [`${s.name}: ${value(s, table[n].get(near))}`] : []));
    tip(box, [label(near), ...found].join("\n"), at.x(near), svg.getBoundingClientRect().top - box.getBoundingClientRect().top + at.top);
  });
  numbers(box, [spec.xlabel || "step", ...spec.series.map((s) => s.name)], () =>
    all.map((x) => [spec.labels ? spec.labels[x] : x, ...spec.series.map((s, n) => (table[n].has(x) ? value(s, table[n].get(x)) : ""))]));
}

function hover(box, svg, width, move) { // move(x in the svg's units, the event), or move(null) when the pointer leaves
  const to = (e) => { const r = svg.getBoundingClientRect(); move(((e.clientX - r.left) / r.width) * width, e); };
  svg.addEventListener("pointermove", to);
  svg.addEventListener("pointerdown", to);
  svg.addEventListener("pointerleave", () => move(null));
}

function map(box, spec) {
  const several = spec.runs.length > 1;
  if (several) legend(box, spec.runs.map((r) => [r.name, color(r.color), "dots"]));
  const outer = Math.max(260, box.clientWidth), height = Math.min(460, Math.max(300, outer * 0.62)), [svg, width] = canvas(box, height);
  const range = (key) => room(extent([0, 1.15, ...spec.runs.flatMap((r) => r[key])]));
  const xs = range("x"), ys = range("y");
  const at = frame(svg, width, height, xs, ys, { y: spec.y, xlabel: spec.x }, ticks(xs[0], xs[1], 5).map((t) => [t, show(t)]));
  const [cx, cy] = [at.x(spec.low), at.y(spec.low)];
  const areas = [["compressed", at.left, cx, at.top, cy], ["diverse", cx, at.right, at.top, cy], ["low-entropy collapse", at.left, cx, cy, at.bottom], ["template collapse", cx, at.right, cy, at.bottom]];
  for (const [name, x1, x2, y1, y2] of areas) {
    draw(svg, "rect", { x: x1, y: y1, width: x2 - x1, height: y2 - y1, style: `fill: ${REGIME[name]}; opacity: 0.1` });
  }
  draw(svg, "path", { d: `M${cx} ${at.top}V${at.bottom}M${at.left} ${cy}H${at.right}`, style: "stroke: var(--muted)", "stroke-dasharray": "4 3", fill: "none" });
  const spots = [];
  for (const r of spec.runs) {
    const first = r.step[0], last = r.step[r.step.length - 1];
    draw(svg, "path", { d: "M" + r.x.map((x, i) => `${at.x(x).toFixed(1)} ${at.y(r.y[i]).toFixed(1)}`).join("L"), fill: "none", style: `stroke: ${several ? color(r.color) : "var(--muted)"}; opacity: 0.4` });
    r.x.forEach((x, i) => {
      const age = last > first ? (r.step[i] - first) / (last - first) : 1, end = i === 0 || i === r.x.length - 1;
      const fill = several ? mix(0.25 + 0.75 * age, color(r.color), "var(--back)") : mix(age, "var(--late)", "var(--early)");
      draw(svg, "circle", { cx: at.x(x), cy: at.y(r.y[i]), r: end ? 7 : r.x.length > 200 ? 2.5 : 4.5, style: `fill: ${fill}; stroke: ${end ? "var(--text)" : "var(--back)"}; stroke-width: ${end ? 1.5 : 0.7}` });
      spots.push([at.x(x), at.y(r.y[i]), `${several ? r.name + ", " : ""}step ${r.step[i]}: ${r.regime[i]}\n${spec.x} ${show(x)}\n${spec.y} ${show(r.y[i])}`]);
    });
  }
  for (const [name, x1, x2, y1] of areas) { // over the points
    const words = x2 - x1 < 150 ? name.split(" ") : [name];
    words.forEach((w, i) => draw(svg, "text", { x: x1 + 6, y: y1 + 17 + 14 * i, class: "strong", "pointer-events": "none" }, w));
  }
  hover(box, svg, width, (px, e) => {
    if (px === null) return tip(box, null);
    const r = svg.getBoundingClientRect(), py = ((e.clientY - r.top) / r.height) * height;
    const near = spots.reduce((a, b) => (Math.hypot(b[0] - px, b[1] - py) < Math.hypot(a[0] - px, a[1] - py) ? b : a));
    tip(box, near[2], near[0], r.top - box.getBoundingClientRect().top + near[1] + 12);
  });
  const spans = spec.runs.map((r) => [r.step[0], r.step[r.step.length - 1]]);
  el(box, "p", { class: "note" }, several ? "Colour: the run, stronger with time." : "Colour: time, from the first measurement to the last.");
  if (!several) {
    const bar = el(box, "div", { "aria-hidden": "true", style: "display: flex; gap: 0.5rem; align-items: center; font-size: 0.85rem" });
    el(bar, "span", {}, `step ${spans[0][0]}`);
    el(bar, "span", { style: "height: 10px; flex: 0 1 12rem; border-radius: 5px; background: linear-gradient(in oklab to right, var(--early), var(--late))" });
    el(bar, "span", {}, `${spans[0][1]}`);
  }
  strips(box, spec.strips);
  numbers(box, ["run", "step", spec.x, spec.y, "regime"], () => spec.runs.flatMap((r) => r.step.map((s, i) => [r.name, s, show(r.x[i]), show(r.y[i]), r.regime[i]])));
}

function strips(box, runs) { // the regimes over time, one bar a run
  el(box, "p", { class: "note", style: "margin-top: 0.8rem" }, "The regime over time:");
  legend(box, Object.entries(REGIME).map(([name, paint]) => [name, paint, "block"]));
  const low = Math.min(...runs.map((r) => r.spells[0][0])), high = Math.max(...runs.map((r) => r.spells[r.spells.length - 1][1]));
  const line = runs.length > 1 ? 40 : 24, height = runs.length * line + 22, [svg, width] = canvas(box, height);
  const x = (s) => 4 + ((s - low) / (high + 1 - low)) * (width - 8);
  runs.forEach((r, n) => {
    if (runs.length > 1) draw(svg, "text", { x: 4, y: n * line + 12, class: "strong" }, r.name);
    r.spells.forEach(([a, , name], i) => {
      const until = i + 1 < r.spells.length ? r.spells[i + 1][0] : r.spells[i][1] + 1;
      const wide = Math.max(1, x(until) - x(a)), edge = wide < 3 ? "none" : "var(--back)"; // an edge would cover a narrow one
      const bar = draw(svg, "rect", { x: x(a), y: n * line + line - 22, width: wide, height: 18, style: `fill: ${REGIME[name]}; stroke: ${edge}` });
      draw(bar, "title", {}, `${name}, from step ${a}`);
    });
  });
  for (const [t, label] of steps(low, high, width)) draw(svg, "text", { x: (x(t) + x(t + 1)) / 2, y: height - 4, "text-anchor": "middle" }, label);
}

function heat(box, spec) {
  const controls = el(box, "div", { class: "controls" });
  const pick = spec.runs.length > 1 ? choice(controls, "Run", spec.runs.map((r) => r.name)) : { value: 0 };
  const label = el(controls, "label", {}, "Step ");
  const slider = el(label, "input", { type: "range", min: 0, step: 1 });
  const name = el(controls, "output", {});
  const place = el(box, "div", { class: "chart" });
  const again = () => {
    const frames = spec.runs[pick.value].frames;
    slider.max = frames.length - 1;
    if (slider.dataset.run !== String(pick.value)) { slider.dataset.run = pick.value; slider.value = frames.length - 1; }
    const f = frames[slider.value], M = f.p.length, N = f.p[0].length;
    slider.setAttribute("aria-valuetext", `step ${f.step}`);
    name.textContent = `step ${f.step}` + (f.size[0] > M || f.size[1] > N ? `: ${M} by ${N} of ${f.size[0]} by ${f.size[1]}` : "");
    place.replaceChildren();
    const outer = Math.max(260, place.clientWidth), w = Math.min(56, (outer - 70) / N), h = Math.min(26, Math.max(11, w)), height = M * h + 40;
    const [svg] = canvas(place, height);
    draw(svg, "text", { x: 64, y: 11 }, "prompt");
    draw(svg, "text", { x: 0, y: 27 }, "reasoning");
    f.p.forEach((row, i) => row.forEach((p, j) => {
      const cell = draw(svg, "rect", { x: 64 + j * w, y: 34 + i * h, width: w - 1, height: h - 1, style: `fill: ${p === null ? "var(--line)" : mix(p, "var(--deep)", "var(--pale)")}` });
      draw(cell, "title", {}, `reasoning ${i + 1}, prompt ${j + 1}${f.own[i] === j ? " (its own)" : ""}: ${show(p, true)}`);
      if (w > 34 && p !== null) draw(svg, "text", { x: 64 + (j + 0.5) * w, y: 34 + (i + 0.5) * h + 4, "text-anchor": "middle", "pointer-events": "none", style: `fill: ${p > 0.5 ? "var(--back)" : "var(--text)"}` }, p.toFixed(2));
    }));
    f.own.forEach((j, i) => draw(svg, "rect", { x: 64 + j * w, y: 34 + i * h, width: w - 1, height: h - 1, fill: "none", "pointer-events": "none", style: "stroke: var(--c1); stroke-width: 2" }));
    for (let j = 0; j < N; j++) if (w > 18 || j % 4 === 0) draw(svg, "text", { x: 64 + (j + 0.5) * w, y: 27, "text-anchor": "middle" }, j + 1);
    for (let i = 0; i < M; i++) if (h > 14 || i % 2 === 0) draw(svg, "text", { x: 58, y: 34 + (i + 0.5) * h + 4, "text-anchor": "end" }, i + 1);
  };
  slider.addEventListener("input", again);
  if (pick.addEventListener) pick.addEventListener("change", again);
  again();
  numbers(box, ["run", "step", "reasoning", "its prompt", "probability of each prompt"], () => spec.runs.flatMap((r) => r.frames.flatMap((f) =>
    f.p.map((row, i) => [r.name, f.step, i + 1, f.own[i] + 1, row.map((p) => show(p)).join(", ")]))));
}

function bars(box, spec) {
  legend(box, spec.parts.map((p, n) => [p, color(n), "block"]));
  const height = 260, [svg, width] = canvas(box, height), count = spec.bars.length;
  const high = Math.max(1e-9, ...spec.bars.map(([, parts]) => parts.reduce((a, b) => a + b, 0)));
  const every = Math.ceil(count / Math.max(2, Math.floor(width / 110)));
  const at = frame(svg, width, height, [-0.5, count - 0.5], [0, high * 1.05], { y: spec.y, xlabel: spec.xlabel }, spec.bars.flatMap(([label], i) => (i % every ? [] : [[i, label]])));
  const wide = Math.min(70, ((at.right - at.left) / count) * 0.8);
  spec.bars.forEach(([label, parts], i) => {
    let sum = 0;
    const bar = draw(svg, "g");
    draw(bar, "title", {}, `${label}\n` + spec.parts.map((p, n) => `${p}: ${show(parts[n])} s`).join("\n"));
    parts.forEach((v, n) => {
      draw(bar, "rect", { x: at.x(i) - wide / 2, y: at.y(sum + v), width: wide, height: Math.max(0, at.y(sum) - at.y(sum + v)), style: `fill: ${color(n)}` });
      sum += v;
    });
  });
  numbers(box, ["step", ...spec.parts], () => spec.bars.map(([label, parts]) => [label, ...parts.map((v) => show(v))]));
}

// ---- the episodes ------------------------------------------------------------------------------------------------------

function choice(box, name, options) {
  const select = el(el(box, "label", {}, `${name} `), "select");
  fill(select, options);
  return select;
}

function fill(select, options) {
  select.replaceChildren();
  options.forEach((text, i) => el(select, "option", { value: i }, text));
}

const VALUES = { mask: "mask", logprobs: "log-prob", entropies: "entropy" };

function viewer(box) {
  const runs = data.runs.filter((r) => r.episodes.length);
  const controls = el(box, "div", { class: "controls" });
  const run = runs.length > 1 ? choice(controls, "Run", runs.map((r) => r.name)) : { value: 0 };
  const step = choice(controls, "Step", []), episode = choice(controls, "Episode", []);
  const back = el(controls, "button", { type: "button" }, "\u2190 previous"), next = el(controls, "button", { type: "button" }, "next \u2192");
  const paint = el(controls, "fieldset");
  const meaning = el(box, "p", { class: "note", id: "colours" });
  const place = el(box, "div", { "aria-live": "polite" });
  el(box, "p", { class: "note" }, "Keys: left and right change the episode, with Shift the step. Advantages are an episode's: each of its tokens has it, unless a turn names its own.");
  const all = () => runs[run.value].episodes;
  const groups = () => [...new Set(all().map((e) => e.step))];
  const here = () => all().filter((e) => e.step === groups()[step.value]);
  let colour = "mask";

  function list(at) {
    fill(episode, here().map((e, i) => `${i + 1}: group ${show(e.group)}, ${e.success ? "success" : "failure"}, reward ${show(e.reward)}`));
    episode.value = at < 0 ? here().length - 1 : at;
    render();
  }

  function restart() {
    fill(step, groups().map(String));
    step.value = groups().length - 1;
    list(0);
  }

  function move(by, steps) {
    const to = steps ? Infinity : Number(episode.value) + by;
    if (to >= 0 && to < here().length) { episode.value = to; return render(); }
    const other = Number(step.value) + by;
    if (other < 0 || other >= groups().length) return;
    step.value = other;
    list(by < 0 && !steps ? -1 : 0);
  }

  function render() {
    const e = here()[episode.value];
    back.disabled = Number(step.value) === 0 && Number(episode.value) === 0;
    next.disabled = Number(step.value) === groups().length - 1 && Number(episode.value) === here().length - 1;
    const values = e.values || [];
    paint.replaceChildren();
    if (values.length) el(paint, "legend", {}, "Colour by");
    for (const v of values.length ? ["mask", ...values] : []) {
      const label = el(paint, "label"), radio = el(label, "input", { type: "radio", name: "colour", value: v });
      label.append(` ${VALUES[v]}`);
      radio.checked = v === (values.includes(colour) ? colour : "mask");
      radio.addEventListener("change", () => { colour = v; render(); paint.querySelector(`[value=${v}]`).focus(); });
    }
    const by = values.includes(colour) ? colour : null;
    const peak = by === "entropies" ? Math.max(1e-9, ...e.parts.flatMap((p) => (p[3] ? p[3].entropies : []))) : 5; // 5 nats: p = 0.007
    const paintOf = (v) => mix(0.6 * Math.min(1, Math.abs(v) / peak), "var(--hot)", "transparent");
    meaning.replaceChildren();
    if (by) el(meaning, "span", { class: "scale" }).style.background = `linear-gradient(to right, ${paintOf(0)}, ${paintOf(peak)})`;
    meaning.append({
      logprobs: "No colour: the token was certain. Full colour: it had a chance of 0.7% or less (log-prob -5 nats or less). ",
      entropies: `No colour: only one token was possible. Full colour: ${show(peak)} nats, the widest choice of this episode. `,
      null: "Grey was read, blue is sampled reasoning, orange (dashed) the sampled answer.",
    }[by] + (by ? "Underlined: blue is reasoning, orange (dashed) the answer. A token shows its numbers under the pointer." : ""));
    place.replaceChildren();
    const facts = el(place, "ul", { class: "facts" });
    const end = e.truncated ? `cut off by ${e.truncated}` : e.terminated ? "ended by the environment" : "";
    for (const f of [`step ${e.step}`, e.success ? "\u2713 success" : "\u2715 no success", `reward ${show(e.reward)}`, `advantage ${show(e.advantage)}`, e.kept ? "group kept" : "group dropped: trains nothing", `group ${show(e.group)}, seed ${e.seed ?? "\u2013"}`, end])
      if (f) el(facts, "li", {}, f);
    const turns = Math.max(e.turns.length, ...e.parts.map((p) => p[0] + 1));
    for (let n = 0; n < turns; n++) {
      const t = e.turns[n], block = el(place, "div", { class: "turn" });
      const bad = t && !t.parsed ? ", does not parse" : "";
      el(block, "h3", {}, t ? `Turn ${n + 1}: ${t.actions.join(", ") || "no action"}${bad}; reward ${show(t.reward)}, advantage ${show(t.advantage ?? e.advantage)}` : "After the last reply");
      const text = el(block, "p", { class: by ? "text valued" : "text", dir: "auto" });
      for (const [turn, kind, words, more] of e.parts) {
        if (turn !== n) continue;
        if (kind === "prompt" && text.childNodes.length) text.append("\n");
        const span = el(text, "span", { class: kind }, more ? "" : words);
        if (more) words.forEach((w, i) => {
          const title = Object.entries(more).map(([k, v]) => `${VALUES[k]} ${show(v[i])}`).join(", ");
          const token = el(span, "span", { title }, w);
          const v = by ? more[by][i] : null;
          if (v !== null && v !== undefined) token.style.background = paintOf(v);
        });
        if (kind === "prompt") text.append("\n");
      }
    }
  }

  step.addEventListener("change", () => list(0));
  episode.addEventListener("change", render);
  if (run.addEventListener) run.addEventListener("change", restart);
  back.addEventListener("click", () => move(-1, false));
  next.addEventListener("click", () => move(1, false));
  box.setAttribute("tabindex", "0");
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Episode viewer");
  box.addEventListener("keydown", (k) => {
    if (!["ArrowLeft", "ArrowRight"].includes(k.key) || ["SELECT", "INPUT"].includes(k.target.tagName)) return;
    k.preventDefault();
    move(k.key === "ArrowLeft" ? -1 : 1, k.shiftKey);
  });
  restart();
}

// ---- the page ------------------------------------------------------------------------------------------------------------

const KINDS = { lines, map, heat, bars };
let drawnAt = 0;

function drawAll() {
  drawnAt = document.documentElement.clientWidth;
  for (const [key, spec] of Object.entries(data.charts)) {
    const box = document.querySelector(`#${key} > .chart`);
    box.replaceChildren();
    KINDS[spec.kind](box, spec);
  }
}

drawAll();
if (document.getElementById("viewer")) viewer(document.getElementById("viewer"));
window.addEventListener("resize", () => { if (document.documentElement.clientWidth !== drawnAt) drawAll(); });
