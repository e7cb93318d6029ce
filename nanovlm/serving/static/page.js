"use strict";

const byId = (id) => document.getElementById(id);
const DEFAULT_QUESTION = byId("question").placeholder; // asked if the first question about an image is left empty
// images: { url: data URL, turn: index of the turn that shows it, null for the next one }; turns: [question, answer]
const chat = { model: null, images: [], turns: [], generation: null, apiKey: "" };

function requestHeaders() {
  return { "Content-Type": "application/json", ...(chat.apiKey && { Authorization: `Bearer ${chat.apiKey}` }) };
}

async function loadModel() {
  const response = await fetch("/v1/models", { headers: requestHeaders() });
  byId("key-form").hidden = response.status !== 401;
  if (response.status === 401) {
    byId("api-key").focus();
    if (!chat.apiKey) return showError("");
    throw new Error("This is not the server's API key.");
  }
  if (!response.ok) throw await responseError(response);
  const [model] = (await response.json()).data;
  chat.model = model.id;
  byId("model").textContent = model.id === "nanovlm" ? "the embedded model" : model.id;
  byId("note").textContent = toSentence(model.description);
  showError("");
}

async function responseError(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
}

function showError(message) {
  byId("error").textContent = toSentence(message);
}

function toSentence(text) {
  return text && text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onerror = () => reject(new Error(`${file.name || "The image"} cannot be read.`));
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(file);
  });
}

async function addImages(files) {
  try {
    for (const file of files) addImage(file, await readFile(file));
  } catch (error) {
    return showError(error.message);
  }
  if (!files.length) return;
  showError("");
  showImages();
  byId("announcement").textContent = "The image is loaded; ask about it.";
  byId("question").focus();
}

function addImage(file, url) {
  const image = { url, turn: null };
  const item = document.createElement("li");
  const image = item.appendChild(document.createElement("img"));
  image.src = URL.createObjectURL(file);
  image.alt = file.name ? `Your image, ${file.name}` : "Your image";
  image.addEventListener("error", () => {
    const note = document.createElement("p");
    note.className = "no-preview";
    note.textContent = `Browsers cannot show ${file.name || "this image"}, but you can ask about it.`;
    image.replaceWith(note);
  });
  const remove = item.appendChild(document.createElement("button"));
  Object.assign(remove, { type: "button", className: "remove", textContent: "×" });
  remove.setAttribute("aria-label", `Remove ${file.name || "the image"}`);
  remove.addEventListener("click", () => {
    URL.revokeObjectURL(image.src);
    item.remove();
    chat.images.splice(chat.images.indexOf(image), 1);
    showImages();
    byId(chat.images.length ? "question" : "file").focus();
  });
  image.remove = remove;
  chat.images.push(image);
  byId("images").append(item);
}

function showImages() {
  const any = chat.images.length > 0;
  for (const id of ["images", "add-image"]) byId(id).hidden = !any;
  byId("start-over").hidden = !any && !chat.turns.length;
  for (const id of ["file", "drop-zone", "sample"]) byId(id).hidden = any;
  for (const image of chat.images) image.remove.hidden = image.turn !== null; // the answers are about it
}

function startOver() {
  chat.generation?.abort();
  Object.assign(chat, { images: [], turns: [] });
  for (const id of ["images", "conversation"]) byId(id).replaceChildren();
  byId("question").placeholder = DEFAULT_QUESTION;
  byId("file").value = "";
  showImages();
  showError("");
  byId("file").focus();
}

function buildMessages(question) {
  const messages = chat.turns.flatMap(([question, answer]) => [
    { role: "user", content: question },
    { role: "assistant", content: answer },
  ]);
  messages.push({ role: "user", content: question });
  for (const { url, turn } of [...chat.images].reverse()) {
    const message = messages[2 * (turn ?? chat.turns.length)];
    if (typeof message.content === "string") message.content = [{ type: "text", text: message.content }];
    message.content.unshift({ type: "image_url", image_url: { url } });
  }
  return messages;
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

async function* streamText(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
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

function addTurn(question) {
  const turn = document.createElement("li");
  const [questionText, answer] = ["question", "answer"].map((className) => {
    const paragraph = document.createElement("p");
    paragraph.className = className;
    return turn.appendChild(paragraph);
  });
  questionText.textContent = question;
  const copy = turn.appendChild(document.createElement("button"));
  Object.assign(copy, { type: "button", className: "copy plain", textContent: "Copy", hidden: true });
  copy.addEventListener("click", () => copyText(answer, copy));
  byId("conversation").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return { turn, answer, copy };
}

async function generate(question, signal, onText) {
  if (!chat.model) await loadModel();
  const asked = { model: chat.model, messages: buildMessages(question), stream: true, ...readSettings() };
  const body = JSON.stringify(asked);
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: requestHeaders(), body, signal });
  if (!response.ok) throw await responseError(response);
  for await (const text of streamText(response)) onText(text);
}

async function ask(question) {
  const { turn, answer, copy } = addTurn(question);
  const generation = (chat.generation = new AbortController());
  answer.classList.add("generating");
  showError("");
  setBusy(true);
  try {
    await generate(question, generation.signal, (text) => {
      answer.textContent += text;
      turn.scrollIntoView({ block: "nearest" });
    });
  } catch (error) {
    if (!generation.signal.aborted)
      showError(error instanceof TypeError ? "The server cannot be reached." : error.message);
  }
  answer.classList.remove("generating");
  chat.generation = null;
  setBusy(false);
  if (!turn.isConnected) return; // started over meanwhile
  if (answer.textContent) {
    for (const image of chat.images) image.turn ??= chat.turns.length;
    chat.turns.push([question, answer.textContent]);
    showImages();
    copy.hidden = false;
    byId("question").placeholder = "Ask something else.";
    byId("announcement").textContent = answer.textContent; // at once: screen readers interrupt text that changes
  } else {
    if (!generation.signal.aborted && !byId("error").textContent) showError("The answer is empty; ask differently.");
    turn.remove();
    byId("question").value ||= question;
    fitQuestion();
  }
}

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

function fitQuestion() {
  const field = byId("question");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.generation) return;
  if (!chat.images.length) return showError("There is no image to ask about; choose one first.");
  if (!byId("settings-form").checkValidity()) {
    byId("settings").open = true;
    return void byId("settings-form").reportValidity();
  }
  const isNew = chat.images.some(({ turn }) => turn === null);
  const question = byId("question").value.trim() || (isNew ? DEFAULT_QUESTION : "");
  if (!question) return showError("Ask something.");
  byId("question").value = "";
  fitQuestion();
  ask(question);
});
byId("question").addEventListener("input", fitQuestion);
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask-form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && chat.generation?.abort());
byId("stop").addEventListener("click", () => {
  chat.generation?.abort();
  byId("question").focus();
});
byId("start-over").addEventListener("click", startOver);
byId("add-image").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", async () => {
  await addImages([...byId("file").files]);
  byId("file").value = ""; // or the same file could not be chosen again
});
byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
byId("sample").firstElementChild.addEventListener("click", async () => {
  const response = await fetch("/sample.png");
  addImages([new File([await response.blob()], "sample.png", { type: "image/png" })]);
});
document.addEventListener("paste", (event) => {
  const images = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (images.length) {
    event.preventDefault();
    addImages(images);
  }
});
for (const type of ["dragover", "dragleave", "drop"])
  document.addEventListener(type, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", type === "dragover");
    if (type === "drop") addImages([...event.dataTransfer.files]);
  });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.apiKey = byId("api-key").value;
  loadModel().then(() => byId("question").focus(), (error) => showError(error.message));
});
loadModel().catch((error) => showError(error.message));
