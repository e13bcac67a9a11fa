// Saves a page as it is now as one file: styles inside, without scripts, forms and secrets; it opens offline.
"use strict";

(() => {
  // What works only with the server; pages mark more of it by data-live.
  const LIVE = "script, link, style, noscript, meta[name='htmx-config'], meta[http-equiv], form, .actions, .chart-tools, body > header, .skip, button, input, select, textarea, iframe, [data-live]";
  const URLS = ["href", "src", "action", "data-prefix", "data-points", "data-stream", "data-watch"];

  const WAIT_MS = 5000;

  const copyPage = async () => {
    // Charts read what is new, if the server answers soon, and fill their tables of values, which are closed on the page.
    const tasks = [];
    const charts = [];
    document.dispatchEvent(new CustomEvent("preheat:save", { detail: { tasks, charts } }));
    await Promise.race([Promise.all(tasks), new Promise((resolve) => setTimeout(resolve, WAIT_MS))]);
    for (const chart of charts) chart.fillTable();
    const page = document.documentElement.cloneNode(true);
    const canvases = document.querySelectorAll("canvas");
    page.querySelectorAll("canvas").forEach((canvas, n) => {
      const image = document.createElement("img");
      image.src = canvases[n].toDataURL();
      image.alt = canvas.getAttribute("aria-label") || "";
      image.style.cssText = canvas.style.cssText;
      canvas.replaceWith(image);
    });
    for (const button of page.querySelectorAll(".legend button")) {
      const key = document.createElement("span");
      key.style.cssText = button.style.cssText;
      key.textContent = button.textContent;
      button.replaceWith(key);
    }
    for (const element of page.querySelectorAll(LIVE)) element.remove();
    for (const point of page.querySelectorAll("svg [role='button']")) {
      point.setAttribute("role", "img");
      point.removeAttribute("tabindex");
      point.removeAttribute("aria-pressed");
    }
    // Drawings have the width of the window that they were made for.
    for (const drawing of page.querySelectorAll(".chart svg")) drawing.style.removeProperty("height");
    // Links into the server lead nowhere from a file.
    for (const link of page.querySelectorAll("a")) link.replaceWith(...link.childNodes);
    for (const element of [page, ...page.querySelectorAll("*")]) {
      for (const { name } of [...element.attributes]) {
        if (name.startsWith("hx-") || name.startsWith("on") || (URLS.includes(name) && element.localName !== "img")) element.removeAttribute(name);
      }
    }
    return page;
  };

  const complete = (page) => {
    const policy = document.createElement("meta");
    policy.httpEquiv = "Content-Security-Policy";
    policy.content = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
    const generator = document.createElement("meta");
    generator.name = "generator";
    generator.content = "preheat";
    const style = document.createElement("style");
    const sheets = [...document.styleSheets].filter((sheet) => sheet.href?.startsWith(`${location.origin}/`));
    style.textContent = sheets.flatMap((sheet) => [...sheet.cssRules].map((rule) => rule.cssText)).join("\n");
    page.querySelector("head").append(generator, policy, style);
    const saved = document.createElement("p");
    saved.className = "small";
    saved.textContent = `Saved on ${new Date().toLocaleString()}.`;
    page.querySelector("main").append(saved);
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("#save-page");
    if (!button) return;
    button.disabled = true;
    const page = await copyPage();
    button.disabled = false;
    complete(page);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`<!doctype html>\n${page.outerHTML}`], { type: "text/html" }));
    link.download = `${button.dataset.name || "page"}.html`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
})();
