// The filters of the conformance grid: rows by text, group, level and verdict; columns by server.
const form = document.getElementById("grid-filters");
const grid = document.getElementById("grid");
const rows = [...grid.tBodies[0].rows].map((row) => ({
  row,
  text: row.textContent.toLowerCase(),
  cells: [...row.cells].slice(1),
}));

function apply() {
  const chosen = Object.fromEntries(new FormData(form));
  const text = chosen.text.trim().toLowerCase();
  let count = 0;
  for (const { row, text: own, cells } of rows) {
    const seen = cells.filter((cell) => !chosen.server || cell.dataset.server === chosen.server);
    const shown =
      own.includes(text) &&
      (!chosen.group || row.dataset.group === chosen.group) &&
      (!chosen.level || row.dataset.level === chosen.level) &&
      (!chosen.verdict || seen.some((cell) => cell.textContent === chosen.verdict));
    row.hidden = !shown;
    count += shown;
  }
  for (const cell of grid.querySelectorAll("[data-server]")) {
    cell.hidden = chosen.server !== "" && cell.dataset.server !== chosen.server;
  }
  form.elements.count.textContent = `${count} of ${rows.length} checks`;
  // The address keeps the filters, so that they can be linked to.
  const kept = new URLSearchParams(Object.entries(chosen).filter(([, value]) => value));
  history.replaceState(null, "", kept.size ? `?${kept}` : location.pathname);
}

for (const [name, value] of new URLSearchParams(location.search)) {
  if (form.elements[name]) form.elements[name].value = value;
}
for (const event of ["input", "change"]) form.addEventListener(event, apply);
form.addEventListener("submit", (event) => event.preventDefault());
apply();
