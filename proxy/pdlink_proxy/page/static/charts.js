// Lines over time, by uPlot, where `make` has fetched it; without it the page shows its tables alone.
import uPlot from "./vendor/uPlot.esm.js";

const style = document.createElement("link");
style.rel = "stylesheet";
style.href = new URL("./vendor/uPlot.min.css", import.meta.url).href;
document.head.append(style);

// Each chart: its title, and by name of a line what it shows of a step.
const found = (step, ...sources) => sources.reduce((a, source) => a + (step.sources[source] ?? 0), 0);
const below = (step) => Object.entries(step.sources).reduce((a, [source, n]) => a + (["device", "host", "prefill", "computed"].includes(source) ? 0 : n), 0);
const CHARTS = [
  ["time to the first token, ms", { p50: (s) => s.ttft_p50_ms, p95: (s) => s.ttft_p95_ms }],
  ["requests a second", { ended: (s) => s.requests_per_s, failed: (s) => s.failed_per_s }],
  ["requests now", { running: (s) => s.running, queued: (s) => s.queued }],
  ["KV, GB/s over all lanes", { "GB/s": (s) => (s.kv_bytes_per_s == null ? null : s.kv_bytes_per_s / 1e9) }],
  ["prompt tokens found, a second", { "in memory": (s) => found(s, "device", "host"), "in tiers below": below }],
];

export function open(place) {
  const colour = (name) => {  // a canvas knows no variables of CSS
    const probe = place.appendChild(Object.assign(document.createElement("i"), { className: name }));
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  };
  const colours = Object.fromEntries(["quiet", "line", "one", "two", "ok", "warn", "bad"].map((name) => [name, colour(name)]));
  const grid = { stroke: colours.line, width: 1 }, clock = (_, at) => at.map((s) => new Date(s * 1000).toLocaleTimeString([], { hour12: false }));
  const axes = [{ stroke: colours.quiet, grid, space: 100, values: clock }, { stroke: colours.quiet, grid, size: 60 }];
  const scales = { y: { range: (_, _min, max) => [0, (max || 1) * 1.1] } };
  const width = () => Math.min(364, place.clientWidth);
  let marks = [];
  const draw = (plot) => {  // a line where something happened
    for (const { at_s, level } of marks) {
      const x = Math.round(plot.valToPos(at_s, "x", true)), { left, top, width: w, height } = plot.bbox;
      if (x < left || x > left + w) continue;
      plot.ctx.fillStyle = colours[level];
      plot.ctx.fillRect(x, top, Math.ceil(devicePixelRatio), height);
    }
  };
  const plots = CHARTS.map(([title, lines]) => {
    const plot = new uPlot({
      title, width: width(), height: 150, padding: [null, 20, null, null], axes, scales, legend: { live: false }, hooks: { drawAxes: [draw] },
      series: [{}, ...Object.keys(lines).map((label, index) => ({ label, stroke: colours[index ? "two" : "one"], width: 2, dash: index ? [6, 4] : [], points: { show: false } }))],
    }, [[], ...Object.keys(lines).map(() => [])], place);
    plot.root.setAttribute("role", "img");  // its figures are in the text above
    plot.root.setAttribute("aria-label", `${title}, over the last 15 minutes`);
    return [plot, Object.values(lines)];
  });
  addEventListener("resize", () => plots.forEach(([plot]) => plot.setSize({ width: width(), height: 150 })));
  let shown = "";
  return (steps, happened) => {
    const now = `${steps.at(-1)?.at_s} ${happened.length} ${happened[0]?.at_s}`;
    if (now === shown) return;
    shown = now;
    marks = happened;
    const at = steps.map((step) => step.at_s);
    for (const [plot, lines] of plots) {
      const data = lines.map((line) => steps.map((step) => line(step)));
      plot.root.hidden = !data.flat().some((value) => value);  // nothing to see, as of tiers that nobody has
      plot.setData([at, ...data]);
    }
  };
}
