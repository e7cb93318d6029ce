"use strict";

const byId = (id) => document.getElementById(id);
const create = (parent, tag, fields = {}) => parent.appendChild(Object.assign(document.createElement(tag), fields));
const on = (id, type, listener) => byId(id).addEventListener(type, listener);
const DEFAULT_QUESTION = byId("question").placeholder; // asked if the first question about an image is left empty
// images: { url: data URL, remove: its button } of those that the next question shows; messages: those before it;
// camera: its stream, whose newest frame is what the next question is about
const chat = { model: null, images: [], messages: [], generation: null, camera: null, apiKey: sessionStorage.getItem("key") ?? "" };

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(chat.apiKey && { Authorization: `Bearer ${chat.apiKey}` }) };
  const response = await fetch(path, { headers, ...options });
  byId("key-form").hidden = response.status !== 401;
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  throw Object.assign(new Error(message), { needsKey: response.status === 401 });
}

async function loadModel() {
  const response = await request("/v1/models");
  const [model] = (await response.json()).data;
  chat.model = model.id;
  byId("model").textContent = model.id === "nanovlm" ? "the embedded model" : model.id;
  byId("note").textContent = toSentence(model.description);
  if (chat.apiKey) sessionStorage.setItem("key", chat.apiKey); // for a reload; it ends with the tab
  showError("");
}

function showError(message) {
  byId("error").textContent = toSentence(message);
}

function showFailure(error) {
  if (!error.needsKey) return showError(error instanceof TypeError ? "The server cannot be reached." : error.message);
  byId("api-key").focus();
  showError(chat.apiKey && "This is not the server's API key.");
}

function toSentence(text) {
  return text && text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const onerror = () => reject(new Error(`${file.name || "The image"} cannot be read.`));
    const reader = Object.assign(new FileReader(), { onload: () => resolve(reader.result), onerror });
    reader.readAsDataURL(file);
  });
}

async function addImages(files) {
  try {
    for (const file of files) {
      const url = await readFile(file);
      const isText = /^[\t-\r -~]*$/.test(atob(url.slice(url.indexOf(",") + 1, url.indexOf(",") + 65)));
      if (isText) throw new Error(`The file ${file.name} is not an image.`);
      addImage(file, url);
    }
  } catch (error) {
    return showError(error.message);
  }
  if (!files.length) return;
  showError("");
  byId("announcement").textContent = "The image is loaded; ask about it.";
  byId("question").focus();
}

function addImage(file, url) {
  const item = create(byId("images"), "li");
  const shown = create(item, "img", { src: URL.createObjectURL(file), alt: `Your image, ${file.name}` });
  shown.addEventListener("load", () => URL.revokeObjectURL(shown.src));
  shown.addEventListener("error", () => {
    const textContent = `Browsers cannot show ${file.name || "this image"}, but you can ask about it.`;
    shown.replaceWith(create(item, "p", { textContent }));
  });
  const remove = create(item, "button", { type: "button", textContent: "×" });
  remove.setAttribute("aria-label", `Remove ${file.name || "the image"}`);
  remove.addEventListener("click", () => {
    item.remove();
    chat.images = chat.images.filter((image) => image.remove !== remove);
    showImages();
    byId(hasImages() ? "question" : "file").focus();
  });
  chat.images.push({ url, remove });
  showImages();
}

function hasImages() {
  return byId("images").hasChildNodes();
}

function showImages() {
  const any = hasImages() || chat.camera !== null;
  for (const id of ["images", "add-image"]) byId(id).hidden = !any || chat.camera !== null;
  for (const id of ["file", "drop-zone", "sample"]) byId(id).hidden = any;
  byId("camera").hidden = chat.camera === null;
  byId("start-over").hidden = !any;
}

async function openCamera() {
  try {
    chat.camera = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    return showError("The camera cannot be used; allow it, and open this page by https or on the server's own machine.");
  }
  byId("viewfinder").srcObject = chat.camera;
  showImages();
  showError("");
  byId("question").focus();
}

function forget() {
  Object.assign(chat, { images: [], messages: [] });
  for (const id of ["images", "conversation"]) byId(id).replaceChildren();
}

function startOver() {
  chat.generation?.abort();
  for (const track of chat.camera?.getTracks() ?? []) track.stop();
  chat.camera = byId("viewfinder").srcObject = null;
  byId("again").checked = false;
  forget();
  byId("question").placeholder = DEFAULT_QUESTION;
  showImages();
  showError("");
  byId("file").focus();
}

function readSettings() {
  const filled = [...byId("settings-form").elements].filter((input) => input.value);
  return Object.fromEntries(filled.map((input) => [input.name, Number(input.value)]));
}

async function copyText(element, button) {
  try {
    await navigator.clipboard.writeText(element.textContent); // undefined on an address without https
  } catch {
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

async function* streamAnswer(messages, signal) {
  if (!chat.model) await loadModel();
  const body = JSON.stringify({ model: chat.model, messages, stream: true, ...readSettings() });
  const response = await request("/v1/chat/completions", { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader(); // Safari has no for await of it
  let buffer = "";
  for (;;) {
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

async function ask(question) {
  const turn = create(byId("conversation"), "li");
  create(turn, "p", { className: "question", textContent: question });
  const answer = create(turn, "p", { className: "answer generating" });
  const copy = create(turn, "button", { type: "button", className: "plain", textContent: "Copy", hidden: true });
  copy.addEventListener("click", () => copyText(answer, copy));
  showEnd();
  const start = Date.now();
  const stage = () => (answer.dataset.stage = `Reading the image and question, ${Math.round((Date.now() - start) / 1000)} s`);
  const timer = setInterval(() => (answer.textContent ? clearInterval(timer) : stage()), 1000);
  stage();
  const generation = new AbortController();
  setGeneration(generation);
  showError("");
  const images = chat.images.splice(0);
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  const asked = { role: "user", content: parts.length ? [...parts, { type: "text", text: question }] : question };
  for (const { remove } of images) remove.hidden = true; // the answer is about it
  try {
    for await (const text of streamAnswer([...chat.messages, asked], generation.signal)) {
      answer.textContent += text;
      if (text) delete answer.dataset.stage;
      showEnd();
    }
    if (!answer.textContent) showError("The answer is empty; ask differently.");
  } catch (error) {
    if (!generation.signal.aborted) showFailure(error);
  }
  clearInterval(timer);
  answer.classList.remove("generating");
  setGeneration(null);
  if (!turn.isConnected) return; // started over meanwhile
  if (answer.textContent) {
    chat.messages.push(asked, { role: "assistant", content: answer.textContent });
    copy.hidden = false;
    showEnd();
    if (!chat.camera) byId("question").placeholder = "Ask something else.";
    byId("announcement").textContent = answer.textContent; // at once: screen readers interrupt text that changes
  } else {
    for (const { remove } of images) remove.hidden = false;
    chat.images.unshift(...images);
    turn.remove();
    byId("question").value ||= question;
  }
}

async function askCamera(question) {
  const video = byId("viewfinder"), canvas = document.createElement("canvas");
  do {
    const start = Date.now();
    Object.assign(canvas, { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    forget();
    chat.images = [{ url: canvas.toDataURL("image/jpeg", 0.9), remove: {} }];
    await ask(question);
    if (byId("error").textContent) return;
    await new Promise((resolve) => setTimeout(resolve, 1000 - (Date.now() - start)));
  } while (chat.camera && byId("again").checked && !chat.generation);
}

function showEnd() {
  scrollTo({ top: document.documentElement.scrollHeight }); // the composer sticks to the end and covers nothing there
}

function setGeneration(generation) {
  chat.generation = generation;
  byId("send").hidden = generation !== null;
  byId("stop").hidden = generation === null;
}

on("ask-form", "submit", (event) => {
  event.preventDefault();
  if (chat.generation) return;
  if (!hasImages() && !chat.camera) return showError("There is no image to ask about; choose one first.");
  if (!byId("settings-form").checkValidity()) {
    byId("settings").open = true;
    return void byId("settings-form").reportValidity();
  }
  const question = byId("question").value.trim() || (chat.camera || chat.images.length ? DEFAULT_QUESTION : "");
  if (!question) return showError("Ask something.");
  byId("question").value = "";
  chat.camera ? askCamera(question) : ask(question);
});
on("question", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask-form").requestSubmit();
});
on("stop", "click", () => {
  byId("again").checked = false;
  chat.generation?.abort();
  byId("question").focus();
});
on("start-over", "click", startOver);
on("open-camera", "click", openCamera);
on("add-image", "click", () => byId("file").click());
on("file", "change", async () => {
  await addImages([...byId("file").files]);
  byId("file").value = ""; // or the same file could not be chosen again
});
on("settings-form", "submit", (event) => event.preventDefault());
on("settings-form", "input", () => localStorage.setItem("settings", JSON.stringify(readSettings())));
on("settings", "toggle", showEnd);
for (const [name, value] of Object.entries(JSON.parse(localStorage.getItem("settings")) ?? {}))
  if (byId("settings-form").elements[name]) byId("settings-form").elements[name].value = value;
byId("sample").firstElementChild.addEventListener("click", async () => {
  const response = await fetch("/sample.png");
  addImages([new File([await response.blob()], "sample.png", { type: "image/png" })]);
});
on("key-form", "submit", (event) => {
  event.preventDefault();
  chat.apiKey = byId("api-key").value;
  loadModel().then(() => byId("question").focus(), showFailure);
});
document.addEventListener("keydown", (event) => event.key === "Escape" && chat.generation?.abort());
document.addEventListener("paste", (event) => {
  const images = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) return;
  event.preventDefault();
  addImages(images);
});
for (const type of ["dragover", "dragleave", "drop"])
  document.addEventListener(type, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", type === "dragover");
    if (type === "drop") addImages([...event.dataTransfer.files]);
  });
loadModel().catch(showFailure);
