"use strict";
// A card holds the state of an image as the server has it: text, version, marks. A change names the version that it
// replaces, so a file that somebody else changed is never overwritten. It has an element once it comes near the window:
// the page holds a few sections of cards at a time, as thousands would scroll slowly.

const $ = (selector, root = document) => root.querySelector(selector);
const ORDER = ["failed", "empty", "repeated", "cut", "improbable", "identical", "edited"];
const SECTION = 12; // cards, a multiple of any number of columns
const cards = []; // by the number of the image
let order = []; // cards, doubtful ones first
let shown = []; // cards that the filters let through
let prompt = null; // of the model, if there is one
let inOrder = Promise.resolve();

async function call(path, body, keepalive = false) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), priority: "high", keepalive,
    headers: { "Content-Type": "application/json" } }; // before the thumbnails that wait
  const response = await fetch(path, options).catch(() => { throw new Error("the program has ended; start it again"); });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error?.message ?? `error ${response.status}`);
  return answer;
}

function change(path, body, touched, isLeaving) { // one after the other; answers are states of cards
  for (const card of touched) card.isKept = true;
  const answer = isLeaving ? call(path, body(), true) : inOrder.then(() => call(path, body()));
  inOrder = answer.then((states) => {
    for (const state of states) state.conflict ? clash(cards[state.id], state) : take(cards[state.id], state, true);
    refresh();
    const clashes = states.filter((state) => state.conflict).length;
    say(clashes ? `${clashes} changed outside of this page; look at the notes` : states.length ? "Saved" : "Nothing to undo");
  }).catch((error) => {
    say(error.message);
    for (const card of touched) {
      card.isFailed = true;
      note(card, `Not saved: ${error.message}`);
    }
  });
}

function say(text) { $("#status").textContent = text; }

function note(card, text, ...buttons) {
  card.note = [text, ...buttons];
  if (!card.element) return;
  const place = $(".note", card.element);
  place.replaceChildren(text, " ", ...buttons.map(([label, action]) => {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "plain", textContent: label });
    button.onclick = () => { place.hidden = true; action(); };
    return button;
  }));
  place.hidden = !text;
}

function clash(card, state) { // the version stays, so that nothing is saved before a person has decided
  card.isFailed = true;
  note(card, `Changed outside of this page to: “${state.text}”`,
    ["Keep mine", () => { card.state = state; save(card); }],
    ["Take theirs", () => { card.box.value = card.state.text; take(card, state, true); }]);
}

function take(card, state, isOurs) { // the box follows unless a person has typed into it since
  const wasTyped = isTyped(card);
  if (wasTyped && !isOurs && state.text !== card.sent) return clash(card, state);
  card.state = state;
  card.sent = undefined;
  card.isFailed = false;
  if (!wasTyped && isTyped(card)) card.box.value = state.text;
  note(card, failure(card));
  paint(card);
}

function failure(card) { return card.unread || card.state.problem; }

function paint(card) {
  const marks = failure(card) ? ["failed"] : card.state.marks;
  card.marks = [...marks, ...card.identical ? ["identical"] : []];
  if (!card.element) return;
  card.box.classList.toggle("unsaved", card.box.value.trim() !== card.state.text.trim());
  $(".marks", card.element).replaceChildren(...card.marks.map((mark) => {
    const element = document.createElement("span");
    element.className = `mark ${mark}`;
    element.textContent = mark === "identical" ? `identical to ${card.identical} other${card.identical > 1 ? "s" : ""}` : mark;
    return element;
  }));
  $(".name", card.element).title = card.state.made;
}

function isTyped(card) { return card.box && card.box.value.trim() !== card.state.text.trim(); }

function typed(card) { // `sent` may have been saved, though no answer has told its version yet
  const sent = card.sent ?? card.state.text;
  card.sent = card.box.value.trim();
  return [{ id: card.state.id, text: card.sent, version: card.state.version, sent }];
}

function save(card, isLeaving) {
  clearTimeout(card.timer);
  paint(card);
  if (isTyped(card)) change("captions", () => typed(card), [card], isLeaving);
}

function refresh() { // marks that depend on others, counts, and what is shown
  const counts = new Map();
  for (const { state } of cards) counts.set(state.text, (counts.get(state.text) ?? 0) + 1);
  const words = $("#words").value.toLowerCase();
  const [mark, folder] = [$("#mark").value, $("#folder").value];
  const byMark = new Map(ORDER.map((name) => [name, 0]));
  const next = [];
  for (const card of order) {
    const { state } = card;
    const identical = state.text && !state.is_label ? counts.get(state.text) - 1 : 0;
    if (identical !== card.identical) { card.identical = identical; paint(card); }
    for (const name of card.marks) byMark.set(name, byMark.get(name) + 1);
    const isShown = (!mark || card.marks.includes(mark)) && (!folder || state.folder === folder.slice(1))
      && `${state.name}\n${state.text}`.toLowerCase().includes(words);
    if (isShown || card.isKept || card.element?.contains(document.activeElement)) next.push(card);
  }
  show(next);
  for (const option of [...$("#mark").options].slice(1)) option.text = `${option.value} (${byMark.get(option.value)})`;
  $("#title").textContent = `${document.title}: ${shown.length.toLocaleString("en")} of ${cards.length.toLocaleString("en")}`;
  countFound();
}

function show(next) {
  if (next.length === shown.length && next.every((card, i) => card === shown[i])) return;
  const main = $("#cards");
  const focused = document.activeElement;
  const height = 160 * Math.ceil(SECTION / Math.max(1, Math.floor(main.clientWidth / 384))); // until it is known
  shown = next;
  const n = Math.ceil(shown.length / SECTION);
  while (main.children.length > n) main.lastChild.remove();
  while (main.children.length < n) {
    const section = main.appendChild(document.createElement("section"));
    section.style.minHeight = `${height}px`;
    near.observe(section);
  }
  for (const section of main.children) if (section.firstChild) fill(section);
  if (focused.isConnected) focused.focus({ preventScroll: true }); // it may have moved to another section
}

const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting, boundingClientRect } of entries) {
    if (isIntersecting) fill(target);
    else if (!target.contains(document.activeElement) && target.firstChild) {
      target.style.minHeight = `${boundingClientRect.height}px`;
      target.replaceChildren();
    }
  }
}, { rootMargin: "100% 0px" });

function fill(section) {
  const start = SECTION * [...$("#cards").children].indexOf(section);
  const elements = shown.slice(start, start + SECTION).map((card) => card.element ?? makeElement(card));
  if (elements.length !== section.children.length || elements.some((element, i) => element !== section.children[i]))
    section.replaceChildren(...elements);
  section.style.minHeight = "";
}

function found() { // shown cards that hold the text to find
  const text = $("#find").value;
  return text ? shown.filter((card) => card.state.text.includes(text)) : [];
}

function countFound() {
  const hits = found();
  const n = hits.reduce((sum, card) => sum + card.state.text.split($("#find").value).length - 1, 0);
  const button = $("#replace button");
  button.disabled = !n;
  button.textContent = n ? `Replace ${n} in ${hits.length} captions` : "Replace";
}

function replaceAll(event) {
  event.preventDefault();
  const [text, by, hits] = [$("#find").value, $("#put").value, found()];
  change("captions?replaced=true", () => hits.map(({ state }) =>
    ({ id: state.id, text: state.text.replaceAll(text, () => by), version: state.version })), hits);
}

function again(card) {
  const asked = $("#prompt").value || prompt;
  note(card, "The model looks at it ...");
  change("again", () => ({ id: card.state.id, prompt: asked, version: card.state.version }), [card]);
}

async function unread(card) { // the reason why a picture has no thumbnail
  $("img", card.element).classList.add("unread");
  await call(`thumbnails/${card.state.id}.jpg`).catch((error) => {
    card.unread = error.message.slice(error.message.indexOf(": ") + 2);
  });
  if (!card.unread) return;
  note(card, card.unread);
  paint(card);
  refresh();
}

function step(card, by) {
  return shown[shown.indexOf(card) + by];
}

function visit(card) {
  if (!card) return;
  fill($("#cards").children[Math.floor(shown.indexOf(card) / SECTION)]);
  card.box.focus();
}

function enlarge(card) {
  const dialog = $("#large");
  $("img", dialog).src = `images/${card.state.id}.jpg`;
  $("img", dialog).alt = card.state.name;
  $("p", dialog).textContent = failure(card) || card.box?.value || card.state.text || card.state.name;
  dialog.onkeydown = (event) => {
    const next = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (next && step(card, next)) enlarge(step(card, next));
  };
  if (!dialog.open) dialog.showModal();
}

function makeElement(card) {
  const { state } = card;
  const element = card.element = $("template").content.firstElementChild.cloneNode(true);
  card.box = $("textarea", element);
  element.dataset.id = state.id;
  card.box.value = state.text;
  card.box.ariaLabel = `Caption of ${state.name}`;
  $(".name", element).textContent = state.name;
  $(".picture", element).ariaLabel = `Show ${state.name} large`;
  $(".picture", element).onclick = () => enlarge(card);
  $("img", element).onerror = () => unread(card);
  $("img", element).src = `thumbnails/${state.id}.jpg`;
  $(".again", element).hidden = prompt === null;
  $(".again", element).onclick = () => again(card);
  card.box.oninput = () => {
    paint(card);
    clearTimeout(card.timer);
    card.timer = setTimeout(save, 1000, card);
  };
  card.box.onblur = () => save(card);
  card.box.onkeydown = (event) => {
    const by = event.altKey && { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) { event.preventDefault(); visit(step(card, by)); }
    if (event.key === "Escape") card.box.blur();
  };
  paint(card);
  note(card, ...card.note);
  return element;
}

async function start() {
  const list = await call("captions");
  document.title = list.title;
  prompt = list.prompt;
  $("#prompt-row").hidden = prompt === null;
  $("#prompt").value = prompt ?? "";
  for (const state of list.captions) cards.push({ state, identical: 0, unread: "", note: [state.problem] });
  cards.forEach(paint);
  $("#mark").append(...ORDER.map((mark) => new Option(mark, mark)));
  const folders = [...new Set(cards.map((card) => card.state.folder))].sort();
  $("#folder").append(...folders.map((folder) => new Option(folder || "(this folder)", `/${folder}`)));
  $("#folder").hidden = folders.length < 2;
  order = cards;
  refresh(); // finds identical ones
  const place = (card) => Math.min(ORDER.length, ...card.marks.filter((mark) => mark !== "edited").map((mark) => ORDER.indexOf(mark)));
  order = [...cards].sort((a, b) => place(a) - place(b));
  refresh();
  $("#words").oninput = $("#mark").onchange = $("#folder").onchange = () => {
    for (const card of cards) card.isKept = false; // what was changed stays in sight until another filter is set
    refresh();
  };
  $("#find").oninput = countFound;
  $("#replace").onsubmit = replaceAll;
  $("#undo").onclick = () => change("undo", () => ({}), []);
  $("#large button").onclick = () => $("#large").close();
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, textarea, select")) return;
    if (event.key === "/") { event.preventDefault(); $("#words").focus(); }
    if (event.key === "z" && (event.ctrlKey || event.metaKey)) $("#undo").click();
  });
  window.addEventListener("focus", () => { // what others have changed meanwhile
    inOrder = inOrder.then(() => call("captions")).then((now) => {
      for (const state of now.captions) if (state.version !== cards[state.id].state.version) take(cards[state.id], state, false);
      refresh();
    }).catch((error) => say(error.message));
  });
  const saveAll = () => cards.filter(isTyped).forEach((card) => save(card, true));
  window.addEventListener("pagehide", saveAll); // what was typed less than a second ago
  document.addEventListener("visibilitychange", () => { if (document.hidden) saveAll(); });
  window.addEventListener("beforeunload", (event) => {
    if (cards.some((card) => card.isFailed && isTyped(card))) event.preventDefault();
  });
}

start().catch((error) => say(error.message));
