// The grids of mazes: one tile an episode, one tab stop a grid, a page at a time.

const TILES_PER_PAGE = 200;

function tileName(episode, number) {
  const parts = [`Maze ${number}`, `${episode.maze.size} by ${episode.maze.size}`, OUTCOMES[episode.outcome].words];
  if (episode.sample > 0) parts.splice(1, 0, `sample ${episode.sample + 1}`);
  parts.push(`${plural(episode.moves, "move")}, shortest ${episode.maze.path.length - 1}`);
  if (episode.failures) parts.push(plural(episode.failures, "parse failure"));
  if (episode.bumps) parts.push(plural(episode.bumps, "bump"));
  return parts.join(", ");
}

function tile(episode, place, open) {
  if (episode === null) return el("li", { class: "missing" }, el("span", {}, "not played"));
  const button = el("button", {
    type: "button", class: `tile ${episode.outcome}`, tabindex: "-1", "data-place": place,
    "aria-label": tileName(episode, episode.index + 1),
  },
  thumbnail(episode),
  el("span", { class: "foot" }, mark(episode.outcome), `${episode.moves}/${episode.maze.path.length - 1}`));
  button.addEventListener("click", () => open(place));
  return el("li", {}, button);
}

// The tiles of one side of `pairs`; `first` is the place of pairs[0] among all that were chosen.
function grid(pairs, side, first, name, open) {
  const list = el("ul", { class: "tiles", "aria-label": name, "aria-describedby": "grid-help" },
    ...pairs.map((pair, index) => tile(pair[side], first + index, open)));
  const buttons = [...list.querySelectorAll("button")];
  if (buttons.length) buttons[0].tabIndex = 0;
  list.addEventListener("keydown", (event) => {
    const from = buttons.indexOf(event.target);
    const to = from < 0 ? null : neighbour(buttons, from, event.key);
    if (to === null) return;
    event.preventDefault();
    buttons[to]?.focus();
  });
  list.addEventListener("focusin", ({ target }) => {
    for (const button of buttons) button.tabIndex = button === target ? 0 : -1;
  });
  return list;
}

function neighbour(buttons, from, key) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (step) return Math.min(Math.max(from + step, 0), buttons.length - 1);
  if (key === "Home") return 0;
  if (key === "End") return buttons.length - 1;
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  // Above or below: the nearest tile of the same column, whatever the width of the window makes of the rows.
  const left = buttons[from].offsetLeft, top = buttons[from].offsetTop, down = key === "ArrowDown";
  const column = buttons.map((button, index) => ({ index, away: button.offsetTop - top, left: button.offsetLeft }))
    .filter((other) => other.left === left && (down ? other.away > 0 : other.away < 0))
    .sort((one, other) => Math.abs(one.away) - Math.abs(other.away));
  return column.length ? column[0].index : from;
}
