// Shows GET state once a second while the page is visible. Every word of others goes into text nodes only.
import { el, patch, table } from "./draw.js";

const $ = (id) => document.getElementById(id);
const GLYPHS = { l: "█", f: "▓", w: "▒", ".": "░" };
let before = null, charts = null, opened = null, story = null;

const ms = (value) => (value == null ? "–" : value < 10 ? `${value.toFixed(1)} ms` : value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`);
const seconds = (value) => (value == null ? "–" : ms(value * 1000));
const percent = (value) => (value == null ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`);
const bytes = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${Math.round(n / 1e3)} kB`);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const LONGEST = 20, HAPPENED = 8;
const short = (id) => (id.length > 16 ? `${id.slice(0, 14)}…` : id);

async function ask(path) {
  const key = sessionStorage.getItem("pdlink-key");
  const answer = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  $("door").hidden = answer.status !== 401;
  $("refused").textContent = answer.status === 401 && key ? "That is not one of this proxy's keys." : "";
  if (!answer.ok) throw new Error(answer.status === 401 ? "This proxy wants a key." : `The proxy answered ${answer.status}.`);
  return answer.json();
}

function total(state, name, label) {
  return sum(state.workers.flatMap((w) => Object.entries(w.totals?.[name] ?? {}).filter(([key]) => !label || key === label).map(([, value]) => value)));
}

function labels(state, name) {
  return [...new Set(state.workers.flatMap((w) => Object.keys(w.totals?.[name] ?? {})))].sort();
}

let past = null, now = null;

function rates(state) {
  if (now && state.reported_s === past.reported_s) return now;
  const from = past ?? state, took = Math.max(state.reported_s - from.reported_s, 1e-3);
  const rate = (name, label) => Math.max(0, total(state, name, label) - total(from, name, label)) / took;
  past = state;
  return now = { lanes: labels(state, "transfer_bytes").map((lane) => [lane, rate("transfer_bytes", lane)]), tokens: rate("tokens", "completion") };
}

function figures(state, speeds) {
  const s = state.summary, answered = sum(Object.values(s.kv));
  const prompts = total(state, "prompt_tokens"), flows = speeds.lanes.filter(([, rate]) => rate > 0);
  const found = prompts - total(state, "prompt_tokens", "prefill") - total(state, "prompt_tokens", "computed");
  const cards = [
    ["first token, p50", ms(s.ttft_p50_ms)], ["first token, p95", ms(s.ttft_p95_ms)],
    ["each further token, p50", ms(s.per_token_p50_ms)], ["KV now", flows.length ? flows.map(([lane, rate]) => `${bytes(rate)}/s ${lane}`).join(" · ") : "–"],
    ["answers now", `${Math.round(speeds.tokens)} tokens/s`],
    ["not hidden by prefill", s.exposed_ms == null ? "–" : `${percent(s.exposed_share)} (${ms(s.exposed_ms)})`],
    ["KV transferred", answered ? percent((s.kv.transferred ?? 0) / answered) : "–"],
    ["prompt tokens found", prompts ? percent(found / prompts) : "–"],
    ["running · queued", `${state.running} · ${state.queued}`],
  ];
  patch($("figures"), cards.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function workers(state) {
  const rows = state.workers.map((w) => [
    { head: true, text: w.label }, w.name, { class: w.state === "ok" ? "ok" : "bad", text: w.state },
    { class: "n", text: w.in_flight }, ...["running", "awaiting_kv", "waiting"].map((key) => ({ class: "n", text: w.requests?.[key] ?? "–" })),
    { class: "n", text: w.blocks?.total ? `${percent(1 - w.blocks.free / w.blocks.total)} of ${w.blocks.total}` : "–" }, { class: "long", text: w.reason },
  ]);
  patch($("workers"), [table("Workers", ["worker", "name", "state", "n:legs here", "n:running", "n:waits for KV", "n:queued", "n:blocks held", "reason"], rows)]);
}

function pairs(state) {
  const prefill = [...new Set(state.pairs.map((p) => p.prefill))], decode = [...new Set(state.pairs.map((p) => p.decode))];
  const at = new Map(state.pairs.map((p) => [`${p.prefill} ${p.decode}`, p]));
  const rows = prefill.map((one) => [{ head: true, text: one }, ...decode.map((other) => {
    const p = at.get(`${one} ${other}`);
    if (p.state === "refused") return { class: "bad", text: `✗ ${p.reason}` };
    if (p.state === "no session") return { class: "quiet", text: "no session now" };
    return { class: "ok", text: `${p.lane}${p.gb_per_s ? ` ${p.gb_per_s.toFixed(1)} GB/s` : ""}` };
  })]);
  patch($("pairs"), [table("Pairs", ["prefill", ...decode], rows)]);
}

function strip(layers) {
  const count = (state) => [...layers].filter((c) => c === state).length;
  const words = [`${count("l")} of ${layers.length} layers landed`, ...(count("f") ? [`${count("f")} in flight`] : []), ...(count("w") ? [`${count("w")} waits for the link`] : [])];
  return el("span", { class: "cells", role: "img", "aria-label": words.join(", ") }, ...[...layers].map((c) => el("i", { class: c === "." ? "" : c }, GLYPHS[c] ?? "?")));
}

function transfers(state) {
  patch($("live"), state.live.length ? [table("Transfers now", ["transfer", "from", "to", "lane", "layers", "n:KV", "n:age"], state.live.map((t) => [
    short(t.transfer_id), t.worker, t.peer || "–", t.lane || "–", { node: strip(t.layers) }, { class: "n", text: bytes(t.nbytes) }, { class: "n", text: seconds(t.age_s) }]))]
    : [el("p", { class: "quiet" }, "None at this moment.")]);
  patch($("ended"), state.ended.length ? [table("Transfers that ended", ["transfer", "from", "to", "lane", "n:KV", "n:moving", "n:GB/s", "n:not hidden", "end"], state.ended.slice(0, LONGEST / 2).map((t) => [
    short(t.transfer_id), t.worker, t.peer, t.lane, { class: "n", text: bytes(t.nbytes) }, { class: "n", text: seconds(t.moving_s) },
    { class: "n", text: t.moving_s ? (t.nbytes / t.moving_s / 1e9).toFixed(2) : "–" }, { class: "n", text: seconds(t.exposed_s) },
    { class: t.reason ? "bad" : "ok", text: t.reason || t.state.toLowerCase() }]))] : [el("p", { class: "quiet" }, "None yet.")]);
}

function waterfall(r, longest) {
  const end = r.ttft_s ?? r.total_s, queue = r.queued_s, lost = r.lost_s, placed = queue + lost;
  const prefill = Math.max(0, Math.min((r.prefill_s ?? placed) - placed, end - placed)), rest = end - placed - prefill;
  const words = `queued ${seconds(queue)}, ${lost ? `lost ${seconds(lost)}, ` : ""}prefill ${seconds(prefill)}, then ${seconds(rest)}`;
  return el("span", { class: "bar", role: "img", "aria-label": words, title: words },
    ...[["queue", queue], ["lost", lost], ["prefill", prefill], ["rest", rest]].map(([name, s]) => el("span", { class: name, width: `${(100 * s / longest).toFixed(1)}%` })));
}

function requests(state) {
  const filter = $("filter").value;
  let shown = [...state.requests];
  if (filter === "odd") shown = shown.filter((r) => r.outcome !== "ok" || r.kv.startsWith("recomputed"));
  if (filter === "slow") shown.sort((a, b) => (b.ttft_s ?? b.total_s) - (a.ttft_s ?? a.total_s));
  shown = shown.slice(0, LONGEST);
  const longest = Math.max(1e-6, ...shown.map((r) => r.ttft_s ?? r.total_s));
  const rows = shown.map((r) => [
    { node: el("button", { class: "id", onclick: () => explain(r), "aria-expanded": String(opened === r.request_id) }, short(r.request_id)) },
    { class: r.outcome === "ok" ? "ok" : "bad", text: r.outcome }, { class: r.kv.startsWith("recomputed") ? "warn" : "", text: r.kv },
    { class: "n", text: r.prompt_tokens }, r.prefill ?? "–", r.decode ?? "–", { node: waterfall(r, longest) },
    { class: "n", text: seconds(r.ttft_s) }, { class: "n", text: seconds(r.total_s) }]);
  const found = [table("Requests", ["request", "end", "KV", "n:prompt tokens", "prefill", "decode", "to the first token", "n:first token", "n:all"], rows)];
  if (!shown.length) found[0] = el("p", { class: "quiet" }, "None.");
  if (opened) found.push(el("pre", {}, story ?? "…"));
  patch($("requests"), found);
}

async function explain(r) {
  opened = opened === r.request_id ? null : r.request_id;
  story = null;
  if (before) requests(before);
  if (!opened) return;
  let told;
  try {
    told = await ask(`../decisions?request=${encodeURIComponent(r.request_id)}`);
  } catch (error) {
    story = error.message;
    if (before) requests(before);
    return;
  }
  story = [`request ${r.request_id}, transfer ${r.transfer_id || "none"}`, ...told.decisions.map((d) =>
    `${seconds(d.waited_s).padStart(9)}  ${d.verdict}${d.prefill ? `, prefill on ${d.prefill}` : ""}${d.decode ? `, decode on ${d.decode}` : ""}${d.reason ? `: ${d.reason}` : ""}`),
  ...told.transfers.filter((t) => t.side === "sender").map((t) =>
    `${seconds(t.moving_s).padStart(9)}  in which ${bytes(t.nbytes)} moved over ${t.lane || "no lane"}, ${seconds(t.exposed_s)} of it not hidden by prefill${t.reason ? `; ${t.reason}` : ""}`),
  `pdlink explain ${r.request_id}  says more`].join("\n");
  if (before) requests(before);
}

function rest(state) {
  patch($("errors"), state.errors.length ? [table("Failures and fallbacks", ["what", "cause", "n:count", "newest"], state.errors.map((e) => [e.kind, e.cause, { class: "n", text: e.count }, e.newest]))]
    : [el("p", { class: "quiet" }, "Nothing.")]);
  patch($("tiers"), [tiers(state)]);
}

function tiers(state) {
  const chunks = (place) => total(state, "store_chunks", place), n = (text) => ({ class: "n", text });
  const places = labels(state, "store_chunks").filter((place) => place !== "missed");
  if (!places.length) return el("p", { class: "quiet" }, "No worker keeps KV of earlier prompts.");
  const evicted = `${total(state, "store_records", "evicted")} (${bytes(total(state, "store_record_bytes", "evicted"))})`;
  const rows = places.map((place) => [{ head: true, text: place }, n(chunks(place)), ...(place === "memory"
    ? [n(bytes(total(state, "store_copied_bytes", "load"))), n(bytes(total(state, "store_record_bytes", "stored"))), n(evicted)]
    : [n(bytes(total(state, "tier_bytes", `${place}/get`))), n(bytes(total(state, "tier_bytes", `${place}/put`))), n("–")])]);
  return table("Tiers", ["tier", "n:chunks found", "n:read", "n:written", "n:evicted"], [...rows, [{ head: true, text: "in none of them" }, n(chunks("missed")), n(""), n(""), n("")]]);
}

async function drawCharts(state) {
  if (state.history.length < 2) return;  // no line yet
  if (charts === null) {
    charts = false;
    $("charts").hidden = false;  // its width counts
    try { charts = (await import("./charts.js")).open($("charts")); } catch { $("charts").hidden = true; }  // tables only
  }
  if (charts) charts(state.history, state.happened);
}

function happened(state) {
  const ago = (s) => { const past = Math.max(0, state.at_s - s); return past < 60 ? `${Math.round(past)} s ago` : `${Math.round(past / 60)} min ago`; };
  const until = (each) => (state.at_s - each.until_s < 15 ? "now" : ago(each.until_s));
  const went = (each) => (each.until_s - each.at_s > 20 ? `${ago(each.at_s)} until ${until(each)}` : ago(each.at_s));
  patch($("happened"), state.happened.slice(0, HAPPENED).map((each) => el("li", { "data-level": each.level }, el("time", {}, went(each)), ` ${each.text}`)));
}

function judge(text, level) {
  if ($("verdict").textContent !== text) $("verdict").textContent = text;  // what stays the same is not read out again
  $("verdict").dataset.level = level;
}

function show(state) {
  const speeds = rates(state);
  judge(state.verdict.text, state.verdict.level);
  $("age").textContent = new Date(state.at_s * 1000).toLocaleTimeString();
  figures(state, speeds); workers(state); pairs(state); transfers(state); before = state; requests(state); rest(state);
  happened(state); drawCharts(state);
}

async function round() {
  try {
    if (!document.hidden) show(await ask("state"));
  } catch (error) {
    judge(error.message === "Failed to fetch" ? "The proxy does not answer." : error.message, "bad");
  }
  setTimeout(round, 1000);
}

$("door").addEventListener("submit", (event) => { event.preventDefault(); sessionStorage.setItem("pdlink-key", $("key").value); });
$("filter").addEventListener("change", () => before && requests(before));
round();
