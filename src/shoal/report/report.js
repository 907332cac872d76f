// The report, where scripts run: charts to point at and to zoom, runs to hide, tables to sort. Without scripts, and
// on paper, the charts are the pictures that are in the page.
"use strict";

{
  const groups = []; // legends, each with the charts that follow it
  for (const part of document.querySelectorAll("ul.legend, script.points")) {
    if (part.matches("ul")) {
      const items = [...part.children].filter((item) => item.querySelector("path.line"));
      if (!items.length) continue;
      const group = { charts: [] };
      shoalCharts.toggles(items, () => group.charts);
      groups.push(group);
      continue;
    }
    const holder = document.createElement("div");
    part.parentElement.classList.add("live");
    part.parentElement.append(holder);
    const chart = new shoalCharts.Chart(holder, JSON.parse(part.textContent));
    groups.at(-1)?.charts.push(chart);
  }
  for (const table of document.querySelectorAll("table.summary")) shoalCharts.sortable(table);
}
