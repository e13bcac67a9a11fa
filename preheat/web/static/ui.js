// Live updates of all pages: passes on the server's events as "preheat:change" on the body and as "preheat:update" on
// the parts with data-update-s, and says when the connection is lost. Pages work without it, but do not update themselves.
"use strict";

(() => {
  const prefix = document.body.dataset.prefix || "";
  const status = document.getElementById("connection");
  let source = null;
  let timer = 0;
  let wait = 1000;
  let isLost = false;

  const say = (text) => {
    if (status && status.textContent !== text) status.textContent = text;
  };

  // Runs that this page shows, by the attributes data-watch; without any, all runs.
  const listWatched = () => {
    const ids = new Set();
    for (const element of document.querySelectorAll("[data-watch]")) {
      for (const id of element.dataset.watch.split(",")) if (id) ids.add(id);
    }
    return [...ids].join(",");
  };

  // A part is updated at once, then every data-update-s seconds at most. htmx's own throttle drops what happens in
  // between, and with it the last change of a run. By id, since an update may replace the element.
  const updates = new Map();
  const scheduleUpdate = ({ id, dataset }) => {
    const last = updates.get(id);
    if (last?.isWaiting) return;
    const update = { time: Math.max(Date.now(), last ? last.time + 1000 * dataset.updateS : 0), isWaiting: true };
    updates.set(id, update);
    setTimeout(() => {
      update.isWaiting = false;
      document.getElementById(id)?.dispatchEvent(new CustomEvent("preheat:update"));
    }, update.time - Date.now());
  };

  // A part that says the same as before is not swapped in: it would end a selection of text and lose the focus.
  const answers = new Map();
  document.body.addEventListener("htmx:beforeSwap", (event) => {
    const { target, xhr } = event.detail;
    if (!("updateS" in target.dataset)) return;
    if (xhr.status === 200 && answers.get(target.id) === xhr.responseText) event.detail.shouldSwap = false;
    answers.set(target.id, xhr.responseText);
  });

  const dispatch = (ids) => {
    document.body.dispatchEvent(new CustomEvent("preheat:change", { detail: { ids }, bubbles: true }));
    for (const part of document.querySelectorAll("[data-update-s]")) scheduleUpdate(part);
  };

  const close = () => {
    clearTimeout(timer);
    if (source) source.close();
    source = null;
  };

  const open = () => {
    close();
    const watched = listWatched();
    source = new EventSource(`${prefix}/events${watched ? `?runs=${encodeURIComponent(watched)}` : ""}`);
    source.addEventListener("hello", () => {
      wait = 1000;
      say("");
      // What happened in the meantime was not sent.
      if (isLost) dispatch(null);
      isLost = false;
    });
    source.addEventListener("change", (event) => dispatch(JSON.parse(event.data).ids));
    source.addEventListener("error", lose);
  };

  // An EventSource does not say why it failed; a request does.
  const lose = async () => {
    close();
    isLost = true;
    timer = setTimeout(open, wait);
    wait = Math.min(2 * wait, 10000);
    try {
      const answer = await fetch(`${prefix}/events?runs=-`, { headers: { accept: "text/event-stream" } });
      const text = answer.ok ? "" : await answer.text();
      if (answer.ok && answer.body) await answer.body.cancel();
      if (answer.status === 403) {
        clearTimeout(timer);
        say("The server was started again. Open the address that it printed.");
      } else if (text) say(text.trim());
    } catch {
      say("The connection is lost. Trying again …");
    }
  };

  // A browser opens six connections per host: a hidden page leaves its own to the others.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      isLost = true;
      close();
    } else if (!source) open();
  });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) open();
  });
  if (!document.hidden) open();
  else isLost = true;
})();
