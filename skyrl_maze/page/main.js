// What is shown, and who listens.

const state = {
  // For each run the place of the evaluation in run.curve; the last that kept its episodes.
  chosen: DATA.runs.map((run) => run.curve.findLastIndex((point) => point.evaluation !== null)),
  filters: { show: "all", size: "", order: "set", key: "" },
  page: 0,
  pairs: [],
};

const pointOf = (index) => DATA.runs[index].curve[state.chosen[index]] ?? null;
const evaluationOf = (index) => pointOf(index)?.evaluation ?? null;

function sideName(index) {
  const point = pointOf(index);
  if (point === null) return `${runName(index)}, no evaluation`;
  return point.step === null ? runName(index) : `${runName(index)}, step ${point.step}`;
}

const open = makeReplay((place) => state.pairs[place], () => state.pairs.length, sideName, focusTile);

// Back from the replay, which may have gone on to another page.
function focusTile(place) {
  const page = Math.floor(place / TILES_PER_PAGE);
  if (page !== state.page) {
    state.page = page;
    renderMazes();
  }
  document.querySelector(`.tile[data-place="${place}"]`)?.focus();
}

// --- The evaluations ---

function figure(name, value, detail = null) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value, detail === null ? null : el("small", {}, detail)));
}

function conditions(summary) {
  const rules = [`goal rule ${summary.goal_rule}`, plural(summary.max_turns, "turn"), `grammar ${summary.grammar}`, `theme ${summary.theme}`];
  return [`policy ${summary.policy}`, summary.adapter && `adapter ${summary.adapter}`, summary.endpoint && `at ${summary.endpoint}`,
    summary.mazes && `mazes ${summary.mazes}`, ...rules, `temperature ${summary.temperature}`].filter(Boolean).join(" · ");
}

function picker(index) {
  const choices = [...DATA.runs[index].curve.entries()].filter(([, point]) => point.evaluation !== null);
  if (choices.length < 2) return null;
  const select = el("select", { id: `evaluation-${index}` },
    ...choices.map(([place, point]) => el("option", { value: place }, `step ${point.step}, ${percent(point.rate)}`)));
  select.value = state.chosen[index];
  select.addEventListener("change", () => pick(index, Number(select.value)));
  return el("label", {}, "shown ", select);
}

function card(index) {
  const evaluation = evaluationOf(index);
  const title = DATA.runs.length > 1 ? el("h2", { class: `run-${LETTERS[index]}` }, runName(index)) : el("h2", {}, "Evaluation");
  const box = el("article", { class: "card", "aria-label": runName(index) });
  if (evaluation === null) {
    box.append(el("div", { class: "heading" }, title), el("p", {}, "No finished evaluation with its episodes lies here yet."));
    return box;
  }
  const { summary } = evaluation;
  const episodes = episodesOf(evaluation);
  const solved = episodes.filter(TESTS.solved).length;
  box.append(
    fill(el("div", { class: "heading" }), {}, [title, picker(index)]),
    el("p", { class: "conditions" }, conditions(summary)),
    el("dl", { class: "figures" },
      figure("solve rate", percent(summary.solve_rate), `${solved} of ${episodes.length}, 95 %: ${interval(summary.solve_rate_low, summary.solve_rate_high)}`),
      figure("SPL", amount(summary.spl, 3), "success by path length"),
      figure("excess steps", amount(summary.mean_excess_steps, 2), "mean of the solved"),
      figure("parse failures", summary.parse_failures.toLocaleString("en"), `in ${plural(summary.turns, "turn")}`),
      figure("bumps", summary.wall_bumps.toLocaleString("en"), "moves into a wall"),
      figure("errors", summary.errors.toLocaleString("en"), "counted as unsolved")));
  if (episodes.some((episode) => episode.sample > 0)) {
    box.append(el("p", { class: "conditions" }, "Mazes were played several times. The interval takes all episodes as independent, so it is too narrow."));
  }
  return box;
}

function pick(index, place) {
  state.chosen[index] = place;
  state.page = 0;
  renderRuns();
  renderChart();
  renderGroups();
  renderMazes();
}

function renderRuns() {
  const focused = document.activeElement?.id;
  byId("runs").replaceChildren(...DATA.runs.map((_, index) => card(index)));
  if (focused) byId(focused)?.focus();
}

// --- The curve ---

function renderChart() {
  const box = byId("chart");
  if (box.clientWidth) box.replaceChildren(drawChart(box.clientWidth, byId("published").checked, state.chosen, pick));
}

function renderGroups() {
  const rates = (key, name) => DATA.runs.flatMap((_, index) => (evaluationOf(index)?.summary[key] ?? []).map((group) =>
    [sideName(index), `${name(group)}`, String(group.episodes), percent(group.solve_rate), interval(group.solve_rate_low, group.solve_rate_high)]));
  const rows = [...rates("by_size", ({ size }) => `${size}×${size}`), ...rates("by_shortest_path", (group) => plural(group.shortest_path, "move"))];
  byId("groups").replaceChildren(fillTable(el("table"), "Solve rate of the mazes of one size, and of one shortest path",
    ["evaluation", "mazes", "episodes", "solve rate", "95 % interval"], rows));
}

function renderLegend() {
  const entry = (kind, words) => {
    const sample = svg("svg", { class: kind === "published" ? kind : `run-${kind}`, width: 34, height: 14, "aria-hidden": "true" },
      svg("path", { class: "trail", d: "M1 7H33" }), svg("path", { class: "dot kept", d: DOT[kind](17, 7) }));
    return el("li", {}, sample, el("span", {}, words));
  };
  byId("curve-legend").replaceChildren(...DATA.runs.map((_, index) => entry(LETTERS[index], `${runName(index)}, band: 95 % Wilson interval`)),
    entry("published", DATA.published.name));
}

// --- The mazes ---

function renderMazes() {
  const evaluations = DATA.runs.map((_, index) => evaluationOf(index));
  const all = pairUp(evaluations);
  state.pairs = choose(all, state.filters);
  const count = state.pairs.length, first = state.page * TILES_PER_PAGE;
  const shown = state.pairs.slice(first, first + TILES_PER_PAGE);
  byId("count").textContent = `${count.toLocaleString("en")} of ${plural(all.length, evaluations.length > 1 ? "pair" : "episode")}`;
  byId("grids").replaceChildren(...evaluations.map((_, side) => el("div", {},
    el("h3", { class: `run-${LETTERS[side]}`, ...(evaluations.length === 1 ? { hidden: "" } : {}) }, sideName(side)),
    shown.length ? grid(shown, side, first, sideName(side), open) : el("p", { class: "nothing" }, all.length ? "No episode fits." : "No episodes."))));
  byId("pages").hidden = count <= TILES_PER_PAGE;
  byId("page-range").textContent = `${first + 1} to ${first + shown.length} of ${count.toLocaleString("en")}`;
  byId("page-before").disabled = first === 0;
  byId("page-after").disabled = first + shown.length >= count;
  renderMarks(all);
}

function renderMarks(pairs) {
  const ended = pairs.flat().filter((episode) => episode !== null);
  const entries = Object.entries(OUTCOMES).map(([outcome, { words }]) => [outcome, words, ended.filter((episode) => episode.outcome === outcome).length]);
  byId("marks").replaceChildren(...entries.filter(([, , count]) => count > 0).map(([outcome, words, count]) =>
    el("li", {}, mark(outcome), el("span", {}, `${words} ${count.toLocaleString("en")}`))), el("li", {}, "below a maze: moves/shortest"));
}

// The tile of the same pair in the other grid shows itself as well.
function showPartner({ target }) {
  const place = target.closest(".tile")?.dataset.place;
  for (const tile of document.querySelectorAll(".tile.partner")) tile.classList.remove("partner");
  if (place === undefined || DATA.runs.length < 2) return;
  for (const tile of document.querySelectorAll(`.tile[data-place="${place}"]`)) tile.classList.add("partner");
}

function fillFilters() {
  const form = byId("filters");
  const sizes = [...new Set(DATA.mazes.map((maze) => maze.size))].sort((one, other) => one - other);
  form.elements.size.append(...sizes.map((size) => el("option", { value: size }, `${size}×${size}`)));
  if (DATA.runs.length > 1) form.elements.show.append(el("option", { value: "differ" }, "solved by one only"));
  const apply = () => {
    state.filters = Object.fromEntries(new FormData(form));
    state.page = 0;
    renderMazes();
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
}

function turnPage(by) {
  state.page += by;
  renderMazes();
  byId("mazes").focus();
}

// --- Colours, and the start ---

function applyTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(dark));
}

function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  applyTheme(dark.matches);
  dark.addEventListener("change", () => applyTheme(dark.matches));
  byId("theme").addEventListener("click", () => applyTheme(document.documentElement.dataset.theme !== "dark"));
  const notes = DATA.runs.flatMap((run, index) => run.notes.map((note) => `${runName(index)}: ${note}`));
  byId("notes").hidden = notes.length === 0;
  byId("notes").firstElementChild.replaceChildren(...notes.map((note) => el("li", {}, note)));
  const last = Math.max(0, ...DATA.runs.flatMap((run) => run.curve.map((point) => point.step ?? 0)));
  // A short run would be a dot on the published run's axis.
  byId("published").checked = last === 0 || last >= DATA.published.points.at(-1)[0] / 2;
  byId("published").parentElement.hidden = last === 0 || last >= DATA.published.points.at(-1)[0];
  byId("published").addEventListener("change", renderChart);
  for (const kind of ["focusin", "pointerover"]) byId("grids").addEventListener(kind, showPartner);
  byId("page-before").addEventListener("click", () => turnPage(-1));
  byId("page-after").addEventListener("click", () => turnPage(1));
  renderRuns();
  renderLegend();
  fillTable(byId("curve-table"), "Solve rate after each evaluation", ["run", "step", "solve rate", "95 % interval", "episodes"], curveRows());
  fillFilters();
  renderGroups();
  renderChart();
  new ResizeObserver(renderChart).observe(byId("chart"));
}

begin();
