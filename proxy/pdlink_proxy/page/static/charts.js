// Lines over the last 15 minutes, in SVG: their colours are the page's own, in both schemes.
const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 364, HEIGHT = 140, LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 22;
const TICKS = 4, TIMES = 3;

// Each chart: its title, and by name of a line what it shows of a step.
const found = (step, ...sources) => sources.reduce((a, source) => a + (step.sources[source] ?? 0), 0);
const below = (step) => Object.entries(step.sources).reduce((a, [source, n]) => a + (["device", "host", "prefill", "computed"].includes(source) ? 0 : n), 0);
const CHARTS = [
  ["TTFT, ms", { p50: (s) => s.ttft_p50_ms, p95: (s) => s.ttft_p95_ms }],
  ["requests a second", { ended: (s) => s.requests_per_s, failed: (s) => s.failed_per_s }],
  ["requests now", { running: (s) => s.running, queued: (s) => s.queued }],
  ["KV, GB/s over all lanes", { "GB/s": (s) => (s.kv_bytes_per_s == null ? null : s.kv_bytes_per_s / 1e9) }],
  ["prompt tokens found, a second", { memory: (s) => found(s, "device", "host"), tiers: below }],
];

function svg(tag, props, ...children) {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// From 0 to the highest value or above it, in TICKS steps at most, each of 1, 2 or 5 times a power of ten.
function ticks(highest) {
  const rough = (highest || 1) / TICKS, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= rough * 0.999);
  return Array.from({ length: Math.ceil((highest || 1) / step - 0.001) + 1 }, (_, index) => index * step);
}

const label = (value) => (value >= 10_000 ? `${Number((value / 1000).toPrecision(3))}k` : `${Number(value.toPrecision(3))}`);
const clock = (at_s) => new Date(at_s * 1000).toLocaleTimeString([], { hour12: false });

// Where there is no value, there is no line; a value between two that are missing is a dot.
function line(values, x, y) {
  let before = null;
  return values.map((value, index) => {
    const point = value == null ? "" : `${before == null ? `M${x(index)} ${y(value)}` : ""}L${x(index)} ${y(value)}`;
    before = value;
    return point;
  }).join("");
}

function drawn(lines, steps, happened) {
  const first = steps[0].at_s, last = steps.at(-1).at_s, right = WIDTH - RIGHT, low = HEIGHT - BOTTOM;
  const at = (at_s) => (LEFT + (right - LEFT) * (at_s - first) / (last - first)).toFixed(1);
  const all = lines.map((of) => steps.map(of)), scale = ticks(Math.max(0, ...all.flat().filter((value) => value != null)));
  const y = (value) => (low - (low - TOP) * value / scale.at(-1)).toFixed(1), x = (index) => at(steps[index].at_s);
  const times = Array.from({ length: TIMES }, (_, index) => first + (last - first) * index / (TIMES - 1));
  const anchor = (index) => (index === 0 ? "start" : index === TIMES - 1 ? "end" : "middle");
  return [
    ...scale.map((value) => svg("path", { class: "grid", d: `M${LEFT} ${y(value)}H${right}` })),
    ...scale.map((value) => svg("text", { x: LEFT - 6, y: y(value), "text-anchor": "end", "dominant-baseline": "middle" }, label(value))),
    ...times.map((at_s, index) => svg("text", { x: at(at_s), y: HEIGHT - 4, "text-anchor": anchor(index) }, clock(at_s))),
    ...happened.filter(({ at_s }) => at_s >= first && at_s <= last).map(({ at_s, level }) => svg("path", { class: `mark ${level}`, d: `M${at(at_s)} ${TOP}V${low}` })),
    ...all.map((values, index) => svg("path", { class: index ? "two" : "one", d: line(values, x, y) })),
  ];
}

export function open(place) {
  const charts = CHARTS.map(([title, lines]) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const keys = Object.keys(lines).map((name, index) => Object.assign(document.createElement("span"), { className: `key ${index ? "two" : "one"}`, textContent: name }));
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, over the last 15 minutes` });  // its figures are in the text above
    caption.append(title, " ", ...keys);
    figure.append(caption, picture);
    place.append(figure);
    return { figure, picture, lines: Object.values(lines) };
  });
  let shown = "";
  return (steps, happened) => {
    const now = `${steps.at(-1).at_s} ${happened.length} ${happened[0]?.at_s}`;
    if (now === shown) return;
    shown = now;
    for (const { figure, picture, lines } of charts) {
      figure.hidden = !steps.some((step) => lines.some((of) => of(step)));  // nothing to see, as of tiers that nobody has
      if (!figure.hidden) picture.replaceChildren(...drawn(lines, steps, happened));
    }
  };
}
