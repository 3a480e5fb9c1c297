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
  const axes = [{ stroke: text }, { stroke: text, size: 60 }];
  const make = (title, names) => {
    const plot = new uPlot({
      title, width: 520, height: 200, axes,
      series: [{}, ...names.map((label, index) => ({ label, stroke: colour(index ? "two" : "one"), width: 2, dash: index ? [6, 4] : [] }))],
    }, [[], ...names.map(() => [])], place);
    plot.root.setAttribute("role", "img");  // its figures are in the text above
    plot.root.setAttribute("aria-label", `${title}, over the last five minutes`);
    return plot;
  };
  const plots = [[make("time to the first token, ms", ["p50", "p95"]), [[], [], []]], [make("KV, GB/s over all lanes", ["GB/s"]), [[], []]]];
  const push = ([plot, data], ...values) => {
    data.forEach((column, index) => { column.push(values[index] ?? null); if (column.length > length) column.shift(); });
    plot.setData(data);
  };
  return { add: (at_s, p50, p95, rate) => { push(plots[0], at_s, p50, p95); push(plots[1], at_s, rate); } };
}
