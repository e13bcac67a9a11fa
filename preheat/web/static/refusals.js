// Shows refusals of the server, on all pages: htmx leaves out answers with an error status.
"use strict";

(() => {
  // Polls of a page that fail say nothing: "connection" does. Those of a result, such as a job's, end with a sentence.
  const findPlace = ({ target, requestConfig }) => {
    const place = target?.closest?.("[aria-live]");
    return place ?? (requestConfig.verb === "get" ? null : document.getElementById("main"));
  };

  const tell = (place, text) => {
    let notice = document.getElementById("refusal");
    if (!notice) {
      notice = document.createElement("p");
      notice.id = "refusal";
      notice.className = "notice bad";
      notice.setAttribute("role", "alert");
    }
    if (place.id === "main") place.prepend(notice);
    else place.replaceChildren(notice);
    notice.textContent = text;
    notice.scrollIntoView({ block: "nearest" });
  };

  document.addEventListener("htmx:beforeSwap", (event) => {
    const { xhr, requestConfig } = event.detail;
    const place = findPlace(event.detail);
    if (xhr.status < 400 || !place) return;
    const isPage = (xhr.getResponseHeader("content-type") || "").startsWith("text/html");
    // A form that takes a part of the answer gets it with what was typed in.
    if (isPage && requestConfig.verb !== "get" && requestConfig.elt?.getAttribute("hx-select")) {
      event.detail.shouldSwap = true;
      event.detail.isError = false;
      return;
    }
    const page = isPage ? new DOMParser().parseFromString(xhr.responseText, "text/html") : null;
    tell(place, page?.querySelector(".notice")?.textContent || (page ? page.body.textContent : xhr.responseText).trim().slice(0, 500));
  });

  document.addEventListener("htmx:sendError", (event) => {
    const place = findPlace(event.detail);
    if (place && event.detail.requestConfig.verb !== "get") tell(place, "The server does not answer. Nothing was changed.");
  });
})();
