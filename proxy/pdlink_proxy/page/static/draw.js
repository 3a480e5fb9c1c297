// A tree of plain objects, and `patch`, which changes a part of the page into it and keeps what is the same: the focus
// stays where it is, and nothing flickers.
export const el = (tag, props, ...children) => ({ tag, props, children: children.filter((c) => c != null).map((c) => (typeof c === "object" ? c : String(c))) });

// A table with a name for those who hear it. heads: "n:" before one of numbers. A cell is a text or {text or node, class,
// head: of its row}.
export function table(name, heads, rows) {
  const head = (text) => (text.startsWith("n:") ? el("th", { class: "n", scope: "col" }, text.slice(2)) : el("th", { scope: "col" }, text));
  const cell = (value) => {
    if (value === null || typeof value !== "object") return el("td", {}, value ?? "");
    return el(value.head ? "th" : "td", { class: value.class ?? "", ...(value.head ? { scope: "row" } : {}) }, value.node ?? value.text ?? "");
  };
  return el("table", { "aria-label": name }, el("thead", {}, el("tr", {}, ...heads.map(head))), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell)))));
}

export function patch(parent, children) {
  children.forEach((child, index) => {
    const old = parent.childNodes[index];
    if (typeof child === "string") {
      if (old?.nodeType === Node.TEXT_NODE) { if (old.data !== child) old.data = child; } else put(parent, old, document.createTextNode(child));
      return;
    }
    const node = old?.nodeName === child.tag.toUpperCase() ? old : put(parent, old, document.createElement(child.tag));
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
