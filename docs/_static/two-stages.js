/* Draws the states of two-stages-model.js and listens to the controls.
   All words come from docs/_templates/two-stages.html. */

"use strict";

(() => {
  const { start, step, total, isDone } = globalThis.twoStages;
  const PAUSE = 1800; // ms from one step to the next
  const language = document.documentElement.lang || "en";
  const list = new Intl.ListFormat(language);
  const plural = new Intl.PluralRules(language);

  /* Sizes in pixels; the width is that of the page. */
  const BOX = 60; // height of a program or a buffer
  const LINE = 18; // height of a row
  const GAP = 10;
  const HEAD = 20; // above all boxes

  for (const figure of document.querySelectorAll(".bp-stages")) setUp(figure);

  function setUp(figure) {
    const words = JSON.parse(figure.dataset.words);
    const svg = figure.querySelector("svg");
    const said = figure.querySelector(".bp-stages-said");
    const button = Object.fromEntries(
      [...figure.querySelectorAll("button")].map((b) => [b.dataset.do, b]));
    const input = Object.fromEntries(
      [...figure.querySelectorAll("input")].map((i) => [i.name, i]));
    let states = []; // all since the start: the last one is shown
    let timer = null;

    function options() {
      return {
        rows: input.rows.valueAsNumber,
        programs: Number(figure.dataset.programs),
        buffers: 2 ** input.buffers.valueAsNumber,
        barrier: input.barrier.checked,
      };
    }

    function reset() {
      pause();
      const { rows, buffers } = options();
      for (const [name, value] of Object.entries({ rows, buffers })) {
        input[name].setAttribute("aria-valuetext", value);
        input[name].parentElement.querySelector(".bp-stages-value")
          .textContent = value;
      }
      states = [start(options())];
      show();
    }

    function forward() {
      const state = states.at(-1);
      if (!isDone(state)) states.push(step(state));
      if (isDone(states.at(-1))) pause();
      show();
    }

    function back() {
      pause();
      if (states.length > 1) states.pop();
      show();
    }

    function play() {
      if (isDone(states.at(-1))) reset();
      forward();
      timer = setInterval(forward, PAUSE);
      button.play.textContent = words.pause;
    }

    function pause() {
      clearInterval(timer);
      timer = null;
      button.play.textContent = words.play;
    }

    function show() {
      const state = states.at(-1);
      const text = sentence(state, words);
      // Setting the same text again would have it read again.
      if (said.textContent !== text) said.textContent = text;
      // A disabled button would lose the focus.
      button.step.setAttribute("aria-disabled", isDone(state));
      button.back.setAttribute("aria-disabled", states.length === 1);
      const right = [state.rows, state.rows];
      const buffers = [0, 1].map((warp) => total(state, warp) ?? "?");
      const sums = { right, buffers, lost: state.lost };
      for (const [name, values] of Object.entries(sums)) {
        figure.querySelectorAll(`[data-sum=${name}]`).forEach((cell, warp) => {
          cell.textContent = values[warp];
          cell.classList.toggle("bp-wrong", name === "lost" && values[warp] > 0);
        });
      }
      draw(svg, state, words);
    }

    button.step.addEventListener("click", () => { pause(); forward(); });
    button.back.addEventListener("click", back);
    button.reset.addEventListener("click", reset);
    button.play.addEventListener("click", () => (timer ? pause() : play()));
    for (const control of Object.values(input)) {
      control.addEventListener("input", reset);
    }
    figure.hidden = false;
    reset();
    let width = svg.clientWidth;
    new ResizeObserver(() => {
      if (svg.clientWidth === width) return;
      width = svg.clientWidth;
      draw(svg, states.at(-1), words);
    }).observe(svg);
  }

  function sentence(state, words) {
    const { key, programs, rows, others } = state.said;
    const form = words[`${key}.${plural.select(programs.length)}`];
    const [db0, db1] = state.db ?? [];
    const names = (numbers) => list.format((numbers ?? []).map(String));
    return fill(form ?? words[key], {
      programs: names(programs),
      rows: rows ? names(rows) : state.rows,
      others: names(others),
      db0,
      db1,
    });
  }

  function fill(text, values) {
    return text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
  }

  /* The drawing ---------------------------------------------------------- */

  function element(parent, name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) {
      made.setAttribute(key, value);
    }
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  function draw(svg, state, words) {
    const width = Math.max(svg.clientWidth, 280);
    const narrow = width < 560;
    const programs = state.programs.length;
    const buffers = state.memory.length;
    const height = Math.max(
      programs * (BOX + GAP), buffers * (BOX + GAP), state.rows * LINE);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEAD + height}`);
    svg.setAttribute("height", HEAD + height);

    // Four columns, and the space for arrows between them.
    const parts = narrow ? [0.09, 0.31, 0.31, 0.15] : [0.12, 0.25, 0.25, 0.12];
    const widths = parts.map((part) => Math.floor(part * width));
    const free = width - 2 - widths.reduce((a, b) => a + b);
    const spaces = [0.25, 0.5, 0.25].map((part) => part * free);
    const lefts = [1];
    for (let i = 0; i < 3; i += 1) lefts.push(lefts[i] + widths[i] + spaces[i]);
    const middle = (i, n) => HEAD + ((i + 0.5) * height) / n;
    const top = (i, n) => middle(i, n) - BOX / 2;
    const cellWidth = (column) => (widths[column] - 12) / 2;
    const cellLeft = (column, warp) =>
      lefts[column] + 4 + warp * (cellWidth(column) + 4);

    function cells(parent, column, y, values, classes = []) {
      values.forEach((value, warp) => {
        const group = element(parent, "g", {
          class: `bp-cell ${classes[warp] ?? ""}`,
        });
        const x = cellLeft(column, warp);
        element(group, "rect", { x, y, width: cellWidth(column), height: 19 });
        element(group, "text", {
          x: x + cellWidth(column) / 2, y: y + 14, "text-anchor": "middle",
        }, value);
      });
    }

    function box(column, y, className, title, below) {
      const group = element(svg, "g", { class: className });
      element(group, "rect", {
        class: "bp-box", x: lefts[column], y, rx: 5,
        width: widths[column], height: BOX,
      });
      const x = lefts[column] + 5;
      element(group, "text", { class: "bp-name", x, y: y + 14 }, title);
      element(group, "text", { class: "bp-under", x, y: y + 54 }, below);
      return group;
    }

    const number = (cell) =>
      cell.known ? cell.rows.length : cell.rows.length ? `? + ${cell.rows.length}` : "?";

    for (const column of [1, 2]) {
      for (const warp of [0, 1]) {
        element(svg, "text", {
          class: "bp-head", "text-anchor": "middle", y: 12,
          x: cellLeft(column, warp) + cellWidth(column) / 2,
        }, fill(words.warp, { n: warp }));
      }
    }

    // Rows
    for (let row = 0; row < state.rows; row += 1) {
      const program = row % programs;
      const { buffer, rows, read } = state.programs[program];
      const isRead = rows.indexOf(row) < read;
      const y = middle(row, state.rows) - LINE / 2 + 1;
      const group = element(svg, "g", {
        class: `bp-row bp-b${buffer} ${isRead ? "bp-full" : ""}`,
      });
      element(group, "rect", {
        x: lefts[0], y, width: widths[0], height: LINE - 2, rx: 2,
      });
      element(group, "text", {
        x: lefts[0] + widths[0] / 2, y: y + 12, "text-anchor": "middle",
      }, narrow ? row : fill(words.row, { n: row }));
    }

    // Programs
    const late = new Set(state.late.map((store) => store.program));
    const stores = state.events.filter((event) => event.kind === "store");
    state.programs.forEach((program, i) => {
      let now = program.state;
      const atBarrier = state.barrier && now === "holds"
        && stores.some((event) => event.program === i);
      if (atBarrier) now = "barrier";
      if (late.has(i)) now = "late";
      const y = top(i, programs);
      const group = box(1, y, `bp-program bp-b${program.buffer} bp-${now}`,
        fill(words.program, { n: i }), words[`state-${now}`]);
      cells(group, 1, y + 20, program.sums.map(number));
      if (atBarrier) {
        const x = lefts[1] + widths[1] + 4;
        element(group, "path", {
          class: "bp-barrier", d: `M${x} ${y + 2}v${BOX - 4}`,
        });
      }
    });

    // Buffers and their locks
    state.memory.forEach((pair, b) => {
      const lock = state.locks[b];
      const y = top(b, buffers);
      const group = box(2, y, `bp-buffer bp-b${b} bp-lock-${lock}`,
        fill(words.buffer, { n: b }), words[`lock-${lock}`]);
      const lost = pair.map((cell, warp) =>
        (state.stored[b][warp].length > cell.rows.length && cell.known
          && !isWaitedFor(state, b) ? "bp-wrong" : ""));
      cells(group, 2, y + 20, pair.map(number), lost);
    });

    // The result
    const y = middle(0, 1) - BOX / 2;
    const group = box(3, y, "bp-result", words.result, "");
    const wrong = state.db?.map((sum) => (sum === state.rows ? "" : "bp-wrong"));
    cells(group, 3, y + 20, state.db ?? ["", ""], wrong);

    // What moves
    const right = (column) => lefts[column] + widths[column];
    const place = {
      row: (i) => [right(0), middle(i, state.rows)],
      programIn: (i) => [lefts[1], middle(i, programs)],
      program: (i, warp) => [right(1), top(i, programs) + 24 + 11 * warp],
      buffer: (b, warp) => [lefts[2], top(b, buffers) + 24 + 11 * warp],
      lockOf: (b) => [lefts[2], top(b, buffers) + 50],
      programLock: (i) => [right(1), top(i, programs) + 50],
      bufferOut: (b) => [right(2), middle(b, buffers)],
      result: () => [lefts[3], middle(0, 1)],
    };
    for (const event of state.events) {
      const { kind, program, warp } = event;
      const buffer = event.buffer ?? state.programs[program].buffer;
      const ends = {
        read: () => [place.row(event.row), place.programIn(program)],
        take: () => [place.programLock(program), place.lockOf(buffer)],
        release: () => [place.programLock(program), place.lockOf(buffer)],
        load: () => [place.buffer(buffer, warp), place.program(program, warp)],
        store: () => [place.program(program, warp), place.buffer(buffer, warp)],
        sum: () => [place.bufferOut(buffer), place.result()],
      }[kind]();
      arrow(svg, ...ends, `bp-moves bp-${kind} bp-b${buffer}`);
    }
    for (const { program, warp } of state.late) {
      const { buffer } = state.programs[program];
      const [from, to] = [place.program(program, warp), place.buffer(buffer, warp)];
      const half = from.map((value, i) => (value + to[i]) / 2);
      arrow(svg, from, half, `bp-late bp-b${buffer}`);
    }
  }

  /* Whether the program at a buffer has still to store: then what looks
     lost is only what it will write. */
  function isWaitedFor(state, buffer) {
    return state.late.some((store) => state.programs[store.program].buffer === buffer);
  }

  function arrow(parent, from, to, className) {
    const group = element(parent, "g", { class: className });
    const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
    const end = [to[0] - 6 * Math.cos(angle), to[1] - 6 * Math.sin(angle)];
    element(group, "path", {
      class: "bp-way", pathLength: 1, d: `M${from.join(" ")}L${end.join(" ")}`,
    });
    element(group, "path", {
      class: "bp-tip",
      d: "M0 0l-8 4v-8z",
      transform: `translate(${to.join(" ")}) rotate(${(angle * 180) / Math.PI})`,
    });
  }
})();
