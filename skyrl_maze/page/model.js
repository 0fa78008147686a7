// The data of the page, made readable: one evaluation at a time, when it is first looked at.

const DATA = JSON.parse(byId("data").textContent);
const LETTERS = ["A", "B"];
const ARROWS = { right: "→", up: "↑", left: "←", down: "↓", stop: "■" };

const runName = (index) => (DATA.runs.length > 1 ? `${LETTERS[index]} · ${DATA.runs[index].name}` : DATA.runs[index].name);

function readTurn([text, action, failure, bumped, row, col, reward]) {
  return { text: DATA.texts[text], action, failure, bumped: bumped === 1, position: [row, col], reward };
}

function outcomeOf(packed) {
  if (packed.error !== null) return "error";
  if (packed.success) return "goal";
  return Object.hasOwn(OUTCOMES, packed.stop_reason) && packed.stop_reason !== "goal" ? packed.stop_reason : "running";
}

function readEpisode(packed) {
  const turns = packed.turns.map(readTurn);
  return {
    ...packed,
    turns,
    outcome: outcomeOf(packed),
    maze: DATA.mazes[packed.maze],
    moves: turns.filter((turn) => turn.action !== null && turn.action !== "stop").length,
    failures: turns.filter((turn) => turn.failure !== null).length,
    bumps: turns.filter((turn) => turn.bumped).length,
  };
}

function episodesOf(evaluation) {
  evaluation.read ??= evaluation.episodes.map(readEpisode);
  return evaluation.read;
}

// Episodes of one or two evaluations, those of the same maze and sample side by side: [[a, b], ...].
function pairUp(evaluations) {
  const pairs = new Map();
  evaluations.forEach((evaluation, side) => {
    const seen = new Map();
    for (const episode of evaluation ? episodesOf(evaluation) : []) {
      const name = `${episode.maze.key} ${episode.sample}`;
      const repeat = seen.get(name) ?? 0;
      seen.set(name, repeat + 1);
      const key = `${name} ${repeat}`;
      if (!pairs.has(key)) pairs.set(key, evaluations.map(() => null));
      pairs.get(key)[side] = episode;
    }
  });
  return [...pairs.values()];
}

const TESTS = {
  all: () => true,
  failed: (episode) => episode.outcome !== "goal",
  solved: (episode) => episode.outcome === "goal",
  failures: (episode) => episode.failures > 0,
  bumps: (episode) => episode.bumps > 0,
};
const ORDERS = {
  longest: (episode) => episode.turns.length,
  failures: (episode) => episode.failures,
  bumps: (episode) => episode.bumps,
};

// The pairs that the filters leave, in the order asked for. One side that fits is enough.
function choose(pairs, { show, size, order, key }) {
  const digits = key.trim().toLowerCase();
  const living = (pair) => pair.filter((episode) => episode !== null);
  const mazeOf = (pair) => living(pair)[0].maze;
  const differs = (pair) => living(pair).length === 2 && TESTS.solved(pair[0]) !== TESTS.solved(pair[1]);
  const fits = show === "differ" ? differs : (pair) => living(pair).some(TESTS[show]);
  const kept = pairs.filter((pair) =>
    fits(pair) && (size === "" || mazeOf(pair).size === Number(size)) && mazeOf(pair).key.startsWith(digits));
  if (order in ORDERS) {
    const most = (pair) => Math.max(...living(pair).map(ORDERS[order]));
    kept.sort((one, other) => most(other) - most(one));
  }
  return kept;
}

// The cells of an episode: the start, then where each turn left the agent.
const cellsOf = (episode) => [episode.maze.start, ...episode.turns.map((turn) => turn.position)];
