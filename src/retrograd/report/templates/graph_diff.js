"use strict";
// Draws the neighbourhood of one node on either side, and walks along operands and users. Text goes in as text only.
(() => {
  const record = JSON.parse(document.getElementById("retrograd-report").textContent);
  if (!document.getElementById("picture")) return;
  const MARK = { same: "=", changed: "~", added: "+", removed: "\u2212" };
  const WORD = { same: "same", changed: "changed", added: "only in B", removed: "only in A" };
  const BOX = { width: 176, height: 62, across: 16, down: 46 };
  const MOST = { drawn: 60, beside: 7, chosen: 14, listed: 40 };
  const SVG = "http:" + "//www.w3.org/2000/svg";
  const sides = { a: side("a", record.nodes_a), b: side("b", record.nodes_b) };
  const past = [];
  let radius = 2;

  function side(letter, nodes) {
    const known = new Map();
    for (const node of nodes) {
      const other = known.get(node.id);
      if (other) merge(other, node);
      else known.set(node.id, { ...node, operands: [...node.operands], users: [...node.users], up: [], down: [], causes: [] });
    }
    const link = (from, to) => {
      const operand = known.get(from), user = known.get(to);
      if (!operand || !user || operand === user) return;
      if (!operand.down.includes(user)) operand.down.push(user);
      if (!user.up.includes(operand)) user.up.push(operand);
    };
    for (const node of known.values()) {
      for (const id of node.operands) link(id, node.id);
      for (const id of node.users) link(node.id, id);
    }
    // As the operands are numbered, whoever named an edge first.
    for (const node of known.values()) node.up.sort((x, y) => node.operands.indexOf(x.id) - node.operands.indexOf(y.id));
    record.causes.forEach((cause, k) => {
      for (const id of cause[letter]) known.get(id)?.causes.push(k + 1);
    });
    return { letter, known, chosen: "", root: document.getElementById(`side-${letter}`) };
  }

  // A collective over many operands is one node an operand in the record, and one instruction here.
  function merge(node, more) {
    node.operands.push(...more.operands);
    for (const id of more.users) if (!node.users.includes(id)) node.users.push(id);
    if (more.shape !== node.shape && !node.shape.endsWith(", ...")) node.shape += ", ...";
    if (node.status === "same") node.status = more.status;
    node.twin ||= more.twin;
  }

  // The nodes to draw: ring by ring around the chosen one, differences first, so that they are never cut off.
  function around(start) {
    const found = new Map([[start, 0]]);
    let ring = [start], left = 0;
    for (let step = 1; step <= radius && ring.length; step++) {
      const next = [];
      for (const node of ring) {
        const most = node === start ? MOST.chosen : MOST.beside;
        for (const list of [node.up, node.down]) {
          const wanted = [...list].sort((x, y) => (x.status === "same") - (y.status === "same"));
          let taken = 0;
          for (const other of wanted) {
            if (found.has(other)) continue;
            if (taken++ >= most || found.size >= MOST.drawn) { left++; continue; }
            found.set(other, step);
            next.push(other);
          }
        }
      }
      ring = next;
    }
    return { nodes: [...found.keys()], left };
  }

  // Longest-path layers; a node without operands here sits just above the first that uses it.
  function layers(nodes) {
    const here = new Set(nodes), rank = new Map(), waiting = new Map();
    const ready = [];
    for (const node of nodes) {
      const count = node.up.filter((o) => here.has(o)).length;
      waiting.set(node, count);
      if (!count) ready.push(node);
    }
    while (ready.length) {
      const node = ready.shift();
      const above = node.up.filter((o) => here.has(o)).map((o) => rank.get(o) ?? 0);
      rank.set(node, above.length ? Math.max(...above) + 1 : 0);
      for (const user of node.down) {
        if (!here.has(user)) continue;
        waiting.set(user, waiting.get(user) - 1);
        if (!waiting.get(user)) ready.push(user);
      }
    }
    for (const node of nodes) if (!rank.has(node)) rank.set(node, 0); // a loop, which a damaged record may have
    for (const node of nodes) {
      if (node.up.some((o) => here.has(o))) continue;
      const below = node.down.filter((u) => here.has(u)).map((u) => rank.get(u));
      if (below.length) rank.set(node, Math.max(0, Math.min(...below) - 1));
    }
    const rows = [];
    for (const node of nodes) (rows[rank.get(node)] ??= []).push(node);
    return rows.filter(Boolean);
  }

  // Fewer crossings: every node goes to the mean place of its neighbours in the row before, down and up again.
  function order(rows) {
    const at = new Map();
    const settle = (row) => row.forEach((node, k) => at.set(node, k - (row.length - 1) / 2));
    rows.forEach(settle);
    for (let sweep = 0; sweep < 6; sweep++) {
      const down = sweep % 2 === 0;
      for (const row of down ? rows : [...rows].reverse()) {
        const mean = new Map(row.map((node) => {
          const near = (down ? node.up : node.down).filter((o) => at.has(o)).map((o) => at.get(o));
          return [node, near.length ? near.reduce((x, y) => x + y, 0) / near.length : at.get(node)];
        }));
        row.sort((x, y) => mean.get(x) - mean.get(y));
        settle(row);
      }
    }
    return at;
  }

  function element(name, attributes = {}, ...children) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function html(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  const cut = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}\u2026`);
  const tag = (node) => WORD[node.status] + (node.causes.length ? `, cause ${node.causes.slice(0, 3).join(", ")}` : "");

  function box(which, node, x, y) {
    const chosen = which.chosen === node.id;
    const made = element(
      "g",
      {
        class: `box ${node.status}${chosen ? " chosen" : ""}`, transform: `translate(${x - BOX.width / 2},${y})`,
        tabindex: "0", role: "button", "aria-label": `${node.opcode} ${node.id}, ${node.shape}, ${tag(node)}`,
        "data-id": node.id,
      },
      element("title", {}, `${node.id}\n${node.opcode} ${node.shape}\n${node.where}`),
      element("rect", { width: BOX.width, height: BOX.height, rx: 6 }),
      element("text", { x: 8, y: 16, class: "op" }, cut(node.opcode, 22)),
      element("text", { x: 8, y: 29 }, cut(node.id, 24)),
      element("text", { x: 8, y: 42, class: "dim" }, cut(node.shape, 24)),
      element("text", { x: 8, y: 55, class: "tag" }, cut(`${MARK[node.status]} ${tag(node)}`, 24)),
    );
    made.addEventListener("click", () => choose(which.letter, node.id));
    made.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(which.letter, node.id);
      which.root.querySelector("g.chosen")?.focus();
    });
    return made;
  }

  function draw(which) {
    const view = which.root.querySelector(".view");
    view.replaceChildren();
    const start = which.known.get(which.chosen);
    if (!start) return;
    const { nodes, left } = around(start);
    const rows = layers(nodes), at = order(rows);
    const widest = Math.max(...rows.map((row) => row.length));
    const width = widest * (BOX.width + BOX.across) + BOX.across;
    const height = rows.length * (BOX.height + BOX.down) + 16;
    const place = new Map();
    rows.forEach((row, r) => row.forEach((node) => {
      place.set(node, [width / 2 + at.get(node) * (BOX.width + BOX.across), 8 + r * (BOX.height + BOX.down)]);
    }));
    const svg = element("svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Neighbours of ${start.id}`,
    });
    svg.append(element("defs", {}, element(
      "marker",
      { id: `arrow-${which.letter}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
      element("path", { d: "M0,0 L8,4 L0,8 Z" }),
    )));
    for (const node of nodes) {
      for (const user of node.down) {
        if (!place.has(user)) continue;
        const [x0, y0] = place.get(node), [x1, y1] = place.get(user);
        const from = y0 + BOX.height, bend = Math.max(18, (y1 - from) / 2);
        svg.append(element("path", {
          class: `edge${node === start || user === start ? " near" : ""}`, "marker-end": `url(#arrow-${which.letter})`,
          d: `M${x0},${from} C${x0},${from + bend} ${x1},${y1 - bend} ${x1},${y1}`,
        }));
      }
    }
    for (const node of nodes) svg.append(box(which, node, ...place.get(node)));
    view.append(svg);
    const [x, y] = place.get(start);
    view.scrollLeft = x - view.clientWidth / 2;
    view.scrollTop = y + BOX.height / 2 - view.clientHeight / 2;
    const hidden = left ? `${left} more neighbours are not drawn; the lists below have them.` : "";
    say(which, hidden, false);
  }

  function say(which, text, stale) {
    const message = which.root.querySelector(".message");
    message.textContent = text;
    message.hidden = !text;
    which.root.querySelector(".view").classList.toggle("stale", stale);
  }

  function jump(letter, id, text) {
    const node = sides[letter].known.get(id);
    const made = html("button", { type: "button", class: "node", "data-side": letter, "data-id": id });
    const about = node ? `  ${node.opcode} ${node.shape}  ${MARK[node.status]}` : "  (not in this page)";
    made.textContent = `${text}${cut(id, 60)}${cut(about, 70)}`;
    made.disabled = !node;
    made.addEventListener("click", () => choose(letter, id));
    return made;
  }

  function describe(which) {
    const node = which.known.get(which.chosen), detail = which.root.querySelector(".detail");
    detail.replaceChildren();
    detail.hidden = !node;
    if (!node) return;
    const list = html("dl");
    const row = (label, ...content) => list.append(html("dt", {}, label), html("dd", {}, ...content));
    const several = (label, letter, ids, text) => {
      if (!ids.length) return;
      const shown = ids.slice(0, MOST.listed).map((id, k) => jump(letter, id, text(k)));
      const more = ids.length - shown.length;
      row(ids.length > 1 ? `${label} (${ids.length})` : label, ...shown, ...(more > 0 ? [`and ${more} more`] : []));
    };
    row("Name", html("code", {}, node.id));
    row("Opcode", html("code", {}, node.opcode));
    const over = which.letter === "a" ? "b" : "a", twin = sides[over].known.get(node.twin);
    const compared = (label, key) => {
      const differs = twin && twin[key] !== node[key];
      if (!node[key] && !differs) return;
      const there = html("span", { class: "badge changed" }, ` in ${over.toUpperCase()}: `);
      row(label, html("code", {}, node[key] || "none"), ...(differs ? [there, html("code", {}, twin[key] || "none")] : []));
    };
    compared("Shape", "shape");
    compared("Attributes", "attrs");
    if (node.where) row("Source", html("code", {}, node.where));
    row("Status", html("span", { class: `badge ${node.status}` }, `${MARK[node.status]} ${tag(node)}`));
    if (node.twin) several("Twin", over, [node.twin], () => "");
    several("Operands", which.letter, node.operands, (k) => `${k}: `);
    several("Users", which.letter, node.users, () => "");
    detail.append(list);
  }

  function show(letter, id) {
    sides[letter].chosen = id;
    draw(sides[letter]);
    describe(sides[letter]);
  }

  // Both sides go together: the twin of what is chosen is chosen over there.
  function choose(letter, id, remember = true) {
    const node = sides[letter].known.get(id);
    if (!node) return;
    if (remember && sides[letter].chosen) {
      past.push([sides.a.chosen, sides.b.chosen]);
      document.getElementById("back").disabled = false;
    }
    show(letter, id);
    const other = letter === "a" ? "b" : "a";
    if (sides[other].known.has(node.twin)) show(other, node.twin);
    else if (sides[other].chosen) say(sides[other], `${cut(id, 60)} has no counterpart here; this is what was shown before.`, true);
    else say(sides[other], `${cut(id, 60)} has no counterpart here, nor has anything near it.`, false);
    try {
      history.replaceState(null, "", `#${letter}=${encodeURIComponent(id)}`);
    } catch { /* some browsers forbid it for files */ }
  }

  function chooseBoth(a, b) {
    const first = (letter, ids) => ids.find((id) => sides[letter].known.has(id));
    const inA = first("a", a), inB = first("b", b);
    if (inB !== undefined) choose("b", inB, false);
    if (inA !== undefined && (inB === undefined || sides.b.known.get(inB).twin !== inA)) {
      if (inB === undefined) choose("a", inA, false);
      else show("a", inA);
    }
    return inA !== undefined || inB !== undefined;
  }

  function nearestOn(letter) {
    // A cause on one side only: the other begins at a counterpart of something next to it.
    const other = letter === "a" ? "b" : "a";
    const seen = new Set(), queue = [sides[letter].known.get(sides[letter].chosen)];
    for (const node of queue) {
      if (!node || seen.has(node)) continue;
      seen.add(node);
      if (sides[other].known.has(node.twin)) return node.twin;
      queue.push(...node.up, ...node.down);
    }
    return undefined;
  }

  function fill(letter) {
    const other = letter === "a" ? "b" : "a";
    const near = nearestOn(letter);
    if (near === undefined) return;
    show(other, near);
    say(sides[other], `${cut(sides[letter].chosen, 60)} has no counterpart here; this is the nearest place that both have.`, false);
  }

  // The list of causes: what is opened is shown beside it.
  const cards = [...document.querySelectorAll("details[data-cause]")];
  let current = 0;

  function showCause(k) {
    current = k;
    const cause = record.causes[k], shown = document.getElementById("cause-shown");
    if (shown) shown.textContent = `cause ${k + 1} of ${cards.length}`;
    for (const which of Object.values(sides)) which.chosen = "";
    const begun = chooseBoth(cause.a, cause.b);
    if (sides.b.chosen && !sides.a.chosen) fill("b");
    if (sides.a.chosen && !sides.b.chosen) fill("a");
    if (!begun) for (const which of Object.values(sides)) say(which, "This cause has no place in the picture.", true);
    return begun;
  }

  function step(by) {
    const listed = cards.filter((card) => !card.hidden), at = listed.indexOf(cards[current]);
    const card = listed[Math.max(0, Math.min(listed.length - 1, at + by))];
    if (!card) return;
    select(card);
    card.scrollIntoView({ block: "nearest" });
    card.querySelector("summary").focus({ preventScroll: true });
  }

  function select(card) {
    if (card === cards[current]) return;
    for (const other of cards) other.open = other === card;
    showCause(cards.indexOf(card));
  }

  for (const card of cards) card.addEventListener("toggle", () => card.open && select(card));
  document.getElementById("previous")?.addEventListener("click", () => step(-1));
  document.getElementById("next")?.addEventListener("click", () => step(1));
  const filter = document.getElementById("filter");
  filter?.addEventListener("input", () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const card of cards) card.hidden = !card.textContent.toLowerCase().includes(wanted);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
    const keys = { n: () => step(1), p: () => step(-1), b: () => document.getElementById("back").click(), "/": () => filter?.focus() };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  for (const button of document.querySelectorAll("button.node[data-id]")) {
    const { side: letter, id } = button.dataset;
    button.disabled = !sides[letter].known.has(id);
    button.addEventListener("click", () => {
      choose(letter, id);
      if (!sides[letter === "a" ? "b" : "a"].known.has(sides[letter].known.get(id).twin)) fill(letter);
      document.getElementById("picture").scrollIntoView({ block: "nearest" });
    });
  }
  document.getElementById("radius").addEventListener("input", (event) => {
    radius = Number(event.target.value);
    document.getElementById("radius-shown").textContent = String(radius);
    for (const which of Object.values(sides)) if (which.chosen) draw(which);
  });
  document.getElementById("back").addEventListener("click", () => {
    const before = past.pop();
    if (!before) return;
    if (before[0]) show("a", before[0]);
    if (before[1]) show("b", before[1]);
    document.getElementById("back").disabled = !past.length;
  });
  const names = document.getElementById("all-names");
  const both = new Map();
  for (const letter of ["b", "a"]) for (const id of sides[letter].known.keys()) both.set(id, letter);
  for (const id of both.keys()) names.append(html("option", { value: id }));
  document.getElementById("find").addEventListener("change", (event) => {
    const text = event.target.value.trim().replace(/^%/, "");
    if (!text) return;
    const id = both.has(text) ? text : [...both.keys()].find((k) => k.includes(text) || sides[both.get(k)].known.get(k).opcode === text);
    event.target.setCustomValidity(id ? "" : "No such node in this page");
    event.target.reportValidity();
    if (id) choose(both.get(id), id);
  });

  const asked = /^#([ab])=(.*)$/.exec(location.hash);
  let begun = false;
  if (asked) {
    let id = "";
    try { id = decodeURIComponent(asked[2]); } catch { /* an address that was cut off */ }
    begun = sides[asked[1]].known.has(id);
    if (begun) choose(asked[1], id, false);
  }
  if (!begun && record.causes.length) begun = showCause(0);
  if (!begun) {
    const any = (nodes) => (nodes.find((n) => n.status !== "same") ?? nodes[0])?.id;
    if (record.nodes_b.length) choose("b", any(record.nodes_b), false);
    else if (record.nodes_a.length) choose("a", any(record.nodes_a), false);
  }
  if (sides.b.chosen && !sides.a.chosen) fill("b");
  if (sides.a.chosen && !sides.b.chosen) fill("a");
})();
