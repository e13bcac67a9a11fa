// Gives the frame the height of the page in it, so that the window scrolls and not the frame.
"use strict";

for (const frame of document.querySelectorAll("iframe.frame")) {
  const fit = () => {
    const page = frame.contentDocument;
    if (page && page.body) frame.style.height = `${Math.ceil(page.body.scrollHeight) + 4}px`;
  };
  frame.addEventListener("load", fit);
  window.addEventListener("resize", fit);
  fit();
}
