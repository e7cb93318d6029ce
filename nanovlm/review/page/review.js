"use strict";
// A card holds the state of an image as the server has it: text, version, marks. A change names the version that it
// replaces, so a file that somebody else changed is never overwritten. It has an element once it comes near the window:
// the page holds a few sections of cards at a time, as thousands would scroll slowly.

const $ = (selector, root = document) => root.querySelector(selector);
const create = (tag, fields) => Object.assign(document.createElement(tag), fields);
const makeButton = (fields) => create("button", { type: "button", className: "plain", ...fields });
const ORDER = ["failed", "empty", "repeated", "cut", "improbable", "identical", "edited"];
const SECTION = 12; // cards, a multiple of any number of columns
const N_TAGS = 300; // that are listed, the most frequent ones
const cards = []; // by the number of the image
let order = []; // cards, doubtful ones first
let shown = []; // cards that the filters let through
let prompt = null; // of the model, if there is one
let tag = ""; // to filter by
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
  const progress = touched.length === 1 ? 0 : setInterval(() => call("status").then(({ done, total }) =>
    say(`${done.toLocaleString("en")} of ${total.toLocaleString("en")} saved ...`)).catch(() => {}), 700);
  const answer = isLeaving ? call(path, body(), true) : inOrder.then(() => call(path, body()));
  inOrder = answer.then(async (states) => {
    for (const state of states) state.conflict ? clash(cards[state.id], state) : take(cards[state.id], state, true);
    refresh();
    const clashes = states.filter((state) => state.conflict).length;
    say(clashes ? `${clashes} changed outside of this page; look at the notes` : "Saved");
    await showUndo();
  }).catch((error) => {
    say(error.message);
    for (const card of touched) {
      card.isFailed = true;
      note(card, `Not saved: ${error.message}`);
    }
  }).finally(() => clearInterval(progress));
}

async function showUndo() {
  const { undo } = await call("status");
  $("#undo").disabled = !undo;
  $("#undo").textContent = $("#undo").title = undo ? `Undo ${undo}` : "Undo";
}

function say(text) { $("#status").textContent = text; }

function note(card, text, ...buttons) {
  card.note = [text, ...buttons];
  if (!card.element) return;
  const place = $(".note", card.element);
  place.replaceChildren(text, " ", ...buttons.map(([textContent, action]) =>
    makeButton({ textContent, onclick: () => { place.hidden = true; action(); } })));
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
  const identical = `identical to ${card.identical} other${card.identical > 1 ? "s" : ""}`;
  $(".marks", card.element).replaceChildren(...card.marks.map((mark) =>
    create("span", { className: `mark ${mark}`, textContent: mark === "identical" ? identical : mark })));
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
  const byText = Map.groupBy(cards, ({ state }) => state.text);
  const words = $("#words").value.toLowerCase();
  const [mark, folder] = [$("#mark").value, $("#folder").value];
  const next = [];
  for (const card of order) {
    const { state } = card;
    const identical = state.text && !state.is_label ? byText.get(state.text).length - 1 : 0;
    if (identical !== card.identical) { card.identical = identical; paint(card); }
    const isShown = (!tag || tagsOf(state.text).includes(tag)) && (!mark || card.marks.includes(mark)) && (!folder || state.folder === folder.slice(1))
      && `${state.name}\n${state.text}`.toLowerCase().includes(words);
    if (isShown || card.isKept || card.element?.contains(document.activeElement)) next.push(card);
  }
  show(next);
  const byMark = Map.groupBy(cards.flatMap((card) => card.marks), (name) => name);
  for (const option of [...$("#mark").options].slice(1))
    option.text = `${option.value} (${byMark.get(option.value)?.length ?? 0})`;
  $("#title").textContent = `${shown.length.toLocaleString("en")} of ${cards.length.toLocaleString("en")} · ${document.title}`;
  $("#nothing").hidden = shown.length > 0;
  const asked = [$("#words").value && `“${$("#words").value}”`, tag && `the tag “${tag}”`, mark && `the mark ${mark}`];
  $("#nothing p").textContent = `No caption ${folder ? `of ${folder} ` : ""}has ${asked.filter(Boolean).join(" and ")}`;
  countFound();
  showTags();
}

function show(next) {
  if (next.length === shown.length && next.every((card, i) => card === shown[i])) return;
  const main = $("#cards");
  const focused = document.activeElement;
  const size = Number($("#size").value);
  const columns = Math.max(1, Math.floor(main.clientWidth / (size + 284)));
  const height = (Math.max(size, 112) + 30) * Math.ceil(SECTION / columns); // until it is known
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

function edit(hits, edited) { // words of captions, which stay cut if they were
  change("captions?replaced=true", () => hits.map(({ state }) =>
    ({ id: state.id, text: edited(state.text), version: state.version })), hits);
}

function replaceAll() {
  const [text, by] = [$("#find").value, $("#put").value];
  edit(found(), (old) => old.replaceAll(text, () => by));
}

function tagsOf(text) { return text.split(",").map((each) => each.trim()).filter(Boolean); }

function tagged() { // shown cards without the tag that is typed, and those with it
  const name = $("#tag").value.trim();
  const has = (card) => tagsOf(card.state.text).includes(name);
  const isTrigger = $("#first").checked; // alone it is no caption
  return [name, name ? shown.filter((card) => !has(card) && (card.state.text || !isTrigger)) : [], shown.filter(has)];
}

function showTags() {
  if ($("#tags").hidden) return;
  const byTag = Map.groupBy(cards.flatMap(({ state }) => [...new Set(tagsOf(state.text))]), (name) => name);
  const most = [...byTag].sort(([a, { length: n }], [b, { length: m }]) => m - n || a.localeCompare(b));
  const choose = (name) => {
    tag = name === tag ? "" : name;
    $("#tag").value = name;
    filter();
  };
  $("#chips").replaceChildren(...most.slice(0, N_TAGS).map(([name, { length }]) => makeButton({
    textContent: `${name} ${length.toLocaleString("en")}`, ariaPressed: name === tag, onclick: () => choose(name) })));
  const [, without, having] = tagged();
  for (const [name, label, { length }] of [["add", "Add to", without], ["remove", "Remove from", having]]) {
    const button = $(`#tags [name=${name}]`);
    button.disabled = !length;
    button.textContent = `${label} ${length.toLocaleString("en")}`;
  }
}

function addTag() {
  const [name, without] = tagged();
  const isFirst = $("#first").checked;
  edit(without, (text) => text ? isFirst ? `${name}, ${text}` : `${text}, ${name}` : name);
}

function removeTag() {
  const [name, , having] = tagged();
  edit(having, (text) => text.split(",").filter((each) => each.trim() !== name).join(",").trim());
}

function filter() {
  for (const card of cards) card.isKept = false; // what was changed stays in sight until another filter is set
  say("");
  refresh();
}

function open(button) { // one panel at a time; it covers cards, and moves none
  for (const each of document.querySelectorAll("[aria-controls]")) {
    const isOpen = each === button && each.ariaExpanded !== "true";
    each.ariaExpanded = isOpen;
    const panel = $(`#${each.getAttribute("aria-controls")}`);
    panel.hidden = !isOpen;
    if (isOpen) $("input", panel).focus();
  }
  showTags();
}

function resize() {
  document.documentElement.style.setProperty("--picture", `${$("#size").value}px`);
  for (const card of cards) if (card.element) showPicture(card);
}

function showPicture(card) { // sharp at its size
  const kind = $("#size").value > 200 ? "pictures" : "thumbnails";
  $("img", card.element).src = `${kind}/${card.state.id}.jpg`;
}

function again(card) {
  const asked = $("#prompt").value || prompt;
  note(card, "The model looks at it ...");
  change("again", () => ({ id: card.state.id, prompt: asked, version: card.state.version }), [card]);
}

async function unread(card) { // the reason why a picture has no thumbnail
  $("img", card.element).classList.add("unread");
  await call(`thumbnails/${card.state.id}.jpg`).catch((error) => {
    card.unread = error.message;
  });
  if (!card.unread) return;
  note(card, card.unread);
  paint(card);
  refresh();
}

function step(card, by) { return shown[shown.indexOf(card) + by]; }

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
  showPicture(card);
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
  document.title = list.title.split(/[\\/]/).pop();
  $("#title").title = list.title;
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
  $("#words").oninput = $("#mark").onchange = $("#folder").onchange = filter;
  $("#nothing button").onclick = () => {
    tag = $("#words").value = $("#mark").value = $("#folder").value = "";
    filter();
  };
  for (const button of document.querySelectorAll("[aria-controls]")) button.onclick = () => open(button);
  $("#tag").oninput = $("#first").onchange = showTags;
  $("#tags form").onsubmit = addTag;
  $("#tags [name=remove]").onclick = removeTag;
  if (matchMedia("(max-width: 30rem)").matches) $("#size").value = 88;
  $("#size").oninput = resize;
  $("#find").oninput = countFound;
  $("#replace").onsubmit = replaceAll;
  $("#undo").onclick = () => change("undo", () => ({}), []);
  $("#large button").onclick = () => $("#large").close();
  document.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") open();
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
  await showUndo();
  const saveAll = () => cards.filter(isTyped).forEach((card) => save(card, true));
  window.addEventListener("pagehide", saveAll); // what was typed less than a second ago
  document.addEventListener("visibilitychange", () => { if (document.hidden) saveAll(); });
  window.addEventListener("beforeunload", (event) => {
    if (cards.some((card) => card.isFailed && isTyped(card))) event.preventDefault();
  });
}

start().catch((error) => say(error.message));
