/* The two stages as a machine of states, without any drawing.

   `start(options)` gives the first state and `step(state)` the next one; the
   same options always give the same states. Nothing is changed in place.

   As in the kernels: program i sums the rows i, i + programs, ... in registers
   and adds its sums to buffer i % buffers while it holds the lock of that
   buffer. A program is two warps. Each loads and stores its own columns, and
   one thread of warp 0 releases the lock.

   Every dy is 1, so a sum counts rows. A sum is kept as the list of its rows,
   and `known` is false if it has also what memory held before anybody wrote.

   Without the barrier nothing makes warp 0 wait for warp 1. In this picture
   warp 1 is late in every other program that comes to a buffer: its store
   arrives after the next program has stored. A GPU may choose that order, and
   another one in the next run.

   Programs of different buffers do the same at the same time, so a step is
   one action of all programs that are first, second, ... at their buffer. */

"use strict";

globalThis.twoStages = (() => {
  const WARPS = [0, 1];
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  const add = (a, b) => ({
    rows: [...a.rows, ...b.rows],
    known: a.known && b.known,
  });

  function start({ rows, programs, buffers, barrier }) {
    const count = Math.min(rows, programs);
    return {
      rows,
      barrier,
      programs: range(count).map((i) => ({
        buffer: i % buffers,
        rank: Math.floor(i / buffers), // the how-manieth at its buffer
        rows: range(rows).filter((row) => row % count === i),
        read: 0, // how many of its rows
        sums: WARPS.map(() => ({ rows: [], known: true })),
        state: "reads", // then waits, holds, left
      })),
      // 0: free, never written; 1: taken; 2: free, holds a sum
      locks: range(buffers).map(() => 0),
      memory: range(buffers).map(() =>
        WARPS.map(() => ({ rows: [], known: false }))),
      stored: range(buffers).map(() => WARPS.map(() => [])), // all that came
      late: [], // stores that are still on their way: {program, warp}
      db: null, // the result, of the columns of each warp
      lost: WARPS.map(() => 0),
      rank: 0, // of the programs whose turn it is
      next: "read",
      events: [], // what moved in this step: {kind, program, ...}
      said: { key: "start", programs: [] },
    };
  }

  /* The programs whose turn it is, one at each buffer at most. */
  const visitors = (s, rank = s.rank) =>
    range(s.programs.length).filter((i) => s.programs[i].rank === rank);

  /* Whether warp 1 misses the release of the programs of this rank. */
  const isLate = (s) => !s.barrier && s.rank % 2 === 0;

  function land(s, program, warp) {
    const { buffer, sums } = s.programs[program];
    s.memory[buffer][warp] = sums[warp];
    s.stored[buffer][warp].push(...s.programs[program].rows);
    s.events.push({ kind: "store", program, warp });
  }

  /* Rows that came to a buffer and are in it no more. Where an old sum was
     stored again a late store follows, so nothing is final before that. */
  function count(s) {
    s.lost = WARPS.map((w) => s.memory.reduce((sum, cells, b) => {
      const kept = new Set(cells[w].rows);
      return sum + s.stored[b][w].filter((row) => !kept.has(row)).length;
    }, 0));
  }

  const actions = {
    read(s) {
      const rows = [];
      const programs = [];
      s.programs.forEach((p, i) => {
        if (p.read === p.rows.length) return;
        const row = p.rows[p.read++];
        p.sums = p.sums.map((sum) => add(sum, { rows: [row], known: true }));
        rows.push(row);
        programs.push(i);
        s.events.push({ kind: "read", program: i, row });
      });
      const more = s.programs.some((p) => p.read < p.rows.length);
      s.next = more ? "read" : "take";
      return { key: "read", programs, rows };
    },

    take(s) {
      const programs = visitors(s);
      for (const p of s.programs) if (p.state === "reads") p.state = "waits";
      for (const i of programs) {
        const { buffer } = s.programs[i];
        s.locks[buffer] = 1;
        s.programs[i].state = "holds";
        s.events.push({ kind: "take", program: i });
      }
      s.next = s.rank === 0 ? "store0" : "load";
      return { key: s.rank === 0 ? "take-first" : "take", programs };
    },

    load(s) {
      const programs = visitors(s);
      let key = "load";
      for (const i of programs) {
        const p = s.programs[i];
        const cells = s.memory[p.buffer];
        for (const warp of WARPS) {
          s.events.push({ kind: "load", program: i, warp });
        }
        if (s.late.some((store) => s.programs[store.program].buffer === p.buffer)) {
          key = cells[1].known ? "load-old" : "load-unwritten";
        }
        p.sums = p.sums.map((sum, warp) => add(sum, cells[warp]));
      }
      s.next = "store0";
      return { key, programs };
    },

    store0(s) {
      const programs = visitors(s);
      for (const i of programs) land(s, i, 0);
      s.next = isLate(s) ? "release" : "store1";
      return { key: s.barrier ? "store-0-barrier" : "store-0", programs };
    },

    store1(s) {
      const programs = visitors(s);
      for (const i of programs) land(s, i, 1);
      s.next = s.late.length ? "arrive" : "release";
      return { key: s.barrier ? "store-1-barrier" : "store-1", programs };
    },

    release(s) {
      const programs = visitors(s);
      for (const i of programs) {
        s.locks[s.programs[i].buffer] = 2;
        s.programs[i].state = "left";
        s.events.push({ kind: "release", program: i });
        if (isLate(s)) s.late.push({ program: i, warp: 1 });
      }
      const key = isLate(s) ? "release-early" : "release";
      s.rank += 1;
      // A late store that nobody gets ahead of arrives at once.
      if (due(s).length) s.next = "arrive";
      else s.next = visitors(s).length ? "take" : "sum";
      return { key, programs };
    },

    arrive(s) {
      const stores = due(s);
      const holding = visitors(s).filter((i) => s.programs[i].state === "holds");
      for (const { program, warp } of stores) land(s, program, warp);
      s.late = s.late.filter((store) => !stores.includes(store));
      const programs = stores.map((store) => store.program);
      if (holding.length) {
        s.next = "release";
        return { key: "arrive", programs, others: holding };
      }
      s.next = visitors(s).length ? "take" : "sum";
      return { key: "arrive-alone", programs };
    },

    sum(s) {
      s.db = WARPS.map((warp) => total(s, warp));
      s.locks.forEach((lock, buffer) => {
        if (lock === 2) s.events.push({ kind: "sum", buffer });
      });
      s.next = null;
      const right = s.db.every((sum) => sum === s.rows);
      return { key: right ? "sum" : "sum-wrong", programs: [] };
    },
  };

  /* The late stores that arrive now: behind those of the program that holds
     the lock, or at once where no other program comes to the buffer. */
  function due(s) {
    const next = visitors(s).map((i) => s.programs[i]);
    return s.late.filter(({ program }) => {
      const { buffer } = s.programs[program];
      const other = next.find((p) => p.buffer === buffer);
      return !other || other.state === "holds";
    });
  }

  /* What the buffers hold in the columns of a warp; null: nobody can say. */
  function total(s, warp) {
    const cells = s.memory.map((pair) => pair[warp]);
    const written = cells.filter((cell) => cell.rows.length);
    if (written.some((cell) => !cell.known)) return null;
    return written.reduce((sum, cell) => sum + cell.rows.length, 0);
  }

  function step(state) {
    if (state.next === null) return state;
    const s = structuredClone(state);
    s.events = [];
    s.said = actions[s.next](s);
    count(s);
    return s;
  }

  return { start, step, total, isDone: (s) => s.next === null };
})();
