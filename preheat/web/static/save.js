// Saves a page as it is now as one file: styles inside, without scripts, forms and secrets; it opens offline.
"use strict";

document.addEventListener("click", async (event) => {
  const button = event.target.closest("#save-page");
  if (!button) return;
  const styles = [];
  for (const link of document.querySelectorAll('link[rel="stylesheet"]')) {
    const answer = await fetch(link.href);
    if (!answer.ok) return;
    styles.push(await answer.text());
  }
  const page = document.documentElement.cloneNode(true);
  const canvases = document.querySelectorAll("canvas");
  page.querySelectorAll("canvas").forEach((canvas, n) => {
    const image = document.createElement("img");
    image.src = canvases[n].toDataURL();
    image.alt = canvas.getAttribute("aria-label") || "";
    image.style.cssText = canvas.style.cssText;
    canvas.replaceWith(image);
  });
  const dropped = "script, link, noscript, meta[name='htmx-config'], meta[http-equiv], form.filter, form.actions, body > header, .skip, button, input, select, textarea, iframe";
  for (const element of page.querySelectorAll(dropped)) element.remove();
  for (const element of [page, ...page.querySelectorAll("*")]) {
    for (const { name } of [...element.attributes]) {
      if (name.startsWith("hx-") || name.startsWith("on") || name === "data-prefix") element.removeAttribute(name);
    }
  }
  // Links into the server lead nowhere from a file.
  for (const link of page.querySelectorAll("a")) link.replaceWith(...link.childNodes);
  const head = page.querySelector("head");
  const policy = document.createElement("meta");
  policy.httpEquiv = "Content-Security-Policy";
  policy.content = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
  const generator = document.createElement("meta");
  generator.name = "generator";
  generator.content = "preheat";
  const style = document.createElement("style");
  style.textContent = styles.join("\n");
  head.append(generator, policy, style);
  const saved = document.createElement("p");
  saved.className = "small";
  saved.textContent = `Saved on ${new Date().toLocaleString()}.`;
  page.querySelector("main").append(saved);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`<!doctype html>\n${page.outerHTML}`], { type: "text/html" }));
  link.download = `${button.dataset.name || "page"}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});
