"use strict";

const MAX_SIDE = 2048; // pixels: models see no more of a photo, and four of them fit into a request
const MAX_BYTES = 2 ** 20; // a file that is small in both is sent as it is
const byId = (id) => document.getElementById(id);
const create = (parent, tag, fields) => parent.appendChild(Object.assign(document.createElement(tag), fields));
const on = (id, type, listener) => byId(id).addEventListener(type, listener);
// turns: { question, answer, item }, all about the images that are shown; edited: the turn to ask anew
const chat = { turns: [], edited: null, generation: null, camera: null };
let apiKey = sessionStorage.getItem("key") ?? "";

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const response = await fetch(path, { headers, ...options });
  byId("key-form").hidden = response.status !== 401;
  if (response.ok) return response;
  if (response.status === 401) byId("api-key").focus();
  if (response.status === 401 && !apiKey) throw new Error("");
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
}

async function loadModel() {
  const [model] = (await (await request("/v1/models")).json()).data;
  byId("model").textContent = model.id === "nanovlm" ? "the embedded model" : model.id;
  byId("note").textContent = toSentence(model.description);
  sessionStorage.setItem("key", apiKey); // for a reload; it ends with the tab
  showError("");
}

function toSentence(text) {
  return text && text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

function showError(error) {
  const message = error instanceof TypeError ? "the server cannot be reached" : error.message ?? error;
  byId("error").textContent = toSentence(message);
}

// A data URL of a picture or video frame, at most MAX_SIDE wide and high, on white where it is transparent.
function scale(picture, width, height) {
  const factor = Math.min(1, MAX_SIDE / Math.max(width, height));
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.round(width * factor), height: Math.round(height * factor) });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

async function readFile(file) {
  const picture = await createImageBitmap(file).catch(() => null); // upright; null for what browsers cannot show
  const isSmall = !picture || (file.size <= MAX_BYTES && Math.max(picture.width, picture.height) <= MAX_SIDE);
  if (!isSmall) return scale(picture, picture.width, picture.height);
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
  const textContent = `Browsers cannot show ${name}, but you can ask about it.`;
  shown.addEventListener("error", () => shown.replaceWith(create(item, "p", { textContent, className: "small" })));
  const remove = create(item, "button", { type: "button", textContent: "×", ariaLabel: `Remove ${name}` });
  remove.addEventListener("click", () => item.remove() ?? byId("question").focus());
  showError("");
  byId("announcement").textContent = "The image is loaded; ask about it.";
  byId("question").focus();
}

async function openCamera() {
  try {
    chat.camera = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    return showError("the camera cannot be used; allow it, and open this page by https or as localhost");
  }
  byId("viewfinder").srcObject = chat.camera;
  byId("shown").classList.add("live");
  byId("take").focus();
}

function closeCamera() {
  for (const track of chat.camera?.getTracks() ?? []) track.stop();
  chat.camera = byId("viewfinder").srcObject = null;
  byId("shown").classList.remove("live");
}

function startOver() {
  chat.generation?.abort();
  Object.assign(chat, { turns: [], edited: null });
  for (const id of ["images", "conversation"]) byId(id).replaceChildren();
  byId("temperature").value = byId("temperature").defaultValue;
  byId("question").value = "";
  closeCamera();
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
      if (error) throw new Error(error.message);
      yield choices[0]?.delta.content ?? "";
    }
  }
}

function messagesOf(turns) {
  const messages = [];
  for (const { question, answer } of turns)
    messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
  messages.pop();
  const images = [...byId("images").children].map(({ url }) => ({ type: "image_url", image_url: { url } }));
  messages[0].content = [...images, { type: "text", text: messages[0].content }];
  return messages;
}

// Ask a question after the first n turns; those behind them go.
async function ask(question, n = chat.turns.length) {
  for (const { item } of chat.turns.splice(n)) item.remove();
  const turn = { question, answer: "", item: create(byId("conversation"), "li") };
  chat.turns.push(turn);
  create(turn.item, "p", { className: "question", textContent: question });
  const answer = create(turn.item, "p", { className: "answer generating" });
  const actions = { "Ask again": () => ask(question, n), Edit: () => edit(turn) };
  for (const [textContent, action] of Object.entries(actions))
    create(turn.item, "button", { type: "button", className: "plain", textContent })
      .addEventListener("click", () => chat.generation || action());
  const start = Date.now();
  const seconds = () => Math.round((Date.now() - start) / 1000);
  const show = () => (answer.dataset.stage = turn.answer ? "" : `Reading, ${seconds()} s`);
  const timer = setInterval(show, 1000);
  const generation = setGeneration(new AbortController());
  show();
  showError("");
  try {
    for await (const text of streamAnswer(messagesOf(chat.turns), generation.signal)) {
      answer.textContent = turn.answer += text;
      show();
      turn.item.scrollIntoView({ block: "nearest" });
    }
    if (!turn.answer) showError("the answer is empty; ask differently");
  } catch (error) {
    if (!generation.signal.aborted) showError(error);
  }
  clearInterval(timer);
  answer.classList.remove("generating");
  if (chat.generation === generation) setGeneration(null);
  byId("announcement").textContent = turn.answer; // at once: screen readers interrupt text that changes
  if (turn.answer || !turn.item.isConnected) return;
  chat.turns.pop();
  turn.item.remove();
  byId("question").value ||= question;
}

function edit(turn) {
  cancelEdit();
  chat.edited = turn;
  turn.item.classList.add("edited");
  byId("question").value = turn.question;
  byId("question").focus();
}

function cancelEdit() {
  chat.edited?.item.classList.remove("edited");
  chat.edited = null;
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
  byId("question").value = "";
  cancelEdit();
  ask(question, n);
});
on("question", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask-form").requestSubmit();
});
on("stop", "click", () => chat.generation?.abort());
on("start-over", "click", startOver);
on("camera", "click", openCamera);
on("take", "click", () => {
  const video = byId("viewfinder");
  const url = scale(video, video.videoWidth, video.videoHeight);
  closeCamera();
  addImage(url, "from the camera");
});
on("add-image", "click", () => byId("file").click());
on("file", "change", async () => {
  await addFiles([...byId("file").files]);
  byId("file").value = ""; // or the same file could not be chosen again
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
  if (event.key === "Escape") chat.generation ? chat.generation.abort() : cancelEdit();
});
document.addEventListener("paste", (event) => addFiles([...event.clipboardData.files]));
for (const type of ["dragover", "dragleave", "drop"])
  document.addEventListener(type, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", type === "dragover");
    if (type === "drop") addFiles([...event.dataTransfer.files]);
  });
loadModel().catch(showError);
