// The chart of solve rates, drawn to the width that there is.

const HEIGHT = 288, LEFT = 48, RIGHT = 16, TOP = 12, BOTTOM = 42;
const DOT = {
  published: (x, y) => `M${x} ${y - 5}L${x + 5} ${y}L${x} ${y + 5}L${x - 5} ${y}Z`,
  A: (x, y) => `M${x - 4} ${y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z`,
  B: (x, y) => `M${x - 4} ${y - 4}h8v8h-8Z`,
};

// Series: a run's points with a step, or one level across the chart for results that have none.
function seriesOf(run, index) {
  const points = run.curve.filter((point) => point.step !== null);
  const levels = run.curve.filter((point) => point.step === null);
  return { name: runName(index), letter: LETTERS[index], points, levels };
}

function tickStep(span, wanted) {
  const raw = Math.max(span / wanted, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw);
}

// `chosen` is the place in run.curve of the evaluation shown for each run; `pick(run, place)` chooses another.
function drawChart(width, wholePublished, chosen, pick) {
  const series = DATA.runs.map(seriesOf);
  const own = Math.max(0, ...series.flatMap(({ points }) => points.map((point) => point.step)));
  const published = DATA.published.points;
  const last = wholePublished || own === 0 ? Math.max(own, published.at(-1)[0]) : own;
  const inner = Math.max(width - LEFT - RIGHT, 60);
  const x = (step) => LEFT + (inner * step) / last;
  const y = (share) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share);
  const node = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": describe(series) });
  node.append(axes(x, y, last, width));
  node.append(svg("clipPath", { id: "plot" }, svg("rect", { x: LEFT - 6, y: 0, width: inner + 12, height: HEIGHT })));
  const plot = svg("g", { "clip-path": "url(#plot)" });
  const trail = (points) => points.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  plot.append(svg("g", { class: "published" },
    svg("path", { class: "trail", d: trail(published.map(([step, share]) => [x(step), y(share)])) }),
    ...published.map(([step, share]) => svg("path", { class: "dot", d: DOT.published(x(step), y(share)) },
      svg("title", {}, `published run, step ${step}: ${percent(share)}`)))));
  series.forEach(({ name, letter, points, levels }, index) => {
    const group = svg("g", { class: `run-${letter}` });
    for (const { rate, low, high } of levels) {
      if (low !== null) group.append(svg("rect", { class: "band", x: LEFT, width: inner, y: y(high), height: y(low) - y(high) }));
      group.append(svg("path", { class: "trail", d: `M${LEFT} ${y(rate)}h${inner}` }));
    }
    const banded = points.filter((point) => point.low !== null);
    const outline = [...banded.map((p) => [x(p.step), y(p.high)]), ...banded.toReversed().map((p) => [x(p.step), y(p.low)])];
    if (banded.length > 1) group.append(svg("path", { class: "band", d: `${trail(outline)}Z` }));
    if (banded.length === 1) group.append(svg("path", { class: "whisker", d: `M${x(banded[0].step)} ${y(banded[0].high)}V${y(banded[0].low)}` }));
    group.append(svg("path", { class: "trail", d: trail(points.map((p) => [x(p.step), y(p.rate)])) }));
    for (const point of points) {
      const place = DATA.runs[index].curve.indexOf(point);
      const kept = point.evaluation !== null;
      const state = kept ? (place === chosen[index] ? "chosen" : "kept") : "bare";
      const words = `${name}, step ${point.step}: ${percent(point.rate)}, ${interval(point.low, point.high)}`;
      const dot = svg("path", { class: `dot ${state}`, d: DOT[letter](x(point.step), y(point.rate)) }, svg("title", {}, words));
      if (kept) dot.addEventListener("click", () => pick(index, place));
      group.append(dot);
    }
    plot.append(group);
  });
  node.append(plot);
  return node;
}

function axes(x, y, last, width) {
  const group = svg("g", { class: "axes" });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    group.append(svg("path", { d: `M${LEFT} ${y(share)}H${width - RIGHT}` }),
      svg("text", { x: LEFT - 8, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`));
  }
  const step = tickStep(last, Math.max(2, width / 110));
  for (let tick = 0; tick <= last; tick += step) {
    group.append(svg("text", { x: x(tick), y: HEIGHT - 24, "text-anchor": "middle" }, tick.toLocaleString("en")));
  }
  group.append(svg("text", { x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, "training step"));
  return group;
}

function describe(series) {
  const words = series.map(({ name, points, levels }) => {
    if (points.length === 0) return `${name}: ${levels.map(({ rate }) => percent(rate)).join(", ") || "no evaluation"}`;
    return `${name}: ${percent(points[0].rate)} at step ${points[0].step}, ${percent(points.at(-1).rate)} at step ${points.at(-1).step}`;
  });
  return `Solve rate over training steps. ${words.join(". ")}. The figures stand in the table below.`;
}

function curveRows() {
  const published = DATA.published.points.map(([step, share]) => [DATA.published.name, String(step), percent(share), "none given", "64"]);
  const own = DATA.runs.flatMap((run, index) => run.curve.map(({ step, rate, low, high, episodes }) =>
    [runName(index), step === null ? "none" : String(step), percent(rate), interval(low, high), episodes === null ? "unknown" : String(episodes)]));
  return [...own, ...published];
}
