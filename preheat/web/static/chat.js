// A chat: one message goes to each side, and the answers are shown as they are generated.
"use strict";

const headers = () => JSON.parse(document.body.getAttribute("hx-headers"));

function post(side, action, values = {}) {
  return fetch(`${side.dataset.chat}/${action}`, { method: "POST", headers: headers(), body: new URLSearchParams(values) });
}

function addTurn(side, who, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${who}`;
  const name = document.createElement("p");
  name.className = "small";
  name.textContent = who === "user" ? "You" : "Model";
  const content = document.createElement("pre");
  content.textContent = text;
  turn.append(name, content);
  const turns = side.querySelector("[data-part=turns]");
  turns.append(turn);
  turns.scrollTop = turns.scrollHeight;
  return content;
}

function showState(chat) {
  const sides = [...chat.querySelectorAll("[data-chat]")];
  const isBusy = sides.some((side) => side.dataset.state === "busy");
  const isReady = sides.some((side) => side.dataset.state === "ready");
  chat.querySelector("button[type=submit]").disabled = isBusy || !isReady;
  chat.querySelector("[data-action=interrupt]").disabled = !isBusy;
}

// Text that has arrived, by side: a fast model writes thousands of tokens a second, and each change is a layout.
const arrived = new Map();

function showArrived(side) {
  const text = arrived.get(side);
  arrived.delete(side);
  if (!text) return;
  const turns = side.querySelector("[data-part=turns]");
  const content = turns.querySelector("[data-part=growing]") ?? addTurn(side, "model", "");
  content.dataset.part = "growing";
  content.append(text);
  turns.scrollTop = turns.scrollHeight;
}

function showRecord(side, record) {
  const status = side.querySelector("[data-part=status]");
  const turns = side.querySelector("[data-part=turns]");
  // A request comes back when the model's process reads it: a page that was loaded again shows it like a new one.
  if (record.request) {
    if (record.request.reset) turns.replaceChildren();
    if (record.request.message === undefined) return;
    side.dataset.state = "busy";
    addTurn(side, "user", record.request.message);
  } else if (record.ready) {
    side.dataset.state = "ready";
    status.textContent = (record.ready.step === null ? "" : `Step ${record.ready.step.toLocaleString("en")}; `) + record.ready.format;
  } else if (record.text !== undefined) {
    if (!arrived.has(side)) setTimeout(() => showArrived(side), 50);
    arrived.set(side, (arrived.get(side) ?? "") + record.text);
  } else {
    showArrived(side);
    const growing = turns.querySelector("[data-part=growing]");
    growing?.removeAttribute("data-part");
    side.dataset.state = "ready";
    if (record.error) {
      status.textContent = record.error;
      return;
    }
    const done = record.answer;
    (growing ?? addTurn(side, "model", "")).textContent = done.text;
    const speed = done.seconds > 0 ? `, ${(done.tokens / done.seconds).toFixed(1)} tokens a second` : "";
    const dropped = done.dropped ? `; the oldest ${done.dropped} messages were dropped` : "";
    const cut = { length: "; cut off at the maximum number of tokens", context: "; the model's positions end here" };
    status.textContent = `${done.tokens} tokens${speed}${cut[done.finish_reason] ?? ""}${dropped}`;
  }
}

function endSide(side, text, isBad) {
  const status = side.querySelector("[data-part=status]");
  status.textContent = text;
  status.classList.toggle("bad", isBad);
  side.dataset.state = "ended";
}

function listen(chat, sides) {
  const source = new EventSource(chat.dataset.stream);
  const find = (id) => sides.find((side) => side.dataset.id === id);
  source.onmessage = (event) => {
    const { chat: id, record } = JSON.parse(event.data);
    showRecord(find(id), record);
    showState(chat);
  };
  source.addEventListener("end", (event) => {
    const { chat: id, problem } = JSON.parse(event.data);
    endSide(find(id), problem || "The chat has ended; open it again.", Boolean(problem));
    if (sides.every((side) => side.dataset.state === "ended")) source.close();
    showState(chat);
  });
  source.onerror = () => {
    // Closed for good: the server was restarted, and the chats ended with it.
    if (source.readyState !== EventSource.CLOSED) return;
    for (const side of sides) {
      if (side.dataset.state !== "ended") endSide(side, "The chat has ended with the server; open it again.", true);
    }
    showState(chat);
  };
  return source;
}

let stream = null;
function openChat(place) {
  const chat = place.querySelector?.("#chat");
  if (!chat || chat.dataset.isOpen) return;
  chat.dataset.isOpen = "yes";
  stream?.close();
  const sides = [...chat.querySelectorAll("[data-chat]")];
  stream = listen(chat, sides);
  const form = chat.querySelector("#say");
  const message = form.querySelector("textarea");
  message.focus();
  message.addEventListener("keydown", (key) => {
    if (key.key === "Enter" && !key.shiftKey && !key.isComposing) {
      key.preventDefault();
      if (!form.querySelector("button[type=submit]").disabled) form.requestSubmit();
    }
  });
  form.addEventListener("submit", async (submit) => {
    submit.preventDefault();
    const text = message.value.trim();
    if (!text) return;
    message.value = "";
    let arrivals = 0;
    for (const side of sides.filter((other) => other.dataset.state === "ready")) {
      side.dataset.state = "busy";
      const reply = await post(side, "say", { message: text });
      if (reply.ok) arrivals += 1;
      else endSide(side, "The message did not arrive; the chat has ended.", true);
    }
    if (!arrivals && !message.value) message.value = text;
    showState(chat);
  });
  for (const button of chat.querySelectorAll("[data-action]")) {
    button.addEventListener("click", () => {
      const action = button.dataset.action;
      for (const side of sides.filter((other) => other.dataset.state !== "ended")) {
        if (action !== "reset") post(side, action);
        // A request waits for the answer before it, so that one is ended.
        else if (side.dataset.state === "busy") post(side, "interrupt").then(() => post(side, "say", { reset: "yes" }));
        else post(side, "say", { reset: "yes" });
      }
      message.focus();
    });
  }
}

document.addEventListener("htmx:afterSettle", (event) => openChat(event.target));
openChat(document);
