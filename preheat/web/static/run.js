// The page of one run: its buttons follow its state, commands are copied, the axis of all charts is chosen once.
"use strict";
(() => {
  const live = document.getElementById("live");

  function follow() {
    const running = live.querySelector("#state")?.dataset.state === "running";
    for (const id of ["save", "stop"]) {
      const button = document.getElementById(id);
      if (button) button.disabled = !running || Boolean(live.querySelector("#unreachable"));
    }
  }

  // A fragment that says the same as the page is not swapped in: it would end a selection of text and lose the focus.
  let shown = "";
  live.addEventListener("htmx:beforeSwap", (event) => {
    if (event.detail.target !== live) return;
    const text = event.detail.xhr.responseText;
    if (event.detail.xhr.status === 200 && (text === shown || live.contains(document.activeElement))) {
      if (text === shown) event.detail.shouldSwap = false;
    }
    shown = text;
    // Its folder was deleted: the answer is a page of its own.
    if (event.detail.xhr.status === 404) {
      live.innerHTML = "";
      const notice = document.createElement("p");
      notice.className = "notice bad";
      notice.textContent = "This run does not exist any more: its folder was deleted, moved or renamed.";
      live.append(notice);
    }
  });
  live.addEventListener("htmx:afterSwap", follow);
  follow();

  document.body.addEventListener("click", async (event) => {
    const id = event.target.dataset?.copy;
    if (!id) return;
    const code = document.getElementById(id);
    try {
      await navigator.clipboard.writeText(code.textContent);
      event.target.textContent = "Copied";
    } catch {
      // Without the permission, or over http from another host: the text is selected, to be copied by keys.
      getSelection().selectAllChildren(code);
      event.target.textContent = "Selected: press Ctrl-C";
    }
  });

  document.getElementById("axis")?.addEventListener("change", (event) => {
    for (const chart of document.querySelectorAll("figure.chart")) chart.dataset.x = event.target.value;
  });
  document.getElementById("more")?.addEventListener("change", (event) => {
    const chart = document.getElementById("another");
    chart.dataset.key = event.target.value;
    chart.querySelector("h3").textContent = event.target.value;
    chart.hidden = !event.target.value;
  });
})();
