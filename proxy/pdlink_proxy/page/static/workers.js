// Workers and pairs: each of a few; of many, groups with the worst first, and what is opened of them.
import { el, patch, table } from "./draw.js";

const FEW = 24;  // rows that one look takes in
const WORST = 12, GROUPS = 30, OPENED = 20, PAIRS = 12;
const COUNTS = ["running", "awaiting_kv", "waiting"];
const sum = (values) => values.reduce((a, b) => a + b, 0);
const percent = (share) => `${Math.round(share * 100)} %`;
const number = (text) => ({ class: "n", text });
const revision = (w) => (/^[0-9a-f]{20,}$/.test(w.revision) ? w.revision.slice(0, 8) : w.revision);  // a commit is long
export const model = (w) => `${w.model ?? "not known"}${w.revision ? ` @ ${revision(w)}` : ""}`;
const BY = {
  role: (w) => w.side, model, version: (w) => w.version || "not known", cell: (w) => w.cell || "no cell", host: (w) => new URL(w.url).hostname,
};

const held = (w) => w.held ?? 0;
const rank = (w) => [w.state === "ok" ? 0 : w.state === "draining" ? 1 : 2, w.requests?.waiting ?? 0, held(w), w.in_flight];
const worse = (a, b) => {
  for (const [index, mine] of a.entries()) if (mine !== b[index]) return b[index] - mine;
  return 0;
};
const worstFirst = (workers) => workers.map((w) => [rank(w), w]).sort(([a], [b]) => worse(a, b)).map(([, w]) => w);

let apart = [];  // of what each worker runs, what is not the same for all
const heads = () => ["worker", "state", ...apart, "n:legs here", "n:running", "n:waits for KV", "n:queued", "n:blocks held", "reason"];
const row = (w) => [
  { head: true, text: w.name === w.label ? w.label : `${w.label} (${w.name})` }, { class: w.state === "ok" ? "ok" : "bad", text: w.state },
  ...apart.map((what) => BY[what](w)), number(w.in_flight),
  ...COUNTS.map((key) => number(w.requests?.[key] ?? "–")),
  number(w.held == null ? "–" : `${percent(w.held)}${w.blocks.total ? ` of ${w.blocks.total}` : ""}`), { class: "long", text: w.reason },
];

let by = "role", opened = null, state = null;

function groups(workers) {
  const found = new Map();
  for (const w of workers) {
    const name = BY[by](w);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(w);
  }
  const ranked = [...found].map(([name, those]) => {
    const away = those.filter((w) => w.state !== "ok").length;
    return { name, those, away, waiting: sum(those.map((w) => w.requests?.waiting ?? 0)), held: sum(those.map(held)) / those.length };
  });
  return ranked.sort((a, b) => worse([a.away, a.waiting, a.held], [b.away, b.waiting, b.held]));
}

function open(name) {
  opened = opened === name ? null : name;
  show(state);
}

function choose(event) {
  by = event.target.value;
  opened = null;
  show(state);
}

function ofMany(workers) {
  const all = groups(workers), states = (those) => {
    const counts = new Map();
    for (const w of those) counts.set(w.state, (counts.get(w.state) ?? 0) + 1);
    return [...counts].sort(([a], [b]) => (a === "ok") - (b === "ok")).map(([name, count]) => `${count} ${name}`).join(", ");
  };
  const rows = all.slice(0, GROUPS).flatMap((group) => {
    const { name, those } = group, total = (pick) => number(sum(those.map(pick)));
    const button = el("button", { class: "id", "aria-expanded": String(opened === name), onclick: () => open(name) }, name);
    const cells = [{ head: true, node: button }, number(those.length), { class: group.away ? "bad" : "ok", text: states(those) }, total((w) => w.in_flight),
      ...COUNTS.map((key) => total((w) => w.requests?.[key] ?? 0)), number(`${percent(group.held)}, most ${percent(Math.max(...those.map(held)))}`)];
    return opened === name ? [cells, { below: table(`Workers of ${name}`, heads(), worstFirst(those).slice(0, OPENED).map(row)) }] : [cells];
  });
  const more = all.length > GROUPS ? `${all.length - GROUPS} more groups, none of them worse.` : "";
  const choice = el("label", {}, "Group by ", el("select", { onchange: choose }, ...Object.keys(BY).map((name) => el("option", { value: name }, name))));
  return [
    el("p", { class: "quiet" }, `${workers.length} workers, the worst first. A group opens to its worst workers. `, choice),
    table("Groups of workers", ["group", "n:workers", "states", "n:legs here", "n:running", "n:waits for KV", "n:queued", "n:blocks held"], rows),
    el("p", { class: "quiet" }, more),
    el("h3", {}, "The worst"),
    table("The worst workers", heads(), worstFirst(workers).slice(0, WORST).map(row)),
  ];
}

export function show(now) {
  state = now;
  const { workers } = state;
  apart = ["model", "version"].filter((what) => new Set(workers.filter((w) => w[what]).map(BY[what])).size > 1);
  patch(document.getElementById("workers"), workers.length > FEW ? ofMany(workers) : [table("Workers", heads(), workers.map(row))]);
  pairs(state.pairs);
}

function cell(p) {
  if (p.state === "refused") return { class: "bad", text: `✗ ${p.reason}` };
  if (p.state === "no session") return { class: "quiet", text: "no session now" };
  if (p.state === "not told") return { class: "quiet", text: "not told" };
  return { class: "ok", text: `${p.lane}${p.gb_per_s ? ` ${p.gb_per_s.toFixed(1)} GB/s` : ""}` };
}

function pairs(all) {
  const prefill = [...new Set(all.map((p) => p.prefill))], decode = [...new Set(all.map((p) => p.decode))];
  const at = new Map(all.map((p) => [`${p.prefill} ${p.decode}`, p]));
  let made;
  if (Math.max(prefill.length, decode.length) <= 8) {
    made = [table("Pairs", ["prefill", ...decode], prefill.map((one) => [{ head: true, text: one }, ...decode.map((other) => cell(at.get(`${one} ${other}`)))]))];
  } else {  // no eye finds one of a thousand
    const speed = (p) => (p.state === "refused" ? -1 : p.gb_per_s ?? Infinity);
    const worst = all.filter((p) => speed(p) < Infinity).sort((a, b) => speed(a) - speed(b)).slice(0, PAIRS);
    const lanes = new Map();
    for (const p of all) lanes.set(p.lane || p.state, (lanes.get(p.lane || p.state) ?? 0) + 1);
    made = [
      el("p", { class: "quiet" }, `${all.length} pairs: ${[...lanes].map(([lane, count]) => `${count} ${lane}`).join(", ")}.${worst.length ? " The slowest:" : ""}`),
      ...(worst.length ? [table("Pairs", ["prefill", "decode", "lane"], worst.map((p) => [{ head: true, text: p.prefill }, p.decode, cell(p)]))] : []),
    ];
  }
  patch(document.getElementById("pairs"), made);
}
