// Lines over time, by uPlot, where `make` has fetched it; without it the page shows its tables alone.
import uPlot from "./vendor/uPlot.esm.js";

const style = document.createElement("link");
style.rel = "stylesheet";
style.href = new URL("./vendor/uPlot.min.css", import.meta.url).href;
document.head.append(style);

export function open(place, length) {
  const colour = (name) => {  // a canvas knows no variables of CSS
    const probe = place.appendChild(Object.assign(document.createElement("i"), { className: name }));
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const text = colour("quiet");
  const grid = { stroke: colour("line"), width: 1 }, clock = (_, at) => at.map((s) => new Date(s * 1000).toLocaleTimeString([], { hour12: false }));
  const axes = [{ stroke: text, grid, space: 100, values: clock }, { stroke: text, grid, size: 60 }];
  const scales = { y: { range: (_, _min, max) => [0, (max || 1) * 1.1] } };
  const width = () => Math.min(520, place.clientWidth);
  const make = (title, names) => {
    const plot = new uPlot({
      title, width: width(), height: 200, padding: [null, 30, null, null], axes, scales, legend: { live: false },
      series: [{}, ...names.map((label, index) => ({ label, stroke: colour(index ? "two" : "one"), width: 2, dash: index ? [6, 4] : [], points: { show: false } }))],
    }, [[], ...names.map(() => [])], place);
    plot.root.setAttribute("role", "img");  // its figures are in the text above
    plot.root.setAttribute("aria-label", `${title}, over the last five minutes`);
    return plot;
  };
  const plots = [[make("time to the first token, ms", ["p50", "p95"]), [[], [], []]], [make("KV, GB/s over all lanes", ["GB/s"]), [[], []]]];
  addEventListener("resize", () => plots.forEach(([plot]) => plot.setSize({ width: width(), height: 200 })));
  const push = ([plot, data], ...values) => {
    data.forEach((column, index) => { column.push(values[index] ?? null); if (column.length > length) column.shift(); });
    plot.setData(data);
  };
  return { add: (at_s, p50, p95, rate) => { push(plots[0], at_s, p50, p95); push(plots[1], at_s, rate); } };
}
