// The page of one run: its buttons follow its state, its command is copied, and another curve is chosen.
"use strict";
(() => {
  const live = document.getElementById("live");

  function follow() {
    const running = live.querySelector("#state")?.dataset.state === "running";
    const actions = document.getElementById("actions");
    if (!actions) return;
    actions.hidden = !running;
    for (const button of actions.querySelectorAll("button")) button.disabled = Boolean(live.querySelector("#unreachable"));
    // "It finishes the step in progress" is over once the run has ended.
    if (!running) document.querySelector("#message .notice:not(.bad)")?.remove();
  }

  live.addEventListener("htmx:beforeSwap", (event) => {
    if (event.detail.target !== live) return;
    const { status } = event.detail.xhr;
    // Its folder was deleted: the answer is a page of its own.
    if (status === 404) {
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

  document.getElementById("more")?.addEventListener("change", (event) => {
    const { value, dataset } = event.target;
    const place = document.getElementById("another");
    place.replaceChildren();
    if (!value) return;
    const figure = document.createElement("figure");
    figure.className = "chart";
    Object.assign(figure.dataset, { runs: dataset.run, key: value, x: "step" });
    place.append(figure);
    // Charts are drawn in what htmx loads.
    figure.dispatchEvent(new CustomEvent("htmx:load", { bubbles: true, detail: { elt: figure } }));
  });
})();
