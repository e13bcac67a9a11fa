// Shows the answers of forms that were refused: htmx leaves out pages with an error status.
"use strict";

document.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr, requestConfig } = event.detail;
  if (xhr.status < 400 || requestConfig.verb === "get") return;
  if ((xhr.getResponseHeader("content-type") || "").startsWith("text/html")) {
    event.detail.shouldSwap = true;
    event.detail.isError = false;
  } else tell(xhr.responseText.trim());
});

document.addEventListener("htmx:sendError", (event) => {
  if (event.detail.requestConfig.verb !== "get") tell("The server does not answer. Nothing was changed.");
});

function tell(text) {
  let notice = document.getElementById("refusal");
  if (!notice) {
    notice = document.createElement("p");
    notice.id = "refusal";
    notice.className = "notice bad";
    notice.setAttribute("role", "alert");
    document.getElementById("main").prepend(notice);
  }
  notice.textContent = text;
  notice.scrollIntoView({ block: "nearest" });
}
