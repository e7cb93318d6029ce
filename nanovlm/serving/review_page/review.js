"use strict";
// A card holds the state of an image as the server has it: text, version, marks. A change names the version that it
// replaces, so a file that somebody else changed is never overwritten.

const $ = (selector, root = document) => root.querySelector(selector);
const ORDER = ["failed", "empty", "repeated", "cut", "improbable", "identical", "edited"];
const cards = []; // by the number of the image
let prompt = null; // of the model, if there is one
let unsaved = 0; // requests on their way
let inOrder = Promise.resolve();

async function call(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), priority: "high",
    headers: { "Content-Type": "application/json" } }; // before the thumbnails that wait
  const response = await fetch(path, options).catch(() => { throw new Error("the program has ended; start it again"); });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error?.message ?? `error ${response.status}`);
  return answer;
}

function change(path, body, touched) { // one after the other; answers are states of cards
  unsaved += 1;
  inOrder = inOrder.then(() => call(path, body())).then((states) => {
    for (const state of states) state.conflict ? clash(cards[state.id], state) : take(cards[state.id], state, true);
    refresh();
    const clashes = states.filter((state) => state.conflict).length;
    say(clashes ? `${clashes} changed outside of this page; look at the notes` : states.length ? "Saved" : "Nothing to undo");
  }).catch((error) => {
    say(error.message);
    for (const card of touched) note(card, `Not saved: ${error.message}`);
  }).finally(() => { unsaved -= 1; });
  return inOrder;
}

function say(text) { $("#status").textContent = text; }

function note(card, text, ...buttons) {
  const place = $(".note", card.element);
  place.replaceChildren(text, " ", ...buttons.map(([label, action]) => {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "plain", textContent: label });
    button.onclick = () => { place.hidden = true; action(); };
    return button;
  }));
  place.hidden = !text;
}

function clash(card, state) { // the version stays, so that nothing is saved before a person has decided
  note(card, `Changed outside of this page to: “${state.text}”`,
    ["Keep mine", () => { card.state.version = state.version; save(card, true); }],
    ["Take theirs", () => { card.box.value = card.state.text; take(card, state, true); }]);
}

function take(card, state, isOurs) { // the box follows unless a person has typed into it since
  const isTyped = card.box.value !== card.state.text && !(isOurs && card.box.value.trim() === state.text);
  if (isTyped && !isOurs && state.version !== card.state.version) return clash(card, state);
  const failed = card.state.failed;
  card.state = { ...state, failed: failed || state.problem };
  if (!isTyped || isOurs && card.box !== document.activeElement) card.box.value = state.text;
  note(card, card.state.failed);
  paint(card);
}

function paint(card) {
  card.box.classList.toggle("unsaved", card.box.value.trim() !== card.state.text.trim());
  const found = [...card.state.failed ? ["failed"] : card.state.marks, ...card.identical ? ["identical"] : []];
  card.marks = found;
  $(".marks", card.element).replaceChildren(...found.map((mark) => {
    const element = document.createElement("span");
    element.className = `mark ${mark}`;
    element.textContent = mark === "identical" ? `identical to ${card.identical}` : mark;
    return element;
  }));
  $(".name", card.element).title = card.state.made;
}

function save(card, isCertain) {
  const text = card.box.value.trim();
  paint(card);
  if (!isCertain && text === card.state.text.trim()) return;
  change("captions", () => [{ id: card.state.id, text, version: card.state.version }], [card]);
}

function refresh() { // marks that depend on others, counts, and what is shown
  const counts = new Map();
  for (const { state } of cards) counts.set(state.text, (counts.get(state.text) ?? 0) + 1);
  const words = $("#words").value.toLowerCase();
  const [mark, folder] = [$("#mark").value, $("#folder").value];
  const byMark = new Map(ORDER.map((name) => [name, 0]));
  let n = 0;
  for (const card of cards) {
    const { state } = card;
    const identical = state.text && !state.is_label ? counts.get(state.text) - 1 : 0;
    if (identical !== card.identical) { card.identical = identical; paint(card); }
    for (const name of card.marks) byMark.set(name, byMark.get(name) + 1);
    const isShown = (!mark || card.marks.includes(mark)) && (!folder || state.folder === folder.slice(1))
      && `${state.name}\n${state.text}`.toLowerCase().includes(words);
    // a card that is being edited stays, whatever its marks become
    card.element.hidden = !isShown && !card.element.contains(document.activeElement);
    n += !card.element.hidden;
  }
  for (const option of [...$("#mark").options].slice(1)) option.text = `${option.value} (${byMark.get(option.value)})`;
  $("#title").textContent = `${document.title}: ${n.toLocaleString("en")} of ${cards.length.toLocaleString("en")}`;
  countFound();
}

function found() { // shown cards that hold the text to find
  const text = $("#find").value;
  return text ? cards.filter((card) => !card.element.hidden && card.state.text.includes(text)) : [];
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
  change("captions", () => hits.map(({ state }) =>
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
    card.state.failed = error.message.slice(error.message.indexOf(": ") + 2);
  });
  if (!card.state.failed) return;
  note(card, card.state.failed);
  paint(card);
  refresh();
}

function step(card, by) {
  const shown = [...$("#cards").children].filter((element) => !element.hidden);
  const next = shown[shown.indexOf(card.element) + by];
  return next && cards[next.dataset.id];
}

function enlarge(card) {
  const dialog = $("#large");
  $("img", dialog).src = `images/${card.state.id}.jpg`;
  $("img", dialog).alt = card.state.name;
  $("p", dialog).textContent = card.box.value || card.state.name;
  dialog.onkeydown = (event) => {
    const next = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (next && step(card, next)) enlarge(step(card, next));
  };
  if (!dialog.open) dialog.showModal();
}

function makeCard(state) {
  const element = $("template").content.firstElementChild.cloneNode(true);
  const card = { state: { ...state, failed: state.problem }, element, box: $("textarea", element), identical: 0, marks: [] };
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
  card.box.oninput = () => paint(card);
  card.box.onblur = () => save(card);
  card.box.onkeydown = (event) => {
    const by = event.altKey && { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) { event.preventDefault(); step(card, by)?.box.focus(); }
    if (event.key === "Escape") card.box.blur();
  };
  paint(card);
  note(card, card.state.failed);
  return card;
}

async function start() {
  const list = await call("captions");
  document.title = list.title;
  prompt = list.prompt;
  $("#prompt-row").hidden = prompt === null;
  $("#prompt").value = prompt ?? "";
  cards.push(...list.captions.map(makeCard));
  $("#mark").append(...ORDER.map((mark) => new Option(mark, mark)));
  const folders = [...new Set(cards.map((card) => card.state.folder))].sort();
  $("#folder").append(...folders.map((folder) => new Option(folder || "(this folder)", `/${folder}`)));
  $("#folder").hidden = folders.length < 2;
  refresh();
  const place = (card) => Math.min(ORDER.length, ...card.marks.filter((mark) => mark !== "edited").map((mark) => ORDER.indexOf(mark)));
  $("#cards").append(...[...cards].sort((a, b) => place(a) - place(b)).map((card) => card.element));
  $("#words").oninput = $("#mark").onchange = $("#folder").onchange = refresh;
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
  window.addEventListener("beforeunload", (event) => {
    const card = cards[document.activeElement.closest?.("article")?.dataset.id];
    if (card) save(card);
    if (unsaved) event.preventDefault();
  });
}

start().catch((error) => say(error.message));
