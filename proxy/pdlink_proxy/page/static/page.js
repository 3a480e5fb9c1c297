// Shows GET state once a second while the page is visible. Every word of others goes into text nodes only.
import { open as openCharts } from "./charts.js";
import { el, patch, table } from "./draw.js";
import { model, show as showWorkers } from "./workers.js";

const $ = (id) => document.getElementById(id);
const GLYPHS = { l: "█", f: "▓", w: "▒", ".": "░" };
let before = null, charts = null, opened = null, story = null;

const ms = (value) => (value == null ? "–" : value < 10 ? `${value.toFixed(1)} ms` : value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`);
const seconds = (value) => (value == null ? "–" : ms(value * 1000));
const percent = (value) => (value == null ? "–" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`);
const bytes = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${Math.round(n / 1e3)} kB`);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const LONGEST = 20, HAPPENED = 8, FINDINGS = 4;
const short = (id) => (id.length > 16 ? `${id.slice(0, 14)}…` : id);

async function ask(path) {
  const key = sessionStorage.getItem("pdlink-key");
  const answer = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  $("door").hidden = answer.status !== 401;
  $("refused").textContent = answer.status === 401 && key ? "That is not one of this proxy's keys." : "";
  if (!answer.ok) throw new Error(answer.status === 401 ? "This proxy wants a key." : `The proxy answered ${answer.status}.`);
  return answer.json();
}

const total = (state, name, label) => (label ? state.totals[name]?.[label] ?? 0 : sum(Object.values(state.totals[name] ?? {})));
const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`); // a client chose it
const places = (state, name) => Object.keys(state.totals[name] ?? {}).sort();

function figures(state) {
  const s = state.summary, answered = sum(Object.values(s.kv)), step = state.history.at(-1);
  const prompts = total(state, "prompt_tokens"), lanes = Object.entries(state.rates?.kv_bytes_per_s ?? {});
  const found = prompts - total(state, "prompt_tokens", "prefill") - total(state, "prompt_tokens", "computed");
  const served = state.workers.filter((w) => w.model), models = [...new Set(served.map(model))], versions = [...new Set(state.workers.map((w) => w.version).filter((version) => version))];
  const cards = [
    ["TTFT, p50 · p95", `${ms(s.ttft_p50_ms)} · ${ms(s.ttft_p95_ms)}`], ["ITL, p50", ms(s.per_token_p50_ms)],
    ["requests · failed, a second", step ? `${step.requests_per_s.toFixed(1)} · ${step.failed_per_s.toFixed(1)}` : "–"],
    ["running · queued", `${state.running} · ${state.queued}`],
    ["answers", state.rates ? `${Math.round(state.rates.tokens_per_s)} tokens/s` : "–"],
    ["KV moved", lanes.length ? lanes.map(([lane, rate]) => `${bytes(rate)}/s ${lane}`).join(" · ") : "–"],
    ["KV transferred", answered ? percent((s.kv.transferred ?? 0) / answered) : "–"],
    ["not hidden by prefill", s.exposed_ms == null ? "–" : `${percent(s.exposed_share)} (${ms(s.exposed_ms)})`],
    ["prompt tokens found", prompts ? percent(found / prompts) : "–"],
    ["engine · model", `${versions.length === 1 ? versions[0] : state.engine} · ${models.length > 1 ? `${models.length} models` : served[0]?.model ?? "–"}`],
  ];
  patch($("figures"), cards.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
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

function sessions(state) {
  $("sessions").parentNode.hidden = !state.sessions.length;
  patch($("sessions"), [table("Sessions", ["session", "prefill", "decode", "n:turns", "n:moved", "n:prompt tokens", "n:kept", "now"], state.sessions.map((s) => [
    short(s.id), s.workers.prefill ?? "–", s.workers.decode ?? "–", { class: "n", text: String(s.turns) }, { class: "n", text: String(s.moved) },
    { class: "n", text: String(s.tokens) }, { class: "n", text: s.kept_tokens == null ? "–" : String(s.kept_tokens) }, s.running ? "a turn runs" : "waits"]))]);
}

const PARTS = ["queue", "lost", "prefill", "transfer"];

function waterfall(r, longest) {
  const words = PARTS.filter((name) => r.parts[name] || name !== "lost").map((name) => `${name} ${seconds(r.parts[name])}`).join(", ");
  return el("span", { class: "bar", role: "img", "aria-label": words, title: words },
    ...PARTS.map((name) => el("span", { class: name, width: `${(100 * r.parts[name] / longest).toFixed(2)}%` })));
}

function modelOf(state, r) {  // with its revision, which its workers know
  const at = state.workers.find((w) => w.label === (r.decode ?? r.prefill));
  return at?.model === r.model ? model(at) : r.model;
}

function requests(state) {
  const filter = $("filter").value, several = new Set(state.requests.map((r) => modelOf(state, r))).size > 1;
  let shown = [...state.requests];
  if (filter === "odd") shown = shown.filter((r) => r.outcome !== "ok" || r.kv.startsWith("recomputed"));
  if (filter === "slow") shown.sort((a, b) => (b.ttft_s ?? b.total_s) - (a.ttft_s ?? a.total_s));
  shown = shown.slice(0, LONGEST);
  if (opened && !shown.some((r) => r.request_id === opened.request_id)) shown.push(opened);  // who reads it goes on reading
  const longest = Math.max(1e-6, ...shown.map((r) => r.ttft_s ?? r.total_s));
  const rows = shown.flatMap((r) => [[
    { head: true, node: el("button", { class: "id", onclick: () => explain(r), "aria-expanded": String(opened?.request_id === r.request_id) }, short(r.request_id)) },
    { class: r.outcome === "ok" ? "ok" : "bad", text: r.outcome }, ...(several ? [modelOf(state, r)] : []), { class: r.kv.startsWith("recomputed") ? "warn" : "", text: r.kv },
    { class: "n", text: `${r.estimated ? "≈ " : ""}${r.prompt_tokens}` }, r.prefill ?? "–", r.decode ?? "–", { node: waterfall(r, longest) },
    { class: "n", text: seconds(r.ttft_s) }, { class: "n", text: seconds(r.total_s) }],
  ...(opened?.request_id === r.request_id ? [{ below: el("div", { id: "story" }, ...(story ?? ["…"])) }] : [])]);
  const heads = ["request", "end", ...(several ? ["model"] : []), "KV", "n:prompt tokens", "prefill", "decode", "to the first token", "n:TTFT", "n:total"];
  patch($("requests"), shown.length ? [table("Requests", heads, rows)] : [el("p", { class: "quiet" }, "None.")]);
}

async function explain(r) {
  opened = opened?.request_id === r.request_id ? null : r;
  story = null;
  if (before) requests(before);
  if (!opened) return;
  let told;
  try {
    told = tale(r, await ask(`../decisions?request=${encodeURIComponent(r.request_id)}`));
  } catch (error) {
    told = [error.message];
  }
  if (opened !== r) return;  // another one was opened meanwhile
  story = told;
  if (before) requests(before);
  $("story")?.scrollIntoView({ block: "nearest" });
}

function tale(r, told) {
  const tokens = (source) => [["in its own blocks", source.cached], ...Object.entries(source.places), ["from prefill", source.received], ["computed", source.computed]]
    .filter(([, count]) => count).map(([place, count]) => `${count} ${place}`).join(", ");
  const lines = [
    `request ${r.request_id}, transfer ${r.transfer_id || "none"}, model ${modelOf(before, r) || "not named"}, engine ${before.engine}`,
    `prompt: ${r.estimated ? "about " : ""}${r.prompt_tokens} tokens${r.estimated ? ", an estimate by its text: the answer did not say" : ""}`,
    ...told.sources.map((s) => `${s.worker}: ${s.error ? `does not say where their KV came from: ${s.error}` : tokens(s) || "nothing"}`),
    `TTFT ${seconds(r.ttft_s)}: ${PARTS.map((name) => `${name} ${seconds(r.parts[name])}`).join(", ")}`,
    ...told.decisions.map((d) => `${seconds(d.waited_s).padStart(9)}  ${d.verdict}${d.prefill ? `, prefill on ${d.prefill}` : ""}${d.decode ? `, decode on ${d.decode}` : ""}${d.reason ? `: ${d.reason}` : ""}`),
    ...told.transfers.filter((t) => t.side === "sender").map((t) =>
      `${seconds(t.moving_s).padStart(9)}  in which ${bytes(t.nbytes)} moved over ${t.lane || "no lane"}, ${seconds(t.exposed_s)} of it not hidden by prefill${t.reason ? `; ${t.reason}` : ""}`),
    `pdlink explain ${quoted(r.request_id)}  says more`,
  ];
  return [el("pre", {}, lines.join("\n"))];
}

function rest(state) {
  patch($("errors"), state.errors.length ? [table("Failures and fallbacks", ["what", "cause", "n:count", "newest"], state.errors.map((e) => [e.kind, e.cause, { class: "n", text: e.count }, e.newest]))]
    : [el("p", { class: "quiet" }, "Nothing.")]);
  patch($("tiers"), [tiers(state)]);
}

function tiers(state) {
  const chunks = (place) => total(state, "store_chunks", place), n = (text) => ({ class: "n", text });
  const kept = places(state, "store_chunks").filter((place) => place !== "missed");
  if (!kept.length) return el("p", { class: "quiet" }, "No worker keeps KV of earlier prompts.");
  const evicted = `${total(state, "store_records", "evicted")} (${bytes(total(state, "store_record_bytes", "evicted"))})`;
  const rows = kept.map((place) => [{ head: true, text: place }, n(chunks(place)), ...(place === "memory"
    ? [n(bytes(total(state, "store_copied_bytes", "load"))), n(bytes(total(state, "store_record_bytes", "stored"))), n(evicted)]
    : [n(bytes(total(state, "tier_bytes", `${place}/get`))), n(bytes(total(state, "tier_bytes", `${place}/put`))), n("–")])]);
  return table("Tiers", ["tier", "n:chunks found", "n:read", "n:written", "n:evicted"], [...rows, [{ head: true, text: "in none of them" }, n(chunks("missed")), n(""), n(""), n("")]]);
}

function drawCharts(state) {
  if (state.history.length < 2) return;  // no line yet
  charts ??= openCharts($("charts"));
  $("charts").hidden = false;
  charts(state.history, state.happened);
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

function findings(state) {
  const further = state.findings.slice(1, FINDINGS + 1);
  patch($("findings"), further.map((each, index) => el("li", { "data-level": each.level }, `${each.about}: ${each.text}. `,
    each.remedy === state.findings[index].remedy ? null : el("span", { class: "quiet" }, `${each.remedy}.`))));
}

function show(state) {
  judge(state.verdict.text, state.verdict.level);
  $("age").textContent = new Date(state.at_s * 1000).toLocaleTimeString();
  findings(state); figures(state); showWorkers(state); transfers(state); sessions(state); before = state; requests(state); rest(state);
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
