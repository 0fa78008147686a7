// Mazes as SVG, one unit a cell, (row, col) being the corner of a cell at x = col, y = row.

const centre = ([row, col]) => `${col + 0.5} ${row + 0.5}`;
const line = (cells) => cells.map((cell, index) => `${index ? "L" : "M"}${centre(cell)}`).join("");

// One path for all walls: a rectangle for each stretch of wall in a row.
function wallPath(maze) {
  maze.walls ??= maze.text.split("/").map((row, y) =>
    [...row.matchAll(/#+/g)].map((run) => `M${run.index} ${y}h${run[0].length}v1h-${run[0].length}z`).join("")).join("");
  return maze.walls;
}

function board(maze, attributes, ...layers) {
  const [row, col] = maze.goal;
  return svg("svg", { viewBox: `0 0 ${maze.size} ${maze.size}`, ...attributes },
    svg("rect", { class: "floor", width: maze.size, height: maze.size }),
    svg("path", { class: "walls", d: wallPath(maze) }),
    svg("rect", { class: "goal-cell", x: col, y: row, width: 1, height: 1 }),
    ...layers);
}

// A small picture of a whole episode.
function thumbnail(episode) {
  const cells = cellsOf(episode);
  return board(episode.maze, { class: "thumbnail", "aria-hidden": "true" },
    svg("path", { class: "way", d: line(cells) }),
    svg("circle", { class: "agent", cx: cells.at(-1)[1] + 0.5, cy: cells.at(-1)[0] + 0.5, r: 0.36 }));
}

// A large picture whose agent can be put on any turn: {node, show(turn)}.
function stage(episode, name) {
  const { maze } = episode;
  const cells = cellsOf(episode);
  const way = svg("path", { class: "way" });
  const signs = svg("g", { class: "signs" });
  const agent = svg("circle", { class: "agent", r: 0.32 });
  const node = board(maze, { class: "stage", role: "img", "aria-label": name },
    svg("circle", { class: "start", cx: maze.start[1] + 0.5, cy: maze.start[0] + 0.5, r: 0.24 }),
    way, svg("path", { class: "shortest", d: line(maze.path) }), signs, agent);
  node.style.maxWidth = `${maze.size * 52}px`; // a small maze is not blown up
  let shown = 0;
  show(0);
  return { node, show };

  // The agent glides to the turn before or after, and is put on any other.
  function show(turn) {
    agent.classList.toggle("gliding", Math.abs(turn - shown) === 1);
    shown = turn;
    way.setAttribute("d", line(cells.slice(0, turn + 1)));
    agent.setAttribute("cx", cells[turn][1] + 0.5);
    agent.setAttribute("cy", cells[turn][0] + 0.5);
    signs.replaceChildren(...signsUpTo(turn));
  }

  // A bar where a wall was hit and a question mark where an answer was not understood, once for each place.
  function signsUpTo(turn) {
    const drawn = new Map();
    episode.turns.slice(0, turn).forEach(({ action, bumped, failure, position: [row, col] }) => {
      if (bumped) drawn.set(`bump ${row} ${col} ${action}`, bumpSign(row, col, action));
      if (failure !== null) {
        drawn.set(`failure ${row} ${col}`, svg("text", { class: "failure", x: col + 0.78, y: row + 0.4 }, "?"));
      }
    });
    return drawn.values();
  }
}

function bumpSign(row, col, action) {
  const [d_row, d_col] = { right: [0, 1], left: [0, -1], up: [-1, 0], down: [1, 0] }[action];
  const x = col + 0.5 + 0.47 * d_col, y = row + 0.5 + 0.47 * d_row;
  const [half_x, half_y] = d_col ? [0, 0.32] : [0.32, 0];
  return svg("path", { class: "bump", d: `M${x - half_x} ${y - half_y}L${x + half_x} ${y + half_y}` });
}
