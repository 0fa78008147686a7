// The dialog that replays one episode, or two of the same maze, turn by turn.

function pane(episode, title) {
  if (episode === null) {
    return { turns: 0, show() {}, words: () => "", node: el("section", { class: "pane", "aria-label": title }, el("h3", {}, title), el("p", {}, "This maze was not played here.")) };
  }
  const picture = stage(episode, `Maze of ${episode.maze.size} by ${episode.maze.size} cells with the agent's way and a shortest path`);
  const facts = el("p", { class: "facts" }), reply = el("pre", { class: "reply", dir: "auto", tabindex: "0", role: "region", "aria-label": "What the model said" });
  const strip = el("ol", { class: "strip", "aria-hidden": "true" }, ...episode.turns.map((turn) =>
    el("li", { class: turn.failure !== null ? "failed" : turn.bumped ? "bumped" : "" }, turn.failure !== null ? "?" : ARROWS[turn.action] ?? "·")));
  const node = el("section", { class: "pane", "aria-label": title },
    el("h3", { class: "ending" }, mark(episode.outcome), el("span", {}, title)),
    picture.node,
    el("div", { class: "told" }, el("p", { class: "ending-words" }, ending(episode)), strip, facts, reply));
  return { node, turns: episode.turns.length, show, words: (turn) => turnWords(episode, turn) };

  function show(turn) {
    const at = Math.min(turn, episode.turns.length);
    picture.show(at);
    [...strip.children].forEach((item, index) => item.classList.toggle("now", index === at - 1));
    strip.children[at - 1]?.scrollIntoView({ block: "nearest", inline: "nearest" });
    facts.replaceChildren(...chips(episode, at));
    const text = at === 0 ? null : episode.turns[at - 1].text;
    reply.replaceChildren(text ? text : el("span", { class: "nothing" }, at === 0 ? "No turn was taken yet." : "The answer was empty."));
    reply.scrollTop = 0;
  }
}

function ending(episode) {
  const parts = [OUTCOMES[episode.outcome].words, `after ${plural(episode.turns.length, "turn")}`];
  parts.push(`${plural(episode.moves, "move")}, shortest ${episode.maze.path.length - 1}`, `return ${amount(episode.return)}`);
  if (episode.error !== null) parts.push(episode.error);
  const words = parts.join(" · ");
  return words[0].toUpperCase() + words.slice(1);
}

function chips(episode, at) {
  const place = (cell) => `row ${cell[0]}, column ${cell[1]}`;
  if (at === 0) return [el("span", { class: "chip" }, `start: ${place(episode.maze.start)}`)];
  const turn = episode.turns[at - 1];
  const found = [];
  if (turn.failure !== null) found.push(el("span", { class: "chip failed" }, `not understood: ${turn.failure.replaceAll("_", " ")}`));
  else found.push(el("span", { class: "chip" }, `${ARROWS[turn.action] ?? ""} ${turn.action ?? "no action"}`.trim()));
  if (turn.bumped) found.push(el("span", { class: "chip bumped" }, "bumped into a wall"));
  found.push(el("span", { class: "chip" }, place(turn.position)), el("span", { class: "chip" }, `reward ${amount(turn.reward)}`));
  if (at === episode.turns.length) {
    found.push(el("span", { class: `chip end ${episode.outcome}` }, mark(episode.outcome), `end: ${episode.stop_reason.replaceAll("_", " ")}`));
  }
  return found;
}

// One sentence for those who do not see the picture.
function turnWords(episode, turn) {
  const at = Math.min(turn, episode.turns.length);
  return `${at === 0 ? "Start" : `Turn ${at} of ${episode.turns.length}`}: ${chips(episode, at).map((chip) => chip.textContent).join(", ")}.`;
}

// `episodes(place)` gives the pair at a place of the list that is shown, `count()` how many there are,
// `titles(side)` what a side is called; `back(place)` is told where it was closed.
function makeReplay(episodes, count, titles, back) {
  const dialog = byId("replay"), slider = byId("turn"), play = byId("play");
  let place = 0, panes = [], turn = 0, last = 0, timer = null;

  function show(wanted, speak = true) {
    turn = Math.min(Math.max(wanted, 0), last);
    for (const one of panes) one.show(turn);
    slider.value = turn;
    slider.setAttribute("aria-valuetext", turn === 0 ? "start" : `turn ${turn} of ${last}`);
    byId("turn-name").textContent = turn === 0 ? "start" : `turn ${turn} of ${last}`;
    if (speak) byId("said").textContent = panes.map((one) => one.words(turn)).join(" ");
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }

  // While it plays nothing is read out: a reader would fall behind.
  function start() {
    if (turn === last) show(0, false);
    play.textContent = "Pause";
    timer = setInterval(() => {
      const ended = turn + 1 >= last;
      show(turn + 1, ended);
      if (ended) pause();
    }, 1000 / Number(byId("speed").value));
  }

  function toggle() {
    if (timer === null) start();
    else { pause(); show(turn); }
  }

  function open(wanted) {
    pause();
    place = wanted;
    const pair = episodes(place);
    const { maze, index, sample } = pair.find((episode) => episode !== null);
    const several = sample > 0 ? ` · sample ${sample + 1}` : "";
    byId("replay-title").replaceChildren(`Maze ${index + 1} · ${maze.size}×${maze.size}${several} `, el("code", {}, maze.key));
    panes = pair.map((episode, side) => pane(episode, titles(side)));
    byId("panes").replaceChildren(...panes.map((one) => one.node));
    last = Math.max(...panes.map((one) => one.turns));
    slider.max = last;
    byId("episode-before").disabled = place === 0;
    byId("episode-after").disabled = place + 1 >= count();
    if (!dialog.open) dialog.showModal();
    show(0);
  }

  const keys = {
    ArrowLeft: () => show(turn - 1), ArrowRight: () => show(turn + 1), Home: () => show(0), End: () => show(last), " ": toggle,
    PageUp: () => place > 0 && open(place - 1), PageDown: () => place + 1 < count() && open(place + 1),
  };
  dialog.addEventListener("keydown", (event) => {
    const { tagName } = event.target;
    const own = tagName === "SELECT" || (tagName === "BUTTON" && event.key === " ");
    if (own || !(event.key in keys) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (event.key !== " ") pause();
    keys[event.key]();
  });
  slider.addEventListener("input", () => { pause(); show(Number(slider.value)); });
  play.addEventListener("click", toggle);
  byId("speed").addEventListener("change", () => { if (timer !== null) { pause(); start(); } });
  byId("episode-before").addEventListener("click", () => open(place - 1));
  byId("episode-after").addEventListener("click", () => open(place + 1));
  byId("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    pause();
    back(place);
  });
  return open;
}
