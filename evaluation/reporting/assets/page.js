"use strict";

// The places of values in sorted order: numbers by size, texts by name, what is missing last whichever way.
function order(values, isNumeric, isDescending) {
  const direction = isDescending ? -1 : 1;
  const compare = (a, b) => (isNumeric ? Number(a) - Number(b) : a.localeCompare(b));
  return values
    .map((value, place) => ({ value, place }))
    .sort((a, b) => {
      if (a.value === "" || b.value === "") return (a.value === "") - (b.value === "");
      return direction * compare(a.value, b.value);
    })
    .map((item) => item.place);
}

function sortBy(table, column) {
  const head = table.tHead.rows[0].cells[column];
  const isNumeric = head.classList.contains("number");
  const was = head.getAttribute("aria-sort");
  // Figures begin with the largest, names with the first.
  const isDescending = was === "none" ? isNumeric : was === "ascending";
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const values = rows.map((row) => row.cells[column].dataset.value);
  for (const place of order(values, isNumeric, isDescending)) body.append(rows[place]);
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
}

for (const button of document.querySelectorAll("th > button")) {
  const head = button.parentElement;
  button.addEventListener("click", () => sortBy(head.closest("table"), head.cellIndex));
}
