// The selected runs and half-typed tags survive the updates of the table.
"use strict";

(() => {
  const selected = new Set();
  let tags = "";

  const boxes = () => document.querySelectorAll('#selection input[name="run"]');

  const show = () => {
    const form = document.getElementById("selection");
    if (!form) return;
    for (const box of boxes()) box.checked = selected.has(box.value);
    const shown = [...boxes()].filter((box) => box.checked).length;
    const text = shown ? `${shown} selected` : "Select runs to compare or change them.";
    const status = document.getElementById("selected");
    if (status.textContent !== text) status.textContent = text;
    const field = document.getElementById("tags");
    if (field && field.value !== tags) field.value = tags;
  };

  document.addEventListener("change", (event) => {
    if (event.target.name !== "run") return;
    if (event.target.checked) selected.add(event.target.value);
    else selected.delete(event.target.value);
    show();
  });
  document.addEventListener("input", (event) => {
    if (event.target.id === "tags") tags = event.target.value;
  });
  document.addEventListener("submit", (event) => {
    if (event.submitter?.id !== "compare" || selected.size) return;
    event.preventDefault();
    const status = document.getElementById("selected");
    status.textContent = "Nothing is selected: tick two or more runs, then Compare.";
    boxes()[0]?.focus();
  });
  document.addEventListener("htmx:afterSwap", show);
  // After "Back", the browser restores ticks without an event.
  window.addEventListener("pageshow", () => {
    for (const box of boxes()) if (box.checked) selected.add(box.value);
    show();
  });
})();
