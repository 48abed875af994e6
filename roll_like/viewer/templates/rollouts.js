// The rollouts of the page: filters, a list, and one of them (or two beside each other), by message or by token.
const showRollouts = () => {
  const rollouts = data.rollouts,
    pictures = data.pictures; // pictures: addresses of data by their files
  const PAGE = 200; // rows that the list grows by

  // ---- what is known of the tokens -----------------------------------------------------------------

  // Per token: a number of a sampled piece's token, null where there is none.
  const NUMBERS = {
    "trainer − engine": (piece, at) => (piece.trainer ? number(piece.trainer[at]) - number(piece.engine[at]) : null),
    "log-probability": (piece, at) => number(piece.engine[at]),
    advantage: (piece, at) => (piece.advantages ? number(piece.advantages[at]) : null),
    "policy version": (piece, at) => piece.versions[at],
  };
  const LEGENDS = {
    "trainer − engine": "nats: blue where the trainer finds the token more likely, orange where less",
    "log-probability": "nats, as the engine reported it: darker is less likely",
    advantage: "blue: to be more likely, orange: less",
    "policy version": "that sampled the token: darker is older",
  };
  const sampled = (rollout) => (rollout.saved ? rollout.saved.pieces.filter((piece) => typeof piece !== "string") : []);
  const numbers = (rollout, name) =>
    sampled(rollout).flatMap((piece) =>
      piece.texts.map((_, at) => NUMBERS[name](piece, at)).filter((one) => one !== null),
    );
  const extents = new Map(); // over all rollouts of the page, so that colours can be compared
  const extentOf = (name) => {
    if (!extents.has(name)) extents.set(name, extent(rollouts.flatMap((rollout) => numbers(rollout, name))));
    return extents.get(name);
  };

  // ---- what a rollout is found by ------------------------------------------------------------------

  const contentText = (content) =>
    [content ?? ""]
      .flat()
      .map((part) => part.text ?? asText(part))
      .join("\n");
  for (const rollout of rollouts) {
    const said = (rollout.turns || []).flatMap((turn) => [
      ...[...turn.shown, ...(turn.after || [])].map((message) => contentText(message.content)),
      turn.text,
      JSON.stringify(turn.tool_calls || []),
    ]);
    const asked = (rollout.messages || []).map((message) => contentText(message.content));
    rollout.words = [rollout.id, rollout.task_id, rollout.prompt, ...asked, rollout.text, ...said]
      .join("\n")
      .toLowerCase();
    rollout.gap = extent(numbers(rollout, "trainer − engine").map(Math.abs))[1];
  }
  const SPECIAL = {
    "an invalid action": (rollout) => rollout.invalid > 0,
    "a failed tool call": (rollout) => rollout.failed_calls > 0,
    "rewritten history": (rollout) => (rollout.cuts || 0) > 0,
    "saved tokens": (rollout) => rollout.saved !== undefined,
    "no part in the update": (rollout) => rollout.saved !== undefined && rollout.saved.trained === false,
  };
  const ORDERS = {
    "as sampled": null,
    "lowest reward": (rollout) => number(rollout.reward),
    "highest reward": (rollout) => -number(rollout.reward),
    longest: (rollout) => -(rollout.tokens || 0),
    shortest: (rollout) => rollout.tokens || 0,
    stalest: (rollout) => -(rollout.staleness || 0),
    "largest trainer − engine": (rollout) => -rollout.gap,
  };

  // ---- filters -------------------------------------------------------------------------------------

  const controls = {};
  const choice = (name, label, options, any = true) => {
    if (options.length < 2 && any) return null;
    controls[name] = element(
      "select",
      { id: name },
      (any ? ["", ...options] : options).map((one) =>
        element("option", { value: one }, one === "" ? "any" : String(one)),
      ),
    );
    return element("label", { for: name }, label, controls[name]);
  };
  const range = (name, label, values) => {
    const [low, high] = extent(values);
    if (!(low < high)) return null;
    const bound = (end, hint) =>
      (controls[`${name}-${end}`] = element("input", {
        id: `${name}-${end}`,
        type: "number",
        step: "any",
        placeholder: shown(hint),
        "aria-label": `${label}, ${end}`,
      }));
    return plain("fieldset", plain("legend", label), plain("span", bound("from", low), bound("to", high)));
  };
  const special = Object.keys(SPECIAL).filter((name) => rollouts.some(SPECIAL[name]) && !rollouts.every(SPECIAL[name]));
  const orders = Object.keys(ORDERS).filter(
    (name) =>
      (name !== "stalest" || rollouts.some((one) => one.staleness > 0)) &&
      (name !== "largest trainer − engine" || rollouts.some((one) => one.gap > 0)),
  );
  controls.search = element("input", { id: "search", type: "search", placeholder: "text, id or task" });
  byId("filters").append(
    ...[
      element("label", { for: "search" }, "search", controls.search),
      choice("run", "run", unique(rollouts.map((one) => one.run))),
      choice("kind", "kind", unique(rollouts.map((one) => one.kind))),
      choice("domain", "domain", unique(rollouts.map((one) => one.domain))),
      choice("solved", "solved", unique(rollouts.map((one) => (one.solved ? "yes" : "no")))),
      choice("ended", "ended by", unique(rollouts.map((one) => one.stop_reason))),
      special.length ? choice("special", "with", ["", ...special], false) : null,
      range(
        "step",
        "step",
        rollouts.map((one) => one.step),
      ),
      range(
        "reward",
        "reward",
        rollouts.map((one) => number(one.reward)),
      ),
      range(
        "length",
        "length (tokens)",
        rollouts.map((one) => one.tokens),
      ),
      range(
        "staleness",
        "staleness (versions)",
        rollouts.map((one) => one.staleness),
      ),
      choice("order", "order", orders, false),
      element("button", { type: "reset" }, "reset"),
    ].filter(Boolean),
  );

  const setting = (name) => (controls[name] ? controls[name].value : "");
  const within = (name, value) => {
    const from = setting(`${name}-from`),
      to = setting(`${name}-to`);
    return (from === "" || value >= Number(from)) && (to === "" || value <= Number(to));
  };
  const is = (name, value) => setting(name) === "" || setting(name) === value;
  const wanted = (rollout) =>
    is("run", rollout.run) &&
    is("kind", rollout.kind) &&
    is("domain", rollout.domain) &&
    is("solved", rollout.solved ? "yes" : "no") &&
    is("ended", rollout.stop_reason) &&
    (setting("special") === "" || SPECIAL[setting("special")](rollout)) &&
    within("step", rollout.step) &&
    within("reward", number(rollout.reward)) &&
    within("length", rollout.tokens) &&
    within("staleness", rollout.staleness) &&
    rollout.words.includes(setting("search").toLowerCase());

  // ---- list ----------------------------------------------------------------------------------------

  let found = [],
    length = PAGE,
    current = null;
  const rewardClass = (rollout) => (rollout.solved ? "good" : number(rollout.reward) <= 0 ? "bad" : "");
  const firstWords = (rollout) => (rollout.turns?.length ? rollout.turns[0].text : rollout.text).slice(0, 80);
  const COLUMNS = [
    ["run", "", (one) => one.run, (one) => one.run],
    ["id", "", (one) => button(one.id)],
    ["reward", "number", (one) => element("span", { class: rewardClass(one) }, shown(one.reward))],
    ["tokens", "number", (one) => String(one.tokens ?? "")],
    ["turns", "number", (one) => String(one.turns.length), (one) => one.turns],
    ["stale", "number", (one) => String(one.staleness ?? ""), (one) => one.staleness > 0],
    ["first words", "words", firstWords],
  ].filter(([, , , needed]) => !needed || rollouts.some(needed));
  const drawList = () => {
    const rows = found.slice(0, length).map((rollout) =>
      element(
        "tr",
        {
          id: `row-${rollout.key}`,
          "aria-current": String(rollout === current),
          onclick: () => select(rollout),
        },
        COLUMNS.map(([, kind, cell, needed]) =>
          element("td", { class: kind }, !needed || needed(rollout) ? cell(rollout) : ""),
        ),
      ),
    );
    const more =
      found.length > length
        ? button(`${found.length - length} more`, () => {
            length += PAGE;
            drawList();
          })
        : null;
    fill("list", plain("table", head(COLUMNS), plain("tbody", rows)), more);
  };
  const filter = () => {
    const order = ORDERS[setting("order")];
    found = rollouts.filter(wanted);
    if (order)
      found = found
        .map((one) => [order(one), one])
        .sort((a, b) => a[0] - b[0])
        .map((pair) => pair[1]);
    length = PAGE;
    const rewards = found.map((one) => number(one.reward)).filter(Number.isFinite);
    const mean = rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
    byId("count").textContent =
      `${found.length} of ${plural(rollouts.length, "rollout")}` +
      (rewards.length ? `, mean reward ${shown(mean)}, ${found.filter((one) => one.solved).length} solved` : "") +
      (data.partly ? "; a part of them, evenly over the run: roll-like rollouts RUN -o FILE.html chooses others" : "") +
      ". Keys: j next, k previous, / search, t tokens, ← → from token to token, p to keep one beside the next.";
    drawList();
    if (found.length && !found.includes(current)) select(found[0]);
    if (!found.length) fill("detail", plain("p.soft", "No rollout is like that."));
  };

  // ---- one rollout ---------------------------------------------------------------------------------

  const text = (value) => plain("pre", asText(value));
  const content = (parts) =>
    [parts ?? ""].flat().map((part) => {
      const address = part.image_url?.url ?? "";
      if (address.startsWith("data:image/")) return element("img", { src: address, alt: "picture" });
      return text(part.text ?? part);
    });
  // `[image: LABEL]` in a message is shown as the picture, where there is one
  const pictured = (rollout, list) =>
    list.map((message) => {
      if (!rollout.images || typeof message.content !== "string") return message;
      const parts = [];
      let rest = message.content;
      const first = () =>
        rollout.images
          .filter(({ file }) => Object.hasOwn(pictures, file))
          .map(({ label, file }) => ({ mark: `[image: ${label}]`, file, at: rest.indexOf(`[image: ${label}]`) }))
          .filter(({ at }) => at >= 0)
          .sort((one, other) => one.at - other.at)[0];
      for (let found = first(); found; found = first()) {
        parts.push({ text: rest.slice(0, found.at) }, { image_url: { url: pictures[found.file] } });
        rest = rest.slice(found.at + found.mark.length);
      }
      return { ...message, content: [...parts, { text: rest }].filter((part) => part.text !== "") };
    });
  const block = (kind, label, ...children) => element("div", { class: `block ${kind}` }, plain("b", label), children);
  const messages = (list) =>
    (list || []).map((message) =>
      block(
        message.role === "tool" ? "tool" : "",
        message.role || "message",
        content(message.content),
        (message.tool_calls || []).map(text),
      ),
    );
  const call = (one) =>
    block(
      `tool ${one.error ? "failed" : ""}`,
      `tool call${one.error ? ", failed" : ""}`,
      text(`${one.name || "unreadable"} ${asText(one.arguments)}`),
      one.result === undefined || one.result === null ? null : [plain("b", "result"), text(one.result)],
    );
  const conversation = (rollout) => {
    if (!rollout.turns) {
      return [
        messages(
          pictured(
            rollout,
            rollout.messages?.length ? rollout.messages : [{ role: "prompt", content: rollout.prompt }],
          ),
        ),
        block("policy", "policy", text(rollout.text)),
        rollout.reference === undefined ? null : block("reference", "reference", text(rollout.reference)),
      ];
    }
    return rollout.turns.map((turn, index) => [
      plain("h3", `turn ${index + 1}`),
      plain(
        "p.small.soft",
        `reward ${shown(turn.reward)}; ${plural(turn.tokens, "token")} after ` +
          `${turn.prompt_tokens}; policy ${(turn.sampled - turn.began).toFixed(2)} s, environment ` +
          `${(turn.ended - turn.sampled).toFixed(2)} s`,
      ),
      messages(pictured(rollout, turn.shown || [])),
      block("policy", "policy", text(turn.text)),
      (turn.tool_calls || []).map(call),
      turn.invalid ? block("failed", "the environment found no action in this turn") : null,
      turn.after?.length ? plain("h3", "the end") : null,
      messages(pictured(rollout, turn.after || [])),
    ]);
  };

  // ---- tokens --------------------------------------------------------------------------------------

  let colour = "trainer − engine",
    view = "conversation";
  // [custom property of the colour, strength from 0 to 1]
  const painted = (name, value) => {
    const [low, high] = extentOf(name);
    if (!Number.isFinite(value)) return ["--low", 1];
    if (name === "policy version") return ["--high", high > low ? (high - value) / (high - low) : 0];
    const most = Math.max(Math.abs(low), Math.abs(high));
    return [value < 0 ? "--low" : "--high", most ? Math.abs(value) / most : 0];
  };
  const legend = (name) => {
    const [low, high] = extentOf(name);
    const most = Math.max(Math.abs(low), Math.abs(high));
    const [kind, left, right] =
      name === "policy version"
        ? ["high", low, high]
        : name === "log-probability"
          ? ["low", low, 0]
          : ["signed", -most, most];
    return plain(
      "p.row.small",
      shown(left),
      element("span", { class: `scale ${kind}` }),
      shown(right),
      plain("span.soft", LEGENDS[name]),
    );
  };
  const factsOf = (piece, at, place, count) =>
    [
      ["token", `${place} of ${count}, turn ${piece.turn + 1}`],
      ["text", JSON.stringify(piece.texts[at])],
      ["policy version", String(piece.versions[at])],
      ["engine", `${shown(piece.engine[at], 6)} nats, p ${shown(Math.exp(number(piece.engine[at])), 3)}`],
      piece.trainer ? ["trainer", `${shown(piece.trainer[at], 6)} nats`] : null,
      piece.trainer ? ["trainer − engine", `${shown(NUMBERS["trainer − engine"](piece, at))} nats`] : null,
      piece.advantages ? ["advantage", shown(piece.advantages[at])] : null,
    ].filter(Boolean);
  const drawTokens = (rollout) => {
    const saved = rollout.saved,
      names = Object.keys(NUMBERS).filter((name) => numbers(rollout, name).length);
    if (!names.includes(colour)) [colour] = names;
    const count = sampled(rollout).reduce((sum, piece) => sum + piece.texts.length, 0);
    const tokens = [];
    const go = (place) => {
      tokens.forEach((one) => {
        one.classList.remove("at");
        one.tabIndex = -1;
      });
      tokens[place].classList.add("at");
      tokens[place].tabIndex = 0;
      tokens[place].focus();
    };
    const piecesShown = saved.pieces.map((piece, index) => [
      saved.parts.includes(index) ? plain("span.cut", "history was rewritten: the next sequence") : null,
      typeof piece === "string"
        ? plain("span.shown", piece)
        : piece.texts.map((said, at) => {
            const place = tokens.length,
              [shade, strength] = painted(colour, NUMBERS[colour](piece, at) ?? 0);
            const tell = () =>
              showTip(token.getClientRects()[0] ?? token.getBoundingClientRect(), factsOf(piece, at, place + 1, count));
            const token = element(
              "span.token",
              {
                tabindex: place ? -1 : 0,
                onmouseenter: tell,
                onmouseleave: hideTip,
                onfocus: tell,
                onblur: hideTip,
                onclick: () => go(place),
                onkeydown: (event) => {
                  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
                  if (step && tokens[place + step]) {
                    event.preventDefault();
                    go(place + step);
                  }
                  if (event.key === "Escape") hideTip();
                },
              },
              said === "" ? "·" : said.replaceAll("\n", "↵\n"),
            );
            token.style.backgroundColor = `rgba(var(${shade}), ${(0.65 * strength).toFixed(3)})`;
            tokens.push(token);
            return token;
          }),
    ]);
    return [
      plain(
        "div.colours",
        element(
          "div.row.small",
          { role: "group", "aria-label": "colour" },
          "colour:",
          names.map((name) =>
            toggle(name, name === colour, () => {
              colour = name;
              drawDetail(rollout);
            }),
          ),
        ),
        legend(colour),
      ),
      saved.trained === undefined
        ? plain(
            "p.small.soft",
            "With rollout.save_logprobs: true there are also the trainer's log-probabilities and the advantages.",
          )
        : null,
      element("div", { id: "tokens" }, piecesShown),
    ];
  };

  // ---- detail --------------------------------------------------------------------------------------

  const figures = (rollout) =>
    [
      `reward ${shown(rollout.reward)}`,
      rollout.solved ? "solved" : "not solved",
      rollout.turns ? plural(rollout.turns.length, "turn") : null,
      rollout.tokens === undefined ? null : plural(rollout.tokens, "token"),
      rollout.cuts ? `history rewritten ${plural(rollout.cuts, "time")}` : null,
      rollout.stop_reason ? `ended by ${rollout.stop_reason}` : null,
      rollout.policy_version === undefined ? null : `policy version ${rollout.policy_version}`,
      rollout.staleness === undefined ? null : `staleness ${rollout.staleness}`,
      rollout.answer === undefined ? null : `read as ${asText(rollout.answer)}`,
      rollout.saved?.trained === false ? "left out of the update" : null,
      rollout.gap > 0 ? `largest trainer − engine ${shown(rollout.gap)} nats` : null,
    ]
      .filter(Boolean)
      .join(" · ");
  const pairs = (title, values) => {
    const entries = Object.entries(values || {});
    return entries.length
      ? plain("p.small.soft", `${title}: ${entries.map(([name, one]) => `${name} ${shown(one)}`).join(", ")}`)
      : null;
  };
  const described = (rollout) => {
    const group = rollouts.filter(
      (one) => one.run === rollout.run && one.kind === rollout.kind && one.group === rollout.group,
    );
    const where = [
      rollout.run,
      `${rollout.kind} step ${rollout.step}`,
      rollout.domain,
      rollout.task_id,
      rollout.seed === undefined ? null : `seed ${rollout.seed}`,
    ]
      .filter(Boolean)
      .join(" · ");
    const asTokens = view === "tokens" && rollout.saved;
    const tab = (name) =>
      toggle(name, (name === "tokens") === !!asTokens, () => {
        view = name;
        drawDetail(rollout);
      });
    return [
      plain("h2", rollout.id),
      plain("p.small.soft", where),
      plain("p", figures(rollout)),
      pairs("rewards", rollout.rewards),
      pairs("details", rollout.details),
      group.length > 1
        ? plain(
            "div.row.small",
            "group:",
            group.map((one) =>
              toggle(shown(one.reward, 3), one === rollout, () => select(one), {
                class: rewardClass(one),
                title: one.id,
              }),
            ),
          )
        : null,
      rollout.saved ? plain("div.row", tab("conversation"), tab("tokens")) : null,
      ...[asTokens ? drawTokens(rollout) : conversation(rollout)].flat(Infinity),
    ].filter(Boolean);
  };
  // Pairs of places in two lists that hold the same, in order: their longest common subsequence.
  const common = (left, right) => {
    if (left.length * right.length > 4e6) return left.flatMap((one, at) => (one === right[at] ? [[at, at]] : []));
    const longest = Array.from({ length: left.length + 1 }, () => new Uint32Array(right.length + 1));
    for (let i = left.length - 1; i >= 0; i -= 1) {
      for (let j = right.length - 1; j >= 0; j -= 1) {
        longest[i][j] =
          left[i] === right[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
      }
    }
    const found = [];
    for (let i = 0, j = 0; i < left.length && j < right.length;) {
      if (left[i] === right[j]) found.push([i++, j++]);
      else if (longest[i + 1][j] >= longest[i][j + 1]) i += 1;
      else j += 1;
    }
    return found;
  };
  // marks what one of two rollouts says and the other does not: blocks, and lines of blocks that both have
  const markDifferences = (sides) => {
    const blocks = sides.map((side) => [...side.querySelectorAll("h3, .block")]);
    const matched = common(
      ...blocks.map((list) => list.map((one) => one.querySelector("b")?.textContent ?? one.textContent)),
    );
    blocks.forEach((list, side) =>
      list.forEach((one, at) => one.classList.toggle("only", !matched.some((pair) => pair[side] === at))),
    );
    for (const pair of matched) {
      const texts = pair.map((at, side) => [...blocks[side][at].querySelectorAll("pre")]);
      texts[0].slice(0, texts[1].length).forEach((_, place) => {
        const pres = texts.map((list) => list[place]),
          lines = pres.map((pre) => pre.textContent.split("\n"));
        const same = common(...lines);
        pres.forEach((pre, side) =>
          pre.replaceChildren(
            ...lines[side].flatMap((line, at) => [
              at ? "\n" : "",
              same.some((both) => both[side] === at) ? line : plain("mark", line || " "),
            ]),
          ),
        );
      });
    }
  };
  let kept = null; // the rollout that stays on the left while others are shown on the right
  const drawDetail = (rollout) => {
    hideTip();
    const keep = plain(
      "div.row.small",
      toggle(
        kept ? `beside ${kept.id}` : "keep to compare",
        !!kept,
        () => {
          kept = kept ? null : rollout;
          drawDetail(rollout);
        },
        { title: "stays on the left while others are shown on the right" },
      ),
    );
    if (!kept || kept === rollout) {
      fill("detail", keep, described(rollout));
      return;
    }
    const sides = [kept, rollout].map((one) => plain("div", described(one)));
    fill("detail", keep, plain("div.pair", sides));
    if (view !== "tokens") markDifferences(sides);
  };
  const select = (rollout) => {
    if (current) byId(`row-${current.key}`)?.setAttribute("aria-current", "false");
    current = rollout;
    const row = byId(`row-${rollout.key}`);
    row?.setAttribute("aria-current", "true");
    row?.scrollIntoView({ block: "nearest" });
    history.replaceState(null, "", `#${rollout.key}`);
    drawDetail(rollout);
    byId("detail").scrollTop = 0;
  };

  // ---- start ---------------------------------------------------------------------------------------

  byId("filters").addEventListener("input", filter);
  byId("filters").addEventListener("reset", () => setTimeout(filter));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    if (
      byId("rollouts").hidden ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      /INPUT|SELECT/.test(event.target.tagName)
    )
      return;
    const step = { j: 1, k: -1 }[event.key];
    if (event.key === "/") {
      event.preventDefault();
      controls.search.focus();
    } else if (event.key === "t" && current?.saved) {
      view = view === "tokens" ? "conversation" : "tokens";
      drawDetail(current);
      document.querySelector("#tokens .token")?.focus();
    } else if (event.key === "p" && current) {
      kept = kept ? null : current;
      drawDetail(current);
    } else if (step && found.length) {
      const place = Math.min(found.length - 1, Math.max(0, found.indexOf(current) + step));
      if (place >= length) {
        length += PAGE;
        drawList();
      }
      select(found[place]);
    }
  });
  const named = () => rollouts.find((one) => one.key === decodeURIComponent(location.hash.slice(1)));
  addEventListener("hashchange", () => {
    if (named()) {
      show("rollouts");
      select(named());
    }
  });
  const [left, right] = data.beside.map((key) => rollouts.find((one) => one.key === key));
  kept = left ?? null;
  current = named() ?? right ?? null;
  if (named()) show("rollouts");
  filter();
  if (current) select(current);
};

// ---- start -------------------------------------------------------------------------------------------

fill(
  "parts",
  PARTS.map((part) => button(part, () => show(part), { id: `to-${part}` })),
);
byId("parts").hidden = PARTS.length < 2;
if (overview) {
  drawOverview();
  drawTimeline();
  drawConfiguration();
}
show(PARTS[0]);
if (data.rollouts.length) showRollouts();
