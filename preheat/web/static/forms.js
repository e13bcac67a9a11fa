// Forms: errors of the server, and the points of a plan, whose recipe and reasons are shown beside them.
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

// An answer that is an error: what the server says, in the place of the result.
document.addEventListener("htmx:responseError", (event) => {
  const target = document.getElementById("result");
  const page = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
  const message = document.createElement("p");
  message.className = "notice bad";
  message.setAttribute("role", "alert");
  message.textContent = page.querySelector(".notice")?.textContent || page.body.textContent.trim().slice(0, 500);
  target?.replaceChildren(message);
});
