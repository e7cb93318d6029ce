"use strict";

const MAX_SIDE = 2048; // pixels: models see no more of a photo, and four of them fit into a request
const MAX_BYTES = 2 ** 20; // a file that is small in both is sent as it is
const SHOWN = /;base64,(iVBOR|\/9j\/|R0lGOD|UklGR|Qk)/; // how PNG, JPEG, GIF, WebP and BMP begin
const byId = (id) => document.getElementById(id);
const create = (parent, tag, fields) => parent.appendChild(Object.assign(document.createElement(tag), fields));
const makeButton = (parent, textContent, action) =>
  create(parent, "button", { type: "button", className: "plain", textContent }).addEventListener("click", action);
const on = (id, type, listener) => byId(id).addEventListener(type, listener);
const toSentence = (text) => text && text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
const asError = ({ message, code }) => Object.assign(new Error(message), { code });
const plural = (n, noun) => (n === 1 ? noun : `${n} ${noun}s`);
// turns: { question, answer, item }, all about the images that are shown; edited: the turn to ask anew
const chat = { turns: [], edited: null, generation: null };
let apiKey = sessionStorage.getItem("key") ?? "";

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const response = await fetch(path, { headers, ...options });
  const isLocked = response.status === 401;
  byId("key-form").hidden = !isLocked;
  if (isLocked) byId("api-key").focus();
  if (response.ok) return response;
  if (isLocked && !apiKey) throw new Error("");
  const body = await response.json().catch(() => null);
  throw asError(body?.error ?? { message: `the server answered with status ${response.status}` });
}

async function loadModel() {
  const [model] = (await (await request("/v1/models")).json()).data;
  byId("model").textContent = model.id === "nanovlm" ? "the embedded model" : model.id;
  byId("note").textContent = toSentence(model.description);
  byId("question").placeholder = model.default_prompt;
  sessionStorage.setItem("key", apiKey); // for a reload; it ends with the tab
  showError("");
}

// Say what is wrong and, where it is known, offer what to do about it.
function showError(error, remedy, action) {
  const message = error instanceof TypeError ? "the server cannot be reached" : error.message ?? error;
  byId("error").textContent = toSentence(message);
  if (!remedy) return;
  makeButton(byId("error"), remedy, action);
}

// A data URL of an image file: as it is, or scaled to MAX_SIDE and on white where it is transparent.
async function readFile(file) {
  if (!file.size) throw new Error(`${file.name} is empty, or a folder`);
  if (file.type && !file.type.startsWith("image/")) throw new Error(`${file.name} is not an image`);
  const picture = await createImageBitmap(file).catch(() => null); // upright; null for what browsers cannot show
  const factor = picture ? Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height)) : 1;
  if (picture && (factor < 1 || file.size > MAX_BYTES)) {
    const canvas = document.createElement("canvas");
    canvas.width = Math.round(picture.width * factor);
    canvas.height = Math.round(picture.height * factor);
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/jpeg", 0.92);
  }
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

async function addFiles(files) {
  try {
    for (const file of files) addImage(await readFile(file), file.name);
  } catch (error) {
    showError(error);
  }
}

function addImage(url, name) {
  const item = create(byId("images"), "li", { url });
  const shown = create(item, "img", { src: url, alt: `Your image, ${name}` });
  const textContent = SHOWN.test(url) ? `${name} is damaged.` : `Browsers cannot show ${name}, but you can ask about it.`;
  shown.addEventListener("error", () => shown.replaceWith(create(item, "p", { textContent, className: "small" })));
  const remove = create(item, "button", { type: "button", textContent: "×", ariaLabel: `Remove ${name}` });
  remove.addEventListener("click", () => item.remove() ?? byId("question").focus());
  showError("");
  byId("announcement").textContent = "The image is loaded; ask about it.";
  byId("question").focus();
}

function startOver() {
  chat.generation?.abort();
  Object.assign(chat, { turns: [], edited: null });
  for (const id of ["images", "conversation"]) byId(id).replaceChildren();
  byId("temperature").value = byId("temperature").defaultValue;
  byId("question").value = "";
  showError("");
  byId("file").focus();
}

async function* streamAnswer(messages, signal) {
  const body = JSON.stringify({ messages, stream: true, temperature: Number(byId("temperature").value) });
  const response = await request("/v1/chat/completions", { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader(); // Safari has no for await of it
  for (let buffer = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const { error, choices } = JSON.parse(data);
      if (error) throw asError(error);
      yield choices[0]?.delta.content ?? "";
    }
  }
}

function messagesOf(turns) {
  const messages = turns.flatMap(({ question, answer }) =>
    [{ role: "user", content: question }, { role: "assistant", content: answer }]);
  messages.pop(); // the answer to come
  const images = [...byId("images").children].map(({ url }) => ({ type: "image_url", image_url: { url } }));
  messages[0].content = [...images, { type: "text", text: messages[0].content }];
  return messages;
}

// Ask a question after the first n turns. Those behind them go, but come back if there is no answer.
async function ask(question, n = chat.turns.length) {
  const replaced = chat.turns.splice(n);
  for (const { item } of replaced) item.remove();
  const turn = { question, answer: "", item: create(byId("conversation"), "li") };
  chat.turns.push(turn);
  create(turn.item, "p", { className: "question", textContent: question });
  const answer = create(turn.item, "p", { className: "answer generating" });
  const askAgain = () => (turn === chat.turns.at(-1) ? ask(question, chat.turns.length - 1) : edit(turn));
  makeButton(turn.item, "Ask again", () => chat.generation || askAgain());
  makeButton(turn.item, "Edit", () => chat.generation || edit(turn));
  const generation = setGeneration(new AbortController());
  let problem = null;
  let n_less = 0;
  showError("");
  try {
    for await (const text of streamAnswer(messagesOf(chat.turns), generation.signal)) {
      answer.textContent = turn.answer += text;
      turn.item.scrollIntoView({ block: "nearest" });
    }
    if (!turn.answer) problem = new Error("the answer is empty; ask differently");
  } catch (error) {
    if (!generation.signal.aborted) problem = error;
    if (n && error.code === "context_length_exceeded" && (await fits(turn))) n_less = Math.ceil(n / 2);
  }
  answer.classList.remove("generating");
  if (chat.generation === generation) setGeneration(null);
  byId("announcement").textContent = turn.answer; // at once: screen readers interrupt text that changes
  if (!turn.item.isConnected) return;
  if (!turn.answer) takeBack(turn, replaced);
  const remedy = n_less && `Forget the first ${plural(n_less, "turn")} and ask again`;
  if (problem) showError(problem, remedy, () => forget(n_less));
}

// Ask whether a turn has room without those before it.
async function fits(turn) {
  const body = JSON.stringify({ messages: messagesOf([turn]), max_tokens: 1 });
  return request("/v1/chat/completions", { method: "POST", body }).then(() => true, () => false);
}

function takeBack({ item, question }, replaced) {
  chat.turns.pop();
  chat.turns.push(...replaced);
  item.replaceWith(...replaced.map((turn) => turn.item));
  const next = byId("question").value || question; // what was typed meanwhile stays
  edit(replaced[0] ?? null);
  byId("question").value = next;
}

function forget(n) {
  for (const { item } of chat.turns.splice(0, n)) item.remove();
  byId("ask-form").requestSubmit();
}

function edit(turn) {
  if (!turn && !chat.edited) return;
  chat.edited?.item.classList.remove("edited");
  chat.edited = turn;
  byId("question").value = turn?.question ?? "";
  showError("");
  if (!turn) return;
  turn.item.classList.add("edited");
  byId("question").focus();
  const n_later = chat.turns.length - 1 - chat.turns.indexOf(turn);
  const answer = n_later ? `, its answer and the ${plural(n_later, "turn")} after it` : " and its answer";
  showError(`asking replaces this question${answer}`, "Keep them", () => edit(null));
}

function setGeneration(generation) {
  document.body.classList.toggle("busy", generation !== null);
  return (chat.generation = generation);
}

on("ask-form", "submit", (event) => {
  event.preventDefault();
  if (chat.generation || !byId("temperature").reportValidity()) return;
  if (!byId("images").children.length) return showError("there is no image to ask about; choose one first");
  const n = chat.edited ? chat.turns.indexOf(chat.edited) : chat.turns.length;
  const question = byId("question").value.trim() || byId("question").placeholder;
  edit(null);
  byId("question").value = "";
  ask(question, n);
});
on("question", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask-form").requestSubmit();
});
on("stop", "click", () => chat.generation?.abort());
on("start-over", "click", startOver);
on("add-image", "click", () => byId("file").click());
on("camera", "click", () => byId("camera-file").click());
for (const id of ["file", "camera-file"])
  on(id, "change", async ({ target }) => {
    await addFiles([...target.files]);
    target.value = ""; // or the same file could not be chosen again
  });
on("sample", "click", async () => {
  const file = await (await fetch("/sample.png")).blob();
  addFiles([new File([file], "sample.png", { type: "image/png" })]);
});
on("key-form", "submit", (event) => {
  event.preventDefault();
  apiKey = byId("api-key").value;
  loadModel().then(() => byId("question").focus(), showError);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.generation ? chat.generation.abort() : edit(null);
});
document.addEventListener("paste", (event) => addFiles([...event.clipboardData.files]));
for (const type of ["dragover", "dragleave", "drop"])
  document.addEventListener(type, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", type === "dragover");
    if (type === "drop") addFiles([...event.dataTransfer.files]);
  });
loadModel().catch(showError);
