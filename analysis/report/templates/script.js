"use strict";
const SHOWN = 12; // rows of a long table before it is unfolded
const FILTERED = 8; // rows from which a table has a filter
const number = (text) => {
  const match = /^\D{0,3}?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)/i.exec(text.trim());
  return match ? parseFloat(match[1]) : NaN;
};
const made = (name, properties) => Object.assign(document.createElement(name), properties);

function sort(table, column, header) {
  const down = header.getAttribute("aria-sort") === "ascending";
  const text = (row) => row.cells[column].textContent.trim();
  const sign = down ? -1 : 1;
  const numeric = header.classList.contains("num");
  const empty = (value) => value === "" || (numeric && Number.isNaN(number(value)));
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [x, y] = [text(a), text(b)];
    if (empty(x) || empty(y)) return empty(x) - empty(y);
    return sign * (numeric ? number(x) - number(y) : x.localeCompare(y, "en", { numeric: true }));
  });
  for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
}

function arrange(table) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) return;
  const state = { words: [], all: body.rows.length <= SHOWN };
  const tools = made("div", { className: "tools" });
  const input = made("input", { type: "search", placeholder: "filter rows" });
  const unfold = made("button", { type: "button" });
  const count = made("span", { className: "small" });
  input.setAttribute("aria-label", "filter rows");
  const show = () => {
    const fits = [...body.rows].filter((row) => {
      const text = row.textContent.toLowerCase();
      const fit = state.words.every((word) => text.includes(word));
      row.hidden = !fit;
      return fit;
    });
    fits.forEach((row, place) => (row.hidden = !state.all && place >= SHOWN));
    count.textContent = `${fits.length} of ${body.rows.length} rows`;
    unfold.hidden = fits.length <= SHOWN;
    unfold.textContent = state.all ? `Show the first ${SHOWN}` : `Show all ${fits.length}`;
  };
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = made("button", { type: "button", title: "sort" });
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => { sort(table, column, header); show(); });
  });
  input.addEventListener("input", () => { state.words = input.value.toLowerCase().split(/\s+/); show(); });
  unfold.addEventListener("click", () => { state.all = !state.all; show(); });
  if (body.rows.length >= FILTERED) { tools.append(input, unfold, count); table.parentNode.before(tools); }
  show();
  addEventListener("beforeprint", () => { for (const row of body.rows) row.hidden = false; });
  addEventListener("afterprint", show);
}

function copied(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const area = made("textarea", { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  return Promise.resolve();
}

function unfoldTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  target.scrollIntoView();
}

document.querySelectorAll("table.data").forEach(arrange);
for (const command of document.querySelectorAll(".command")) {
  const button = made("button", { type: "button", textContent: "Copy" });
  button.addEventListener("click", () => copied(command.querySelector("code").textContent).then(
    () => { button.textContent = "Copied"; setTimeout(() => (button.textContent = "Copy"), 1500); }, () => {}));
  command.append(button);
}
let folded = [];
addEventListener("beforeprint", () => { folded = [...document.querySelectorAll("details:not([open])")]; folded.forEach((d) => (d.open = true)); });
addEventListener("afterprint", () => folded.forEach((d) => (d.open = false)));
addEventListener("hashchange", unfoldTarget);
document.addEventListener("click", (event) => { if (event.target.closest('a[href^="#"]')) setTimeout(unfoldTarget); });
unfoldTarget();
