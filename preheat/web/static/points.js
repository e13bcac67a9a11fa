// The points of a plan, whose recipe and reasons are shown beside them.
"use strict";

function choosePoint(point) {
  const drawing = point.closest("[data-points]");
  for (const other of drawing.querySelectorAll("circle")) {
    const isChosen = other === point;
    other.setAttribute("tabindex", isChosen ? "0" : "-1");
    if (isChosen) other.setAttribute("aria-pressed", "true");
    else other.removeAttribute("aria-pressed");
  }
  point.focus();
  htmx.ajax("GET", drawing.dataset.points + point.dataset.number, "#candidate");
}

document.addEventListener("click", (event) => {
  const point = event.target.closest("[data-points] circle");
  if (point) choosePoint(point);
});

document.addEventListener("keydown", (event) => {
  const point = event.target.closest?.("[data-points] circle");
  if (!point) return;
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  if (event.key in steps) {
    // By memory, whatever the order in which they are drawn.
    const points = [...point.closest("[data-points]").querySelectorAll("circle")];
    points.sort((a, b) => a.cx.baseVal.value - b.cx.baseVal.value);
    const next = points[points.indexOf(point) + steps[event.key]];
    if (next) choosePoint(next);
  } else if (event.key === "Enter" || event.key === " ") {
    choosePoint(point);
  } else {
    return;
  }
  event.preventDefault();
});
