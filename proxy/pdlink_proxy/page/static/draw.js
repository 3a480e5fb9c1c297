// A tree of plain objects, and `patch`, which changes a part of the page into it and keeps what is the same: the focus
// stays where it is, and nothing flickers.
export const el = (tag, props, ...children) => ({ tag, props, children: children.filter((c) => c != null).map((c) => (typeof c === "object" ? c : String(c))) });

// A table with a name for those who hear it. heads: "n:" before one of numbers. A cell is a text or {text or node, class,
// head: of its row}. A row is a list of cells, or {below: node}, which lies across the table below the row before it.
// Each cell knows its head: a narrow screen shows rows as lists.
export function table(name, heads, rows) {
  const names = heads.map((text) => (text.startsWith("n:") ? text.slice(2) : text));
  const head = (text, index) => el("th", { class: heads[index] === text ? "" : "n", scope: "col" }, text);
  const cell = (value, index) => {
    const at = { "data-head": names[index] };
    if (value === null || typeof value !== "object") return el("td", { class: "", ...at }, value ?? "");
    return el(value.head ? "th" : "td", { class: value.class ?? "", ...at, ...(value.head ? { scope: "row" } : {}) }, value.node ?? value.text ?? "");
  };
  const row = (cells) => (cells.below ? el("tr", { class: "below" }, el("td", { class: "", colspan: String(heads.length) }, cells.below)) : el("tr", { class: "" }, ...cells.map(cell)));
  return el("table", { "aria-label": name }, el("thead", {}, el("tr", {}, ...names.map(head))), el("tbody", {}, ...rows.map(row)));
}

export function patch(parent, children) {
  children.forEach((child, index) => {
    const old = parent.childNodes[index];
    if (typeof child === "string") {
      if (old?.nodeType === Node.TEXT_NODE) { if (old.data !== child) old.data = child; } else put(parent, old, document.createTextNode(child));
      return;
    }
    const node = old?.nodeName === child.tag.toUpperCase() ? old : put(parent, old, document.createElement(child.tag));
    for (const { name } of [...node.attributes]) if (!(name in child.props) && name !== "style") node.removeAttribute(name);
    for (const [name, value] of Object.entries(child.props)) {
      if (name.startsWith("on")) node[name] = value;
      else if (name === "width") node.style.width = value;  // as an attribute the page's own policy would forbid it
      else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
    }
    patch(node, child.children);
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

function put(parent, old, node) {
  if (old) parent.replaceChild(node, old); else parent.appendChild(node);
  return node;
}
