/* The search: Pagefind behind the theme's button and Ctrl+K, and the words
   that were looked for, marked where a result leads. Pagefind is loaded when
   a reader opens the dialog. */

(() => {
  const here = document.currentScript.src;
  const at = (path) => new URL(path, here).href;
  const MOST = 20; // sections shown
  const FEW = 3; // sections: others may help
  const PAUSE = 120; // ms without a new letter
  const FOUND = "found"; // in the address of a result: what to mark
  // How much a word counts in the title of a section, spelled so or in another
  // way, and in the title of its page.
  const metaWeights = { title: 2, titled: 2, page: 0.5 };
  // Between a share of the words of a section, 1, and how often it has one, 0.
  const ranking = { metaWeights, termFrequency: 0.4 };

  // What a question has and every page, or none.
  const TELLS_NOTHING =
    /^(an?|and|are|can|do|does|for|from|how|in|is|my|not|of|on|or|the|to|triton|use|using|what|when|where|which|why|with)$|^([的了是在和与用把吗呢不为我有]|如何|怎样|怎么|什么|为什么|哪里|哪个|\p{sc=Hiragana}+)$/iu;

  // Letters and signs that stand without spaces: see search.py.
  const WIDE = "\u3000-\u9fff\uff01-\uff65";
  const KATAKANA = "\u30a1-\u30fa\u30fc"; // a run is a word
  const SIGN = "\u3000-\u3004\u3008-\u3020\u30fb\uff01-\uff65";

  const dialog = document.getElementById("pst-search-dialog");
  const field = dialog.querySelector("input");
  const list = document.getElementById("bp-found");
  const count = document.getElementById("bp-found-count");
  const elsewhere = document.getElementById("bp-found-elsewhere");

  function style() {
    if (document.getElementById("bp-search-style")) return;
    const href = at("search.css");
    const link = { id: "bp-search-style", rel: "stylesheet", href };
    document.head.append(Object.assign(document.createElement("link"), link));
  }

  let loaded;
  const pagefind = () => (loaded ??= load());
  async function load() {
    const api = await import(at("../pagefind/pagefind.js"));
    await api.options({ excerptLength: 24, ranking });
    // It asks for the language now, and would cut a question by a dictionary
    // of the browser. The index is cut otherwise: see search.py.
    const page = document.documentElement;
    const { lang } = page;
    page.lang = "en";
    const ready = api.init();
    page.lang = lang;
    await ready;
    return api;
  }

  /** Chinese and Japanese in words that spaces part, as search.py does it. */
  function apart(text) {
    const words = RegExp(`[${KATAKANA}]+|[${WIDE}]`, "g");
    return text.replace(words, " $& ").replace(/\s+/g, " ").trim();
  }

  /** The text as it was, but for a space beside a word of Latin letters. */
  function together(text) {
    const none = `(?<=[${WIDE}]) (?=[${WIDE}“”‘’…—])|(?<=[${SIGN}“‘]) | (?=[${SIGN}])`;
    return text.replace(RegExp(none, "g"), "");
  }

  /** A section that Pagefind found, as its page has it. */
  async function read(result) {
    const { url, content, excerpt, meta } = await result.data();
    const pairs = Object.entries(meta).map(([key, text]) => [key, together(text)]);
    return { url, content: together(content), excerpt, meta: Object.fromEntries(pairs) };
  }

  /** The sections that have what was asked, and how many there are. Where they
      are few, those follow that have its words anywhere, then a part of them. */
  async function answers(api, asked) {
    let whole = { ...(await having(api, asked)), words: telling(asked) };
    if (whole.all >= FEW) return whole;
    const words = telling(cut(asked));
    if (`${words}` !== `${whole.words}`)
      whole = { ...joined(whole, await having(api, words.join(" "))), words };
    if (whole.all >= FEW || words.length < 2) return whole;
    const each = words.map((word) => having(api, word));
    const lists = (await Promise.all(each)).map(({ found }) => found);
    // Of each word the best, then the second best: nobody knows which counts.
    const turns = lists.flatMap((list) => list.map((one, turn) => [turn, one]));
    turns.sort(([one], [two]) => one - two);
    const found = turns.map(([, one]) => one);
    return { ...joined(whole, { found, all: 0 }), words, part: !whole.all };
  }

  function joined(one, two) {
    const found = new Map([...one.found, ...two.found].map((each) => [each.url, each]));
    return { found: [...found.values()], all: Math.max(found.size, two.all) };
  }

  /** A question in words, if Chinese or Japanese has none of its spaces. */
  function cut(asked) {
    const { lang } = document.documentElement;
    const segmenter = new Intl.Segmenter(lang, { granularity: "word" });
    return asked.replace(RegExp(`[${WIDE}]+`, "g"), (run) =>
      Array.from(segmenter.segment(run), ({ segment }) => segment).join(" "),
    );
  }

  const isTerm = ({ url }) => url.includes("/term-");

  /** The sections that have all words of a question, and how many there are. */
  async function having(api, asked) {
    // The index has letters and digits only. Of a question Pagefind drops
    // what Unicode calls punctuation: * but not ^.
    const words = telling(asked);
    const said = words.join(" ").replace(/\p{S}/gu, "*");
    const { results } = await api.search(apart(said));
    // Pagefind may put words that begin alike first: if few of the first
    // sections have what was asked, more are read.
    let first, found;
    for (const limit of [MOST, 5 * MOST]) {
      first = await Promise.all(results.slice(0, limit).map(read));
      found = first.filter(has(asked));
      if (found.length >= FEW) break;
    }
    // Of what was not read, nobody knows.
    const all = found.length < first.length ? found.length : results.length;
    // One term of the glossary says what a word means, others come behind the
    // sections that use it; what is written for authors comes last, or first
    // if its title is what was asked.
    const term = found.find(isTerm);
    const titled = ({ meta: { title } }) =>
      words.length > 1 &&
      letters(words.join("")).length >= letters(title).length / 2 &&
      words.every((word) => title.search(pattern(word)) >= 0);
    const place = (one) => {
      if ("aside" in one.meta) return titled(one) ? -1 : 2;
      return isTerm(one) && one !== term ? 1 : 0;
    };
    found.sort((one, two) => place(one) - place(two));
    return { found, all };
  }

  function say(kind, words = "") {
    count.textContent = kind && count.dataset[kind].replace("%s", words);
  }

  async function search() {
    style(); // a window in the background gets no focus
    const asked = together(apart(field.value));
    const askedOn = () => asked !== together(apart(field.value));
    try {
      const api = await pagefind();
      await new Promise((done) => setTimeout(done, PAUSE));
      if (askedOn()) return;
      const { found, all, part, words } = await answers(api, asked);
      if (askedOn()) return;
      const first = found.slice(0, MOST);
      list.replaceChildren(...first.map((result) => shown(result, asked, words)));
      elsewhere.hidden = !asked || (all > 0 && !part);
      if (!asked) say("");
      else if (!all) say("none", asked);
      else if (part) say("part", asked);
      else say(all === 1 ? "one" : "many", all);
    } catch (error) {
      say(location.protocol === "file:" ? "file" : "broken");
      throw error;
    }
  }

  /** Pagefind takes the beginning of a word, however short, for one that no
      page has. Most of its letters say that it may be meant; a name of code
      has all of them. */
  function enough(word) {
    const share = word.includes("_") ? 1 : 0.6;
    return Math.max(4, Math.ceil(letters(word).length * share));
  }

  function has(asked) {
    const all = telling(asked).map((word) => pattern(word, enough(word)));
    return ({ content, meta }) => {
      const text = [content, ...Object.values(meta)].join(" ");
      return all.every((each) => text.search(each) >= 0);
    };
  }

  function wordsOf(asked) {
    return asked.split(/\s+/).filter((word) => letters(word).length);
  }

  /** The words of a question that tell sections apart, or all if none does. */
  function telling(asked) {
    const words = wordsOf(asked);
    const some = words.filter((word) => !TELLS_NOTHING.test(word));
    return some.length ? some : words;
  }

  function letters(word) {
    return word.match(/[\p{L}\p{N}]/gu) ?? [];
  }

  /** Some letters at the beginning of a word, with any signs between them. */
  function pattern(word, length) {
    const between = "[^\\p{L}\\p{N}\\s]*";
    const wanted = letters(word).slice(0, length).join(between);
    const run = RegExp(`^[${KATAKANA}]`).test(word) ? KATAKANA : "";
    return RegExp(`(?<![\\p{Script=Latin}\\p{N}${run}])${wanted}`, "giu");
  }

  /** A section that was found, as an item of the list. */
  function shown({ url, content, meta, excerpt }, asked, telling) {
    const words = [...telling];
    // The section may spell a word in another way: bf16 = bfloat16.
    for (const pair of meta.also?.split("; ") ?? []) {
      const [other, written] = pair.split(" = ");
      if (asked.search(pattern(other)) >= 0) words.push(written);
    }
    // The index knows a section as page/anchor.html: see search.py.
    const target = url
      .replace(/\/([^/]+)\.html$/, ".html#$1")
      .replace(/\/$/, ".html");
    const address = new URL(target, location.href);
    for (const word of new Set(words)) address.searchParams.append(FOUND, word);
    const link = document.createElement("a");
    link.href = address.href;
    for (const kind of ["title", "page", "words"]) {
      const line = document.createElement("span");
      line.className = `bp-${kind}`;
      if (kind !== "words") line.textContent = meta[kind] ?? "";
      else if (RegExp(`[${WIDE}]`).test(content))
        line.append(...around(words, content, meta));
      else line.innerHTML = excerpt; // Pagefind escaped it
      link.append(line);
    }
    const item = document.createElement("li");
    item.append(link);
    return item;
  }

  /** What a section says around words, which are marked. Pagefind would mark
      their characters, wherever they stand. */
  function around(words, content, { title }) {
    const all = words.flatMap((word) => [pattern(word), pattern(word, enough(word))]);
    const any = all.map(({ source }) => source).join("|");
    const said = content.slice(title.length).replace(/^[.\s]+/, "");
    const letter = `\\w${KATAKANA}`;
    const some = `(?:[${letter}]+(?![${letter}])|[^${letter}])`; // a word or a character
    const near = RegExp(`(?<![${letter}])${some}{0,20}(?:${any})${some}{0,60}`, "iu");
    const [piece] = said.match(near) ?? said.match(`${some}{0,80}`);
    return piece.split(RegExp(`(${any})`, "iu")).map((text, turn) => {
      if (turn % 2 === 0) return text;
      const mark = document.createElement("mark");
      mark.textContent = text;
      return mark;
    });
  }

  /** Mark words in the section that the address leads to, and show one. */
  function mark(words) {
    const id = decodeURIComponent(location.hash.slice(1));
    const section = id
      ? document.getElementById(id)
      : document.querySelector("article section");
    if (!section || !CSS.highlights) return;
    const texts = textsOf(section);
    const found = words.flatMap((word) => rangesOf(word, texts));
    if (!found.length) return;
    style();
    CSS.highlights.set(FOUND, new Highlight(...found));
    const folded = (range) =>
      range.startContainer.parentElement.closest("details:not([open])");
    const first = found.find((range) => !folded(range)) ?? found[0];
    for (let details; (details = folded(first)); ) details.open = true;
    const { top, bottom } = first.getBoundingClientRect();
    if (top < 0 || bottom > innerHeight)
      scrollBy({ top: top - innerHeight / 3, behavior: "instant" });
  }

  /** What a section itself says: its pieces of text. */
  function textsOf(section) {
    const skipped = ".bp-xray, .bp-scaffold, .bp-drawing, .passport, .headerlink";
    const walker = document.createTreeWalker(section, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) {
      const { parentElement } = walker.currentNode;
      const own = parentElement.closest("section") === section;
      if (own && !parentElement.closest(skipped)) texts.push(walker.currentNode);
    }
    return texts;
  }

  /** Where a word stands, or else as much of its beginning as does. */
  function rangesOf(word, texts) {
    const text = texts.map(({ data }) => data).join("");
    const all = letters(word).length;
    for (let some = all; some > 0 && some >= all / 2; some--) {
      const found = [...text.matchAll(pattern(word, some))];
      if (found.length) return found.map((match) => rangeOf(match, texts));
    }
    return [];
  }

  function rangeOf({ index, 0: { length } }, texts) {
    const range = new Range();
    let end = 0;
    for (const node of texts) {
      const start = end;
      end += node.length;
      if (index >= start && index < end) range.setStart(node, index - start);
      if (index + length <= end) {
        range.setEnd(node, index + length - start);
        return range;
      }
    }
  }

  // Up and down lead through the field and the list, Enter to the first.
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const links = [...dialog.querySelectorAll("a")];
    const stops = [field, ...links.filter((link) => link.checkVisibility())];
    stops[stops.indexOf(document.activeElement) + step]?.focus();
  });
  field.form.addEventListener("submit", (event) => {
    event.preventDefault();
    list.querySelector("a")?.click();
  });
  field.addEventListener("focus", () => {
    style();
    if (location.protocol === "file:") say("file");
    else pagefind();
  });
  field.addEventListener("input", search);
  dialog
    .querySelector(".bp-search-close")
    .addEventListener("click", () => dialog.close());

  const words = new URLSearchParams(location.search).getAll(FOUND);
  if (words.length) mark(words);
})();
